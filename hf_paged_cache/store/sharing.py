"""What of a store's blocks other processes understand: which roots mean something to them, and which of their files are of this model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ..blocks.roots import Roots
from ..tiers.saved_file import SavedFile, SavedOrigin, saved_root


class Identity(Protocol):
    """See `ModelIdentity`."""

    @property
    def facts(self) -> Mapping[str, str]: ...

    @property
    def settings(self) -> Mapping[str, str]: ...

    @property
    def digest(self) -> bytes: ...

    def why_other(self, facts: Mapping[str, str], settings: Mapping[str, str]) -> str | None: ...


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
        self._roots = roots
        self._identity_of = identity_of
        self._identities = identities

    def origin_of(self, root: bytes) -> SavedOrigin | None:
        """Where sequences of this root are from; None where it means nothing to others, or has a salt."""
        facts = self._roots.facts_of(root)
        identity = None if facts is None or facts.salt else self._identity_of(facts.digest)
        if facts is None or identity is None:
            return None
        return SavedOrigin(identity.digest, identity.facts, identity.settings, saved_root(identity.digest, facts))

    @property
    def num_models(self) -> int:
        """States of this model that rows were computed under."""
        return len(self._identities())

    def why_not(self, file: SavedFile, block_size: int) -> str | None:
        """Why nothing of a file is found here; None if it is of this model."""
        identities = self._identities()
        if not any(identity.facts == file.facts for identity in identities):
            found = (identity.why_other(file.facts, file.settings) for identity in identities[-1:])
            return next(found, None) or "what this model computes has no name that other processes understand"
        if file.block_size != block_size:
            return f"its blocks have {file.block_size} tokens, and those of this store {block_size}"
        return None
