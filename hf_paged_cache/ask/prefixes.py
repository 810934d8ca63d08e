"""Prefixes that a user names by their token ids: `cache.prefill` computes them ahead, `cache.pin` and `cache.unpin` keep them and let go.

Owns what their arguments may be. Changes no rows of the cache that is asked.
"""

from array import array

from torch import Tensor

from ..blocks.arguments import int_of_at_least
from ..errors import UnsupportedModelError
from ..integration.prefill import Prefill, Prefilled, Prompt
from ..integration.token_input import are_several, in_vocabulary, one_sequence
from .asked import AskedCache


def prefill(
    cache: AskedCache, token_ids: "list[int] | Tensor | list[list[int]] | list[Tensor]", *, chunk_size: int = 2048
) -> Prefilled:
    """Compute the keys and values of a prefix, or of several, so that they are cached, without a `generate`.

    Whole blocks are cached, those that are known are not computed again, and layers with a window or a state keep what
    is needed to resume at the end. Any later call may evict them: `pin` keeps them. It holds under the conditions that
    `pin` names. Effects: none on the rows of this cache; `stats()` counts what is computed as a call, and `last_call` shows
    it, unless a `generate` runs. Processes that share a model call it together, with the same lengths and `chunk_size`.

    Args:
        token_ids: of the prefix as prompts begin with it, special tokens included: a list or tensor of [T] or [1, T];
            or a list of such.
        chunk_size: new tokens that run in one forward, so that a long prefix takes bounded memory. Where rotary
            frequencies depend on length, each runs whole.

    Returns:
        tokens cached now, known before, and computed; see `Prefilled`.

    Raises:
        OutOfBlocksError: they do not fit at a time; nothing was computed.
        UnsupportedModelError: nothing that the model computes now may be reused, such as with an active dropout.
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
    model, session = cache.store.model, cache._session
    vocabulary_size = model.config.get_text_config(decoder=True).vocab_size
    given = list(token_ids) if are_several(token_ids) else [token_ids]
    names = [f"prompt {number}" for number in range(len(given))] if are_several(token_ids) else ["the prefix"]
    wanted = [array("q", in_vocabulary(name, each, vocabulary_size)) for name, each in zip(names, given, strict=True)]
    for name, tokens in zip(names, wanted, strict=True):
        cache.store.placeholders.require_text(name, tokens)
    prompts = [Prompt(session.root_of_prefix(len(tokens)), cache.cache_salt, tokens) for tokens in wanted]
    if why := session.why_bypassed():
        raise UnsupportedModelError(
            f"nothing that this model computes now may be reused, so nothing was prefilled: {why}"
        )
    prefill = Prefill(
        cache.store.blocks,
        cache._side,
        chunk_size=chunk_size,
        by_length=cache.store.conditioning.rope.depends_on_length,
        looks=not cache._ranks.are_several,
    )
    done, rows, peak_kv_bytes = prefill.run(prompts)
    if done.num_computed:
        cache.call.count_elsewhere("prefill", rows, peak_kv_bytes)
    return done


def pin(cache: AskedCache, token_ids: "list[int] | Tensor") -> int:
    """Keep what is cached of this prefix until `unpin`: no other call evicts it, and no collected cache takes it along.

    Computes nothing: `prefill` it, or run it once, then pin it. Whole blocks are pinned; pinning the same tokens again counts
    once, and takes what is cached of them by then. A pin belongs to the store and to this `cache_salt`. It holds
    for the model as it is now, for rows without padding where a model numbers its columns, and, where rotary
    frequencies depend on length, for those of a prompt as long as the prefix. When the model changes, pinned blocks
    are not found, as all others, but still held: `unpin` them, or `prefill` and pin again.

    Args:
        token_ids: of the prefix as prompts begin with it, special tokens included: a list or tensor of [T] or [1, T].

    Returns:
        The number of tokens pinned: a multiple of the block size, at least one block; fewer than were given where the
        rest is not cached, or fills no block, or where layers with a state have none after it.

    Raises:
        CacheArgumentError: nothing of it is cached, it is shorter than a block, or these are not the token ids of one
            sequence; nothing has changed.
        OutOfBlocksError: running calls have reserved those blocks; nothing has changed.
        CacheBusyError: rotary frequencies depend on length, and a call is running.

    Examples:
        >>> cache.prefill(inputs["input_ids"]).num_tokens
        80
        >>> cache.pin(inputs["input_ids"]), cache.stats().num_pinned_blocks
        (80, 5)
        >>> cache.unpin(inputs["input_ids"]), cache.stats().num_pinned_blocks
        (80, 0)
    """
    tokens, blocks = array("q", one_sequence("the prefix", token_ids)), cache.store.blocks
    root = cache._session.root_of_prefix(len(tokens))
    with blocks.lock:
        blocks.settle()
        return blocks.pins.pin(cache.cache_salt, root, tokens, blocks.num_obtainable_blocks(None))


def unpin(cache: AskedCache, token_ids: "list[int] | Tensor | None" = None) -> int:
    """Let a pinned prefix be evicted again, whatever has changed since; without tokens, all of this `cache_salt`.

    Returns:
        The number of tokens that were pinned; 0 when none were.

    Raises:
        CacheArgumentError: not the token ids of one sequence.
    """
    tokens = None if token_ids is None else array("q", one_sequence("the prefix", token_ids))
    with cache.store.blocks.lock:
        return cache.store.blocks.pins.unpin(cache.cache_salt, tokens)
