"""One line of the results: a ratio, a share or a number of ours, with what it is compared with and the bar it must
clear.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from harness import Timing

BASELINE, OURS = "DynamicCache", "ours"
RECIPE = "deepcopy"  # a copy.deepcopy of a prefilled DynamicCache
LIMIT = "limit"  # a ready DynamicCache of the prefix, not copied but cropped back afterwards
FLOOR = "floor"  # the best that can be written by hand: what is shared prefilled once, then the call on it
IN_PLACE = "in place"  # a ready cache whose keys and values are appended to in place: no bookkeeping, no copy
BY_HAND = "kept by hand"  # a DynamicCache that the caller keeps from turn to turn
BATCHING = "continuous batching"
PLAIN_READ = "plain read"  # of the same files, into memory
GIVEN_ORDER = "ours, order given"  # batches as the prompts come
ONE_TIER = "ours, no tier"  # the same pool, and what is evicted is gone

Kind = Literal["ratio", "share", "microseconds", "tokens"]
SHARE_OF_FLOOR = 0.95  # what must be reached where the floor says that a bar cannot be had


@dataclass(frozen=True)
class Line:
    """What one comparison gave.

    Attributes:
        what: a sentence for the table's reader.
        value: compared with the bar; of a "ratio" the median of `against` over that of `subject`, in the rounds that
            ran both, or bytes likewise.
        spread: of the same, round by round.
        ways: name -> its seconds (or what `unit` says), for all that ran beside it.
        subject, against: names of the two ways compared; empty where nothing is, or nothing of ours runs.
        floor: the way that no cache can be faster than; where its ratio is below the bar, 95 % of it is the bar.
        hit_rate: share of the prompt tokens that our last call did not compute.
        kv_bytes: name -> peak bytes of keys and values.
        point: where the line stands in a plot, such as {"tokens": 1024}.
        details: further numbers, not in the table.
    """

    what: str
    value: float
    kind: Kind
    spread: Timing
    ways: Mapping[str, Timing]
    subject: str = OURS
    against: str = BASELINE
    unit: str = "s"
    at_least: float | None = None
    at_most: float | None = None
    floor: str | None = None
    hit_rate: float | None = None
    kv_bytes: Mapping[str, int] = field(default_factory=dict)
    point: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def floor_ratio(self) -> float | None:
        """The most that could be reached; None where no floor was measured."""
        if self.floor is None:
            return None
        return self.ways[self.against].median / self.ways[self.floor].median

    @property
    def bar(self) -> float | None:
        """What the value is held against: `at_most`, or `at_least` as far as it can be had."""
        if self.at_least is None or self.floor_ratio is None or self.floor_ratio >= self.at_least:
            return self.at_most if self.at_least is None else self.at_least
        return SHARE_OF_FLOOR * self.floor_ratio

    @property
    def holds(self) -> bool | None:
        """None without a bar."""
        if self.bar is None:
            return None
        return self.value <= self.bar if self.at_least is None else self.value >= self.bar

    def as_json(self) -> dict[str, Any]:
        """The fields, and what follows from them."""
        return {**asdict(self), "floor_ratio": self.floor_ratio, "bar": self.bar, "holds": self.holds}
