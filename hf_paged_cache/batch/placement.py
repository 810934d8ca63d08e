"""Which worker runs which prompts, so that each shared prefix is computed on as few of them as can be, and all have as much to do.

Prompts stand in the order of their prefix tree, where what shares a prefix stands side by side; the order is cut into one
stretch a worker, of equal cost. So each cut parts at most one path of prefixes, which two workers then compute, and a prefix that
most prompts have is spread over as many workers as its prompts take.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .plan import ordered
from .prefix_tree import Branch


def partition(tree: Branch, lengths: Sequence[int], num_workers: int, num_new_tokens: int = 1) -> list[list[int]]:
    """Numbers of the prompts of each worker, in the order in which it runs them. With more workers than prompts some have none.

    Args:
        tree: of all prompts.
        lengths: tokens of each prompt.
        num_new_tokens: expected of each prompt; one costs as much as a token of a prompt.

    Examples:
        >>> from hf_paged_cache.batch.prefix_tree import build_prefix_tree
        >>> prompts = [[1, 2, 3], [7, 8, 9], [1, 2, 4], [7, 8, 6]]
        >>> partition(build_prefix_tree(prompts, block_size=1, least_saving=1), [*map(len, prompts)], num_workers=2)
        [[1, 3], [0, 2]]
    """
    order = [each.prompt for each in ordered(tree, lengths)]
    costs = costs_of(tree, order, lengths, num_new_tokens)
    total, done = sum(costs.values()), 0
    workers: list[list[int]] = [[] for _ in range(num_workers)]
    for prompt in order:
        middle = done + costs[prompt] / 2
        workers[min(num_workers - 1, int(middle * num_workers / max(1, total)))].append(prompt)
        done += costs[prompt]
    return workers


def costs_of(tree: Branch, order: Sequence[int], lengths: Sequence[int], num_new_tokens: int) -> dict[int, int]:
    """Tokens that each prompt computes; the first that runs of a branch computes its prefix."""
    place = {prompt: number for number, prompt in enumerate(order)}
    costs: dict[int, int] = {}
    first: dict[int, int] = {}  # id of a branch -> the place of the first prompt in it that runs
    for branch, num_known in _with_parents(tree):
        for prompt in branch.prompts:
            costs[prompt] = lengths[prompt] - branch.num_tokens + num_new_tokens
        own = (place[prompt] for prompt in branch.prompts)
        first[id(branch)] = min([*own, *(first[id(each)] for each in branch.branches)])
        costs[order[first[id(branch)]]] += branch.num_tokens - num_known
    return costs


def _with_parents(tree: Branch) -> Iterator[tuple[Branch, int]]:
    """Each branch, those within it first, and the tokens of its parent's prefix."""
    found, waiting = [], [(tree, 0)]
    while waiting:
        branch, num_known = waiting.pop()
        found.append((branch, num_known))
        waiting.extend((each, branch.num_tokens) for each in branch.branches)
    return reversed(found)
