"""What of a process's blocks others understand: which roots mean something to them, and which of their files are of this model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ..blocks.hashing import BlockHash, digest_behind
from ..blocks.roots import RootFacts, Roots
from .saved_file import Identity, SavedFile


class Origin(NamedTuple):
    """Where sequences are from: the model, and their root."""

    model: Identity
    root: RootFacts


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
        return Origin(identity, facts._replace(digest=identity.digest))


def renamed(blocks: Iterable[BlockHash], roots: Mapping[bytes, bytes]) -> dict[bytes, BlockHash]:
    """What blocks are called where their roots have other names: digest -> block there, parents before their children.

    Those are left out that do not descend from one of the roots, or depend on more than tokens.

    Args:
        roots: here -> there.
    """
    children: dict[bytes, dict[bytes, BlockHash]] = {}
    for block in blocks:
        if digest_behind(block.parent, block.token_bytes) == block.digest:
            children.setdefault(block.parent, {})[block.digest] = block
    found: dict[bytes, BlockHash] = {}
    waiting = [(block, there) for here, there in roots.items() for block in children.get(here, {}).values()]
    while waiting:
        block, parent = waiting.pop()
        there = digest_behind(parent, block.token_bytes)
        found[block.digest] = BlockHash(there, block.token_bytes, parent)
        waiting += [(child, there) for child in children.get(block.digest, {}).values()]
    return found


def why_not(file: SavedFile, block_size: int, identities: Sequence[Identity]) -> str | None:
    """Why nothing of a file is found by a model that is one of these; None if it is of this model."""
    if not any(identity.facts == file.facts for identity in identities):
        found = (identity.why_other(file.facts, file.settings) for identity in identities[-1:])
        return next(found, None) or "what this model computes has no name that other processes understand"
    if file.block_size != block_size:
        return f"its blocks have {file.block_size} tokens, and those of this store {block_size}"
    return None
