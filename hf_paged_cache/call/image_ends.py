"""Keeps the tokens of a block up to the end of an image, as a block of their own, so that other text may follow the image.

A hit never ends inside an image. Where one ends within a block, no other text after it would find that block, and so not the image. The block
kept is a copy, filled up with ids that no text has, and found, evicted and offloaded like any other. The store's lock is held.
"""

from ..blocks import BlockTable
from ..blocks.image_tokens import end_of_image, filled_up
from ..blocks.tokens import TokenIds
from ..errors import OutOfBlocksError
from ..store.block_store import BlockStore
from .rows import Rows


def keep_image_ends(store: BlockStore, rows: Rows) -> None:
    """Rows were committed: keep what ends with the last image of each, once, where a block is free that nobody has reserved."""
    for row in rows.distinct:
        end, size = row.image_end, store.block_size
        if end is None or row.num_true_tokens < end:
            continue
        row.image_end = None
        tokens = filled_up(row.table.token_ids, end, size)
        with store.new_table(row.root, row.table.namespace) as table:
            is_known = table.match_prefix(tokens).num_matched_tokens >= len(tokens)
        if is_known or store.num_obtainable_blocks(None) < 1:
            continue
        store.make_room(1)
        with row.table.fork() as copy:
            try:
                copy.truncate(end)
                copy.append_tokens(tokens[end:])
            except OutOfBlocksError:
                continue
            store.make_copies()
            hashes = copy.commit_full_blocks(len(tokens))
            if row.num_trusted < end:
                rows.committed += hashes


def end_after(table: BlockTable, tokens: TokenIds, num_hit: int, block_size: int) -> int:
    """The tokens that a table could hold beyond a hit, where an image ends in the next block and that was kept.  Effects: none.

    Returns:
        `num_hit`, or where that image ends.
    """
    end = end_of_image(tokens, num_hit, num_hit + block_size)
    if end is None:
        return num_hit
    filled = filled_up(tokens, end, block_size)
    return end if table.match_prefix(filled).num_tokens == len(filled) else num_hit
