"""The rows of a job: of a file, or what a caller has in memory; and the prompt in each.

Owns what a prompt may be. Refuses, with the number of the row, what is none.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ..errors import CacheArgumentError
from .output import as_json
from .prompt_files import Row, read_rows

Messages = list[dict[str, Any]]
Prompt = str | Messages


@contextmanager
def opened(prompts: Any, column: str) -> Iterator[Sequence[Row]]:
    """The rows of a file, or of what is in memory: a list of texts, of chats or of rows, or a `datasets.Dataset`.

    What `datasets` makes of a table lies in a folder that is removed at the end.

    Raises:
        CacheArgumentError: a file that cannot be read, or nothing that holds rows.
    """
    if isinstance(prompts, str | PathLike):
        with tempfile.TemporaryDirectory(prefix="hf-paged-cache-", ignore_cleanup_errors=True) as folder:
            yield read_rows(Path(fspath(prompts)), Path(folder))
        return
    yield _in_memory(prompts, column)


def _in_memory(prompts: Any, column: str) -> Sequence[Row]:
    kind = type(prompts).__name__
    if isinstance(prompts, Mapping) or (hasattr(prompts, "to_dict") and hasattr(prompts, "columns")):
        raise CacheArgumentError(f"prompts is of type {kind}, a table; give a list of its rows")
    if hasattr(prompts, "with_format"):  # a dataset that gives its rows as tensors, too
        prompts = prompts.with_format(None)
    if hasattr(prompts, "column_names") and hasattr(prompts, "__len__"):
        return prompts  # type: ignore[no-any-return]
    try:
        given = list(prompts)
    except TypeError:
        raise CacheArgumentError(f"prompts is of type {kind}; give a file, or a list of texts, chats or rows") from None
    return [each if isinstance(each, Mapping) else {column: each} for each in given]


def prompt_of(row: Any, number: int, column: str) -> Prompt:
    """The text or the chat of a row, as it was written: a table fills up with None what a message has not.

    Raises:
        CacheArgumentError: neither of them, or empty; or a row that cannot be written with its completion.
    """
    if not isinstance(row, Mapping) or not all(isinstance(name, str) for name in row):
        raise CacheArgumentError(f"row {number} is no object with names and values")
    if column not in row:
        names = ", ".join(map(repr, row)) or "none"
        raise CacheArgumentError(f"row {number} has no column {column!r}; there are {names}: name another (--column)")
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
        wrong = next(
            n for n, each in enumerate(value) if not (isinstance(each, Mapping) and isinstance(each.get("role"), str))
        )
        raise CacheArgumentError(
            f"row {number}: message {wrong} of {column!r} has no role; give a chat as a list of messages with a role and a content"
        )
    is_empty = value is None or (isinstance(value, str | list) and not value)
    what = "is empty" if is_empty else f"is of type {type(value).__name__}"
    raise CacheArgumentError(
        f"row {number}: {column!r} {what}; give a text, or a chat as a list of messages with a role and a content"
    )


def digest_of(rows: Sequence[Row]) -> str:
    """Of all that the rows hold and JSON can say, whatever file they came from: 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(
            json.dumps(dict(row), default=_name_or_value, ensure_ascii=False).encode("utf-8", "surrogatepass")
        )
        digest.update(b"\n")
    return digest.hexdigest()


def _name_or_value(value: Any) -> Any:
    told = as_json(value)
    return type(value).__name__ if isinstance(told, str) and " at 0x" in told else told  # an address is of this process
