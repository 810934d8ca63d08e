"""Reads saved blocks into the pool: which files are of this model, what their blocks are called here, and as many as there is room for.

Blocks come up as from any lower tier; whatever holds for cached blocks holds for them.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from ..blocks import BlockHash
from ..blocks.hashing import digest_behind, tokens_of
from ..blocks.roots import RootFacts
from ..errors import SavedBlocksError
from ..tiers.base import STATES, Name
from ..tiers.saved_file import SavedBlock, SavedFile, read_saved_file, saved_paths, saved_root
from ..tiers.saved_folder import SavedFolder
from .block_store import BlockStore
from .bring_up import Wanted
from .file_layout import lay_out, parts_here
from .saving import Model

_NO_ROOM = "there is no room for them in the pool"
_NO_STATE = "no state was saved behind which they could be gone on from"
_NO_PARENT = "the blocks before them are in no file"


class Loaded(NamedTuple):
    """What was read.

    Attributes:
        num_blocks: that are cached now and were not before.
        num_known: that were cached already.
        num_bytes: of the rows that were read.
        not_loaded: reason, with the file where it is one file's -> blocks; 0 where a file could not be read at all.

    Examples:
        >>> _ = cache.prefill(inputs["input_ids"])
        >>> _ = cache.store.save(folder)
        >>> cache.reset_prefix_cache()
        >>> loaded = cache.store.load(folder)
        >>> loaded.num_blocks, loaded.not_loaded
        (5, {})
    """

    num_blocks: int
    num_known: int
    num_bytes: int
    not_loaded: dict[str, int]


class _Found(NamedTuple):
    """A block of a file that this process has a name for."""

    saved: SavedBlock
    block_hash: BlockHash
    root: bytes
    before: bytes | None  # digest in files of the block before


def load_blocks(
    blocks: BlockStore,
    model: Model,
    why_other: Callable[[SavedFile], str | None],
    folder: Path,
    *,
    progress: Callable[[int, int], None],
) -> Loaded:
    """Have the blocks of a folder's files cached, as far as they are of this model and there is room.

    Args:
        why_other: why a file is not of this model; None if it is.
        progress: told how many of how many blocks are done.

    Raises:
        OSError: there is no such folder, or it cannot be read.
    """
    not_loaded: dict[str, int] = {}
    files: list[SavedFile] = []
    for file in _files(folder, not_loaded):
        _sort(file, _why_not(blocks, file, why_other), files, not_loaded)
    with blocks.lock:
        are_known = [lay_out(blocks, file) for file in files]
    if any(are_known):
        blocks.read_budget()
    fitting: list[SavedFile] = []
    with blocks.lock:
        blocks.settle()
        blocks.settle_budget()
        for file in files:
            _sort(file, _why_laid_out_otherwise(blocks, file), fitting, not_loaded)
        found = _named_here(blocks, model, fitting)
        tier = _tier_of(blocks, fitting, found)
        known = _cached(blocks, found)
        num_left = blocks.num_obtainable_blocks(None)
    num_strays = len({block.digest for file in fitting for block in file.blocks}) - len(found)
    if num_strays:
        not_loaded[_NO_PARENT] = num_strays
    ends = _ends(blocks, fitting, found)
    for number, end in enumerate(ends):
        num_left -= _bring_up(blocks, tier, _path(found, end), num_left)
        progress(number + 1, len(ends))
    with blocks.lock:
        missing = found.keys() - _cached(blocks, found)
    for path, why in tier.damaged.items():
        lost = missing & {block.digest for file in fitting if str(file.path) == path for block in file.blocks}
        not_loaded[why] = len(lost)
        missing -= lost
    num_new = len(found) - len(known) - len(missing) - sum(not_loaded.get(why, 0) for why in tier.damaged.values())
    if missing:
        not_loaded[_NO_STATE if blocks.states and num_left >= len(missing) else _NO_ROOM] = len(missing)
    return Loaded(num_new, len(known), tier.num_read_bytes, not_loaded)


def _files(folder: Path, not_loaded: dict[str, int]) -> Iterator[SavedFile]:
    """Those that can be read."""
    paths = saved_paths(folder)
    if not paths:
        not_loaded[f"{folder} holds no saved blocks"] = 0
    for path in paths:
        try:
            yield read_saved_file(path)
        except SavedBlocksError as error:
            not_loaded[str(error)] = 0
        except OSError as error:
            not_loaded[f"{path} cannot be read: {error}"] = 0


def _sort(file: SavedFile, why: str | None, good: list[SavedFile], not_loaded: dict[str, int]) -> None:
    """Among the good ones, or why it is not."""
    if why is None:
        good.append(file)
    else:
        not_loaded[why] = not_loaded.get(why, 0) + len(file.blocks)


def _why_not(blocks: BlockStore, file: SavedFile, why_other: Callable[[SavedFile], str | None]) -> str | None:
    if file.block_size != blocks.block_size:
        return f"their blocks have {file.block_size} tokens, and those of this store {blocks.block_size}"
    return why_other(file)


def _why_laid_out_otherwise(blocks: BlockStore, file: SavedFile) -> str | None:
    if all(parts_here(blocks, blocks.tiers.layout, content) is not None for content in file.contents):
        return None
    return "layers lie on other devices, or have other tensors, than where they were computed"


def _named_here(blocks: BlockStore, model: Model, files: Sequence[SavedFile]) -> dict[bytes, _Found]:
    """Digest in files -> block, of all that begin from a root; parents before their children."""
    children: dict[bytes, dict[bytes, SavedBlock]] = {}
    for file in files:
        for block in file.blocks:
            children.setdefault(block.parent, {})[block.digest] = block
    found: dict[bytes, _Found] = {}
    for saved in {root.digest: root for file in files for root in file.roots}.values():
        facts = RootFacts(model.digest, b"", saved.regime, saved.adapter, saved.counted_from, saved.first_position)
        if saved_root(model.identity, facts) != saved:  # a root that says of itself what it is not
            continue
        root = model.roots.of(facts)
        waiting: list[tuple[SavedBlock, bytes, bytes | None]] = [
            (block, root, None) for block in children.get(saved.digest, {}).values()
        ]
        while waiting:
            block, parent, before = waiting.pop()
            block_hash = BlockHash(digest_behind(parent, block.token_bytes), block.token_bytes, parent)
            found[block.digest] = _Found(block, block_hash, root, before)
            waiting += [(child, block_hash.digest, block.digest) for child in children.get(block.digest, {}).values()]
    return found


def _tier_of(blocks: BlockStore, files: Sequence[SavedFile], found: Mapping[bytes, _Found]) -> SavedFolder:
    """The files' rows by the names that this process has for them. The store's lock is held."""
    tier = SavedFolder()
    for file in files:
        for content in file.contents:
            parts = parts_here(blocks, blocks.tiers.layout, content)
            assert parts is not None  # as was seen
            here = content._replace(parts=parts)
            for row, number in enumerate(content.blocks):
                if (block := found.get(file.blocks[number].digest)) is not None:
                    tier.add(file, here, row, Name(block.block_hash, b""))
    return tier


def _cached(blocks: BlockStore, found: Mapping[bytes, _Found]) -> set[bytes]:
    match = blocks.allocator.match_prefix
    return {digest for digest, each in found.items() if match((each.block_hash,), b"")}


def _ends(blocks: BlockStore, files: Sequence[SavedFile], found: Mapping[bytes, _Found]) -> list[bytes]:
    """Digests behind which calls may go on: the ends of sequences; with windows, where these part; and snapshots."""
    num_children = Counter(each.before for each in found.values())
    with_states = {
        file.blocks[number].digest
        for file in files
        for content in file.contents
        if content.kind == STATES
        for number in content.blocks
    }
    return [
        digest
        for digest in found
        if not num_children[digest] or digest in with_states or (num_children[digest] > 1 and blocks.windows.groups)
    ]


def _path(found: Mapping[bytes, _Found], end: bytes) -> list[_Found]:
    """The blocks of a sequence up to this one."""
    path, at = [], end
    while True:
        path.append(found[at])
        before = found[at].before
        if before is None:
            return path[::-1]
        at = before


def _bring_up(blocks: BlockStore, tier: SavedFolder, path: Sequence[_Found], num_left: float) -> int:
    """Have a sequence cached as far as it is whole and there is room for so many new blocks; returns how many came."""
    with blocks.lock:
        new = [not blocks.allocator.match_prefix((each.block_hash,), b"") for each in path]
    num_new = list(accumulate(new))
    length = bisect_right(num_new, num_left)
    if not length:
        return 0
    tokens = tokens_of(b"".join(each.saved.token_bytes for each in path[:length]))
    row = Wanted(path[0].root, b"", tokens, len(tokens))
    num_damaged = -1
    while len(tier.damaged) > num_damaged:  # what is left of it is looked for again
        num_damaged = len(tier.damaged)
        brought = blocks.tiers.bring_up_from(tier, row)
    return len(brought)
