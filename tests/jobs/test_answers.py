"""The output of a job: interrupted anywhere and begun again it has each row once; what is another job's stays."""

import json
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_paged_cache import CacheArgumentError
from hf_paged_cache.jobs.calls import BatchCalls

from ..tiny_models import CHARACTERS, build, character_tokenizer, tiny
from .test_job import PROMPTS, alone, run


@pytest.fixture
def tokenizer() -> Any:
    return character_tokenizer(CHARACTERS)


def written(path: Path) -> list[dict[str, Any]]:
    """The answers, sorted by their index."""
    return sorted(map(json.loads, path.read_text("utf-8").splitlines()), key=lambda row: row["index"])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


ROWS = [{"id": f"0{number}", "text": prompt, "é": f"a,{number}\n"} for number, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet", "list", "dataset"])
def test_each_row_comes_as_it_was_with_its_index_and_its_completion(
    suffix: str, tokenizer: Any, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    out, path = tmp_path / "out.jsonl", tmp_path / f"p[1].{suffix}"
    model, table = tiny("llama"), datasets.Dataset.from_list(ROWS)
    if suffix in ("jsonl", "csv", "parquet"):
        {"jsonl": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}[suffix](str(path))
    prompts: Any = {"list": ROWS, "dataset": table}.get(suffix, path)
    result = run(model, tokenizer, prompts, column="text", out=out)
    assert result.completions is None
    assert written(out) == [
        {"index": number, **row, "completion": alone(model, tokenizer, row["text"])} for number, row in enumerate(ROWS)
    ]
    assert {each.name for each in tmp_path.iterdir()} <= {path.name, "out.jsonl", "out.jsonl.job.json"}


def test_a_link_to_an_output_stays_when_a_job_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "out.jsonl")
    with pytest.raises(CacheArgumentError, match="positions"):
        run(tiny("llama"), tokenizer, ["x" * 600], out=tmp_path / "link.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["link.jsonl"]


def test_what_json_has_not_is_written_as_it_can_be(tokenizer: Any, tmp_path: Path) -> None:
    odd = [{"prompt": "a", "x": float("nan"), "y": np.arange(2), "z": "\ud800", "w": "é", "p": Path("b")}]
    run(tiny("llama"), tokenizer, odd, out=tmp_path / "out.jsonl")
    assert "é" in (tmp_path / "out.jsonl").read_text("utf-8")
    (row,) = written(tmp_path / "out.jsonl")
    assert (row["x"], row["y"], row["z"], row["p"]) == (None, [0, 1], "\ud800", "b")


def interrupted(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job raises when so many batches are done."""
    answer, done = BatchCalls.answer, 0

    def run_some(self: BatchCalls, *arguments: Any) -> Any:
        nonlocal done
        done += 1
        if done > after:
            raise KeyboardInterrupt
        return answer(self, *arguments)

    monkeypatch.setattr(BatchCalls, "answer", run_some)


@pytest.fixture
def half_done(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The output of a job that was interrupted."""
    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        interrupted(2, patch)
        with pytest.raises(KeyboardInterrupt):
            run(tiny("llama"), tokenizer, out=out, batch_size=4)
    assert 0 < len(written(out)) < len(PROMPTS)
    return out


def rows_that_run(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    ran: list[int] = []
    answer = BatchCalls.answer
    monkeypatch.setattr(BatchCalls, "answer", lambda self, rows, *rest: ran.extend(rows) or answer(self, rows, *rest))
    return ran


@pytest.mark.parametrize("cut", [0, 1, 7])
def test_a_job_goes_on_where_it_was_interrupted_also_in_the_middle_of_a_line(
    cut: int, half_done: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = tiny("llama"), half_done.read_bytes()
    half_done.write_bytes(text[: len(text) - cut])
    done = [json.loads(line)["index"] for line in half_done.read_bytes().split(b"\n")[:-1]]
    ran = rows_that_run(monkeypatch)
    summary = run(model, tokenizer, out=half_done, batch_size=8).summary
    assert sorted(ran + done) == [*range(len(PROMPTS))]
    assert [row["completion"] for row in written(half_done)] == [alone(model, tokenizer, prompt) for prompt in PROMPTS]
    assert (summary.num_prompts, summary.num_done_before) == (len(PROMPTS), len(done))
    assert f"20 prompts, {len(done)} of them done before; " in str(summary)


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 6}, "max_new_tokens: 5 then, 6 now"),
    ({"num_beams": 2}, "num_beams: null then, 2 now"),
    ({"prompts": [*PROMPTS[:-1], "another"]}, "the input has other rows than when this job began.;"),
    ({"model": "other"}, "weights: "),
]


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_the_output_of_another_job_is_refused_by_what_is_different(
    change: dict[str, Any], said: str, half_done: Path, tokenizer: Any
) -> None:
    before, change = contents(half_done.parent), dict(change)
    model = tiny("llama", 1) if change.pop("model", None) else tiny("llama")
    with pytest.raises(CacheArgumentError, match=f"already exists, of another job .{said}"):
        run(model, tokenizer, change.pop("prompts", PROMPTS), out=half_done, **change)
    assert contents(half_done.parent) == before


def test_a_finished_job_that_is_begun_again_runs_nothing_and_overwrite_begins_anew(
    half_done: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tiny("llama"), tokenizer, out=half_done)
    before, ran = contents(half_done.parent), rows_that_run(monkeypatch)
    model = build("llama")  # the same weights
    model.config.architectures, model.config.dtype = ["LlamaForCausalLM"], model.dtype  # as `save_pretrained` does
    summary = run(model, tokenizer, out=half_done).summary
    assert (summary.num_prompts, summary.num_done_before, summary.num_batches, ran) == (20, 20, 0, [])
    assert contents(half_done.parent) == before
    assert run(tiny("llama"), tokenizer, PROMPTS[:3], out=half_done, overwrite=True).summary.num_done_before == 0
    assert [row["prompt"] for row in written(half_done)] == PROMPTS[:3]
    assert run(tiny("llama"), tokenizer, PROMPTS[:3], out=half_done).summary.num_done_before == 3


def test_a_line_that_is_no_answer_is_named_and_a_row_that_was_removed_runs_again(
    half_done: Path, tokenizer: Any
) -> None:
    first, *rest = half_done.read_text("utf-8").splitlines(keepends=True)
    half_done.write_text("".join([*rest, "mine\n"]))
    with pytest.raises(CacheArgumentError, match=f"line {len(rest) + 1} is no answer of a job; remove it, and its row"):
        run(tiny("llama"), tokenizer, out=half_done)
    half_done.write_text("".join(rest))
    assert run(tiny("llama"), tokenizer, out=half_done).summary.num_done_before == len(rest)
    assert json.loads(first) in written(half_done)


@pytest.mark.parametrize("overwrite", [True, False])
def test_of_two_processes_that_write_one_file_one_is_refused_and_each_row_is_there_once(
    overwrite: bool, half_done: Path, tokenizer: Any
) -> None:
    model, before, others = build("llama"), written(half_done), []

    def finish_it(*_: Any) -> None:
        if not others:
            others.append(half_done.read_bytes())
            run(tiny("llama"), tokenizer, out=half_done)

    model.register_forward_pre_hook(finish_it)
    with pytest.raises(CacheArgumentError, match=r"another process is writing .*out\.jsonl; start this job again when"):
        run(model, tokenizer, out=half_done, trust_hooks=True, overwrite=overwrite)
    assert [row["prompt"] for row in written(half_done)] == PROMPTS
    assert [row for row in written(half_done) if row in before] == before


@pytest.mark.parametrize("how", ["itself", "symbolic link", "hard link", "pipe"])
def test_the_prompts_file_and_what_is_no_file_are_no_output(how: str, tokenizer: Any, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    make = {"symbolic link": out.symlink_to, "hard link": out.hardlink_to, "pipe": lambda _: os.mkfifo(out)}
    make.get(how, lambda _: None)(prompts)
    said = "is no regular file" if how == "pipe" else "holds the prompts themselves"
    with pytest.raises(CacheArgumentError, match=said):
        run(tiny("llama"), tokenizer, prompts, out=prompts if how == "itself" else out, overwrite=True)
    assert prompts.read_text() == '{"prompt": "a"}\n'


def test_a_full_disk_is_named_and_the_job_goes_on_afterwards(tokenizer: Any, tmp_path: Path) -> None:
    model, out, before = tiny("llama"), tmp_path / "out.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
        with pytest.raises(OSError, match="File too large"):
            run(model, tokenizer, out=out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not out.read_bytes().endswith(b"\n")  # a part of a line
    run(model, tokenizer, out=out)
    assert [row["completion"] for row in written(out)] == run(model, tokenizer).completions
