"""A device whose memory ends before the pool does: cached blocks are evicted, and every call gives what it gives with `DynamicCache`."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from hf_paged_cache import PagedPrefixCache, PrefixStore
from hf_paged_cache.blocks import BlockTable
from tests.promise.test_on_an_accelerator import SCENES
from tests.reference import batch, row, run
from tests.scenes import Player

from .counts import PLACES, model_on
from .memory import NUM_DEVICES, limited, memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

pytestmark = pytest.mark.usefixtures("one_thread")


def allocated() -> list[int]:
    gc.collect()
    return [memory(device).allocated for device in range(NUM_DEVICES)]


class MeasuringPlayer(Player):
    """Notes the most bytes that a call with `DynamicCache` takes of each device."""

    peaks = (0,) * NUM_DEVICES

    def refer(self, arguments: dict[str, Any]) -> Any:
        before = allocated()  # without what other tests have left, which may be collected while this runs
        for device in range(NUM_DEVICES):
            memory(device).reset_peak()
        output = super().refer(arguments)
        taken = [memory(device).peak - before[device] for device in range(NUM_DEVICES)]
        self.peaks = tuple(map(max, self.peaks, taken))
        return output


class CrampedPlayer(Player):
    """Plays a scene on stores that are full of another prompt's blocks, as many as there is memory for."""

    def __init__(self, model: PreTrainedModel, references: list[Any]) -> None:
        self.full: list[PrefixStore] = []
        super().__init__(model, references)

    def call(self, **arguments: Any) -> Any:
        if self.store not in self.full:
            fill(self.store)
            self.full.append(self.store)
        return super().call(**arguments)


def fill(store: PrefixStore) -> None:
    """Let the pool grow as far as it may, and every block be cached under tokens that nobody asks for."""
    run(store.model, PagedPrefixCache(store), **batch(row((100, 5))), max_new_tokens=1)
    gc.collect()
    blocks = store.blocks
    with blocks.lock:
        blocks.settle()
        blocks.make_room(blocks.num_free_blocks or 0)
        table = BlockTable(blocks.allocator, b"another prompt's" * 2)
        table.append_tokens(range(blocks.allocator.num_free_blocks * blocks.block_size))
        table.commit_full_blocks(table.num_tokens)
        table.free()
    stats = store.stats()
    assert stats.num_free_blocks == 0
    assert stats.num_cached_blocks == stats.num_blocks - 1


LEAST_BYTES = 150 << 10  # of each device: what the 64 blocks of a first call, and its forward, take


@pytest.mark.parametrize("scene", SCENES[::4], ids=lambda scene: scene.__name__)  # a simulated device is slow
def test_where_memory_ends_blocks_are_evicted_and_a_scene_is_the_same(scene: Callable[[Player], None]) -> None:
    """What is free is twice what one call on a `DynamicCache` takes, so blocks, and a copy of them, get as much as that."""
    model, references = PLACES["bf16 on two devices"](), []
    measured = MeasuringPlayer(model, references)
    scene(measured)
    peaks = [max(peak, LEAST_BYTES) for peak in measured.peaks]
    del measured
    before = allocated()
    with ExitStack() as limits:
        for device in range(NUM_DEVICES):
            limits.enter_context(limited(before[device] + 2 * peaks[device], device))
        player = CrampedPlayer(model, references)
        scene(player)
    assert player.full
    for store in player.full:
        assert store.stats().num_evictions > 0


@pytest.mark.parametrize("num_stores", [1, 2])
def test_the_default_budget_is_of_what_the_device_has(num_stores: int) -> None:
    """And of what other stores leave of it."""
    model = model_on()
    (before, _), num_tokens = allocated(), 40
    free = 1 << 22
    with limited(before + free, "sim"):
        caches = [PagedPrefixCache(model) for _ in range(num_stores)]
        for cache in caches:
            run(model, cache, **batch(row((1, num_tokens))))
        budgets = [cache.stats().num_blocks * cache.store.blocks.pool.all.bytes_per_block for cache in caches]
    assert all(budget > 0 for budget in budgets)
    assert sum(budgets) <= 0.8 * free
