"""Decides which blocks of a process others understand.

It knows which roots mean something to other processes, and which of their files are of this model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ..blocks.hashing import BlockHash, digest_behind
from ..blocks.roots import RootFacts, Roots
from .saved_file import Identity, SavedFile


class Origin(NamedTuple):
    """`Origin` says where sequences come from: the model, and their root."""

    model: Identity
    root: RootFacts


class Sharing(NamedTuple):
    """`Sharing` says what one store shares with other processes.

    Attributes:
        roots: roots of the store's rows.
        identities: returns what states of the model mean to other processes; states that mean nothing are left out.
    """

    roots: Roots
    identities: Callable[[], Sequence[Identity]]

    def origin_of(self, root: bytes) -> Origin | None:
        """Return where sequences of this root come from; None if the root means nothing to others, or has a salt."""
        facts = self.roots.facts_of(root)
        if facts is None or facts.salt:
            return None
        return next((Origin(model, facts) for model in self.identities() if model.digest == facts.digest), None)


def renamed(blocks: Iterable[BlockHash], roots: Mapping[bytes, bytes]) -> dict[bytes, BlockHash]:
    """Rename blocks whose roots have other names: return digest -> renamed block, parents before their children.

    Blocks are left out that do not descend from one of the roots, or that depend on more than tokens.

    Args:
        roots: name of a root here -> its name there.
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
    """Return why a model with one of these identities finds nothing of a file; None if the file is of this model."""
    if not any(identity.facts == file.facts for identity in identities):
        found = (identity.why_other(file.facts, file.settings) for identity in identities[-1:])
        return next(found, None) or "what this model computes has no name that other processes understand"
    if file.block_size != block_size:
        return f"its blocks have {file.block_size} tokens, and those of this store {block_size}"
    return None
