"""What tests of a call are built from: rows, requests, limits, and a `Bench` that runs a call without a model."""

from __future__ import annotations

import math
import zlib
from array import array
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any
from weakref import ref

import torch

from hf_paged_cache.attention.view import View
from hf_paged_cache.blocks import BlockTable, PrefixCachingBlockAllocator, root_hash
from hf_paged_cache.call.admission import UNLIMITED, CallLimits
from hf_paged_cache.call.call import Call
from hf_paged_cache.call.rows import Row, Rows
from hf_paged_cache.call.running import Bracket
from hf_paged_cache.call.scheduled_forward import ForwardRequest, RowInput, ScheduledForward
from hf_paged_cache.kv.block_pool import BlockPool
from hf_paged_cache.store.block_store import BlockStore

ROOT, OTHER_ROOT = root_hash(b"model"), root_hash(b"another model")
BLOCK_SIZE = 4
LAYERS = (0, 1)

# What a forward brings.


def new_row(tokens: Sequence[int], pad: int = 0, first: int = 0, root: bytes = ROOT) -> RowInput:
    """What one row of a forward brings."""
    return RowInput(array("q", tokens), pad, first, root)


def request(
    *rows: RowInput | Sequence[int], pads: list[int] | None = None, num_new: int | None = None, **options: Any
) -> ForwardRequest:
    """A forward of these rows; token ids alone are a row, with the padding of `pads`.

    Args:
        num_new: columns; without it, those of the first row.
    """
    made = [
        row if isinstance(row, RowInput) else new_row(row, 0 if pads is None else pads[number])
        for number, row in enumerate(rows)
    ]
    return ForwardRequest(tuple(made), len(made[0].token_ids) + made[0].pad if num_new is None else num_new, **options)


def limits(
    max_columns: float = math.inf, num_prompt: int = 4, num_rows: int = 1, end: Sequence[int] = ()
) -> CallLimits:
    """What `generate` knows."""
    return CallLimits(num_prompt, max_columns, num_rows, frozenset(end))


# Rows that have run.


def make_row(
    store: BlockStore | PrefixCachingBlockAllocator, tokens: Sequence[int], pad: int = 0, root: bytes = ROOT
) -> Row:
    """A row whose tokens were scheduled and confirmed."""
    row = Row(BlockTable(store.allocator if isinstance(store, BlockStore) else store, root), pad, root)
    if isinstance(store, BlockStore):
        store.make_room(row.table.num_new_blocks_for_append(len(tokens)))
    row.table.append_tokens(tokens)
    row.num_confirmed = len(tokens)
    row.trust()
    return row


def make_rows(
    store: BlockStore | PrefixCachingBlockAllocator, *rows: Sequence[int], alias: Sequence[int] | None = None
) -> Rows:
    """Rows of one length that were confirmed; those that name the same number in `alias` are equal."""
    distinct = [make_row(store, tokens) for tokens in rows]
    return Rows(distinct, list(range(len(rows)) if alias is None else alias), len(rows[0]))


def commit(*rows: Row) -> None:
    """What the only place that commits makes of these rows."""
    Rows(list(rows), list(range(len(rows))), 0).commit()


def tokens_in_batch(rows: Rows) -> list[list[int]]:
    """The tokens of each row of the batch."""
    return [list(row.table.token_ids) for row in rows.in_batch()]


def put_in_store(store: BlockStore, tokens: Sequence[int], root: bytes = ROOT) -> None:
    """Let the store know the full blocks of these tokens."""
    row = make_row(store, tokens, root=root)
    commit(row)
    row.table.free()


def num_hit(allocator: PrefixCachingBlockAllocator, tokens: Sequence[int]) -> int:
    """Tokens that any other call would find."""
    with BlockTable(allocator, ROOT) as table:
        return table.hold_prefix(tokens)


class Holder:
    """A call that runs nothing, and may keep some previous rows."""

    is_running = False

    def __init__(self, num_previous: int = 0, salt: bytes = b"") -> None:
        self._num_previous, self.salt = num_previous, salt
        self.view = View(BlockPool(4), {}, keeps_copies=False)

    def drop_rows(self) -> None:
        """Nothing to drop."""

    def num_previous_blocks(self) -> int:
        return self._num_previous

    def lose_threads(self, idents: frozenset[int]) -> None:
        """None ran anything."""


