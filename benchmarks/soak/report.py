"""What a run has counted, and whether its memory stays as it is."""

from __future__ import annotations

import ctypes
import gc
import statistics
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

MIN_SAMPLES = 8  # of the second half, below which memory says nothing
MAX_GROWTH = {"rss_bytes": 0.03, "objects": 0.01}  # in the second half, as a share of their mean


@dataclass
class Report:
    """Counts of one run, a few too low, since threads count without a lock.

    Operations that are tried again have another.
    """

    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    latencies: defaultdict[str, array[float]] = field(default_factory=lambda: defaultdict(lambda: array("d")))
    memory: list[dict[str, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def sample_memory(self, seconds: float) -> None:
        """Between two episodes, when nothing should be left of the one before."""
        gc.collect()
        _give_back_free_pages()
        rss = psutil.Process().memory_info().rss
        self.memory.append(
            {"seconds": seconds, "rss_bytes": rss, "objects": len(gc.get_objects()) + gc.get_freeze_count()}
        )

    def growth(self, name: str) -> float | None:
        """By which share `name` grows in the second half of the run, by linear regression; None: too few samples."""
        half = self.memory[len(self.memory) // 2 :]
        if len(half) < MIN_SAMPLES:
            return None
        seconds, values = [sample["seconds"] for sample in half], [sample[name] for sample in half]
        slope = statistics.linear_regression(seconds, values).slope
        return slope * (seconds[-1] - seconds[0]) / statistics.fmean(values)

    def judge_memory(self) -> None:
        """Growth above what is allowed is a problem."""
        for name, allowed in MAX_GROWTH.items():
            growth = self.growth(name)
            if growth is not None and growth > allowed:
                self.problems.append(f"{name} grows by {growth:.1%} in the second half; {allowed:.0%} is allowed")

    def as_dict(self) -> dict[str, Any]:
        """For JSON; latencies in milliseconds."""
        return {
            "counts": dict(self.counts),
            "faults": dict(self.faults.most_common()),
            "num_faults": self.faults.total(),
            "refusals": dict(self.refusals.most_common()),
            "latency_ms": {
                mode: {"calls": len(of), "median": 1e3 * statistics.median(of), "p99": 1e3 * _percentile(of, 0.99)}
                for mode, of in sorted(self.latencies.items())
            },
            "growth_in_second_half": {name: self.growth(name) for name in MAX_GROWTH},
            "memory": self.memory,
            "problems": self.problems,
        }

    def lines(self) -> list[str]:
        """The same, to be read."""
        of = self.as_dict()
        lines = [f"{number:9,}  {name}" for name, number in of["counts"].items()]
        lines += [f"{of['num_faults']:9,}  faults survived, of them"]
        lines += [f"{number:9,}    {name}" for name, number in of["faults"].items()]
        lines += [f"{number:9,}  refused: {name}" for name, number in of["refusals"].items()]
        lines += [f"{'calls':>9}  {'median':>9}  {'p99':>9}  mode"]
        lines += [
            f"{mode['calls']:9,}  {mode['median']:6.1f} ms  {mode['p99']:6.1f} ms  {name}"
            for name, mode in of["latency_ms"].items()
        ]
        for name, growth in of["growth_in_second_half"].items():
            last = self.memory[-1][name] if self.memory else 0
            said = "too few samples" if growth is None else f"{growth:+.1%} in the second half"
            lines.append(f"{last:13,.0f}  {name} at the end, {said}")
        return lines


def _give_back_free_pages() -> None:
    """What eight threads' arenas keep free between two allocations is no growth; glibc keeps it unless it is told."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
