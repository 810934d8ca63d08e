"""Rows of files: as they were written, whatever they look like; and what cannot be read, with its line."""

from __future__ import annotations

import errno
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from hf_paged_cache import CacheArgumentError
from hf_paged_cache.jobs import rows as rows_module
from hf_paged_cache.jobs.rows import RowError, digest_of, opened, prompt_of

ODD: list[dict[str, Any]] = [
    {"prompt": "2024-01-01", "n": 1, "at": "2024-01-02T03:04:05+02:00", "nested": {"a": [None, 18446744073709551615]}},
    {"prompt": "null", "n": 2.5, "only_here": True},
    {"prompt": [{"role": "user", "content": "2024-01-01"}], "n": None},
]


def read(path: Path) -> list[Any]:
    with opened(path, "prompt") as rows:
        return [dict(rows[number]) for number in range(len(rows))]


@pytest.mark.parametrize("name", ["p.jsonl", "p[1].jsonl", "p.json", "p.jsonl.gz", "a::b.jsonl", "p*.json"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_json_is_read_as_it_was_written(name: str, mark: str, tmp_path: Path) -> None:
    (tmp_path / "p1.jsonl").write_text('{"prompt": "of another file"}')
    text = json.dumps(ODD) if name.endswith("json") else "\r\n".join(["", *map(json.dumps, ODD), "  "])
    data = (mark + text).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert read(tmp_path / name) == ODD


@pytest.mark.parametrize("folder", ["plain", "run[1]"])
def test_values_of_a_csv_stay_texts(folder: str, tmp_path: Path) -> None:
    path = tmp_path / folder / "p.csv"
    path.parent.mkdir()
    path.write_text('prompt,id,x\nNA,007,1e5\n"a\nb",2,null\nNone,,\n')
    assert read(path) == [
        {"prompt": "NA", "id": "007", "x": "1e5"},
        {"prompt": "a\nb", "id": "2", "x": "null"},
        {"prompt": "None", "id": "", "x": ""},
    ]


def test_a_csv_is_read_with_what_spreadsheets_leave_in_it(tmp_path: Path) -> None:
    long = "x" * 200_000
    (tmp_path / "p.tsv").write_bytes(f'\ufeffprompt\tid\r\n\r\na "b", c\t1\t\t\r\n{long}\t2\r\n'.encode())
    assert read(tmp_path / "p.tsv") == [{"prompt": 'a "b", c', "id": "1"}, {"prompt": long, "id": "2"}]
    (tmp_path / "p.csv.gz").write_bytes(gzip.compress(b',prompt\n0,a\n1,"b"\n'))
    assert read(tmp_path / "p.csv.gz") == [{"": "0", "prompt": "a"}, {"": "1", "prompt": "b"}]
    (tmp_path / "p.csv").write_text("prompt,id,,\n")
    assert read(tmp_path / "p.csv") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prompt\nHello, world\nBye, world\n", "line 2 has 2 values for 1 column; "),
        ("id,prompt\n1,Hello\n2,Bye, you\n", "line 3 has 3 values for 2 columns; "),
        ('prompt,id\n"a\nb",1\n"what\nis it\n', "line 4 is no CSV "),
        ('prompt,id\n"a" b,1\n', "line 2 is no CSV "),
        ("prompt,id\na,1\nis\n", "line 3 has 1 value for 2 columns; "),
        ("prompt,id,id\n", "has two columns 'id'"),
        ("id;prompt\n1;a\n", "has ';' between its columns; write it with commas"),
    ],
)
def test_a_csv_whose_values_fit_no_columns_is_refused(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "p.csv"
    path.write_text(text)
    with pytest.raises(CacheArgumentError, match=said) as raised:
        read(path)
    assert str(raised.value).startswith(str(path))


@pytest.mark.parametrize("name", ["p.csv", "p.json"])
def test_a_file_in_another_encoding_is_told_so(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes('["prompt", "é"]'.encode("latin-1"))
    with pytest.raises(CacheArgumentError, match=r" is not UTF-8 \(.*\); save it so$"):
        read(tmp_path / name)


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "json"])
def test_a_file_that_is_written_anew_meanwhile_changes_nothing(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"p.{suffix}"
    form = {"jsonl": '{"prompt": "%s"}', "csv": "prompt\n%s\n", "json": '[{"prompt": "%s"}]'}[suffix]
    path.write_text(form % "old")
    with opened(path, "prompt") as rows:
        path.write_text(form % "new")
        assert dict(rows[0]) == {"prompt": "old"}


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": 3}\n', "p.jsonl, line 3: "),
        ("p.csv", 'prompt\n"a\nb"\n""\n', "p.csv, line 4: "),
        ("p.json", '[{"prompt": "a"}, {"prompt": 3}]', "p.json, row 1, counted from 0: "),
    ],
)
def test_an_error_of_a_row_says_where_it_is(name: str, text: str, place: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)

    def look() -> None:
        with opened(tmp_path / name, "prompt") as rows:
            for number, row in enumerate(rows):
                prompt_of(row, number, "prompt")

    with pytest.raises(CacheArgumentError, match=f"{re.escape(place)}'prompt' is"):
        look()


