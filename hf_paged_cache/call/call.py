"""One running call: its state, and which event may come when.

    idle -> scheduled -> confirmed -> scheduled ... -> ended -> idle, or scheduled again where the rows go on
    scheduled -> rolled back to idle or confirmed

A *scheduled forward* is the only one whose writes are let through, and only what was confirmed is ever committed: when
the next forward is scheduled, so that a draft that `crop` takes back never was, when rows fork, or when the call ends.
Torch tensors pass through here to pool and reader, unread.
"""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import FrameType
from weakref import ref

import torch
from torch import Tensor

from ..attention.base import Reader
from ..errors import CacheArgumentError, CacheBusyError, ForwardMismatchError
from ..kv.transfers import Transfer
from ..store.block_store import BlockStore
from .admission import (
    UNLIMITED,
    CallLimits,
    Demand,
    admit,
    demand_of,
    num_blocks_held_only_by,
    renew_reservation,
    windows_of_shared,
)
from .counters import PromptCounters
from .held_steps import HeldSteps, PassedStep
from .layer_writes import LayerWrites
from .prefix_match import hold_longer
from .prepare import begin_rows, continue_rows, hold_windows, map_slots, reserve_forward, take_blocks, take_step
from .rows import Row, Rows, gather_rows
from .running import Bracket, Brackets, is_on_a_stack
from .schedule import first_column
from .scheduled_forward import ForwardRequest, ScheduledForward


class CallState(Enum):
    """Where a call stands; the value completes "the call ..."."""

    IDLE = "has no rows"
    SCHEDULED = "has scheduled a forward"
    CONFIRMED = "has rows and waits for a forward"
    ENDED = "has ended and keeps its rows"


class _Reservation:
    """Of a `generate` that nobody has ended."""

    def __init__(self, call: "Call") -> None:
        self._call = call

    def end(self) -> None:
        """Give it back, unless another one has begun since."""
        if not self._call.brackets:
            self._call.store.give_back_reservation(self._call)


