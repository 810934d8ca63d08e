"""Owns how token sequences, arrays of int64, are compared. Knows nothing of blocks."""

from array import array
from typing import TypeAlias

import numpy as np

TokenIds: TypeAlias = "array[int]"  # typecode "q"
_FIRST_COMPARED = 1024  # tokens, four times as many each time after that: most sequences differ soon


def common_prefix_length(left: TokenIds, right: TokenIds) -> int:
    """How many leading tokens are equal.

    Examples:
        >>> common_prefix_length(array("q", [7, 8, 9]), array("q", [7, 8, 1, 1]))
        2
    """
    longest = min(len(left), len(right))
    known, step = 0, _FIRST_COMPARED
    while known < longest:
        num = min(step, longest - known)
        differ = np.frombuffer(left, np.int64, num, 8 * known) != np.frombuffer(right, np.int64, num, 8 * known)
        at = int(differ.argmax())
        if differ[at]:
            return known + at
        known, step = known + num, 4 * step
    return longest
