"""The host tier keeps contents of blocks in pinned host memory, for pools on an accelerator.

Copies to it and from it are in one order with what the device computes, and the host waits for none of them. Whoever
reads a content with the host's own instructions asks first whether the content has arrived.
"""

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from ..errors import BlockStateError
from ..kv.contents import Part, events_on, new_rows, runs
from .base import Kind, Name, Rows, Tier

logger = logging.getLogger("hf_paged_cache")

_MAX_SLAB_BYTES = 2**26


class _Slab:
    """`_Slab` is a piece of pinned memory with rows side by side, for each part."""

    def __init__(self, first: int, num_rows: int, num_bytes: int, parts: Sequence[Part]) -> None:
        is_pinned = parts[0].device.type != "cpu"
        flat = new_rows(1, num_bytes, None if is_pinned else parts[0].device)[0]
        self.first, self.stop, self.num_bytes, self.rows = first, first + num_rows, num_bytes, []
        start = 0
        for part in parts:
            self.rows.append(flat[start : start + num_rows * part.num_bytes].view(num_rows, part.num_bytes))
            start += num_rows * part.num_bytes


class _Place(NamedTuple):
    """`_Place` says where a content lies, and when it has arrived there."""

    position: int
    arrival: Sequence[torch.Event]

    @property
    def has_arrived(self) -> bool:
        return all(event.query() for event in self.arrival)


class Hold:
    """`Hold` keeps contents in their places as long as it lives, also if its holder is interrupted anywhere."""

    def __init__(self, names: Iterable[Name]) -> None:
        self.digests = {name.digest for name in names}


class _Shelf:
    """`_Shelf` holds the contents of one kind, the least recently used first, in slots of one size.

    Slabs of slots are taken as they are needed.

    Args:
        parts: parts of which a row is made.
        max_bytes: most bytes of all slabs.
    """

    def __init__(self, parts: Sequence[Part], max_bytes: int) -> None:
        self.parts = tuple(parts)
        self.row_bytes = sum(part.num_bytes for part in parts)
        self.max_bytes = max_bytes
        self.entries: OrderedDict[bytes, tuple[Name, _Place]] = OrderedDict()
        self.free: deque[int] = deque()  # free slots, in the order in which they are taken
        self.holds: WeakSet[Hold] = WeakSet()
        self._slabs: list[_Slab] = []

    @property
    def num_bytes(self) -> int:
        return sum(slab.num_bytes for slab in self._slabs)

    def take(self) -> int | None:
        """Take a free slot; return None if there is none, and no memory for more."""
        if not self.free:
            self._grow()
        return self.free.popleft() if self.free else None

    def _grow(self) -> None:
        """Take one more slab, within the budget.

        Its bytes are a power of two, as pinned memory is dealt out in powers of two.
        """
        left = self.max_bytes - self.num_bytes
        wanted = max(_MAX_SLAB_BYTES, 1 << (self.row_bytes - 1).bit_length())
        num_bytes = 1 << (min(left, wanted).bit_length() - 1) if left > 0 else 0
        num_rows = num_bytes // self.row_bytes
        if not num_rows:
            return
        first = self._slabs[-1].stop + 1 if self._slabs else 0  # a gap: not side by side with the slab before
        try:
            slab = _Slab(first, num_rows, num_bytes, self.parts)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self.max_bytes = self.num_bytes
            logger.warning(
                "PagedPrefixCache: no more host memory can be pinned, so the host tier keeps %.1f MiB: %s",
                self.max_bytes / 2**20,
                str(error).partition("\n")[0],
            )
            return
        self._slabs.append(slab)
        self.free.extend(range(slab.first, slab.stop))

    def _slots(self) -> list[int]:
        return [slot for slab in self._slabs for slot in range(slab.first, slab.stop)]

    def derive(self) -> None:
        """Derive which slots are free."""
        used = {place.position for _, place in self.entries.values()}
        self.free = deque(slot for slot in self._slots() if slot not in used)

    def rows_at(self, part: int, slot: int, num_slots: int) -> Tensor:
        """Return rows of slots side by side, where they lie."""
        slab = next(slab for slab in self._slabs if slab.first <= slot < slab.stop)
        return slab.rows[part][slot - slab.first : slot - slab.first + num_slots]

    def check(self) -> None:
        used, slots = [place.position for _, place in self.entries.values()], self._slots()
        if sorted([*used, *self.free]) != slots:
            raise BlockStateError(
                f"slots must be free or have one content: {used} used, {list(self.free)} free of {slots}"
            )
        if self.num_bytes > self.max_bytes:
            raise BlockStateError(f"a tier of at most {self.max_bytes} bytes has taken {self.num_bytes}")


