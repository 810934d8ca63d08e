"""Owns the states of the running rows, where layers carry any: convolutions' last inputs, recurrent states.

The states lie in the layers, as transformers keeps them, so that a forward writes them without a word to us. A forward
overwrites states in place; those that are to stay are cloned before.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .transfers import to_device


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


class ConvRecorder:
    """`ConvRecorder` takes states of convolutions, their last inputs before some columns, out of a running forward.

    Attributes:
        places: (row, tokens) after which a state is wanted.
        recorded: states recorded of the forward, tensors [len(places), ...].
    """

    def __init__(self) -> None:
        self.places: Sequence[tuple[int, int]] = ()
        self.recorded: dict[StateKey, Tensor] = {}
        self._columns: Sequence[int] = ()
        self._num_columns = 0

    def start_forward(
        self, num_columns: int = 0, places: Sequence[tuple[int, int]] = (), columns: Sequence[int] = ()
    ) -> None:
        """Begin another forward, of `num_columns` columns; before each of `columns` is a place."""
        self.places, self.recorded, self._columns, self._num_columns = places, {}, columns, num_columns

    def record(self, key: StateKey, inputs: Tensor, width: int) -> None:
        """Record the states, of `width` inputs, that are wanted of a convolution that runs.

        Shapes: inputs [R, ..., past + columns of the forward].
        """
        past = inputs.shape[-1] - self._num_columns
        if missing := max(0, width - past):
            inputs, past = torch.nn.functional.pad(inputs, (missing, 0)), past + missing
        first = past - width  # where the state at the forward's first column begins
        rows = to_device([number for number, _ in self.places], inputs.device)
        starts = to_device([column + first for column in self._columns], inputs.device)
        windows = inputs.unfold(-1, width, 1).movedim(-2, 1)  # [R, places, ..., width]
        self.recorded[key] = windows[rows, starts].detach()


class LiveStates:
    """`LiveStates` gives access to the states of the rows that run, in the order in which they run.

    Args:
        layers: index -> layer, for the layers that carry states.
    """

    def __init__(self, layers: Mapping[int, StateLayer]) -> None:
        self._layers = layers
        self.recorder = ConvRecorder()

    def record(self, layer_idx: int, state_idx: int, inputs: Tensor) -> None:
        """Record the states that are wanted of a convolution that has run over `inputs`.

        Shapes: inputs [R, ..., past + columns of the forward]. Where there is no memory for these states, nothing is
        recorded of the forward.
        """
        if self.recorder.places:
            width = self._layers[layer_idx].conv_kernel_size[state_idx] or 0
            try:
                self.recorder.record(StateKey(layer_idx, "conv", state_idx), inputs, width)
            except torch.OutOfMemoryError:
                self.recorder.start_forward()

    def read(self) -> dict[StateKey, Tensor]:
        """Return the states that the layers hold now, uncopied: the next forward overwrites them.

        Of the inputs that convolutions keep for `crop`, only those that they need are returned.
        """
        return {key: self._needed(key, held) for key, held in self._held()}

    def _needed(self, key: StateKey, held: Tensor) -> Tensor:
        width = self._layers[key.layer_idx].conv_kernel_size[key.state_idx] if key.name == "conv" else None
        if width is None or held.shape[-1] == width:
            return held
        if held.shape[-1] > width:  # the inputs before the last ones: drafts may be taken back
            return held[..., -width:]
        return torch.nn.functional.pad(held, (width - held.shape[-1], 0))

    def _held(self) -> Iterator[tuple[StateKey, Tensor]]:
        for layer_idx, layer in self._layers.items():
            for state_idx in range(layer.number_of_states):
                if not layer.has_previous_state[state_idx]:
                    continue
                for name, states in (("conv", layer.conv_states), ("recurrent", layer.recurrent_states)):
                    held = states[state_idx]
                    if held is not None:
                        yield StateKey(layer_idx, name, state_idx), held

    def put(self, states: States) -> None:
        """Let rows resume from these states, which nobody else has; without any, from no state."""
        self.clear()
        for (layer_idx, name, state_idx), tensor in states.items():
            layer = self._layers[layer_idx]
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

    def clear(self) -> None:
        """Drop all states: the next forward begins rows."""
        for layer in self._layers.values():
            numbers = range(layer.number_of_states)
            layer.has_previous_state = dict.fromkeys(numbers, False)
            layer.is_conv_states_initialized = dict.fromkeys(numbers, False)
            layer.is_recurrent_states_initialized = dict.fromkeys(numbers, False)
            layer.conv_states, layer.recurrent_states = dict.fromkeys(numbers), dict.fromkeys(numbers)
            layer.device = layer.dtype = None

    def select(self, sources: Sequence[int]) -> None:
        """Let row `i` resume from a copy of the state of row `sources[i]`."""
        held = dict(self._held())
        if held and list(sources) != list(range(len(next(iter(held.values()))))):
            self._replace(select_rows(held, sources))

    def _replace(self, states: States) -> None:
        """Put tensors of other rows in place of those held."""
        for (layer_idx, name, state_idx), tensor in states.items():
            layer = self._layers[layer_idx]
            (layer.conv_states if name == "conv" else layer.recurrent_states)[state_idx] = tensor

    def record_past(self) -> None:
        """Let convolutions keep all their inputs until `crop`."""
        for layer in self._layers.values():
            layer.record_past = True

    def can_crop(self, num_columns: int) -> bool:
        """Return whether the last columns can be taken back: of convolutions alone that have kept their inputs."""
        is_held = False
        for (layer_idx, name, state_idx), held in self._held():
            layer, is_held = self._layers[layer_idx], True
            width = layer.conv_kernel_size[state_idx] or 0
            if name != "conv" or not layer.record_past or held.shape[-1] - num_columns < width:
                return False
        return is_held

    def crop(self, num_columns: int) -> None:
        """Take the last columns back; `can_crop` allows it."""
        kept = {key: held[..., : held.shape[-1] - num_columns] for key, held in self._held()}
        self._replace({key: self._needed(key, held).contiguous() for key, held in kept.items()})


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
