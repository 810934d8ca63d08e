"""Finds which runs of tokens rows have in common, by their block tables, and where each row's own columns begin.

Integers only. A *segment* is a run of full blocks that some rows have in common. Segments nest: a few-shot prompt of
all rows, then the question of its beams. What follows a row's last segment is its *tail*. Two rows that hold the same
block have the same tokens in the block, and the same before it.

    row 0   pad pad [-------- A --------][---- B ----] tail
    row 1   pad pad [-------- A --------][---- B ----] tail
    row 2           [-------- A --------] tail ...........
                                         ^ first column of the tails
"""

from collections.abc import Sequence
from typing import NamedTuple


class Segment(NamedTuple):
    """`Segment` is a run of tokens that some rows have."""

    rows: tuple[int, ...]  # that have the segment, and follow one another
    start: int  # tokens before the segment in each of these rows
    block_ids: tuple[int, ...]  # of the blocks that hold the segment


class Plan(NamedTuple):
    """`Plan` says what is read once, and from where on each row is read by itself."""

    segments: tuple[Segment, ...]  # those of a row follow one another, from the row's first token on
    pads: tuple[int, ...]  # row -> columns of padding
    ends: tuple[int, ...]  # row -> column at which its segments end, and its tail begins
    first_own: int  # first column of any tail; all tails are read from there on


def find_segments(
    pads: Sequence[int], tables: Sequence[Sequence[int]], start: int, block_size: int, launch_tokens: float
) -> Plan | None:
    """Return the plan that reads least before column `start`; None if none reads less than each row by itself.

    A plan costs the tokens that it reads, and `launch_tokens` for each segment.

    Args:
        pads: row -> columns of left padding.
        tables: row -> ids of its full blocks, from the first token on; equal ids hold equal tokens.

    Examples:
        >>> tables = [7, 3, 4], [7, 3, 5]
        >>> find_segments([0, 0], tables, 11, block_size=4, launch_tokens=2).segments
        (Segment(rows=(0, 1), start=0, block_ids=(7, 3)),)
        >>> find_segments([0, 0], tables, 11, block_size=4, launch_tokens=20) is None
        True
    """
    limits = [min(len(table), max(0, start - pad) // block_size) for pad, table in zip(pads, tables, strict=True)]
    ends, segments, num_rows = [*pads], list[Segment](), len(pads)
    waiting = [([*range(num_rows)], 0, 0)]  # rows, number of common blocks, number of these in segments
    while waiting:
        members, depth, begin = waiting.pop()
        at: dict[int, list[int]] = {}
        for row in members:
            if limits[row] > depth:
                at.setdefault(tables[row][depth], []).append(row)
        for sharing in at.values():
            if len(sharing) < 2 or not follow(sharing):
                continue
            common, done = depth, begin
            for blocks in zip(*(tables[row][depth : limits[row]] for row in sharing), strict=False):
                if len({*blocks}) > 1:
                    break
                common += 1
            if (len(sharing) - 1) * (common - begin) * block_size > launch_tokens:
                segments.append(Segment(tuple(sharing), begin * block_size, tuple(tables[sharing[0]][begin:common])))
                done = common
                for row in sharing:
                    ends[row] = pads[row] + common * block_size
            waiting.append((sharing, common, done))
    cost = sum(len(segment.block_ids) * block_size + launch_tokens for segment in segments)
    if not segments or cost + num_rows * (start - min(ends)) >= num_rows * (start - min(pads)):
        return None
    return Plan(tuple(segments), tuple(pads), tuple(ends), min(ends))


def follow(rows: Sequence[int]) -> bool:
    """Return whether rows, in ascending order, follow one another."""
    return rows[-1] - rows[0] == len(rows) - 1
