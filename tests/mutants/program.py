"""Mutants: small changes of the package, each of which breaks a promise, and the tests that fail for it.

Usage, from the repository:

    python -m tests.mutants [--only AREA_OR_NAME ...] [--json FILE]   # run them; some seconds each, two at a time
    python -m tests.mutants --look                                    # only say which are found in the code

`mutants.toml` is the list, and says what a mutant is made of. A mutant is applied to a copy of the package in a temporary folder,
which its tests' process has before all else in `sys.path`: before the repository, and before site-packages, where an editable install
has written the repository's path. Processes that a test starts get both by PYTHONPATH, which is looked through before site-packages,
too; PYTHONSAFEPATH keeps the working directory, which has the package as it is, from coming before both.

A mutant is *killed* where a test fails, and has *survived* where all pass. It is *not found* where the text to be replaced is not
in its module exactly once, and has *not run* where pytest could not run the tests. Before any of them the tests run on a copy
without a mutant, where they must pass. The exit status is 0 where all are killed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_name("mutants.toml")
AREAS = ("blocks", "windows", "snapshots", "call", "view", "states", "tiers", "jobs", "images")
_PACKAGE = "hf_paged_cache"
_AT_A_TIME = 2
_MOST_SECONDS = 600.0
_CONTEXT = multiprocessing.get_context("forkserver")  # forks of one process that has imported what all tests import
_CONTEXT.set_forkserver_preload(
    ["pytest", "hypothesis", "torch", "transformers.cache_utils", "transformers.generation"]
)
# A function would be looked for in `tests`, which is not in `sys.path` where a script called pytest.
_IN_THE_PROCESS = (
    "import sys; sys.path.insert(0, root); from tests.mutants.program import _run_pytest; _run_pytest(*given)"
)


class Mutant(NamedTuple):
    """See `mutants.toml`."""

    name: str
    area: str
    breaks: str
    module: str
    old: str
    new: str
    killed_by: tuple[str, ...]
    second: tuple[str, ...] = ()


class Outcome(NamedTuple):
    result: str  # killed, survived, timed out, not found or not run
    said: str  # the test that failed; else why


def read_mutants(path: Path = LIST) -> list[Mutant]:
    """The list, in its order. Raises ValueError for an entry that cannot be."""
    mutants = [
        Mutant(**{name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()})
        for entry in tomllib.loads(path.read_text("utf-8"))["mutant"]
    ]
    for mutant in mutants:
        if mutant.area not in AREAS or not mutant.killed_by or mutant.old == mutant.new:
            raise ValueError(
                f"{mutant.name}: give one of the areas {AREAS}, a test, and another text in place of the old"
            )
    twice = [name for name, number in Counter(each.name for each in mutants).items() if number > 1]
    if twice:
        raise ValueError(f"names are given twice: {', '.join(twice)}")
    return mutants


def why_not_found(mutant: Mutant, root: Path = ROOT) -> str | None:
    """Why a mutant cannot be applied; None where it can."""
    path = root / _PACKAGE / mutant.module
    if not path.is_file():
        return f"there is no {mutant.module}"
    number = path.read_text("utf-8").count(mutant.old)
    return None if number == 1 else f"the text is {number} times in {mutant.module}, and not once"


@contextmanager
def copy_with(mutant: Mutant | None, root: Path = ROOT) -> Iterator[Path]:
    """A temporary folder with a copy of the package, with this mutant."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        shutil.copytree(root / _PACKAGE, Path(folder) / _PACKAGE)
        if mutant is not None:
            path = Path(folder) / _PACKAGE / mutant.module
            path.write_text(path.read_text("utf-8").replace(mutant.old, mutant.new), "utf-8")
        yield Path(folder)


