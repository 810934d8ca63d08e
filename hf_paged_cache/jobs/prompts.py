"""Reads the rows of a job from a file or from memory, and the prompt of each as text, as a chat and as token ids.

JSON lines and CSV are read as they were written: no value is taken for a date, a number or nothing. `datasets` reads
Parquet.
"""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from ..blocks.arguments import int_of_at_least
from ..errors import CacheArgumentError
from ..wording import counted
from .order import num_shared_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Row = Mapping[str, Any]
Prompt = str | list[dict[str, Any]]

_FORM = "give a text, or a chat as a list of messages with a role and a content"
_NO_TEXT = ("image", "image_url", "video", "video_url", "audio")  # kinds of parts of a message


class RowError(CacheArgumentError):
    """Raised for a row, by its number from 0, that a job cannot run with: the arguments are number and problem."""

    def __str__(self) -> str:
        number, problem = self.args
        return f"row {number}, counted from 0: {problem}"


def read_rows(prompts: Any, column: str) -> Sequence[Row]:
    """Return the rows, each with a prompt, of a file or of a list of texts, of chats or of rows, such as a
    `datasets.Dataset`.
    """
    rows = _of_file(prompts) if isinstance(prompts, str | PathLike) else _in_memory(prompts, column)
    for number, row in enumerate(rows):
        prompt_of(row, number, column)
    return rows


def _of_file(prompts: str | PathLike[str]) -> list[Row]:
    path, readers = Path(prompts), {".jsonl": _json_lines, ".csv": _csv, ".parquet": _parquet}
    if path.is_dir():
        raise CacheArgumentError(f"{path} is a folder; give a file")
    if not path.is_file():
        hint = "; prompts themselves are given as a list" if isinstance(prompts, str) else ""
        raise CacheArgumentError(f"there is no file {path}{hint}")
    if path.suffix.lower() not in readers:
        raise CacheArgumentError(f"{path} is of no kind of file that is read: give {', '.join(readers)}")
    try:
        rows = [*readers[path.suffix.lower()](path)]
    except CacheArgumentError:
        raise
    except Exception as error:  # datasets and pyarrow have errors of their own
        said = shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
        raise CacheArgumentError(f"{path} cannot be read ({said})") from error
    if not rows:
        raise CacheArgumentError(f"{path} holds no rows")
    return rows


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for line, text in enumerate(file, 1):
            if not text.strip():
                continue
            try:
                row = json.loads(text)
            except (ValueError, RecursionError) as error:
                said = getattr(error, "msg", error)
                raise CacheArgumentError(f"{path}, line {line} is no JSON ({said})") from error
            if not isinstance(row, dict):
                raise CacheArgumentError(f'{path}, line {line} is no JSON object, such as {{"prompt": "..."}}')
            yield row


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)  # for the whole process; the default is less than a long prompt
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        names = reader.fieldnames or ()
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise CacheArgumentError(
                f"{path} has more than one column {twice[0]!r}, of which one would be lost: rename it"
            )
        for row in reader:
            if None in row or None in row.values():
                problem = f"{path}, line {reader.line_num} has not as many values as there are columns"
                raise CacheArgumentError(f"{problem}; put quotes round a value that has a comma in it")
            yield row


def _parquet(path: Path) -> Iterator[Row]:
    if find_spec("datasets") is None:
        raise CacheArgumentError("reading Parquet needs datasets: pip install datasets, or '.[batch]'")
    from datasets import load_dataset

    yield from load_dataset("parquet", data_files=escape(str(path.absolute())), split="train", streaming=True)


def _in_memory(prompts: Any, column: str) -> Sequence[Row]:
    kind = type(prompts).__name__
    if isinstance(prompts, Mapping) or hasattr(prompts, "columns"):
        how = "of a table, to_dict('records'); of a dataset, one of its splits"
        raise CacheArgumentError(f"prompts is of type {kind}; give a list of rows ({how})")
    if hasattr(prompts, "with_format"):  # a dataset that gives its rows as tensors, too
        prompts = prompts.with_format(None)
    if hasattr(prompts, "column_names") and hasattr(prompts, "__len__"):
        return prompts  # type: ignore[no-any-return]
    try:
        return [each if isinstance(each, Mapping) else {column: each} for each in prompts]
    except TypeError:
        raise CacheArgumentError(f"prompts is of type {kind}; give a file, or a list of texts, chats or rows") from None


