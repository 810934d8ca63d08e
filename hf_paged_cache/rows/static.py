"""Owns the memory of static rows: rows of a fixed room at fixed addresses, over which graphs of forwards are captured.

A device has one `Arena`. One call has the arena at a time; meanwhile other calls run on memory of their own.

columns of a static row: [0, pad) padding | [pad, n) valid | [n, room) finite, hidden by the mask
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor

from ..kv.tensors import zeros
from ..locks import new_lock
from .memory import Shape, Stream, Streams

_SMALLEST_ROOM = 512


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


class HoldsGraphs(Protocol):
    """`HoldsGraphs` has captured graphs over an arena."""

    @property
    def num_graphs(self) -> int: ...

    def drop(self) -> None: ...  # called before the memory under the graphs goes


class Arena:
    """`Arena` holds memory for the static rows of one call at a time. Rows of every number and room begin at its start.

    Attributes:
        most_bytes: returns how many bytes the arena may take now. None: half of the free memory on an accelerator, and
            whatever is asked for on a host.
        captured: graphs over the arena, which are dropped with its memory; None: there were none.
    """

    def __init__(self) -> None:
        self.most_bytes: Callable[[], int] | None = None
        self.captured: HoldsGraphs | None = None
        self._lock = new_lock()
        self._holder: ref[Any] | None = None
        self._shapes: tuple[Shape, ...] = ()
        self._flat: list[Tensor] = []  # for each shape, the memory of all its streams
        self._rows: dict[tuple[int, int], list[Streams]] = {}  # (rows, room) -> their memory
        self._written: Any = None  # event behind what the last holder wrote

    def check_out(self, holder: object) -> bool:
        """Give the arena to a holder, until it is given back or the holder is collected; return whether it was free."""
        with self._lock:
            if self._holder is not None and self._holder() is not None:
                return False
            self._holder = ref(holder)
        if self._written is not None:
            self._written.wait(torch.cuda.current_stream(self._flat[0].device))
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
    def is_busy(self) -> bool:
        """True if a call has the arena."""
        return self._holder is not None and self._holder() is not None

    @property
    def shapes(self) -> Sequence[Shape]:
        """Shapes of the rows that lay in the arena last; empty before any did."""
        return self._shapes

    @property
    def num_bytes(self) -> int:
        """Bytes that the arena takes."""
        return sum(flat.nbytes for flat in self._flat)

    @property
    def num_graphs(self) -> int:
        """Number of graphs that are captured over the arena."""
        return 0 if self.captured is None else self.captured.num_graphs

    def holds(self, memory: Sequence[Streams]) -> bool:
        """Return whether any of this memory is the arena's."""
        ours = {flat.data_ptr() for flat in self._flat}
        return any(tensor.untyped_storage().data_ptr() in ours for tensor, _ in memory)

    def drop(self) -> None:
        """Give all memory back, and what was captured over it; rows that still lie in the memory keep it."""
        if self._flat and self._flat[0].device.type == "cuda":
            torch.cuda.synchronize(self._flat[0].device)  # a graph may run yet
        if self.captured is not None:
            self.captured.drop()
        self._rows, self._flat, self._shapes, self._written = {}, [], (), None

    def fits(self, shapes: Sequence[Shape], num_rows: int, room: int) -> bool:
        """Return whether the arena has, or may take, memory for such rows."""
        needed = sum(_num_elements(shape, num_rows, room) * shape.dtype.itemsize for shape in shapes)
        has_it = tuple(shapes) == self._shapes and needed <= self.num_bytes
        return has_it or needed <= self._most(shapes)

    def room(self, num_rows: int, num_columns: int) -> int:
        """Return the room for so many columns: one that was used before, if it is at most twice what is needed."""
        least = room_of(num_columns)
        used = [room for rows, room in self._rows if rows == num_rows and least <= room <= 2 * least]
        return min(used, default=least)

    def memory(self, shapes: Sequence[Shape], num_rows: int, room: int) -> list[Streams] | None:
        """Return the memory of so many rows, in which anything may lie; None: it does not fit.

        The memory stays the same until the arena is dropped.
        """
        if tuple(shapes) != self._shapes:
            self.drop()
            self._shapes = tuple(shapes)
        held = self._rows.get((num_rows, room))
        if held is not None:
            return held
        needed = [_num_elements(shape, num_rows, room) for shape in shapes]
        if not self._flat or any(flat.numel() < number for flat, number in zip(self._flat, needed, strict=True)):
            if not self.fits(shapes, num_rows, room):
                return None
            twice = [max(number, 2 * flat.numel()) for number, flat in zip(needed, self._flat, strict=False)]
            num_bytes = sum(number * shape.dtype.itemsize for number, shape in zip(twice, shapes, strict=False))
            sizes = twice if twice and num_bytes <= self._most(shapes) else needed
            self.drop()
            self._shapes = tuple(shapes)
            try:
                self._flat = [zeros((size,), each.dtype, each.device) for each, size in zip(shapes, sizes, strict=True)]
            except torch.OutOfMemoryError:
                return None
        made = []
        for flat, shape, number in zip(self._flat, shapes, needed, strict=True):
            tensor = flat[:number].view(len(shape.names), num_rows, shape.heads, room, shape.head_dim)
            made.append(Streams(tensor, shape.names))
        self._rows[num_rows, room] = made
        return made

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
