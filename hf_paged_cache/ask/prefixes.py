"""Computes prefixes ahead (`cache.prefill`), keeps them (`cache.pin`) and lets them go (`cache.unpin`)."""

from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor

from ..blocks import BlockHash, HashChain, TokenIds
from ..blocks.arguments import int_of_at_least
from ..blocks.image_tokens import end_of_image, filled_up
from ..errors import CacheArgumentError, OutOfBlocksError, UnsupportedModelError
from ..integration.token_input import are_several, one_sequence
from ..rows.request import RowInput
from ..rows.rows import Rows
from ..stats import RowStats
from .prompts import AskedCache, AskedPrompt, asked_prompt


class Prefilled(NamedTuple):
    """`Prefilled` says what `cache.prefill` has done, in tokens of all prompts.

    Attributes:
        num_tokens: tokens that are cached now, in whole blocks: all, unless the model has changed meanwhile.
        num_known: tokens that were known, and not computed again.
        num_computed: tokens that ran through the model. Where layers carry states, and blocks were known further than a
            state, these are more than the new tokens.
    """

    num_tokens: int
    num_known: int
    num_computed: int


def prefill(
    cache: AskedCache,
    token_ids: "list[int] | Tensor | Mapping[str, Any] | list[list[int]] | list[Tensor] | list[Mapping[str, Any]]",
    *,
    chunk_size: int = 2048,
) -> Prefilled:
    """Compute and cache the keys and values of one or several prefixes before a `generate` asks for them.

    Whole blocks are cached. They are found under the conditions that `pin` names, and any later call may evict them;
    `pin` keeps them. Processes that share a model call `prefill` together, with the same lengths and `chunk_size`. The
    rows of this cache stay; `stats()` and `last_call` count what is computed as a call.

    Args:
        token_ids: a prefix as `pin` takes it, or a list of prefixes.
        chunk_size: new tokens that run in one forward, so that a long prefix takes bounded memory. Where rotary
            frequencies depend on length, and with images, each prefix runs in one forward.

    Raises:
        OutOfBlocksError: the prefixes do not fit into the pool at a time; nothing was computed.
        UnsupportedModelError: nothing that is computed now may be reused, such as with an active dropout, or where the
            prompt ends with an image.
        CacheArgumentError, CacheBusyError: see `lookup`; or `chunk_size` is no number of tokens.

    Examples:
        >>> cache.prefill(inputs["input_ids"])
        Prefilled(num_tokens=80, num_known=0, num_computed=80)
        >>> cache.prefill(inputs["input_ids"])
        Prefilled(num_tokens=80, num_known=80, num_computed=0)
        >>> output = model.generate(**inputs, past_key_values=cache, max_new_tokens=1)
        >>> cache.last_call.computed_tokens  # the last one, for its logits
        1
    """
    int_of_at_least("chunk_size", chunk_size, 1, "tokens of a forward")
    given: dict[str, Any] = {"the prefix": token_ids}
    if are_several(token_ids):
        given = {f"prompt {number}": each for number, each in enumerate(token_ids)}
    prompts = {name: asked_prompt(cache, name, each) for name, each in given.items()}
    for name, prompt in prompts.items():
        if prompt.why_whole is not None:
            problem = f"nothing that is computed now of {name} may be reused, so nothing was prefilled"
            raise UnsupportedModelError(f"{problem}: {prompt.why_whole}")
    blocks, looks = cache.store.blocks, not cache.store.fingerprint.rank_groups  # ranks must run equally many forwards
    size = blocks.block_size
    hashes = [HashChain(each.row.root, size, each.row.token_ids).hashes_of() for each in prompts.values()]
    with blocks.lock:
        if looks:
            blocks.settle()
            _require_room(cache, hashes)
        known_before = [_known(cache, *each)[0] for each in zip(prompts.values(), hashes, strict=True)]
    ran = [_run(cache, *each, chunk_size, looks=looks) for each in zip(prompts.values(), hashes, strict=True)]
    _count(cache, ran, known_before)
    return Prefilled(*map(sum, zip(*(did for did, _ in ran), strict=True)))


