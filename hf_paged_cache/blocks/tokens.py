"""Owns how token sequences, arrays of int64, are compared: as bytes. Knows nothing of blocks."""

from array import array
from typing import TypeAlias

from .hashing import TOKEN_BYTES

TokenIds: TypeAlias = "array[int]"  # typecode "q"


def common_prefix_length(left: TokenIds, right: TokenIds) -> int:
    """How many leading tokens are equal. Cost: O(n) comparisons of bytes, by doubling and halving.

    Examples:
        >>> common_prefix_length(array("q", [7, 8, 9]), array("q", [7, 8, 1, 1]))
        2
    """
    longest = min(len(left), len(right))
    a = memoryview(left).cast("B")
    b = memoryview(right).cast("B")

    def equal(start: int, stop: int) -> bool:
        return a[start * TOKEN_BYTES : stop * TOKEN_BYTES] == b[start * TOKEN_BYTES : stop * TOKEN_BYTES]

    known, step = 0, 64  # the first `known` tokens are equal
    while known < longest and equal(known, min(known + step, longest)):
        known = min(known + step, longest)
        step *= 2
    end = min(known + step, longest)  # the first difference, if any, lies in [known, end)
    while known < end:
        middle = (known + end + 1) // 2
        if equal(known, middle):
            known = middle
        else:
            end = middle - 1
    return known
