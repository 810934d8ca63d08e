"""Reads and writes the states that layers carry of rows: convolutions' last inputs, recurrent states.

They lie in the layers, as transformers keeps them, and a forward overwrites them in place without a word to us.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin


class StateKey(NamedTuple):
    """`StateKey` names one tensor of a layer."""

    layer_idx: int
    name: str  # "conv" or "recurrent"
    state_idx: int


States = Mapping[StateKey, Tensor]
"""States that layers carry of some rows: tensors [R, ...], never written once made, except for those in the layers."""
StateLayers = Mapping[int, LinearAttentionCacheLayerMixin]
"""Layers of transformers with states, each by its index; a state that is not there yet is None."""


def held_states(layers: StateLayers) -> Iterator[tuple[StateKey, Tensor]]:
    """Yield the tensors that layers carry, with the inputs that convolutions keep for taking columns back."""
    for layer_idx, layer in layers.items():
        for state_idx in range(layer.number_of_states):
            if not layer.has_previous_state[state_idx]:
                continue
            for name, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                held = states[state_idx]
                if held is not None:
                    yield StateKey(layer_idx, name, state_idx), held


def read_states(layers: StateLayers) -> dict[StateKey, Tensor]:
    """Return the states that layers carry now, uncopied."""
    return {key: without_past(layers, key, held) for key, held in held_states(layers)}


def without_past(layers: StateLayers, key: StateKey, held: Tensor) -> Tensor:
    """Return a state as the next forward needs it: of a convolution's inputs those that fill its kernel."""
    width = layers[key.layer_idx].conv_kernel_size[key.state_idx] if key.name == "conv" else None
    if width is None or held.shape[-1] == width:
        return held
    if held.shape[-1] > width:  # the inputs before the last ones: drafts may be taken back
        return held[..., -width:]
    return torch.nn.functional.pad(held, (width - held.shape[-1], 0))


def put_states(layers: StateLayers, states: States) -> None:
    """Let layers carry these states, which nobody else has, and no others."""
    clear_states(layers)
    for (layer_idx, name, state_idx), tensor in states.items():
        layer = layers[layer_idx]
        if layer.device is None:
            layer.device, layer.dtype = tensor.device, tensor.dtype  # type: ignore[assignment]
        if name == "conv":
            layer.conv_states[state_idx] = tensor
            layer.conv_kernel_size[state_idx] = tensor.shape[-1]
            layer.is_conv_states_initialized[state_idx] = True
        else:
            layer.recurrent_states[state_idx] = tensor
            layer.is_recurrent_states_initialized[state_idx] = True
        layer.has_previous_state[state_idx] = True


def clear_states(layers: StateLayers) -> None:
    """Drop all states: the next forward begins rows."""
    for layer in layers.values():
        record_past = layer.record_past
        LinearAttentionCacheLayerMixin.__init__(layer, layer.number_of_states)
        layer.record_past = record_past


def select_rows(states: States, index: Tensor) -> dict[StateKey, Tensor]:
    """Return copies of the states of the rows of an index."""
    return {key: held.index_select(0, index.to(held.device)) for key, held in states.items()}


def row_of(states: States, row: int) -> dict[StateKey, Tensor]:
    """Return the states of one row, uncopied."""
    return {key: held[row : row + 1] for key, held in states.items()}


def copied(states: States) -> dict[StateKey, Tensor]:
    """Return the same states in memory of their own, row by row, without gradients."""
    return {key: held.detach().clone(memory_format=torch.contiguous_format) for key, held in states.items()}


def stacked(rows: Sequence[States]) -> dict[StateKey, Tensor]:
    """Return copies of the states of single rows, one after the other; a row that has seen nothing gets zeros."""
    keys = dict.fromkeys(key for row in rows for key in row)
    made = {}
    for key in keys:
        like = next(row[key] for row in rows if key in row)
        made[key] = torch.cat([row[key] if key in row else torch.zeros_like(like) for row in rows]).detach()
    return made
