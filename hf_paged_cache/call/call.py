"""One running call: the only place that decides what is committed and freed. Each event names when it may come.

    idle -> announced -> written -> confirmed -> announced ... -> ended -> idle
    announced | written -> rolled back to idle or confirmed

A *ticket* is one announced forward. Only its writes are let through, and only what was confirmed is ever committed:
when the next forward is announced, so that a draft that `crop` takes back never was. Torch tensors pass through here
to pool and reader, unread.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from weakref import ref

import torch
from torch import Tensor

from ..attention.base import Reader
from ..errors import CacheArgumentError, CacheBusyError, ForwardMismatchError
from ..store.block_store import BlockStore
from .admission import num_blocks_held_only_by, renew_reservation
from .call_state import Bracket, CallLimits, CallState, no_bracket
from .counters import PromptCounts
from .forward_thread import ForwardThread
from .layer_writes import LayerWrites
from .plan import KnownRow, first_column
from .prepare import admit, begin_rows_that_fit, continue_rows, is_step, slot_mapping, take_blocks, take_step
from .reordering import reorder_rows
from .rows import Row, Rows, gather_rows
from .scheduled_forward import ForwardRequest, ScheduledForward

_OPEN = (CallState.ANNOUNCED, CallState.WRITTEN)


class Call:
    """The rows that one cache runs, from their first forward to the end.

    Args:
        store: where their blocks are.
        reader: what attention reads of them.
    """

    def __init__(self, store: BlockStore, reader: Reader) -> None:
        self.store = store
        self.reader = reader
        self.state = CallState.IDLE
        self.ticket: ScheduledForward | None = None
        self.limits: CallLimits | None = None  # None: no `generate` is running
        self.rows = Rows([], [], 0)
        self._before = Rows([], [], 0)  # of the call before, matched by the next one
        self.counts = PromptCounts()
        self.num_announced = 0  # forwards announced since `begin`
        self.peak_kv_bytes = 0
        self._bracket: Callable[[], Bracket | None] = no_bracket  # of the `generate` that runs
        self._writes = LayerWrites(store, reader)
        self._thread = ForwardThread()
        self._is_first = False  # the ticket is the first of its rows
        self._num_columns_before = 0  # columns before the last confirmed forward
        store.add_holder(self)

    @property
    def ended(self) -> list[Row]:
        """The rows of the call before."""
        return self._before.distinct

    @property
    def num_columns(self) -> int:
        """Columns that the next tokens come behind: those before the ticket's, or all confirmed ones."""
        if self.ticket is None:
            return self.rows.num_columns
        return max(self.rows.num_columns, self.ticket.start)  # more than `start` only where `confirm` was interrupted

    @property
    def is_running(self) -> bool:
        """Whether a `generate` is running, a forward in another thread, or rows of plain forwards that may go on."""
        goes_on = self.state is CallState.CONFIRMED and bool(self.rows.alias)
        return goes_on or self._bracket() is not None or self._runs_in_another_thread()

    def begin(self, bracket: Bracket, limits: CallLimits | None, *, keep_rows: bool) -> None:
        """`generate` is entered: the rows so far have ended, unless only new tokens are passed.

        Args:
            bracket: lives as long as that `generate`; however it is left, even between two of our lines, the call is
                then no longer running.
        """
        with self.store.lock:
            self.check_not_busy()
            self.roll_back()
            if not keep_rows:
                self._end_rows()
            self._bracket = ref(bracket)
            self.limits = limits
            self.num_announced = 0
            self._num_columns_before = self.rows.num_columns
            self.counts.start_call()
            self.peak_kv_bytes = 0

    def announce(self, request: ForwardRequest) -> ScheduledForward:
        """A forward is about to run: find what is known of it, take its blocks, and say what may be written.

        Raises:
            CacheBusyError: a forward of this call is running in another thread.
            CacheArgumentError: the request has other rows than the call, or no column.
            OutOfBlocksError: the call does not fit; running rows are as before.
        """
        with self.store.lock:
            self.check_not_busy()
            self.roll_back()
            if request.num_new_columns < 1:
                raise CacheArgumentError(
                    f"a forward of no tokens, on a cache with {self.num_columns} columns: pass at least one token id in each "
                    "row; a generate that is not the attached one needs cache.reset() first"
                )
            self.store.settle()
            if self._bracket() is None:
                self.limits = None
            self.rows.commit()
            self._is_first = not self.rows.alias
            self._thread.start()
            self._writes.start()
            self.state = CallState.ANNOUNCED
            try:
                self.ticket = self._announce(request)
            except BaseException:
                self.roll_back()
                raise
            self.num_announced += 1
            return self.ticket

    def write(self, layer_idx: int, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Store a layer's new keys and values and return what its attention reads.

        Shapes: [R, H, T, D] with the ticket's rows and columns; returns [R, H, stop, D].
        Raises:
            ForwardMismatchError: no ticket is open, the shapes are not the ticket's, or the layer has written that already.
            PoolArgumentError: this layer's states are no [R, H, T, D] of the sizes that it has had.
        """
        ticket = self.ticket
        if ticket is None:
            raise ForwardMismatchError(
                "run the model that the cache was built for, through its own __call__, not model.model(...) and not "
                "another model, which wants PagedPrefixCache(model) of its own; after detach(), `with cache:` attaches it "
                f"again: layer {layer_idx} writes to a cache whose call {self.state.value}"
            )
        with self.store.lock:
            read = self._writes.write(layer_idx, states, ticket)
            self.state = CallState.WRITTEN
            return read

    def write_step(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """The fast path of `write`, for a "key" and a "value" of one token a row; None where `write` must be called."""
        ticket = self.ticket
        if ticket is None or not ticket.is_step or torch.is_grad_enabled():
            return None
        with self.store.lock:
            read = self._writes.write_step(layer_idx, key, value, ticket.target)
            if read is not None:
                self.state = CallState.WRITTEN
            return read

    def confirm(self) -> None:
        """The forward has returned: what it wrote counts.

        Raises:
            ForwardMismatchError: a layer has not written; the ticket is rolled back.
        """
        ticket = self.ticket
        if ticket is None:
            raise ForwardMismatchError(f"nothing to confirm: the call {self.state.value}")
        with self.store.lock:
            try:
                self._writes.require_all()
            except ForwardMismatchError:
                self.roll_back()
                raise
            if not self.store.writing_layers:
                self.store.writing_layers = frozenset(self._writes.written)
                self.store.settle_budget()
            self._num_columns_before = self.rows.num_columns
            self.rows.confirm(ticket.stop)
            self.state = CallState.CONFIRMED
            self.ticket = None
            self.counts.confirm()
            self.peak_kv_bytes = max(self.peak_kv_bytes, self.store.kv_bytes_in_use + self.reader.num_bytes)

    def roll_back(self) -> None:
        """Take back a ticket that was never confirmed. Without one: nothing."""
        if self.state not in _OPEN:
            return
        self.check_not_busy()
        with self.store.lock:
            if self.ticket is not None and self.rows.num_columns == self.ticket.stop:  # `confirm` had come so far
                self.state = CallState.CONFIRMED
                self.ticket = None
                return
            self.ticket = None
            self.reader.drop()  # some layers have the forward's columns and some have not
            if self._is_first:
                self.rows.free()
                self.rows = Rows([], [], 0)
                self.store.reserve(self, 0)
                self.state = CallState.IDLE
            else:
                self.rows.roll_back()
                self.state = CallState.CONFIRMED

    def reorder(self, sources: Sequence[int]) -> None:
        """Batch row `i` goes on as batch row `sources[i]` (beam search); there may be more or fewer rows than before.

        Raises:
            CacheArgumentError: a source that is no row.
        """
        with self.store.lock:
            self.roll_back()
            if not self.rows.alias:
                return
            reorder_rows(self.rows, self.reader, sources)
            renew_reservation(self.store, self, self.rows, self.limits)

    def crop(self, num_columns: int) -> None:
        """Take the last `num_columns` columns back.

        Raises:
            CacheArgumentError: there are not that many.
        """
        with self.store.lock:
            self.roll_back()
            if num_columns == 0 or not self.rows.alias:
                return
            if num_columns > self.rows.num_columns:
                raise CacheArgumentError(
                    f"cannot crop {num_columns} tokens; give 0 to {self.rows.num_columns}, what there is"
                )
            kept = self.rows.num_columns - num_columns
            self.rows.num_columns = kept
            self._is_first, self.state = False, CallState.ANNOUNCED  # interrupted, the next event cuts all rows alike
            self.rows.crop(kept)
            self.state = CallState.CONFIRMED
            self.reader.crop(kept)
            self._num_columns_before = min(self._num_columns_before, kept)
            renew_reservation(self.store, self, self.rows, self.limits)

    def end(self, *, failed: bool = False) -> None:
        """`generate` is left: complete blocks are committed; the rows stay, can go on, and can be matched.

        Args:
            failed: an exception ends it; then what the last forward computed may have been drafts.
        """
        with self.store.lock:
            self.roll_back()
            if failed:
                for row in self.rows.distinct:
                    row.stop_commits(max(0, self._num_columns_before - row.pad))
                self._restore_ended()
            self.rows.commit()
            if self.rows.alias:
                self.state = CallState.ENDED
            self._bracket, self.limits = no_bracket, None
            self.store.reserve(self, 0)
            self.reader.pause()

    def drop_rows(self) -> None:
        """Give all blocks and the view back; what was complete stays in the prefix cache.

        Raises:
            CacheBusyError: a `generate` or a forward of another thread is running on them.
        """
        with self.store.lock:
            self.check_not_busy()
            bracket = self._bracket()
            if bracket is not None and bracket.thread != threading.get_ident():
                raise CacheBusyError(
                    "a generate call of another thread is running on this cache; reset it when it has ended"
                )
            self.roll_back()
            self._end_rows()
            self._before.free()
            self._bracket, self.limits = no_bracket, None
            self.reader.drop()
            self.store.reserve(self, 0)

    def fork_rows(self) -> Rows:
        """The rows with forked tables, for another call on the same store."""
        with self.store.lock:
            self.roll_back()
            self.rows.commit()
            return self.rows.fork()

    def take_over(self, rows: Rows, *, ended: bool = False) -> None:
        """Go on with these rows; there must be none yet.

        Args:
            ended: their call has ended, so they may be dropped.
        """
        self.rows = rows
        self._num_columns_before = rows.num_columns
        kept = CallState.ENDED if ended else CallState.CONFIRMED
        self.state = kept if rows.alias else CallState.IDLE

    def leave_behind(self) -> None:
        """The cache is being collected, perhaps inside a line of ours: only note what the store will have to end."""
        if self.rows.distinct:
            self.store.left_behind.append(self.rows)

    def read_layer(self, layer_idx: int) -> dict[str, Tensor]:
        """name -> [R, H, columns, D] of a layer's rows, gathered from the pool; empty without rows."""
        with self.store.lock:
            if not self.rows.alias or layer_idx not in self.store.pool.layer_indices:
                return {}
            return gather_rows(self.store.pool, layer_idx, self.rows)

    def check_not_busy(self) -> None:
        """Raises CacheBusyError while a forward of this call runs in another thread that lives."""
        if self._runs_in_another_thread():
            raise CacheBusyError(
                "this cache is running a forward in another thread; use one cache a call: "
                "PagedPrefixCache(cache.store) shares all blocks"
            )

    def _runs_in_another_thread(self) -> bool:
        return self.ticket is not None and self._thread.is_another()

    def num_previous_blocks(self) -> int:
        """Blocks that only rows whose call is over hold."""
        rows = [*self.ended, *(self.rows.distinct if self.state is CallState.ENDED else [])]
        return num_blocks_held_only_by(rows, self.store)

    def _announce(self, request: ForwardRequest) -> ScheduledForward:
        store, limits, before = self.store, self.limits, self.rows.num_columns
        stop = before + request.num_new_columns
        if not self._is_first and is_step(request, self.rows):
            return self._announce_step(request)
        if self._is_first:
            if limits is None:
                self.counts.start_call()
            self.rows, matches = begin_rows_that_fit(store, self, request, limits, num_columns=stop, ended=self.ended)
            self.counts.note_matches(matches)
        elif (sources := continue_rows(store, request, self.rows)) is not None:
            self.reader.expand_rows(sources)
        rows = self.rows
        if limits is not None and self.num_announced == 0:
            admit(store, self, rows, limits, num_columns=stop, ended=self.ended)
        self._before.free()
        members = rows.members()
        known = [KnownRow(row.pad, row.table.num_tokens) for row in rows.distinct]
        start = before
        if request.keep_columns is None and request.bypass is None:
            start = first_column(known, start=before, stop=stop, num_needed=request.num_logits_needed)
        end_of_prompt = None if limits is None else limits.num_prompt_columns
        self.counts.announce(
            request, members, known, before=before, start=start, stop=stop, end_of_prompt=end_of_prompt
        )
        num_taken = take_blocks(store, self, rows, [request.rows[member].token_ids for member in members], limits)
        if num_taken:
            renew_reservation(store, self, rows, limits, stop)
        if self._is_first:
            self.reader.start_rows(
                rows.layouts(),
                stop,
                max_rows=max(len(rows), 0 if limits is None else limits.num_rows),
                max_columns=None if limits is None else limits.max_columns,
            )
        self.reader.start_forward(rows.layouts, len(rows.distinct), start, stop)
        copies = tuple(rows.alias) if rows.is_aliased else None
        return ScheduledForward(start, stop, tuple(members), copies, slot_mapping(rows, known, start, stop))

    def _announce_step(self, request: ForwardRequest) -> ScheduledForward:
        """What `_announce` comes to when each row goes on by one token."""
        rows, before = self.rows, self.rows.num_columns
        members = range(len(rows))
        end_of_prompt = None if self.limits is None else self.limits.num_prompt_columns
        known: list[KnownRow] = []
        if end_of_prompt is None or before < end_of_prompt:  # else nothing is counted
            known = [KnownRow(row.pad, row.num_confirmed) for row in rows.distinct]
        self.counts.announce(
            request, members, known, before=before, start=before, stop=before + 1, end_of_prompt=end_of_prompt
        )
        num_taken, target = take_step(self.store, self, rows, request, self.limits)
        if num_taken:
            renew_reservation(self.store, self, rows, self.limits, before + 1)
        self.reader.start_forward(rows.layouts, len(rows), before, before + 1)
        return ScheduledForward(before, before + 1, tuple(members), None, target, is_step=True)

    def _end_rows(self) -> None:
        """The running rows become ended rows; those before them are dropped."""
        if not self.rows.alias:
            return
        self._before.free()
        self.rows.commit()
        self.reader.keep([row.layout()._replace(token_ids=row.true_token_ids) for row in self.rows.distinct])
        self._before, self.rows = self.rows, Rows([], [], 0)
        self.state = CallState.IDLE

    def _restore_ended(self) -> None:
        """Where a call ends before it ran anything, the rows that had ended for it are there as before."""
        if self._before.alias and not self.rows.alias and not self.num_announced:
            before, self._before = self._before, Rows([], [], 0)
            self.rows = before  # interrupted above this line, they are gone, and their blocks given back
            self._num_columns_before = self.rows.num_columns
            self.reader.drop()
