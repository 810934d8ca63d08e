"""Decides in which order prompts run, on which worker and in which batches. It looks at token ids alone.

What a prompt has in common with any other one is its *shared prefix*. Prompts of one shared prefix run side by side,
the longest first, and those of longer prefixes that begin with it right after them. So a prefix is computed once and
used from its first prompt to its last without another one in between: even a pool that holds few prefixes has it. Rows
of a batch are padded to the longest, so prompts of about one length are best side by side.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

_NUM_UNSHARED = 8  # number of prompts that may be in memory together even if they share nothing
_STEP = 16  # tokens, as a block has them by default: fewer are not shared
_BATCH_COST = 64  # cost of a forward, in tokens


class OrderedPrompt(NamedTuple):
    """`OrderedPrompt` is a prompt in its place of the order."""

    prompt: int  # number of the prompt
    num_tokens: int
    remainder: int  # tokens after its shared prefix
    num_computed: int  # tokens after what it has in common with any prompt before it


def ordered(prompts: Sequence[Sequence[int]], step: int = _STEP) -> list[OrderedPrompt]:
    """Return all prompts, given as token ids, in the order in which they run; prefixes are counted in steps of tokens.

    Examples:
        >>> [each.prompt for each in ordered([[7, 7], [1, 2, 3, 4], [9], [1, 2, 3, 5, 6]], step=1)]
        [0, 2, 3, 1]
    """
    keys = [array("i", tokens).tobytes() for tokens in prompts]
    shared = [b""] * len(keys)
    for one, other in pairwise(sorted(range(len(keys)), key=keys.__getitem__)):  # who shares most is a neighbour
        common = _common(keys[one], keys[other], step)
        shared[one] = max(shared[one], common, key=len)
        shared[other] = max(shared[other], common, key=len)
    order, before = [], b""
    for number in sorted(range(len(keys)), key=lambda number: (shared[number], -len(keys[number]))):
        num_known = _num_tokens(_common(shared[number], before, step))
        num_tokens = len(prompts[number])
        order.append(
            OrderedPrompt(number, num_tokens, num_tokens - _num_tokens(shared[number]), num_tokens - num_known)
        )
        before = shared[number]
    return order


def num_shared_tokens(prompts: Iterable[Sequence[int]], *, block_size: int = 16) -> int:
    """Return the number of tokens that another of these prompts begins with, too, in whole blocks."""
    keys = sorted(array("i", tokens).tobytes() for tokens in prompts)
    return sum(_num_tokens(_common(one, other, block_size)) for one, other in pairwise(keys))


def _common(one: bytes, other: bytes, step: int) -> bytes:
    """Return what both begin with, in whole steps of so many tokens."""
    num_bytes = step * array("i").itemsize
    end = 0
    while one[end : end + num_bytes] == other[end : end + num_bytes] and end + num_bytes <= len(one):
        end += num_bytes
    return one[:end]


def _num_tokens(key: bytes) -> int:
    return len(key) // array("i").itemsize


def partition(order: Sequence[OrderedPrompt], num_workers: int, num_new_tokens: int = 1) -> list[list[int]]:
    """Return the prompts of each worker: stretches of the order, each of about the same cost.

    Each cut parts at most one path of prefixes, which two workers then compute.
    """
    total, done = sum(each.num_computed + num_new_tokens for each in order), 0
    workers: list[list[int]] = [[] for _ in range(num_workers)]
    for each in order:
        cost = each.num_computed + num_new_tokens
        workers[min(num_workers - 1, int((done + cost / 2) * num_workers / total))].append(each.prompt)
        done += cost
    return workers


class Limits(NamedTuple):
    """`Limits` says where a batch is cut."""

    num_prompts: int  # most prompts
    num_tokens: float = math.inf  # most tokens in memory, if there are several prompts; what they share counts once
    num_new_tokens: int = 1  # of a sequence
    num_sequences: int = 1  # of each prompt: beams, or samples
    least_padded: int = 0  # prompts of fewer tokens share a batch with prompts of their own length alone

    def that_pay(self, longest_prompt: int, reads_once: bool) -> Limits:
        """Return limits with which a forward's own cost is small beside that of its rows.

        A batch takes at most the memory of 8 prompts that share nothing. Where rows read once what they share, another
        row takes only what it does not share.
        """
        most = max(_NUM_UNSHARED, _BATCH_COST // self.num_sequences) if reads_once else _NUM_UNSHARED
        num_tokens = _NUM_UNSHARED * (longest_prompt + self.num_sequences * self.num_new_tokens)
        return self._replace(num_prompts=most, num_tokens=num_tokens)


def batches(order: Iterable[OrderedPrompt], limits: Limits) -> Iterator[list[int]]:
    """Yield the prompts of each batch; one joins the batch before it where that has room, and costs less than one more.

    Examples:
        >>> order = [OrderedPrompt(n, length, length, length) for n, length in enumerate([500, 490, 10, 9, 9])]
        >>> [*batches(order, Limits(5))], [*batches(order, Limits(5, num_new_tokens=100))]
        ([[0, 1], [2, 3, 4]], [[0, 1, 2, 3, 4]])
    """
    batch: list[OrderedPrompt] = []
    for each in order:
        if batch and not _may_join(each, batch, limits):
            yield [one.prompt for one in batch]
            batch = []
        batch.append(each)
    if batch:
        yield [one.prompt for one in batch]


def _may_join(each: OrderedPrompt, batch: list[OrderedPrompt], limits: Limits) -> bool:
    """Return whether a prompt joins a batch, which computes the longest remainder of its rows in every row."""
    first, *others = rows = [*batch, each]
    lengths = [one.num_tokens for one in rows]
    if len(rows) > limits.num_prompts or min(lengths) < min(max(lengths), limits.least_padded):
        return False
    num_new = len(rows) * limits.num_sequences * limits.num_new_tokens
    if first.num_tokens + sum(one.num_computed for one in others) + num_new > limits.num_tokens:
        return False
    longest = max(one.remainder for one in batch)
    cost_apart = longest * len(batch) + each.remainder + _BATCH_COST * limits.num_new_tokens
    return max(longest, each.remainder) * len(rows) <= cost_apart