def _require_room(cache: AskedCache, hashes: Sequence[Sequence[BlockHash]]) -> None:
    """Raise OutOfBlocksError if the prompts' blocks cannot be cached at a time. The store's lock is held."""
    blocks, wanted = cache.store.blocks, {*chain(*hashes)}
    found = [blocks.allocator.match_prefix((each,), cache.cache_salt) for each in wanted]
    num_taken = sum(not block_ids or not blocks.allocator.ref_count(block_ids[0]) for block_ids in found)
    if num_taken > blocks.budget.num_obtainable_blocks():  # which number that is, another tenant is not told
        raise OutOfBlocksError(
            f"these prompts have {len(wanted)} blocks of {blocks.block_size} tokens, {num_taken} of which "
            "nobody holds, and so many cannot be had beside what is in use; give fewer tokens, unpin() or reset() "
            "what is no longer needed, or build the cache with a larger num_blocks or max_bytes"
        )


def _known(cache: AskedCache, prompt: AskedPrompt, hashes: Sequence[BlockHash]) -> tuple[int, bool]:
    """Return after how many tokens a prompt could resume, and whether nothing is left to compute.

    In this case its blocks count as used now. The store's lock is held.
    """
    blocks = cache.store.blocks
    end = len(hashes) * blocks.block_size
    known, _, num_matched = blocks.leases.look(hashes, cache.cache_salt, prompt.row.token_ids, end)
    is_all = num_matched == end and known == end // blocks.align * blocks.align
    if is_all:
        blocks.leases.give_back(blocks.leases.take(hashes, cache.cache_salt, known))  # these are evicted last
    return known, is_all


