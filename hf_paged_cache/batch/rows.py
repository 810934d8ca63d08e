"""The rows of a job: of a file, or what a caller has in memory; and the prompt in each.

Owns what a prompt may be. Refuses, with the number of the row, what is none.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ..errors import CacheArgumentError
from .json_rows import as_json
from .prompt_files import Lines, Row, read_rows

Messages = list[dict[str, Any]]
Prompt = str | Messages
COMPLETION = "completion"  # the column that a job adds


@contextmanager
def opened(prompts: Any, column: str) -> Iterator[Sequence[Row]]:
    """The rows of a file, or of what is in memory: a list of texts, of chats or of rows, or a `datasets.Dataset`.

    What is made of a table lies in a folder that is removed at the end. A `RowError` inside comes out with the place of its row.

    Raises:
        CacheArgumentError: a file that cannot be read, or nothing that holds rows.
    """
    with ExitStack() as stack:
        if isinstance(prompts, str) and not Path(prompts).exists():
            raise CacheArgumentError(f"there is no file {prompts!r}; prompts themselves are given as a list")
        if isinstance(prompts, str | PathLike):
            folder = tempfile.TemporaryDirectory(prefix="hf-paged-cache-", ignore_cleanup_errors=True)
            rows = read_rows(Path(fspath(prompts)), Path(stack.enter_context(folder)))
        else:
            rows = _in_memory(prompts, column)
        try:
            yield rows
        except RowError as error:
            if not isinstance(prompts, str | PathLike):
                raise
            place = (
                rows.place(error.number)
                if isinstance(rows, Lines)
                else f"{fspath(prompts)}, row {error.number}, counted from 0"
            )
            raise CacheArgumentError(f"{place}: {error.problem}") from error


class RowError(CacheArgumentError):
    """A row that a job cannot run with.

    Args:
        number: of the row, from 0.
        problem: what is wrong, and what to do.
    """

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(f"row {number}, counted from 0: {problem}")
        self.number, self.problem = number, problem


def _in_memory(prompts: Any, column: str) -> Sequence[Row]:
    kind = type(prompts).__name__
    if isinstance(prompts, Mapping) and all(hasattr(each, "column_names") for each in prompts.values()) and prompts:
        raise CacheArgumentError(f"prompts is of type {kind}; give one of its splits: {', '.join(map(repr, prompts))}")
    if isinstance(prompts, Mapping) or (hasattr(prompts, "to_dict") and hasattr(prompts, "columns")):
        how = ", to_dict('records')" if hasattr(prompts, "to_dict") else ""
        raise CacheArgumentError(f"prompts is of type {kind}, a table; give a list of its rows{how}")
    if hasattr(prompts, "with_format"):  # a dataset that gives its rows as tensors, too
        prompts = prompts.with_format(None)
    if hasattr(prompts, "column_names") and hasattr(prompts, "__len__"):
        return prompts  # type: ignore[no-any-return]
    try:
        given = list(prompts)
    except TypeError:
        raise CacheArgumentError(f"prompts is of type {kind}; give a file, or a list of texts, chats or rows") from None
    if given and all(isinstance(each, Mapping) and "role" in each and column not in each for each in given):
        raise CacheArgumentError("prompts is one chat, a list of messages; give a list of chats: [chat]")
    return [each if isinstance(each, Mapping) else {column: each} for each in given]


def prompt_of(row: Any, number: int, column: str) -> Prompt:
    """The text or the chat of a row, as it was written: a table fills up with None what a message has not.

    Raises:
        RowError: neither of them, or empty; or a row that cannot be written with its completion.
    """
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise RowError(number, "it is no object with names and values")
    if column not in row:
        names = ", ".join(map(repr, row)) or "none"
        raise RowError(
            number, f"it has no column {column!r}; there are {names}: mend it, or name another (column, --column)"
        )
    value: Any = row[column]
    if isinstance(value, str) and value:
        return value
    are_messages = (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and value
        and all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in value)
    )
    if are_messages:
        return [{name: said for name, said in message.items() if said is not None} for message in value]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes) and value:
        if all(isinstance(each, int) for each in value):
            raise RowError(number, f"{column!r} is a list of numbers; give a text, and the tokenizer its token ids")
        wrong = next(
            n for n, each in enumerate(value) if not (isinstance(each, Mapping) and isinstance(each.get("role"), str))
        )
        raise RowError(
            number,
            f"message {wrong} of {column!r} has no role; give a chat as a list of messages with a role and a content",
        )
    is_empty = value is None or (isinstance(value, str | list) and not value)
    what = "is empty" if is_empty else f"is of type {type(value).__name__}"
    raise RowError(number, f"{column!r} {what}; give a text, or a chat as a list of messages with a role and a content")


def require_room(rows: Iterable[Mapping[str, Any]]) -> None:
    """Refuse rows that have a column of the completion's name.

    Raises:
        RowError: of the first.
    """
    for number, row in enumerate(rows):
        if COMPLETION in row:
            raise RowError(number, f"it has a column {COMPLETION!r} already, which would be lost: rename it")


def require_prompts(path: Path, column: str, *, with_room: bool = False) -> None:
    """Refuse a file without rows, or with one that has no prompt, before a model is loaded.

    Args:
        with_room: also one with a row that has a completion; see `require_room`.

    Raises:
        CacheArgumentError: naming the first.
    """
    with opened(path, column) as rows:
        if not len(rows):
            raise CacheArgumentError(f"{path} holds no rows")
        for number in range(len(rows)):
            prompt_of(rows[number], number, column)
        if with_room:
            require_room(rows)


def digest_of(rows: Sequence[Row]) -> str:
    """Of all that the rows hold and JSON can say, whatever file they came from: 64 hexadecimal digits.

    Raises:
        RowError: a row that JSON cannot say.
    """
    digest = hashlib.sha256()
    for number, row in enumerate(rows):
        try:
            text = json.dumps(dict(row), default=_name_or_value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RowError(number, f"it cannot be written as JSON ({error}); leave that out") from error
        digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def _name_or_value(value: Any) -> Any:
    told = as_json(value)
    return type(value).__name__ if isinstance(told, str) and " at 0x" in told else told  # an address is of this process
