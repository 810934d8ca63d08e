"""Owns what each root stands for: the parent of a sequence's first block, which is all that conditions keys and values besides tokens.

A root means something in its process alone. What it stands for can be said elsewhere, once the model has a name there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from .hashing import root_hash

_MOST = 2**14  # remembered; where frequencies depend on length, every length has its own


class RootFacts(NamedTuple):
    """What conditions a row.

    Attributes:
        digest: of the model, as of its last look.
        salt: of the cache.
        regime: of its forwards: rotary frequencies that depend on length, and the shapes that they keep to.
        adapter: that the row was given by name.
        counted_from: columns of padding, where these show in keys and values.
        first_position: of the row's first token.
    """

    digest: bytes
    salt: bytes = b""
    regime: bytes = b""
    adapter: str = ""
    counted_from: int = 0
    first_position: int = 0

    def root(self) -> bytes:
        """The root under `digest`."""
        of_row = f"{self.counted_from} {self.first_position}".encode()
        return root_hash(self.digest, self.salt, self.regime, self.adapter.encode(), of_row)


class Roots:
    """Root -> what it stands for, the last ones that were new."""

    def __init__(self) -> None:
        self._facts: OrderedDict[bytes, RootFacts] = OrderedDict()
        self._roots: dict[RootFacts, bytes] = {}

    def of(self, facts: RootFacts) -> bytes:
        """The root of these facts. Remembered, so that a row of the next call costs a look."""
        root = self._roots.get(facts)
        if root is None:
            root = facts.root()
            self._facts[root] = facts
            self._roots[facts] = root
            if len(self._facts) > _MOST:
                _, forgotten = self._facts.popitem(last=False)
                self._roots.pop(forgotten, None)
        return root

    def facts_of(self, root: bytes) -> RootFacts | None:
        """What a root stands for; None: of long ago."""
        return self._facts.get(root)

    def all(self) -> list[RootFacts]:
        """Those remembered."""
        return list(self._facts.values())

    def all_of(self, digest: bytes, salt: bytes) -> list[RootFacts]:
        """Those of a model as it is now, and of one salt."""
        return [facts for facts in list(self._facts.values()) if (facts.digest, facts.salt) == (digest, salt)]
