"""Prefixes that a user names by their token ids, or as a processor returns them: `cache.prefill` computes them ahead, `cache.pin` and `cache.unpin` keep them and let go.

Owns what their arguments may be. Changes no rows of the cache that is asked.
"""

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
from ..integration.token_input import are_several, in_vocabulary, one_sequence
from .asked import AskedCache
from .prompts import asked_prompt


def prefill(
    cache: AskedCache,
    token_ids: "list[int] | Tensor | Mapping[str, Any] | list[list[int]] | list[Tensor] | list[Mapping[str, Any]]",
    *,
    chunk_size: int = 2048,
) -> Prefilled:
    """Compute the keys and values of a prefix, or of several, so that they are cached, before a `generate` asks for them.

    Whole blocks are cached, those that are known are not computed again, and layers with a window or a state keep what
    is needed to resume at the end. Any later call may evict them: `pin` keeps them. It holds under the conditions that
    `pin` names. Effects: none on the rows of this cache; `stats()` counts what is computed as a call, and `last_call` shows
    it, unless a `generate` runs. Processes that share a model call it together, with the same lengths and `chunk_size`.

    Args:
        token_ids: of the prefix as prompts begin with it, special tokens included: a list or tensor of [T] or [1, T]; or what a
            processor returns, with images; or a list of such.
        chunk_size: new tokens that run in one forward, so that a long prefix takes bounded memory. Where rotary
            frequencies depend on length, and with images, each runs whole.

    Returns:
        tokens cached now, known before, and computed; see `Prefilled`.

    Raises:
        OutOfBlocksError: they do not fit at a time; nothing was computed.
        UnsupportedModelError: nothing that is computed now may be reused, such as with an active dropout, or where the prompt
            ends with an image.
        CacheArgumentError: not the token ids of sequences, or outside the vocabulary; or no `chunk_size`.
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
        by_length=cache.store.conditioning.rope.depends_on_length,
        looks=not cache._ranks.are_several,
    )
    done, rows = prefill.run(prompts)
    if done.num_computed:
        with cache.store.blocks.lock:
            cache._counters.add_call("prefill", rows, prefill.peak_kv_bytes, bypassed=prefill.is_bypassed)
    return done


def _prompt_to_prefill(cache: AskedCache, name: str, given: Any) -> Prompt:
    """A prompt as a user gives it, under the model as it is now.

    Args:
        name: of the prompt, for messages.

    Raises:
        CacheArgumentError: it is not the token ids of a sequence, or has some outside the vocabulary.
        UnsupportedModelError: what is computed of it now may not be reused.
    """
    if not isinstance(given, Mapping):
        vocabulary_size = cache.store.model.config.get_text_config(decoder=True).vocab_size
        cache.store.placeholders.require_text(name, in_vocabulary(name, given, vocabulary_size))
    asked = asked_prompt(cache, name, given)
    if asked.why_whole is not None:
        raise UnsupportedModelError(
            f"nothing that is computed now of {name} may be reused, so nothing was prefilled: {asked.why_whole}"
        )
    return Prompt(asked.row.root, cache.cache_salt, asked.token_ids, asked.inputs)


def pin(cache: AskedCache, token_ids: "list[int] | Tensor | Mapping[str, Any]") -> int:
    """Keep what is cached of this prefix until `unpin`: no other call evicts it, and no collected cache takes it along.

    Computes nothing: `prefill` it, or run it once, then pin it. Whole blocks are pinned; pinning the same tokens again counts
    once, and takes what is cached of them by then. A pin belongs to the store and to this `cache_salt`. It holds
    for the model as it is now, for rows without padding where a model numbers its columns, and, where rotary
    frequencies depend on length, for those of a prompt as long as the prefix. When the model changes, pinned blocks
    are not found, as all others, but still held: `unpin` them, or `prefill` and pin again.

    Args:
        token_ids: of the prefix as prompts begin with it, special tokens included: a list or tensor of [T] or [1, T]; or what a
            processor returns, with images.

    Returns:
        The number of tokens pinned: a multiple of the block size, at least one block; fewer than were given where the
        rest is not cached, or fills no block, or where layers with a state have none after it.

    Raises:
        CacheArgumentError: nothing of it is cached, it is shorter than a block, or these are not the token ids of one
            sequence; nothing has changed.
        OutOfBlocksError: there is no room for what layers with a window need of it; nothing has changed.
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
    ended = _up_to_an_image(cache, asked.token_ids)
    with blocks.lock:
        blocks.settle()
        num_pinned = pins.pin(cache.cache_salt, root, asked.token_ids)
        if ended:
            with suppress(CacheArgumentError, OutOfBlocksError):  # other text than pinned may then run the image again
                pins.pin(cache.cache_salt, root, ended)
    return num_pinned


def unpin(cache: AskedCache, token_ids: "list[int] | Tensor | Mapping[str, Any] | None" = None) -> int:
    """Let a pinned prefix be evicted again, whatever has changed since; without tokens, all of this `cache_salt`.

    Returns:
        The number of tokens that were pinned; 0 when none were.

    Raises:
        CacheArgumentError: not one prompt as `pin` takes it.
    """
    tokens: TokenIds | None = None
    if isinstance(token_ids, Mapping):
        tokens = asked_prompt(cache, "the prefix", token_ids).token_ids
    elif token_ids is not None:  # under whatever conditions
        tokens = array("q", one_sequence("the prefix", token_ids))
    pins = cache.store.blocks.pins
    with cache.store.blocks.lock:
        if tokens is not None and (ended := _up_to_an_image(cache, tokens)):
            pins.unpin(cache.cache_salt, ended)
        return pins.unpin(cache.cache_salt, tokens)


def _up_to_an_image(cache: AskedCache, tokens: TokenIds) -> TokenIds:
    """The tokens up to the end of the last image, as they are kept; empty where it ends with a block, or there is none."""
    end = end_of_image(tokens, 0, len(tokens)) or 0
    size = cache.store.blocks.block_size
    return filled_up(tokens, end, size) if end % size else tokens[:0]
