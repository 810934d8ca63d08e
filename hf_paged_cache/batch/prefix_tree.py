"""The prefix tree of many prompts: what they have in common, found by sorting them. Integers only.

Sorted prompts that share a prefix stand side by side, and how much each has in common with the one before is the tree: no
node is kept while it is built but those on the path to the last prompt. A branch that would save next to nothing is none: its
prompts count as its parent's.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest

TOKEN_BYTES = 4


@dataclass(eq=False)
class Branch:
    """A prefix of at least one prompt, and what goes on behind it.

    Attributes:
        num_tokens: of the prefix.
        prompts: numbers of those that share no longer prefix with another one.
        branches: longer prefixes that begin with this one.
        num_prompts: here and in all branches.
    """

    num_tokens: int
    prompts: list[int] = field(default_factory=list)
    branches: list[Branch] = field(default_factory=list)
    num_prompts: int = 0

    def walk(self) -> Iterator[Branch]:
        """This branch and all within it, a branch before those within it."""
        waiting = [self]
        while waiting:
            branch = waiting.pop()
            yield branch
            waiting.extend(reversed(branch.branches))


def build_prefix_tree(prompts: Sequence[Sequence[int]], *, block_size: int = 16, least_saving: int = 64) -> Branch:
    """The tree of the prompts' token ids; its root is the empty prefix.

    Cost: sorts the prompts as bytes; a few comparisons more for each.

    Args:
        block_size: prefixes are shared in multiples of so many tokens.
        least_saving: tokens that a branch saves at least, against running its prompts behind its parent's prefix; about what a
            forward more costs.

    Examples:
        >>> tree = build_prefix_tree([[1, 2, 3, 4], [9], [1, 2, 3, 5], [1, 2, 7]], block_size=1, least_saving=1)
        >>> tree.prompts, [(each.num_tokens, each.prompts, len(each.branches)) for each in tree.branches]
        ([1], [(2, [3], 1)])
        >>> tree.branches[0].branches
        [Branch(num_tokens=3, prompts=[0, 2], branches=[], num_prompts=2)]
    """
    keys = [_sortable(tokens) for tokens in prompts]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    path = [Branch(0)]  # from the root to the branch that the last prompt is in

    def close(limit: int) -> None:
        """Leave the branches of more than `limit` tokens; the last one goes into its parent, or into one of `limit` tokens."""
        while path[-1].num_tokens > limit:
            done = path.pop()
            if path[-1].num_tokens < limit:
                path.append(Branch(limit))
            path[-1].branches.append(done)
            path[-1].num_prompts += done.num_prompts

    for number, after in zip_longest(order, order[1:]):
        common = 0 if after is None else _num_common(keys[number], keys[after]) // block_size * block_size
        if common > path[-1].num_tokens:
            path.append(Branch(common))
        path[-1].prompts.append(number)
        path[-1].num_prompts += 1
        close(common)
    close(0)
    _dissolve(path[0], least_saving)
    return path[0]


def num_shared_tokens(prompts: Sequence[Sequence[int]], *, block_size: int = 16) -> int:
    """Tokens that another prompt of these begins with, too, in whole blocks: as many as a cache with room for all of them reuses.

    Examples:
        >>> num_shared_tokens([[1, 2, 3, 4], [9], [1, 2, 3, 5], [1, 2, 7]], block_size=1)
        5
    """
    keys = sorted(map(_sortable, prompts))
    return sum(_num_common(*pair) // block_size * block_size for pair in pairwise(keys))


def _dissolve(tree: Branch, least_saving: int) -> None:
    """Branches that save too little, against what is left above them, give their prompts and branches to that."""
    for branch in tree.walk():
        candidates, branch.branches = branch.branches[::-1], []
        while candidates:
            each = candidates.pop()
            if (each.num_prompts - 1) * (each.num_tokens - branch.num_tokens) >= least_saving:
                branch.branches.append(each)
            else:
                branch.prompts += each.prompts
                candidates.extend(reversed(each.branches))


def _sortable(tokens: Sequence[int]) -> bytes:
    """Bytes that sort as the token ids do."""
    ids = array("I", tokens)
    if sys.byteorder == "little":
        ids.byteswap()
    return ids.tobytes()


def _num_common(one: bytes, other: bytes) -> int:
    """Leading tokens that both have, by bisection: slices of bytes compare faster than a loop over them."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    if one[: high * TOKEN_BYTES] == other[: high * TOKEN_BYTES]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if one[low * TOKEN_BYTES : middle * TOKEN_BYTES] == other[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low
