"""Owns the columns of one call's rows: their number, and all tensors in which keys and values lie.

The columns lie in memory of these rows alone. Before that memory may come segments that several rows have in common.
This module knows no tokens and no forwards.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..attention import causal
from ..kv.states import LiveStates
from ..model.layers import has_keys, streams_of
from . import memory
from .kinds import LayerKinds
from .layers import RowsLayer, room_for
from .memory import Columns, Streams
from .shared import Looks, Seen, SharedColumns
from .states import RowStates
from .windows import WindowColumns

_VERSION = attrgetter("_version")


@dataclass(slots=True)
class Prompt:
    """`Prompt` says what one row began with."""

    root: bytes  # the row's prefix key: a digest of all that shapes its keys and values besides tokens
    pad: int  # columns of left padding
    first_position: int  # position of the first token
    shift: int | None  # how far images have moved the positions of the text after them; None: not known
    kept: int = 0  # leading tokens whose blocks need not be kept any more
    most_kept: int | None = None  # most leading tokens that may be kept, where those after them only fill the row up
    image_end: int | None = None  # tokens up to the end of the last image, if its block is to be kept up to there


class RowsColumns(Cache):
    """`RowsColumns` has the columns of a call's rows, in all layers.

    columns: [0, pad) padding | [pad, n) valid in all layers, between two forwards
    """

    layers: list[Any]
    windows: WindowColumns | None  # columns of the layers with a window, if any layer has one
    states: RowStates | None  # what layers carry beside columns, or in place of columns, if any layer does
    first: Any  # first layer with columns; None: no layer has any, or the rows are bypassed
    is_exact: bool  # rows can go on only after certain columns, because layers have windows or carry states

    def __init__(self, kinds: LayerKinds, looks: Looks) -> None:
        super().__init__(layers=[])
        self._itself, self.kinds, self.looks = ref(self), kinds, looks
        self.may_be_lazy = False  # attention may be given keys and values that it reads lazily
        self.reset()

    def reset(self) -> None:
        """Drop the rows."""
        self._make_layers()
        self.seen = Seen()  # how attention has read the rows
        self.n = 0  # columns
        self.base = 0  # first column that lies in the rows' own memory; rows share the columns before it
        self.wanted = 0  # columns that the rows will have; 0: not known
        self.prompts: list[Prompt] = []  # what each row began with; empty before the first forward
        self.memory: list[Streams] = []  # of the layers without a window; streams of one shape lie in one tensor
        self.why_bypassed: str | None = None  # why the rows run on transformers' own layers, and nothing is kept
        self.is_running = False  # a forward has begun and not returned
        self.is_whole = True  # every stream has all columns; if not, nothing more is kept
        self.is_broken = False  # what the next token needs is lost: a forward, or a change of rows, has died half way
        self.shared: SharedColumns | None = None  # segments that several rows have in common, held once
        self.reads: Any = None  # `SharedColumns` or `CausalSquare` that layers read in place of their columns
        self._tensors: list[Tensor] = []  # all tensors in which the rows lie
        self._versions: tuple[int, ...] = ()  # versions of these tensors after our own last write
        self._room_end = math.inf  # column at which the shortest tensor of `memory` ends

    def _make_layers(self) -> None:
        """Put new layers that hold nothing into the same list of layers; the old ones hold nothing more either."""
        kinds = self.kinds
        for layer in self.layers:
            layer.reset()
        self.layers[:] = layers = kinds.make(self._itself)
        self.windows = WindowColumns(layers) if kinds.windows else None
        self.states = RowStates({at: layers[at] for at in kinds.num_states}, kinds.places) if kinds.num_states else None
        self.is_exact = self.windows is not None or self.states is not None
        self.first = next((layer for layer in layers if isinstance(layer, RowsLayer)), None)
        self.layer_class_to_replicate = partial(_another_layer, self._itself)  # type: ignore[assignment]

    def can_go_on_at(self, n: int) -> bool:
        """Return whether the rows hold all that the token after the first `n` columns needs."""
        if self.states is not None and (n != self.n or self.is_broken or self.is_running):
            return False
        return self.windows is None or self.windows.can_go_on_at(n)

    def make_dense(self) -> None:
        """Give each row all of its columns, in memory of its own."""
        if self.shared is None:
            return
        if not self.is_running and self.is_edited:
            self.is_whole = False
        stop = max(self.n, *(layer.n for layer in self.layers))  # in a forward some layers have more columns
        whole = self._dense(range(self.num_rows), stop, room_for(stop, self.wanted))
        self.shared = self.reads = None
        self.take(whole, self.n)

    def _dense(self, sources: Sequence[int], stop: int, room: int) -> list[Streams]:
        """Make memory in which row `i` has all columns of row `sources[i]` before column `stop`."""
        made = memory.make(memory.shapes_of_rows(self.all_memory()), len(sources), room)
        for row, source in enumerate(sources):
            pad = self.prompts[source].pad
            self.copy_columns(source, pad, stop, made, row, pad)
        return made

    def copy_columns(self, row: int, start: int, stop: int, to: list[Streams], to_row: int, column: int) -> None:
        """Copy the columns `[start, stop)` of a row, wherever they lie, to row `to_row` of other memory, from `column`
        on.
        """
        for at, part in self._parts(row, start, stop):
            memory.copy_columns(part, to, to_row, column + at - start)

    def _parts(self, row: int, start: int, stop: int) -> Iterator[tuple[int, Columns]]:
        """Yield the columns `[start, stop)` of a row part by part, each with the column at which it begins."""
        for first, part in () if self.shared is None else self.shared.parts(row, start, stop):
            yield first, part
            start = first + part.stop - part.start
        if start < stop:
            yield start, Columns(self.all_memory(), row, start - self.base, stop - self.base)

    def columns(self, row: int, start: int, stop: int) -> Columns:
        """Return the columns `[start, stop)` of a row side by side: where they lie, or as copies."""
        parts = [*self._parts(row, start, stop)]
        if len(parts) == 1:
            return parts[0][1]
        made = memory.make(memory.shapes_of_rows(self.all_memory()), 1, stop - start)
        self.copy_columns(row, start, stop, made, 0, 0)
        return Columns(made, 0, 0, stop - start)

    def take(self, held: list[Streams], n: int, base: int = 0) -> None:
        """Let the rows lie in this memory from here on: its first columns are the columns `[base, n)`."""
        self.memory, self.n, self.base = held, n, base
        lengths = {at: layer.n for at, layer in enumerate(self.layers) if layer.held is not None}  # some may have less
        for layer_idx, of_layer in memory.by_layer(held).items():
            while len(self.layers) <= layer_idx:
                self.layers.append(_another_layer(self._itself))
            self.layers[layer_idx].lie_in(of_layer, lengths.get(layer_idx, n), base)
        self._room_end = min((base + tensor.shape[3] for tensor, _ in held), default=math.inf)
        self.note_writes()

    def all_memory(self) -> list[Streams]:
        """Return the memory of all layers without a window, also of layers that got their own memory in a forward."""
        if self.why_bypassed is not None:
            return self.memory
        own = [layer for layer in self.layers if layer.is_own and not layer.is_sliding]
        if not own:
            return self.memory
        together = [
            Streams(part, (name,))
            for tensor, names in self.memory
            for part, name in zip(torch.split(tensor, 1), names, strict=True)
            if not self.layers[name[0]].is_own
        ]
        return together + [streams for layer in own for streams in layer.streams()]

    def gather(self) -> None:
        """Let layers that got memory of their own lie in the memory of the rows, without a copy."""
        held = self.all_memory()
        if held is self.memory:
            self.note_writes()
        else:
            self.take(held, self.n, self.base)

    @property
    def is_written(self) -> bool:
        """True if a forward has written any layer."""
        if any(has_keys(layer) and layer.get_seq_length() for layer in self.layers):
            return True
        return any(any(self.layers[at].has_previous_state.values()) for at in self.kinds.num_states)

    def make_room(self, num_columns: int, wanted: int) -> None:
        """Make room for `num_columns` columns; the rows will have `wanted`, if that is not 0."""
        self.wanted = wanted
        if num_columns > self._room_end:
            held, room = self.all_memory(), room_for(num_columns, wanted) - self.base
            index = torch.arange(held[0].tensor.shape[1], device="cpu")
            self.take(memory.selected(held, index, self.n - self.base, room), self.n, self.base)

    def note_writes(self) -> None:
        """Note that everything written to the rows until here was written by us."""
        self._tensors = [tensor for tensor, _ in self.all_memory()]
        if self.windows is not None:
            self._tensors += self.windows.tensors()
        self._versions = tuple(map(_VERSION, self._tensors))

    @property
    def is_edited(self) -> bool:
        """True if somebody else has written to the rows."""
        return self._versions != tuple(map(_VERSION, self._tensors))

    @property
    def num_rows(self) -> int:
        return len(self.prompts)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all that the rows hold: segments, columns and states."""
        if self.why_bypassed is not None:
            return sum(states.nbytes for states in self.held_in_layers())
        segments = 0 if self.shared is None else self.shared.num_bytes
        own = memory.num_bytes(self.all_memory(), self.n - self.base)
        windows = 0 if self.windows is None else self.windows.num_bytes(self.n)
        return segments + own + windows + (0 if self.states is None else self.states.num_bytes)

    def held_in_layers(self) -> Iterator[Tensor]:
        """Yield the tensors that the layers of a bypassed call hold."""
        for layer in self.layers:
            if has_keys(layer) and layer.is_initialized:
                yield from streams_of(layer).values()
        if self.kinds.num_states:
            yield from LiveStates({at: self.layers[at] for at in self.kinds.num_states}).read().values()

    def _start_reads(self, start: int, stop: int) -> None:
        """Choose what the layers read in a forward of the columns `[start, stop)`."""
        if self.shared is not None and self.seen.dense:
            self.make_dense()
        self.reads = self.shared
        if self.shared is not None:
            self.shared.start_forward(start, stop)
        elif self.may_be_lazy and causal.pays(start, stop):
            self.reads = causal.CausalSquare(start, stop, self.looks)


def _another_layer(owner: "ref[RowsColumns]") -> RowsLayer:
    """Make one layer more than the model's config names."""
    rows = owner()
    assert rows is not None
    layer = RowsLayer(len(rows.layers), owner)
    rows.first = rows.first or layer
    return layer
