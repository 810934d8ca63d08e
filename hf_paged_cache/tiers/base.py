"""What a tier is, whatever it keeps contents in: names in the order in which they were used, and what is asked of it."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar
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
    """Contents that a tier was given, read back, gave up or lost, and had no room for."""

    num_down: int = 0
    num_up: int = 0
    num_dropped: int = 0
    num_refused: int = 0


class Hold:
    """Contents that keep their places as long as this object lives: who holds them may be interrupted anywhere."""

    def __init__(self, names: Iterable[Name]) -> None:
        self.digests = {name.digest for name in names}


_P = TypeVar("_P", bound=Any)  # a place, with a `position` in the order in which contents lie


class Shelf(Generic[_P]):
    """The contents of one kind: name -> place, the least recently used first.

    Args:
        parts: what a row is made of.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = tuple(parts)
        self._entries: OrderedDict[bytes, tuple[Name, _P]] = OrderedDict()
        self._holds: WeakSet[Hold] = WeakSet()

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        """True also without any."""
        return True

    def __iter__(self) -> Iterator[tuple[Name, _P]]:
        return iter(list(self._entries.values()))

    def get(self, name: Name) -> _P | None:
        """Where a content is; None where it is not, or the digest has other tokens or another namespace."""
        entry = self._entries.get(name.digest)
        return entry[1] if entry is not None and entry[0] == name else None

    def has_digest(self, name: Name) -> bool:
        """Whether something has this digest, were it other tokens'."""
        return name.digest in self._entries

    def add(self, name: Name, place: _P) -> None:
        """Keep a content whose digest is not there; it is the most recently used."""
        self._entries[name.digest] = (name, place)

    def touch(self, name: Name) -> None:
        """It is the most recently used."""
        if self.get(name) is not None:
            self._entries.move_to_end(name.digest)

    def oldest(self, held: Collection[bytes]) -> Name | None:
        """The least recently used that is not among those held."""
        return next((name for digest, (name, _) in self._entries.items() if digest not in held), None)

    def remove(self, name: Name) -> _P:
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


_NOTHING: Shelf[Any] = Shelf(())


class Tier(ABC):
    """Contents of blocks by name, within a budget. The store's lock is held, but for `load`.

    Attributes:
        name: "host" or "disk".
        max_bytes: that it may take; None: it only reads.
    """

    name: str
    max_bytes: int | None = None

    def __init__(self) -> None:
        self.counts = TierCounts()
        self._shelves: dict[Kind, Any] = {}  # kind -> `Shelf` of whatever places this tier has
        self._is_dirty = False

    def _shelf(self, kind: Kind) -> Shelf[Any]:
        shelf: Shelf[Any] = self._shelves.get(kind, _NOTHING)
        return shelf

    def _place_of(self, kind: Kind, name: Name) -> Any:
        return self._shelf(kind).get(name)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Where this is left by an exception, the next change derives first what follows from the shelves."""
        self._settle()
        self._is_dirty = True
        yield
        self._is_dirty = False

    def _settle(self) -> None:
        if self._is_dirty:
            self._derive()
            self._is_dirty = False

    @abstractmethod
    def _derive(self) -> None:
        """Derive what follows from the shelves and the runs."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Taken now."""

    def num_of(self, kind: Kind, namespace: bytes | None = None) -> int:
        """Contents of a kind, of one namespace or of all."""
        shelf = self._shelf(kind)
        return len(shelf) if namespace is None else sum(name.namespace == namespace for name, _ in shelf)

    def parts_of(self, kind: Kind) -> tuple[Part, ...]:
        """What a row of this kind is made of."""
        return self._shelf(kind).parts

    def has(self, kind: Kind, name: Name) -> bool:
        """Whether this content is here."""
        return self._place_of(kind, name) is not None

    def hold(self, kind: Kind, names: Iterable[Name]) -> Hold:
        """Nothing takes their place as long as the hold lives."""
        return self._shelf(kind).hold(names)

    def in_order(self, kind: Kind, names: Iterable[Name]) -> list[Name]:
        """Those that are here, in the order in which they lie, so that few copies load many."""
        place_of = {name: place for name in names if (place := self._place_of(kind, name)) is not None}
        return sorted(place_of, key=lambda name: place_of[name].position)

    @abstractmethod
    def touch(self, kind: Kind, names: Iterable[Name]) -> None:
        """They are used, and go last."""

    @abstractmethod
    def put(self, kind: Kind, parts: Sequence[Part], names: Sequence[Name], rows: Rows, *, may_wait: bool) -> None:
        """Keep contents that are not here yet, as far as there is room; copies are launched and not waited for.

        Args:
            rows: of each part, on its device or on the host; the host's are kept as they are.
            may_wait: a content that goes from here to the next tier may be waited for.
        """

    @abstractmethod
    def load(self, kind: Kind, names: Sequence[Name]) -> list[list[Tensor]]:
        """Of each part, rows in the order of the names, in some tensors. The names are `in_order`'s."""

    @abstractmethod
    def forget(self, names: Collection[Name]) -> None:
        """Keep these contents no more, of whatever kind."""

    def forget_namespace(self, namespace: bytes) -> None:
        """Keep no content of a namespace."""
        self.forget({name for shelf in self._shelves.values() for name, _ in shelf if name.namespace == namespace})

    @abstractmethod
    def reset(self) -> None:
        """Keep nothing, and give memory and files back."""

    @abstractmethod
    def check(self) -> None:
        """Prove the tier's invariants, or raise BlockStateError."""
