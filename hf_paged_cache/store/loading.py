"""Reads saved blocks into the pool.

It decides which files are of this model, what their blocks are called here, and how many there is room for. A folder is
attached as a tier that is only read, and blocks are loaded as from any other.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from ..blocks import BlockHash
from ..blocks.hashing import tokens_of
from ..kv.contents import STATES
from ..tiers.folder import Folder
from ..tiers.saved_file import SavedFile
from ..tiers.tiers import Tiers
from .block_store import BlockStore
from .saving import Model, renamed
from .tier_load import Wanted, found_files, load_row

_NO_ROOM = "there is no room for them in the pool"
_NO_STATE = "no state was saved after which they could be resumed"
_NO_PARENT = "the blocks before them are in no file"


class Loaded(NamedTuple):
    """`Loaded` says what `load` has read.

    Attributes:
        num_blocks: number of blocks that are cached now and were not before.
        num_known: number of blocks that were cached already.
        num_bytes: bytes of the rows that were read.
        not_loaded: reason why blocks were not loaded -> number of blocks. The reason names the file if it is about one
            file. The number is 0 for a file that could not be read at all.

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


def load_blocks(blocks: BlockStore, model: Model, folder: Path, *, progress: Callable[[int, int], None]) -> Loaded:
    """Load the blocks of a folder's files, as far as they are of this model and there is room.

    Args:
        progress: called with the number of sequences of blocks that are done, and with the number of all sequences.
    """
    tiers = Tiers(model.roots, lambda: [model.identity], 0, Folder(folder, 0))
    left_out, files = Counter[str](), []
    with blocks.lock:
        blocks.settle()
        runs = found_files(blocks, tiers, [model.identity])
        not_loaded = dict.fromkeys(tiers.problems.values(), 0)
        if not runs and not not_loaded:
            not_loaded[f"{folder} holds no saved blocks"] = 0
        for run, why in runs.items():
            if why is None and run.file is not None:
                files.append(run.file)
            elif run.file is not None:
                left_out[why or ""] += len(run.file.blocks)
        found = _named_here(model, files)
        for run, why in runs.items():
            if why is None:
                tiers.adopt(run, found)
    if blocks.layout.has_all_layers:
        blocks.budget.settle()
    left_out[_NO_PARENT] = len({block.digest for file in files for block in file.blocks}) - len(found)
    with blocks.lock:
        known, num_left = _cached(blocks, found), blocks.budget.num_obtainable_blocks()
    sequences = _sequences(blocks, files, found)
    for number, sequence in enumerate(sequences):
        num_left -= _load_path(blocks, tiers, sequence, num_left)
        progress(number + 1, len(sequences))
    with blocks.lock:
        missing = found.keys() - _cached(blocks, found)
    num_new = len(found) - len(known) - len(missing)
    for file in files:
        if (problem := tiers.problems.get(str(file.path))) is not None:
            lost = missing & {block.digest for block in file.blocks}
            not_loaded[problem] = len(lost)
            missing -= lost
    left_out[_NO_STATE if blocks.states and num_left >= len(missing) else _NO_ROOM] = len(missing)
    return Loaded(num_new, len(known), tiers.num_read_bytes, not_loaded | +left_out)


def _named_here(model: Model, files: Iterable[SavedFile]) -> dict[bytes, BlockHash]:
    """Return digest of a block in the files -> its hash here. Blocks that begin from no root are left out."""
    roots = {root.root(): model.roots.of(root._replace(digest=model.digest)) for file in files for root in file.roots}
    return renamed((block for file in files for block in file.blocks), roots)


def _cached(blocks: BlockStore, found: Mapping[bytes, BlockHash]) -> set[bytes]:
    match = blocks.allocator.match_prefix
    return {digest for digest, block_hash in found.items() if match((block_hash,), b"")}


def _sequences(
    blocks: BlockStore, files: Sequence[SavedFile], found: Mapping[bytes, BlockHash]
) -> list[list[BlockHash]]:
    """Return the blocks before each place after which calls may resume.

    Such places are the ends of sequences and snapshots; with windows, also where sequences part.
    """
    here = {block_hash.digest: block_hash for block_hash in found.values()}
    num_children = Counter(block_hash.parent for block_hash in found.values())
    contents = [(file, content) for file in files for content in file.contents if content.kind == STATES]
    with_states = {file.blocks[number].digest for file, content in contents for number in content.blocks}
    sequences = []
    for saved, end in found.items():
        number = num_children[end.digest]
        if not number or saved in with_states or (number > 1 and blocks.windows.groups):
            path = [end]
            while (before := here.get(path[-1].parent)) is not None:
                path.append(before)
            sequences.append(path[::-1])
    return sequences


def _load_path(blocks: BlockStore, tiers: Tiers, path: Sequence[BlockHash], num_left: float) -> int:
    """Load a sequence as far as it is whole and there is room for `num_left` new blocks; return how many are new."""
    with blocks.lock:
        new = [not blocks.allocator.match_prefix((block_hash,), b"") for block_hash in path]
    length = bisect_right([*accumulate(new)], num_left)
    if not length:
        return 0
    tokens = tokens_of(b"".join(block_hash.token_bytes for block_hash in path[:length]))
    return len(load_row(blocks, tiers, Wanted(path[0].parent, b"", tokens, len(tokens))))
