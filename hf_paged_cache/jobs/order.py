"""Decides in which order prompts run, on which worker and in which batches, by their token ids alone.

What a prompt has in common with any other one is its *shared prefix*. Prompts of one shared prefix run side by side,
the longest first, and those of longer prefixes that begin with it right after them. So a prefix is computed once and
used from its first prompt to its last without another one in between. Rows of a batch are padded to the longest, so
prompts of about one length are best side by side.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

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
        num_known, num_shared = _num_tokens(_common(shared[number], before, step)), _num_tokens(shared[number])
        length = len(prompts[number])
        order.append(OrderedPrompt(number, length, length - num_shared, length - num_known))
        before = shared[number]
    return order


def _common(one: bytes, other: bytes, step: int) -> bytes:
    """Return what both begin with, in whole steps of so many tokens."""
    num_bytes, end = step * array("i").itemsize, 0
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
    num_tokens: float = math.inf  # most tokens in memory, if there are several prompts
    num_new_tokens: int = 1  # of a sequence
    num_sequences: int = 1  # of each prompt: beams, or samples
    pads: bool = True  # prompts of several lengths share a batch


def batches(order: Iterable[OrderedPrompt], limits: Limits) -> Iterator[list[int]]:
    """Yield the prompts of each batch; one joins the batch before it if that has room and costs less than one more."""
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
    num_rows, lengths = len(batch) + 1, [one.num_tokens for one in (*batch, each)]
    if num_rows > limits.num_prompts or not (limits.pads or lengths[0] == lengths[-1]):
        return False
    num_held = num_rows * limits.num_sequences * (max(lengths) + limits.num_new_tokens)
    longest = max(one.remainder for one in batch)
    cost_apart = longest * len(batch) + each.remainder + _BATCH_COST * limits.num_new_tokens
    return num_held <= limits.num_tokens and max(longest, each.remainder) * num_rows <= cost_apart
