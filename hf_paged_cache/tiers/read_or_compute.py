"""Whether to read a block back costs less than to compute it: what both took so far, each a mean in which the last counts most.

Refuses nothing for good: what is not worth it is tried again now and then, for a disk or a device may be less busy by then.
"""

from collections import deque

from ..kv.stopwatch import Stopwatch

_WEIGHT = 0.3  # of the last measurement
_TRIAL = 32  # of so many times that something is not worth it, one is tried all the same
_MOST_RUNNING = 8  # measurements that are not done; of more, the oldest is given up


class Rate:
    """Seconds for each of something. What is measured on a device comes in when it is done."""

    def __init__(self) -> None:
        self.seconds: float | None = None  # None: not measured yet
        self.rough_seconds: float | None = None  # what is known, however roughly
        self._running: deque[tuple[Stopwatch, float, float, bool]] = deque(maxlen=_MOST_RUNNING)

    def add(self, stopwatch: Stopwatch, number: float, before: float = 0.0, *, is_rough: bool = False) -> None:
        """A stopped measurement of so many, and the seconds that they had taken before it.

        Args:
            is_rough: it took longer than later ones will; it stands only until there is another.
        """
        if number > 0:
            self._running.append((stopwatch, number, before, is_rough))
            self.settle()

    def settle(self) -> None:
        """Take in what is done by now."""
        while self._running:
            stopwatch, number, before, is_rough = self._running[0]
            seconds = stopwatch.seconds()
            if seconds is None:
                return
            self._running.popleft()
            each = (before + seconds) / number
            if not is_rough:
                self.seconds = each if self.seconds is None else self.seconds + _WEIGHT * (each - self.seconds)
            self.rough_seconds = each if self.seconds is None else self.seconds


class Worth:
    """Of one tier.

    Args:
        compute: seconds for each block computed; the same object for all tiers.

    Attributes:
        read: seconds for each block read back.
    """

    def __init__(self, compute: Rate) -> None:
        self.compute = compute
        self.read = Rate()
        self._num_refused = 0

    @property
    def is_cheaper(self) -> bool:
        """Whether reading is, as far as is known; where one of the two was not measured, it is."""
        self.read.settle()
        self.compute.settle()
        read, computed = self.read.seconds, self.compute.seconds
        return read is None or computed is None or read < computed

    def is_worth_it(self) -> bool:
        """`is_cheaper`, and else one time in 32, so that it is measured again."""
        if self.is_cheaper:
            return True
        self._num_refused += 1
        return self._num_refused % _TRIAL == 0