class Prepared(Holder):
    """A call that has prepared its rows, and does nothing else."""

    demand = None

    def __init__(
        self,
        store: BlockStore,
        rows: Rows,
        given: CallLimits = UNLIMITED,
        previous: Sequence[Row] = (),
        *,
        keeps_past: bool = False,
    ) -> None:
        super().__init__()
        self.store, self.rows, self.limits, self.keeps_past = store, rows, given, keeps_past
        self.previous = Rows(list(previous), list(range(len(previous))), 0)


# A call.


def value_of(tokens: list[int], layer_idx: int) -> float:
    """Keys and values depend on all tokens so far, as a model's do."""
    return zlib.crc32(repr((tokens, layer_idx)).encode()) % 9973


def in_forward(act: Callable[[], Any]) -> Any:
    """Run something in a frame that counts as a forward of every call."""
    return act()


def is_forward(frame: FrameType) -> bool:
    """Whether that is the frame."""
    return frame.f_code is in_forward.__code__


class Bench:
    """A call, and a stand-in for the model that computes what its scheduled forward says."""

    def __init__(self, store: BlockStore | None = None, *, keeps_copies: bool = True) -> None:
        self.store = BlockStore(BLOCK_SIZE, 100) if store is None else store
        self.call = Call(self.store, View(self.store.pool, {}, keeps_copies=keeps_copies), is_forward)
        self.bracket = Bracket()

    def begin(self, given: CallLimits | None = None, *, keep_rows: bool = False) -> None:
        """A `generate` is entered; it lives as long as this bench."""
        self.call.begin(ref(self.bracket), limits() if given is None else given, keep_rows=keep_rows)

    def schedule(self, *rows: Any, **options: Any) -> ScheduledForward:
        """Prepare and schedule a forward; see `request`."""
        return schedule(self.call, *rows, **options)

    def write(self, forward: ScheduledForward, layers: tuple[int, ...] = LAYERS) -> None:
        """Each layer writes what is scheduled, and reads what the rows' tokens say."""
        for layer_idx in layers:
            rows = self.call.rows.distinct
            new = torch.zeros(len(rows), 1, forward.stop - forward.start, 1)
            full = torch.zeros(len(rows), 1, forward.stop, 1)
            for i, row in enumerate(rows):
                tokens = list(row.table.token_ids)
                for position in range(len(tokens)):
                    column, value = position + row.pad, value_of(tokens[: position + 1], layer_idx)
                    full[i, 0, column] = value
                    if column >= forward.start:
                        new[i, 0, column - forward.start] = value
            with torch.no_grad():
                got = self.call.write(layer_idx, {"key": new, "value": -new})
            for i, row in enumerate(rows):
                assert got["key"][i, 0, row.pad :].equal(full[i, 0, row.pad :])
                assert got["value"][i, 0, row.pad :].equal(-full[i, 0, row.pad :])

    def forward(self, *rows: Any, **options: Any) -> ScheduledForward:
        """A whole forward; see `request`."""
        forward = self.schedule(*rows, **options)
        self.write(forward)
        self.call.confirm()
        return forward

    def step(self, *token_ids: int) -> ScheduledForward:
        """A whole decode step, scheduled as one."""
        self.call.schedule_step(token_ids)
        forward = self.open_forward
        self.write(forward)
        self.call.confirm()
        return forward

    @property
    def open_forward(self) -> ScheduledForward:
        """The one that is scheduled."""
        assert self.call.forward is not None
        return self.call.forward

    def tokens(self) -> list[list[int]]:
        return tokens_in_batch(self.call.rows)

    def num_hit(self, tokens: list[int]) -> int:
        """Tokens that any other call would find."""
        return num_hit(self.store.allocator, tokens)

    def end(self, *, failed: bool = False) -> None:
        """That `generate` is left."""
        self.call.brackets.close(ref(self.bracket))
        self.call.end(failed=failed)


def schedule(call: Call, *rows: Any, **options: Any) -> ScheduledForward:
    """Prepare and schedule a forward; see `request`."""
    given = request(*rows, **options)
    call.prepare(given)
    return call.schedule(given)
