"""What of a process's blocks others understand: which roots mean something to them, and which of their files are of this model."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..blocks.roots import Roots
from .saved_file import Identity, SavedFile, SavedRoot, saved_root


class Origin(NamedTuple):
    """Where sequences are from: the model, and their root."""

    model: Identity
    root: SavedRoot


class Sharing:
    """Of one store.

    Args:
        roots: of its rows.
        identity_of: digest of the model, as roots have it -> what it means to others; None: nothing.
        identities: all of those.
    """

    def __init__(
        self,
        roots: Roots,
        identity_of: Callable[[bytes], Identity | None],
        identities: Callable[[], Sequence[Identity]],
    ) -> None:
        self.identities = identities
        self._roots = roots
        self._identity_of = identity_of

    def origin_of(self, root: bytes) -> Origin | None:
        """Where sequences of this root are from; None where it means nothing to others, or has a salt."""
        facts = self._roots.facts_of(root)
        if facts is None or facts.salt or (identity := self._identity_of(facts.digest)) is None:
            return None
        return Origin(identity, saved_root(identity.digest, facts))


def why_not(file: SavedFile, block_size: int, identities: Sequence[Identity]) -> str | None:
    """Why nothing of a file is found by a model that is one of these; None if it is of this model."""
    if not any(identity.facts == file.facts for identity in identities):
        found = (identity.why_other(file.facts, file.settings) for identity in identities[-1:])
        return next(found, None) or "what this model computes has no name that other processes understand"
    if file.block_size != block_size:
        return f"its blocks have {file.block_size} tokens, and those of this store {block_size}"
    return None
