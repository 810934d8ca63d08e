"""Decode steps that the host has not caught up with.

Two things of a step may wait until its block is complete. On an accelerator nobody waits for what it was passed: token
ids, what the mask shows and positions stay there, and are read for all such steps in one transfer. And where the view
keeps columns, a step writes keys and values there alone; the pool gets the columns of many steps at once.

columns of the rows: [0, held) in the pool, their token ids known | [held, num_columns) of held steps

`Row.held_from` is the first held token: from there on nothing is committed, matched or gathered. Whoever commits, cuts or
gathers rows, or forks them for others, first lets the host and the pool catch up. Both may be interrupted anywhere, and are
then done again. Beams, which change places at each step, take their columns along in the view, until a block is full.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from weakref import ref

import torch
from torch import Tensor

from ..attention.view import View
from ..errors import CacheArgumentError
from ..kv.slot_mapping import RowLayout
from ..kv.transfers import Transfer, read_together
from ..store.block_store import BlockStore
from .rows import Rows

UNREAD_TOKEN = -(2**63)  # stands in a table for a token id that is not read yet; no vocabulary has it


class PassedStep:
    """What a decode step was passed, one token a row: tensors of the right shapes, whose numbers nobody has seen.

    They are held, not copied, where torch counts writes: a write shows that what is there is no longer what was run.

    Args:
        column: of the tokens.
        token_ids: [R, 1].
        num_shown: [R], nobody else's: how many columns the mask shows; None: no mask was passed.
        positions: [R, 1], or [1, 1] for all rows; None: none were passed.
    """

    __slots__ = ("_num_shown", "_positions", "_token_ids", "_watched", "column")

    def __init__(self, column: int, token_ids: Tensor, num_shown: Tensor | None, positions: Tensor | None) -> None:
        self.column = column
        self._token_ids, self._num_shown, self._positions = token_ids, num_shown, positions
        self._watched: list[tuple[Tensor, int]] = []  # what is held, and how often it had been written then

    @property
    def tensors(self) -> list[Tensor]:
        """All that is to be read of it."""
        given = (self._token_ids, self._num_shown, self._positions)
        return [tensor for tensor in given if tensor is not None]

    @staticmethod
    def may_be_held(token_ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> bool:
        """Whether reading what a step was passed would wait for a device, from which it can be read as well later."""
        if token_ids.is_cpu:
            return False
        device = token_ids.device
        if token_ids.is_floating_point() or (mask is not None and mask.device != device):
            return False
        return positions is None or (positions.device == device and not positions.is_floating_point())

    def hold(self) -> None:
        """Not read now: keep what was passed, and see whether it is written to."""
        self._token_ids = self._kept(self._token_ids)
        if self._positions is not None:
            self._positions = self._kept(self._positions)

    def plain_tokens(self, numbers: Sequence[list[int]], rows: Rows) -> list[int] | None:
        """The token of each row; None where the step was no plain one: tokens hidden, or positions that do not count on.

        Args:
            numbers: of `tensors`.
        """
        shown, positions = self._split(numbers)
        if shown is not None and shown != [self.column + 1 - row.pad for row in rows.distinct]:
            return None
        return numbers[0] if positions is None or count_on(positions, rows, self.column) else None

    def is_as_passed(self) -> bool:
        """Whether nobody has written since into what is held."""
        return all(tensor._version == version for tensor, version in self._watched)

    def why_wrong(self, numbers: Sequence[list[int]], rows: Rows) -> CacheArgumentError | None:
        """The error of a step that ran on what is not there, or where its rows do not stand."""
        shown, positions = self._split(numbers)
        for number, row in enumerate(rows.distinct):
            num_held = self.column - row.pad
            if shown is not None and shown[number] > num_held + 1:
                return CacheArgumentError(
                    f"the attention mask of a decode step showed {shown[number]} columns of row {number}, which has "
                    f"{num_held + 1} tokens: padding has no keys and values; pass the mask of all columns, or "
                    "cache.reset() first"
                )
            is_hidden = shown is not None and shown[number] <= num_held
            position = None if positions is None else positions[number if len(positions) > 1 else 0]
            if position is not None and position < row.first_position + num_held and not is_hidden:
                return CacheArgumentError(
                    f"row {number} resumed at position {position}, but the cache holds its first {num_held} "
                    "tokens: call generate on the model that the cache is attached to, or cache.reset() first"
                )
        return None

    def _kept(self, tensor: Tensor) -> Tensor:
        """The tensor; a copy where it is a part of another, or torch does not count writes."""
        if tensor.is_inference() or tensor._is_view():
            return tensor.clone()
        self._watched.append((tensor, tensor._version))
        return tensor

    def _split(self, numbers: Sequence[list[int]]) -> tuple[list[int] | None, list[int] | None]:
        """What the mask shows of each row, and the position of each, or one for all."""
        shown = None if self._num_shown is None else numbers[1]
        return shown, None if self._positions is None else numbers[-1]


def count_on(positions: list[int], rows: Rows, column: int) -> bool:
    """Whether the tokens of a column have the positions at which their rows resume.

    Args:
        positions: of each row, or one for all.
    """
    for number, row in enumerate(rows.distinct):
        if positions[number if len(positions) > 1 else 0] != row.first_position + column - row.pad:
            return False
    return len(positions) in (1, len(rows.distinct))


class HeldSteps:
    """The held steps of a call's rows.

    The store's lock is held by whoever calls, but for `catch_up`, which waits for the device and takes the lock afterwards.

    Args:
        store: whose pool gets the columns.
        view: which has them.

    Attributes:
        view_from: columns before it are in the pool; those from it on are only in the view, if that keeps columns. None: all are in
            the pool, and a step writes there.
        layouts: gives the rows of a scheduled step, to be gathered: the pool has their confirmed columns from then on.
    """

    def __init__(self, store: BlockStore, view: View) -> None:
        self._store = store
        self._view = view
        self._rows: Rows | None = None  # whose steps these are; of others nothing is held
        self._unread: list[PassedStep] = []  # one a column, up to the last
        self.view_from: int | None = None
        self._may_write_view_alone = False
        held = ref(self)  # weak: the view keeps this while a step runs, and is kept here
        self.layouts: Callable[[], list[RowLayout]] = lambda: [] if (it := held()) is None else it._layouts()

    def begin(self) -> None:
        """A `generate` begins."""
        self._may_write_view_alone = self._view.most_copies > 0

    def hold(self, rows: Rows, passed: Sequence[int] | PassedStep) -> Sequence[int]:
        """Hold what a scheduled step was passed; returns the token of each row, or `UNREAD_TOKEN` in its place."""
        if rows is not self._rows:
            self._rows, self._unread, self.view_from = rows, [], None
        if self._may_write_view_alone and self.view_from is None:
            self.view_from = rows.num_columns
            self._mark(rows)
        if not isinstance(passed, PassedStep):
            return passed
        passed.hold()
        self._unread.append(passed)
        if len(self._unread) == 1:
            self._mark(rows)
        return [UNREAD_TOKEN] * len(rows)

    def must_be_read(self, rows: Rows) -> bool:
        """Whether a row's last block is full, so that the next step would commit it."""
        if not self._unread or self._rows is not rows:
            return False
        return any(row.table.is_full for row in rows.distinct)

    def has_whole_blocks(self, rows: Rows) -> bool:
        """Whether the view alone has all that is before a scheduled step in the blocks that it writes to."""
        start, size = self.view_from, self._store.block_size
        if start is None:
            return False
        return all(start - row.pad <= (row.table.num_tokens - 1) // size * size for row in rows.distinct)

    def may_move_in_view(self, rows: Rows, sources: Sequence[int]) -> bool:
        """Whether the pool need not catch up before rows change places: the view moves all their columns, and no block is full."""
        if self._rows is not rows or self.view_from is None or self._unread or rows.is_aliased:
            return False
        return self._view.would_keep(sources) and not any(row.table.is_full for row in rows.distinct)

    def catch_up(self, rows: Rows, ends: Collection[int], asked: Tensor | None) -> list[int]:
        """`Call.catch_up`; `ends` are the token ids that end a row. The store's lock is free while the device is waited for."""
        steps = self._unread[:] if self._rows is rows else []
        tensors = [tensor for step in steps for tensor in step.tensors]
        if asked is not None:
            tensors.append(asked)
        if not tensors:
            return []
        numbers = read_together(tensors)
        if steps:
            with self._store.lock:
                error = self._learn(rows, steps, numbers, ends)
            if error is not None:
                raise error
        return [] if asked is None else numbers[-1]

    def _learn(
        self, rows: Rows, steps: Sequence[PassedStep], numbers: Sequence[list[int]], ends: Collection[int]
    ) -> CacheArgumentError | None:
        """The host catches up: tables get the tokens of steps that were read.

        What was computed from a step on that was no plain one is never committed.

        Args:
            steps: those that were unread.
            numbers: of the steps' tensors, one after the other.
            ends: token ids that end a row; what follows is never committed.

        Returns:
            the first error of a step.
        """
        if self._rows is not rows or self._unread[: len(steps)] != steps:  # other rows run, or another thread has read
            return None
        error, taken = None, 0
        for step in steps:
            num_tensors = len(step.tensors)
            of_step, taken = numbers[taken : taken + num_tensors], taken + num_tensors
            token_ids = step.plain_tokens(of_step, rows)
            is_plain = token_ids is not None and step.is_as_passed()
            if token_ids is None:
                error = error or step.why_wrong(of_step, rows)
            for row, token_id in zip(rows.distinct, of_step[0], strict=True):
                position = step.column - row.pad
                row.table.replace_token(position, token_id)
                if not is_plain or token_id in ends:
                    row.stop_commits(position + 1 if is_plain else position)
        self._unread = self._unread[len(steps) :]
        self._mark(rows)
        return error

    def flush(self, rows: Rows, *, is_scheduled: bool = False) -> None:
        """The pool catches up: it gets the confirmed columns that are in the view alone.

        Args:
            is_scheduled: a step is, whose layers may keep writing into the view alone.
        """
        if self._rows is not rows:
            return
        start, stop = self.view_from, rows.num_columns
        if is_scheduled and start == stop:  # nothing is owed: asked more than once in a step
            return
        if start is not None and start < stop and rows.distinct:
            # first: a block that a step took may hold what is not offloaded yet
            self._store.make_copies(may_wait=False)
            self._write(rows, start, stop)
        if start is not None:
            self.view_from = stop if is_scheduled else None
        self._mark(rows)

    def flush_scheduled(self) -> None:
        """`flush` while a step is scheduled."""
        if self.view_from is not None and self._rows is not None:
            self.flush(self._rows, is_scheduled=True)

    def _layouts(self) -> list[RowLayout]:
        self.flush_scheduled()
        return [] if self._rows is None else self._rows.layouts()

    def _write(self, rows: Rows, start: int, stop: int) -> None:
        """Write the columns `[start, stop)` from the view to the pool: of each row they lie in one block, its last.

        Rows that have forked, and have not run since, share it: one of them writes.
        """
        pool, size = self._store.pool, self._store.block_size
        of_row = [row.table.block_ids[(start - row.pad) // size] for row in rows.distinct]
        writers, num_holders = {block_id: number for number, block_id in enumerate(of_row)}, Counter(of_row)
        places = []
        for block_id, number in writers.items():
            row = rows.distinct[number]
            places.append(row.table.writable_block(start - row.pad, stop - row.pad, num_holders[block_id]))
        columns, first_offset = self._columns_of(list(writers.values())), places[0][1]
        try:
            if all(offset == first_offset for _, offset in places):
                pool.write_blocks(columns(start, stop), [block_id for block_id, _ in places], first_offset)
                return
            firsts = [block_id * pool.block_size + offset for block_id, offset in places]
            mapping = pool.map_slots([slot for first in firsts for slot in range(first, first + stop - start)])
            for layer_idx, states in columns(start, stop):
                pool.write(layer_idx, states, mapping)
            return
        except torch.OutOfMemoryError:  # while it is handled, it holds what the frames hold that it came through
            pass
        # takes no memory, and nobody else has these columns
        for number, (block_id, offset) in zip(writers.values(), places, strict=True):
            for layer_idx, states in self._view.columns(start, stop):
                one = {name: new[number : number + 1] for name, new in states.items()}
                pool.write_blocks([(layer_idx, one)], [block_id], offset)

    def _columns_of(self, numbers: Sequence[int]) -> Callable[[int, int], Iterator[tuple[int, dict[str, Tensor]]]]:
        """`View.columns` of some of the rows."""
        all_columns = self._view.columns
        if len(numbers) == len(self._rows or ()):
            return all_columns
        transfer = Transfer()
        added = transfer.add(numbers)

        def columns(start: int, stop: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
            for layer_idx, states in all_columns(start, stop):
                yield (
                    layer_idx,
                    {name: new.index_select(0, transfer.on(new.device, added)) for name, new in states.items()},
                )

        return columns

    def take_back(self, rows: Rows) -> None:
        """A scheduled step has died: it is no longer held, and what the view has of those before it is in the pool."""
        if self._rows is rows:
            self._unread = [step for step in self._unread if step.column < rows.num_columns]
            self.flush(rows)

    def drop(self) -> None:
        """The rows end: what is still held of them is never committed."""
        for row in () if self._rows is None else self._rows.distinct:
            if row.held_from is not None:
                row.stop_commits(row.held_from)
        self._rows, self._unread, self.view_from = None, [], None

    def _mark(self, rows: Rows) -> None:
        """Say from which token on each row is held."""
        column = self._unread[0].column if self._unread else None
        if self.view_from is not None:
            column = self.view_from if column is None else min(column, self.view_from)
        for row in rows.distinct:
            row.held_from = None if column is None else column - row.pad
