"""Rows of files: as they were written, whatever they look like; and what cannot be read, with its line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from hf_paged_cache import CacheArgumentError
from hf_paged_cache.batch.rows import digest_of, opened, prompt_of

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
    pytest.importorskip("datasets")
    path = tmp_path / folder / "p.csv"
    path.parent.mkdir()
    path.write_text('prompt,id,x\nNA,007,1e5\n"a\nb",2,null\nNone,,\n')
    assert read(path) == [
        {"prompt": "NA", "id": "007", "x": "1e5"},
        {"prompt": "a\nb", "id": "2", "x": "null"},
        {"prompt": "None", "id": "", "x": ""},
    ]


def test_a_parquet_file_keeps_its_types(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": "a", "n": 1, "x": None}, {"prompt": "b", "n": 2, "x": [1.5]}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "p[2].parquet"))
    assert read(tmp_path / "p[2].parquet") == rows


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"prompt": "a"}\n\n{"prompt": \n', "line 3 is no JSON "),
        (b'{"prompt": "a"}\n["b"]\n', "line 2 is no JSON object"),
        ('{"prompt": "é"}'.encode("latin-1"), "line 1 is no JSON "),
        (b"[" * 100_000 + b"\n", "line 1 is no JSON "),
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
        ("text", "^row 7 is no object"),
        ({("a",): 1}, "^row 7 is no object"),
        ({"text": 3}, "^row 7 has no column 'prompt'; there are 'text'"),
        ({"prompt": None}, "^row 7: 'prompt' is empty"),
        ({"prompt": [{"rle": "user", "content": "a"}]}, "^row 7: message 0 of 'prompt' has no role"),
        ({"prompt": 3}, "^row 7: 'prompt' is of type int"),
    ],
)
def test_a_row_without_a_prompt_is_refused_with_its_number(row: Any, said: str) -> None:
    with pytest.raises(CacheArgumentError, match=said):
        prompt_of(row, 7, "prompt")


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


@pytest.mark.parametrize("kind", ["frame", "columns", "number", "None"])
def test_what_holds_no_rows_is_refused(kind: str) -> None:
    import pandas as pd

    given: dict[str, Any] = {"frame": pd.DataFrame({"prompt": ["a"]}), "columns": {"prompt": ["a"]}, "number": 5}
    with pytest.raises(CacheArgumentError, match=r"^prompts is of type "), opened(given.get(kind), "prompt"):
        pass


def test_a_digest_knows_values_and_no_addresses() -> None:
    class Image:
        pass

    assert digest_of([{"x": Image()}]) == digest_of([{"x": Image()}])
    assert digest_of([{"x": 1}]) != digest_of([{"x": 2}])
