"""Ctrl-C at any line of a call that moves blocks down and up: the next calls are right, and everything is accounted for.

Of each call only the lines of tiers, and of what moves blocks, count half of the time: they are few beside all others.
"""

from __future__ import annotations

import contextlib
import gc
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from hf_paged_cache import PagedPrefixCache, PrefixStore, prefix_store
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
    disk = DiskTier(tmp_path, 2**24)
    disk.run_bytes = 2**13
    host = HostTier(2**15, disk)
    monkeypatch.setattr(prefix_store, "make_tiers", lambda *_: [host, disk])
    cache = PagedPrefixCache(model, block_size=4, num_blocks=27)
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


class OfWindows(Interrupter):
    """Counts lines of window blocks alone."""

    def _enter_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        traced = super()._enter_frame(frame, event, arg)
        return traced if frame.f_code.co_filename.endswith("window_blocks.py") else None


def test_a_load_interrupted_at_any_line_of_windows_leaves_each_window_block_needed_or_idle(tmp_path: Path) -> None:
    model = tiny("gemma3")
    first = PagedPrefixCache(model, block_size=4)
    first.prefill(torch.randint(3, 120, (1, 40), generator=torch.Generator().manual_seed(7)))
    first.store.save(tmp_path)

    def store() -> PrefixStore:
        return PrefixStore(model, block_size=4, num_blocks=27)

    with OfWindows() as counter:
        assert store().load(tmp_path).num_blocks == 10
    assert counter.num_lines > 50
    for at_line in range(1, counter.num_lines + 1, 3):
        interrupted = store()
        with OfWindows(at_line), contextlib.suppress(KeyboardInterrupt):
            interrupted.load(tmp_path)
        interrupted.check()
