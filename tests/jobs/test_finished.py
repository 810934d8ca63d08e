"""The record of a finished job: only the very same output of the very same job is taken for done, and nothing else is written over."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from hf_paged_cache import CacheArgumentError
from hf_paged_cache.jobs.journal import (
    FORMAT,
    Journal,
    Output,
    Record,
    finished_before,
    journal_of,
    note_command,
    note_finished,
    record_of,
    require_same,
)
from hf_paged_cache.jobs.summary import BatchSummary

SUMMARY = BatchSummary(1, 0, 9, 4, 2, 1, 0, 0.5, None)
JOB: dict[str, Any] = {"model": "a" * 64, "option": {"top_k": 3, "ends": (1, 2)}, "order": "given"}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An output that a job has finished."""
    path = tmp_path / "out.jsonl"
    path.write_text('{"completion": "é"}\n', "utf-8")
    note_finished(path, JOB, SUMMARY)
    return path


def test_a_finished_output_is_known_with_what_was_counted(out: Path) -> None:
    record = finished_before(out)
    assert record is not None
    assert record.summary == dataclasses.replace(SUMMARY, num_done_before=1)
    require_same(out, record, JOB)
    assert {path.name for path in out.parent.iterdir()} == {"out.jsonl", "out.jsonl.done"}


def test_a_record_says_by_which_command_an_output_came_once_that_is_noted(out: Path) -> None:
    before = finished_before(out)
    assert before is not None
    assert before.command is None
    note_command(out, {"prompts": "a"})
    assert finished_before(out) == before._replace(command={"prompts": "a"})


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({**JOB, "model": "b" * 64}, "finished, and from another job (other model); give another file"),
        ({**JOB, "option": {"top_k": 4, "ends": (1, 2)}}, "(option top_k was 3 and is 4)"),
        ({**JOB, "order": "done"}, '(order was "given" and is "done")'),
        ({**JOB, "more": 1}, "(more was null and is 1)"),
    ],
)
def test_another_job_is_told_what_is_different(job: dict[str, Any], said: str, out: Path) -> None:
    record = finished_before(out)
    assert record is not None
    with pytest.raises(CacheArgumentError) as refused:
        require_same(out, record, job)
    assert str(refused.value).startswith(f"{out} already exists: finished, and from another job (")
    assert said in str(refused.value)


@pytest.mark.parametrize("changed", [b"", b'{"completion": "e"}\n', b'{"completion": "\xc3\xa9"}\n\n'])
def test_an_output_that_has_changed_since_is_nobodys(changed: bytes, out: Path) -> None:
    out.write_bytes(changed)
    with pytest.raises(
        CacheArgumentError, match="already exists: it was finished, and has changed since; give another file"
    ):
        finished_before(out)
    assert out.read_bytes() == changed


def test_an_output_without_a_record_is_nobodys_and_one_that_is_gone_is_free(out: Path) -> None:
    record = record_of(out).read_bytes()
    record_of(out).unlink()
    with pytest.raises(CacheArgumentError, match="already exists: finished, or from another job; give another file"):
        finished_before(out)
    record_of(out).write_bytes(record)
    out.unlink()
    assert finished_before(out) is None


OF_ANOTHER_FORMAT, OF_OTHER_COUNTS = (
    json.dumps({"job": {"format": number}, "counts": {"batches": 1}, "output": {}}) for number in (0, FORMAT)
)


@pytest.mark.parametrize("text", ["notes of mine\n", "{}", "[1]", OF_ANOTHER_FORMAT, OF_OTHER_COUNTS])
@pytest.mark.parametrize("has_output", [True, False])
def test_what_is_no_record_stays(text: str, has_output: bool, out: Path) -> None:
    record_of(out).write_text(text)
    if not has_output:
        out.unlink()
    with pytest.raises(
        CacheArgumentError, match=r"\.done is no record of a finished job of this version, and would be lost"
    ):
        finished_before(out)
    assert record_of(out).read_text() == text


def test_where_a_job_has_begun_again_its_journal_says_what_is_done(out: Path) -> None:
    out.write_text("half of it\n")
    journal_of(out).write_text("{}\n{}\n")
    assert finished_before(out) is None


@pytest.mark.parametrize("umask", [0o002, 0o022, 0o077])
def test_all_files_of_a_job_follow_the_umask(umask: int, tmp_path: Path) -> None:
    out, before = tmp_path / "out.jsonl", os.umask(umask)
    try:
        with Journal(journal_of(out), {}, 1) as journal, Output(out, journal, [{}], "given") as output:
            journal.add(Record([0], ["a"], {}))
            output.write_on()
            output.finish()
            note_finished(out, {}, SUMMARY)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == dict.fromkeys(["out.jsonl", "out.jsonl.journal", "out.jsonl.done"], 0o666 & ~umask)
    assert json.loads(record_of(out).read_text())["counts"] == dataclasses.asdict(SUMMARY)


@pytest.mark.parametrize("line", [b"", b'{"format": 0}\n', b'{"form'])
def test_an_output_beside_a_journal_in_which_nothing_is_done_is_not_that_jobs_unless_it_is_empty(
    line: bytes, out: Path
) -> None:
    """Ctrl-C before the first batch leaves an empty output; what is in it later somebody else has written."""
    journal_of(out).write_bytes(line)
    record = finished_before(out)
    assert record is not None
    with pytest.raises(CacheArgumentError, match="from another job"):
        require_same(out, record, {**JOB, "more": 1})
    record_of(out).unlink()
    with pytest.raises(CacheArgumentError, match="already exists: finished, or from another job; give another file"):
        finished_before(out)
    out.write_bytes(b"")
    assert finished_before(out) is None
    out.write_bytes(b"{}\n")
    journal_of(out).write_bytes(line.partition(b"\n")[0] + b"\n{")  # torn, so not done
    with pytest.raises(CacheArgumentError, match="already exists: finished, or from another job; give another file"):
        finished_before(out)
    journal_of(out).write_bytes(line.partition(b"\n")[0] + b"\n{}\n")
    assert finished_before(out) is None
