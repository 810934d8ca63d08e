"""Reads and writes the states that layers carry of rows: convolutions' last inputs, recurrent states.

They lie in the layers, as transformers keeps them, and a forward overwrites them in place without a word to us.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .tensors import to_device


class StateKey(NamedTuple):
    """`StateKey` names one tensor of a layer."""

    layer_idx: int
    name: str  # "conv" or "recurrent"
    state_idx: int


States = Mapping[StateKey, Tensor]
"""States that layers carry of some rows: tensors [R, ...], never written once made, except for those in the layers."""


class StateLayer(Protocol):
    """`StateLayer` is a layer of transformers with states, each by its index; one that is not there yet is None."""

    number_of_states: int
    conv_states: dict[int, Tensor | None]
    recurrent_states: dict[int, Tensor | None]
    is_conv_states_initialized: dict[int, bool]
    is_recurrent_states_initialized: dict[int, bool]
    has_previous_state: dict[int, bool]
    conv_kernel_size: dict[int, int | None]
    device: Any
    dtype: Any
    record_past: bool


def held_states(layers: Mapping[int, StateLayer]) -> Iterator[tuple[StateKey, Tensor]]:
    """Yield the tensors that layers carry, with the inputs that convolutions keep for taking columns back."""
    for layer_idx, layer in layers.items():
        for state_idx in range(layer.number_of_states):
            if not layer.has_previous_state[state_idx]:
                continue
            for name, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                held = states[state_idx]
                if held is not None:
                    yield StateKey(layer_idx, name, state_idx), held


def read_states(layers: Mapping[int, StateLayer]) -> dict[StateKey, Tensor]:
    """Return the states that layers carry now, uncopied."""
    return {key: without_past(layers, key, held) for key, held in held_states(layers)}


def without_past(layers: Mapping[int, StateLayer], key: StateKey, held: Tensor) -> Tensor:
    """Return a state as the next forward needs it: of a convolution's inputs those that fill its kernel."""
    width = layers[key.layer_idx].conv_kernel_size[key.state_idx] if key.name == "conv" else None
    if width is None or held.shape[-1] == width:
        return held
    if held.shape[-1] > width:  # the inputs before the last ones: drafts may be taken back
        return held[..., -width:]
    return torch.nn.functional.pad(held, (width - held.shape[-1], 0))


def put_states(layers: Mapping[int, StateLayer], states: States) -> None:
    """Let layers carry these states, which nobody else has, and no others."""
    clear_states(layers)
    for (layer_idx, name, state_idx), tensor in states.items():
        layer = layers[layer_idx]
        if layer.device is None:
            layer.device, layer.dtype = tensor.device, tensor.dtype
        if name == "conv":
            layer.conv_states[state_idx] = tensor
            layer.conv_kernel_size[state_idx] = tensor.shape[-1]
            layer.is_conv_states_initialized[state_idx] = True
        else:
            layer.recurrent_states[state_idx] = tensor
            layer.is_recurrent_states_initialized[state_idx] = True
        layer.has_previous_state[state_idx] = True


def clear_states(layers: Mapping[int, StateLayer]) -> None:
    """Drop all states: the next forward begins rows."""
    for layer in layers.values():
        numbers = range(layer.number_of_states)
        layer.has_previous_state = dict.fromkeys(numbers, False)
        layer.is_conv_states_initialized = dict.fromkeys(numbers, False)
        layer.is_recurrent_states_initialized = dict.fromkeys(numbers, False)
        layer.conv_states, layer.recurrent_states = dict.fromkeys(numbers), dict.fromkeys(numbers)
        layer.device = layer.dtype = None


def select_rows(states: States, sources: Sequence[int]) -> dict[StateKey, Tensor]:
    """Return copies of the states of rows `sources`."""
    on: dict[torch.device, Tensor] = {}
    selected = {}
    for key, held in states.items():
        if held.device not in on:
            on[held.device] = to_device(list(sources), held.device)
        selected[key] = held.index_select(0, on[held.device])
    return selected


def row_of(states: States, row: int) -> dict[StateKey, Tensor]:
    """Return the states of one row, uncopied."""
    return {key: held[row : row + 1] for key, held in states.items()}


def copied(states: States) -> dict[StateKey, Tensor]:
    """Return the same states in memory of their own, row by row, without gradients."""
    return {key: held.detach().clone(memory_format=torch.contiguous_format) for key, held in states.items()}


def stacked(rows: Sequence[States]) -> dict[StateKey, Tensor]:
    """Return copies of the states of single rows, one row after the other.

    A row without a state gets zeros for it: the row has seen nothing yet.
    """
    keys = dict.fromkeys(key for row in rows for key in row)
    made = {}
    for key in keys:
        like = next(row[key] for row in rows if key in row)
        made[key] = torch.cat([row[key] if key in row else torch.zeros_like(like) for row in rows]).detach()
    return made
