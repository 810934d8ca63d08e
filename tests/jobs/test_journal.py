"""The journal of a job and the output that follows from it: wherever a write was cut off, nothing is lost and nothing is twice."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_paged_cache import CacheArgumentError
from hf_paged_cache.jobs import journal as journal_module
from hf_paged_cache.jobs.journal import Journal, Order, Output, Record, claimed, journal_of

JOB = {"model": "a" * 64, "option": {"top_k": 3}}
ROWS: list[dict[str, Any]] = [{"prompt": f"é{number}", "n": number} for number in range(6)]
RECORDS = [
    Record([4, 1], ["four", "one ü\n"], {"seconds": 1.0}),
    Record([0], ["zero"], {"seconds": 2.0}),
    Record([5, 2, 3], ["five", "two", "three"], {"seconds": 3.0}),
]


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def run(folder: Path, order: Order, records: list[Record]) -> list[int]:
    """Resume with the job until all records are done; returns the rows that were still to be done."""
    missing = []
    with Journal(folder / "journal", JOB, len(ROWS)) as journal, Output(folder / "out", journal, ROWS, order) as output:  # fmt: skip
        for record in records:
            if all(row in journal for row in record.rows):
                continue
            missing += record.rows
            journal.add(record)
            output.write_on()
    return missing


def test_what_is_done_is_found_again(tmp_path: Path) -> None:
    assert run(tmp_path, "given", RECORDS[:2]) == [4, 1, 0]
    assert written(tmp_path / "out") == [
        {"prompt": "é0", "n": 0, "completion": "zero"},
        {"prompt": "é1", "n": 1, "completion": "one ü\n"},
    ]
    assert run(tmp_path, "given", RECORDS) == [5, 2, 3]
    assert [row["completion"] for row in written(tmp_path / "out")] == ["zero", "one ü\n", "two", "three", "four", "five"]  # fmt: skip


@pytest.mark.parametrize("order", ["given", "done"])
def test_a_journal_that_is_cut_off_anywhere_leads_to_the_same_output(order: Order, tmp_path: Path) -> None:
    run(tmp_path, order, RECORDS)
    whole, output = (tmp_path / "journal").read_bytes(), (tmp_path / "out").read_bytes()
    header = whole.index(b"\n") + 1
    before_line_breaks = [end for end in range(header, len(whole)) if whole[end : end + 1] == b"\n"]
    for end in sorted({*range(header, len(whole), 7), *before_line_breaks}):
        (tmp_path / "journal").write_bytes(whole[:end])
        missing = run(tmp_path, order, RECORDS)
        lines_left = whole[:end].count(b"\n") - 1
        assert missing == [row for record in RECORDS[lines_left:] for row in record.rows]
        assert (tmp_path / "out").read_bytes() == output
        assert (tmp_path / "journal").read_bytes() == whole


def test_without_a_path_a_journal_ends_with_its_process_and_reads_the_same(tmp_path: Path) -> None:
    with Journal(None, JOB, len(ROWS)) as journal:
        assert 4 not in journal
        for record in RECORDS:
            journal.add(record)
        assert [*journal.rows] == [4, 1, 0, 5, 2, 3]
        assert [journal.completion(row) for row in range(6)] == ["zero", "one ü\n", "two", "three", "four", "five"]
        assert [*journal.records()] == RECORDS
    assert not [*tmp_path.iterdir()]


def test_a_damaged_line_and_what_follows_it_are_done_again(tmp_path: Path) -> None:
    run(tmp_path, "given", RECORDS)
    lines = (tmp_path / "journal").read_bytes().splitlines(keepends=True)
    lines[2] = b"{" + lines[2][1:].replace(b"]", b"", 1)
    (tmp_path / "journal").write_bytes(b"".join(lines))
    assert run(tmp_path, "given", RECORDS) == [0, 5, 2, 3]


def test_rows_come_as_they_are_done_if_asked_for(tmp_path: Path) -> None:
    run(tmp_path, "done", RECORDS)
    assert [row["n"] for row in written(tmp_path / "out")] == [4, 1, 0, 5, 2, 3]


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ({**JOB, "model": "b" * 64}, "other model"),
        ({**JOB, "option": {"top_k": 4}}, "option top_k was 3 and is 4"),
        ({**JOB, "option": {"top_k": 3, "top_p": 0.5}}, "option top_p was null and is 0.5"),
    ],
)
def test_another_jobs_journal_is_refused_with_what_is_different(job: dict[str, Any], said: str, tmp_path: Path) -> None:
    run(tmp_path, "given", RECORDS[:1])
    before = (tmp_path / "journal").read_bytes()
    with pytest.raises(CacheArgumentError, match=said):
        Journal(tmp_path / "journal", job, len(ROWS))
    assert (tmp_path / "journal").read_bytes() == before
    with Journal(tmp_path / "journal", JOB, len(ROWS)) as journal:
        assert len(journal.rows) == 2


@pytest.mark.parametrize("text", ["notes of mine\n", json.dumps({"format": 2, **JOB})])  # a line without its end
def test_a_file_that_is_no_journal_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "journal").write_text(text)
    with pytest.raises(CacheArgumentError, match="no journal"):
        Journal(tmp_path / "journal", JOB, len(ROWS))
    assert (tmp_path / "journal").read_text() == text


def test_an_output_is_claimed_once_and_leaves_a_lock_only_beside_a_journal(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with claimed(out):
        with pytest.raises(CacheArgumentError, match=f"^another process is working on {out}"), claimed(out):
            pass
        journal = Journal(journal_of(out), JOB, len(ROWS))
    assert {path.name for path in tmp_path.iterdir()} == {"out.journal", "out.journal.lock"}
    with claimed(out):
        journal.remove()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("anew", [True, False])
def test_only_a_journal_in_which_nothing_is_done_makes_room_for_another_job(anew: bool, tmp_path: Path) -> None:
    Journal(tmp_path / "journal", {"model": "b" * 64}, 3)
    with Journal(tmp_path / "journal", JOB, len(ROWS)) as journal:
        journal.add(RECORDS[0])
    with Journal(tmp_path / "journal", JOB, len(ROWS), anew=anew) as journal:
        assert len(journal.rows) == (0 if anew else 2)


DAMAGED = [
    {"rows": [99], "completions": ["a"], "counts": {}},
    {"rows": [-1], "completions": ["a"], "counts": {}},
    {"rows": ["1"], "completions": ["a"], "counts": {}},
    {"rows": [1, 2], "completions": ["a"], "counts": {}},
    {"rows": [1], "completions": None, "counts": {}},
    {"rows": [1], "completions": ["a"], "counts": {"seconds": "long"}},
    {"rows": [1], "completions": ["a"]},
    [1],
    "[" * 100_000,
]


@pytest.mark.parametrize("record", DAMAGED, ids=range(len(DAMAGED)))
def test_a_record_that_cannot_be_is_done_again(record: object, tmp_path: Path) -> None:
    run(tmp_path, "given", RECORDS[:1])
    with (tmp_path / "journal").open("a") as file:
        file.write((record if isinstance(record, str) else json.dumps(record)) + "\n")
    with Journal(tmp_path / "journal", JOB, len(ROWS)) as journal:
        assert [each.rows for each in journal.records()] == [[4, 1]]


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (float("nan"), '{"x": null, "completion": "c"}'),
        ([1.5, {"y": float("inf")}], '{"x": [1.5, {"y": null}], "completion": "c"}'),
        ("\ud800 é", '{"x": "\\ud800 \\u00e9", "completion": "c"}'),
        ("é\u2028", '{"x": "é\u2028", "completion": "c"}'),
        (np.arange(3), '{"x": [0, 1, 2], "completion": "c"}'),
        (datetime(2024, 1, 2, tzinfo=UTC), '{"x": "2024-01-02T00:00:00+00:00", "completion": "c"}'),
    ],
)
def test_a_row_is_written_as_json_can_say_it(value: object, line: str, tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", JOB, 1) as journal, Output(tmp_path / "out", journal, [{"x": value}], "done") as output:  # fmt: skip
        journal.add(Record([0], ["c"], {}))
        output.write_on()
    assert (tmp_path / "out").read_text("utf-8") == line + "\n"


def test_a_full_disk_is_said_with_the_file_where_the_job_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal_module, "_sync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*j'"):
        Journal(tmp_path / "j", {}, 1)
