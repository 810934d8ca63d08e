"""Finds what a call would find that began now.

Effects: none; whoever asks holds the store's lock.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ..blocks import BlockTable, Group, HashChain, resumable
from ..blocks.hashing import tokens_of
from ..blocks.image_tokens import WholeImages, end_of_image, filled_up, hold_images, whole_images
from ..blocks.tokens import TokenIds, common_prefix_length
from ..store import tier_load
from ..store.block_store import BlockStore
from ..store.tier_load import Wanted
from .find import PreviousRow, closest_row, why_no_state, why_no_window, why_stopped
from .request import RowInput


class Found(NamedTuple):
    """`Found` says how many leading tokens of a row are known, and why no more are."""

    num_tokens: int
    stopped: str
    tier: str | None = None  # furthest lower tier that some of them would come up from


def look_up(store: BlockStore, new: RowInput, last: Sequence[PreviousRow], num_needed: int) -> Found:
    """Return what a call of one row would find.

    Args:
        new: the row.
        last: rows of the cache's last call.
        num_needed: number of the row's last tokens that run in any case.
    """
    most = max(0, len(new.token_ids) - num_needed)
    found = _in_pool(store, new, most)
    closest, num_common = closest_row(last, new)
    if closest is not None:
        begins_otherwise, num_common = not num_common and closest.token_ids, whole_images(new.token_ids, num_common)
        if not closest.can_go_on_at(min(num_common, most)):
            num_common = 0
        if num_common > found.num_tokens:
            why = why_stopped(num_common, new.token_ids, store.block_size, len(closest.token_ids))
            found = Found(num_common, why)
        elif begins_otherwise and not found.num_tokens:
            found = found._replace(stopped=found.stopped + ", and the last call's begin otherwise")
    below = tier_load.look_up(store, Wanted(new.root, new.salt, new.token_ids, most))
    if below is None or below[0] <= found.num_tokens:
        return found
    return Found(below[0], why_stopped(below[0], new.token_ids, store.block_size, None), below[1])


def _in_pool(store: BlockStore, new: RowInput, most: int) -> Found:
    """Return what the pool's blocks hold of a row that may resume after `most` tokens at most."""
    with store.new_table(new.root, new.salt) as table:
        block_ids, num_tokens, num_matched = table.match_prefix(new.token_ids)
        if hold_images(new.token_ids):
            num_tokens = max(num_tokens, _end_of_image(table, new.token_ids, num_matched, store.block_size))
    shown = whole_images(new.token_ids, num_matched)
    if store.states:
        groups: tuple[Group, ...] = (*store.groups, WholeImages(new.token_ids))
        known = resumable(groups, block_ids, min(num_tokens, most))
        if known < min(num_tokens, most // store.block_size * store.block_size):
            return Found(known, why_no_state(num_tokens, known))
    if num_tokens < shown:
        return Found(num_tokens, why_no_window(shown))
    return Found(num_tokens, why_stopped(num_tokens, new.token_ids, store.block_size, None))


def _end_of_image(table: BlockTable, tokens: TokenIds, num_hit: int, block_size: int) -> int:
    """Return the number of tokens up to the end of an image in the block after a hit, if that was kept; else 0."""
    end = end_of_image(tokens, num_hit, num_hit + block_size)
    if end is None:
        return 0
    filled = filled_up(tokens, end, block_size)
    return end if table.match_prefix(filled).num_tokens == len(filled) else 0


def continuation(store: BlockStore, new: RowInput, num_tokens: int, last: Sequence[PreviousRow]) -> TokenIds:
    """Return how the closest of what a call would find continues after a row's first `num_tokens` tokens.

    The result is empty where nothing continues there.

    Cost: a SHA-256 for each block of the prefix, and a look at each block of the store.

    Args:
        last: see `look_up`.
    """
    row, num_common = closest_row(last, new)
    found = [row.token_ids[num_tokens:]] if row is not None and num_common >= num_tokens else []
    if num_tokens % store.block_size == 0:
        chain = HashChain(new.root, store.block_size, new.token_ids[:num_tokens])
        parent = chain.hashes_of()[-1].digest if num_tokens else new.root
        known = store.allocator.hashes(new.salt).values()
        found += [tokens_of(block_hash.token_bytes) for block_hash in known if block_hash.parent == parent]
    rest = new.token_ids[num_tokens:]
    return max(found, key=lambda tokens: common_prefix_length(tokens, rest), default=rest[:0])