def _run(
    cache: AskedCache, prompt: AskedPrompt, hashes: Sequence[BlockHash], chunk_size: int, *, looks: bool
) -> tuple[Prefilled, Rows | None]:
    """Compute what is not known of a prompt, and return the rows that have done so; None: all was known.

    The last forward ends with the last full block. Where layers carry states, a forward ends at the last place for a
    snapshot, and at the last place from which the same prompt can resume.
    """
    blocks, side, tokens = cache.store.blocks, cache._side_rows, prompt.row.token_ids
    num_tokens, align, end = len(tokens), blocks.align, len(hashes) * blocks.block_size
    known, is_all = 0, not end
    if looks:
        with blocks.lock:
            known, is_all = _known(cache, prompt, hashes)
    if is_all:
        return Prefilled(end, end, 0), None
    stops = [num_tokens]  # after how many tokens forwards end
    if prompt.inputs is not None:
        _, rows = side.generate(prompt.inputs)
    else:
        rows = side.begin("prefill")
        if not cache.store.fingerprint.rope.depends_on_length:
            size = -(-chunk_size // align) * align
            ends = {end, *range(known + size, end, size)}
            if rows.states is not None:
                num_needed = rows.states.num_needed(num_tokens, is_padding=False)
                ends |= {at // align * align for at in (num_tokens - num_needed, end)}
            stops = sorted(at for at in ends if at > known)
        side.run(rows, [RowInput(tokens, 0, 0)], stops)
        rows.calls.close(rows)
    num_computed = rows.state.counts[0].computed_tokens + stops[-1] - stops[0]
    with blocks.lock:
        num_kept = len(blocks.allocator.match_prefix(hashes, cache.cache_salt)) * blocks.block_size
    return Prefilled(num_kept, max(0, stops[-1] - num_computed), num_computed), rows


def _count(cache: AskedCache, ran: Sequence[tuple[Prefilled, Rows | None]], known_before: Sequence[int]) -> None:
    """Count prompts as one call, unless nothing ran; so many tokens of each were known before any of them ran."""
    counts, of_rows = [], [rows for _, rows in ran if rows is not None]
    for (did, _), known in zip(ran, known_before, strict=True):
        num_tokens, reused = did.num_known + did.num_computed, min(known, did.num_known)
        stopped = "the rest was computed" if did.num_computed else "the whole prefix was known"
        counts.append(RowStats(num_tokens, did.num_computed, reused, reused, stopped))
    if of_rows:
        peak = max(rows.state.peak_kv_bytes for rows in of_rows)
        is_bypassed = any(rows.why_bypassed is not None for rows in of_rows)
        with cache.store.blocks.lock:
            cache._calls.counters.add_call("prefill", counts, peak, bypassed=is_bypassed)


def pin(cache: AskedCache, token_ids: "list[int] | Tensor | Mapping[str, Any]") -> int:
    """Keep what is cached of a prefix, in whole blocks, until `unpin`: no call evicts it, and it outlives this cache.

    Nothing is computed: `prefill` the prefix, or run it once, then pin it. Pinning the same tokens again counts once,
    and also pins what has been cached of them since. A pin belongs to the store and to this `cache_salt`.

    A pin holds for the model as it is now; where a model numbers its columns, for rows without padding; and where
    rotary frequencies depend on length, for those of a prompt as long as the prefix. When the model changes, pinned
    blocks are no longer found, but are still held: `unpin` them, or `prefill` and pin again.

    Args:
        token_ids: see `lookup`.

    Returns:
        The number of tokens pinned: a multiple of the block size, at least one block. Fewer than were given are pinned
        where the rest is not cached, or fills no block, or where layers with a state have none after it.

    Raises:
        CacheArgumentError: nothing of the prefix is cached, or it is shorter than a block; or see `lookup`.
        OutOfBlocksError: there is no room for what layers with a window need of the prefix; nothing has changed.
        CacheBusyError: see `lookup`.

    Examples:
        >>> cache.prefill(inputs["input_ids"]).num_tokens
        80
        >>> cache.pin(inputs["input_ids"]), cache.stats().num_pinned_blocks
        (80, 5)
        >>> cache.unpin(inputs["input_ids"]), cache.stats().num_pinned_blocks
        (80, 0)
    """
    row, blocks = asked_prompt(cache, "the prefix", token_ids).row, cache.store.blocks
    ended = _up_to_an_image(cache, row.token_ids)
    with blocks.lock:
        blocks.settle()
        num_pinned = blocks.leases.pin(cache.cache_salt, row.root, row.token_ids)
        if ended:
            with suppress(CacheArgumentError, OutOfBlocksError):  # without this pin, other text may run the image again
                blocks.leases.pin(cache.cache_salt, row.root, ended)
    return num_pinned


def unpin(cache: AskedCache, token_ids: "list[int] | Tensor | Mapping[str, Any] | None" = None) -> int:
    """Let a pinned prefix be evicted again, whatever has changed since it was pinned.

    Args:
        token_ids: prompt as `pin` takes it; None: all pinned prefixes of this `cache_salt`.

    Returns:
        The number of tokens that were pinned; 0 when none were.
    """
    tokens: TokenIds | None = None
    if isinstance(token_ids, Mapping):
        tokens = asked_prompt(cache, "the prefix", token_ids).row.token_ids
    elif token_ids is not None:  # pinned under whatever conditions
        tokens = array("q", one_sequence("the prefix", token_ids))
    leases = cache.store.blocks.leases
    with cache.store.blocks.lock:
        if tokens is not None and (ended := _up_to_an_image(cache, tokens)):
            leases.unpin(cache.cache_salt, ended)
        return leases.unpin(cache.cache_salt, tokens)


def _up_to_an_image(cache: AskedCache, tokens: TokenIds) -> TokenIds:
    """Return the tokens up to the end of the last image, as they are kept; none where that is a block's end."""
    end = end_of_image(tokens, 0, len(tokens)) or 0
    size = cache.store.blocks.block_size
    return filled_up(tokens, end, size) if end % size else tokens[:0]
