"""Counts calls and their prompt tokens: of one cache, or of all caches of a store, collected caches included."""

import re
from collections import Counter
from collections.abc import Sequence

from ..stats import RowStats

_MOST_REASONS = 64  # most reasons that are counted; there are about twenty
_NUMBER = re.compile(r"\d+")


class CallTotals:
    """`CallTotals` counts calls, their prompt tokens, and why tokens were computed.

    Attributes:
        num_calls: number of calls that computed something.
        num_bypassed_calls: number of calls of which a part ran without the store.
        num_tokens, num_reused, num_shared: numbers of prompt tokens; of those that were known; of those that ran once
            for several rows, in all rows but the first.
    """

    def __init__(self) -> None:
        self.num_tokens = self.num_reused = self.num_shared = 0
        self.num_calls = 0
        self.num_bypassed_calls = 0
        # reason, with {} in place of its numbers -> tokens computed, and the least and most values of its numbers
        self._because: dict[str, tuple[int, list[int], list[int]]] = {}

    def record(self, rows: Sequence[RowStats], reasons: Sequence[str], *, num_calls: int) -> None:
        """Count a forward of prompts, and why each row matched no further; it begins `num_calls` calls: 0 or 1."""
        self.num_calls += num_calls
        for row, stopped in zip(rows, reasons, strict=True):
            self.num_tokens += row.prompt_tokens
            self.num_reused += row.reused_tokens
            self.num_shared += row.prompt_tokens - row.computed_tokens - row.reused_tokens
            if not row.computed_tokens:
                continue
            said = stopped.partition(";")[0]
            numbers = [int(number) for number in _NUMBER.findall(said)]
            why = _NUMBER.sub("{}", said.replace("{", "{{").replace("}", "}}"))
            if why in self._because or len(self._because) < _MOST_REASONS:
                before, least, most = self._because.get(why, (0, numbers, numbers))
                at_once = before + row.computed_tokens, [*map(min, least, numbers)], [*map(max, most, numbers)]
                self._because[why] = at_once  # an interrupt comes before all of it or after

    @property
    def computed_because(self) -> Counter[str]:
        """Number of computed tokens, by the reason why their rows matched no further.

        A number in a reason is given as a range if it was not always the same.
        """
        told: Counter[str] = Counter()
        for why, (num_computed, *ranges) in self._because.items():
            of_numbers = zip(*ranges, strict=True)
            told[why.format(*(str(a) if a == b else f"{a}-{b}" for a, b in of_numbers))] += num_computed
        return told