class Call:
    """The rows that one cache runs, from their first forward to the end.

    Args:
        store: where their blocks are.
        reader: what attention reads of them.
        is_forward: whether a frame on a thread's stack is of a forward on this call.
    """

    def __init__(
        self, store: BlockStore, reader: Reader, is_forward: Callable[[FrameType], bool], salt: bytes = b""
    ) -> None:
        self.store = store
        self.salt = salt  # namespace of the rows' blocks
        self.reader = reader
        self.state = CallState.IDLE
        self.forward: ScheduledForward | None = None
        self.limits: CallLimits = UNLIMITED  # of the `generate` that runs
        self.rows = Rows([], [], 0)
        self.previous = Rows([], [], 0)  # of the call before, matched by the next one
        self.counters = PromptCounters(store.call_totals)
        self.num_scheduled = 0  # forwards since `begin`
        self.peak_kv_bytes = 0
        self.brackets = Brackets()
        self.keeps_past = False  # drafts will be verified, and taken back by `crop`
        self.kept_by: Callable[[], object | None] = lambda: None  # who needs the rows between two of their forwards
        self._writes = LayerWrites(store, reader)
        self._held = HeldSteps(store, reader)
        self._is_forward = is_forward
        self._thread = 0  # that began or went on with the rows, but for decode steps
        self._is_first = False  # the scheduled forward is the first of its rows
        self._may_step = False  # rows go on under the conditions that they have run under
        self._must_commit = False  # the last forward had several columns, and may have filled blocks
        self._demand: Demand | None = None  # of rows that begin, as long as nothing has changed
        self._num_columns_before = 0  # columns before the last confirmed forward
        store.add_holder(self)

    @property
    def num_columns(self) -> int:
        """Columns of the rows: those before the scheduled forward's, or all confirmed ones."""
        if self.forward is None:
            return self.rows.num_columns
        return max(self.rows.num_columns, self.forward.start)  # more than `start` only where `confirm` was interrupted

    @property
    def is_running(self) -> bool:
        """Whether a `generate` is running, a forward in any thread, or rows may go on: of plain forwards, or kept ones."""
        goes_on = self.state is CallState.CONFIRMED and bool(self.rows.alias) and not self.brackets.were_left_open
        return goes_on or self.kept_by() is not None or self.is_in_use

    @property
    def is_in_use(self) -> bool:
        """Whether a `generate` is running, or a forward in any thread."""
        return bool(self.brackets) or is_on_a_stack(self._is_forward)

    def begin(self, bracket: ref[Bracket], limits: CallLimits, *, keep_rows: bool) -> None:
        """`generate` is entered: the rows so far become previous rows, unless only new tokens are passed.

        Args:
            bracket: gone as soon as that `generate` is left, however; then the call is no longer running.
        """
        with self.store.lock:
            self.roll_back()
            self._held.flush(self.rows)
            self._judge(conditions_held=False)  # what a `generate` left whose end was interrupted
            if not keep_rows:
                self._end_rows()
            self.brackets.open(bracket)
            self.limits = limits
            self.store.give_back_reservation(self)
            self.num_scheduled = 0
            self.keeps_past = self._may_step = False
            self._held.begin()
            self._num_columns_before = self.rows.num_columns
            self.counters.start_call()
            self.peak_kv_bytes = 0

    def prepare(self, request: ForwardRequest) -> None:
        """A forward is about to run: rows begin or go on, and hold what is known of them. `schedule` comes next.

        Raises:
            CacheBusyError: a forward of this call is running in another thread.
            CacheArgumentError: the request has other rows than the call, or no column.
        """
        store = self.store
        with store.lock:
            self.roll_back()
            if request.num_new_columns < 1:
                raise CacheArgumentError(
                    f"a forward of no tokens, on a cache with {self.num_columns} columns: pass at least one token id in each "
                    "row; a generate that is not the attached one needs cache.reset() first"
                )
            store.settle()
            store.give_back()
            if not self.brackets:
                self.brackets.forget_closed()
                self._judge(conditions_held=False)
                self.limits = UNLIMITED
                store.give_back_reservation(self)
            self._held.flush(self.rows)
            self.rows.commit()
            self._is_first = not self.rows.alias
            self._thread = threading.get_ident()
            self.state = CallState.SCHEDULED
            try:
                self._demand = None
                if self._is_first:
                    self._begin_rows(request)
                elif (sources := continue_rows(store, request, self.rows)) is not None:
                    self.reader.expand_rows(sources)
                    self._writes.gradients.select_rows(sources)
            except BaseException:
                self.roll_back()
                raise

    def admit(self, request: ForwardRequest, computed_ahead: Mapping[int, int] | None = None) -> None:
        """Reserve, ahead of `schedule`, what the prepared forward or its call may take, so that it is not refused there.

        `release` gives the reservation back, and so does `roll_back` where the call's rows begin.

        Raises:
            OutOfBlocksError: the call does not fit.
            CacheBusyError: the cache was reset since it was prepared.
        """
        with self.store.lock:
            self._require_prepared()
            if computed_ahead:
                self._hold_longer(request)
            if not self.limits.are_known:
                reserve_forward(self.store, self, self.rows, request)
            elif self.num_scheduled == 0:
                self._admit(self.rows.num_columns + request.num_new_columns)

    def release(self) -> None:
        """Give back what was reserved by `admit`."""
        with self.store.lock:
            self.store.give_back_reservation(self)

    def schedule(
        self,
        request: ForwardRequest,
        computed_ahead: Mapping[int, int] | None = None,
        *,
        latest_start: float = math.inf,
    ) -> ScheduledForward:
        """Take the blocks of the forward that was prepared, and say what may be written.

        Args:
            computed_ahead: row of the batch -> tokens computed for it, alone, since it was prepared.
            latest_start: columns from here on are computed, whatever is known; rows go on where they stand all the same.
        Raises:
            OutOfBlocksError: the call does not fit; running rows are as before.
        """
        with self.store.lock:
            self._require_prepared()
            try:
                return self._schedule(request, computed_ahead or {}, latest_start)
            except BaseException:
                self.roll_back()
                raise

    @property
    def may_step(self) -> bool:
        """Whether `schedule_step` may be asked: inside `generate`, after the prompt, each row for itself."""
        rows = self.rows
        return (
            self._may_step
            and not rows.is_aliased
            and rows.num_columns >= self.limits.num_prompt_columns
            and bool(self.brackets)
        )

    def schedule_step(self, passed: Sequence[int] | PassedStep) -> None:
        """`prepare` and `schedule` where each row only goes on, by one token: it runs for every token.

        Args:
            passed: a token for each row; or what holds them, to be read when a block is complete.
        Raises:
            CacheArgumentError: see `catch_up`.
        """
        if self._held.must_be_read(self.rows):
            self.catch_up()
        with self.store.lock:
            self.store.settle()
            rows, before, num_rows = self.rows, self.rows.num_columns, len(self.rows)
            if self._must_commit:
                rows.commit()
                self._must_commit = False
            self._is_first = False
            self._writes.start()
            self.state = CallState.SCHEDULED
            try:
                self.store.pool.join_streams()
                token_ids = self._held.hold(rows, passed)
                transfer = None if num_rows == 1 or self._held.are_in_view_alone else Transfer()
                num_taken, slot_mapping = take_step(
                    self.store, self, rows, token_ids, self.limits, self._flush, transfer
                )
                self.reader.start_forward(rows.layouts, num_rows, before, before + 1, transfer)
                if num_taken:
                    renew_reservation(self.store, self, rows, self.limits, before + 1)
                    self.store.make_copies(transfer)  # last: with their ids goes all that the step needs
                self.forward = ScheduledForward(
                    before, before + 1, tuple(range(num_rows)), None, slot_mapping, is_step=True
                )
            except BaseException:
                self.roll_back()
                raise
            self.num_scheduled += 1

    def write(self, layer_idx: int, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Store a layer's new keys and values and return what its attention reads.

        Shapes: [R, H, T, D] with the scheduled rows and columns; returns [R, H, columns, D], see `Reader.read`.
        Raises:
            ForwardMismatchError: no forward is scheduled, the shapes are not its, or the layer has written already.
            PoolArgumentError: this layer's states are no [R, H, T, D] of the sizes that it has had.
        """
        forward = self.forward
        if forward is None:
            raise ForwardMismatchError(f"layer {layer_idx} writes to a cache whose call {self.state.value}")
        with self.store.lock:
            self._flush()
            return self._writes.write(layer_idx, states, forward)

    def write_step(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """The fast path of `write`, for a "key" and a "value" of one token a row; None where `write` must be called."""
        forward = self.forward
        if forward is None or not forward.is_step or torch.is_grad_enabled():
            return None
        with self.store.lock:
            slot_mapping = None if self._held.are_in_view_alone else forward.slot_mapping
            return self._writes.write_step(layer_idx, key, value, slot_mapping)

    def confirm(self, most_blocks: int | None = None, *, conditions_held: bool | None = True) -> ScheduledForward:
        """The forward has returned: what it wrote counts.

        Args:
            most_blocks: that other processes can have, where the store's budget is settled now.
            conditions_held: of the model, since the forward was scheduled; None: nobody looked. See `end`.
        Raises:
            ForwardMismatchError: none is scheduled; or a layer has not written, and the forward is rolled back.
        """
        forward, store = self.forward, self.store
        if forward is None:
            raise ForwardMismatchError(f"nothing to confirm: the call {self.state.value}")
        if not store.writing_layers:
            store.read_budget()
        with store.lock:
            try:
                self._writes.require_all()
            except ForwardMismatchError:
                self.roll_back()
                raise
            if not store.writing_layers:
                store.settle_budget(most_blocks)
                store.writing_layers = frozenset(self._writes.written)
            self._num_columns_before = self.rows.num_columns
            self.rows.confirm(forward.stop)
            if not forward.is_step:
                self.rows.let_pass()
            self.state = CallState.CONFIRMED
            self.forward = None
            if conditions_held is not None:
                self._judge(conditions_held=conditions_held)
            self.counters.confirm()
            self.peak_kv_bytes = max(self.peak_kv_bytes, store.kv_bytes_in_use(self.salt) + self.reader.num_bytes)
            return forward

    def catch_up(self, asked: Tensor | None = None) -> list[int]:
        """Read what held steps were passed, in one transfer. No lock is held: this waits for the device.

        Whatever may end, cut, fork or copy rows does this first.

        Args:
            asked: integers that are to be read as well.
        Returns:
            those.
        Raises:
            CacheArgumentError: a step ran on what is not there, or where the rows do not stand; nothing from there on is
                ever committed.
        """
        return self._held.catch_up(self.rows, self.limits.end_of_sequence, asked)

    def roll_back(self) -> None:
        """Take back a forward that was never confirmed. Without one: nothing."""
        if self.state is not CallState.SCHEDULED and self.forward is None:
            return
        self.check_not_busy()
        with self.store.lock:
            if self.state is not CallState.SCHEDULED:  # another thread's `crop` is done, or `confirm` was, but for this
                self.forward = None
                return
            forward, self.forward = self.forward, None
            if forward is not None and self.rows.num_columns == forward.stop:  # `confirm` had come so far
                self.state = CallState.CONFIRMED
                return
            self._held.take_back(self.rows)
            self.reader.drop()  # some layers have the forward's columns and some have not
            self._writes.gradients.crop(self.rows.num_columns)
            if self._is_first:
                self.rows.free()
                self.rows = Rows([], [], 0)
                self.store.give_back_reservation(self)
                self.state = CallState.IDLE
            else:
                self.rows.roll_back()
                self.state = CallState.CONFIRMED
                if not self.limits.are_known:
                    self.store.give_back_reservation(self)

    def reorder(self, sources: Sequence[int] | Tensor) -> None:
        """Batch row `i` goes on as batch row `sources[i]` (beam search); there may be more or fewer rows than before.

        Args:
            sources: where they are a tensor, it is read together with held steps, and need not be sent to its device again.
        Raises:
            CacheArgumentError: a source that is no row; nothing has changed.
            CacheBusyError: a `generate` or a forward of another thread is running on them.
        """
        if isinstance(sources, Tensor):
            self._reorder(self.catch_up(sources), sources)
        else:
            self.catch_up()
            self._reorder(sources, None)

    def _reorder(self, sources: Sequence[int], index: Tensor | None) -> None:
        rows, reader = self.rows, self.reader
        with self.store.lock:
            self.require_no_generate_elsewhere()
            self.roll_back()
            if not rows.alias:
                return
            if not sources or min(sources) < 0 or max(sources) >= len(rows):
                raise CacheArgumentError(f"rows {list(sources)} asked for; the cache has rows 0 to {len(rows) - 1}")
            self._held.flush(rows)
            self._held.write_at_once()
            try:
                if rows.is_aliased:
                    origins = rows.separate()
                    reader.expand_rows(origins)
                    self._writes.gradients.select_rows(origins)
                rows.commit()
                same_number = len(sources) == len(rows)
                shared_columns = rows.select(sources)
                self._writes.gradients.select_rows(sources)
                if same_number:
                    reader.reorder_rows(sources, shared_columns, index)
                else:
                    reader.drop()
            except BaseException:
                reader.drop()  # tables and contiguous copy may have moved by different amounts
                raise
            renew_reservation(self.store, self, rows, self.limits, rows.num_columns)

    def crop(self, num_columns: int) -> None:
        """Take the last `num_columns` columns back.

        Raises:
            CacheArgumentError: there are not that many, or a window no longer has what it shows there; nothing has
                changed.
            CacheBusyError: a `generate` or a forward of another thread is running on them.
        """
        if num_columns:
            self.catch_up()
        rows = self.rows
        with self.store.lock:
            self.require_no_generate_elsewhere()
            self.roll_back()
            if num_columns == 0 or not rows.alias:
                return
            if num_columns > rows.num_columns:
                raise CacheArgumentError(
                    f"cannot crop {num_columns} tokens; give 0 to {rows.num_columns}, what there is"
                )
            kept, state = rows.num_columns - num_columns, self.state
            rows.require_resumable(kept)
            self._held.flush(rows)
            rows.num_columns = kept
            self._is_first, self.state = False, CallState.SCHEDULED  # interrupted, the next event cuts all rows alike
            rows.crop(kept)
            self.state = state
            self.reader.crop(kept)
            self._writes.gradients.crop(kept)
            self._num_columns_before = min(self._num_columns_before, kept)
            renew_reservation(self.store, self, rows, self.limits, kept)

    def end(self, *, failed: bool = False, conditions_held: bool = True) -> None:
        """`generate` is left: full blocks are committed; the rows stay, can go on, and can be matched.

        Args:
            failed: an exception ends it; then what the last forward computed may have been drafts.
            conditions_held: of the model, since it was last said here or to `confirm`. If not, nothing that was computed
                since then is found any more.
        """
        with self.store.lock:
            self.roll_back()
            self._held.flush(self.rows)
            self._judge(conditions_held=conditions_held)
            if failed:
                for row in self.rows.distinct:
                    row.stop_commits(max(0, self._num_columns_before - row.pad))
                self._restore_previous()
            self.rows.commit()
            if self.rows.alias:
                self.state = CallState.ENDED
            self.limits, self._may_step = UNLIMITED, False
            self.store.give_back_reservation(self)
            self.reader.pause()

    def drop_rows(self) -> None:
        """Give all blocks and the contiguous copy back; what was committed stays in the prefix cache.

        Raises:
            CacheBusyError: a `generate` or a forward of another thread is running on them.
        """
        with self.store.lock:
            self.check_not_busy()
            self.require_no_generate_elsewhere()
            self.roll_back()
            self._judge(conditions_held=False)  # in the middle of a call nobody has looked
            self._end_rows()
            self.previous.free()
            self.limits, self._may_step = UNLIMITED, False
            self.reader.drop()
            self._writes.gradients.clear()
            self.store.give_back_reservation(self)

    def fork_rows(self) -> Rows:
        """The rows with forked tables, for another call on the same store.

        Raises:
            CacheArgumentError: gradients flow through the rows, and would not through their copies.
        """
        self.catch_up()
        with self.store.lock:
            self.roll_back()
            if self._writes.gradients:
                raise CacheArgumentError(
                    "gradients flow through the rows of this cache, and would not through a copy of them; copy it "
                    "after forwards in torch.no_grad()"
                )
            self._held.flush(self.rows)
            self.rows.commit()
            return self.rows.fork()

    def take_over(self, rows: Rows, *, ended: bool = False) -> None:
        """Go on with these rows; there must be none yet.

        Args:
            ended: their call has ended, so they may be dropped.
        """
        with self.store.lock:
            self.rows = rows
            self._num_columns_before = rows.num_columns
            kept = CallState.ENDED if ended else CallState.CONFIRMED
            self.state = kept if rows.alias else CallState.IDLE

    def leave_behind(self) -> None:
        """The cache is being collected, perhaps inside a line of ours: only note what the store will have to end."""
        if self.rows.distinct:
            self.store.left_behind.append(self.rows)

    def leave_reservation(self) -> None:
        """The `generate` was left without its end; this may run inside a line of ours, so the store gives it back later."""
        self.store.left_behind.append(_Reservation(self))

    def read_layer(self, layer_idx: int) -> dict[str, Tensor]:
        """name -> [R, H, columns, D] of a layer's rows, a copy, with its gradients; empty without rows.

        All columns, or in a layer with a window those that the next token sees.
        """
        with self.store.lock:
            if not self.rows.alias or not self.store.pool.has_layer(layer_idx):
                return {}
            self._flush()
            read = gather_rows(self.store, layer_idx, self.rows)
            return self._writes.gradients.in_place_of(layer_idx, read, self.rows.alias, self.rows.num_columns)

    def check_not_busy(self) -> None:
        """Raises CacheBusyError while a forward of this call runs in another thread that lives."""
        if self.state is CallState.SCHEDULED:
            self.require_no_forward_elsewhere()

    def require_no_forward_elsewhere(self) -> None:
        """Raises CacheBusyError while another thread runs a forward on the cache, in whatever state the call is."""
        if is_on_a_stack(self._is_forward, of_other_threads=True):
            raise CacheBusyError(
                "this cache is running a forward in another thread; use one cache a call: "
                "PagedPrefixCache(cache.store) shares all blocks"
            )

    def lose_threads(self, idents: frozenset[int]) -> None:
        """These threads ended with a fork: drop the rows of a call that ran in one of them. The store's lock is held."""
        if self.brackets.lose_threads(idents) or self._thread in idents:
            self._held.give_up(self.rows)  # a forked child computes nothing before it runs
            self._held.forget()
            self.drop_rows()

    def num_previous_blocks(self) -> int:
        """Blocks that only rows whose call is over hold."""
        rows = [*self.previous.distinct, *(self.rows.distinct if self.state is CallState.ENDED else [])]
        return num_blocks_held_only_by(rows, self.store)

    def fits(self, num_columns: int, num_shared_blocks: int, num_prefixes: int = 0) -> bool:
        """Whether the worst case of the prepared rows fits, where they will hold so many blocks of each other.

        Args:
            num_prefixes: that are computed ahead, each in a row of its own.
        """
        store = self.store
        if num_prefixes and store.windows:
            windows = windows_of_shared(
                store, self.rows, self.limits, num_columns, num_prefixes, keeps_past=self.keeps_past
            )
            if store.windows.lacking(self, windows) is not None:
                return False
        if not self.limits.are_known:
            return True
        demand = self._demand or self._demand_of(num_columns)
        if demand.num_blocks - num_shared_blocks > store.num_obtainable_blocks(self) + demand.num_released:
            return False
        return store.windows.lacking(self, demand.windows) is None

    def _begin_rows(self, request: ForwardRequest) -> None:
        """Begin rows with what is known; but where too few blocks would be left, without what only previous rows know.

        Where windows lack blocks to see what is known and to keep what is new, all is computed.
        To go on from a previous row's last token keeps a block from the call, to copy a part of it. What the store has of
        full blocks is found all the same.
        """
        store, previous = self.store, self.previous.distinct
        if not self.brackets:
            self.counters.start_call()
        self.rows, found = begin_rows(store, request, previous)
        if self.limits.are_known:
            self._demand = self._demand_of(request.num_new_columns, previous)
            if previous and not self.fits(request.num_new_columns, 0):
                self.rows.free()
                self.rows, found = begin_rows(store, request, ())
                self._demand = self._demand_of(request.num_new_columns, previous)
            if store.windows.lacking(self, self._demand.windows):
                self.rows.free()
                self.rows, found = begin_rows(store, request, None)
                self._demand = self._demand_of(request.num_new_columns, previous)
        self.counters.begin_rows(found)

    def _flush(self) -> None:
        """Let the pool have the confirmed columns of held steps."""
        if self._held.are_in_view_alone:
            self._held.flush(self.rows, is_scheduled=self.state is CallState.SCHEDULED)

    def _require_prepared(self) -> None:
        if self.state is not CallState.SCHEDULED:
            raise CacheBusyError("the cache was reset while what its rows share was computed; run the forward again")

    def _hold_longer(self, request: ForwardRequest) -> None:
        for row, member in zip(self.rows.distinct, self.rows.members(), strict=True):
            hold_longer(self.store, row, request.rows[member].token_ids)
        self._demand = None

    def _demand_of(self, num_columns: int, previous: Sequence[Row] = ()) -> Demand:
        return demand_of(self.store, self.rows, self.limits, num_columns, previous, keeps_past=self.keeps_past)

    def _admit(self, stop: int) -> None:
        demand = self._demand or self._demand_of(stop, self.previous.distinct)
        admit(self.store, self, len(self.rows), self.limits, demand)

    def _schedule(
        self, request: ForwardRequest, computed_ahead: Mapping[int, int], latest_start: float
    ) -> ScheduledForward:
        store, rows, limits, before = self.store, self.rows, self.limits, self.rows.num_columns
        stop, members = before + request.num_new_columns, rows.members()
        if computed_ahead:
            self._hold_longer(request)
        if self.num_scheduled == 0 and limits.are_known:
            self._admit(stop)
        self.previous.free()
        self._writes.start()
        known = rows.known_columns()
        start, held_back_by = before, "row"
        if request.keep_columns is None and request.bypass is None:
            start = first_column(known, start=before, stop=stop, num_needed=request.num_logits_needed)
            if latest_start < start:
                start, held_back_by = max(before, int(latest_start)), "rank"
        if store.windows:
            start = hold_windows(rows, before, start)
        self.counters.schedule(
            request,
            list(zip(members, rows.distinct, strict=True)),
            before=before,
            start=start,
            end=limits.num_prompt_columns,
            computed_ahead=computed_ahead,
            held_back_by=held_back_by,
        )
        store.pool.join_streams()
        if take_blocks(store, self, rows, request, limits, keeps_past=self.keeps_past):
            renew_reservation(store, self, rows, limits, stop)
        if not limits.are_known:
            store.give_back_reservation(self)
        if self._is_first:
            self._writes.gradients.clear()
            self.reader.start_rows(
                rows.layouts(), stop, max_rows=max(len(rows), limits.num_rows), max_columns=limits.max_columns
            )
        transfer = Transfer()
        self.reader.start_forward(rows.layouts, len(rows.distinct), start, stop, transfer)
        slot_mapping = map_slots(store, rows, known, start, stop, transfer)
        store.make_copies(transfer)  # last: with their ids goes all that the forward needs
        copies = tuple(rows.alias) if rows.is_aliased else None
        self.forward = ScheduledForward(start, stop, tuple(members), copies, slot_mapping)
        self._may_step = limits.are_known and request.bypass is None and self._runs_as_asked(request)
        self._must_commit = True
        self.num_scheduled += 1
        return self.forward

    def _runs_as_asked(self, request: ForwardRequest) -> bool:
        """Whether each row runs under the conditions of the request, so that it may go on token by token without a look."""
        rows = zip(self.rows.in_batch(), request.rows, strict=True)
        return all(row.root == new.root and row.pad == new.pad for row, new in rows)

    def require_no_generate_elsewhere(self) -> None:
        """Raises CacheBusyError while a `generate` of another thread is running."""
        if self.brackets.are_of_another_thread():
            raise CacheBusyError(
                "a generate call of another thread is running on this cache; change its rows when it has ended"
            )

    def _judge(self, *, conditions_held: bool) -> None:
        """Keep or take back what was computed since the last judgement."""
        if conditions_held:
            self.rows.trust()
        else:
            self.store.allocator.forget(self.rows.committed, self.salt)
            self.rows.distrust()

    def _end_rows(self) -> None:
        """The running rows become the previous ones; those before them are dropped."""
        if not self.rows.alias:
            return
        self._held.give_up(self.rows)
        self.previous.free()
        self.rows.commit()
        self.reader.keep([row.layout()._replace(token_ids=row.true_token_ids) for row in self.rows.distinct])
        self.previous, self.rows = self.rows, Rows([], [], 0)
        self.state = CallState.IDLE
        self._held.forget()

    def _restore_previous(self) -> None:
        """Where a call ends before it ran anything, the rows of the call before are there as they were."""
        if self.previous.alias and not self.rows.alias and not self.num_scheduled:
            previous, self.previous = self.previous, Rows([], [], 0)
            self.rows = previous  # interrupted above this line, they are gone, and their blocks given back
            self._num_columns_before = self.rows.num_columns
            self.reader.drop()
