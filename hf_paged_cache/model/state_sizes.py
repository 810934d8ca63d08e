"""What the layers of a model that carry states hold of one row, measured by a forward."""

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from .cache_adapters import cache_argument, present_cache
from .comparison import dynamic_cache
from .probing import input_device, undisturbed
from .support import cache_layers, has_state


class StateSizes(NamedTuple):
    """Of one row.

    Attributes:
        num_bytes: of its states.
        width: inputs that the widest of its convolutions looks back at, with the last.
        are_convolutions_alone: their states are inputs of theirs, so a forward can show them at any token.
    """

    num_bytes: int
    width: int
    are_convolutions_alone: bool


def measure_states(model: PreTrainedModel) -> StateSizes | None:
    """The sizes; None of a model without states.  Cost: a forward of one token."""
    carriers = [index for index, layer in enumerate(cache_layers(model)) if has_state(layer)]
    if not carriers:
        return None
    cache = dynamic_cache(model)
    ids = torch.zeros((1, 1), dtype=torch.long, device=input_device(model))
    with undisturbed(model):
        model(ids, **present_cache(model, {cache_argument(model): cache, "use_cache": True}))
    num_bytes, width, has_others = 0, 0, False
    for index in carriers:
        layer: Any = cache.layers[index]
        for held in layer.conv_states.values():
            if held is not None:
                num_bytes += held.nbytes
                width = max(width, held.shape[-1])
        for held in layer.recurrent_states.values():
            if held is not None:
                num_bytes += held.nbytes
                has_others = True
    return StateSizes(num_bytes, width, not has_others)
