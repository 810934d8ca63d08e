"""Owns the columns of one call's rows: their number, and all tensors in which keys and values lie.

The columns lie in memory of these rows alone. Before that memory may come segments that several rows have in common.
This module knows no tokens and no forwards.
"""

import math
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from ..attention.causal import CausalSquare
from ..kv.states import LiveStates
from ..model.layer_streams import streams_of
from ..model.support import has_keys
from . import memory
from .indexed import positions_of
from .kinds import LayerKinds
from .layers import Reads, RowsLayer, room_for
from .memory import Columns, Streams
from .shared import Looks, Seen, SharedColumns, SquareReads
from .states import RowStates
from .windows import WindowColumns

_VERSION = attrgetter("_version")
_IS_OWN = attrgetter("is_own")
_TENSOR = attrgetter("tensor")


class Prompt:
    """`Prompt` says what one row began with.

    Attributes:
        root: the row's prefix key: a digest of all that shapes its keys and values besides tokens.
        pad: columns of left padding.
        first_position: position of the row's first token.
        shift: how far images have moved the positions of the text after them; None: not known.
        kept: number of leading tokens whose blocks need not be kept any more.
        most_kept: most leading tokens that may be kept: the tokens after them only fill the row up; None: all.
        image_end: number of tokens up to the end of the row's last image. The block in which the image ends is to be
            kept up to there; None: there is no such image.
    """

    __slots__ = ("first_position", "image_end", "kept", "most_kept", "pad", "root", "shift")

    def __init__(self, root: bytes = b"", pad: int = 0, first_position: int = 0, shift: int | None = 0) -> None:
        self.root, self.pad, self.first_position, self.shift = root, pad, first_position, shift
        self.kept = 0
        self.image_end: int | None = None
        self.most_kept: int | None = None

    def copy(self) -> "Prompt":
        """Return a copy for another row."""
        copied = Prompt(self.root, self.pad, self.first_position, self.shift)
        copied.kept, copied.image_end, copied.most_kept = self.kept, self.image_end, self.most_kept
        return copied


