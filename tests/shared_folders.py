"""Processes on one folder that evict, save, load, die and damage it: every result is right, and whoever reads it next
finds whole files.

Run it with `python -m tests.shared_folders --kills 200 --flips 200 --calls 2000 --seed 1`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hf_paged_cache import PagedPrefixCache, saved_report
from hf_paged_cache.tiers.folder import saved_paths

from .internals import tiers_of
from .reference import assert_same, batch, row, run
from .tiny_models import tiny

KINDS = ("llama", "gemma3", "lfm2")
NUM_BLOCKS = 40  # fewer than three prompts need


def prompt(number: int, length: int = 40) -> dict[str, Any]:
    """One of few prompts that begin alike."""
    return batch(row((number % 3, 24), (100 + number, length - 24)))


def new_cache(model: Any, folder: Path | None = None, **sizes: Any) -> PagedPrefixCache:
    """On a small pool, whose tier writes often."""
    cache = PagedPrefixCache(model, **{"block_size": 4, "num_blocks": NUM_BLOCKS, "disk_folder": folder, **sizes})
    if folder is not None:
        tiers_of(cache).run_bytes = 2**14
    return cache


def fill(model: Any, folder: Path, numbers: range) -> None:
    """Let a process have computed prompts, evicted some, saved the others, and ended."""
    cache = new_cache(model, folder)
    for number in numbers:
        run(model, cache, **prompt(number), max_new_tokens=1)
    tiers_of(cache).join()
    cache.store.save(folder)
    del cache
    gc.collect()


def in_child(work: Callable[[], None]) -> int:
    """Run something in a forked process, which has everything loaded; its process id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except BaseException:  # noqa: BLE001  # its exit status says so
        traceback.print_exc()
        os._exit(1)


