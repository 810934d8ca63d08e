"""Owns what layers carry of a call's rows, and copies of it at the places where states are kept.

What layers carry are the last inputs of convolutions, and recurrent states. The model writes states in place. So the
states of the rows count only between forwards, and no longer count after a forward has died.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from ..blocks.window import Window
from ..kv.states import LiveStates, StateLayer, States, copied, row_of, select_rows
from .layers import RowsLayer
from .windows import WindowLayer


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

    def __init__(self, layers: Mapping[int, StateLayer], places: StatePlaces) -> None:
        self.live, self._places = LiveStates(layers), places
        # For each row, number of tokens -> what layers carried after these, where that is to be kept with its blocks.
        self.taken: list[dict[int, States]] = []
        self._next = 0  # first number of columns after which the states of some row may be taken
        self._is_step = False

    def num_needed(self, num_columns: int, *, is_padding: bool) -> int:
        """Return how many of a prompt's last columns run in the forward over all rows.

        Where a row has nothing but padding there, it is two: of one column, models do not look whether it is padding.
        """
        return 2 if num_columns > 1 and (is_padding or self._places.clamps_one_token) else 1

    @property
    def num_bytes(self) -> int:
        """Bytes of what layers carry, and of the states that were taken."""
        held = [self.live.read(), *(states for taken in self.taken for states in taken.values())]
        return sum(each.nbytes for states in held for each in states.values())

    def begin(self, num_rows: int) -> None:
        self.taken, self._next = [{} for _ in range(num_rows)], 0

    def start_forward(self, pads: Sequence[int], start: int, stop: int) -> None:
        """Begin a forward of the columns `[start, stop)`."""
        self._is_step = start > 0 and stop - start == 1
        align, recorder = self._places.align, self.live.recorder
        if not self._places.are_recorded or stop - start < align:
            recorder.start_forward()
            return
        found = [
            (row, num_tokens)
            for row, pad in enumerate(pads)
            for num_tokens in range(align, stop - pad, align)
            if num_tokens + pad > start
        ][-self._places.most :]
        recorder.start_forward(stop - start, found, [num_tokens + pads[row] - start for row, num_tokens in found])

    def end_forward(self, pads: Sequence[int], n: int) -> None:
        """End a forward that has returned, and take the states that are wanted."""
        recorder = self.live.recorder
        for at, (row, num_tokens) in enumerate(recorder.places if recorder.recorded else ()):
            self.taken[row][num_tokens] = {key: held[at : at + 1] for key, held in recorder.recorded.items()}
        recorder.start_forward()
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
        held = self.live.read()
        with suppress(torch.OutOfMemoryError):  # without them, a prompt that would resume there is computed
            for row in at:
                states = copied(row_of(held, row))
                if self._is_step:
                    self.taken[row].clear()
                self.taken[row][n - pads[row]] = states

    def select(self, index: Tensor) -> None:
        """Let row `i` continue as row `index[i]`."""
        sources = index.tolist()
        self.live.select(sources)
        self.taken = [{**self.taken[source]} for source in sources] if self.taken else []

    def crop(self, num_columns: int, n: int, pads: Sequence[int]) -> None:
        """Take back columns; `n` are left, 0 or as many as there were unless `live.can_crop` allows others."""
        if not n:
            self.live.clear()
        elif num_columns:
            self.live.crop(num_columns)
        for pad, taken in zip(pads, self.taken, strict=False):
            for num_tokens in [each for each in taken if each > n - pad]:
                del taken[num_tokens]
        self._next = 0

    def copy_to(self, other: "RowStates", index: Tensor) -> None:
        """Give row `i` of other rows the states of row `index[i]`, in memory of its own."""
        sources = index.tolist()
        other.begin(len(sources))
        other.live.put(select_rows(self.live.read(), sources))
        other.taken = [{**self.taken[source]} for source in sources]
