"""One running call: its state, and which event may come when.

    idle -> scheduled -> confirmed -> scheduled ... -> ended -> idle, or scheduled again where the rows go on
    scheduled -> rolled back to idle or confirmed

A *scheduled forward* is the only one whose writes are let through, and only what was confirmed is ever committed: when
the next forward is scheduled, so that a draft that `crop` takes back never was, when rows fork, or when the call ends.
Here are the events of a forward; those between two forwards are in `CallRows`. Torch tensors pass through to pool and
view, unread.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType
from weakref import ref

from torch import Tensor

from ..attention.view import View
from ..blocks.tokens import TokenIds
from ..errors import CacheArgumentError, CacheBusyError, ForwardMismatchError
from ..kv.states import LiveStates
from ..kv.stopwatch import Stopwatch
from ..kv.transfers import Transfer
from ..stats import RowCount
from ..store.block_store import BlockStore
from ..store.bring_up import Wanted
from ..store.holder import Demand
from .admission import UNLIMITED, CallLimits, admit_call, renew_reservation
from .call_rows import CallRows, CallState
from .counters import PromptCounters
from .held_steps import PassedStep
from .prefix_match import Found, PreviousRows, continuation, found_below, hold_longer, look_up_row
from .prepare import (
    begin_rows_that_fit,
    continue_rows,
    hold_windows,
    map_slots,
    reserve_forward,
    take_blocks,
    take_step,
)
from .rows import Row
from .running import Bracket
from .schedule import start_column
from .scheduled_forward import ForwardRequest, RowInput, ScheduledForward


class Call(CallRows):
    """The rows that one cache runs, from their first forward to the end."""

    def __init__(
        self,
        store: BlockStore,
        view: View,
        is_forward: Callable[[FrameType], bool],
        salt: bytes = b"",
        live: LiveStates | None = None,
    ) -> None:
        super().__init__(store, view, is_forward, salt, live)
        self.counters = PromptCounters(store.call_totals)
        self.peak_kv_bytes = 0
        self.keeps_past = False  # drafts will be verified, and taken back by `crop`
        self.index_positions: dict[
            int, Tensor | None
        ] = {}  # layer -> those that a forward gave its columns, [3, R, columns]
        self.demand: Demand | None = None  # of rows that begin, as long as nothing has changed
        self._brought: Mapping[int, str] = {}  # block -> the tier that it has come from for the next forward
        self._stopwatch: Stopwatch | None = None  # of a forward of a prompt, where lower tiers ask
        self._must_commit = False  # the last forward had several columns, and may have filled blocks
        store.add_holder(self)

    def begin(self, bracket: ref[Bracket], limits: CallLimits, *, keep_rows: bool) -> None:
        """`generate` is entered: the rows so far become previous rows, unless only new tokens are passed.

        Args:
            bracket: gone as soon as that `generate` is left, however; then the call is no longer running.
        """
        with self.store.lock:
            self.store.settle()
            self.roll_back()
            self._held.flush(self.rows)
            self.judge(conditions_held=False)  # what a `generate` left whose end was interrupted
            if not keep_rows:
                self._end_rows()
            self.brackets.open(bracket)
            self.limits = limits
            self.store.give_back_reservation(self)
            self.num_scheduled = 0
            self.keeps_past = self._may_step = False
            self.states.live.record_past(records=False)
            self._held.begin()
            self._num_columns_before = self.rows.num_columns
            self.counters.start_call("generate")
            self.peak_kv_bytes = 0

    def count_elsewhere(self, kind: str, rows: Sequence[RowCount], peak_kv_bytes: int) -> None:
        """Count a call that ran on sibling caches; it is the last one, unless a call is running on this cache."""
        with self.store.lock:
            is_last = not self.is_in_use
            self.counters.add_call(kind, rows, is_last=is_last)
            if is_last:
                self.peak_kv_bytes = peak_kv_bytes

    def keep_past(self) -> None:
        """Drafts will be verified, and taken back by `crop`."""
        with self.store.lock:
            self.keeps_past = True
            self.states.live.record_past(records=True)

    def look_up(self, new: RowInput) -> tuple[Found, str | None]:
        """What a call of one row would find that began now, and had room; and the furthest lower tier that some of it would come
        up from, if any.  Effects: none. The store's lock is held.

        While a call runs, its own rows are nobody's previous ones: of what it computes only committed blocks are found.
        """
        rows = self.rows if self.rows.alias else self.previous
        are_running_ones = rows is self.rows and self.states.stands(rows)

        def num_at_end(row: Row) -> int | None:
            if are_running_ones:
                return row.num_confirmed
            return None if row.origin is None else row.origin.num_tokens

        previous = PreviousRows(() if self.is_in_use else rows.distinct)
        num_tokens = len(new.token_ids)
        most = max(0, num_tokens - self.states.num_needed_of(num_tokens))
        found = look_up_row(self.store, new, previous, most, num_at_end)
        below = self.store.tiers.look_up(Wanted(new.root, new.salt, new.token_ids, most))
        if below is None or below[0] <= found.num_tokens:
            return found, None
        return found_below(self.store, new, below[0]), below[1]

    def continuation(self, new: RowInput, num_tokens: int) -> TokenIds:
        """How the closest of what a call would find goes on behind a row's first `num_tokens` tokens.  Effects: none. The store's
        lock is held.
        """
        rows = self.rows if self.rows.alias else self.previous
        return continuation(self.store, new, PreviousRows(() if self.is_in_use else rows.distinct), num_tokens)

    def bring_up(self, request: ForwardRequest) -> None:
        """Have what lower tiers know of a prompt cached, before `prepare` looks for it. No lock is held while files are read."""
        rows, wanted = self.rows, []
        if request.bypass is not None or request.num_new_columns <= request.num_logits_needed:
            return
        with self.store.lock:
            self.store.settle()
            if rows.alias and not self.brackets:
                return  # plain forwards: whether what they computed counts is judged when the next is prepared
            if rows.alias:
                self.roll_back()
                self._held.flush(rows)
                self._commit()
            if not rows.alias or len(rows) == len(request.rows):
                for number, new in enumerate(request.rows):
                    row = rows.distinct[rows.alias[number]] if rows.alias else None
                    tokens = new.token_ids if row is None else row.with_new(new.token_ids)
                    most = len(tokens) - self.states.num_needed(request)
                    if most > 0 and (row is None or row.commit_end is None):  # not so of a row that is padding so far
                        wanted.append(Wanted(new.root, new.salt, tokens, most))
        brought = self.store.tiers.bring_up(wanted, self)
        with self.store.lock:
            self._brought = brought

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
                self.judge(conditions_held=False)
                self.limits = UNLIMITED
                store.give_back_reservation(self)
            self._held.flush(self.rows)
            self._commit()
            self._is_first = not self.rows.alias
            self._thread = threading.get_ident()
            self.state = CallState.SCHEDULED
            try:
                self.demand = None
                if self._is_first:
                    if not self.brackets:
                        self.counters.start_call("forward")
                    found = begin_rows_that_fit(self, request)
                    if self.states:
                        found = self.states.find(self.rows, request, found)
                        if store.windows:
                            self.demand = None  # rows may hold less by now
                    self.counters.begin_rows(found)
                else:
                    self._continue_rows(request)
                self.counters.prepare(self.rows.distinct, carry_states=bool(self.states))
                if self.store.tiers:
                    self._count_brought()
            except BaseException:
                self.roll_back()
                raise

    def _count_brought(self) -> None:
        """Say of each row how many of its tokens have come from which tier."""
        brought, self._brought = self._brought, {}
        size, rows = self.store.block_size, self.rows
        held = [Counter(brought[i] for i in row.table.block_ids if i in brought) for row in rows.distinct]
        self.counters.bring([{name: size * held[index][name] for name in held[index]} for index in rows.alias])

    def _continue_rows(self, request: ForwardRequest) -> None:
        """Rows go on; those that part go on from copies of what they shared."""
        sources = continue_rows(self.store, request, self.rows)
        if sources is not None:
            self.view.expand_rows(sources)
            self._writes.gradients.select_rows(sources)
            self.states.select(sources)
        if self.states:
            self.states.find(self.rows, request)

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
                admit_call(self, self.rows.num_columns + request.num_new_columns)

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
        state_column: int | None = None,
        cold: Collection[int] = (),
    ) -> ScheduledForward:
        """Take the blocks of the forward that was prepared, and say what may be written.

        Args:
            computed_ahead: row of the batch -> tokens computed for it, alone, since it was prepared.
            latest_start: columns from here on are computed, whatever is known; rows go on where they stand all the same.
            state_column: where the origins of all rows are; None: where all can go on, as they are.
            cold: running rows that begin anew before that column, if they have not been run up to there.

        Raises:
            OutOfBlocksError: the call does not fit; running rows are as before.
            ForwardMismatchError: what layers carry of the rows is lost.
        """
        with self.store.lock:
            self._require_prepared()
            try:
                self.states.begin_anew(self.rows, cold, state_column)
                return self._schedule(request, computed_ahead or {}, latest_start, state_column)
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
                self._commit()
                self._must_commit = False
            if self.states:
                self.states.stop_step_commits(rows)
            self._is_first = False
            self._writes.start()
            self.state = CallState.SCHEDULED
            try:
                self.store.pool.join_streams()
                token_ids = self._held.hold(rows, passed)
                transfer = None if num_rows == 1 or self._held.view_from is not None else Transfer()
                num_taken, slot_mapping = take_step(
                    self.store, self, rows, token_ids, self.limits, self._held.flush_scheduled, transfer
                )
                self.view.start_forward(self._held.layouts, num_rows, before, before + 1, transfer)
                if num_taken:
                    if self.states:
                        self.states.keep_last(rows)
                    renew_reservation(self.store, self, rows, self.limits, before + 1)
                    self.store.make_copies(
                        transfer, may_wait=False
                    )  # last: with their ids goes all that the step needs
                self.states.tear()
                self.forward = ScheduledForward(
                    before, before + 1, tuple(range(num_rows)), None, slot_mapping, is_step=True
                )
            except BaseException:
                self.roll_back()
                raise
            self.num_scheduled += 1

    def write(self, layer_idx: int, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Store a layer's new keys and values and return what its attention reads.

        Shapes: [R, H, T, D] with the scheduled rows and columns; returns [R, H, columns, D], see `View.read`.

        Raises:
            ForwardMismatchError: no forward is scheduled, the shapes are not its, or the layer has written already.
            PoolArgumentError: this layer's states are no [R, H, T, D] of the sizes that it has had.
        """
        forward = self.forward
        if forward is None:
            raise ForwardMismatchError(f"layer {layer_idx} writes to a cache whose call {self.state.value}")
        with self.store.lock:
            return self._writes.write(layer_idx, states, forward)

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
            self.states.column = forward.stop
            if not forward.is_step:
                self.rows.let_pass()
            if self._stopwatch is not None:
                num_tokens = (forward.stop - forward.start) * len(self.rows.distinct)
                store.tiers.record_computed(self._stopwatch, num_tokens)
                self._stopwatch = None
            self.state = CallState.CONFIRMED
            self.forward = None
            if conditions_held is not None:
                self.judge(conditions_held=conditions_held)
            self.counters.confirm()
            self.peak_kv_bytes = max(self.peak_kv_bytes, store.kv_bytes_in_use(self.salt) + self.view.num_bytes)
            return forward

    def _require_prepared(self) -> None:
        if self.state is not CallState.SCHEDULED:
            raise CacheBusyError("the cache was reset while what its rows share was computed; run the forward again")

    def _hold_longer(self, request: ForwardRequest) -> None:
        for row, member in zip(self.rows.distinct, self.rows.members(), strict=True):
            hold_longer(self.store, row, request.rows[member].token_ids)
        self.demand = None

    def _schedule(
        self,
        request: ForwardRequest,
        computed_ahead: Mapping[int, int],
        latest_start: float,
        state_column: int | None,
    ) -> ScheduledForward:
        store, rows, limits, before = self.store, self.rows, self.limits, self.rows.num_columns
        stop, members = before + request.num_new_columns, rows.members()
        if computed_ahead and not self.states:
            self._hold_longer(request)
        if self.num_scheduled == 0 and limits.are_known:
            admit_call(self, stop)
        if self.states and state_column is None:
            state_column = self.states.joint_column(rows, request)
        self.previous.free()
        self._writes.start()
        known = rows.known_columns()
        start, held_back_by = before, "row"
        if request.keep_columns is None and request.bypass is None:
            start = start_column(known, start=before, stop=stop, num_needed=request.num_logits_needed)
            if latest_start < start:
                start, held_back_by = max(before, int(latest_start)), "rank"
        if state_column is not None:
            start, held_back_by = state_column, "state"
            self.states.stop_commits(rows, request)
        if store.windows:
            start = hold_windows(rows, before, start)
            if state_column is not None and start != state_column:
                raise ForwardMismatchError(
                    f"layers with a window no longer hold what is before column {state_column}, up to which layers with a state "
                    "have seen the rows; reset() the cache, or pass the whole prompt to generate again"
                )
        self.counters.schedule(
            request,
            list(zip(members, rows.distinct, strict=True)),
            rows.alias,
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
            self.view.start_rows(
                rows.layouts(), stop, max_rows=max(len(rows), limits.num_rows), max_columns=limits.max_columns
            )
        transfer = Transfer()
        self.view.start_forward(rows.layouts, len(rows.distinct), start, stop, transfer)
        slot_mapping = map_slots(store, rows, known, start, stop, transfer)
        store.make_copies(transfer)  # last: with their ids goes all that the forward needs
        copies = tuple(rows.alias) if rows.is_aliased else None
        if self.states:
            self.states.start_forward(rows, start, stop)
        self.forward = ScheduledForward(start, stop, tuple(members), copies, slot_mapping)
        self._may_step = limits.are_known and request.bypass is None and self._runs_as_asked(request)
        self._must_commit = True
        self.num_scheduled += 1
        if store.tiers and store.tiers.is_telling(stop - start) and store.writing_layers:  # the first forward warms up
            self._stopwatch = Stopwatch(store.pool.accelerators)
        return self.forward

    def _runs_as_asked(self, request: ForwardRequest) -> bool:
        """Whether each row runs under the conditions of the request, so that it may go on token by token without a look."""
        rows = zip(self.rows.in_batch(), request.rows, strict=True)
        return all(row.root == new.root and row.pad == new.pad for row, new in rows)
