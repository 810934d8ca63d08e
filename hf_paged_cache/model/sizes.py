"""What a model's layers hold of a row, measured by a forward of one token.

Configs name shapes in too many ways: latent attention, shared layers, mixed head sizes.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from .comparison import dynamic_cache, run_columns
from .probing import input_device, undisturbed
from .support import cache_layers, has_state, keys_of, states_of


class StateSizes(NamedTuple):
    """Of the states of one row.

    Attributes:
        num_bytes: of all.
        width: inputs that the widest of its convolutions looks back at, with the last.
        are_convolutions_alone: their states are inputs of theirs, so a forward can show them at any token.
    """

    num_bytes: int
    width: int
    are_convolutions_alone: bool


def measure_layers(model: PreTrainedModel) -> dict[int, tuple[torch.device, int]]:
    """Layer index -> where its keys and values lie, and their bytes for one token."""
    held = enumerate(map(keys_of, _after_a_token(model)))
    return {index: (keys[0].device, sum(tensor.nbytes for tensor in keys)) for index, keys in held if keys}


def measure_bytes_per_token(model: PreTrainedModel, shares: Mapping[int, float] = MappingProxyType({})) -> float:
    """Bytes of keys and values of one token in all layers.

    Args:
        shares: layer index -> what part of its bytes counts; of others, all.
    """
    return sum(shares.get(index, 1) * num_bytes for index, (_, num_bytes) in measure_layers(model).items())


def measure_states(model: PreTrainedModel) -> StateSizes | None:
    """The sizes of its states; None of a model without any."""
    if not any(map(has_state, cache_layers(model))):
        return None
    carriers = [layer for layer in _after_a_token(model) if has_state(layer)]
    inputs = [state for layer in carriers for state in states_of(layer, "conv_states")]
    others = [state for layer in carriers for state in states_of(layer, "recurrent_states")]
    width = max((state.shape[-1] for state in inputs), default=0)
    return StateSizes(sum(state.nbytes for state in inputs + others), width, not others)


def _after_a_token(model: PreTrainedModel) -> Sequence[Any]:
    """The layers of a `DynamicCache` after a forward of one token."""
    cache = dynamic_cache(model)
    with undisturbed(model):
        run_columns(
            model, {"input_ids": torch.zeros((1, 1), dtype=torch.int64, device=input_device(model))}, cache, 0, 1
        )
    return cache.layers
