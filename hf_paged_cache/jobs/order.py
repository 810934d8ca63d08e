"""Decides in which order prompts run, on which worker and in which batches.

It looks at token ids alone, and lets each shared prefix be computed once. Sorted prompts that share a prefix stand side
by side, and how much each has in common with the prompt before is their prefix tree. The order is the tree's, a branch
at a time: a prefix is used from its first prompt to its last without another one in between, so even a pool that holds
few prefixes has it. Of prompts side by side the longest come first: rows of a batch are padded to the longest, and what
takes most memory is known at the beginning.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import NamedTuple

_TOKEN_BYTES = 4
_BATCH_COST = 64  # cost of a forward, in tokens
NUM_UNSHARED = 8  # number of prompts that may be in memory together even if they share nothing


@dataclass(eq=False)
class Branch:
    """`Branch` is a prefix in the tree, with the prompts that share it and the longer prefixes that begin with it.

    Attributes:
        num_tokens: tokens of the prefix.
        prompts: numbers of the prompts that share no longer prefix.
        branches: branches of the longer prefixes.
        num_prompts: number of prompts here and in all branches.
    """

    num_tokens: int
    prompts: list[int] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    num_prompts: int = 0

    def walk(self) -> Iterator[Branch]:
        """Yield this branch and all within it, a branch before those within it."""
        waiting = [self]
        while waiting:
            branch = waiting.pop()
            yield branch
            waiting.extend(reversed(branch.branches))


def build_prefix_tree(prompts: Sequence[Sequence[int]], *, block_size: int = 16, least_saving: int = 64) -> Branch:
    """Build the tree of the prompts' token ids, in whole blocks; its root is the empty prefix.

    Cost: sorts the prompts as bytes.

    Args:
        least_saving: least tokens that a branch saves, compared with running its prompts after its parent's prefix.

    Examples:
        >>> tree = build_prefix_tree([[1, 2, 3, 4], [9], [1, 2, 3, 5], [1, 2, 7]], block_size=1, least_saving=1)
        >>> tree.prompts, [(each.num_tokens, each.prompts, len(each.branches)) for each in tree.branches]
        ([1], [(2, [3], 1)])
    """
    keys = [_sortable(tokens) for tokens in prompts]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    path = [Branch(0)]  # branches from the root to the one that the last prompt is in
    for number, after in zip_longest(order, order[1:]):
        common = 0 if after is None else _num_common(keys[number], keys[after]) // block_size * block_size
        if common > path[-1].num_tokens:
            path.append(Branch(common))
        path[-1].prompts.append(number)
        path[-1].num_prompts += 1
        while (
            path[-1].num_tokens > common
        ):  # leave branches; the last one goes into its parent, or into a new branch of `common` tokens
            done = path.pop()
            if path[-1].num_tokens < common:
                path.append(Branch(common))
            path[-1].branches.append(done)
            path[-1].num_prompts += done.num_prompts
    for branch in path[0].walk():  # branches that save too little give their prompts and branches to their parent
        candidates, branch.branches = branch.branches[::-1], []
        while candidates:
            each = candidates.pop()
            if (each.num_prompts - 1) * (each.num_tokens - branch.num_tokens) >= least_saving:
                branch.branches.append(each)
            else:
                branch.prompts += each.prompts
                candidates.extend(reversed(each.branches))
    return path[0]


def num_shared_tokens(prompts: Sequence[Sequence[int]], *, block_size: int = 16) -> int:
    """Return the number of tokens that another of these prompts begins with, too, in whole blocks.

    A cache with room for all prompts reuses as many.

    Examples:
        >>> num_shared_tokens([[1, 2, 3, 4], [9], [1, 2, 3, 5], [1, 2, 7]], block_size=1)
        5
    """
    keys = sorted(map(_sortable, prompts))
    return sum(_num_common(*pair) // block_size * block_size for pair in pairwise(keys))


def _sortable(tokens: Sequence[int]) -> bytes:
    """Return bytes that sort as the token ids do."""
    ids = array("I", tokens)
    if sys.byteorder == "little":
        ids.byteswap()
    return ids.tobytes()


def _num_common(one: bytes, other: bytes) -> int:
    """Return how many leading tokens both have.

    They are found by bisection: slices of bytes compare faster than a loop over them.
    """
    low, high = 0, min(len(one), len(other)) // _TOKEN_BYTES + 1
    while high - low > 1:
        middle = (low + high) // 2
        if one[low * _TOKEN_BYTES : middle * _TOKEN_BYTES] == other[low * _TOKEN_BYTES : middle * _TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low


class OrderedPrompt(NamedTuple):
    """`OrderedPrompt` is a prompt in its place of the order."""

    prompt: int  # number of the prompt
    num_tokens: int
    remainder: int  # tokens after the prefix of its branch
    num_computed: int  # tokens after the longest prefix that a prompt before it has, too


def ordered(tree: Branch, lengths: Sequence[int]) -> Iterator[OrderedPrompt]:
    """Yield all prompts of a tree in the order in which they run.

    Args:
        lengths: tokens of each prompt, by its number.

    Examples:
        >>> prompts = [[7, 7], [1, 2, 3, 4], [9], [1, 2, 3, 5, 6]]
        >>> tree = build_prefix_tree(prompts, block_size=1, least_saving=1)
        >>> [each.prompt for each in ordered(tree, [*map(len, prompts)])]
        [3, 1, 0, 2]
    """
    longest: dict[int, int] = {}  # id of a branch -> tokens of its longest prompt
    for branch in reversed([*tree.walk()]):
        own = [lengths[prompt] for prompt in branch.prompts]
        longest[id(branch)] = max(own + [longest[id(each)] for each in branch.branches], default=0)
    waiting = [(tree, 0)]  # branches, each with the tokens of its prefix that are computed before its first prompt
    while waiting:
        branch, num_known = waiting.pop()
        if branch.branches:  # the branch's own prompts come after its branches
            *others, first = sorted(branch.branches, key=lambda each: longest[id(each)])
            waiting.append((Branch(branch.num_tokens, branch.prompts), branch.num_tokens))
            waiting += [*((each, branch.num_tokens) for each in others), (first, num_known)]
            continue
        for prompt in sorted(branch.prompts, key=lambda number: (-lengths[number], number)):
            num_tokens = lengths[prompt]
            yield OrderedPrompt(prompt, num_tokens, num_tokens - branch.num_tokens, num_tokens - num_known)
            num_known = branch.num_tokens


def partition(order: Sequence[OrderedPrompt], num_workers: int, num_new_tokens: int = 1) -> list[list[OrderedPrompt]]:
    """Divide the order into one stretch of equal cost for each worker; a new token costs as much as one of a prompt.

    Each cut parts at most one path of prefixes, which two workers then compute. A prefix that most prompts have is
    spread over as many workers as its prompts take.
    """
    total, done = sum(each.num_computed + num_new_tokens for each in order), 0
    workers: list[list[OrderedPrompt]] = [[] for _ in range(num_workers)]
    for each in order:
        cost = each.num_computed + num_new_tokens
        workers[min(num_workers - 1, int((done + cost / 2) * num_workers / max(1, total)))].append(each)
        done += cost
    return workers


class Limits(NamedTuple):
    """`Limits` says where a batch is cut.

    The most tokens in memory do not count for a batch of one prompt.
    """

    num_prompts: int  # most prompts
    num_tokens: float = math.inf  # most tokens in memory; what prompts share counts once
    num_sequences: int = 1  # sequences of each prompt: beams, or samples


def limits_that_pay(lengths: Sequence[int], num_new_tokens: int, num_sequences: int = 1, *, read_once: bool) -> Limits:
    """Return limits of batches that pay: a forward's own cost is small beside that of its rows.

    A batch takes at most the memory of `NUM_UNSHARED` prompts that share nothing.

    Args:
        read_once: True if keys and values that rows share are in memory, and read, once. Then another row takes only
            what it does not share.

    Examples:
        >>> limits_that_pay([1040] * 100, 16, read_once=True)
        Limits(num_prompts=64, num_tokens=8448, num_sequences=1)
        >>> limits_that_pay([1040] * 100, 16, read_once=False).num_prompts
        8
    """
    most = max(NUM_UNSHARED, _BATCH_COST // num_sequences) if read_once else NUM_UNSHARED
    longest = max(lengths, default=0) + num_sequences * num_new_tokens
    return Limits(most, NUM_UNSHARED * longest, num_sequences)


def batches(
    order: Sequence[OrderedPrompt], limits: Limits, num_new_tokens: int = 1, least_padded: int = 0
) -> list[list[int]]:
    """Return the numbers of the prompts of each batch: runs of the order, so cut that the least is computed.

    A batch computes the longest remainder of its rows in every row, and costs `_BATCH_COST` tokens a step besides.
    Cost: `limits.num_prompts` steps a prompt.

    Args:
        least_padded: prompts of fewer tokens share a batch with prompts of their own length alone.

    Examples:
        >>> order = [OrderedPrompt(n, length, length, length) for n, length in enumerate([500, 490, 10, 9, 9])]
        >>> batches(order, Limits(5)), batches(order, Limits(5), num_new_tokens=100)
        ([[0, 1], [2, 3, 4]], [[0, 1, 2, 3, 4]])
    """
    fixed, num_new = _BATCH_COST * num_new_tokens, limits.num_sequences * num_new_tokens
    costs, starts = [0], [0]  # for the first n prompts: the least cost, and where the last batch begins
    for stop in range(1, len(order) + 1):
        best, best_start, longest = -1, stop - 1, 0
        most = least = order[stop - 1].num_tokens
        num_behind = 0  # tokens in memory of the prompts after the first one
        for start in range(stop - 1, max(-1, stop - 1 - limits.num_prompts), -1):
            most, least = max(most, order[start].num_tokens), min(least, order[start].num_tokens)
            if least < min(most, least_padded):
                break
            num_held = order[start].num_tokens + num_new + num_behind
            num_behind += order[start].num_computed + num_new
            longest = max(longest, order[start].remainder)
            if start < stop - 1 and num_held > limits.num_tokens:
                continue
            cost = costs[start] + fixed + longest * (stop - start)
            if best < 0 or cost < best or (cost == best and stop - start == limits.num_prompts):
                best, best_start = cost, start
        costs.append(best)
        starts.append(best_start)
    cut, stop = [], len(order)
    while stop:
        cut.append([each.prompt for each in order[starts[stop] : stop]])
        stop = starts[stop]
    return cut[::-1]
