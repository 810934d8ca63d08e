"""What is said at the end, and written for programs."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from hf_paged_cache.programs.options import RunOptions
from hf_paged_cache.programs.summary import ModelRun, report
from hf_paged_cache.store.call_totals import CallTotals


@pytest.fixture(autouse=True)
def _without_a_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lm_eval", "hf_paged_cache.lm_eval"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def model_run() -> ModelRun:
    totals = CallTotals()
    totals.record(1_000, 300, 600, num_calls=2)
    reasons = [
        ("no cached block continues with tokens 16 to 31", 100),
        ("no cached block continues with tokens 16 to 47", 190),
    ]
    reasons += [("a {1}; b", 6), ("c", 3), ("d", 1), ("e", 0)]
    totals.record_reasons(reasons)
    return ModelRun("Model (folder)", without=Counter({"use_cache is False": 2}), accounts=[totals])


def test_the_lines_have_counts_and_the_three_most_frequent_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    report(RunOptions({}, None, False, os.getpid()), [model_run()], ["say this"])
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "hf-paged-cache run: " + line
        for line in (
            "Model (folder): 2 calls, 1,000 prompt tokens: 600 reused, 100 computed once for several rows, 300 computed",
            "  290 tokens computed: no cached block continues with tokens 16 to 31-47",
            "  6 tokens computed: a {1}",
            "  3 tokens computed: c",
            "Model (folder): 2 calls without the cache: use_cache is False",
            "say this",
        )
    ]


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_harness_that_runs_the_model_of_its_own_hears_of_the_other(
    is_ours: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", ModuleType("lm_eval"))
    if is_ours:
        monkeypatch.setitem(sys.modules, "hf_paged_cache.lm_eval", ModuleType("lm_eval"))
    for models in ([], [model_run()]):  # where it only scores, no model has generated
        report(RunOptions({}, None, False, 0), models, [])
        assert ("--model hf-paged in place of hf" in capsys.readouterr().err) == (not is_ours)


def test_each_process_adds_a_line_of_json_and_says_nothing_when_it_is_quiet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stats.jsonl"
    for _ in range(2):
        report(RunOptions({}, str(file), True, 0), [model_run()], [])
    report(RunOptions({}, str(file), True, 0), [], [])  # a child without a call
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert [line["models"][0]["reused_tokens"] for line in lines] == [600, 600]
    assert capsys.readouterr() == ("", "")
