"""Processes that save, load, die and damage one folder: whoever reads it next finds whole files, and never a wrong token.

Run it with `python -m tests.saved_folders --kills 200 --flips 200 --calls 2000 --seed 1`.
"""

from __future__ import annotations

import argparse
import contextlib
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
from typing import Any, TypeAlias

from tqdm import tqdm

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.tiers.saved_file import read_rows, read_saved_file, saved_paths

from .reference import assert_same, batch, row, run
from .tiny_models import tiny

KINDS = ("llama", "gemma3", "lfm2")
NUM_PROCESSES = 4
Play: TypeAlias = Callable[[int, int, Path, Callable[[int], object]], Counter[str]]  # times, seed, folder, progress
_NUM_NEW = 2


def prompt(number: int, length: int = 40) -> dict[str, Any]:
    """One of few prompts that begin alike."""
    return batch(row((number % 3, 24), (100 + number, length - 24)))


def new_cache(model: Any) -> PagedPrefixCache:
    return PagedPrefixCache(model, block_size=4, num_blocks=120)


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
    paths = saved_paths(folder) if folder.is_dir() else []
    for path in paths:
        file = read_saved_file(path)
        for content in file.contents:
            read_rows(file, content.kind, [(0, len(content.blocks))])
    return len(paths)


def is_killed(child: int, seconds: float, folder: Path) -> bool:
    """Kill a process after so long, and look at its folder; whether it leaves a file that it has begun."""
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    require_whole(folder)
    return any(folder.glob(".*.unfinished"))


def with_a_bit_flipped(folder: Path, random_numbers: random.Random) -> tuple[Path, bytes]:
    """A file in a copy of a folder, and what it would have in it with a random bit flipped."""
    damaged = Path(tempfile.mkdtemp(dir=folder.parent))
    shutil.copytree(folder, damaged, dirs_exist_ok=True)
    path = random_numbers.choice(saved_paths(damaged))
    data = bytearray(path.read_bytes())
    is_header = random_numbers.random() < 0.5  # of few bytes beside the rows
    end = 8 + int.from_bytes(data[:8], "little") if is_header else len(data)
    data[random_numbers.randrange(0 if is_header else 8, end)] ^= 1 << random_numbers.randrange(8)
    return path, bytes(data)


def kill(times: int, seed: int, folder: Path, show: Callable[[int], object] = lambda _: None) -> Counter[str]:
    """Kill a process that saves, at a random moment, so many times. What it leaves is whole, and can be loaded."""
    random_numbers, found = random.Random(seed), Counter[str]()
    models = {kind: tiny(kind) for kind in KINDS}
    for number in range(times):
        kind = random_numbers.choice(KINDS)
        here = folder / kind

        def save(kind: str = kind, here: Path = here, first: int = 10 * number) -> None:
            cache = new_cache(models[kind])
            for each in range(first, first + 1000):
                run(models[kind], cache, **prompt(each), max_new_tokens=1)
                cache.store.save(here)

        found["unfinished"] += is_killed(in_child(save), random_numbers.uniform(0.02, 0.25), here)
        show(1)
    for kind, model in models.items():
        cache = new_cache(model)
        if (folder / kind).is_dir():
            found["blocks loaded"] += cache.store.load(folder / kind).num_blocks
            cache.check()
            for number in range(3):
                assert_same(
                    run(model, **prompt(number), max_new_tokens=2),
                    run(model, cache, **prompt(number), max_new_tokens=2),
                )
            cache.store.save(folder / kind)
            assert not list((folder / kind).glob(".*.unfinished"))
        found["files"] += require_whole(folder / kind)
    return found


def flip(times: int, seed: int, folder: Path, show: Callable[[int], object] = lambda _: None) -> Counter[str]:
    """Flip one random bit of one random file, so many times: always a miss or an error of ours, never another result."""
    random_numbers, found = random.Random(seed), Counter[str]()
    models, references = {kind: tiny(kind) for kind in KINDS}, {}
    for kind, model in models.items():
        cache = new_cache(model)
        for number in range(4):
            run(model, cache, **prompt(number), max_new_tokens=1)
        cache.store.save(folder / kind)
        references[kind] = [run(model, **prompt(number, 48), max_new_tokens=_NUM_NEW) for number in range(4)]
    for _ in range(times):
        kind = random_numbers.choice(KINDS)
        path, data = with_a_bit_flipped(folder / kind, random_numbers)
        path.write_bytes(data)
        cache = new_cache(models[kind])
        loaded = cache.store.load(path.parent)
        cache.check()
        found["seen" if loaded.not_loaded else "without effect"] += 1
        for number, reference in enumerate(references[kind]):
            assert_same(reference, run(models[kind], cache, **prompt(number, 48), max_new_tokens=_NUM_NEW))
        shutil.rmtree(path.parent)
        show(1)
    return found


def damage(path: Path, random_numbers: random.Random) -> None:
    """Flip a bit of a file, or cut it off; a reader that has it open has the whole one."""
    data = bytearray(path.read_bytes())
    place = random_numbers.randrange(len(data))
    data[place] ^= 1 << random_numbers.randrange(8)
    damaged = path.with_name(f".{os.getpid()}.damaged")
    damaged.write_bytes(data[:place] if random_numbers.random() < 0.3 else data)
    damaged.replace(path)


def share(calls: int, seed: int, folder: Path, processes: int = NUM_PROCESSES) -> Counter[str]:
    """Processes that generate, save, load, damage and delete files of one folder, all at once: every result is right."""

    def work(number: int) -> None:
        random_numbers, model = random.Random(seed + number), tiny(KINDS[number % 2 * 2])
        cache = new_cache(model)
        here = folder / KINDS[number % 2 * 2]
        here.mkdir(exist_ok=True)
        for _ in range(calls // processes):
            which = random_numbers.randrange(40)
            match random_numbers.random():
                case chance if chance < 0.1:
                    cache.store.save(here)
                case chance if chance < 0.2:
                    cache.store.load(here)
                case chance if chance < 0.25:
                    cache.reset()
                    cache.store.reset_prefix_cache()
                case chance if chance < 0.27:
                    for path in saved_paths(here)[:2]:
                        path.unlink(missing_ok=True)
                case chance if chance < 0.33:
                    for path in saved_paths(here)[-2:]:
                        with contextlib.suppress(FileNotFoundError):
                            damage(path, random_numbers)
            given = prompt(which)
            assert_same(run(model, **given, max_new_tokens=1), run(model, cache, **given, max_new_tokens=1))
            cache.check()

    return in_children(work, processes)


def main(about: str, killed: str, kill: Play, flip: Play, share: Callable[[int, int, Path], Counter[str]]) -> int:
    """Play as often as the arguments of the process say, and print what was found."""
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
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
            bar.write(f"killed while {killed}: {dict(kill(given.kills, given.seed, folders[0], bar.update))}")
        with tqdm(total=given.flips, desc="flips") as bar:
            bar.write(f"a bit flipped: {dict(flip(given.flips, given.seed, folders[1], bar.update))}")
        shared = share(given.calls, given.seed, folders[2])
        tqdm.write(f"{given.calls} calls of {NUM_PROCESSES} processes: {dict(shared)}")
    return 1 if shared["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(str(__doc__), "saving", kill, flip, share))
