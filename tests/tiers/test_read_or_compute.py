"""Whether reading pays is said by what both took, and is asked again now and then."""

from __future__ import annotations

from hf_paged_cache.kv.stopwatch import Stopwatch
from hf_paged_cache.tiers.read_or_compute import Rate, Worth


class Took(Stopwatch):
    def __init__(self, seconds: float | None) -> None:
        self.took = seconds

    def seconds(self) -> float | None:
        return self.took


def test_the_first_measurement_counts_whole_and_later_ones_in_part() -> None:
    rate = Rate()
    assert rate.seconds is None
    rate.add(Took(8.0), 4)
    assert rate.seconds == 2.0
    rate.add(Took(12.0), 4)
    assert 2.0 < rate.seconds < 3.0


def test_what_a_device_has_not_done_comes_in_later_and_in_order() -> None:
    rate, late = Rate(), Took(None)
    rate.add(late, 1)
    rate.add(Took(3.0), 1)
    assert rate.seconds is None
    late.took = 1.0
    rate.settle()
    assert rate.seconds is not None
    assert 1.0 < rate.seconds < 2.0


def test_what_costs_more_is_not_worth_it_but_one_time_in_32() -> None:
    worth = Worth(Rate())
    worth.read.seconds, worth.compute.seconds = 2.0, 1.0
    assert [worth.is_worth_it() for _ in range(64)].count(True) == 2
    assert not worth.is_cheaper
    worth.compute.seconds = 3.0
    assert worth.is_worth_it()
