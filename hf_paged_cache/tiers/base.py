"""Defines what a tier is, wherever it keeps contents, and the names by which contents are found there."""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..blocks.hashing import BlockHash
from ..kv.contents import Kind, Part


class Name(NamedTuple):
    """`Name` identifies a content. A content is found if hash and namespace are equal."""

    block_hash: BlockHash
    namespace: bytes
    root: bytes = b""  # root of the block's sequence, where it is known; b"": no file may have the content

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Name) and self[:2] == other[:2]

    def __hash__(self) -> int:
        return hash(self[0][0])


class Tier(ABC):
    """`Tier` keeps contents of blocks by name, within a budget, and counts them as `TierStats` says.

    The caller holds the store's lock, but for `load`.
    """

    name: str

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_down = self.num_up = self.num_dropped = self.num_refused = 0
        self.parts: dict[Kind, tuple[Part, ...]] = {}  # parts of which a row is made
        # kind and digest -> name of a content, and its place
        self.entries: OrderedDict[tuple[Kind, bytes], tuple[Name, Any]] = OrderedDict()

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes that the tier takes now."""

    def place_of(self, kind: Kind, name: Name) -> Any:
        """Return the place of a content, by which `load` reads it; None if it is not here. Places do not change."""
        entry = self.entries.get((kind, name.block_hash.digest))
        return entry[1] if entry is not None and entry[0] == name else None

    def has(self, kind: Kind, name: Name) -> bool:
        """Return whether this content is here."""
        return self.place_of(kind, name) is not None

    def num_of(self, kind: Kind, namespace: bytes | None = None) -> int:
        """Return the number of contents of a kind, of one namespace or of all.  Cost: a look at each content."""
        return sum(of == kind and namespace in (None, name.namespace) for (of, _), (name, _) in self.entries.items())

    def lay_out(self, kind: Kind, parts: Sequence[Part]) -> None:
        """Let rows of a kind be made of these parts from here on. Contents made of other parts are found no more."""
        if self.parts.get(kind) != tuple(parts):
            self.drop([key for key in self.entries if key[0] == kind])
            self.parts[kind] = tuple(parts)

    def drop(self, keys: Iterable[tuple[Kind, bytes]]) -> None:
        """Find these contents no more."""
        for key in keys:
            del self.entries[key]

    def forget_namespace(self, namespace: bytes) -> None:
        """Keep no content of a namespace."""
        self.drop([key for key, (name, _) in self.entries.items() if name.namespace == namespace])

    def reset(self) -> None:
        """Keep nothing, and give memory and files back."""
        self.drop([*self.entries])

    @abstractmethod
    def touch(self, kind: Kind, names: Iterable[Name]) -> None:
        """Note that these contents are used, so that they are dropped last."""

    @abstractmethod
    def put(self, kind: Kind, parts: Sequence[Part], names: Sequence[Name], rows: Sequence[Tensor]) -> None:
        """Keep contents that are not here yet, as far as there is room. Copies are launched and not waited for.

        Args:
            rows: for each part [N, bytes], on its device or on the host; rows on the host are kept as they are.
        """

    @abstractmethod
    def load(self, kind: Kind, places: Sequence[Any]) -> list[list[Tensor]]:
        """Return, for each part, the rows of these places in their order, in some tensors [N, bytes] of the host.

        Copies to them may be on the way, so that the part's device alone reads them.

        Raises:
            OSError: a file is not there, or not what was written; nothing of this file is found from here on.
        """
