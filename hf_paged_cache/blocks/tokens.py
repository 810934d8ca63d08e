"""Compares sequences of tokens, which are arrays of int64. Knows nothing of blocks."""

from array import array
from typing import TypeAlias

TokenIds: TypeAlias = "array[int]"  # typecode "q"
_FIRST_COMPARED = 1024  # tokens compared at first, then four times as many each time: most sequences differ soon


def common_prefix_length(left: TokenIds, right: TokenIds) -> int:
    """Return how many leading tokens are equal.

    Examples:
        >>> common_prefix_length(array("q", [7, 8, 9]), array("q", [7, 8, 1, 1]))
        2
    """
    longest = min(len(left), len(right))
    known, end = 0, min(_FIRST_COMPARED, longest)  # the first `known` tokens are equal
    while known < longest and left[known:end] == right[known:end]:
        known, end = end, min(4 * end, longest)
    # the first difference, if any, lies in [known, end)
    while end - known > 1:
        middle = (known + end) // 2
        if left[known:middle] == right[known:middle]:
            known = middle
        else:
            end = middle
    return known
