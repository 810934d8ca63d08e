"""Reads saved blocks into the pool.

It decides which files are of this model, what their blocks are called here, and how many there is room for. A folder is
attached as a disk tier, and blocks are loaded as from any lower tier; whatever holds for cached blocks holds for them.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from ..blocks import BlockHash
from ..blocks.hashing import tokens_of
from ..kv.contents import STATES
from ..tiers.base import Name
from ..tiers.disk import DiskTier
from ..tiers.run_files import Run
from ..tiers.saved_file import SavedFile
from .block_store import BlockStore
from .saving import Model, renamed
from .tier_load import TierLoad, Wanted

_NO_ROOM = "there is no room for them in the pool"
_NO_STATE = "no state was saved after which they could be resumed"
_NO_PARENT = "the blocks before them are in no file"
_OTHERWISE = "layers lie on other devices, or have other tensors, than where they were computed"


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
    tier = DiskTier(folder, 0, model.roots, lambda: [model.identity])
    runs = [(run, run.file) for run in tier.look() if run.file is not None]
    not_loaded = dict.fromkeys(tier.problems.values(), 0)
    if not runs and not not_loaded:
        not_loaded[f"{folder} holds no saved blocks"] = 0
    left_out, ours = Counter[str](), []
    for run, file in runs:
        if (why := file.why_not(blocks.block_size, [model.identity])) is None:
            ours.append((run, file))
        else:
            left_out[why] += len(file.blocks)
    files, found = _adopt(blocks, model, tier, ours)
    left_out[_OTHERWISE] = sum(len(file.blocks) for _, file in ours) - sum(len(file.blocks) for file in files)
    left_out[_NO_PARENT] = len({block.digest for file in files for block in file.blocks}) - len(found)
    with blocks.lock:
        known, num_left = _cached(blocks, found), blocks.num_obtainable_blocks()
    sequences = _sequences(blocks, files, found)
    for number, sequence in enumerate(sequences):
        num_left -= _load_path(blocks, tier, sequence, num_left)
        progress(number + 1, len(sequences))
    with blocks.lock:
        missing = found.keys() - _cached(blocks, found)
    num_new = len(found) - len(known) - len(missing)
    for file in files:
        if (problem := tier.problems.get(str(file.path))) is not None:
            lost = missing & {block.digest for block in file.blocks}
            not_loaded[problem] = len(lost)
            missing -= lost
    left_out[_NO_STATE if blocks.states and num_left >= len(missing) else _NO_ROOM] = len(missing)
    return Loaded(num_new, len(known), tier.num_read_bytes, not_loaded | +left_out)


def _adopt(
    blocks: BlockStore, model: Model, tier: DiskTier, runs: Sequence[tuple[Run, SavedFile]]
) -> tuple[list[SavedFile], dict[bytes, BlockHash]]:
    """Let the blocks of files of this model be found in a tier; return the files, and their blocks.

    Blocks are named by their digest in the files, and by their hash here. Those that begin from no root are left out.
    """
    layout = blocks.tiers.layout
    with blocks.lock:
        for _, file in runs:
            layout.learn(file, blocks.make_room)
    if layout.has_all_layers:
        blocks.settle_budget()
    with blocks.lock:
        blocks.settle()
        parts_of = {run: layout.parts_here(file, blocks.first_device()) for run, file in runs}
        usable = [run for run, _ in runs if None not in parts_of[run].values()]
        files = [file for run, file in runs if run in usable]
        roots = {
            root.root(): model.roots.of(root._replace(digest=model.digest)) for each in files for root in each.roots
        }
        found = renamed((block for file in files for block in file.blocks), roots)
        for run in usable:
            tier.adopt(
                run, parts_of[run], lambda saved: Name(found[saved.digest], b"") if saved.digest in found else None
            )
    return files, found


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


def _load_path(blocks: BlockStore, tier: DiskTier, path: Sequence[BlockHash], num_left: float) -> int:
    """Load a sequence as far as it is whole and there is room for `num_left` new blocks; return how many are new."""
    with blocks.lock:
        new = [not blocks.allocator.match_prefix((block_hash,), b"") for block_hash in path]
    length = bisect_right([*accumulate(new)], num_left)
    if not length:
        return 0
    tokens = tokens_of(b"".join(block_hash.token_bytes for block_hash in path[:length]))
    return len(TierLoad(blocks, [tier]).load(Wanted(path[0].parent, b"", tokens, len(tokens))))
