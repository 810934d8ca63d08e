"""Owns what layers carry of a call's rows, and copies of it at the places where states are kept.

What layers carry are the last inputs of convolutions, and recurrent states. The model writes states in place. So the
states of the rows count only between forwards, and no longer count after a forward has died.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from ..blocks import Window
from ..kv.states import (
    StateKey,
    StateLayers,
    States,
    clear_states,
    copied,
    held_states,
    put_states,
    read_states,
    row_of,
    select_rows,
    without_past,
)
from ..kv.tensors import to_device
from .layers import RowsLayer, WindowLayer


class StatePlaces(NamedTuple):
    """`StatePlaces` says where states are kept."""

    align: int  # after multiples of so many tokens of a row
    are_recorded: bool = False  # only convolutions carry states: one forward shows them at all of its columns
    clamps_one_token: bool = False  # one token is computed otherwise than several
    most: int = 0  # most places of one forward that are recorded


def states_alone(num_states: int) -> LinearAttentionLayer:
    """Make a layer that carries states and has no columns.

    It is of transformers' very class, because callers tell it from other layers by its type.
    """
    layer = LinearAttentionLayer(num_states)
    vars(layer).update(n=0, filled=0, held=None, keys=None, values=None)
    vars(layer).update(is_own=False, is_sliding=False, is_initialized=False)
    return layer


class _InitializesStates:
    is_compileable = False
    is_croppable = LinearAttentionLayer.is_croppable

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        if kwargs:  # columns need no initialization
            LinearAttentionLayer.lazy_initialization(self, **kwargs)  # type: ignore[arg-type]


class StatesAndColumnsLayer(_InitializesStates, RowsLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[no-untyped-call, misc]
    """`StatesAndColumnsLayer` carries states, and its attention sees all columns."""

    def __init__(self, layer_idx: int, owner: Callable[[], Any], number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states)
        RowsLayer.__init__(self, layer_idx, owner)


class StatesAndWindowLayer(_InitializesStates, WindowLayer, LinearAttentionAndSlidingWindowAttentionLayer):  # type: ignore[no-untyped-call, misc]
    """`StatesAndWindowLayer` carries states, and its attention sees a window."""

    def __init__(
        self, layer_idx: int, owner: Callable[[], Any], window: Window, margin: int, number_of_states: int
    ) -> None:
        LinearAttentionLayer.__init__(self, number_of_states)
        WindowLayer.__init__(self, layer_idx, owner, window, margin)

    def get_max_length(self) -> int:
        return -1  # as transformers' layer does: there is none


class RowStates:
    """`RowStates` has the states of one call's rows, which lie in these layers, by index."""

    def __init__(self, layers: StateLayers, places: StatePlaces) -> None:
        self._layers, self._places = layers, places
        # For each row, number of tokens -> what layers carried after these, where that is to be kept with its blocks.
        self.taken: list[dict[int, States]] = []
        self._next = 0  # first number of columns after which the states of some row may be taken
        self._is_step = False
        # What convolutions show of the running forward: after which tokens of which row, and after how many columns.
        self._marks: list[tuple[int, int]] = []
        self._marked_columns: list[int] = []
        self._num_columns = 0
        self._recorded: dict[StateKey, Tensor] = {}  # tensors [marks, ...]

    def num_needed(self, num_columns: int, *, is_padding: bool) -> int:
        """Return how many of a prompt's last columns run in the forward over all rows.

        Where a row has nothing but padding there, it is two: of one column, models do not look whether it is padding.
        """
        return 2 if num_columns > 1 and (is_padding or self._places.clamps_one_token) else 1

    @property
    def num_bytes(self) -> int:
        """Bytes of what layers carry, and of the states that were taken."""
        held = [self.read(), *(states for taken in self.taken for states in taken.values())]
        return sum(each.nbytes for states in held for each in states.values())

    def read(self) -> dict[StateKey, Tensor]:
        """Return the states that the layers carry now, uncopied: the next forward overwrites them."""
        return read_states(self._layers)

    def put(self, states: States) -> None:
        """Let the rows resume from these states, which nobody else has; without any, from no state."""
        put_states(self._layers, states)

    def begin(self, num_rows: int) -> None:
        self.taken, self._next = [{} for _ in range(num_rows)], 0

    def start_forward(self, pads: Sequence[int], start: int, stop: int) -> None:
        """Begin a forward of the columns `[start, stop)`."""
        align, self._is_step = self._places.align, start > 0 and stop - start == 1
        self._marks, self._marked_columns, self._recorded, self._num_columns = [], [], {}, stop - start
        if not self._places.are_recorded or stop - start < align:
            return
        for row, pad in enumerate(pads):
            first = max(1, (start - pad) // align + 1) * align  # first place behind the columns that are there
            self._marks += [(row, num_tokens) for num_tokens in range(first, stop - pad, align)]
        self._marks = self._marks[-self._places.most :]
        self._marked_columns = [num_tokens + pads[row] - start for row, num_tokens in self._marks]

    def record(self, layer_idx: int, state_idx: int, inputs: Tensor) -> None:
        """Record the states that are wanted of a convolution that has run over `inputs`.

        Shapes: inputs [R, ..., past + columns of the forward]. Where there is no memory for these states, nothing is
        recorded of the forward.
        """
        if not self._marks:
            return
        width = self._layers[layer_idx].conv_kernel_size[state_idx] or 0
        past = inputs.shape[-1] - self._num_columns
        try:
            if missing := max(0, width - past):
                inputs, past = torch.nn.functional.pad(inputs, (missing, 0)), past + missing
            first = past - width  # where the state at the forward's first column begins
            rows = to_device([row for row, _ in self._marks], inputs.device)
            starts = to_device([column + first for column in self._marked_columns], inputs.device)
            windows = inputs.unfold(-1, width, 1).movedim(-2, 1)  # [R, places, ..., width]
            self._recorded[StateKey(layer_idx, "conv", state_idx)] = windows[rows, starts].detach()
        except torch.OutOfMemoryError:
            self._marks, self._recorded = [], {}

    def end_forward(self, pads: Sequence[int], n: int) -> None:
        """End a forward that has returned, and take the states that are wanted."""
        for at, (row, num_tokens) in enumerate(self._marks if self._recorded else ()):
            self.taken[row][num_tokens] = {key: held[at : at + 1] for key, held in self._recorded.items()}
        self._marks, self._recorded = [], {}
        if n >= self._next:
            self._take(pads, n)

    def _take(self, pads: Sequence[int], n: int) -> None:
        """Take the states of rows that are at a place where states are kept.

        After a step, they replace the states that were taken of the same row earlier.
        """
        align = self._places.align
        self._next = min((n + align - (n - pad) % align for pad in pads), default=0)
        at = [row for row, pad in enumerate(pads) if n > pad and (n - pad) % align == 0]
        if not at or (self._is_step and self._places.clamps_one_token):
            return
        held = self.read()
        with suppress(torch.OutOfMemoryError):  # without them, a prompt that would resume there is computed
            for row in at:
                states = copied(row_of(held, row))
                if self._is_step:
                    self.taken[row].clear()
                self.taken[row][n - pads[row]] = states

    def select(self, index: Tensor) -> None:
        """Let row `i` continue as row `index[i]`."""
        sources, held = index.tolist(), dict(held_states(self._layers))
        if held and sources != [*range(len(next(iter(held.values()))))]:
            self._replace(select_rows(held, index))
        self.taken = [{**self.taken[source]} for source in sources] if self.taken else []

    def _replace(self, states: States) -> None:
        """Put tensors of other rows, or of fewer inputs, in place of those held."""
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
        for (layer_idx, name, state_idx), held in held_states(self._layers):
            layer, is_held = self._layers[layer_idx], True
            width = layer.conv_kernel_size[state_idx] or 0
            if name != "conv" or not layer.record_past or held.shape[-1] - num_columns < width:
                return False
        return is_held

    def crop(self, num_columns: int, n: int, pads: Sequence[int]) -> None:
        """Take back columns; `n` are left, 0 or as many as there were unless `can_crop` allows others."""
        if not n:
            clear_states(self._layers)
        elif num_columns:
            kept = {key: held[..., : held.shape[-1] - num_columns] for key, held in held_states(self._layers)}
            self._replace({key: without_past(self._layers, key, held).contiguous() for key, held in kept.items()})
        for pad, taken in zip(pads, self.taken, strict=False):
            for num_tokens in [each for each in taken if each > n - pad]:
                del taken[num_tokens]
        self._next = 0

    def copy_to(self, other: "RowStates", index: Tensor) -> None:
        """Give row `i` of other rows the states of row `index[i]`, in memory of its own."""
        sources = index.tolist()
        other.begin(len(sources))
        other.put(select_rows(self.read(), index))
        other.taken = [{**self.taken[source]} for source in sources]
