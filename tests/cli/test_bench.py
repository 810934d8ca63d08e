"""`hf-paged-cache bench`, on prompts of one's own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_paged_cache.cli import bench as module
from hf_paged_cache.cli.commands import app

SHARED = "What is one and one? " * 4


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "--max-new-tokens", "2", *arguments], env={"COLUMNS": "200"})


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    rows = [{"text": f"{SHARED}{end}"} for end in ("a", "bc", "def", "gh")]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def test_own_prompts_are_answered_twice_and_counted(model_folder: str, prompt_file: str) -> None:
    done = bench(model_folder, prompt_file, "--column", "text")
    assert done.exit_code == 0, done.output
    assert "Time to first token, 4 prompts: DynamicCache " in done.stdout
    assert "Same tokens for every prompt: yes." in done.stdout
    shared = len(SHARED) // 16 * 16  # a character is a token
    reused, total = map(int, re.findall(r"Reused (\d+) of (\d+) prompt tokens", done.stdout)[0])
    assert 3 * shared <= reused <= 3 * len(SHARED)  # a part of a block, too, where the row before is still held
    assert total == 4 * len(SHARED) + len("abcdefgh")
    assert f"All 4 prompts: {3 * shared} of {total} prompt tokens (" in done.stdout
    assert done.stdout.endswith("%) can be shared.\n")
    assert "Stopped" not in done.stdout


@pytest.mark.parametrize(("seconds", "number"), [("50", 2), ("2000", 3)])
def test_no_prompt_begins_once_the_time_is_over(
    seconds: str, number: int, model_folder: str, prompt_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(range(0, 100_000, 100))  # of a prompt it is asked nine times
    monkeypatch.setattr(module, "perf_counter", lambda: next(times))
    done = bench(model_folder, prompt_file, "--column", "text", "--seconds", seconds)
    assert done.exit_code == 0, done.output
    assert f"Stopped after {number} of 4 prompts: {seconds} s are over (--seconds).\n" in done.stdout
    assert f"Time to first token, {number} prompts: " in done.stdout
