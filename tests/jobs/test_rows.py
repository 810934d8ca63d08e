"""Rows of files: as they were written, whatever they look like; and what cannot be read, with its line."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_paged_cache import CacheArgumentError
from hf_paged_cache.jobs.answers import digest_of
from hf_paged_cache.jobs.prompts import read_rows

ODD: list[dict[str, Any]] = [
    {"prompt": "2024-01-01", "n": 1, "at": "2024-01-02T03:04:05+02:00", "nested": {"a": [None, 18446744073709551615]}},
    {"prompt": "null", "n": 2.5, "only_here": True},
    {"prompt": [{"role": "user", "content": "2024-01-01"}], "n": None},
]


def read(path: Path) -> list[Any]:
    return [*read_rows(path, "prompt")]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_json_lines_are_read_as_they_were_written(mark: str, tmp_path: Path) -> None:
    text = "\r\n".join(["", *map(json.dumps, ODD), "  "])
    (tmp_path / "p.jsonl").write_text(mark + text, "utf-8")
    assert read(tmp_path / "p.jsonl") == ODD


def test_values_of_a_csv_stay_texts(tmp_path: Path) -> None:
    long = "x" * 200_000
    text = f'\ufeffprompt,id,x\r\nNA,007,1e5\r\n"a\nb",2,null\r\n\r\n{long},,\r\n'
    (tmp_path / "p.csv").write_bytes(text.encode())
    assert read(tmp_path / "p.csv") == [
        {"prompt": "NA", "id": "007", "x": "1e5"},
        {"prompt": "a\nb", "id": "2", "x": "null"},
        {"prompt": long, "id": "", "x": ""},
    ]


def test_a_parquet_file_has_its_own_types(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": [{"role": "user", "content": f"{n}"}], "n": n, "x": [n / 2, None]} for n in range(3)]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "p.parquet"))
    assert read(tmp_path / "p.parquet") == rows


UNREADABLE: list[tuple[str, str, str]] = [
    ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": \n', "p.jsonl, line 3 is no JSON (JSONDecodeError: Expecting value)"),
    ("p.jsonl", '{"prompt": "a"}\n["b"]\n', "p.jsonl, row 1, counted from 0: it is no object with names and values"),
    ("p.jsonl", '\n{"prompt": "a"}\n{"text": "b"}\n', "p.jsonl, row 1, counted from 0: it has no column 'prompt'"),
    (
        "p.jsonl",
        '{"prompt": [{"content": "a"}]}\n',
        "p.jsonl, row 0, counted from 0: message 0 of 'prompt' has no role",
    ),
    ("p.jsonl", "\n", "p.jsonl holds no rows"),
    ("p.jsonl", "[" * 100_000, "p.jsonl, line 1 is no JSON ("),
    ("p.jsonl", "\udcff", "p.jsonl cannot be read (UnicodeDecodeError"),
    ("p.csv", "prompt\n", "p.csv holds no rows"),
    ("p.csv", "prompt\nHello, world\n", "p.csv, line 2 has not as many values as there are columns; put quotes round"),
    ("p.csv", "prompt,id\na,1\nis\n", "p.csv, line 3 has not as many values"),
    ("p.csv", "prompt,id,id\na,1,2\n", "p.csv has more than one column 'id', of which one would be lost"),
    ("p.csv", 'prompt,id\n"a" b,1\n', "p.csv cannot be read (Error: "),
    ("p.csv", 'prompt,id\n"a\nb",1\n,1\n', "p.csv, row 1, counted from 0: 'prompt' is empty"),
    ("p.parquet", "x", "p.parquet cannot be read ("),
    ("p.txt", "a", "p.txt is of no kind of file that is read: give .jsonl, .csv, .parquet"),
    ("p.jsonl.gz", "a", "p.jsonl.gz is of no kind of file that is read"),
]


@pytest.mark.parametrize(("name", "text", "said"), UNREADABLE)
def test_what_cannot_be_read_is_one_line_with_its_place(name: str, text: str, said: str, tmp_path: Path) -> None:
    if name == "p.parquet":
        pytest.importorskip("datasets")
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CacheArgumentError) as raised:
        read(tmp_path / name)
    assert str(raised.value).startswith(f"{tmp_path}/{said}")
    assert "\n" not in str(raised.value)


def test_json_lines_and_csv_need_no_datasets_and_parquet_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "p.csv").write_text("prompt\na\n")
    assert read(tmp_path / "p.jsonl") == read(tmp_path / "p.csv") == [{"prompt": "a"}]
    (tmp_path / "p.parquet").write_text("x")
    with pytest.raises(CacheArgumentError, match=r"p.parquet cannot be read \(ModuleNotFoundError: .*datasets"):
        read(tmp_path / "p.parquet")


def test_tables_and_splits_are_no_lists_of_rows() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{**row, "nested": None} for row in ODD[:2]])
    assert type(read_rows(table.with_format("numpy"), "prompt")[0]["n"]) is float
    for given in (datasets.DatasetDict(train=table), table.to_pandas(), {"prompt": ["a"]}):
        with pytest.raises(CacheArgumentError, match="give a file, or a list of rows"):
            read_rows(given, "prompt")


def test_the_digest_is_of_all_that_rows_hold() -> None:
    assert digest_of(ODD) == digest_of([dict(row) for row in ODD]) != digest_of([*ODD[:2], {**ODD[2], "n": 0}])
    with pytest.raises(CacheArgumentError, match="row 0, counted from 0: it cannot be written as JSON"):
        digest_of([{"prompt": "a", "x": {("a", "b"): 1}}])
