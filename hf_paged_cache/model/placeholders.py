"""Finds the token ids of a model that stand for something else than text, and whether what fills them is passed.

An image, a video or a sound takes the places of tokens of one id, its *placeholders*: their keys and values follow from
its content, which ids do not show. What a call passes that fills placeholders is *content*. Both are found by
structure: by the names that configs have for those ids, and by the arguments of the model's forward. A model that takes
no content has no placeholders.
"""

import inspect
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

# Kind -> parts of the names of arguments that bring its content. A name is of the first kind whose part is in it.
_CONTENT = {
    "video": ("pixel_values_videos", "video_features", "video_embeds"),
    "image": ("pixel_values", "image_features", "image_embeds", "image_patches", "image_hidden_states"),
    "audio": ("input_features", "input_values", "audio_features", "audio_embeds", "audio_input_ids", "audio_values"),
}
_BESIDE_CONTENT = ("_mask", "_cutoffs", "_position_ids")  # ends of the names of arguments that say how content lies
_CONTENT_OF_ALL = ("inputs_embeds", "mm_encoder_outputs")
_THINGS = {"image": "an image", "video": "a video", "audio": "a sound"}
_ENDS = ("_token_id", "_token_index")  # ends of the names that configs have for a placeholder, after its kind


class Placeholders:
    """`Placeholders` knows the placeholders of one model.

    Attributes:
        kinds: token id -> kinds of content that it may stand for; empty for a model of text alone.
    """

    def __init__(self, model: Any) -> None:
        arguments = inspect.signature(model.forward).parameters
        self._content = {name: kind for name in arguments if (kind := kind_of(name)) is not None}
        self.kinds: dict[int, frozenset[str]] = {}
        if self._content:
            self._note(model.config)

    def _note(self, config: PreTrainedConfig) -> None:
        """Note the placeholders that a config and the configs nested in it name."""
        for kind, end in product(_CONTENT, _ENDS):
            token = getattr(config, f"{kind}{end}", None)
            if isinstance(token, int) and not isinstance(token, bool) and token >= 0:
                self.kinds[token] = self.kinds.get(token, frozenset()) | {kind}
        for nested in vars(config).values():
            if isinstance(nested, PreTrainedConfig):
                self._note(nested)

    def unfilled(self, arguments: Mapping[str, Any], before: int = 0) -> str | None:
        """Say which placeholder is the first that is passed where nothing is passed that could fill any; None: none is.

        Cost: nothing where anything is passed that fills placeholders, or for a model without any; else one wait for
        the ids' device.

        Args:
            before: columns of the rows that resume with these ids, for the message.
        """
        ids = arguments.get("input_ids")
        if not self.kinds or not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_meta:
            return None
        passed = [name for name, value in arguments.items() if value is not None]
        if any(kind_of(name) is not None or name in _CONTENT_OF_ALL for name in passed):
            return None
        found = torch.isin(ids, torch.tensor([*self.kinds], dtype=ids.dtype, device=ids.device)).nonzero().tolist()
        if not found:
            return None
        number, column = found[0]
        token = int(ids[number, column])
        own = [name for name, kind in self._content.items() if kind in self.kinds[token]]
        of_row = "" if len(ids) == 1 else f" of row {number}"
        return (
            f"token {token} at position {before + column}{of_row} is the placeholder of {self._thing(token)}, and "
            f"nothing was passed that fills it: pass {' or '.join(own or self._content)}"
        )

    def why_no_text(self, tokens: Sequence[int]) -> str:
        """Complete the sentence "the prompt ..." where it holds a placeholder; "" where it does not."""
        for position, token in enumerate(tokens if self.kinds else ()):
            if token in self.kinds:
                return (
                    f"has token {token} at position {position}, the placeholder of {self._thing(token)}, whose content "
                    "cannot be passed here; give text without it"
                )
        return ""

    def _thing(self, token: int) -> str:
        return " or ".join(_THINGS[kind] for kind in sorted(self.kinds[token]))


def kind_of(name: str) -> str | None:
    """Return the kind of content that an argument brings, by the argument's name; None: it brings none."""
    if name.endswith(_BESIDE_CONTENT):
        return None
    return next((kind for kind, parts in _CONTENT.items() if any(part in name for part in parts)), None)
