"""The program that runs mutants, on a package of a few lines; and what its list must have. The mutants themselves are run by hand."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from .program import AREAS, Mutant, failing_without, outcome_of, read_mutants

if TYPE_CHECKING:
    from pathlib import Path

SUMS = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"
TESTS = """
from hf_paged_cache.sums import add, sub

def test_sums():
    assert add(1, 2) == 3

def test_differences():
    assert sub(1, 1) == 0

def test_that_fails():
    assert add(1, 1) == 3
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a package of that name, beside the one that is installed."""
    package = tmp_path / "hf_paged_cache"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sums.py").write_text(SUMS)
    (tmp_path / "test_sums.py").write_text(TESTS)
    return tmp_path


def mutant(**changes: Any) -> Mutant:
    given = {"old": "a + b", "new": "a * b", "killed_by": ("test_sums.py::test_sums",), **changes}
    return Mutant("of-sums", "blocks", "1 and 2 are 3.", "sums.py", **given)


@pytest.mark.parametrize(
    ("changes", "result", "said"),
    [
        ({}, "killed", "test_sums.py::test_sums"),
        ({"new": "b + a"}, "survived", "test_sums.py::test_sums"),
        ({"new": "add(a, b) if [*iter(int, 1)] else 3"}, "timed out", "after 5 seconds"),
        ({"old": "a * b"}, "not found", "the text is 0 times in sums.py, and not once"),
        ({"old": "(a, b)"}, "not found", "the text is 2 times in sums.py, and not once"),
        ({"new": "a +"}, "not run", "pytest ended with "),
        ({"killed_by": ("test_sums.py::test_gone",)}, "not run", "pytest ended with 4"),
        (
            {"killed_by": ("test_sums.py::test_differences", "test_sums.py::test_sums")},
            "killed",
            "test_sums.py::test_sums",
        ),
        (
            {"killed_by": ("test_sums.py::test_differences",), "second": ("test_sums.py::test_sums",)},
            "killed",
            "test_sums.py::test_sums",
        ),
    ],
)
def test_a_mutant_is_applied_to_a_copy_and_killed_where_a_test_fails(
    changes: dict[str, Any], result: str, said: str, root: Path
) -> None:
    outcome = outcome_of(mutant(**changes), root, seconds=5)
    assert outcome.result == result
    assert outcome.said.startswith(said)
    assert (root / "hf_paged_cache" / "sums.py").read_text() == SUMS


def test_a_module_that_is_gone_is_not_found(root: Path) -> None:
    (root / "hf_paged_cache" / "sums.py").unlink()
    assert outcome_of(mutant(), root) == ("not found", "there is no sums.py")


def test_tests_that_fail_without_a_mutant_are_named(root: Path) -> None:
    mutants = [
        mutant(killed_by=("test_sums.py::test_sums", f"test_sums.py::{name}")) for name in ("test_that_fails",) * 2
    ]
    with ThreadPoolExecutor(1) as pool:
        assert failing_without([mutant()], pool, root) == []
        assert failing_without(mutants, pool, root) == ["test_sums.py::test_that_fails"]


def test_each_area_has_at_least_15_mutants_and_each_says_which_promise_it_breaks() -> None:
    mutants = read_mutants()
    counts = Counter(each.area for each in mutants)
    assert min(counts[area] for area in AREAS) >= 15, counts
    assert [each.name for each in mutants if not each.breaks.endswith(".")] == []


@pytest.mark.parametrize("entry", ['area = "other"', 'new = "a + b"', "killed_by = []"])
def test_an_entry_that_cannot_be_is_refused(entry: str, tmp_path: Path) -> None:
    given = {"area": '"blocks"', "new": '"a * b"', "killed_by": '["test_sums.py"]'}
    name, _, value = entry.partition(" = ")
    path = tmp_path / "mutants.toml"
    text = '[[mutant]]\nname = "of-sums"\nbreaks = "1 and 2 are 3."\nmodule = "sums.py"\nold = "a + b"\n'
    path.write_text(text + "".join(f"{key} = {each}\n" for key, each in {**given, name: value}.items()))
    with pytest.raises(ValueError, match="of-sums"):
        read_mutants(path)
