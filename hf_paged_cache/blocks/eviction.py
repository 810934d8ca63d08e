"""Counts when blocks are used again, by kind and age, and derives which block is evicted.

Owns these counts. Knows no block, and evicts none: `BlockStates` asks it.

A block's *kind* is how often the block was used, up to 10 times; the last block of a sequence that was used once is a
kind of its own. A block's *age* is the number of blocks that were given back since the block was. For each kind is
counted how many of its blocks were used again at which age. Evicted blocks that are remembered are counted, too: so it
is known whether keeping them would have been worth it.

The *density* of a kind at an age is the most hits, for each block and unit of time, that were gained by keeping such
blocks until some later age (hit density, Beckmann et al., NSDI 2018; the best such end is Gittins' index). The density
never rises with age, and a kind that was used more often never has a lower density than one that was used less often:
so no block goes before those that continue it. Kinds that do not surely differ are counted as one, and wait in one
line: telling kinds apart by chance costs hits.
"""

from __future__ import annotations

from itertools import accumulate
from operator import add
from typing import NamedTuple

END, ONCE = 1, 2  # kinds of blocks used once: the last of a sequence; all others
# kind -> kind after one more use; kinds are ordered by how much they are worth keeping
NEXT = (0, 3, 3, 4, 5, 6, 7, 8, 9, 10, 11, 11)
NUM_LINES = len(NEXT)  # lines of the queue: line 0 has free blocks, others have the number of their first kind
INTERVAL = 8192  # least number of blocks that are given back between two computations of the densities

