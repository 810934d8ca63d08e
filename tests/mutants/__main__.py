"""Runs mutants: small changes of the package, each of which breaks a promise, so that a test must fail.

Usage, from the repository:

    python -m tests.mutants [--only NAME ...]    # runs them, one after the other; some seconds each
    python -m tests.mutants --look               # only says which are found in the code

`mutants.toml` is the list. Each mutant is applied to a copy of the package, which pytest imports in place of the
package. The mutant is *killed* if a test fails, and has *survived* if all pass. It is *not found* if its module has the
text to be replaced not exactly once. The tests run first on a copy without a mutant, where they must pass. The exit
status is 0 if every mutant is killed.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT, _PACKAGE = Path(__file__).parents[2], "hf_paged_cache"


class Mutant(NamedTuple):
    """`Mutant` is an entry of `mutants.toml`, which says what each part is."""

    name: str
    breaks: str
    module: str
    old: str
    new: str
    tests: list[str]

    def is_found(self) -> bool:
        """Return whether the module is there, and has the text to be replaced exactly once."""
        path = ROOT / _PACKAGE / self.module
        return path.is_file() and path.read_text("utf-8").count(self.old) == 1

    def changed(self) -> str:
        """Return the text of the module with the change."""
        return (ROOT / _PACKAGE / self.module).read_text("utf-8").replace(self.old, self.new)


def read_mutants() -> list[Mutant]:
    """Read the list, in its order."""
    text = Path(__file__).with_name("mutants.toml").read_text("utf-8")
    return [Mutant(**entry) for entry in tomllib.loads(text)["mutant"]]


def run_tests(tests: Sequence[str], mutant: Mutant | None = None) -> tuple[str, str]:
    """Run tests on a copy of the package, up to the first that fails.

    Returns:
        "killed" and the test that failed, "survived" and the tests that passed, or "not run" and why.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        shutil.copytree(ROOT / _PACKAGE, Path(folder, _PACKAGE), ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            Path(folder, _PACKAGE, mutant.module).write_text(mutant.changed(), "utf-8")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([folder, str(ROOT)]),  # the copy first, also in processes that tests start
            "PYTHONSAFEPATH": "1",  # without it the working folder would be before the copy
            "HYPOTHESIS_STORAGE_DIRECTORY": str(Path(folder, "hypothesis")),
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-rf", "--tb=line", "-p", "no:cacheprovider", *tests]
        try:
            ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
        except subprocess.TimeoutExpired:
            return "not run", "the tests took more than 30 minutes"
    failed = [line for line in ran.stdout.splitlines() if line.startswith("FAILED ")]
    if ran.returncode == 1 and failed:
        return "killed", failed[0].partition(" ")[2].partition(" - ")[0]
    if ran.returncode == 0:
        return "survived", " ".join(tests)
    return "not run", f"pytest ended with {ran.returncode}: {(ran.stdout + ran.stderr)[-300:]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these mutants alone")
    parser.add_argument("--look", action="store_true", help="say which mutants are found in the code, and run nothing")
    asked, mutants = parser.parse_args(), read_mutants()
    if unknown := {*(asked.only or ())} - {each.name for each in mutants}:
        parser.error(f"no mutant is named {', '.join(sorted(unknown))}")
    mutants = [each for each in mutants if asked.only is None or each.name in asked.only]
    found = [each for each in mutants if each.is_found()]
    if found and not asked.look:
        result, said = run_tests([*dict.fromkeys(test for each in found for test in each.tests)])
        if result != "survived":
            print(f"without a mutant the tests must pass: {result}: {said}")  # noqa: T201
            return 2
    counts = Counter[str]()
    for mutant in mutants:
        result, said = "found" if mutant in found else "not found", mutant.module
        if mutant in found and not asked.look:
            result, said = run_tests(mutant.tests, mutant)
        counts[result] += 1
        print(f"{result:9} {mutant.name}: {said}", flush=True)  # noqa: T201
    print(f"{len(mutants)} mutants: " + ", ".join(f"{number} {result}" for result, number in counts.items()))  # noqa: T201
    return int(counts["found" if asked.look else "killed"] < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
