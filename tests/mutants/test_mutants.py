"""Mutants are found in the code: whoever rewrites what keeps a promise carries its mutant over.

`python -m tests.mutants` runs them.
"""

import ast

from .__main__ import ROOT, read_mutants


def test_every_mutant_is_found_once_and_names_tests_that_there_are() -> None:
    mutants = read_mutants()
    assert [each.name for each in mutants if not each.is_found() or each.old == each.new or not each.tests] == []
    for each in mutants:
        ast.parse(each.changed())
    parts = [test.partition("::")[::2] for each in mutants for test in each.tests]
    assert [file for file, _ in parts if not (ROOT / file).is_file()] == []
    names = {(file, f"def {name.partition('[')[0]}") for file, name in parts}
    assert [name for file, name in names if name not in (ROOT / file).read_text("utf-8")] == []
    assert len({each.name for each in mutants}) == len(mutants) <= 60
