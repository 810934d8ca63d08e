"""Ctrl-C at any line of a call that moves blocks down and up: the next calls are right, and everything is accounted for.

Of each call only the lines of tiers, and of what moves blocks, count half of the time: they are few beside all others.
"""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from hf_paged_cache import PagedPrefixCache, prefix_store
from hf_paged_cache.tiers.base import Tier
from hf_paged_cache.tiers.disk import DiskTier
from hf_paged_cache.tiers.host import HostTier

from ..promise.test_interrupted_calls import Interrupter
from ..reference import assert_same, run
from ..tiny_models import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TRIALS = 30
OF_TIERS = ("/tiers/", "lower_tiers.py", "tier_load.py", "content_layout.py", "contents.py")


class OfTiers(Interrupter):
    """Counts lines of tiers alone, and of what moves blocks to and from them."""

    def _enter_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        traced = super()._enter_frame(frame, event, arg)
        return traced if any(part in frame.f_code.co_filename for part in OF_TIERS) else None


@pytest.fixture(autouse=True)
def _nothing_is_mended_by_the_collector() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="PagedPrefixCache: this prompt")
        gc.collect()
        gc.disable()
        yield
        gc.enable()


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
def test_a_call_interrupted_anywhere_leaves_pool_and_tiers_right(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rng = tiny(kind), random.Random(kind)
    made = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, 120, (1, 40), generator=made) for _ in range(5)]
    references = [run(model, input_ids=ids, max_new_tokens=4) for ids in prompts]
    make = prefix_store.make_tiers

    def with_host_memory(*given: Any) -> list[Tier]:
        (disk,) = make(*given)
        return [HostTier(2**15, disk), disk]

    monkeypatch.setattr(prefix_store, "make_tiers", with_host_memory)
    cache = PagedPrefixCache(model, block_size=4, num_blocks=27, disk_folder=tmp_path, disk_bytes=2**24)
    host, disk = cache.store.blocks.tiers.tiers
    assert isinstance(disk, DiskTier)
    disk.run_bytes = 2**13
    for ids in prompts + prompts:
        run(model, cache, input_ids=ids, max_new_tokens=4)
    number, num_interrupted = 0, 0
    for trial in range(NUM_TRIALS):
        number = (number + 1) % len(prompts)
        interrupter = OfTiers if rng.random() < 0.6 else Interrupter
        with interrupter() as counter:
            run(model, cache, input_ids=prompts[number], max_new_tokens=4)
        number = (number + 1) % len(prompts)
        with interrupter(rng.randrange(1, counter.num_lines + 1)) as at:
            try:
                run(model, cache, input_ids=prompts[number], max_new_tokens=4)
            except KeyboardInterrupt:
                num_interrupted += 1
        where = f"trial {trial}, interrupted at {at.place}"
        for _ in range(2):
            number = (number + 1) % len(prompts)
            try:
                output = run(model, cache, input_ids=prompts[number], max_new_tokens=4)
                cache.check()
                assert_same(references[number], output)
            except BaseException as error:
                raise AssertionError(f"{where}: {error}") from error
    assert num_interrupted > NUM_TRIALS / 2
    assert host.counts.num_up
    assert disk.counts.num_up
    cache.reset()
    cache.check()
    assert cache.stats().num_blocks_in_use == 0
    disk.join()
