"""The command `demo`. The real model runs in the tests marked slow."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hf_paged_cache
from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.cli import bench
from hf_paged_cache.cli.commands import app
from hf_paged_cache.cli.demo import QUESTIONS, SHOTS, few_shot_prompt

from ..tiny_models import build

SHORT = ["--questions", "3", "--shots", "2", "--max-new-tokens", "4"]


def run_demo(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["demo", *arguments], env={"COLUMNS": "200"})


def test_the_command_prints_lines_for_every_answer_and_the_totals(model_folder: str) -> None:
    result = run_demo("--model", model_folder, *SHORT)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert sum(line.startswith("DynamicCache ") for line in lines) == 3
    assert sum(line.startswith("PagedPrefixCache ") for line in lines) == 3
    assert [line.strip() for line in lines if "?" in line] == list(QUESTIONS[:3])
    same, more = lines[-2:]
    assert same == "Same tokens for every question: yes."
    assert more == f"More of this model: hf-paged-cache doctor {model_folder}"
    shared, counts = len(few_shot_prompt(2)), [*map(int, re.findall(r" reused (\d+) of ", result.stdout))]
    assert counts[0] == 0  # what warms up is forgotten
    assert min(counts[1:]) >= shared  # the tiny tokenizer makes a token of a character
    first, paged = map(float, re.findall(r"DynamicCache ([\d.]+) s, PagedPrefixCache ([\d.]+) s", result.stdout)[0])
    for side, total in (("DynamicCache", first), ("PagedPrefixCache", paged)):
        each = re.findall(rf"^{side} .* first token (\d+) ms", result.stdout, re.MULTILINE)
        assert total == pytest.approx(sum(map(int, each)) / 1000, abs=0.01)
    assert result.stderr.splitlines()[0] == "loading the model ..."


def test_both_sides_are_warm_before_the_clock_starts(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    honest = bench.perf_counter
    monkeypatch.setattr(bench, "perf_counter", lambda: ended.append(1) or honest())
    result = run_demo("--model", model_folder, "--questions", "1", "--shots", "2", "--max-new-tokens", "1")
    assert result.exit_code == 0, result.output
    assert len(ended) == 2 + 4 * 3  # two calls that nobody times and two that count: begin, first token, end


def test_the_command_exits_with_1_if_a_token_differs(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = bench._answer

    def one_token_off(model: Any, ids: Any, cache: Any, options: Any) -> Any:
        tokens, *seconds = honest(model, ids, cache, options)
        return [*tokens[:-1], tokens[-1] + isinstance(cache, PagedPrefixCache)], *seconds

    monkeypatch.setattr(bench, "_answer", one_token_off)
    result = run_demo("--model", model_folder, *SHORT)
    assert result.exit_code == 1
    assert "NO, 3 of 3 answers differ" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--questions", "0"], "--questions"),
        (["--shots", str(len(SHOTS) + 1)], "--shots"),
        (["--question", "2"], "No such option: --question "),
        (["--model", __file__], f"there is no folder {__file__}\n"),
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
    result = run_demo("--questions", "2")
    assert result.exit_code == 0, result.output
    reused, num_tokens = map(int, re.findall(r" reused (\d+) of (\d+) ", result.stdout)[1])
    assert 950 <= reused < num_tokens <= 1050
    assert "The capital of France is Paris." in result.stdout