def prompt_of(row: Any, number: int, column: str) -> Prompt:
    """Return the text or the chat of a row, as it was written.

    A table fills up with None what a message does not have.
    """
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
        if any(isinstance(part, dict) and part.get("type") in _NO_TEXT for part in parts):
            problem = f"message {at} of {column!r} is not of text alone"
            raise RowError(number, f"{problem}; give such chats to generate itself, with a PagedPrefixCache")
    return [{name: said for name, said in message.items() if said is not None} for message in value]


@dataclass(frozen=True, slots=True)
class Prompts:
    """`Prompts` holds prompts as token ids, in the order given.

    Attributes:
        token_ids: token ids of each prompt, special tokens included.
        num_tokens: number of tokens of all prompts.
        num_shared_tokens: number of these tokens that another prompt begins with, too, in whole blocks. A cache with
            room for all prompts reuses as many.

    Examples:
        >>> prompts = read_prompts(["What is one and one?"] * 2, tokenizer, block_size=4)
        >>> len(prompts.token_ids), prompts.num_shared_tokens <= prompts.num_tokens
        (2, True)
    """

    token_ids: list[array[int]]
    num_tokens: int
    num_shared_tokens: int


def read_prompts(
    prompts: str | PathLike[str] | Iterable[str | list[dict[str, Any]] | Row],
    tokenizer: Any,
    *,
    column: str = "prompt",
    block_size: int = 16,
    model: PreTrainedModel | None = None,
    max_new_tokens: int = 1,
) -> Prompts:
    """Read prompts and count what they share, before anything runs. See `generate_all` for what is read.

    Args:
        block_size: tokens of a block; blocks are shared whole.
        model: refuse prompts for which this model has no positions, with `max_new_tokens` after them, or no embeddings;
            None: do not look.

    Raises:
        CacheArgumentError: there are no prompts, or one cannot be used; the error names its row.

    Examples:
        >>> shared = "Question: What is one and one?\\nAnswer: Two.\\n"
        >>> found = read_prompts([shared + "What is ice?", shared + "What is snow?"], tokenizer, model=model)
        >>> len(found.token_ids), found.num_tokens, found.num_shared_tokens
        (2, 113, 48)
    """
    int_of_at_least("block_size", block_size, 1, "tokens of a block")
    rows = dict(enumerate(read_rows(prompts, column)))
    if not rows:
        raise CacheArgumentError("there are no prompts")
    token_ids = list(tokenized(rows, column, tokenizer))
    if model is not None:
        require_positions(model.config, dict(enumerate(token_ids)), max_new_tokens)
    return Prompts(token_ids, sum(map(len, token_ids)), num_shared_tokens(token_ids, block_size=block_size))


def tokenized(rows: Mapping[int, Row], column: str, tokenizer: Any) -> Iterator[array[int]]:
    """Yield the token ids of each row's prompt: a text gets the tokenizer's special tokens, a chat those of its
    template.
    """
    words = getattr(tokenizer, "tokenizer", tokenizer)
    templates = tokenizer if getattr(tokenizer, "chat_template", None) is not None else words
    for number, row in rows.items():
        text = prompt = prompt_of(row, number, column)
        try:
            if not isinstance(prompt, str):
                text = templates.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            str(text).encode()  # not all tokenizers refuse what cannot be encoded
            ids = words(text, add_special_tokens=isinstance(prompt, str))["input_ids"]
        except Exception as error:  # a template is missing, or does not know a role
            said = shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
            raise RowError(number, f"the tokenizer cannot take its {column!r} ({said})") from error
        if not ids:
            raise RowError(number, f"the tokenizer makes no token of its {column!r}; leave it out")
        yield array("i", ids)


def require_positions(config: Any, tokens: Mapping[int, Sequence[int]], max_new_tokens: int) -> None:
    """Refuse prompts with tokens or lengths for which a model of this config has no embedding or position."""
    config = config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if "factor" in (getattr(config, "rope_parameters", None) or {}):
        limit = None  # rotary embeddings are stretched over more
    for number, each in tokens.items():
        if max(each) >= config.vocab_size:
            problem = f"the tokenizer gives token {max(each)}, and the model has none"
            raise CacheArgumentError(f"{problem}: the two do not belong together")
        if limit is not None and len(each) + max_new_tokens - 1 > limit:
            lengths = f"{counted(len(each), 'token')} and {counted(max_new_tokens, 'new token')}"
            advice = "shorten or remove it, or give fewer new tokens (max_new_tokens)"
            raise RowError(number, f"its {lengths} need more than the model's {limit} positions: {advice}")
