"""Random operations on allocator and tables beside the naive model, with `check()` after each, for as long as one likes.

Run it with `python -m tests.blocks.random_operations --operations 1000000 --seed 0`; pytest makes 100,000 of them. A
failure names seed, number of blocks and operation; the same numbers play it again.
"""

from __future__ import annotations

import argparse
import random
import time

from tqdm import tqdm

from .test_allocator_stateful import Driver, random_step

NUM_BLOCKS = (2, 5, 9, 9, 17, 40)  # of an allocator, one after the other
OPERATIONS_EACH = 10_000


def run_operations(num_blocks: int, num_operations: int, seed: str) -> Driver:
    """Make that many on one allocator, and give every block back at the end.

    Raises:
        AssertionError: allocator and model part, or a block is lost.
    """
    rng, driver = random.Random(seed), Driver(num_blocks)
    for number in range(num_operations):
        try:
            random_step(driver, rng)
            driver.compare()
        except BaseException as error:
            error.add_note(f"operation {number} of seed {seed!r}, {num_blocks} blocks")
            raise
    while driver.tables:
        driver.free(0, collected=False)
    while driver.awaiting:
        driver.end_immutable(0, computed=False)
    while driver.rings:
        driver.end_ring(0, collected=False)
    driver.compare()
    assert driver.allocator.num_blocks_in_use == 0  # scenario 62: nothing leaks
    assert driver.allocator.num_available_blocks == driver.model.num_blocks - 1
    return driver


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    start, evictions, refusals = time.perf_counter(), 0, 0
    for number in tqdm(range(0, given.operations, OPERATIONS_EACH), disable=None):
        num_blocks = NUM_BLOCKS[number // OPERATIONS_EACH % len(NUM_BLOCKS)]
        driver = run_operations(num_blocks, min(OPERATIONS_EACH, given.operations - number), f"{given.seed} {number}")
        evictions += driver.model.evictions
        refusals += driver.num_refused
    seconds = time.perf_counter() - start
    print(  # noqa: T201  # a command prints
        f"{given.operations:,} operations agree with the naive model: {evictions:,} evictions, {refusals:,} refusals, "
        f"{seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
