"""Owns how the benchmarks time and what they write down. Refuses to write a result without the machine it was made on.

Cases are timed in turn, round after round, so that a machine that slows down slows all of them; the medians of the
rounds are compared, and least and greatest say how far to trust them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Timing:
    """Seconds of one case over all rounds."""

    median: float
    minimum: float
    maximum: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))

    def scaled(self, factor: float) -> Timing:
        """The same spread per something else, such as per block in microseconds."""
        return Timing(self.median * factor, self.minimum * factor, self.maximum * factor, self.rounds)


@contextlib.contextmanager
def garbage_collection(enabled: bool) -> Iterator[None]:
    """Collects first; then leaves the cyclic collector on or off, and puts it back.

    As `timeit`, we measure with it off.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    (gc.enable if enabled else gc.disable)()
    try:
        yield
    finally:
        (gc.enable if was_enabled else gc.disable)()


def timed(function: Callable[[], object], *, gc_enabled: bool = False) -> float:
    """Seconds of one call; what it returns is let go of outside the time."""
    with garbage_collection(gc_enabled):
        start = time.perf_counter()
        result = function()
        seconds = time.perf_counter() - start
    del result
    return seconds


def interleave(
    cases: Mapping[str, Callable[[], object]], *, rounds: int = 5, warmups: int = 1, gc_enabled: bool = False
) -> dict[str, Timing]:
    """Time each case once a round, in an order that turns by one each round.

    The first `warmups` rounds do not count.
    """
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmups + rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            taken = timed(cases[name], gc_enabled=gc_enabled)
            if number >= warmups:
                seconds[name].append(taken)
    return {name: Timing.of(taken) for name, taken in seconds.items()}


def machine() -> dict[str, object]:
    """What a number depends on besides the code: processor, cores, versions. No names or paths of the machine."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "transformers": _version("transformers"),
    }


def commit() -> str:
    """The git commit measured, with `+changes` if anything but results differs from it, or `none`.

    Results are the files in benchmarks/results/, and in a README what stands between `<!-- NAME: begin -->` and its
    end.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    def differs(name: str, status: str) -> bool:
        if name.startswith("benchmarks/results/"):
            return False
        if Path(name).name != "README.md" or not set(status) <= {" ", "M"}:
            return True
        return _without_tables(git("show", f"HEAD:{name}")) != _without_tables(
            (ROOT / name).read_text(encoding="utf-8")
        )

    try:
        head = git("rev-parse", "--short=12", "HEAD").strip()
        entries = git("status", "--porcelain", "--no-renames", "--untracked-files=all", "-z").split("\0")
        changed = any(differs(entry[3:], entry[:2]) for entry in entries if entry)
    except (OSError, subprocess.CalledProcessError):
        return "none"
    return head + ("+changes" if changed else "")


def _without_tables(text: str) -> str:
    return re.sub(r"(<!-- ([\w ]+): begin -->).*?(<!-- \2: end -->)", r"\1\3", text, flags=re.DOTALL)


def as_text(results: Mapping[str, object]) -> str:
    """`results` with machine, commit and date, as JSON."""
    stamped = {"date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": machine(), **results}
    return json.dumps(stamped, indent=2, default=_as_json) + "\n"


def write_results(name: str, results: Mapping[str, object], path: Path | None = None) -> Path:
    """Write `as_text(results)` to `results/<name>.json`, or to `path`; returns where."""
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_text(results), encoding="utf-8")
    return path


def _as_json(value: object) -> object:
    if isinstance(value, Timing):
        return asdict(value)
    raise TypeError(f"a {type(value).__name__} in the results; give Timings, numbers, strings, lists and dicts")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