class RowsColumns(Cache):
    """`RowsColumns` has the columns of a call's rows, in all layers.

    columns: [0, pad) padding | [pad, n) valid in all layers, between two forwards

    Args:
        kinds: kinds of the model's layers.
        looks: whether the model looks at keys and values itself.

    Attributes:
        n: number of columns, the same for all rows.
        base: first column that lies in the rows' own memory; the columns before it are shared.
        prompts: what each row began with; empty before the first forward.
        memory: memory of the layers without a window; streams of one shape lie together in one tensor.
        windows: columns of the layers with a window; None: no layer has one.
        states: what layers carry beside columns, or in place of columns; None: no layer carries a state.
        is_exact: True if rows can go on only after certain columns, because layers have windows or carry states.
        first: first layer with columns; None: no layer has any.
        has_own: True if some layers have memory of their own.
        why_bypassed: why these rows reuse and keep nothing, and run on transformers' own layers; None: they do not.
        is_running: True if a forward has begun and not returned.
        is_whole: True if every stream has all columns; if not, nothing more is kept.
        shared: segments that several rows have in common, held once; None: each row has all of its columns.
        may_be_lazy: True if attention may be given keys and values that it reads lazily.
        seen: how attention has read the rows.
    """

    layers: list[Any]
    first: Any
    is_exact: bool

    def __init__(self, kinds: LayerKinds, looks: Looks) -> None:
        self._itself, self.kinds = ref(self), kinds
        self.windows: WindowColumns | None = None
        self.states: RowStates | None = None
        super().__init__(layers=[])
        self.make_layers()
        self._given: list[RowsLayer] = []  # layers into which somebody has put keys or values
        self.n = self.base = 0
        self.prompts: list[Prompt] = []
        self.memory: list[Streams] = []
        self.why_bypassed: str | None = None
        self.is_running, self.is_whole = False, True
        self.shared: SharedColumns | None = None
        self.looks, self.seen = looks, Seen()
        self.may_be_lazy = False
        self._reads: Any = None
        self._tensors: list[Tensor] = []  # all tensors in which the rows lie
        self._versions: tuple[int, ...] = ()  # versions of these tensors after our own last write
        self.has_own = False
        self._room_end = math.inf  # column at which the shortest tensor of `memory` ends

    def make_layers(self) -> None:
        """Put new layers that hold nothing into the same list of layers."""
        itself, kinds = self._itself, self.kinds
        self.layers[:] = layers = kinds.make(itself)
        self.windows = WindowColumns(layers) if kinds.sights else None
        self.states = RowStates({at: layers[at] for at in kinds.num_states}, kinds.places) if kinds.num_states else None
        self.is_exact = self.windows is not None or self.states is not None
        self.first = next(filter(_has_columns, layers), None)
        self.layer_class_to_replicate = partial(another_layer, self.layers, itself)  # type: ignore[assignment]

    def can_go_on_at(self, n: int) -> bool:
        """Return whether the rows hold all that the token after the first `n` columns needs."""
        if self.states is not None and not (n == self.n and self.states.are_whole):
            return False
        return self.windows is None or self.windows.can_go_on_at(n)

    def note_sharing(self) -> None:
        """Note that rows have columns in common from here on, some of which may lie in blocks."""

    def note_given(self, layer: RowsLayer) -> None:
        """Note that somebody has put keys or values into a layer."""
        self._given.append(layer)

    def note_shown(self) -> None:
        """Note that somebody gets keys or values, and may write to them unseen: nothing more is kept."""
        self.is_whole = False

    def positions(self, device: torch.device) -> Tensor | None:
        """Return the positions of all columns so far, [3, R, n]; see `Owner`."""
        return positions_of(
            [row.pad for row in self.prompts], [row.first_position for row in self.prompts], self.n, device
        )

    def share(self, shared: SharedColumns, held: list[Streams], n: int) -> None:
        """Let the rows have these segments in common from here on.

        Args:
            shared: the segments.
            held: memory of the rows' own columns, which begin behind the first segment that ends.
            n: number of columns of the rows.
        """
        shared.rows, shared.seen = ref(self), self.seen
        self.note_sharing()
        self.take(held, n, shared.plan.first_own)
        self.shared = self._reads = shared
        for layer in self.layers:
            layer.reads = shared

    def make_dense(self) -> None:
        """Give each row all of its columns, in memory of its own."""
        shared, n = self.shared, self.n
        if shared is None:
            return
        if not self.is_running and self.is_edited:
            self.is_whole = False
        stop = max(n, *(layer.n for layer in self.layers))  # in the middle of a forward some layers have more columns
        self.has_own = any(map(_IS_OWN, self.layers))  # some layers may have got memory of their own
        room = room_for(stop, self.first.wanted)
        own = self.all_memory()
        whole = memory.make(memory.shapes_of_rows(own), self.num_rows, room)
        for row in range(self.num_rows):
            self.copy_columns(row, shared.plan.pads[row], stop, whole, row, shared.plan.pads[row])
        self.shared = self._reads = None
        for layer in self.layers:
            layer.reads = None
        self.take(whole, n)

    def copy_columns(self, row: int, start: int, stop: int, to: list[Streams], to_row: int, column: int) -> None:
        """Copy the columns `[start, stop)` of a row, wherever they lie, to a row of other memory.

        Args:
            to_row: row of the other memory.
            column: column of the other memory that the first copied column becomes.
        """
        at = start
        if self.shared is not None:
            at = self.shared.copy_columns(row, start, stop, to, to_row, column)
        if at < stop:
            memory.copy_columns(self.columns(row, at, stop), to, to_row, column + at - start)

    def take(self, held: list[Streams], n: int, base: int = 0) -> None:
        """Let the rows lie in this memory from here on: its first columns are the columns `[base, n)`."""
        self.memory, self.n, self.base = held, n, base
        lengths = [n if layer.held is None else layer.n for layer in self.layers]  # a forward may have skipped layers
        places, room_end = dict[int, dict[str, Tensor]](), math.inf
        for tensor, names in held:
            room_end = min(room_end, base + tensor.shape[3])
            for (layer_idx, name), part in zip(names, tensor, strict=True):
                places.setdefault(layer_idx, {})[name] = part
        missing = range(len(self.layers), 1 + max(places, default=-1))
        self.layers += map(RowsLayer, missing, repeat(self._itself))
        lengths += [n] * len(missing)
        for layer_idx, of_layer in places.items():
            self.layers[layer_idx].lie_in(of_layer, lengths[layer_idx], base)
        self.has_own, self._room_end = any(map(_IS_OWN, self.layers)), room_end
        self.note_writes()

    def all_memory(self) -> list[Streams]:
        """Return the memory of all layers without a window, also of layers that have memory of their own."""
        if not self.has_own or self.why_bypassed is not None:
            return self.memory
        found = []
        for tensor, names in self.memory:
            for number, name in enumerate(names):
                if not self.layers[name[0]].is_own:
                    found.append(Streams(tensor[number : number + 1], (name,)))
        return found + [streams for layer in self.layers if layer.is_own for streams in layer.streams()]

    @property
    def is_written(self) -> bool:
        """True if a forward has written any layer."""
        if any(has_keys(layer) and layer.get_seq_length() for layer in self.layers):
            return True
        return any(any(self.layers[at].has_previous_state.values()) for at in self.kinds.num_states)

    def make_room(self, num_columns: int, wanted: int) -> None:
        """Make room for `num_columns` columns in the memory in which streams lie together.

        Args:
            wanted: columns that the rows will have; 0 where that is not known.
        """
        for layer in self.layers:
            layer.wanted = wanted
        if num_columns > self._room_end:
            self.has_own = any(map(_IS_OWN, self.layers))
            held, room = self.all_memory(), room_for(num_columns, wanted) - self.base
            index = torch.arange(held[0].tensor.shape[1], device="cpu")
            self.take(memory.selected(held, index, self.n - self.base, room), self.n, self.base)

    def note_writes(self) -> None:
        """Note that everything written to the rows until here was written by us."""
        self._tensors = [*map(_TENSOR, self.all_memory() if self.has_own else self.memory)]
        if self.windows is not None:
            self._tensors += self.windows.tensors()
        self._versions = tuple(map(_VERSION, self._tensors))

    @property
    def is_edited(self) -> bool:
        """True if somebody else has written to the rows."""
        return bool(self._given) or self._versions != tuple(map(_VERSION, self._tensors))

    @property
    def is_edited_or_ahead(self) -> bool:
        """True if somebody has put keys or values into layers, or layers have columns that the rows do not have."""
        return bool(self._given) or ((first := self.first) is not None and first.n != self.n)

    @property
    def num_rows(self) -> int:
        """Number of rows that run."""
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

    def columns(self, row: int, start: int, stop: int) -> Columns:
        """Return the columns `[start, stop)` of a row side by side.

        They are returned where they lie, or as copies where some of them lie in segments that rows share.
        """
        own = self.all_memory()
        if start >= (self.base if self.shared is None else self.shared.plan.ends[row]):
            return Columns(own, row, start - self.base, stop - self.base)
        made = memory.make(memory.shapes_of_rows(own), 1, stop - start)
        self.copy_columns(row, start, stop, made, 0, 0)
        return Columns(made, 0, 0, stop - start)

    def _start_reads(self, start: int, stop: int) -> None:
        """Choose what the layers read in a forward of the columns `[start, stop)`."""
        shared, reads = self.shared, cast(Reads | None, None)
        if shared is not None and shared.must_leave:
            self.make_dense()
        elif shared is not None:
            shared.start_forward(start, stop)
            reads = shared
        elif start and stop - start > 1 and self.may_be_lazy and CausalSquare.pays(start, stop):
            reads = SquareReads(start, stop, self.looks)
        if reads is not self._reads:
            self._reads = reads
            for layer in self.layers:
                layer.reads = reads


def _has_columns(layer: Any) -> bool:
    return isinstance(layer, RowsLayer)


def another_layer(layers: list[Any], owner: "ref[RowsColumns]") -> RowsLayer:
    """Make one layer more than the model's config names."""
    layer, rows = RowsLayer(len(layers), owner), owner()
    if rows is not None and rows.first is None:
        rows.first = layer
    return layer
