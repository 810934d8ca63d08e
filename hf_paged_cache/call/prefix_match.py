"""The longest known prefix of a new row: in the store by hash, and in the cache's previous rows token by token.

Changes nothing but who holds which block: what it returns holds what it found.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from ..blocks import BlockTable, Group, HashChain, resumable
from ..blocks.image_tokens import WholeImages, filled_up, hold_images, said_image, whole_images
from ..blocks.tokens import TokenIds, common_prefix_length
from ..store.block_store import BlockStore
from .image_ends import end_after
from .rows import Origin, Row
from .scheduled_forward import RowInput


class Found(NamedTuple):
    """How many leading tokens of a row were known, and why no more."""

    num_tokens: int
    stopped: str
    origin: Origin | None = None  # of the row of the call before, where the states after its last token are known


class EndedRow(Protocol):
    """A row of the call before."""

    @property
    def root(self) -> bytes: ...

    @property
    def true_token_ids(self) -> TokenIds: ...


Ended = TypeVar("Ended", bound=EndedRow)


class PreviousRows(Generic[Ended]):
    """Rows of the call before, each root's sorted by their tokens as bytes, so that the row with the longest prefix in
    common with a new one lies next to it. Made once for all rows of a call: in pairs, many would take long.
    """

    def __init__(self, rows: Iterable[Ended] = ()) -> None:
        self._of_root: dict[bytes, list[_Known[Ended]]] = {}
        for row in rows:
            tokens = row.true_token_ids
            self._of_root.setdefault(row.root, []).append(_Known(tokens.tobytes(), tokens, row))
        for known in self._of_root.values():
            known.sort(key=_as_bytes)

    def closest(self, new: RowInput) -> tuple[Ended | None, int]:
        """The row with the longest prefix in common with a new one, and its length; None where no row has its root."""
        known = self._of_root.get(new.root, [])
        at = bisect_left(known, new.token_ids.tobytes(), key=_as_bytes)
        closest: Ended | None = None
        num_common = -1
        for _, tokens, row in known[max(0, at - 1) : at + 1]:
            common = common_prefix_length(tokens, new.token_ids)
            if common > num_common:
                closest, num_common = row, common
        return closest, num_common


class _Known(NamedTuple, Generic[Ended]):
    as_bytes: bytes
    tokens: TokenIds
    row: Ended


_as_bytes = attrgetter("as_bytes")


class _Choice(NamedTuple):
    """Of what is known of a row, that which reaches furthest."""

    num_tokens: int
    stopped: str
    closest: Row | None  # the previous row whose blocks hold it; None: the store's blocks do
    ended: Row | None  # the previous row after whose last token the states are known


def match_row(store: BlockStore, new: RowInput, previous: PreviousRows[Row]) -> tuple[BlockTable, Found]:
    """Hold the longest known prefix of a row.

    A full block is found by its hash, whoever computed it. A previous row of the same root is compared token by token,
    so that a prefix need not end at a block; its table is forked and cut.
    """
    table = store.new_table(new.root, new.salt)
    num_hit = table.hold_prefix(new.token_ids)
    num_matched = table.num_matched_tokens
    has_images = hold_images(new.token_ids)
    if has_images:
        table, num_hit = _with_image_end(store, new, table, num_hit)
        num_matched = max(num_matched, num_hit)
    if has_images or table.groups:
        num_whole = table.num_resumable_tokens(num_hit, new.token_ids)
        if num_whole < num_hit:
            table.truncate(num_whole)
            num_hit = num_whole
    choice = _choose(store, new, previous, num_hit, num_matched, _num_at_origin)
    if choice.closest is not None:
        table.free()
        table = choice.closest.table.fork()
        table.truncate(choice.num_tokens)
    origin = None if choice.ended is None else choice.ended.origin
    return table, Found(choice.num_tokens, choice.stopped, origin)


def _with_image_end(store: BlockStore, new: RowInput, table: BlockTable, num_hit: int) -> tuple[BlockTable, int]:
    """A table that holds the end of the image in the block after the hit, too, where that was kept."""
    with store.new_table(new.root, new.salt) as probe:
        end = end_after(probe, new.token_ids, num_hit, store.block_size)
    if end == num_hit:
        return table, num_hit
    table.free()
    table = store.new_table(new.root, new.salt)
    num_held = table.hold_prefix(filled_up(new.token_ids, end, store.block_size))
    table.truncate(min(num_held, end))
    return table, table.num_tokens


def look_up_row(
    store: BlockStore, new: RowInput, previous: PreviousRows[Row], most: int, num_at_end: Callable[[Row], int | None]
) -> Found:
    """What `match_row`, and `match_states` after it, would find of a row.  Effects: none.

    Args:
        most: tokens after which a row whose layers carry states may resume at most.
        num_at_end: of a previous row, the tokens after which its states are known, if any are.
    """
    with store.new_table(new.root, new.salt) as table:
        hit = table.match_prefix(new.token_ids)
        if hold_images(new.token_ids):
            ended = end_after(table, new.token_ids, hit.num_matched_tokens, store.block_size)
            hit = hit._replace(num_tokens=max(hit.num_tokens, ended if ended > hit.num_matched_tokens else 0))
        choice = _choose(store, new, previous, hit.num_tokens, hit.num_matched_tokens, num_at_end)
        found = Found(choice.num_tokens, choice.stopped)
        if not store.states:
            return found
        known = 0 if choice.ended is None else num_at_end(choice.ended) or 0
        known = known if known <= most else 0
        groups: tuple[Group, ...] = (*store.groups, WholeImages(new.token_ids))
        known = max(known, resumable(groups, hit.block_ids, min(found.num_tokens, most)))
        why = _why_no_state(store, found.num_tokens, known, most)
        return Found(known, why) if why else found


def continuation(store: BlockStore, new: RowInput, previous: PreviousRows[Any], num_tokens: int) -> TokenIds:
    """How the closest of what is known continues after the first `num_tokens` tokens of a row; empty where nothing does.

    Effects: none.  Cost: a SHA-256 for each block of the store.
    """
    row, num_common = previous.closest(new)
    found = [row.true_token_ids[num_tokens:]] if row is not None and num_common >= num_tokens else []
    if num_tokens % store.block_size == 0:
        chain = HashChain(new.root, store.block_size)
        chain.extend(new.token_ids[:num_tokens])
        parent = chain.hashes_of(chain.num_full_blocks - 1, chain.num_full_blocks)[0].digest if num_tokens else new.root
        found += store.allocator.continuations(parent, new.salt)
    rest = new.token_ids[num_tokens:]
    return max(found, key=lambda tokens: common_prefix_length(tokens, rest), default=rest[:0])


def found_below(store: BlockStore, new: RowInput, num_tokens: int) -> Found:
    """What is found of a row once so many of its tokens have come up from lower tiers."""
    return Found(num_tokens, why_stopped(num_tokens, new.token_ids, store.block_size, None))


def _choose(
    store: BlockStore,
    new: RowInput,
    previous: PreviousRows[Row],
    num_hit: int,
    num_matched: int,
    num_at_end: Callable[[Row], int | None],
) -> _Choice:
    """Between the store's blocks and the closest previous row.  Effects: none.

    Args:
        num_hit: tokens that the store's blocks hold.
        num_matched: the same without a look at windows.
        num_at_end: see `look_up_row`.
    """
    closest, num_common = previous.closest(new)
    begins_otherwise = closest is not None and num_common == 0 < closest.num_true_tokens
    ended = None
    if closest is not None and store.states:  # of its last token alone its states are there
        if num_at_end(closest) == closest.num_true_tokens <= num_common:
            ended = closest
        else:
            closest, num_common = None, 0
    num_known = 0 if closest is None else closest.table.num_resumable_tokens(num_common, new.token_ids)
    longest = whole_images(new.token_ids, max(num_common, num_matched))
    if closest is None or num_known <= num_hit:
        num_known, closest = num_hit, None
    if num_known < longest:
        why = f"a window no longer shows what is before token {longest}, up to which blocks are cached"
    else:
        num_previous = None if closest is None else closest.num_true_tokens
        why = why_stopped(num_known, new.token_ids, store.block_size, num_previous)
        if begins_otherwise and not num_known:
            why += ", and the last call's begin otherwise"
    return _Choice(num_known, why, closest, ended)


def _num_at_origin(row: Row) -> int | None:
    return None if row.origin is None else row.origin.num_tokens


def match_states(store: BlockStore, row: Row, most: int) -> str:
    """Let a row's `origin` be where it may resume: after its last snapshot, if it knows no place further on.

    Args:
        most: tokens after which it may resume at most.

    Returns:
        Why the row resumes from less than its blocks have; "" where it does not.
    """
    table = row.table
    if row.origin is not None and row.origin.num_tokens > most:
        row.origin = None
    known = 0 if row.origin is None else row.origin.num_tokens
    groups: tuple[Group, ...] = (*store.groups, WholeImages(table.token_ids))
    num_tokens = resumable(groups, table.block_ids, min(table.num_tokens, most))
    if num_tokens > known:
        row.origin, known = Origin(num_tokens, store.states.use(table.block_ids, num_tokens)), num_tokens
    why = _why_no_state(store, table.num_tokens, known, most)
    row.num_matched = max(row.num_matched, table.num_tokens)
    if store.windows.groups and known < table.num_tokens:
        # What is held is not written again, but on the way windows must see what they may have let go.
        table.truncate(max(known, row.num_confirmed))
    return why


def _why_no_state(store: BlockStore, num_tokens: int, known: int, most: int) -> str:
    if known < min(num_tokens, most // store.block_size * store.block_size):
        return f"blocks are cached up to token {num_tokens}, but no state after token {known}"
    return ""


def hold_longer(store: BlockStore, row: Row, new: TokenIds) -> bool:
    """Let a row hold what is known by now of its tokens and its new ones, if that is more than it holds."""
    table = store.new_table(row.root, row.table.namespace)
    num_held = row.num_confirmed  # the row resumes from here where another one knows no more
    if table.hold_prefix(row.with_new(new)) <= row.table.num_tokens or table.num_resumable_tokens(num_held) < num_held:
        table.free()
        return False
    table.hold_window(num_held)
    replaced, row.table = row.table, table
    replaced.free()
    return True


def why_stopped(num_known: int, token_ids: TokenIds, block_size: int, num_previous: int | None) -> str:
    """Why a row is known no further.

    Args:
        num_previous: tokens of the previous row by which it is known; None: by blocks.
    """
    if num_known == len(token_ids):
        return "the whole prompt was known"
    if num_previous is not None:
        if num_known == num_previous:
            return f"the last call's row ends at token {num_known}, and the prompt continues"
        return f"the prompt differs from the last call's tokens at token {num_known}"
    end = (num_known // block_size + 1) * block_size
    if hold_images(token_ids) and (image := said_image(token_ids, num_known, end)):
        return f"no cached block has {image} after these tokens"
    if end > len(token_ids):
        num_left = len(token_ids) - num_known
        return f"from token {num_known} on there is no full block: {num_left} of {block_size} tokens"
    if num_known == 0:
        return f"no cached block has these first {block_size} tokens under the same conditions"
    return f"no cached block continues with tokens {num_known} to {end - 1}"
