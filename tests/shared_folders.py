"""Processes whose disk tiers are one folder, that die, damage it and clear it: every result is right, and files are whole.

Run it with `python -m tests.shared_folders --kills 200 --flips 200 --calls 2000 --seed 1`.
"""

from __future__ import annotations

import gc
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.tiers.disk import DiskTier
from hf_paged_cache.tiers.saved_file import saved_paths

from .reference import assert_same, run
from .saved_folders import (
    KINDS,
    NUM_PROCESSES,
    in_child,
    in_children,
    is_killed,
    main,
    prompt,
    require_whole,
    with_a_bit_flipped,
)
from .tiny_models import tiny

NUM_BLOCKS = 40  # fewer than three prompts need


def new_cache(model: Any, folder: Path, **sizes: Any) -> PagedPrefixCache:
    """On a small pool, whose tier writes often."""
    cache = PagedPrefixCache(model, **{"block_size": 4, "num_blocks": NUM_BLOCKS, "disk_folder": folder, **sizes})
    tier_of(cache).run_bytes = 2**14
    return cache


def tier_of(cache: PagedPrefixCache) -> DiskTier:
    (tier,) = cache.store.blocks.tiers.tiers
    assert isinstance(tier, DiskTier)
    return tier


def fill(model: Any, folder: Path, numbers: range) -> None:
    """Let a process have computed prompts, and ended."""
    cache = new_cache(model, folder)
    for number in numbers:
        run(model, cache, **prompt(number), max_new_tokens=1)
    tier_of(cache).join()
    del cache
    gc.collect()


def kill(times: int, seed: int, folder: Path, show: Callable[[int], object] = lambda _: None) -> Counter[str]:
    """Kill a process that evicts, at a random moment, so many times; the next one reads whole files alone."""
    random_numbers, found = random.Random(seed), Counter[str]()
    models = {kind: tiny(kind) for kind in KINDS}
    for number in range(times):
        kind = random_numbers.choice(KINDS)

        def compute(kind: str = kind, first: int = 10 * number) -> None:
            cache = new_cache(models[kind], folder / kind)
            for each in range(first, first + 1000):
                run(models[kind], cache, **prompt(each), max_new_tokens=1)

        child, latest = in_child(compute), time.monotonic() + 60
        while not list((folder / kind).glob("[!.]*.safetensors")) and time.monotonic() < latest:
            time.sleep(0.01)  # on a busy machine it has not begun yet
        found["unfinished"] += is_killed(child, random_numbers.uniform(0.05, 0.3), folder / kind)
        show(1)
    for kind, model in models.items():
        cache = new_cache(model, folder / kind)
        for number in range(0, 10 * times, 10):
            if cache.lookup(prompt(number)["input_ids"]).num_tokens >= 8:
                assert_same(run(model, **prompt(number)), run(model, cache, **prompt(number)))
                found["tokens from files"] += cache.last_call.rows[0].disk_tokens
                cache.check()
        found["files"] += require_whole(folder / kind)
    return found


def flip(times: int, seed: int, folder: Path, show: Callable[[int], object] = lambda _: None) -> Counter[str]:
    """Flip one random bit of one random file, so many times, before a process looks or after: never another result."""
    random_numbers, found = random.Random(seed), Counter[str]()
    models, references = {kind: tiny(kind) for kind in KINDS}, {}
    for kind, model in models.items():
        fill(model, folder / kind, range(6))
        references[kind] = [run(model, **prompt(number), max_new_tokens=2) for number in range(3)]
    for _ in range(times):
        kind = random_numbers.choice(KINDS)
        path, data = with_a_bit_flipped(folder / kind, random_numbers)
        cache = new_cache(models[kind], path.parent)
        if random_numbers.random() < 0.5:
            cache.lookup(prompt(0)["input_ids"])
        path.write_bytes(data)
        for number, reference in enumerate(references[kind]):
            assert_same(reference, run(models[kind], cache, **prompt(number), max_new_tokens=2))
            found["tokens from files"] += cache.last_call.rows[0].disk_tokens
        cache.check()
        found["removed"] += not path.exists()
        del cache
        gc.collect()
        shutil.rmtree(path.parent)
        show(1)
    return found


def share(calls: int, seed: int, folder: Path, processes: int = NUM_PROCESSES) -> Counter[str]:
    """Processes that generate on one folder, with a budget too small for all, and delete files: every result is right."""

    def work(number: int) -> None:
        random_numbers, kind = random.Random(seed + number), KINDS[number % 2 * 2]
        model, num_tokens = tiny(kind), 0
        cache = new_cache(model, folder, disk_bytes=2**20)
        for _ in range(calls // processes):
            if random_numbers.random() < 0.03:
                for path in saved_paths(folder)[:2]:
                    path.unlink(missing_ok=True)
            if random_numbers.random() < 0.01:
                cache.reset()
                cache.store.reset_prefix_cache()
            if random_numbers.random() < 0.01:
                del cache
                gc.collect()
                cache = new_cache(model, folder, disk_bytes=2**20)
            given = prompt(random_numbers.randrange(40))
            assert_same(run(model, **given, max_new_tokens=1), run(model, cache, **given, max_new_tokens=1))
            num_tokens += cache.last_call.rows[0].disk_tokens
            cache.store.check()
        assert num_tokens > 0

    return in_children(work, processes)


if __name__ == "__main__":
    sys.exit(main(str(__doc__), "it evicts", kill, flip, share))