def test_a_parquet_file_keeps_its_types(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "a", "n": 1, "x": None}, {"prompt": "b", "n": 2, "x": [1.5]}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "p[2].parquet"))
    assert read(tmp_path / "p[2].parquet") == rows


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"prompt": "a"}\n\n{"prompt": \n', r"line 3 is no JSON \(.*, at character \d+\)$"),
        (b'{"prompt": "a"}\n{"prompt": "a"\n', r"line 2 is no JSON \(Expecting ',' delimiter, at character 15\)$"),
        (b'{"prompt": "a"}\n["b"]\n', "line 2 is no JSON object"),
        ('{"prompt": "é"}'.encode("latin-1"), "line 1 is no JSON: it is not UTF-8 "),
        (b"[" * 100_000 + b"\n", "line 1 cannot be read "),
        (b"\0\0", "line 1 is no JSON "),
        (b"", " is empty$"),
    ],
)
def test_a_line_that_is_no_row_is_named(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(data)
    with pytest.raises(CacheArgumentError, match=said) as raised:
        read(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("text", "^row 7, counted from 0: it is no object"),
        ({("a",): 1}, "^row 7, counted from 0: it is no object"),
        ({"text": 3}, "^row 7, counted from 0: it has no column 'prompt'; there are 'text'"),
        ({"prompt": None}, "^row 7, counted from 0: 'prompt' is empty"),
        ({"prompt": [{"rle": "user", "content": "a"}]}, "^row 7, counted from 0: message 0 of 'prompt' has no role"),
        ({"prompt": 3}, "^row 7, counted from 0: 'prompt' is of type int"),
        ({"prompt": [1, 2]}, "^row 7, counted from 0: 'prompt' is a list of numbers; give a text"),
    ],
)
def test_a_row_without_a_prompt_is_refused_with_its_number(row: Any, said: str) -> None:
    with pytest.raises(CacheArgumentError, match=said):
        prompt_of(row, 7, "prompt")


def test_a_damaged_parquet_file_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "p.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(CacheArgumentError, match=r"p\.parquet cannot be read as Parquet \(Arrow"):
        read(tmp_path / "p.parquet")
    assert not caplog.records


def test_a_killed_process_leaves_no_copy_of_the_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, copies = tmp_path / "p.jsonl", tmp_path / "copies"
    path.write_text('{"prompt": "a"}')
    copies.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(copies))
    with opened(path, "prompt") as rows:
        assert len(rows) == 1
        assert not [each for each in copies.rglob("*") if each.is_file()]


def table(kind: str) -> Any:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "a", "v": [1, 2]}, {"prompt": "b", "v": [3]}]
    made = datasets.Dataset.from_list(rows)
    return {
        "list": rows,
        "iterator": iter(rows),
        "dataset": made,
        "tensors": made.with_format("torch"),
        "arrow": made.with_format("arrow"),
        "stream": made.to_iterable_dataset(),
    }[kind]


@pytest.mark.parametrize("kind", ["list", "iterator", "dataset", "tensors", "arrow", "stream"])
def test_rows_in_memory_are_plain_whatever_holds_them(kind: str) -> None:
    with opened(table(kind), "prompt") as rows:
        assert [dict(row) for row in rows] == [{"prompt": "a", "v": [1, 2]}, {"prompt": "b", "v": [3]}]


@pytest.mark.parametrize("kind", ["frame", "columns", "number", "None", "splits", "chat"])
def test_what_holds_no_rows_is_refused(kind: str) -> None:
    import pandas as pd

    datasets = pytest.importorskip("datasets")
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list([{"prompt": "a"}])})
    given: dict[str, Any] = {
        "chat": [{"role": "user", "content": "a"}],
        "frame": pd.DataFrame({"prompt": ["a"]}),
        "columns": {"prompt": ["a"]},
        "number": 5,
        "splits": splits,
    }
    with pytest.raises(CacheArgumentError, match=r"^prompts is (of type |one chat)"), opened(given.get(kind), "prompt"):
        pass


def test_a_digest_knows_values_and_no_addresses() -> None:
    class Image:
        pass

    assert digest_of([{"x": Image()}]) == digest_of([{"x": Image()}])
    assert digest_of([{"x": 1}]) != digest_of([{"x": 2}])
    assert digest_of([{"x": {"a", "b", "c"}}]) == digest_of([{"x": ["a", "b", "c"]}])
    with pytest.raises(RowError, match=r"^row 1, counted from 0: it cannot be written as JSON \(keys must be str"):
        digest_of([{"x": 1}, {"x": {(1, 2): 3}}])


@pytest.mark.parametrize(
    ("number", "said"), [(errno.ENOSPC, r"is copied to .*there is no room for it; name another folder by TMPDIR"), (errno.EIO, r"p\.jsonl cannot be read as JSON lines \(OSError")]
)  # fmt: skip
def test_no_room_for_the_copy_is_not_taken_for_a_damaged_file(
    number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(rows_module.pickle, "dump", full)
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(CacheArgumentError, match=said), opened(path, "prompt"):
        pass
