"""One running call: its rows, its state, and which event may come when.

    idle -> scheduled -> confirmed -> scheduled ... -> ended -> idle, or scheduled again where the rows resume
    scheduled -> rolled back to idle or confirmed

A *scheduled forward* is the only one whose writes are let through, and only what was confirmed is ever committed: when
the next forward is scheduled, so that a draft that `crop` takes back never was, when rows fork, or when the call ends.

Between two forwards rows are cut, change places, are copied, end, and are given back. Where they stand is `rows.num_columns`; whatever keeps
something of each row is a *follower*, and changes with them. While somebody else runs the rows, nobody may change them.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from types import FrameType
from typing import Protocol
from weakref import ref

from torch import Tensor

from ..attention.group_columns import Forward
from ..attention.view import View
from ..blocks.image_tokens import end_of_image, filled_up
from ..errors import CacheArgumentError, CacheBusyError, ForwardMismatchError, OutOfBlocksError
from ..kv.states import LiveStates, States
from ..kv.stopwatch import Stopwatch
from ..kv.transfers import Transfer
from ..stats import CallStats, RowCount
from ..store.block_store import BlockStore
from ..store.holder import Demand
from ..store.tier_load import Wanted
from .admission import UNLIMITED, CallLimits, admit_call, num_blocks_held_only_by, renew_reservation
from .call_states import CallStates
from .counters import PromptCounters
from .held_steps import HeldSteps, PassedStep
from .image_ends import keep_image_ends
from .layer_writes import LayerWrites
from .prefix_match import Found
from .prepare import begin_chunks_that_fit, begin_rows_that_fit, continue_rows, cut_to_column
from .rows import Rows, gather_rows
from .running import Bracket, Brackets, is_on_a_stack
from .schedule import hold_windows, map_slots, reserve_forward, take_blocks, take_step
from .scheduled_forward import Chunks, ForwardRequest, ScheduledForward


class CallState(Enum):
    """Where a call stands; the value completes "the call ..."."""

    IDLE = "has no rows"
    SCHEDULED = "has scheduled a forward"
    CONFIRMED = "has rows and waits for a forward"
    ENDED = "has ended and keeps its rows"


class Follower(Protocol):
    """What keeps something of each running row: it changes with the rows."""

    def select(self, sources: Sequence[int], shared_columns: int = 0, index: Tensor | None = None) -> None:
        """Row `i` continues as row `sources[i]`, whose first `shared_columns` columns are those of the row in its place.

        Args:
            index: the sources as a tensor on some device, if there is one.
        """

    def crop(self, start: int, stop: int) -> None:
        """The last columns `[start, stop)` are taken back."""

    def drop(self) -> None:
        """Keep nothing of these rows."""


class _Reservation:
    """Of a `generate` that nobody has ended."""

    def __init__(self, call: "Call") -> None:
        self._call = call

    def end(self) -> None:
        """Give it back, unless another one has begun since."""
        if not self._call.brackets:
            self._call.store.give_back_reservation(self._call)


class Call:
    """The rows that one cache runs, from their first forward to the end; those of the call before; and who runs them.

    Args:
        store: where their blocks are.
        view: what attention reads of them.
        is_forward: whether a frame on a thread's stack is of a forward on this call.
        salt: namespace of the rows' blocks.
        live: what layers carry of the running rows; None: no layer carries anything.
    """

    def __init__(
        self,
        store: BlockStore,
        view: View,
        is_forward: Callable[[FrameType], bool],
        salt: bytes = b"",
        live: LiveStates | None = None,
    ) -> None:
        self.store = store
        self.salt = salt
        self.view = view
        self.forward: ScheduledForward | None = None
        self._is_open = False  # a forward was prepared, and neither confirmed nor rolled back
        self._has_ended = False
        self.limits: CallLimits = UNLIMITED  # of the `generate` that runs
        self.rows = Rows([], [], 0)
        self.previous = Rows([], [], 0)  # of the call before, matched by the next one
        self.num_scheduled = 0  # forwards since `begin`
        self.plans_ahead = True  # forwards of our own may run ahead, and are cut where snapshots are wanted
        self.brackets = Brackets()
        self.kept_by: Callable[[], object | None] = lambda: None  # who needs the rows between two of their forwards
        self._held = HeldSteps(store, view)
        self.writes = LayerWrites(store, view, self._held)
        self.states = CallStates(store, live) if live else None
        self._followers: tuple[Follower, ...] = (view, self.writes.gradients, *([self.states] if self.states else []))
        self._is_forward = is_forward
        self._thread = 0  # that began or continued with the rows, but for decode steps
        self._is_first = False  # the scheduled forward is the first of its rows
        self._may_step = False  # rows resume under the conditions that they have run under
        self._num_columns_before = 0  # columns before the last confirmed forward
        self._began_known = False  # the rows of this call have begun, see `begin_known`
        self._are_lost = False  # its rows were dropped as they changed places
        self.counters = PromptCounters(store.call_totals)
        self.peak_kv_bytes = 0
        self.keeps_past = False  # drafts will be verified, and taken back by `crop`
        self.demand: Demand | None = None  # of rows that begin, as long as nothing has changed
        self._brought: Mapping[int, str] = {}  # block -> the tier that it has come from for the next forward
        self._stopwatch: Stopwatch | None = None  # of a long forward of a prompt
        self._is_larger = False  # the scheduled forward has taken blocks
        self._must_commit = False  # the last forward had several columns, and may have filled blocks
        store.add_holder(self)

    def begin(self, bracket: ref[Bracket], limits: CallLimits, *, keep_rows: bool, is_round: bool = False) -> None:
        """`generate` is entered: the rows so far become previous rows, unless only new tokens are passed.

        Args:
            bracket: gone as soon as that `generate` is left, however; then the call is no longer running.
            is_round: it is a function round transformers' `generate`.
        """
        with self.store.lock:
            self.store.settle()
            self.roll_back()
            self._held.flush(self.rows)
            self.judge(conditions_held=False)  # what a `generate` left whose end was interrupted
            if not keep_rows:
                self._end_rows()
            self.brackets.open(bracket, is_round=is_round)
            self.limits = limits
            self.store.give_back_reservation(self)
            self.num_scheduled = 0
            self.keeps_past = self._may_step = self._began_known = self._are_lost = False
            if self.states is not None:
                self.states.live.record_past(records=False)
            self._held.begin()
            self._num_columns_before = self.rows.num_columns
            self.counters.start_call("generate")
            self.view.start_call()
            self.peak_kv_bytes = 0

    def stats(self) -> CallStats:
        """What was confirmed of the running call, or of the last one."""
        return self.counters.of_call(self.peak_kv_bytes, *self.view.read_once)

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
            if self.states is not None:
                self.states.live.record_past(records=True)

    def num_needed(self, request: ForwardRequest) -> int:
        """So many of a prompt's last columns run in the forward over all rows."""
        return request.num_logits_needed if self.states is None else self.states.num_needed(request)

    def num_needed_of(self, num_columns: int) -> int:
        """The same of a prompt of so many columns of which the last logits alone are asked for."""
        return 1 if self.states is None else self.states.num_needed_of(num_columns)

    def load_known(self, request: ForwardRequest) -> None:
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
                self._commit()
            if not rows.alias or len(rows) == len(request.rows):
                for number, new in enumerate(request.rows):
                    row = rows.distinct[rows.alias[number]] if rows.alias else None
                    tokens = new.token_ids if row is None else row.with_new(new.token_ids)
                    most = len(tokens) - self.num_needed(request)
                    if most > 0 and (row is None or row.commit_end is None):  # not so of a row that is padding so far
                        wanted.append(Wanted(new.root, new.salt, tokens, most))
                        if request.has_images and (end := end_of_image(tokens, 0, len(tokens))) is not None:
                            filled = filled_up(tokens, end, self.store.block_size)
                            wanted.append(Wanted(new.root, new.salt, filled, len(filled)))
        brought = self.store.tiers.load(wanted, self)
        with self.store.lock:
            self._brought = brought

    def prepare(self, request: ForwardRequest) -> None:
        """A forward is about to run: rows begin or resume, and hold what is known of them. `schedule` comes next.

        Raises:
            CacheBusyError: a forward of this call is running in another thread.
            CacheArgumentError: the request has other rows than the call, or no column.
        """
        store = self.store
        with store.lock:
            if self._is_open:
                self.roll_back()
            if self._are_lost:
                raise CacheArgumentError(
                    "the rows of this generate were dropped, because an interrupt or a lack of memory ended their change of "
                    "places half way; call generate again with the whole prompt"
                )
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
            self._is_first = not self.rows.alias
            if not self._is_first:
                self._commit()
            self._thread = threading.get_ident()
            self.forward, self.demand, self._is_open, self._has_ended = None, None, True, False
            found: list[Found] | None = None
            try:
                if self._is_first:
                    if not self.brackets:
                        self.counters.start_call("forward")
                        self.view.start_call()
                    found = begin_rows_that_fit(self, request)
                    if self.states is not None:
                        found = self.states.find(self.rows, request, found)
                        if store.windows.groups:
                            self.demand = None  # rows may hold less by now
                else:
                    sources = continue_rows(store, request, self.rows)
                    if sources is not None:
                        self._move(sources)
                    if self.states is not None:
                        self.states.find(self.rows, request)
                self.counters.prepare(self.rows.distinct, found, carry_states=self.states is not None)
                if store.tiers:
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

    def find_known(self, request: ForwardRequest, chunks: Chunks) -> tuple[int, list[Found]]:
        """Before the first forward of a `generate` that computes its prompt in chunks: hold what is known of all rows in whole
        chunks. `begin_known` comes next.

        Args:
            request: of the whole prompt, as `begin_chunks_that_fit` takes it.

        Returns:
            the columns that rows may begin with; and what was found of each row of the batch.
        """
        with self.store.lock:
            self.store.settle()
            self._began_known = True
            return begin_chunks_that_fit(self, request, chunks)

    def begin_known(self, request: ForwardRequest, column: int, found: list[Found]) -> None:
        """Let the rows stand after their first `column` columns, as if these had just run; with none, they begin with a forward.

        So `generate` passes what follows, in the chunks that it would pass without a cache.

        Args:
            request: of these columns.
            found: see `find_known`.
        """
        rows = self.rows
        with self.store.lock:
            if not column:
                rows.free()
                return
            cut_to_column(rows, column)
            self.counters.prepare(rows.distinct, found, carry_states=False)
            if self.store.tiers:
                self._count_brought()
            self.counters.schedule(request, rows, start=column, end=self.limits.num_prompt_columns, computed_ahead={})
            self.counters.confirm()
            rows.confirm(column)
            self._num_columns_before = column
            self._thread = threading.get_ident()
            if self.states is not None:
                self.store.pool.join_streams()
                self.states.put(rows)
            self._start_rows(column, in_chunks=True)

    def admit(self, request: ForwardRequest) -> None:
        """Reserve, ahead of `schedule`, what the prepared forward or its call may take, so that it is not refused there.

        `release` gives the reservation back, and so does `roll_back` where the call's rows begin.

        Raises:
            OutOfBlocksError: the call does not fit.
            CacheBusyError: the cache was reset since it was prepared.
        """
        with self.store.lock:
            self.require_prepared()
            if not self.limits.are_known:
                reserve_forward(self, request)
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
        column: int | None = None,
        cold: Collection[int] = (),
    ) -> ScheduledForward:
        """Take the blocks of the forward that was prepared, and say what may be written.

        Args:
            computed_ahead: row of the batch -> tokens computed for it, alone, since it was prepared.
            latest_start: columns from here on are computed, whatever is known; rows resume where they stand all the same.
            column: where the origins of all rows are; None: where all can resume, as they are.
            cold: running rows that begin anew before that column, if they have not been run up to there.

        Raises:
            OutOfBlocksError: the call does not fit; running rows are as before.
            ForwardMismatchError: what layers carry of the rows is lost.
        """
        with self.store.lock:
            self.require_prepared()
            try:
                if self.states is not None:
                    self.states.begin_anew(self.rows, cold, column)
                return self._schedule(request, computed_ahead or {}, latest_start, column)
            except BaseException:
                self.roll_back()
                raise

    @property
    def may_step(self) -> bool:
        """Whether `schedule_step` may be asked: inside `generate`, after the prompt, each row for itself."""
        rows = self.rows
        return (
            self._may_step
            and self.forward is None
            and not self._is_open
            and len(rows.distinct) == len(rows.alias)
            and rows.num_columns >= self.limits.num_prompt_columns
            and self.brackets.thread() == threading.get_ident()
        )

    def schedule_step(self, passed: Sequence[int] | PassedStep) -> None:
        """`prepare` and `schedule` where each row only resumes, by one token: it runs for every token.

        Args:
            passed: a token for each row; or what holds them, to be read when a block is complete.

        Raises:
            CacheArgumentError: see `catch_up`.
        """
        if self._held.must_be_read(self.rows):
            self.catch_up()
        with self.store.lock:
            self.store.settle()
            rows, before, num_rows = self.rows, self.rows.num_columns, len(self.rows.alias)
            if self._must_commit:
                self._commit()
                self._must_commit = False
            states = self.states
            if states is not None:
                states.stop_step_commits(rows)
                states.are_whole = False  # until it is confirmed
            self._is_first = False
            self.writes.start()
            self._is_open = True
            try:
                self.store.pool.join_streams()
                token_ids = self._held.hold(rows, passed)
                is_owed = bool(self.store.allocator.pending_copies)  # by an interrupted call: of whole blocks
                transfer = None if num_rows == 1 or self._held.view_from is not None else Transfer()
                num_taken, slot_mapping = take_step(self, token_ids, self._held.flush_scheduled, transfer)
                self.view.start_forward(Forward(self._held.layouts, num_rows, before, before + 1, transfer))
                if num_taken:
                    if states is not None:
                        states.keep_last(rows)
                    self._is_larger = True
                    renew_reservation(self, before + 1)
                    # last: with their ids goes all that the step needs
                    are_filled = not is_owed and self._held.has_whole_blocks(rows)  # when the pool catches up
                    self.store.make_copies(transfer, may_wait=False, are_filled=are_filled)
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
            return self.writes.write(layer_idx, states, forward)

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
        if self._stopwatch is not None:
            self._stopwatch.stop()
        if not store.writing_layers:
            store.read_budget()
        with store.lock:
            written = self.writes.written
            if not (store.writing_layers and store.writing_layers <= written):
                try:
                    self.writes.require_all()
                except ForwardMismatchError:
                    self.roll_back()
                    raise
            warms_up = not store.writing_layers
            if warms_up:
                store.settle_budget(most_blocks)
                store.writing_layers = frozenset(written)
            self._num_columns_before = self.rows.num_columns
            self.rows.confirm(forward.stop)
            if self.states is not None:
                self.states.are_whole = True
            if not forward.is_step:
                self.rows.release_passed()
            if self._stopwatch is not None:
                num_tokens = (forward.stop - forward.start) * len(self.rows.distinct)
                store.tiers.record_computed(self._stopwatch, num_tokens, warms_up=warms_up)
                self._stopwatch = None
            self._is_open = False
            self.forward = None
            if conditions_held is not None:
                self.judge(conditions_held=conditions_held)
            if not forward.is_step:
                self.counters.confirm()
            if self._is_larger:
                self._measure()
            return forward

    def _measure(self) -> None:
        """Keys and values may take more than ever before."""
        num_bytes = self.store.kv_bytes_in_use(self.salt) + self.view.num_bytes
        self.peak_kv_bytes, self._is_larger = max(self.peak_kv_bytes, num_bytes), False

    def require_prepared(self) -> None:
        """Raises CacheBusyError where the rows were reset since a forward was prepared, by what ran ahead of it."""
        if not self._is_open or self.forward is not None:
            raise CacheBusyError("the cache was reset while what its rows share was computed; run the forward again")

    def _schedule(
        self,
        request: ForwardRequest,
        computed_ahead: Mapping[int, int],
        latest_start: float,
        column: int | None,
    ) -> ScheduledForward:
        store, rows, limits, before = self.store, self.rows, self.limits, self.rows.num_columns
        stop = before + request.num_new_columns
        if self.num_scheduled == 0 and limits.are_known:
            admit_call(self, stop)
        if self.states is not None and column is None:
            column = self.states.joint_column(rows, request)
        self.previous.free()
        self.writes.start()
        known = rows.known_columns()
        start = max(before, min(*known, request.latest_start(before, request.num_logits_needed)))
        held_back_by = "row"
        if max(before, latest_start) < start:
            start, held_back_by = max(before, int(latest_start)), "rank"
        if self.states is not None and column is not None:
            start, held_back_by = column, "state"
            self.states.stop_commits(rows, request)
        if store.windows.groups or request.has_images:
            start = hold_windows(rows, before, start)
            if column is not None and start != column:
                raise ForwardMismatchError(
                    f"layers with a window no longer hold what is before column {column}, up to which layers with a state "
                    "have seen the rows; reset() the cache, or pass the whole prompt to generate again"
                )
        self.counters.schedule(
            request,
            rows,
            start=start,
            end=limits.num_prompt_columns,
            computed_ahead=computed_ahead,
            held_back_by=held_back_by,
        )
        store.pool.join_streams()
        if take_blocks(self, request):
            renew_reservation(self, stop)
        if not limits.are_known:
            store.give_back_reservation(self)
        if self._is_first:
            self._start_rows(stop, in_chunks=request.chunks is not None)
        transfer = Transfer()
        self.view.start_forward(Forward(rows.layouts, len(rows.distinct), start, stop, transfer))
        slot_mapping = map_slots(store, rows, known, start, stop, transfer)
        store.make_copies(transfer)  # last: with their ids goes all that the forward needs
        copies = tuple(rows.alias) if rows.is_aliased else None
        if self.states is not None:
            self.states.start_forward(rows, start, stop)
        self.forward = ScheduledForward(start, stop, tuple(rows.members()), copies, slot_mapping)
        self._may_step = limits.are_known and request.bypass is None and self._runs_as_asked(request)
        self._must_commit = self._is_larger = True
        self.num_scheduled += 1
        # the first forward warms up, which takes long on an accelerator
        if store.tiers.is_telling(stop - start) and (store.writing_layers or not store.pool.accelerators):
            self._stopwatch = Stopwatch(store.pool.accelerators)
        return self.forward

    def _start_rows(self, num_columns: int, *, in_chunks: bool) -> None:
        """Other rows run from here on, whose first forward stops after so many columns."""
        rows, limits = self.rows, self.limits
        self.writes.gradients.drop()
        self.view.start_rows(
            rows.layouts(),
            num_columns,
            max_rows=max(len(rows.alias), limits.num_rows),
            max_columns=limits.max_columns,
            in_chunks=in_chunks,
        )

    def _runs_as_asked(self, request: ForwardRequest) -> bool:
        """Whether each row runs under the conditions of the request, so that it may resume token by token without a look."""
        for row, new in zip(self.rows.in_batch(), request.rows, strict=True):
            if row.root != new.root or row.pad != new.pad:
                return False
        return True

    # Between two forwards.

    @property
    def state(self) -> CallState:
        """Where the call stands."""
        if self._is_open:
            return CallState.SCHEDULED
        if not self.rows.alias:
            return CallState.IDLE
        return CallState.ENDED if self._has_ended else CallState.CONFIRMED

    @property
    def num_columns(self) -> int:
        """Columns of the rows: those before the scheduled forward's, or all confirmed ones."""
        if self.forward is None:
            return self.rows.num_columns
        return max(self.rows.num_columns, self.forward.start)  # more than `start` only where `confirm` was interrupted

    @property
    def is_running(self) -> bool:
        """Whether a `generate` is running, a forward in any thread, or rows may resume: of plain forwards, or kept ones."""
        goes_on = self.state is CallState.CONFIRMED and not self.brackets.were_left_open
        return goes_on or self.kept_by() is not None or self.is_in_use

    @property
    def is_in_use(self) -> bool:
        """Whether a `generate` is running, or a forward in any thread."""
        return bool(self.brackets) or self.runs_forward

    @property
    def runs_forward(self) -> bool:
        """Whether a forward runs, in any thread."""
        return is_on_a_stack(self._is_forward)

    @property
    def has_ended(self) -> bool:
        """Whether the rows are of a call that is over."""
        return self.state is CallState.ENDED

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
        if not self._is_open and self.forward is None:
            return
        self.check_not_busy()
        with self.store.lock:
            if not self._is_open:  # another thread's `crop` is done, or `confirm` was, but for this
                self.forward = None
                return
            forward, self.forward = self.forward, None
            if forward is not None and self.rows.num_columns == forward.stop:  # `confirm` had come so far
                if self.states is not None:
                    self.states.are_whole = True
                self._is_open = False
                return
            if self.states is not None and not self.states.are_whole:
                self.states.drop()
                self._may_step = False
            self.store.make_copies(may_wait=False)  # those of the blocks that the forward took, before they are written
            self._held.take_back(self.rows)
            self.view.drop()  # some layers have the forward's columns and some have not
            before = self.rows.num_columns
            self.writes.gradients.crop(before, before if forward is None else forward.stop)
            if self._is_first:
                self.rows.free()
                self.rows = Rows([], [], 0)
            else:
                self.rows.roll_back()
                if self.states is not None:
                    self.states.unpark(self.rows)
            if self._is_first or not self.limits.are_known:
                self.store.give_back_reservation(self)
            self._is_open = False

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
            stop = rows.num_columns
            if num_columns == 0 or not rows.alias:
                if self.states is not None:
                    self.states.crop(stop, stop)  # convolutions may forget what they kept to take drafts back
                return
            if num_columns > rows.num_columns:
                raise CacheArgumentError(
                    f"cannot crop {num_columns} tokens; give 0 to {rows.num_columns}, what there is"
                )
            kept = stop - num_columns
            rows.require_resumable(kept)
            self._held.flush(rows)
            rows.num_columns = kept
            self._is_first, self._is_open = False, True  # interrupted, the next event cuts all rows alike
            rows.crop(kept)
            self._is_open = False
            for follower in self._followers:
                follower.crop(kept, stop)
            self._may_step = self._may_step and (self.states is None or self.states.are_whole)
            self._num_columns_before = min(self._num_columns_before, kept)
            renew_reservation(self, kept)

    def reorder(self, sources: Sequence[int] | Tensor) -> None:
        """Batch row `i` continues as batch row `sources[i]` (beam search); there may be more or fewer rows than before.

        Args:
            sources: where they are a tensor, it is read together with held steps, and need not be sent to its device again.

        Raises:
            CacheArgumentError: a source that is no row; nothing has changed.
            CacheBusyError: a `generate` or a forward of another thread is running on them.
            OutOfBlocksError: there is no memory to move what the pool has not got yet; the rows are dropped.
        """
        if isinstance(sources, Tensor):
            self._reorder(self.catch_up(sources), sources)
        else:
            self.catch_up()
            self._reorder(sources, None)

    def _reorder(self, sources: Sequence[int], index: Tensor | None) -> None:
        rows = self.rows
        with self.store.lock:
            self.require_no_generate_elsewhere()
            self.roll_back()
            if not rows.alias:
                return
            if not sources or min(sources) < 0 or max(sources) >= len(rows):
                raise CacheArgumentError(f"rows {list(sources)} asked for; the cache has rows 0 to {len(rows) - 1}")
            moves_in_view = self._held.may_move_in_view(rows, sources)
            if not moves_in_view:
                self._commit()
            self.view.change_places()
            index = None if rows.is_aliased else index
            try:
                origins, shared_columns = rows.select(sources)
                self._move(origins, shared_columns, index)
                if moves_in_view and not self.view.keeps_columns:
                    raise OutOfBlocksError(
                        f"out of memory while {len(rows)} rows changed places, so they were dropped; ask for fewer rows or "
                        "tokens, or free memory"
                    )
            except BaseException:
                for follower in self._followers:  # they may have moved by different amounts
                    follower.drop()
                if moves_in_view:  # what held steps wrote is lost
                    self._held.drop()
                    self._are_lost = True
                    rows.free()
                    self.rows = Rows([], [], 0)
                raise
            renew_reservation(self, rows.num_columns)

    def _move(self, sources: Sequence[int], shared_columns: int = 0, index: Tensor | None = None) -> None:
        """Running row `i` continues as row `sources[i]`, in all that is kept of rows; see `Follower`."""
        for follower in self._followers:
            follower.select(sources, shared_columns, index)

    def fork_rows(self) -> Rows:
        """The rows with forked tables, for another call on the same store.

        Raises:
            CacheArgumentError: gradients flow through the rows, and would not through their copies.
        """
        self.catch_up()
        with self.store.lock:
            self.roll_back()
            if self.writes.gradients:
                raise CacheArgumentError(
                    "gradients flow through the rows of this cache, and would not through a copy of them; copy it "
                    "after forwards in torch.no_grad()"
                )
            self._commit()
            if self.states is not None:
                self.states.park(self.rows, copies=True)
            forked = self.rows.fork()
            if self.states is not None:
                self.states.unpark(self.rows)
            return forked

    def take_over(self, rows: Rows, *, ended: bool = False) -> None:
        """Resume with these rows; there must be none yet.

        Args:
            ended: their call has ended, so they may be dropped.
        """
        with self.store.lock:
            self.rows, self._has_ended = rows, ended
            if self.states is not None:
                self.states.drop()
            self._num_columns_before = rows.num_columns

    def join(self, rows: Rows) -> None:
        """More rows continue with those that there are, from the same column: each from its origin, or from nothing.

        The store's lock is held.
        """
        self.plans_ahead = False
        if not self.rows.alias:
            self.take_over(rows)
        else:
            if self.states is not None:
                self.states.park(self.rows)
            self.rows.extend(rows)
        if self.states is not None:
            self.states.put(self.rows)

    def carried(self) -> States:
        """What layers carry of the running rows, uncopied; empty where none carries anything."""
        return {} if self.states is None else self.states.live.read()

    def read_layer(self, layer_idx: int) -> dict[str, Tensor]:
        """name -> [R, H, columns, D] of a layer's rows, a copy, with its gradients; empty without rows.

        All columns, or in a layer with a window those that the next token sees.
        """
        with self.store.lock:
            if not self.rows.alias or not self.store.pool.layer(layer_idx):
                return {}
            self._held.flush(self.rows, is_scheduled=self._is_open)
            read = gather_rows(self.store, layer_idx, self.rows)
            return self.writes.gradients.in_place_of(layer_idx, read, self.rows.alias, self.rows.num_columns)

    def end(self, *, failed: bool = False, conditions_held: bool = True) -> None:
        """`generate` is left: full blocks are committed; the rows stay, can resume, and can be matched.

        Args:
            failed: an exception ends it; then what the last forward computed may have been drafts.
            conditions_held: of the model, since it was last said here or to `confirm`. If not, nothing that was computed
                since then is found any more.
        """
        with self.store.lock:
            self.roll_back()
            self._measure()  # what attention reads may have grown since
            self.judge(conditions_held=conditions_held)
            if failed:
                if self._began_known and not self.num_scheduled:
                    self.rows.free()
                    self.rows = Rows([], [], 0)
                for row in self.rows.distinct:
                    row.stop_commits(max(0, self._num_columns_before - row.pad))
                self._restore_previous()
            self._commit()
            self._has_ended = True
            self.limits, self._may_step, self._are_lost = UNLIMITED, False, False
            self.store.give_back_reservation(self)
            self.view.pause()

    def drop_rows(self) -> None:
        """Give all blocks and the copy of the rows back; what was committed stays in the prefix cache.

        Raises:
            CacheBusyError: a `generate` or a forward of another thread is running on them.
        """
        with self.store.lock:
            self.check_not_busy()
            self.require_no_generate_elsewhere()
            self.roll_back()
            self.judge(conditions_held=False)  # in the middle of a call nobody has looked
            self._end_rows()
            self.previous.free()
            self.limits, self._may_step, self._are_lost = UNLIMITED, False, False
            for follower in self._followers:
                follower.drop()
            self.store.give_back_reservation(self)

    def leave_behind(self) -> None:
        """The cache is being collected, perhaps inside a line of ours: only note what the store will have to end."""
        if self.rows.distinct or self.rows.leaving:
            self.store.left_behind.append(self.rows)

    def leave_reservation(self) -> None:
        """The `generate` was left without its end; this may run inside a line of ours, so the store gives it back later."""
        self.store.left_behind.append(_Reservation(self))

    def lose_threads(self, idents: frozenset[int]) -> None:
        """These threads ended with a fork: drop the rows of a call that ran in one of them. The store's lock is held."""
        if self.brackets.lose_threads(idents) or self._thread in idents:
            self._held.drop()  # a forked child computes nothing before it runs
            self.drop_rows()

    def num_previous_blocks(self) -> int:
        """Blocks that only rows whose call is over hold."""
        rows = [*self.previous.distinct, *(self.rows.distinct if self.has_ended else [])]
        return num_blocks_held_only_by(rows, self.store)

    def check_not_busy(self) -> None:
        """Raises CacheBusyError while a forward of this call runs in another thread that lives."""
        if self._is_open:
            self.require_no_forward_elsewhere()

    def require_no_forward_elsewhere(self) -> None:
        """Raises CacheBusyError while another thread runs a forward on the cache, in whatever state the call is."""
        if is_on_a_stack(self._is_forward, of_other_threads=True):
            raise CacheBusyError(
                "this cache is running a forward in another thread; use one cache a call: "
                "PagedPrefixCache(cache.store) shares all blocks"
            )

    def require_no_generate_elsewhere(self) -> None:
        """Raises CacheBusyError while a `generate` of another thread is running."""
        if self.brackets.are_of_another_thread():
            raise CacheBusyError(
                "a generate call of another thread is running on this cache; change its rows when it has ended"
            )

    def _commit(self) -> None:
        """The pool catches up, full blocks are committed, and what layers carry at their ends is kept."""
        self._held.flush(self.rows)
        self.rows.commit()
        keep_image_ends(self.store, self.rows)
        if self.states is not None:
            self.states.keep_snapshots(self.rows)

    def judge(self, *, conditions_held: bool) -> None:
        """Keep or take back what was computed since the last judgement."""
        if conditions_held:
            self.rows.trust()
        else:
            if self.rows.committed:
                self.store.forget_blocks(self.rows.committed, self.salt)
            self.rows.distrust()

    def _end_rows(self) -> None:
        """The running rows become the previous ones; those before them are dropped."""
        if not self.rows.alias:
            if self.rows.leaving:
                self.rows.free()
            return
        self._held.drop()
        self.previous.free()
        self._commit()
        if self.states is not None:
            self.states.park(self.rows)
            self.states.drop()
        self.view.keep([row.layout()._replace(token_ids=row.true_token_ids) for row in self.rows.distinct])
        self.previous, self.rows = self.rows, Rows([], [], 0)

    def _restore_previous(self) -> None:
        """Where a call ends before it ran anything, the rows of the call before are there as they were."""
        if self.previous.alias and not self.rows.alias and not self.num_scheduled:
            previous, self.previous = self.previous, Rows([], [], 0)
            self.rows = previous  # interrupted above this line, they are gone, and their blocks given back
            self._num_columns_before = self.rows.num_columns
            self.view.drop()
            if self.states is not None:
                self.states.drop()
