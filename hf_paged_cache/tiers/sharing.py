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


class Sharing(NamedTuple):
    """What one store shares.

    Attributes:
        roots: of its rows.
        identities: what states of the model mean to others; those are left out that mean nothing.
    """

    roots: Roots
    identities: Callable[[], Sequence[Identity]]

    def origin_of(self, root: bytes) -> Origin | None:
        """Where sequences of this root are from; None where it means nothing to others, or has a salt."""
        facts = self.roots.facts_of(root)
        if facts is None or facts.salt:
            return None
        return next((Origin(model, facts) for model in self.identities() if model.digest == facts.digest), None)


def renamed(blocks: Iterable[BlockHash], roots: Mapping[bytes, bytes]) -> dict[bytes, BlockHash]:
    """What blocks are called where their roots have other names: digest -> block there, parents before their children.

    Those are left out that do not descend from one of the roots, or depend on more than tokens.

    Args:
        roots: here -> there.
    """
    children: dict[bytes, list[BlockHash]] = {}
    for block in dict.fromkeys(blocks):
        if digest_behind(block.parent, block.token_bytes) == block.digest:
            children.setdefault(block.parent, []).append(block)
    found: dict[bytes, BlockHash] = {}
    waiting = [(block, there) for here, there in roots.items() for block in children.get(here, ())]
    while waiting:
        block, parent = waiting.pop()
        there = digest_behind(parent, block.token_bytes)
        found[block.digest] = BlockHash(there, block.token_bytes, parent)
        waiting += [(child, there) for child in children.get(block.digest, ())]
    return found


def why_not(file: SavedFile, block_size: int, identities: Sequence[Identity]) -> str | None:
    """Why nothing of a file is found by a model that is one of these; None if it is of this model."""
    if not any(identity.facts == file.facts for identity in identities):
        found = (identity.why_other(file.facts, file.settings) for identity in identities[-1:])
        return next(found, None) or "what this model computes has no name that other processes understand"
    if file.block_size != block_size:
        return f"its blocks have {file.block_size} tokens, and those of this store {block_size}"
    return None