def run_tests(copy: Path, tests: Sequence[str], root: Path = ROOT, seconds: float = _MOST_SECONDS) -> Outcome:
    """Run tests on a copy of the package, up to the first that fails."""
    printed = copy / f"printed-{uuid4().hex}"
    running = _CONTEXT.Process(
        target=exec, args=(_IN_THE_PROCESS, {"root": str(ROOT), "given": (copy, tests, root, printed)})
    )
    running.start()
    running.join(seconds)
    if running.exitcode is None:
        os.killpg(running.pid or 0, signal.SIGKILL)  # with what tests have started
        return Outcome("timed out", f"after {seconds:g} seconds")
    if running.exitcode == 0:
        return Outcome("survived", ", ".join(tests))
    lines = printed.read_text("utf-8", "replace").splitlines()
    failed = [line.partition(" ")[2].partition(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if running.exitcode == 1 and failed:
        return Outcome("killed", failed[0])
    return Outcome("not run", f"pytest ended with {running.exitcode}: {' / '.join(lines[-3:])}")


def _run_pytest(copy: Path, tests: Sequence[str], root: Path, printed: Path) -> None:
    """In a process of its own: `pytest` as if it were called there, with the copy before all else that can be imported."""
    os.setsid()
    written = os.open(printed, os.O_CREAT | os.O_WRONLY)
    os.dup2(written, 1)
    os.dup2(written, 2)
    os.chdir(root)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]  # of who runs the mutants: its options, or that it is a worker
    os.environ |= {
        "PYTHONPATH": os.pathsep.join([str(copy), str(root)]),
        "PYTHONSAFEPATH": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": str(copy / "hypothesis"),
    }
    sys.path[:] = [str(copy), str(root), *(path for path in sys.path if Path(path).resolve() not in (ROOT, root))]
    found = find_spec(_PACKAGE)
    assert found is not None
    assert str(found.origin).startswith(str(copy)), f"{found.origin} would be imported"
    options = ["-x", "-q", "-rfE", "--tb=line", "--import-mode=importlib", "-p", "no:cacheprovider"]
    sys.exit(pytest.main([*options, *tests]))


def outcome_of(mutant: Mutant, root: Path = ROOT, seconds: float = _MOST_SECONDS) -> Outcome:
    """What becomes of a mutant: the second best tests run where the best do not kill it."""
    if why := why_not_found(mutant, root):
        return Outcome("not found", why)
    with copy_with(mutant, root) as copy:
        outcome = run_tests(copy, mutant.killed_by, root, seconds)
        if outcome.result in ("survived", "not run") and mutant.second:
            outcome = run_tests(copy, mutant.second, root, seconds)
    return outcome


def failing_without(mutants: Iterable[Mutant], pool: ThreadPoolExecutor, root: Path = ROOT) -> list[str]:
    """What is said of tests of these mutants that do not pass without any."""
    of_file: dict[str, list[str]] = defaultdict(list)
    for test in dict.fromkeys(test for mutant in mutants for test in (*mutant.killed_by, *mutant.second)):
        of_file[test.partition("::")[0]].append(test)
    with copy_with(None, root) as copy:
        outcomes = list(pool.map(lambda tests: run_tests(copy, tests, root), of_file.values()))
    return [said for result, said in outcomes if result != "survived"]


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="AREA_OR_NAME", help=f"of {', '.join(AREAS)}; or names of mutants")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write what became of each; those of others in it stay"
    )
    parser.add_argument("--look", action="store_true", help="say which are found in the code, and run nothing")
    asked, say = parser.parse_args(given), partial(print, flush=True)
    mutants = [each for each in read_mutants() if asked.only is None or {each.area, each.name} & {*asked.only}]
    if not mutants:
        parser.error(f"no mutant is of {asked.only}")
    if asked.look:
        lost = {each.name: why for each in mutants if (why := why_not_found(each))}
        for name, why in lost.items():
            say(f"{name}: {why}")
        say(f"{len(mutants) - len(lost)} of {len(mutants)} mutants are found")
        return int(bool(lost))
    results: dict[str, Any] = {}
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        if failing := failing_without(mutants, pool):
            say("\n  ".join(["these tests fail without a mutant:", *failing]))
            return 2
        for mutant, outcome in zip(mutants, pool.map(outcome_of, mutants), strict=True):
            what = "by" if outcome.result == "killed" else "why"
            results[mutant.name] = {"area": mutant.area, "result": outcome.result, what: outcome.said}
            say(f"{outcome.result:9} {mutant.area}: {mutant.name}: {outcome.said}")
    counts = Counter(each["result"] for each in results.values())
    say(f"{len(results)} mutants: {', '.join(f'{number} {result}' for result, number in counts.items())}")
    if asked.json is not None:
        before = json.loads(asked.json.read_text("utf-8")) if asked.json.exists() else {}
        asked.json.write_text(json.dumps(before | results, indent=1, sort_keys=True) + "\n", "utf-8")
    return int(counts["killed"] < len(results))
