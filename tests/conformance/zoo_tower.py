"""A vision tower that sees nothing, for Gemma 3n, whose own comes from a package that is not installed (timm).

The language model is tried on text alone, for which any tower does.
"""

from functools import cache

from transformers import AutoModel, Gemma3nVisionConfig, PreTrainedConfig, PreTrainedModel


@cache
def configuration() -> PreTrainedConfig:
    """The configuration of the tower, which `AutoModel` knows from here on."""

    class BlindTowerConfig(Gemma3nVisionConfig):
        model_type = "blind_tower"

    class BlindTower(PreTrainedModel):
        config_class = BlindTowerConfig

        def __init__(self, config: BlindTowerConfig) -> None:
            super().__init__(config)
            self.post_init()

    BlindTower.__module__ = PreTrainedModel.__module__  # it stands for a layer of a library, not for somebody's own
    AutoModel.register(BlindTowerConfig, BlindTower)
    return BlindTowerConfig(hidden_size=64)