def in_children(work: Callable[[int], None], processes: int) -> Counter[str]:
    """Run something in several forked processes at once, each with its number; how many of them found all right."""
    children = [in_child(partial(work, number)) for number in range(processes)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return Counter(right=statuses.count(0), wrong=len(statuses) - statuses.count(0))


def require_whole(folder: Path) -> int:
    """Every file that has its name can be read to its last byte; returns how many there are."""
    reports = saved_report(folder)
    assert all(report.problem is None for report in reports), reports
    return len(reports)


def kill(times: int, seed: int, folder: Path, show: Callable[[int], object] = lambda _: None) -> Counter[str]:
    """Kill a process that evicts and saves, at a random moment, so many times; the next one reads whole files alone."""
    random_numbers, found = random.Random(seed), Counter[str]()
    models = {kind: tiny(kind) for kind in KINDS}
    for number in range(times):
        kind = random_numbers.choice(KINDS)
        here = folder / kind

        def compute(kind: str = kind, here: Path = here, first: int = 10 * number) -> None:
            cache = new_cache(models[kind], here)
            for each in range(first, first + 1000):
                run(models[kind], cache, **prompt(each), max_new_tokens=1)
                if each % 3 == 0:
                    cache.store.save(here)

        child, latest = in_child(compute), time.monotonic() + 60
        while not list(here.glob("[!.]*.safetensors")) and time.monotonic() < latest:
            time.sleep(0.01)  # on a busy machine it has not begun yet
        time.sleep(random_numbers.uniform(0.02, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found["files"] += require_whole(here)
        show(1)
    for kind, model in models.items():
        cache = new_cache(model, folder / kind)
        for number in range(0, 10 * times, 10):
            assert_same(run(model, **prompt(number)), run(model, cache, **prompt(number)))
            found["tokens from files"] += cache.last_call.rows[0].disk_tokens
        cache.check()
        cache.store.save(folder / kind)
        assert not list((folder / kind).glob(".*.unfinished"))
    return found


def flip(times: int, seed: int, folder: Path, show: Callable[[int], object] = lambda _: None) -> Counter[str]:
    """Flip one random bit of one random file, so many times, before a process looks or after: never another result."""
    random_numbers, found = random.Random(seed), Counter[str]()
    models, references = {kind: tiny(kind) for kind in KINDS}, {}
    for kind, model in models.items():
        fill(model, folder / kind, range(6))
        references[kind] = [run(model, **prompt(number), max_new_tokens=2) for number in range(3)]
    for _ in range(times):
        kind, here = random_numbers.choice(KINDS), Path(tempfile.mkdtemp(dir=folder))
        shutil.copytree(folder / kind, here, dirs_exist_ok=True)
        path = random_numbers.choice(saved_paths(here))
        data = bytearray(path.read_bytes())
        is_header = random_numbers.random() < 0.5  # of few bytes beside the rows
        end = 8 + int.from_bytes(data[:8], "little") if is_header else len(data)
        data[random_numbers.randrange(0 if is_header else 8, end)] ^= 1 << random_numbers.randrange(8)
        is_tier = random_numbers.random() < 0.5
        cache = new_cache(models[kind], here if is_tier else None, num_blocks=NUM_BLOCKS if is_tier else 120)
        if is_tier and random_numbers.random() < 0.5:
            cache.lookup(prompt(0)["input_ids"])
        path.write_bytes(data)
        if not is_tier:
            found["seen"] += bool(cache.store.load(here).not_loaded)
            found["loaded"] += 1
        for number, reference in enumerate(references[kind]):
            assert_same(reference, run(models[kind], cache, **prompt(number), max_new_tokens=2))
            found["tokens from files"] += cache.last_call.rows[0].disk_tokens
        cache.check()
        del cache
        gc.collect()
        shutil.rmtree(here)
        show(1)
    return found


def damage(path: Path, random_numbers: random.Random) -> None:
    """Flip a bit of a file, cut it off, or remove it; a reader that has it open has the whole one."""
    with contextlib.suppress(FileNotFoundError):
        data = bytearray(path.read_bytes())
        place = random_numbers.randrange(len(data))
        data[place] ^= 1 << random_numbers.randrange(8)
        damaged = path.with_name(f".{os.getpid()}.damaged")
        damaged.write_bytes(data[:place] if random_numbers.random() < 0.3 else data)
        damaged.replace(path)
        if random_numbers.random() < 0.3:
            path.unlink()


def share(calls: int, seed: int, folder: Path, processes: int = 4) -> Counter[str]:
    """Processes that generate, save, load, reset, damage and remove files on one folder with a small budget: every
    result is right.
    """

    def work(number: int) -> None:
        random_numbers, kind = random.Random(seed + number), KINDS[number % 2 * 2]
        model, num_tokens = tiny(kind), 0
        cache = new_cache(model, folder, disk_bytes=2**20)
        for _ in range(calls // processes):
            match random_numbers.random():
                case chance if chance < 0.06:
                    cache.store.save(folder)
                case chance if chance < 0.12:
                    cache.store.load(folder)
                case chance if chance < 0.15:
                    cache.reset()
                    cache.store.reset_prefix_cache()
                case chance if chance < 0.2:
                    for path in saved_paths(folder)[:1]:
                        damage(path, random_numbers)
                case chance if chance < 0.22:
                    del cache
                    gc.collect()
                    cache = new_cache(model, folder, disk_bytes=2**20)
            given = prompt(random_numbers.randrange(40))
            assert_same(run(model, **given, max_new_tokens=1), run(model, cache, **given, max_new_tokens=1))
            num_tokens += cache.last_call.rows[0].disk_tokens
            cache.check()
        assert num_tokens > 0

    return in_children(work, processes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--calls", type=int, default=2000, help="of all processes")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folders = [Path(name, part) for part in ("killed", "flipped", "shared")]
        for folder in folders:
            folder.mkdir()
        with tqdm(total=given.kills, desc="kills") as bar:
            bar.write(f"killed: {dict(kill(given.kills, given.seed, folders[0], bar.update))}")
        with tqdm(total=given.flips, desc="flips") as bar:
            bar.write(f"a bit flipped: {dict(flip(given.flips, given.seed, folders[1], bar.update))}")
        shared = share(given.calls, given.seed, folders[2])
        tqdm.write(f"{given.calls} calls: {dict(shared)}")
    return 1 if shared["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
