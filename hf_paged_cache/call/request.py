"""Describes a forward, and a call, as they are asked for.

Columns are counted from the left, padding included; positions count a row's tokens.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from ..blocks.tokens import TokenIds


class RowInput(NamedTuple):
    """`RowInput` has what one row of a forward brings."""

    token_ids: TokenIds  # the new tokens, without left padding; -1 for embeddings
    pad: int  # columns of left padding of the whole row
    first_position: int  # position of the row's first token; 0 unless somebody numbers tokens otherwise
    root: bytes = b""  # parent of the first block: all that conditions keys and values besides tokens
    salt: bytes = b""  # namespace of the row's blocks
    shift: int | None = 0  # how far images have moved the positions of the text after them; None: not known


class Chunks(NamedTuple):
    """`Chunks` says how `generate` cuts a prompt into forwards.

    They are the same forwards whatever is known, so each gives the same bits.

    Columns: `[0, stop)` whole chunks, kept under a root of their own | `[stop, ..)` the rest of the prompt and what is
    generated, in forwards of other shapes, which are not kept.
    """

    size: int  # columns of a chunk
    stop: int = 0

    def commit_end(self, before: int, num_new_columns: int) -> int:
        """Return the column from which on nothing is committed, where a forward begins at `before`."""
        is_whole = before % self.size == 0 and num_new_columns == self.size
        return self.stop if is_whole else min(before, self.stop)


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """`ForwardRequest` describes a forward as it was called."""

    rows: tuple[RowInput, ...]  # one for each row of the batch
    num_new_columns: int  # columns of the forward's token ids, padding included
    num_logits_needed: int = 1  # last columns that are computed whatever is known; at least 1
    bypass: str | None = None  # why no row may match or be kept; None when they may
    keep_columns: str | None = None  # why no known column may be left out; None when they may
    may_alias: bool = True  # equal rows may be computed once
    max_position: int | None = None  # largest position passed, of padding, too; None where no positions were passed


@dataclass(frozen=True, slots=True)
class CallLimits:
    """`CallLimits` has what `generate` knows of the call that it begins."""

    num_prompt_columns: float = math.inf  # columns of the prompt, padding included; later columns are generated
    max_columns: float = math.inf  # most columns that a row can get
    num_rows: int = 0  # rows of the batch once beams and samples are expanded
    end_of_sequence: frozenset[int] = frozenset()  # token ids that end a row


UNLIMITED = CallLimits()
"""Limits of forwards without `generate`, and of calls whose arguments do not tell any."""


class RequestRead(BaseException):
    """`RequestRead` ends a `generate` that was begun to see what its first forward would ask of the cache."""

    def __init__(self, request: ForwardRequest) -> None:
        super().__init__()
        self.request = request
