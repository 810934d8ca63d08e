"""Hours of users in minutes: 8 threads on one store, everything that can happen, each result compared with
`DynamicCache`.

A run is a row of episodes, each with a model, a store and prompts of its own. Every few seconds all caches are dropped,
and every block must come back. A failure ends the run: it prints the seed and the fewest operations that fail again in
one thread, or else what all threads did last. The exit status is 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import logging
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: a second thread makes tiny models slower

import torch
from tqdm import tqdm

from .faults import count_what_finalizers_swallow
from .replay import replay, shortest
from .report import Report
from .worker import Worker
from .world import Operation, SoakError, World

NUM_LAST = 40  # operations that are printed of a failure that does not come again
SECONDS_BETWEEN_LOOKS = 3.0
LONGEST_OPERATION = 120  # seconds; what takes longer hangs


class Episode:
    """Some time of all threads in one world.

    Args:
        seed: of the world and of each worker.
        num_threads: workers.
        report: of the run.
    """

    def __init__(self, seed: str, num_threads: int, report: Report) -> None:
        self.world = World(seed, report)
        self.report = report
        self.failures: list[tuple[str, list[Operation]]] = []  # what was raised, and all that was done until then
        self._over = threading.Event()
        self.world.workers = [Worker(self.world, number) for number in range(num_threads)]

    def run(self, seconds: float, bar: tqdm[None]) -> None:
        """Let the workers work, look every few seconds, and end."""
        rng, world = random.Random(f"{self.world.seed} main"), self.world
        threads = [
            threading.Thread(target=self._work, args=(worker,), name=f"worker {worker.number}")
            for worker in world.workers
        ]
        for thread in threads:
            thread.start()
        begun = time.monotonic()
        try:
            while (left := begun + seconds - time.monotonic()) > 0 and not self._over.wait(
                min(SECONDS_BETWEEN_LOOKS, left)
            ):
                faulthandler.dump_traceback_later(LONGEST_OPERATION, exit=True)  # else nobody ever learns what hangs
                self._tried(lambda: self._look(rng))
                counts = self.report.counts
                bar.set_postfix(calls=counts["calls"], faults=self.report.faults.total(), refresh=False)
                bar.update(SECONDS_BETWEEN_LOOKS)
        finally:
            self._over.set()
            for thread in threads:
                thread.join()
        if not self.failures:
            self._tried(world.close)
        world.workers.clear()
        faulthandler.cancel_dump_traceback_later()

    def _work(self, worker: Worker) -> None:
        rng = random.Random(f"{self.world.seed} {worker.number}")
        while not self._over.is_set():
            self._tried(lambda: worker.perform(worker.draw(rng)))

    def _look(self, rng: random.Random) -> None:
        with self.world.gate.alone():
            if not self.failures:
                self.world.check_at_rest(rng)

    def _tried(self, act: Callable[[], None]) -> None:
        try:
            act()
        except SoakError as error:
            self.failures.append((str(error), list(self.world.done)))
            self._over.set()


def soak(
    seconds: float, seed: int, num_threads: int = 8, short_switches: float = 0.5, seconds_to_shrink: float = 120.0
) -> Report:
    """Run episodes for so long, or until something is wrong; that is in `problems` then.

    Args:
        short_switches: share of the episodes in which threads take turns every microsecond.
    """
    report, rng, start = Report(), random.Random(seed), time.monotonic()
    count_what_finalizers_swallow(report.faults, report.problems)
    interval, length = sys.getswitchinterval(), min(60.0, max(10.0, seconds / 40))
    with tqdm(total=round(seconds), unit="s", disable=None) as bar:
        while not report.problems and (left := start + seconds - time.monotonic()) > 0:
            sys.setswitchinterval(1e-6 if rng.random() < short_switches else interval)
            episode = Episode(f"{seed} {report.counts['episodes']}", num_threads, report)
            episode.run(min(length, left), bar)
            sys.setswitchinterval(interval)
            if episode.failures:
                report.problems.append(explanation(episode, seconds_to_shrink))
            del episode
            if report.counts["episodes"] == 0:
                gc.collect()
                gc.freeze()  # what libraries hold is not looked through again
            report.counts["episodes"] += 1
            report.sample_memory(time.monotonic() - start)
    report.judge_memory()
    return report


def explanation(episode: Episode, seconds: float) -> str:
    """What has failed, where, and how to see it again."""
    (failure, operations), seed = episode.failures[0], episode.world.seed
    kind = failure.partition(":")[0]
    lines = [f"{failure}", f"episode {seed!r} ({episode.world.name}, {episode.world.num_blocks} blocks)"]
    print(f"{lines[0]}\n{lines[1]}\nlooking for fewer operations ...", file=sys.stderr)
    kept = shortest(operations, lambda some: replay(seed, some).partition(":")[0] == kind, seconds)
    if kept is None:
        lines.append(f"does not fail in one thread; the last of {len(operations)} operations of all threads:")
        kept = operations[-NUM_LAST:]
    else:
        again = f"python -m benchmarks.soak --replay '{seed}' --operations FILE"
        lines.append(
            f"{len(kept)} of {len(operations)} operations fail in one thread, too; with these lines in FILE, {again}:"
        )
    return "\n".join([*lines, *(json.dumps(of) for of in kept)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument(
        "--short-switches", type=float, default=0.5, help="share of the episodes with sys.setswitchinterval(1e-6)"
    )
    parser.add_argument("--shrink", type=float, default=120.0, metavar="SECONDS", help="to look for a shorter failure")
    parser.add_argument("--json", type=Path, help="write all counts there")
    parser.add_argument(
        "--replay", metavar="EPISODE", help="do the operations of --operations once more, in one thread"
    )
    parser.add_argument("--operations", type=Path, help="lines as a failure prints them")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    faulthandler.enable()
    if given.replay is not None:
        lines = given.operations.read_text(encoding="utf-8").splitlines()
        failure = replay(given.replay, [Operation(*json.loads(line)) for line in lines if line.strip()])
        print(failure or "nothing fails")
        return bool(failure)
    report = soak(60 * given.minutes, given.seed, given.threads, given.short_switches, given.shrink)
    print("\n".join(report.lines()))
    for problem in report.problems:
        print(f"\nFAILED, seed {given.seed}: {problem}")
    if given.json is not None:
        given.json.write_text(json.dumps(report.as_dict(), indent=1), encoding="utf-8")
    return bool(report.problems)


if __name__ == "__main__":
    sys.exit(main())
