"""Prefixes that a user names by their token ids: computed ahead, looked up, pinned.

Owns what their arguments may be, and which root they have now. Changes no rows of the cache that is asked.
"""

from abc import abstractmethod
from array import array
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .blocks.arguments import int_of_at_least
from .call.call import Call
from .call.prefix_match import Found
from .call.scheduled_forward import RowInput
from .errors import CacheArgumentError, UnsupportedModelError
from .explanation import Explanation, Lookup, explanation
from .integration.prefill import Prefill, Prefilled, Prompt
from .integration.session import Session
from .integration.side_forward import SiblingCache, SideForwards
from .integration.token_input import are_several, in_vocabulary, one_sequence

if TYPE_CHECKING:
    from .prefix_store import PrefixStore

DEVICE = "device"  # the tier where the pool is


class NamedPrefixes:
    """What a `PagedPrefixCache` can be asked of a prefix."""

    store: "PrefixStore"
    call: Call
    cache_salt: bytes
    _session: Session

    def prefill(
        self, token_ids: "list[int] | Tensor | list[list[int]] | list[Tensor]", *, chunk_size: int = 2048
    ) -> Prefilled:
        """Compute the keys and values of a prefix, or of several, so that they are cached, without a `generate`.

        Whole blocks are cached, those that are known are not computed again, and layers with a window or a state keep what
        is needed to go on at the end. Any later call may evict them: `pin` keeps them. It holds under the conditions that
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
        model, session = self.store.model, self._session
        vocabulary_size = model.config.get_text_config(decoder=True).vocab_size
        given = list(token_ids) if are_several(token_ids) else [token_ids]
        names = [f"prompt {number}" for number in range(len(given))] if are_several(token_ids) else ["the prefix"]
        wanted = [
            array("q", in_vocabulary(name, each, vocabulary_size)) for name, each in zip(names, given, strict=True)
        ]
        for name, tokens in zip(names, wanted, strict=True):
            self.store.placeholders.require_text(name, tokens)
        prompts = [Prompt(session.root_of_prefix(len(tokens)), self.cache_salt, tokens) for tokens in wanted]
        if why := session.why_bypassed():
            raise UnsupportedModelError(
                f"nothing that this model computes now may be reused, so nothing was prefilled: {why}"
            )
        side = SideForwards(model, self.store.argument_reader, self._verifying_sibling)
        prefill = Prefill(
            self.store.blocks,
            side,
            chunk_size=chunk_size,
            by_length=self.store.conditioning.rope.depends_on_length,
            looks=not session.runs_on_ranks,
        )
        done, rows, peak_kv_bytes = prefill.run(prompts)
        if done.num_computed:
            self.call.count_elsewhere("prefill", rows, peak_kv_bytes)
        return done

    def lookup(self, token_ids: "list[int] | Tensor") -> Lookup:
        """Say how much of a prompt a `generate` on this cache would find now, in the store or in the last call's rows, and why no more.

        Effects: none: nothing is computed, held or made more recent. It is what a call of this prompt alone finds, without
        padding, which has room: in a tight pool a call may go on from less, to fit. One token at least is computed by any
        call. While a call runs on this cache, of that call only committed blocks count.

        Args:
            token_ids: of the whole prompt, special tokens included: a list or tensor of [T] or [1, T].

        Raises:
            CacheArgumentError: not the token ids of one sequence.
            CacheBusyError: rotary frequencies depend on length, and a call is running.

        Examples:
            >>> cache.lookup(inputs["input_ids"]).stopped
            'no cached block has these first 16 tokens under the same conditions'
            >>> cache.prefill(inputs["input_ids"]).num_tokens, cache.lookup(inputs["input_ids"]).num_tokens
            (80, 80)
        """
        tokens, blocks = array("q", one_sequence("the prompt", token_ids)), self.store.blocks
        root = self._session.root_of_prefix(len(tokens))
        why = self._session.why_bypassed()
        with blocks.lock:
            blocks.settle()
            found, below = (
                (Found(0, why), None) if why else self.call.look_up(RowInput(tokens, 0, 0, root, salt=self.cache_salt))
            )
        num_blocks, tier = found.num_tokens // blocks.block_size, below or (DEVICE if found.num_tokens else None)
        return Lookup(found.num_tokens, num_blocks, found.stopped, tier)

    def explain(self, token_ids: "list[int] | Tensor", tokenizer: Any = None) -> Explanation:
        """Say how much of a prompt a `generate` on this cache would reuse now, up to which token, and why no more; `print` it.

        As `lookup`, with what is cached instead: how the closest cached prompt of this `cache_salt` goes on there. Effects:
        none.  Cost: hashes the tokens of each cached block, 1 us a block.

        Args:
            token_ids: of the whole prompt, special tokens included: a list or tensor of [T] or [1, T].
            tokenizer: shows the place as text; None: as token ids.

        Raises:
            CacheArgumentError, CacheBusyError: see `lookup`.

        Examples:
            >>> text = "Answer in one word. What is ice? "
            >>> cache.prefill(tokenizer(text + "And what is a fire?").input_ids).num_computed
            48
            >>> print(cache.explain(tokenizer(text + "And what is snow?").input_ids, tokenizer))
            32 of 50 tokens are known (64%); 18 would be computed
            why no more: no cached block goes on with tokens 32 to 47
            from token 45 on they part, behind   'ce? And what is '
              the prompt goes on with   'snow?'
              what is cached with       'a f'
            blocks are shared whole, so 13 tokens from token 32 on that the two have in common are computed, too
        """
        tokens, blocks = array("q", one_sequence("the prompt", token_ids)), self.store.blocks
        if not tokens:
            raise CacheArgumentError("the prompt has no tokens, so there is nothing to explain; give at least one")
        if tokenizer is not None and not hasattr(tokenizer, "decode"):
            raise CacheArgumentError(f"tokenizer is of type {type(tokenizer).__name__}; give the model's, or None")
        found = self.lookup(tokens.tolist())
        row = RowInput(tokens, 0, 0, self._session.root_of_prefix(len(tokens)), salt=self.cache_salt)
        with blocks.lock:
            blocks.settle()
            goes_on = self.call.continuation(row, found.num_tokens)
            first = tokens[: blocks.block_size]
            is_elsewhere = not found.num_tokens and blocks.allocator.has_tokens(first, self.cache_salt)
        return explanation(tokens, found, goes_on, tokenizer, is_elsewhere=is_elsewhere)

    def pin(self, token_ids: "list[int] | Tensor") -> int:
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
            rest is not cached, or fills no block.

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
        tokens, blocks = array("q", one_sequence("the prefix", token_ids)), self.store.blocks
        root = self._session.root_of_prefix(len(tokens))
        with blocks.lock:
            blocks.settle()
            return blocks.pins.pin(self.cache_salt, root, tokens, blocks.num_obtainable_blocks(None))

    def unpin(self, token_ids: "list[int] | Tensor | None" = None) -> int:
        """Let a pinned prefix be evicted again, whatever has changed since; without tokens, all of this `cache_salt`.

        Returns:
            The number of tokens that were pinned; 0 when none were.

        Raises:
            CacheArgumentError: not the token ids of one sequence.
        """
        tokens = None if token_ids is None else array("q", one_sequence("the prefix", token_ids))
        with self.store.blocks.lock:
            return self.store.blocks.pins.unpin(self.cache_salt, tokens)

    @abstractmethod
    def _verifying_sibling(self) -> SiblingCache:
        """A cache for forwards of our own; see `PagedPrefixCache`."""
