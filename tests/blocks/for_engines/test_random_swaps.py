"""`random_operations` on two allocators, and swaps of tables between these, beside two naive models."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from hf_paged_cache.blocks.for_engines import AllocStatus, BlockSwapper
from hf_paged_cache.errors import OutOfBlocksError

from ..random_operations import Driver, Model, Prefixes, Sequence, World, random_step
from ..snapshot import snapshot_of

NUM_BLOCKS = ((9, 9), (17, 6), (6, 17), (30, 60))  # of device and host
SIZE = 2


def with_tokens(table: Sequence) -> list[int]:
    return table.blocks[: -(-len(table.tokens) // SIZE)]


def end_of(block: int, source: Model) -> int | None:
    return None if block in source.uncomputed else source.hash.get(block)


def found_in_place(tables: list[Sequence], source: Model, destination: Model) -> dict[int, int | None]:
    """Block -> the equal one that the other side has, or None."""
    found: dict[int, int | None] = {}
    for block in (block for table in tables for block in with_tokens(table)):
        end = end_of(block, source)
        other = None if end is None else destination.find(end)
        found[block] = None if other in destination.uncomputed else other
    return found


def naive_swap(tables: list[Sequence], source: Model, destination: Model) -> list[tuple[int, int]]:
    """By search: blocks of one table after the other, found, or taken and copied."""
    found, copies = found_in_place(tables, source, destination), []
    placed = {block: other for block, other in found.items() if other is not None}
    destination.hold([*placed.values()])
    for table in tables:
        missing = [block for block in with_tokens(table) if block not in placed]
        for block, taken in zip(missing, destination.take(len(missing), table.namespace), strict=True):
            placed[block] = taken
            copies.append((block, taken))
            destination.content[taken] = list(source.content[block])
            end = end_of(block, source)
            if end is not None and destination.find(end) is None:
                destination.name(taken, end)
    for table in tables:
        left, blocks = table.blocks, [placed[block] for block in with_tokens(table)]
        source.holders = [other for other in source.holders if other is not table]
        source.settle(left[::-1])
        table.blocks = blocks
        destination.holders.append(table)
    return copies


class SwapDriver:
    """Two drivers, whose tables change sides."""

    def __init__(self, num_blocks: tuple[int, int]) -> None:
        prefixes = Prefixes()
        self.sides = [Driver(World(SIZE, number, 10, has_engine=True), prefixes) for number in num_blocks]
        self.swapper = BlockSwapper(*(side.allocator for side in self.sides))
        self.counts: Counter[str] = Counter()

    def swap(self, which: list[int], *, out: bool) -> None:
        here, there = self.sides if out else self.sides[::-1]
        pairs = [here.tables[number] for number in which]
        tables, naive = [table for table, _ in pairs], [each for _, each in pairs]
        swap = self.swapper.swap_out if out else self.swapper.swap_in
        ask = self.swapper.can_swap_out if out else self.swapper.can_swap_in
        found = found_in_place(naive, here.model, there.model)
        needed = sum(other is None or other in there.model.cached for other in found.values())
        room = len(there.model.free) + len(there.model.cached)
        before = [snapshot_of(side.allocator) for side in self.sides]
        full = {block for each in naive for block in each.blocks[: len(each.tokens) // SIZE]}
        assert self.swapper.num_full_blocks_touched(*tables) == sum(found[block] is None for block in full)
        status = ask(*tables)
        assert (status is AllocStatus.OK) == (needed <= room)
        assert (status is AllocStatus.NEVER) == (needed > room and len(found) >= there.model.num_blocks)
        self.counts[status.name] += 1
        if status is not AllocStatus.OK:
            with pytest.raises(OutOfBlocksError):
                swap(*tables)
            assert [snapshot_of(side.allocator) for side in self.sides] == before
            assert not self.swapper.pending_copies
            return
        copies = swap(*tables)
        assert copies == naive_swap(naive, here.model, there.model)
        pending = self.swapper.pending_copies
        assert pending == tuple((*pair, out) for pair in copies)
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
        self.swapper.device.check()
        self.swapper.host.check()
        for side in self.sides:
            side.compare()
            assert all(self.swapper.is_on_host(table) == (side is self.sides[1]) for table, _ in side.tables)


@pytest.mark.parametrize("num_blocks", NUM_BLOCKS)
def test_random_swaps_agree_with_naive_models(num_blocks: tuple[int, int]) -> None:
    rng, driver = random.Random(str(num_blocks)), SwapDriver(num_blocks)
    for number in range(2_500):
        try:
            driver.step(rng)
            driver.compare()
        except BaseException as error:
            error.add_note(f"operation {number}, {num_blocks} blocks")
            raise
    for side in driver.sides:
        side.end_all()
        assert side.allocator.num_blocks_in_use == 0
    driver.compare()
    assert min(driver.counts[what] for what in ("OK", "found", "copied", "shared")) > 10
    assert driver.counts["LATER"] or num_blocks == (30, 60)
