"""Describes a forward and a call as they are asked for, and what is remembered of a call.

Columns are counted from the left, padding included; positions count a row's tokens.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol

from ..blocks import HashChain, TokenIds
from ..stats import RowStats
from ..store.block_store import BlockStore
from .shared import Seen


class RowInput(NamedTuple):
    """`RowInput` has what one row of a forward brings."""

    token_ids: TokenIds  # the new tokens, without left padding; -1 for embeddings
    pad: int  # columns of left padding of the whole row
    first_position: int  # position of the row's first token; 0 unless somebody numbers tokens otherwise
    root: bytes = b""  # parent of the first block: all that conditions keys and values besides tokens
    salt: bytes = b""  # namespace of the row's blocks
    shift: int | None = 0  # how far images have moved the positions of the text after them; None: not known
    holds_images: bool = False  # image tokens may be among the tokens


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

    num_prompt_columns: int = 0  # columns of the prompt, padding included; later ones are generated; 0: not known
    max_columns: float = math.inf  # most columns that a row can get
    num_rows: int = 0  # rows of the batch once beams and samples are expanded
    end_of_sequence: frozenset[int] = frozenset()  # token ids that end a row


UNLIMITED = CallLimits()
"""Limits of forwards without `generate`, and of calls whose arguments do not tell any."""


@dataclass(slots=True)
class CallState:
    """`CallState` remembers what is known of a call while it runs."""

    kind: str
    limits: CallLimits = UNLIMITED
    beams: bool = False
    digest: bytes = b""  # of the model, as the call's rows began
    regime: bytes = b""  # rotary frequencies of the prompt, where they depend on length
    adapters: list[str] | None = None  # adapter of each row, if PEFT was given any
    is_in_step: bool = False  # other processes run as many forwards
    resets: tuple[int, int] = (0, 0)  # what `BlockStore.resets_of` gave as the call's rows began
    was_alone: bool = False  # nobody could change the model as the call's rows began
    counts: list[RowStats] = field(default_factory=list)  # of each row of the batch, in forwards that have returned
    pending: list[RowStats] | None = None  # counts of the forward that runs
    chains: dict[bytes, HashChain] = field(default_factory=dict)  # root -> a row's tokens and their hashes
    kv_bytes: int = 0  # of the call's rows, as of its last forward of a prompt
    peak_kv_bytes: int = 0  # most bytes that blocks in use and rows took
    seen: Seen = field(default_factory=Seen)  # how attention read the call's rows, from its first forward on
    captured: object = ""  # how the call's forwards ran, as text
    is_custom: bool = False  # a function of the caller's own runs the forwards
    is_unseen: bool = False  # transformers' `generate` may begin that no bracket has seen
    calls_back: bool = True  # code of the caller, or a forward of the model's own, may change the model in between
    chunked: Any = None  # the call's prompt, where it comes in chunks
    images: Any = None  # images that the first forward is to run, taken from its arguments
    deltas: Any = None  # how far images have moved positions, as modules keep it; None: no module does

    def copy(self) -> "CallState":
        """Return the state of rows that go on beside these."""
        return CallState(
            *(self.kind, self.limits, self.beams, self.digest, self.regime, self.adapters),
            resets=self.resets,
            deltas=self.deltas,
        )


class RequestRead(BaseException):
    """`RequestRead` ends a `generate` that was begun to see what its first forward would ask of the cache."""

    def __init__(self, request: ForwardRequest) -> None:
        super().__init__()
        self.request = request


class RunsForwards(Protocol):
    """`RunsForwards` runs the forwards of rows that lie in an arena; see `CapturedCall`."""

    def forward(self, eager: Callable[..., Any], arguments: Mapping[str, Any]) -> Any: ...

    def close(self) -> None: ...


class RowsCalls(Protocol):
    """`RowsCalls` is what rows ask: it opens them at their first forward, and keeps what they compute."""

    model: Any
    store: BlockStore
    salt: bytes

    def begin(self, model: Any, given: Any, previous: Any) -> Any: ...

    def open(self, rows: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]: ...

    def go_on(self, rows: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]: ...

    def confirm(self, rows: Any, output: Any) -> Any: ...

    def keep(self, rows: Any) -> None: ...

    def keep_full(self, rows: Any) -> None: ...

    def close(self, rows: Any) -> None: ...

    def fork(self, rows: Any, sources: Sequence[int]) -> Any: ...

    def note_bypass(self) -> None: ...

    def refuse(self, model: Any) -> NoReturn: ...

    def require_not_running(self, rows: Any) -> None: ...
