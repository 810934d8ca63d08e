"""Random operations on the tables of two allocators, and swaps between these, beside two naive models.

What is written into a slot is the whole prefix up to its token, so a block that was found where it was not equal, a copy
that was left out, or a swap that shares what it must not, shows as a wrong prefix in some table's slots.

Run it with `python -m tests.blocks.engine.random_swaps --operations 1000000 --seed 0`; pytest makes 20,000 of them. A failure names
seed, numbers of blocks and operation; the same numbers play it again.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter

import pytest
from tqdm import tqdm

from hf_paged_cache.blocks.engine import AllocStatus, BlockSwapper
from hf_paged_cache.errors import OutOfBlocksError

from ..test_allocator_stateful import BLOCK_SIZE, Driver, NaiveModel, NaiveTable, random_step

NUM_BLOCKS = ((9, 9), (17, 6), (6, 17), (30, 60))  # of device and host
OPERATIONS_EACH = 5_000


def with_tokens(table: NaiveTable) -> list[int]:
    return table.blocks[: -(-len(table.tokens) // BLOCK_SIZE)]


def found_in_place(tables: list[NaiveTable], source: NaiveModel, destination: NaiveModel) -> dict[int, int | None]:
    """Block -> the equal one that the other side has, or None."""
    found: dict[int, int | None] = {}
    for block in (block for table in tables for block in with_tokens(table)):
        key = None if block in source.uncomputed else source.hash.get(block)
        other = None if key is None else destination.find(key)
        found[block] = None if other in destination.uncomputed else other
    return found


def naive_swap(tables: list[NaiveTable], source: NaiveModel, destination: NaiveModel) -> list[tuple[int, int]]:
    """By search: blocks one after the other, found or taken and copied."""
    found, copies = found_in_place(tables, source, destination), []
    placed = {block: other for block, other in found.items() if other is not None}
    destination.hold([*placed.values()])
    for block in found:
        if block not in placed:
            (placed[block],) = destination.take(1)
            copies.append((block, placed[block]))
            destination.content[placed[block]] = list(source.content[block])
            key = None if block in source.uncomputed else source.hash.get(block)
            if key is not None and destination.find(key) is None:
                destination.hash[placed[block]] = key
    for table in tables:
        left, placed_of_table = table.blocks, [placed[block] for block in with_tokens(table)]
        source.tables = [other for other in source.tables if other is not table]
        source.settle(left[::-1])
        table.blocks = placed_of_table
        destination.tables.append(table)
    return copies


class SwapDriver:
    """Two drivers, whose tables change sides."""

    def __init__(self, num_device_blocks: int, num_host_blocks: int) -> None:
        self.sides = [Driver(num_device_blocks), Driver(num_host_blocks)]
        self.swapper = BlockSwapper(*(side.allocator for side in self.sides))
        self.counts: Counter[str] = Counter()

    def swap(self, which: list[int], *, out: bool) -> None:
        here, there = self.sides if out else self.sides[::-1]
        pairs = [here.tables[number] for number in which]
        tables, naive = [table for table, _ in pairs], [each for _, each in pairs]
        swap, ask = (
            (self.swapper.swap_out, self.swapper.can_swap_out)
            if out
            else (self.swapper.swap_in, self.swapper.can_swap_in)
        )
        found = found_in_place(naive, here.model, there.model)
        needed = sum(other is None or other in there.model.cached for other in found.values())
        room = len(there.model.free) + len(there.model.cached)
        before = [side.allocator.snapshot() for side in self.sides]
        full = {block for each in naive for block in each.blocks[: len(each.tokens) // BLOCK_SIZE]}
        assert self.swapper.num_full_blocks_touched(*tables) == sum(found[block] is None for block in full)
        status = ask(*tables)
        assert (status is AllocStatus.OK) == (needed <= room)
        assert (status is AllocStatus.NEVER) == (needed > room and len(found) >= there.model.num_blocks)
        self.counts[status.name] += 1
        if status is not AllocStatus.OK:
            with pytest.raises(OutOfBlocksError):
                swap(*tables)
            assert [side.allocator.snapshot() for side in self.sides] == before
            assert not self.swapper.pending_copies
            return
        copies = swap(*tables)
        assert copies == naive_swap(naive, here.model, there.model)
        pending = self.swapper.pending_copies
        assert [(each.source, each.destination) for each in pending] == copies
        assert all(each.is_to_host == out for each in pending)
        self.swapper.drop_copies(len(pending))
        here.tables = [pair for pair in here.tables if pair not in pairs]
        there.tables += pairs
        self.counts["found"] += len(found) - len(copies)
        self.counts["copied"] += len(copies)
        self.counts["shared"] += sum(len(with_tokens(each)) for each in naive) - len(found)

    def step(self, rng: random.Random) -> None:
        here = rng.randrange(2)
        tables = self.sides[here].tables
        if rng.random() < 0.3 and tables:
            self.swap(rng.sample(range(len(tables)), rng.randint(1, min(3, len(tables)))), out=not here)
        else:
            random_step(self.sides[here], rng)

    def compare(self) -> None:
        self.swapper.check()
        for side in self.sides:
            side.compare()
            assert all(self.swapper.is_on_host(table) == (side is self.sides[1]) for table, _ in side.tables)


def run_operations(num_blocks: tuple[int, int], num_operations: int, seed: str) -> SwapDriver:
    """Make that many, and give every block back at the end.

    Raises:
        AssertionError: allocators and models part, or a block is lost.
    """
    rng, driver = random.Random(seed), SwapDriver(*num_blocks)
    for number in range(num_operations):
        try:
            driver.step(rng)
            driver.compare()
        except BaseException as error:
            error.add_note(f"operation {number} of seed {seed!r}, {num_blocks} blocks")
            raise
    for side in driver.sides:
        while side.tables:
            side.free(0, collected=False)
        while side.awaiting:
            side.end_immutable(0, computed=False)
        while side.rings:
            side.end_ring(0, collected=False)
        assert side.allocator.num_blocks_in_use == 0
    driver.compare()
    return driver


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    start, counts = time.perf_counter(), Counter[str]()
    for number in tqdm(range(0, given.operations, OPERATIONS_EACH), disable=None):
        num_blocks = NUM_BLOCKS[number // OPERATIONS_EACH % len(NUM_BLOCKS)]
        counts += run_operations(
            num_blocks, min(OPERATIONS_EACH, given.operations - number), f"{given.seed} {number}"
        ).counts
    print(f"{given.operations:,} operations agree: {dict(counts)}, {time.perf_counter() - start:.0f} s")  # noqa: T201  # a command prints


if __name__ == "__main__":
    main()