# number of classes of age, up to 32 times the pool's size: two, each an eighth of that size wide or a bit more, then
# two for each doubling
_NUM_AGES = 15
_WIDTHS = [1, 1, *(1 << n // 2 - 1 for n in range(2, _NUM_AGES))]
_FROM = [0, *accumulate(_WIDTHS)]  # class -> least age in it; below: age -> class; ages in units of 2 ** shift
_CLASSES = bytes(age_class for age_class, width in enumerate([*_WIDTHS, 1]) for _ in range(width))
_FORGETTING = 4  # counts lose 2 ** -4 of their value each time that densities are computed
_ONE = 1 << _FORGETTING  # count of one block
# Kinds wait in one line if the share of one's blocks that were used again is at least this part of the other's ...
_TOLD_APART = 0.8
_SURE = 48 * _ONE  # ... or their difference is within 2.4 standard errors (squared, and hits come in runs of 8)
_PRIOR = 32 * _ONE  # blocks added to each line that count as never used again
_ONE_LINE = bytes([END]) * 256  # kind -> line, where all kinds wait in one


class Reuse:
    """`Reuse` counts how many blocks of each kind were used again at which age, and derives the densities.

    Args:
        num_blocks: number of blocks in the pool.

    Attributes:
        densities: kind -> class of age -> density, in hits for each block while `2 ** shift` blocks are given back; 0
            before `compute`.
        shift: number of low bits of an age that its class does not depend on.
        next_time: time at which densities are to be computed again.

    Examples:
        >>> reuse = Reuse(num_blocks=100)
        >>> reuse.given_back(ONCE, 500)
        >>> reuse.given_back(3, 500)
        >>> reuse.used_again(3, age=40, num_blocks=400)
        >>> reuse.compute(1000)
        >>> reuse.density(3, age=20) > reuse.density(ONCE, age=20)
        True
    """

    __slots__ = ("_again", "_interval", "_num", "densities", "learns", "lines", "next_time", "shift")

    def __init__(self, num_blocks: int, learns: bool = True) -> None:
        self.learns = learns
        self.lines = _ONE_LINE
        self.shift = max(0, num_blocks.bit_length() - 3)
        self._interval = max(INTERVAL, num_blocks // 2)
        self.next_time = 0
        self._num = [0] * NUM_LINES  # kind -> count of blocks that were given back
        self._again = [[0] * (_NUM_AGES + 1) for _ in range(NUM_LINES)]  # kind -> class of age -> count used again
        self.densities = [[0.0] * (_NUM_AGES + 1) for _ in range(NUM_LINES)]  # the last class has no end: 0

    def class_of(self, age: int) -> int:
        """Return the class of an age."""
        return _CLASSES[min(age >> self.shift, len(_CLASSES) - 1)]

    def latest_of(self, time: int, now: int) -> int:
        """Return the latest time of a last use whose age is now in the same class as that of a last use at `time`."""
        return now - (_FROM[self.class_of(now - time)] << self.shift)

    def density(self, kind: int, age: int) -> float:
        """Return the density of a block of this kind and age."""
        return self.densities[kind][self.class_of(age)]

    def given_back(self, kind: int, num_blocks: int) -> None:
        """Count blocks of one kind that are cached from now on."""
        self._num[kind] += num_blocks * _ONE

    def used_again(self, kind: int, age: int, num_blocks: int = 1) -> None:
        """Count blocks of one kind and age that were used again, or would have been if they had been kept."""
        self._again[kind][_CLASSES[min(age >> self.shift, len(_CLASSES) - 1)]] += num_blocks * _ONE

    def compute(self, time: int) -> None:
        """Compute the densities from what has been counted until now.  Cost: O(kinds * classes of age ** 2)."""
        self.next_time = time + self._interval
        if not self.learns:
            return
        lines: list[_Line] = []
        for kind in range(END, NUM_LINES):
            line = _Line(kind, self._num[kind], self._again[kind])
            while lines and not _more_often(line, lines[-1]):
                below = lines.pop()
                line = _Line(below.first, below.num + line.num, [*map(add, below.again, line.again)])
            lines.append(line)
            self._num[kind] -= self._num[kind] >> _FORGETTING
            self._again[kind] = [number - (number >> _FORGETTING) for number in self._again[kind]]
        less, line_of = [0.0] * (_NUM_AGES + 1), bytearray(_ONE_LINE)
        for first, num, again in lines:
            less = [*map(max, less, _densities(num, again))]
            self.densities[first:] = [less] * (NUM_LINES - first)
            line_of[first:] = bytes([first]) * (len(line_of) - first)
        self.lines = bytes(line_of)


class _Line(NamedTuple):
    """`_Line` is a run of kinds that wait in one line, with what was counted of them."""

    first: int
    num: int
    again: list[int]


def _more_often(line: _Line, other: _Line) -> bool:
    """Return whether, up to some age, clearly more of `line` than of `other` was used again, and not by chance."""
    num, of_num = max(line.num, sum(line.again)), max(other.num, sum(other.again))
    if not num or not of_num:
        return False
    variance = _SURE * (1 / num + 1 / of_num)
    for hits, of_hits in zip(accumulate(line.again), accumulate(other.again), strict=True):
        difference, both = hits / num - of_hits / of_num, (hits + of_hits) / (num + of_num)
        if of_hits / of_num < _TOLD_APART * hits / num and difference**2 > variance * both * (1 - both):
            return True
    return False


def _densities(num: int, again: list[int]) -> list[float]:
    """Return class of age -> the most hits for the time kept, over all later ages at which keeping may end.

    Each density is a slope of the upper hull of the points (time, hits); the hull is built from its end.
    """
    found = [0.0] * (_NUM_AGES + 1)
    stop = max((age_class for age_class, number in enumerate(again[:_NUM_AGES], 1) if number), default=0)
    left = max(num, sum(again)) + _PRIOR  # blocks that reached this age without being used again
    time = hits = 0.0
    points = [(time, hits)]
    for number, width in zip(again[:stop], _WIDTHS, strict=False):
        hits += number
        time += (left - number / 2) * width
        left -= number
        points.append((time, hits))
    hull = [(*points[stop], -1.0)]  # from its end: time, hits, slope to the next point
    for age_class in range(stop - 1, -1, -1):
        time, hits = points[age_class]
        while True:
            later, more, least = hull[-1]
            slope = (more - hits) / (later - time)
            if slope > least:
                break
            hull.pop()
        hull.append((time, hits, slope))
        found[age_class] = max(slope, found[age_class + 1])
    return found
