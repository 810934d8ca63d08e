"""Remembers what each root stands for: all that conditions keys and values besides tokens.

A root is the parent of a sequence's first block. It means something only in its own process; what it stands for can be
said elsewhere, once the model has a name there.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from .hashing import root_hash

OF_WEIGHTS = 16  # first bytes of a digest of a model, which depend on weights alone
_MOST = 2**14  # roots remembered; where frequencies depend on length, every length has its own root


class RootFacts(NamedTuple):
    """`RootFacts` says what conditions the keys and values of a row besides its tokens."""

    digest: bytes  # of the model, as of the last look at it
    salt: bytes = b""
    regime: bytes = b""  # what the row's forwards keep to: rotary frequencies that depend on length, and shapes
    adapter: str = ""  # name of the adapter that the row was given
    counted_from: int = 0  # columns of padding, where padding shows in keys and values
    first_position: int = 0  # position of the row's first token

    def root(self) -> bytes:
        """Return the root of a row with these facts."""
        of_row = f"{self.counted_from} {self.first_position}".encode()
        return root_hash(self.digest, self.salt, self.regime, self.adapter.encode(), of_row)


class Roots:
    """`Roots` maps the latest roots to the facts that they stand for."""

    def __init__(self) -> None:
        self._facts: OrderedDict[bytes, RootFacts] = OrderedDict()
        self._roots: dict[RootFacts, bytes] = {}

    def of(self, facts: RootFacts) -> bytes:
        """Return the root of these facts, and remember it."""
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
        """Return the facts that a root stands for; None if the root is too old to be remembered."""
        return self._facts.get(root)

    def all(self) -> list[RootFacts]:
        """Return the facts of all roots remembered."""
        return list(self._facts.values())
