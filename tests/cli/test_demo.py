"""The command `demo`. The real model runs in the tests marked slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hf_paged_cache
from hf_paged_cache.cli import comparing
from hf_paged_cache.cli.commands import app
from hf_paged_cache.cli.questions import QUESTIONS, SHOTS, few_shot_prompt

from ..tiny_models import build

SHORT = ["--questions", "3", "--shots", "2", "--max-new-tokens", "4"]


def run_demo(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["demo", *arguments], env={"COLUMNS": "200"})


def test_json_is_all_that_the_command_prints_on_stdout(model_folder: str) -> None:
    done = run_demo("--model", model_folder, "--json", *SHORT)
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["model"] == model_folder
    assert [each["question"] for each in report["questions"]] == list(QUESTIONS[:3])
    assert report["totals"]["same_tokens"] is True
    assert report["questions"][0]["reused_tokens"] == 0  # what warms up is forgotten
    shared = len(few_shot_prompt(2))  # the tiny tokenizer makes a token of a character
    for each in report["questions"][1:]:
        assert shared <= each["reused_tokens"] < each["prompt_tokens"]
    for side in ("dynamic", "paged"):
        for each in report["questions"]:
            assert 0 < each[f"{side}_first_seconds"] <= each[f"{side}_seconds"]
        seconds = [each[f"{side}_first_seconds"] for each in report["questions"]]
        assert report["totals"][f"{side}_first_seconds"] == pytest.approx(sum(seconds))


def test_the_command_prints_lines_for_every_answer_and_the_totals(model_folder: str) -> None:
    result = run_demo("--model", model_folder, *SHORT)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert sum(line.startswith("DynamicCache ") for line in lines) == 3
    assert sum(line.startswith("PagedPrefixCache ") for line in lines) == 3
    assert [line.strip() for line in lines if "?" in line] == list(QUESTIONS[:3])
    assert lines[-1] == "Same tokens for every question: yes."
    assert result.stderr.splitlines()[0] == "loading the model ..."


def test_both_sides_are_warm_before_the_clock_starts(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    honest = comparing.perf_counter
    monkeypatch.setattr(comparing, "perf_counter", lambda: ended.append(1) or honest())
    result = run_demo("--model", model_folder, "--questions", "1", "--shots", "2", "--max-new-tokens", "1", "--json")
    assert result.exit_code == 0, result.output
    assert len(ended) == 4 * 3  # two calls that nobody times and two that count: begin, first token, end


def test_the_command_exits_with_1_if_a_token_differs(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = comparing.compare

    def one_token_off(*args: Any, **options: Any) -> Any:
        return ({**each, "same_tokens": False} for each in honest(*args, **options))

    monkeypatch.setattr("hf_paged_cache.cli.demo.compare", one_token_off)
    result = run_demo("--model", model_folder, *SHORT)
    assert result.exit_code == 1
    assert "NO, 3 of 3 answers differ" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--questions", "0"], "--questions"),
        (["--shots", str(len(SHOTS) + 1)], "--shots"),
        (["--question", "2"], "No such option: --question "),
        (["--model", "./no/such/folder"], "there is no folder ./no/such/folder\n"),
        (["--model", __file__], f"{__file__} is a file; give the folder that it is in\n"),
    ],
)
def test_bad_input_is_named_and_exits_with_2(arguments: list[str], message: str) -> None:
    result = run_demo(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert isinstance(result.exception, SystemExit)


def test_what_the_model_cannot_run_is_refused_before_anything_runs(
    model_folder: str, tmp_path: Path, tiny_tokenizer: Any
) -> None:
    build("bert").save_pretrained(tmp_path)  # 512 positions, and the prompt has more
    tiny_tokenizer.save_pretrained(tmp_path)
    for folder, why in (
        (str(tmp_path), "the model is not supported: BertLMHeadModel"),
        (model_folder, "need more than the model's 2048"),
    ):
        result = run_demo("--model", folder)
        assert (result.exit_code, result.stdout) == (2, "")
        assert why in result.stderr


def test_without_the_extra_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from hf_paged_cache.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": str(Path(hf_paged_cache.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    why = "hf-paged-cache needs typer: install it with its extra, from a clone: pip install '.[demo]'"
    assert done.stderr.strip() == why


@pytest.mark.slow
def test_the_demo_reuses_its_prompt_of_a_thousand_tokens_on_the_real_model(demo_model: Any) -> None:
    result = run_demo("--json", "--questions", "2")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert 950 <= report["questions"][1]["prompt_tokens"] <= 1050
    assert report["questions"][1]["reused_tokens"] >= 950
    assert report["questions"][0]["answer"] == "The capital of France is Paris."
