"""Defines what a tier is, wherever it keeps contents, and the names by which contents are found there."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..blocks.hashing import BlockHash
from ..kv.contents import Part

BLOCKS, STATES = "blocks", "states"
Kind = str | int
"""Kind of content that a block has.

BLOCKS stands for the layers that see all tokens, a window for the layers that see it, STATES for a snapshot at the
block's end.
"""

Rows = Sequence[Tensor]
"""Contents of one kind: for each part of the kind a tensor [N, bytes], with what N blocks hold."""


class Name(NamedTuple):
    """`Name` identifies a content. A content is found if hash and namespace are equal."""

    block_hash: BlockHash
    namespace: bytes
    root: bytes = b""  # root of the block's sequence, where it is known; b"": no file may have the content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Name) and self[:2] == other[:2]

    def __hash__(self) -> int:
        return hash(self[0][0])

    @property
    def digest(self) -> bytes:
        """Digest of the block's hash."""
        return self.block_hash.digest


@dataclass(slots=True)
class TierCounts:
    """`TierCounts` counts the contents that a tier was given, gave back, dropped, and did not take."""

    num_down: int = 0
    num_up: int = 0
    num_dropped: int = 0
    num_refused: int = 0


class Tier(ABC):
    """`Tier` keeps contents of blocks by name, within a budget.

    The caller holds the store's lock, but for `load` of files.

    Attributes:
        name: "host" or "disk".
        max_bytes: most bytes that the tier may take.
    """

    name: str

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.counts = TierCounts()

    @abstractmethod
    def entries(self, kind: Kind) -> Mapping[bytes, tuple[Name, Any]]:
        """Return digest -> name and place of each content of a kind.

        Places have a `position`; sorted by it, they are in the order in which the contents lie.
        """

    @abstractmethod
    def parts_of(self, kind: Kind) -> tuple[Part, ...]:
        """Return the parts of which a row of this kind is made."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that the tier takes now."""

    def place_of(self, kind: Kind, name: Name) -> Any:
        """Return the place of a content.

        Returns None if the content is not here, or if the digest stands for other tokens or another namespace.
        """
        entry = self.entries(kind).get(name.digest)
        return entry[1] if entry is not None and entry[0] == name else None

    def has(self, kind: Kind, name: Name) -> bool:
        """Return whether this content is here."""
        return self.place_of(kind, name) is not None

    def num_of(self, kind: Kind, namespace: bytes | None = None) -> int:
        """Return the number of contents of a kind, of one namespace or of all."""
        entries = self.entries(kind)
        return len(entries) if namespace is None else sum(name.namespace == namespace for name, _ in entries.values())

    def in_order(self, kind: Kind, names: Iterable[Name]) -> list[Name]:
        """Return the names whose contents are here, in the order in which the contents lie.

        So few copies load many contents.
        """
        place_of = {name: place for name in names if (place := self.place_of(kind, name)) is not None}
        return sorted(place_of, key=lambda name: place_of[name].position)

    def hold(self, kind: Kind, names: Iterable[Name]) -> object:  # whoever reads a file has it open
        """Keep these contents from being replaced as long as the returned object lives."""
        return None

    @abstractmethod
    def touch(self, kind: Kind, names: Iterable[Name]) -> None:
        """Note that these contents are used, so that they are dropped last."""

    @abstractmethod
    def put(self, kind: Kind, parts: Sequence[Part], names: Sequence[Name], rows: Rows, *, may_wait: bool) -> None:
        """Keep contents that are not here yet, as far as there is room. Copies are launched and not waited for.

        Args:
            rows: rows of each part, on its device or on the host; rows on the host are kept as they are.
            may_wait: True if the caller may wait for a content that goes from here to the next tier.
        """

    @abstractmethod
    def load(self, kind: Kind, names: Sequence[Name]) -> list[list[Tensor]]:
        """Return, for each part, the rows in the order of the names, in some tensors.

        Args:
            names: names as `in_order` returns them.

        Raises:
            OSError: a file is not there, or not what was written; nothing of this file is found from here on.
        """

    @abstractmethod
    def forget_namespace(self, namespace: bytes) -> None:
        """Keep no content of a namespace."""

    @abstractmethod
    def reset(self) -> None:
        """Keep nothing, and give memory and files back."""

    def check(self) -> None:  # noqa: B027  # a tier of files has no invariants
        """Prove the tier's invariants, or raise BlockStateError."""
