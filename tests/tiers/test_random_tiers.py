"""A short run of `random_tiers`; the long one is a command."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from hf_paged_cache.blocks import root_hash
from hf_paged_cache.tiers.base import BLOCKS

from .random_tiers import SALTS, WORLDS, Driver, World, run_operations

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("world", WORLDS, ids=str)
def test_a_store_with_tiers_agrees_with_a_naive_model(world: World) -> None:
    driver = run_operations(world, 450, "short")
    assert driver.num_hits
    assert driver.num_from, "nothing came up"
    assert driver.num_interrupted


def test_what_is_forgotten_between_its_eviction_and_the_next_write_goes_into_no_tier(tmp_path: Path) -> None:
    driver = Driver(World(host_bytes=2**20), "0", tmp_path)
    store, (tier,) = driver.store, driver.tiers
    with store.lock:
        for salt in SALTS:
            driver.run(root_hash(b"model", salt), salt, array("q", range(8)))
            driver.end()
        table = store.new_table(root_hash(b"model"), b"")
        table.append_tokens(array("q", range(100, 116)))  # all blocks
        store.forget(b"tenant")
        store.make_copies()
        kept = {name: tier.has(BLOCKS, name) for name in driver.known}
    assert len(kept) == 8
    assert kept == {name: not name.namespace for name in kept}
