"""In which order prompts run, and in which batches, so that each shared prefix is computed once and is there when it is needed.

The order is that of the prefix tree, a branch at a time: a prefix is used from its first prompt to its last without another in
between, so even a pool that holds few prefixes has it. Within a branch, and of branches side by side, the longest come first:
rows of a batch are padded to the longest, and what takes most memory is known at the beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .prefix_tree import Branch

BATCH_COST = 64  # of a forward, in tokens


class OrderedPrompt(NamedTuple):
    """A prompt in its place of the order.

    Attributes:
        prompt: its number.
        num_tokens: of the prompt.
        remainder: of these, those behind the prefix of its branch.
    """

    prompt: int
    num_tokens: int
    remainder: int


def ordered(tree: Branch, lengths: Sequence[int]) -> Iterator[OrderedPrompt]:
    """All prompts of a tree in the order in which they run; `lengths` are tokens, by number.

    Examples:
        >>> from hf_paged_cache.batch.prefix_tree import build_prefix_tree
        >>> prompts = [[7, 7], [1, 2, 3, 4], [9], [1, 2, 3, 5, 6]]
        >>> [
        ...     each.prompt
        ...     for each in ordered(build_prefix_tree(prompts, block_size=1, least_saving=1), [*map(len, prompts)])
        ... ]
        [3, 1, 0, 2]
    """
    longest = _longest(tree, lengths)
    waiting = [tree]
    while waiting:
        branch = waiting.pop()
        if branch.branches:  # its own prompts come behind them
            waiting.append(Branch(branch.num_tokens, branch.prompts, [], len(branch.prompts)))
            waiting.extend(sorted(branch.branches, key=lambda each: longest[id(each)]))
        else:
            for prompt in sorted(branch.prompts, key=lambda number: (-lengths[number], number)):
                yield OrderedPrompt(prompt, lengths[prompt], lengths[prompt] - branch.num_tokens)


def _longest(tree: Branch, lengths: Sequence[int]) -> dict[int, int]:
    """Id of a branch -> tokens of its longest prompt."""
    longest: dict[int, int] = {}
    for branch in reversed([*tree.walk()]):
        own = (lengths[prompt] for prompt in branch.prompts)
        longest[id(branch)] = max([*own, *(longest[id(each)] for each in branch.branches)], default=0)
    return longest


def batches(
    order: Sequence[OrderedPrompt], batch_size: int, num_new_tokens: int = 1, least_padded: int = 0
) -> list[list[int]]:
    """Numbers of the prompts of each batch: runs of the order, so cut that the least is computed.

    A batch computes the longest remainder of its rows in every row, and costs `BATCH_COST` tokens a step besides; of all ways to
    cut, one that costs the least is taken. Cost: `batch_size` steps a prompt.

    Args:
        least_padded: prompts of fewer tokens are not padded: the rows of their batch are as long as they are.

    Examples:
        >>> order = [
        ...     OrderedPrompt(0, 500, 500),
        ...     OrderedPrompt(1, 490, 490),
        ...     OrderedPrompt(2, 10, 10),
        ...     OrderedPrompt(3, 9, 9),
        ...     OrderedPrompt(4, 9, 9),
        ... ]
        >>> batches(order, batch_size=5), batches(order, batch_size=5, num_new_tokens=100)
        ([[0, 1], [2, 3, 4]], [[0, 1, 2, 3, 4]])
        >>> batches(order, batch_size=5, least_padded=10)
        [[0, 1], [2], [3, 4]]
    """
    fixed = BATCH_COST * num_new_tokens
    costs, starts = [0], [0]  # of the first n prompts: the least cost, and where the last batch begins
    for stop in range(1, len(order) + 1):
        best, best_start, longest = -1, stop - 1, 0
        most = least = order[stop - 1].num_tokens
        for start in range(stop - 1, max(-1, stop - 1 - batch_size), -1):
            most, least = max(most, order[start].num_tokens), min(least, order[start].num_tokens)
            if least < min(most, least_padded):
                break
            longest = max(longest, order[start].remainder)
            cost = costs[start] + fixed + longest * (stop - start)
            if best < 0 or cost < best or (cost == best and stop - start == batch_size):
                best, best_start = cost, start
        costs.append(best)
        starts.append(best_start)
    cut, stop = [], len(order)
    while stop:
        cut.append([each.prompt for each in order[starts[stop] : stop]])
        stop = starts[stop]
    return cut[::-1]
