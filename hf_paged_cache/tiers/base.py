"""What a tier is asked, whatever it keeps contents in; and the least recently used order that all of them keep."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

from torch import Tensor

from ..blocks.hashing import BlockHash
from ..kv.contents import Part

BLOCKS, STATES = "blocks", "states"
Kind = str | int
"""What of a block is kept: BLOCKS, the layers that see all tokens; a window, those that see it; STATES, a snapshot at its end."""

Rows = Sequence[Tensor]
"""[N, bytes] of each part of a kind: what N blocks hold."""


class Name(NamedTuple):
    """By what a content is found. A hit needs hash and namespace to be equal."""

    block_hash: BlockHash
    namespace: bytes
    root: bytes = b""  # that its sequence begins with; where it is not known, a content is for this process alone

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Name) and self[:2] == other[:2]

    def __hash__(self) -> int:
        return hash(self[0][0])

    @property
    def digest(self) -> bytes:
        """Of the hash."""
        return self.block_hash.digest


@dataclass(slots=True)
class TierCounts:
    """What a tier has done, of blocks: without windows or states alone.

    Attributes:
        num_down: contents that it was given, of whatever kind.
        num_up: contents that were read back.
        num_dropped: contents that it had, and gave up for others or lost.
        num_refused: contents that it had no room for, or that were not worth it.
    """

    num_down: int = 0
    num_up: int = 0
    num_dropped: int = 0
    num_refused: int = 0


class Tier(Protocol):
    """Contents of blocks by name, within a budget. The store's lock is held, but for `load`."""

    counts: TierCounts

    @property
    def name(self) -> str: ...  # "host" or "disk"

    @property
    def num_bytes(self) -> int: ...  # taken now

    @property
    def max_bytes(self) -> int | None: ...

    def num_of(self, kind: Kind, namespace: bytes | None = None) -> int: ...  # contents kept

    def has(self, kind: Kind, name: Name) -> bool: ...  # effects: none

    def touch(self, kind: Kind, names: Iterable[Name]) -> None: ...  # they are used, and go last

    def put(
        self, kind: Kind, parts: Sequence[Part], names: Sequence[Name], rows: Rows, *, may_wait: bool
    ) -> None: ...  # keep what is not there yet

    def parts_of(self, kind: Kind) -> tuple[Part, ...]: ...  # of what is kept

    def hold(self, kind: Kind, names: Iterable[Name]) -> "Hold": ...  # nothing takes their place while it lives

    def in_order(self, kind: Kind, names: Iterable[Name]) -> list[Name]: ...  # those that are here, as they lie

    def load(
        self, kind: Kind, names: Sequence[Name]
    ) -> list[list[Tensor]]: ...  # of each part: rows in the order of the names, in some tensors

    def forget(self, names: Collection[Name]) -> None: ...  # of all kinds

    def forget_namespace(self, namespace: bytes) -> None: ...

    def reset(self) -> None: ...

    def check(self) -> None: ...


class Hold:
    """Contents that keep their places as long as this object lives: who holds them may be interrupted anywhere."""

    def __init__(self, names: Iterable[Name]) -> None:
        self.digests = {name.digest for name in names}


_Place = TypeVar("_Place")


class Shelf(Generic[_Place]):
    """Name -> place, the least recently used first. Those that are held are passed over when the first is asked for."""

    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, tuple[Name, _Place]] = OrderedDict()
        self._holds: WeakSet[Hold] = WeakSet()

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        """True also without any."""
        return True

    def __iter__(self) -> Iterator[tuple[Name, _Place]]:
        return iter(list(self._entries.values()))

    def get(self, name: Name) -> _Place | None:
        """Where a content is; None where it is not, or the digest has other tokens or another namespace."""
        entry = self._entries.get(name.digest)
        return entry[1] if entry is not None and entry[0] == name else None

    def has_digest(self, name: Name) -> bool:
        """Whether something has this digest, were it other tokens'."""
        return name.digest in self._entries

    def add(self, name: Name, place: _Place) -> None:
        """Keep a content whose digest is not there; it is the most recently used."""
        self._entries[name.digest] = (name, place)

    def touch(self, name: Name) -> None:
        """It is the most recently used."""
        if self.get(name) is not None:
            self._entries.move_to_end(name.digest)

    def oldest(self, held: Collection[bytes]) -> Name | None:
        """The least recently used that is not among those held."""
        return next((name for digest, (name, _) in self._entries.items() if digest not in held), None)

    def remove(self, name: Name) -> _Place:
        """Keep it no more; returns where it was."""
        return self._entries.pop(name.digest)[1]

    def hold(self, names: Iterable[Name]) -> Hold:
        """Nothing takes their place as long as the hold lives."""
        hold = Hold(names)
        self._holds.add(hold)
        return hold

    def held(self) -> set[bytes]:
        """Digests that must keep their places."""
        return {digest for hold in self._holds for digest in hold.digests}

    def num_of(self, namespace: bytes | None) -> int:
        """Contents of one namespace; None: of all."""
        if namespace is None:
            return len(self._entries)
        return sum(name.namespace == namespace for name, _ in self._entries.values())

    def clear(self) -> None:
        """Keep nothing."""
        self._entries.clear()
