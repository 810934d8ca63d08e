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
    longest = min(len(left), len(right)) * TOKEN_BYTES
    a = memoryview(left).cast("B")[:longest]
    b = memoryview(right).cast("B")[:longest]
    known, step = 0, 64 * TOKEN_BYTES  # the first `known` bytes are equal
    while known < longest and a[known : known + step] == b[known : known + step]:
        known = min(known + step, longest)
        step *= 2
    end = min(known + step, longest)  # the first difference, if any, lies in [known, end)
    while end - known > TOKEN_BYTES:
        middle = (known + end) // (2 * TOKEN_BYTES) * TOKEN_BYTES
        if a[known:middle] == b[known:middle]:
            known = middle
        else:
            end = middle
    return known // TOKEN_BYTES
