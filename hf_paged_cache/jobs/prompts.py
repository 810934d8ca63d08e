"""Reads the rows of a job from a file or from memory, and the prompt of each as text, as a chat and as token ids.

JSON lines and CSV are read as they were written: no value is taken for a date, a number or nothing. `datasets` reads
Parquet.
"""

from __future__ import annotations

import csv
import json
import math
from array import array
from collections.abc import Iterator, Mapping
from glob import escape
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import CacheArgumentError
from ..wording import brief, counted

Row = Mapping[str, Any]
Prompt = str | list[dict[str, Any]]

_FORM = "give a text, or a chat as a list of messages with a role and a content"


class RowError(CacheArgumentError):
    """Raised for a row, by its number from 0, that a job cannot run with: the arguments are number and problem."""

    def __str__(self) -> str:
        number, problem = self.args
        return f"row {number}, counted from 0: {problem}"


def read_rows(prompts: Any, column: str) -> list[Row]:
    """Return the rows of a file, or of a list of texts, of chats or of rows, such as a `datasets.Dataset`."""
    if isinstance(prompts, str | PathLike):
        rows = _of_file(Path(prompts), may_be_a_prompt=isinstance(prompts, str))
    else:
        kind = type(prompts).__name__
        if isinstance(prompts, Mapping) or not hasattr(prompts, "__iter__") or hasattr(prompts, "columns"):
            how = "of a table, to_dict('records'); of a dataset, one of its splits"
            raise CacheArgumentError(f"prompts is of type {kind}; give a file, or a list of rows ({how})")
        if hasattr(prompts, "with_format"):  # a dataset that gives its rows as tensors, too
            prompts = prompts.with_format(None)
        rows = [each if isinstance(each, Mapping) else {column: each} for each in prompts]
    try:
        for number, row in enumerate(rows):
            prompt_of(row, number, column)
    except RowError as error:
        where = f"{prompts}, " if isinstance(prompts, str | PathLike) else ""
        raise CacheArgumentError(f"{where}{error}") from None
    return rows


def _of_file(path: Path, *, may_be_a_prompt: bool) -> list[Row]:
    if not path.is_file():
        problem = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
        raise CacheArgumentError(f"{problem}{'; prompts themselves are given as a list' * may_be_a_prompt}")
    readers = {".jsonl": _json_lines, ".csv": _csv, ".parquet": _parquet}
    if path.suffix.lower() not in readers:
        raise CacheArgumentError(f"{path} is of no kind of file that is read: give {', '.join(readers)}")
    try:
        rows = [*readers[path.suffix.lower()](path)]
    except CacheArgumentError:
        raise
    except Exception as error:  # datasets and pyarrow have errors of their own
        raise CacheArgumentError(f"{path} cannot be read ({brief(error)})") from error
    if not rows:
        raise CacheArgumentError(f"{path} holds no rows")
    return rows


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for line, text in enumerate(file, 1):
            try:
                if text.strip():
                    yield json.loads(text)
            except (ValueError, RecursionError) as error:
                why = brief(error).partition(": line ")[0]  # JSON's own line is always the first
                raise CacheArgumentError(f"{path}, line {line} is no JSON ({why})") from error


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # for the whole process; the default is less than a long prompt
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        names = reader.fieldnames or ()
        if twice := [name for name in names if names.count(name) > 1]:
            problem = f"{path} has more than one column {twice[0]!r}"
            raise CacheArgumentError(f"{problem}, of which one would be lost: rename it")
        for row in reader:
            if None in row or None in row.values():
                problem = f"{path}, line {reader.line_num} has not as many values as there are columns"
                raise CacheArgumentError(f"{problem}; put quotes round a value that has a comma in it")
            yield row


def _parquet(path: Path) -> Iterator[Row]:
    from datasets import load_dataset

    yield from load_dataset("parquet", data_files=escape(str(path.absolute())), split="train", streaming=True)


def prompt_of(row: Any, number: int, column: str) -> Prompt:
    """Return the text or the chat of a row, without the None with which a table fills up what a message has not."""
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise RowError(number, "it is no object with names and values")
    if column not in row:
        problem = f"it has no column {column!r}; there are {', '.join(map(repr, row)) or 'none'}"
        raise RowError(number, f"{problem}: mend it, or name another (column, --column)")
    value: Any = row[column]
    if isinstance(value, str) and value:
        return value
    if not isinstance(value, list | tuple) or not value:
        problem = f"is of type {type(value).__name__}" if value else "is empty"
        raise RowError(number, f"{column!r} {problem}; {_FORM}")
    for at, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RowError(number, f"message {at} of {column!r} has no role; {_FORM}")
        parts = message["content"] if isinstance(message.get("content"), list) else ()
        if any(isinstance(part, dict) and part.get("type", "text") != "text" for part in parts):
            problem = f"message {at} of {column!r} is not of text alone"
            raise RowError(number, f"{problem}; give such chats to generate itself, with a PagedPrefixCache")
    return [{name: said for name, said in message.items() if said is not None} for message in value]


def tokenized(
    rows: Mapping[int, Row], column: str, tokenizer: Any, config: Any, max_new_tokens: int = 1
) -> list[array[int]]:
    """Return the token ids of each row's prompt: a text gets the tokenizer's special tokens, a chat those of its
    template.

    Prompts for which a model of this config has no embeddings, or no positions with so many new tokens, are refused.
    """
    words = getattr(tokenizer, "tokenizer", tokenizer)
    templates = tokenizer if getattr(tokenizer, "chat_template", None) is not None else words
    config, tokens = config.get_text_config(decoder=True), []
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None or "factor" in (getattr(config, "rope_parameters", None) or {}):
        limit = math.inf  # rotary embeddings are stretched over more
    for number, row in rows.items():
        text = prompt = prompt_of(row, number, column)
        try:
            if not isinstance(prompt, str):
                text = templates.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            str(text).encode()  # not all tokenizers refuse what cannot be encoded
            ids = words(text, add_special_tokens=isinstance(prompt, str))["input_ids"]
        except Exception as error:  # a template is missing, or does not know a role
            raise RowError(number, f"the tokenizer cannot take its {column!r} ({brief(error)})") from error
        if not ids:
            raise RowError(number, f"the tokenizer makes no token of its {column!r}; leave it out")
        if max(ids) >= config.vocab_size:
            raise RowError(number, f"the tokenizer gives token {max(ids)}, and the model has none: they differ")
        if len(ids) + max_new_tokens - 1 > limit:
            lengths = f"{counted(len(ids), 'token')} and {counted(max_new_tokens, 'new token')}"
            advice = "shorten or remove it, or give fewer new tokens (max_new_tokens)"
            raise RowError(number, f"its {lengths} need more than the model's {limit} positions: {advice}")
        tokens.append(array("i", ids))
    return tokens