class HostTier(Tier):
    """`HostTier` keeps contents in host memory, at most `max_bytes`.

    The least recently used content goes to the tier below, or is dropped.

    Args:
        max_bytes: most bytes of memory taken.
        below: next tier.
    """

    name = "host"

    def __init__(self, max_bytes: int, below: Tier | None = None) -> None:
        super().__init__(max_bytes)
        self._below = below
        self._shelves: dict[Kind, _Shelf] = {}

    def __repr__(self) -> str:
        return f"HostTier({self.num_bytes} of {self.max_bytes} bytes)"

    def lay_out(self, parts: Mapping[Kind, Sequence[Part]], shares: Mapping[Kind, float]) -> None:
        """Use these parts of each kind from here on. Contents of kinds that had other parts are forgotten.

        Args:
            shares: kind -> its share of the budget.
        """
        layout = {kind: tuple(made) for kind, made in parts.items() if made}
        kept = self._shelves if self._shelves.keys() == layout.keys() else {}
        self._shelves = {
            kind: kept[kind]
            if kind in kept and kept[kind].parts == made
            else _Shelf(made, int(self.max_bytes * shares[kind]))
            for kind, made in layout.items()
        }

    def entries(self, kind: Kind) -> Mapping[bytes, tuple[Name, _Place]]:
        return self._shelves[kind].entries if kind in self._shelves else {}

    def parts_of(self, kind: Kind) -> tuple[Part, ...]:
        return self._shelves[kind].parts if kind in self._shelves else ()

    def hold(self, kind: Kind, names: Iterable[Name]) -> object:
        hold = Hold(names)
        self._shelves[kind].holds.add(hold)
        return hold

    @property
    def num_bytes(self) -> int:
        return sum(shelf.num_bytes for shelf in self._shelves.values())

    def touch(self, kind: Kind, names: Iterable[Name]) -> None:
        for name in names:
            if self.has(kind, name):
                self._shelves[kind].entries.move_to_end(name.digest)

    def put(self, kind: Kind, parts: Sequence[Part], names: Sequence[Name], rows: Rows, *, may_wait: bool) -> None:
        shelf = self._shelves.get(kind)
        if shelf is None or shelf.parts != tuple(parts):
            self._pass_on(kind, parts, names, rows, may_wait)
            return
        self.touch(kind, names)
        new = [index for index, name in enumerate(names) if name.digest not in shelf.entries]
        try:
            slots = self._take(kind, shelf, len(new), may_wait=may_wait)
            indices = new[len(new) - len(slots) :]  # contents that were used last
            for number, of_part in enumerate(rows):
                for start, length in runs(slots):
                    for first, count in runs(indices[start : start + length]):
                        at = start + first
                        target = shelf.rows_at(number, slots[at], count)
                        target.copy_(of_part[indices[at] : indices[at] + count], non_blocking=True)
            arrival = events_on(part.device for part in parts)
            for index, slot in zip(indices, slots, strict=True):
                shelf.entries[names[index].digest] = names[index], _Place(slot, arrival)
        except BaseException:  # such as an interrupt: no slot is lost
            shelf.derive()
            raise
        self.counts.num_down += len(slots)
        if refused := new[: len(new) - len(slots)]:
            self._pass_on(kind, parts, [names[index] for index in refused], [each[refused] for each in rows], may_wait)

    def _pass_on(self, kind: Kind, parts: Sequence[Part], names: Sequence[Name], rows: Rows, may_wait: bool) -> None:
        """Pass contents for which there is no room here to the tier below, if there is one."""
        self.counts.num_refused += len(names)
        if self._below is not None:
            self._below.put(kind, parts, names, rows, may_wait=may_wait)

    def _take(self, kind: Kind, shelf: _Shelf, number: int, *, may_wait: bool) -> list[int]:
        """Take up to `number` slots. The least recently used contents make room, but for those that are held."""
        slots: list[int] = []
        held: set[bytes] | None = None
        while len(slots) < number:
            slot = shelf.take()
            if slot is None:
                if held is None:
                    held = {digest for hold in shelf.holds for digest in hold.digests}
                oldest = next((entry for digest, entry in shelf.entries.items() if digest not in held), None)
                if oldest is None:
                    break
                self._send_below(kind, shelf, *oldest, may_wait=may_wait)
                self.counts.num_dropped += 1
                slot = oldest[1].position
                del shelf.entries[oldest[0].digest]
            slots.append(slot)
        return sorted(slots)

    def _send_below(self, kind: Kind, shelf: _Shelf, name: Name, place: _Place, *, may_wait: bool) -> None:
        """Let the tier below copy a content before its slot is written anew.

        A content that has not arrived is waited for if that is allowed; else it is lost.
        """
        below = self._below
        if below is None:
            return
        if below.has(kind, name):
            below.touch(kind, (name,))
            return
        if not place.has_arrived:
            if not may_wait:
                return
            for event in place.arrival:
                event.synchronize()
        rows = [shelf.rows_at(number, place.position, 1).clone() for number in range(len(shelf.parts))]
        below.put(kind, shelf.parts, (name,), rows, may_wait=may_wait)

    def load(self, kind: Kind, names: Sequence[Name]) -> list[list[Tensor]]:
        """Return, for each part, rows in the order of the names, where they lie: only the device may copy from them."""
        shelf = self._shelves[kind]
        slots = [shelf.entries[name.digest][1].position for name in names]  # all names are held
        self.counts.num_up += len(names)
        return [
            [shelf.rows_at(number, slots[start], length) for start, length in runs(slots)]
            for number in range(len(shelf.parts))
        ]

    def forget_namespace(self, namespace: bytes) -> None:
        for shelf in self._shelves.values():
            for digest in [digest for digest, (name, _) in shelf.entries.items() if name.namespace == namespace]:
                del shelf.entries[digest]
            shelf.derive()

    def reset(self) -> None:
        self._shelves = {}

    def check(self) -> None:
        """Prove that each slot is free or has one content, and that budgets are kept, or raise BlockStateError."""
        for shelf in self._shelves.values():
            shelf.check()
        if self.num_bytes > self.max_bytes:
            raise BlockStateError(f"the host tier of at most {self.max_bytes} bytes has taken {self.num_bytes}")


def shares_of(kinds: Mapping[Kind, int], weights: Mapping[Kind, float]) -> dict[Kind, float]:
    """Return the share of a budget that each kind gets.

    Args:
        kinds: kind -> bytes of a content of this kind.
        weights: kind -> number of its contents for each block.
    """
    wanted = {kind: num_bytes * weights[kind] for kind, num_bytes in kinds.items()}
    total = sum(wanted.values())
    return {kind: number / total for kind, number in wanted.items()} if total else {}
