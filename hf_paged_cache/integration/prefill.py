"""Computes prompts ahead of the calls that will ask for them, on sibling caches.

Owns where forwards end, so that memory stays bounded and layers with states leave a snapshot where other calls resume.
Refuses prompts that do not fit together before anything is computed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..blocks import HashChain, resumable
from ..blocks.tokens import TokenIds
from ..call.request import RowInput
from ..errors import OutOfBlocksError
from ..stats import RowStats
from ..store.block_store import BlockStore
from .side_rows import SideRows


class Prefilled(NamedTuple):
    """`Prefilled` says what `cache.prefill` has done, in tokens of all prompts.

    Attributes:
        num_tokens: number of tokens that are cached now, in whole blocks: all, unless the model has changed meanwhile.
        num_known: number of tokens that were known, and not computed again.
        num_computed: number of tokens that ran through the model. Where layers carry states, and blocks were known
            further than a state, these are more than the new tokens.

    Examples:
        >>> cache.prefill(inputs["input_ids"])
        Prefilled(num_tokens=80, num_known=0, num_computed=80)
        >>> cache.prefill(inputs["input_ids"])
        Prefilled(num_tokens=80, num_known=80, num_computed=0)
    """

    num_tokens: int
    num_known: int
    num_computed: int


class Prompt(NamedTuple):
    """`Prompt` is one prompt to compute; with `inputs`, it runs in one forward, as in a `generate` of these."""

    root: bytes
    salt: bytes
    token_ids: TokenIds
    inputs: Mapping[str, Any] | None = None


class Prefill:
    """`Prefill` runs prompts, one after the other.

    Args:
        chunk_size: most new tokens of a forward; rounded up to where a snapshot may be kept.
        by_length: whether keys and values depend on the length of a forward: then each prompt runs in one.
        looks: whether what is known is looked up first: not where other processes must run equally many forwards.
    """

    def __init__(self, blocks: BlockStore, side: SideRows, *, chunk_size: int, by_length: bool, looks: bool) -> None:
        self._blocks, self._side, self._by_length, self._looks = blocks, side, by_length, looks
        self._chunk_size = -(-chunk_size // blocks.states.align) * blocks.states.align
        self.peak_kv_bytes, self.is_bypassed = 0, False

    def run(self, prompts: Sequence[Prompt]) -> tuple[Prefilled, list[RowStats]]:
        """Compute what is not known of the prompts; return what was done, and what each prompt cost.

        Raises:
            OutOfBlocksError: the prompts do not fit, and nothing was computed.
        """
        if self._looks:
            with self._blocks.lock:
                self._blocks.settle()
                self._require_room(prompts)
        with self._blocks.lock:
            num_found = [self._look_up(prompt)[0] for prompt in prompts]  # known tokens before any prompt runs
        ran = [self._run(prompt) for prompt in prompts]
        rows = [_count(did, number) for did, number in zip(ran, num_found, strict=True)]
        return Prefilled(*map(sum, zip((0, 0, 0), *ran, strict=True))), rows

    def _run(self, prompt: Prompt) -> Prefilled:
        num_tokens = len(prompt.token_ids)
        end = num_tokens // self._blocks.block_size * self._blocks.block_size
        known, is_all = 0, not end
        if self._looks:
            with self._blocks.lock:
                known, is_all = self._look_up(prompt)
        if is_all:
            return Prefilled(end, end, 0)
        stops = [num_tokens]
        if prompt.inputs is not None:
            _, rows = self._side.generate(prompt.inputs)
        else:
            rows = self._side.begin("prefill")
            if not self._by_length:
                num_needed = 1 if rows.states is None else rows.states.num_needed(num_tokens, is_padding=False)
                stops = self._stops(known, num_tokens, num_needed)
            self._side.run(rows, [RowInput(prompt.token_ids, 0, 0)], stops)
            self._side.close(rows)
        (count,) = rows.state.counts
        num_computed = count.computed_tokens + stops[-1] - stops[0]
        self.peak_kv_bytes = max(self.peak_kv_bytes, rows.state.peak_kv_bytes)
        self.is_bypassed = self.is_bypassed or rows.why_bypassed is not None
        with self._blocks.lock, self._blocks.new_table(prompt.root, prompt.salt) as table:
            num_kept = table.match_prefix(prompt.token_ids[:end]).num_matched_tokens
        return Prefilled(num_kept, max(0, stops[-1] - num_computed), num_computed)

    def _stops(self, known: int, num_tokens: int, num_needed: int) -> list[int]:
        """Return after how many tokens forwards end, if the first begins after `known` tokens.

        The last one ends with the last full block. Where layers carry states, a forward ends at the last place for a
        snapshot, and at the last place from which the same prompt can resume.
        """
        states, end = self._blocks.states, num_tokens // self._blocks.block_size * self._blocks.block_size
        stops = {end, *range(known + self._chunk_size, end, self._chunk_size)}
        if states:
            stops |= {at // states.align * states.align for at in (num_tokens - num_needed, end)}
        return sorted(at for at in stops if at > known)

    def _look_up(self, prompt: Prompt) -> tuple[int, bool]:
        """Return after how many tokens a prompt could resume, and whether nothing is left to compute.

        In this case its blocks count as used now. The store's lock is held.
        """
        blocks = self._blocks
        end = len(prompt.token_ids) // blocks.block_size * blocks.block_size
        tokens = prompt.token_ids[:end]
        with blocks.new_table(prompt.root, prompt.salt) as table:
            hit = table.match_prefix(tokens)
            known = resumable(blocks.groups, hit.block_ids, hit.num_tokens)
            is_all = hit.num_tokens == end and known == end // blocks.states.align * blocks.states.align
            if is_all:
                table.hold_prefix(tokens)  # once given back, these blocks are evicted last
            return known, is_all

    def _require_room(self, prompts: Sequence[Prompt]) -> None:
        """Raise OutOfBlocksError if the prompts' blocks cannot be cached at a time."""
        allocator, wanted = self._blocks.allocator, set()
        for prompt in prompts:
            chain = HashChain(prompt.root, allocator.block_size, prompt.token_ids)
            wanted |= {(block_hash, prompt.salt) for block_hash in chain.hashes()}
        found = [allocator.match_prefix((block_hash,), salt) for block_hash, salt in wanted]
        num_taken = sum(not block_ids or not allocator.ref_count(block_ids[0]) for block_ids in found)
        if num_taken > self._blocks.budget.num_obtainable_blocks():  # which number that is, another tenant is not told
            raise OutOfBlocksError(
                f"these prompts have {len(wanted)} blocks of {allocator.block_size} tokens, {num_taken} of which "
                "nobody holds, and so many cannot be had beside what is in use; give fewer tokens, unpin() or reset() "
                "what is no longer needed, or build the cache with a larger num_blocks or max_bytes"
            )


def _count(ran: Prefilled, num_found: int) -> RowStats:
    """Return the count of one prompt, of which `num_found` tokens were known before any prompt ran."""
    _, num_known, num_computed = ran
    stopped = "the rest was computed" if num_computed else "the whole prefix was known"
    num_reused = min(num_found, num_known)
    return RowStats(num_known + num_computed, num_computed, num_reused, num_reused, stopped)
