"""Owns the memory of static rows: rows of a fixed room at fixed addresses, and the graphs that are captured over it.

A device has one `Arena`. One call has the arena at a time; meanwhile other calls run on memory of their own.

columns of a static row: [0, pad) padding | [pad, n) valid | [n, room) finite, hidden by the mask
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ..kv.tensors import zeros
from ..locks import new_lock
from .graphs import FAILURES, Captured, Model, failed
from .memory import Shape, Stream, Streams

NUM_CHECKS = 2  # number of replays of a graph that are compared with the eager forward
_SMALLEST_ROOM = 512
_CAPTURE_SECONDS = 0.3  # time that a capture is taken to need, before one was measured
_SAVED_SECONDS = 0.015  # time that a replay is taken to save, before one was measured
_TIMES_AGAIN = 8  # a graph is expected to be wanted this many times as often as it was


def room_of(num_columns: int) -> int:
    """Return the smallest room that holds so many columns: a power of two, or half as many columns more.

    Examples:
        >>> [room_of(number) for number in (1, 513, 1025, 1600, 2049, 5000)]
        [512, 1024, 1536, 2048, 3072, 6144]
    """
    room = _SMALLEST_ROOM
    while room < num_columns:
        if room >= 2 * _SMALLEST_ROOM and room + room // 2 >= num_columns:
            return room + room // 2
        room *= 2
    return room


@dataclass
class Graph:
    """`Graph` keeps what is known of the forwards of one shape, and their graph once it is captured."""

    captured: Captured | None = None
    why_not: str = ""  # why they are not captured any more
    look: Mapping[str, object] = field(default_factory=dict)  # what `Model.look` returned when they were captured
    checked: list[int] = field(default_factory=list)  # columns before each replay that was compared
    num_wanted: int = 0  # number of forwards that would have been replays
    saved_seconds: float | None = None  # time that a replay saves against the eager forward; None: not measured

    def drop(self) -> None:
        """Give the graph up; what was counted stays."""
        self.captured = None
        self.checked.clear()

    def is_to_check(self, length: int) -> bool:
        """Return whether the next replay, at this length, is compared.

        The first replays are, and one more at another length, if all of these were at one length.
        """
        return len(self.checked) < NUM_CHECKS or (len({*self.checked}) == 1 and length not in self.checked)


class Arena:
    """`Arena` holds memory for the static rows of one call at a time. Rows of every number and room begin at its start.

    Graphs are dropped with the memory, and where another model is captured.
    """

    def __init__(self) -> None:
        # Returns how many bytes the arena may take now. None: half of an accelerator's free memory; all of a host's.
        self.most_bytes: Callable[[], int] | None = None
        self.capture_seconds, self._saved_seconds, self._is_measured = _CAPTURE_SECONDS, _SAVED_SECONDS, False
        self.shapes: tuple[Shape, ...] = ()  # of the rows that lay here last
        self._lock = new_lock()
        self._holder: ref[Any] | None = None
        self._digest = b""  # fingerprint of the model that is captured
        self._graphs: dict[tuple[object, ...], Graph] = {}
        self._pool: Any = None  # memory of the graphs themselves
        self._flat: list[Tensor] = []  # for each shape, the memory of all its streams
        self._rows: dict[tuple[int, int], list[Streams]] = {}  # (rows, room) -> their memory
        self._written: Any = None  # event behind what the last holder wrote

    def check_out(self, holder: object, digest: bytes) -> bool:
        """Give the arena to a holder, until it is given back or the holder is collected; return whether it was free.

        Graphs of a model with another fingerprint than `digest` are forgotten.
        """
        with self._lock:
            if self._holder is not None and self._holder() is not None:
                return False
            self._holder = ref(holder)
        if self._written is not None:
            self._written.wait(torch.cuda.current_stream(self._flat[0].device))
        if digest != self._digest:
            self._digest, self._graphs, self._pool = digest, {}, None
        return True

    def check_in(self, holder: object) -> None:
        """Take the arena back from its holder."""
        if self._flat and self._flat[0].device.type == "cuda":
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._written.record(torch.cuda.current_stream(self._flat[0].device))
        with self._lock:
            if self._holder is not None and self._holder() is holder:
                self._holder = None

    @property
    def num_bytes(self) -> int:
        """Bytes that the arena takes."""
        return sum(flat.nbytes for flat in self._flat)

    @property
    def num_graphs(self) -> int:
        """Number of graphs that are captured over the arena."""
        return sum(graph.captured is not None for graph in self._graphs.values())

    def holds(self, memory: Sequence[Streams]) -> bool:
        """Return whether any of this memory is the arena's."""
        ours = {flat.data_ptr() for flat in self._flat}
        return any(tensor.untyped_storage().data_ptr() in ours for tensor, _ in memory)

    def drop(self) -> None:
        """Give all memory back, and what was captured over it; rows that still lie in the memory keep it."""
        if self._flat and self._flat[0].device.type == "cuda":
            torch.cuda.synchronize(self._flat[0].device)  # a graph may run yet
        self._pool = None
        for graph in self._graphs.values():
            graph.drop()
        self._rows, self._flat, self.shapes, self._written = {}, [], (), None

    def fits(self, shapes: Sequence[Shape], num_rows: int, room: int) -> bool:
        """Return whether the arena has, or may take, memory for such rows."""
        needed = sum(_num_elements(shape, num_rows, room) * shape.dtype.itemsize for shape in shapes)
        has_it = tuple(shapes) == self.shapes and needed <= self.num_bytes
        return has_it or needed <= self._most(shapes)

    def room(self, num_rows: int, num_columns: int) -> int:
        """Return the room for so many columns: one that was used before, if it is at most twice what is needed."""
        least = room_of(num_columns)
        used = [room for rows, room in self._rows if rows == num_rows and least <= room <= 2 * least]
        return min(used, default=least)

    def memory(self, shapes: Sequence[Shape], num_rows: int, room: int) -> list[Streams] | None:
        """Return the memory of so many rows, zeroed: what others left may not be finite. None: it does not fit.

        The memory stays the same until the arena is dropped.
        """
        if (num_rows, room) not in self._rows or tuple(shapes) != self.shapes:
            made = self._make(tuple(shapes), num_rows, room)
            if made is None:
                return None
            self._rows[num_rows, room] = made
        for tensor, _ in self._rows[num_rows, room]:
            tensor.zero_()
        return self._rows[num_rows, room]

    def _make(self, shapes: tuple[Shape, ...], num_rows: int, room: int) -> list[Streams] | None:
        if shapes != self.shapes:
            self.drop()
            self.shapes = shapes
        needed = [_num_elements(shape, num_rows, room) for shape in shapes]
        if not self._flat or any(flat.numel() < number for flat, number in zip(self._flat, needed, strict=True)):
            if not self.fits(shapes, num_rows, room):
                return None
            twice = [max(number, 2 * flat.numel()) for number, flat in zip(needed, self._flat, strict=False)]
            num_bytes = sum(number * shape.dtype.itemsize for number, shape in zip(twice, shapes, strict=False))
            sizes = twice if twice and num_bytes <= self._most(shapes) else needed
            self.drop()
            self.shapes = shapes
            try:
                self._flat = [zeros((size,), each.dtype, each.device) for each, size in zip(shapes, sizes, strict=True)]
            except torch.OutOfMemoryError:
                return None
        made = []
        for flat, shape, number in zip(self._flat, shapes, needed, strict=True):
            tensor = flat[:number].view(len(shape.names), num_rows, shape.heads, room, shape.head_dim)
            made.append(Streams(tensor, shape.names))
        return made

    def graph(self, *key: object) -> Graph:
        """Return what is known of forwards of these rows, tokens, room and settings."""
        return self._graphs.setdefault(key, Graph())

    def capture(
        self, graph: Graph, model: Model, held: Sequence[Streams], tokens: int, facts: Mapping[str, object]
    ) -> None:
        """Capture a graph over this memory, or note why that failed."""
        began = perf_counter()
        try:
            captured = Captured(model, held, tokens)
            self._pool = captured.capture(self._pool)
        except FAILURES as error:
            graph.why_not, self._pool = failed(error), None
            return
        graph.captured, graph.look = captured, facts
        graph.checked.clear()
        self.capture_seconds = perf_counter() - began

    def pays(self, graph: Graph, num_coming: int) -> bool:
        """Return whether a replay pays, or where nothing is captured yet, whether a capture is expected to."""
        if graph.captured is not None:
            return graph.saved_seconds is None or graph.saved_seconds > 0 or len(graph.checked) < NUM_CHECKS
        return (_TIMES_AGAIN * graph.num_wanted + num_coming) * self._saved_seconds > self.capture_seconds

    def note_saved(self, graph: Graph, seconds: float) -> None:
        """Note that a replay took so much less time than the eager forward."""
        graph.saved_seconds = seconds
        self._saved_seconds = max(self._saved_seconds, seconds) if self._is_measured else seconds
        self._is_measured = self._is_measured or seconds > 0

    def _most(self, shapes: Sequence[Shape]) -> float:
        if self.most_bytes is not None:
            return self.most_bytes()
        if not shapes or shapes[0].device.type != "cuda":
            return float("inf")
        device = shapes[0].device
        free = (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
        return (free + self.num_bytes) // 2


def _num_elements(shape: Shape, num_rows: int, room: int) -> int:
    return len(shape.names) * num_rows * shape.heads * room * shape.head_dim


def together(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """Put streams that are alike into one shape; names are in the order of layers."""
    names: dict[tuple[Any, ...], list[Stream]] = {}
    for of_shape, *kind in shapes:
        names.setdefault(tuple(kind), []).extend(of_shape)
    return tuple(Shape(tuple(sorted(of_kind)), *kind) for kind, of_kind in names.items())
