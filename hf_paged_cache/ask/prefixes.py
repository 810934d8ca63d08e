"""Computes prefixes ahead (`cache.prefill`), keeps them (`cache.pin`) and lets them go (`cache.unpin`)."""

from array import array
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor

from ..blocks.arguments import int_of_at_least
from ..blocks.image_tokens import end_of_image, filled_up
from ..blocks.tokens import TokenIds
from ..errors import CacheArgumentError, OutOfBlocksError, UnsupportedModelError
from ..integration.prefill import Prefill, Prefilled, Prompt
from ..integration.token_input import are_several, one_sequence
from .prompts import AskedCache, asked_prompt, text_of


def prefill(
    cache: AskedCache,
    token_ids: "list[int] | Tensor | Mapping[str, Any] | list[list[int]] | list[Tensor] | list[Mapping[str, Any]]",
    *,
    chunk_size: int = 2048,
) -> Prefilled:
    """Compute and cache the keys and values of one or several prefixes before a `generate` asks for them.

    Whole blocks are cached, and known blocks are not computed again. Layers with a window or a state keep what is
    needed to resume at the end of a prefix. Any later call may evict the blocks; `pin` keeps them. They are found under
    the conditions that `pin` names. Processes that share a model call `prefill` together, with the same lengths and
    `chunk_size`. The rows of this cache stay; `stats()` and `last_call` count what is computed as a call.

    Args:
        token_ids: a prefix as `pin` takes it, or a list of prefixes.
        chunk_size: new tokens that run in one forward, so that a long prefix takes bounded memory. Where rotary
            frequencies depend on length, and with images, each prefix runs in one forward.

    Raises:
        OutOfBlocksError: the prefixes do not fit into the pool at a time; nothing was computed.
        UnsupportedModelError: nothing that is computed now may be reused, such as with an active dropout, or where the
            prompt ends with an image.
        CacheArgumentError: `token_ids` are not token ids of sequences, or lie outside the vocabulary; or `chunk_size`
            is no number of tokens.
        CacheBusyError: rotary frequencies depend on length, and a call is running.

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
    if are_several(token_ids):
        prompts = [_prompt_to_prefill(cache, f"prompt {number}", each) for number, each in enumerate(token_ids)]
    else:
        prompts = [_prompt_to_prefill(cache, "the prefix", token_ids)]
    prefill = Prefill(
        cache.store.blocks,
        cache._side_rows,
        chunk_size=chunk_size,
        by_length=cache.store.fingerprint.rope.depends_on_length,
        looks=not cache._ranks.are_several,
    )
    done, rows = prefill.run(prompts)
    if done.num_computed:
        with cache.store.blocks.lock:
            cache._counters.add_call("prefill", rows, prefill.peak_kv_bytes, bypassed=prefill.is_bypassed)
    return done


def _prompt_to_prefill(cache: AskedCache, name: str, given: Any) -> Prompt:
    """Read a prompt to prefill, as a user gives it, under the model as it is now; messages have its name."""
    if not isinstance(given, Mapping):
        text_of(cache, name, given)
    asked = asked_prompt(cache, name, given)
    if asked.why_whole is not None:
        raise UnsupportedModelError(
            f"nothing that is computed now of {name} may be reused, so nothing was prefilled: {asked.why_whole}"
        )
    return Prompt(asked.row.root, cache.cache_salt, asked.row.token_ids, asked.inputs)


def pin(cache: AskedCache, token_ids: "list[int] | Tensor | Mapping[str, Any]") -> int:
    """Keep what is cached of a prefix, in whole blocks, until `unpin`: no call evicts it, and it outlives this cache.

    Nothing is computed: `prefill` the prefix, or run it once, then pin it. Pinning the same tokens again counts once,
    and also pins what has been cached of them since. A pin belongs to the store and to this `cache_salt`.

    A pin holds for the model as it is now; where a model numbers its columns, for rows without padding; and where
    rotary frequencies depend on length, for the frequencies of a prompt as long as the prefix. When the model changes,
    pinned blocks are no longer found, like all others, but are still held: `unpin` them, or `prefill` and pin again.

    Args:
        token_ids: token ids of the prefix as prompts begin with it, special tokens included: a list or tensor of [T] or
            [1, T]; or what a processor returns, with images.

    Returns:
        The number of tokens pinned: a multiple of the block size, at least one block. Fewer than were given are pinned
        where the rest is not cached, or fills no block, or where layers with a state have none after it.

    Raises:
        CacheArgumentError: nothing of the prefix is cached, or it is shorter than a block, or these are not the token
            ids of one sequence; nothing has changed.
        OutOfBlocksError: there is no room for what layers with a window need of the prefix; nothing has changed.
        CacheBusyError: rotary frequencies depend on length, and a call is running.

    Examples:
        >>> cache.prefill(inputs["input_ids"]).num_tokens
        80
        >>> cache.pin(inputs["input_ids"]), cache.stats().num_pinned_blocks
        (80, 5)
        >>> cache.unpin(inputs["input_ids"]), cache.stats().num_pinned_blocks
        (80, 0)
    """
    asked, blocks = asked_prompt(cache, "the prefix", token_ids), cache.store.blocks
    pins, root = blocks.pins, asked.row.root
    ended = _up_to_an_image(cache, asked.row.token_ids)
    with blocks.lock:
        blocks.settle()
        num_pinned = pins.pin(cache.cache_salt, root, asked.row.token_ids)
        if ended:
            with suppress(CacheArgumentError, OutOfBlocksError):  # without this pin, other text may run the image again
                pins.pin(cache.cache_salt, root, ended)
    return num_pinned


def unpin(cache: AskedCache, token_ids: "list[int] | Tensor | Mapping[str, Any] | None" = None) -> int:
    """Let a pinned prefix be evicted again, whatever has changed since it was pinned.

    Args:
        token_ids: prompt as `pin` takes it; None: all pinned prefixes of this `cache_salt`.

    Returns:
        The number of tokens that were pinned; 0 when none were.

    Raises:
        CacheArgumentError: `token_ids` are not one prompt as `pin` takes it.
    """
    tokens: TokenIds | None = None
    if isinstance(token_ids, Mapping):
        tokens = asked_prompt(cache, "the prefix", token_ids).row.token_ids
    elif token_ids is not None:  # pinned under whatever conditions
        tokens = array("q", one_sequence("the prefix", token_ids))
    pins = cache.store.blocks.pins
    with cache.store.blocks.lock:
        if tokens is not None and (ended := _up_to_an_image(cache, tokens)):
            pins.unpin(cache.cache_salt, ended)
        return pins.unpin(cache.cache_salt, tokens)


def _up_to_an_image(cache: AskedCache, tokens: TokenIds) -> TokenIds:
    """Return the tokens up to the end of the last image, as they are kept; none where that is a block's end."""
    end = end_of_image(tokens, 0, len(tokens)) or 0
    size = cache.store.blocks.block_size
    return filled_up(tokens, end, size) if end % size else tokens[:0]
