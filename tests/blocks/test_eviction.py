"""When blocks of a kind were used again, and what the allocator makes of it."""

from __future__ import annotations

import importlib
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hf_paged_cache.blocks import PrefixCachingBlockAllocator
from hf_paged_cache.blocks.eviction import END, NUM_LINES, Reuse
from hf_paged_cache.errors import CacheArgumentError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def replay_blocks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's, where the benchmarks are beside the tests."""
    if not BENCHMARKS.exists():
        pytest.skip("the benchmarks are not beside the tests")
    monkeypatch.syspath_prepend(str(BENCHMARKS))  # as for a script that lies there
    return importlib.import_module("replay").replay_blocks


def test_blocks_of_one_class_of_age_are_those_used_no_later_than_is_said() -> None:
    for num_blocks in (2, 33, 1000, 30_000):
        reuse, now = Reuse(num_blocks), 50 * num_blocks
        for time in range(0, now, max(1, num_blocks // 20)):
            latest = reuse.latest_of(time, now)
            assert time <= latest
            assert reuse.class_of(now - latest) == reuse.class_of(now - time)
            assert latest == now or reuse.class_of(now - latest - 1) < reuse.class_of(now - time)


def test_densities_fall_with_age_and_rise_with_use() -> None:
    rng, reuse = random.Random(0), Reuse(64)
    for time in range(0, 3200, 32):
        for kind in range(END, NUM_LINES):
            reuse.given_back(kind, 40)
            for _ in range(rng.randrange(40)):
                reuse.used_again(kind, rng.randrange(400))
        reuse.compute(time)
        for of_kind in reuse.densities:
            assert of_kind == sorted(of_kind, reverse=True)
        for fewer, more in pairwise(reuse.densities):
            assert all(map(float.__le__, fewer, more))


@pytest.mark.parametrize(
    ("num_blocks", "again", "lines"),
    [
        (1000, (500, 500, 500, 500), (1, 1, 1, 1)),
        (1000, (500, 500, 900, 900), (1, 1, 3, 3)),
        (1000, (900, 500, 900, 500), (1, 1, 1, 1)),  # what is used more often is never the first to go
        (1000, (100, 900, 100, 900), (1, 2, 2, 4)),
        (40, (20, 20, 36, 36), (1, 1, 1, 1)),  # by chance
        (100_000, (50_000, 50_000, 60_000, 60_000), (1, 1, 1, 1)),  # surely, but by little
    ],
)
def test_kinds_wait_in_one_line_unless_they_surely_differ(
    num_blocks: int, again: tuple[int, ...], lines: tuple[int, ...]
) -> None:
    reuse = Reuse(64)
    for kind, number in enumerate(again, END):
        reuse.given_back(kind, num_blocks)
        reuse.used_again(kind, age=40, num_blocks=number)
    reuse.compute(1)
    assert tuple(reuse.lines[END:NUM_LINES]) == lines + lines[-1:] * (NUM_LINES - END - len(lines))
    assert all(reuse.densities[kind] == reuse.densities[reuse.lines[kind]] for kind in range(END, NUM_LINES))


def test_what_a_flood_brings_goes_before_what_is_used_again(replay_blocks: Any) -> None:
    rng, requests = random.Random(0), []
    for number in range(2000):
        requests.append([1_000_000 + 10 * rng.randrange(30) + index for index in range(10)])
        if number % 100 > 60:
            requests.append([100 * number + index for index in range(60)])
    (lru, _), (reuse, _) = (replay_blocks(requests, 400, eviction) for eviction in ("lru", "reuse"))
    assert reuse > 1.1 * lru


def test_kinds_that_do_not_differ_cost_no_hits_by_chance(replay_blocks: Any) -> None:
    """Documents that are asked for twice, mostly before the second use is out of LRU's reach."""
    rng, requests, pending = random.Random(0), [], []
    for number in range(6000):
        if pending and rng.random() < 0.5:
            requests.append(pending.pop(rng.randrange(min(len(pending), 40))))
        else:
            requests.append(range(100 * number, 100 * number + rng.randint(1, 12)))
            pending.append(requests[-1])
    (lru, _), (reuse, _) = (replay_blocks(requests, 1000, eviction) for eviction in ("lru", "reuse"))
    assert reuse >= lru


@pytest.mark.parametrize("size", [100, 101, 130])
def test_a_loop_hits_as_with_lru(size: int, replay_blocks: Any) -> None:
    requests = [[number] for number in range(size)] * 20
    assert replay_blocks(requests, 100, "reuse")[0] >= replay_blocks(requests, 100, "lru")[0]


def test_what_twice_the_pool_would_have_hit_is_told(replay_blocks: Any) -> None:
    rng = random.Random(0)
    requests = [[int(rng.paretovariate(0.5)) % 5000] for _ in range(20_000)]
    (hits, missed), (truth, _) = replay_blocks(requests, 100, "lru"), replay_blocks(requests, 200, "lru")
    assert 0.8 * (truth - hits) <= missed <= 1.1 * (truth - hits)


def test_an_eviction_that_there_is_not_is_refused() -> None:
    with pytest.raises(CacheArgumentError, match=r"^eviction is 'fifo'; give 'reuse' or 'lru'$"):
        PrefixCachingBlockAllocator(4, 16, "fifo")
