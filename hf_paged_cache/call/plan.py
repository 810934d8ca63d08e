"""What of a forward is computed where. Pure: rows in, plan out; no table, no tensor, no state.

Two questions, in this order: which rows are equal and run once (`group_equal`), and at which column the forward starts
(`first_column`). What rows that differ have in common belongs between the two: a forward of its own over the columns
they share, after which they are known to all of them.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Groups(NamedTuple):
    """Rows put together by equality; group numbers follow the order of first members, so `members[g] >= g`."""

    members: list[int]  # group -> its first row
    group_of: list[int]  # row -> its group


class KnownRow(NamedTuple):
    """What the plan must know of a row."""

    pad: int  # columns of left padding
    num_known: int  # leading tokens whose keys and values are in the pool


def group_equal(keys: Sequence[Hashable]) -> Groups:
    """Group rows with equal keys.

    Example:
        >>> group_equal(["a", "b", "a"])
        Groups(members=[0, 1], group_of=[0, 1, 0])
    """
    numbers: dict[Hashable, int] = {}
    members: list[int] = []
    group_of: list[int] = []
    for row, key in enumerate(keys):
        number = numbers.setdefault(key, len(members))
        if number == len(members):
            members.append(row)
        group_of.append(number)
    return Groups(members, group_of)


def first_column(rows: Sequence[KnownRow], *, start: int, stop: int, num_needed: int) -> int:
    """The column at which one forward over all rows must start: all start at one, the least known of them.

    Args:
        start: columns below it are known in every row; never fewer.
        stop: one behind the last column.
        num_needed: so many of the last columns are computed whatever is known.
    Example:
        >>> first_column(
        ...     [KnownRow(pad=0, num_known=48), KnownRow(pad=10, num_known=32)], start=0, stop=60, num_needed=1
        ... )
        42
    """
    least = min(row.pad + row.num_known for row in rows)
    return max(start, min(least, stop - num_needed))
