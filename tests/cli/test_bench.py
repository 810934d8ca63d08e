"""`hf-paged-cache bench`: on one's own prompts, or on those of the demo."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_paged_cache.cli import bench as module
from hf_paged_cache.cli.commands import app
from hf_paged_cache.cli.demo_model import load_demo_model
from hf_paged_cache.jobs.order import num_shared_tokens

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
    assert "4 of 4 prompts, 2 new tokens at most" in done.stdout
    assert "Same tokens for every prompt: yes." in done.stdout
    shared = len(SHARED) // 16 * 16  # a character is a token
    reused, total = map(int, re.findall(r"Reused (\d+) of (\d+) prompt tokens", done.stdout)[0])
    assert 3 * shared <= reused <= 3 * len(SHARED)  # a part of a block, too, where the row before is still held
    assert total == 4 * len(SHARED) + len("abcdefgh")
    assert f"Of the {total} tokens of all prompts, {3 * shared} (" in done.stdout


def test_when_time_is_over_it_ends_after_two_prompts(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHOTS", module.SHOTS[:1])
    times = iter(range(0, 10_000, 100))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(times))
    done = bench(model_folder, "--seconds", "50")
    assert done.exit_code == 0, done.output
    assert f"2 of {len(module.QUESTIONS)} prompts" in done.stdout


def test_prompts_that_cannot_be_used_are_one_line(model_folder: str, prompt_file: str, tmp_path: Path) -> None:
    done = bench(model_folder, prompt_file)
    assert done.exit_code == 2
    assert "has no column 'prompt'; there are 'text'" in done.stderr
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    assert "holds no rows" in bench(model_folder, str(tmp_path / "empty.jsonl")).stderr
    assert bench(model_folder, str(tmp_path / "none.jsonl")).exit_code == 2
    assert "is a folder; give MODEL first" in bench(prompt_file, str(tmp_path)).stderr


def test_a_prompt_may_be_as_long_as_the_model_has_positions(model_folder: str, tmp_path: Path) -> None:
    model, tokenizer = load_demo_model(model_folder)
    limit = model.config.max_position_embeddings
    text = "What is one and one? " * limit
    while (length := len(tokenizer(text).input_ids)) > limit:
        text = text[: len(text) * limit // length]
    while len(tokenizer(text).input_ids) < limit:
        text += "?"
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": text}))
    done = bench(model_folder, str(tmp_path / "long.jsonl"), "--max-new-tokens", "1")
    assert done.exit_code == 0, done.output


def test_what_is_shared_is_counted_as_a_naive_count_does() -> None:
    prompts = [[1, 2, 3, 4], [9], [1, 2, 3, 5], [1, 2, 7], [1, 2, 3, 4], [9, 9]]
    seen: set[tuple[int, ...]] = set()
    shared = 0
    for prompt in prompts:
        prefixes = [tuple(prompt[:end]) for end in range(1, len(prompt) + 1)]
        shared += max((len(each) for each in prefixes if each in seen), default=0)
        seen.update(prefixes)
    assert num_shared_tokens(prompts, block_size=1) == shared
