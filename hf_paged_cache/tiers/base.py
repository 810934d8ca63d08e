"""What a tier is, whatever it keeps contents in, and by what a content is found there."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    root: bytes = b""  # that its sequence begins with, where that is known; b"": no file may have the content

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
    """Contents that a tier was given, read back, gave up, and did not take."""

    num_down: int = 0
    num_up: int = 0
    num_dropped: int = 0
    num_refused: int = 0


class Tier(ABC):
    """Contents of blocks by name, within a budget. The store's lock is held, but for `load` of files.

    Attributes:
        name: "host" or "disk".
        max_bytes: that it may take.
    """

    name: str

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.counts = TierCounts()

    @abstractmethod
    def entries(self, kind: Kind) -> Mapping[bytes, tuple[Name, Any]]:
        """Digest -> name and place of each content of a kind; places have a `position` in the order in which contents lie."""

    @abstractmethod
    def parts_of(self, kind: Kind) -> tuple[Part, ...]:
        """What a row of this kind is made of."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Taken now."""

    def place_of(self, kind: Kind, name: Name) -> Any:
        """Where a content is; None where it is not, or the digest has other tokens or another namespace."""
        entry = self.entries(kind).get(name.digest)
        return entry[1] if entry is not None and entry[0] == name else None

    def has(self, kind: Kind, name: Name) -> bool:
        """Whether this content is here."""
        return self.place_of(kind, name) is not None

    def num_of(self, kind: Kind, namespace: bytes | None = None) -> int:
        """Contents of a kind, of one namespace or of all."""
        entries = self.entries(kind)
        return len(entries) if namespace is None else sum(name.namespace == namespace for name, _ in entries.values())

    def in_order(self, kind: Kind, names: Iterable[Name]) -> list[Name]:
        """Those that are here, in the order in which they lie, so that few copies load many."""
        place_of = {name: place for name in names if (place := self.place_of(kind, name)) is not None}
        return sorted(place_of, key=lambda name: place_of[name].position)

    def hold(self, kind: Kind, names: Iterable[Name]) -> object:  # of files: who reads one has it open
        """Nothing takes the place of these contents as long as the returned object lives."""
        return None

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
        """Of each part, rows in the order of the names, in some tensors. The names are `in_order`'s.

        Raises:
            OSError: a file is not there, or not what was written; nothing of it is found from here on.
        """

    @abstractmethod
    def forget_namespace(self, namespace: bytes) -> None:
        """Keep no content of a namespace."""

    @abstractmethod
    def reset(self) -> None:
        """Keep nothing, and give memory and files back."""

    def check(self) -> None:  # noqa: B027  # nothing of files follows from anything else
        """Prove the tier's invariants, or raise BlockStateError."""
