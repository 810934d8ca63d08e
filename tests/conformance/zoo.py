"""A tiny, seeded model of each causal language model type that the installed transformers knows.

The list of types is transformers' own. A configuration starts from its class's defaults; sizes are cut down by name
(`zoo_settings.SIZES`, read through `attribute_map`), per-layer lists to the first layer of each kind, and what that
does not find is in `zoo_settings.SETTINGS`. Matrices are drawn with a standard deviation of 0.2, so that keys and
values matter.
"""

import copy
import inspect
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModel, Gemma3nVisionConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from . import zoo_settings

VARIANTS: tuple[str, ...] = tuple(zoo_settings.VARIANTS)


class CannotBuildError(Exception):
    """No tiny model of this type can be made, or none that a cache could be tried on; the message says why."""


def model_types() -> list[str]:
    """All types with a causal language model, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(name: str, seed: int = 0) -> PreTrainedModel:
    """A new tiny model of a type, or of a variant ("type@variant"): fp32, eval, no eos, pads are id 0.

    Raises:
        CannotBuildError: it has no tiny model; the message says why.
        KeyError: unknown name.
    """
    if name in zoo_settings.CANNOT_BUILD:
        raise CannotBuildError(f"{name}: {zoo_settings.CANNOT_BUILD[name]}")
    return instantiate(*configuration(name), seed)


def instantiate(model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A seeded model of a tiny configuration."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(torch.float32).eval()
        for name, parameter in model.named_parameters():  # not every model heeds initializer_range
            if name.endswith("A_log"):
                parameter.data.sub_(_SLOWER)
            elif parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.2)
    for special in ("bos_token_id", "eos_token_id", "forced_eos_token_id", "forced_bos_token_id"):
        setattr(model.generation_config, special, None)
    model.generation_config.pad_token_id = 0
    return model


def draw_biases(model: PreTrainedModel, seed: int = 0) -> None:
    """Draw what most models begin with zeros of: the biases of projections and convolutions."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    for module in model.modules():
        bias = getattr(module, "bias", None)
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv1d)) and bias is not None:
            torch.nn.init.normal_(bias, std=0.2, generator=generator)


_SLOWER = 4.0  # so much less than begun with, so that a state remembers the last hundreds of tokens


def extra_inputs(name: str, input_ids: Tensor) -> dict[str, Tensor]:
    """What a variant's calls pass beside tokens and mask: token types of 1 for the "@token_types" ones."""
    return {"token_type_ids": torch.ones_like(input_ids)} if name.endswith("@token_types") else {}


def configuration(name: str) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """The class that transformers maps a type to, and the tiny configuration of a type or variant for it."""
    model_type = name.split("@")[0]
    changes = copy.deepcopy(zoo_settings.SETTINGS.get(model_type, {}))
    if name != model_type:
        changes |= copy.deepcopy(zoo_settings.VARIANTS[name])
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    if model_type == "gemma3n":
        changes["vision_config"] = _blind_tower()
    model_class = getattr(transformers, class_name if isinstance(class_name, str) else class_name[0])
    config_class = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])
    decoder_class = model_class.config_class
    if config_class.sub_configs and not issubclass(config_class, decoder_class):
        config_class = decoder_class  # the model is the text decoder of a composite one
        changes = copy.deepcopy(zoo_settings.SETTINGS.get(config_class.model_type, {})) | changes
    return model_class, tiny_configuration(config_class, changes)


def tiny_configuration(config_class: type[PreTrainedConfig], changes: dict[str, Any]) -> PreTrainedConfig:
    """A configuration of a class, and those nested in it, cut down by the generic rules and then changed."""
    default = config_class()
    nested_settings = {}
    for name in config_class.sub_configs:
        nested = getattr(default, name, None)
        nested_changes = changes.get(name, {})
        if nested is not None and isinstance(nested_changes, dict):
            nested_changes = zoo_settings.SETTINGS.get(nested.model_type, {}) | nested_changes
            nested_settings[name] = tiny_configuration(type(nested), nested_changes)
    return config_class(**(_sizes(default) | _layers(default) | changes | nested_settings))


def _sizes(default: PreTrainedConfig) -> dict[str, Any]:
    """The sizes that the generic table knows, under the names of this configuration."""
    parameters = inspect.signature(type(default)).parameters
    names = set(parameters)
    sizes: dict[str, Any] = {}
    latent = "kv_lora_rank" in names
    tables = [zoo_settings.SIZES, zoo_settings.LATENT_ATTENTION] if latent else [zoo_settings.SIZES]
    for table in tables:
        for generic, size in table.items():
            name = default.attribute_map.get(generic, generic)
            if name in names and (generic == "head_dim" or _is_number(default, name)):
                sizes[name] = size
    for name in ("bos_token_id", "eos_token_id", "forced_eos_token_id", "forced_bos_token_id"):
        if name in names:  # where a number is needed, one that generation_config does not take over
            sizes[name] = None if "None" in str(parameters[name].annotation) else 1
    if "pad_token_id" in names:
        sizes["pad_token_id"] = 0
    if "decoder_start_token_id" in names:
        sizes["decoder_start_token_id"] = 1
    return sizes


def _is_number(default: PreTrainedConfig, name: str) -> bool:
    """Whether a setting's default is a number other than 0; one that differs by layer cannot be read and counts."""
    try:
        value = getattr(default, name)
    except AttributeError:
        return False
    except RuntimeError:
        return True
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _layers(default: PreTrainedConfig) -> dict[str, Any]:
    """The number of layers and the per-layer lists: the first layer of each kind, and at least two."""
    names = set(inspect.signature(type(default)).parameters)
    count_name = default.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if count_name not in names:
        count_name = next((name for name in ("num_layers", "n_layer") if name in names), "")
    num_layers = getattr(default, count_name, None) if count_name else None
    lists = {}
    for generic in zoo_settings.PER_LAYER:
        name = default.attribute_map.get(generic, generic)
        values = getattr(default, name, None) if name in names else None
        if isinstance(values, (list, tuple)) and (num_layers is None or len(values) == num_layers):
            lists[name] = list(values)
    kept: set[int] = set()
    for values in lists.values():
        kept |= {values.index(kind) for kind in dict.fromkeys(values)}
    if len(kept) < 2:
        kept |= {0, 1} if 0 in kept or not kept else {0}
    settings: dict[str, Any] = {name: [values[layer] for layer in sorted(kept)] for name, values in lists.items()}
    for name, values in settings.items():
        if (size := zoo_settings.SIZES.get(name)) is not None:  # a size of each layer
            settings[name] = [size] * len(values)
    if count_name:
        settings[count_name] = max(2, len(kept))
    return settings


@cache
def _blind_tower() -> PreTrainedConfig:
    """A vision tower that sees nothing, for Gemma 3n, whose own comes from a package that is not installed (timm)."""

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
