"""The rows of one call between two forwards: they are cut, change places, are copied, end, and are given back.

What holds their columns changes here together: block tables, the view, held steps, and gradients. A forward that
was never confirmed is rolled back first. While somebody else runs the rows, nobody may change them.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from types import FrameType

from torch import Tensor

from ..attention.view import View
from ..errors import CacheArgumentError, CacheBusyError
from ..kv.states import LiveStates
from ..store.block_store import BlockStore
from .admission import UNLIMITED, CallLimits, num_blocks_held_only_by, renew_reservation
from .call_states import CallStates
from .held_steps import HeldSteps
from .layer_writes import LayerWrites
from .rows import Rows, gather_rows
from .running import Brackets, is_on_a_stack
from .scheduled_forward import ScheduledForward


class CallState(Enum):
    """Where a call stands; the value completes "the call ..."."""

    IDLE = "has no rows"
    SCHEDULED = "has scheduled a forward"
    CONFIRMED = "has rows and waits for a forward"
    ENDED = "has ended and keeps its rows"


class _Reservation:
    """Of a `generate` that nobody has ended."""

    def __init__(self, call: "CallRows") -> None:
        self._call = call

    def end(self) -> None:
        """Give it back, unless another one has begun since."""
        if not self._call.brackets:
            self._call.store.give_back_reservation(self._call)


class CallRows:
    """Rows that a cache holds, those of the call before, and who runs them.

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
        self.state = CallState.IDLE
        self.forward: ScheduledForward | None = None
        self.limits: CallLimits = UNLIMITED  # of the `generate` that runs
        self.rows = Rows([], [], 0)
        self.previous = Rows([], [], 0)  # of the call before, matched by the next one
        self.num_scheduled = 0  # forwards since `begin`
        self.brackets = Brackets()
        self.kept_by: Callable[[], object | None] = lambda: None  # who needs the rows between two of their forwards
        self._held = HeldSteps(store, view)
        self._writes = LayerWrites(store, view, self._held)
        self.states = CallStates(store, LiveStates({}) if live is None else live)
        self._is_forward = is_forward
        self._thread = 0  # that began or went on with the rows, but for decode steps
        self._is_first = False  # the scheduled forward is the first of its rows
        self._may_step = False  # rows go on under the conditions that they have run under
        self._num_columns_before = 0  # columns before the last confirmed forward

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
        if self.state is not CallState.SCHEDULED and self.forward is None:
            return
        self.check_not_busy()
        with self.store.lock:
            if self.state is not CallState.SCHEDULED:  # another thread's `crop` is done, or `confirm` was, but for this
                self.forward = None
                return
            forward, self.forward = self.forward, None
            if forward is not None and self.rows.num_columns == forward.stop:  # `confirm` had come so far
                self.states.column = forward.stop
                self.state = CallState.CONFIRMED
                return
            if self.states.are_torn:
                self.states.lose()
                self._may_step = False
            self._held.take_back(self.rows)
            self.view.drop()  # some layers have the forward's columns and some have not
            self._writes.gradients.crop(self.rows.num_columns)
            if self._is_first:
                self.states.forget()
                self.rows.free()
                self.rows = Rows([], [], 0)
                self.store.give_back_reservation(self)
                self.state = CallState.IDLE
            else:
                self.rows.roll_back()
                self.states.unpark(self.rows)
                self.state = CallState.CONFIRMED
                if not self.limits.are_known:
                    self.store.give_back_reservation(self)

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
                self.states.crop(0, rows.num_columns)
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
            self.view.crop(kept)
            self._writes.gradients.crop(kept)
            self.states.crop(num_columns, kept)
            self._may_step = self._may_step and not self.states.are_torn
            self._num_columns_before = min(self._num_columns_before, kept)
            renew_reservation(self.store, self, rows, self.limits, kept)

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
        rows, view = self.rows, self.view
        with self.store.lock:
            self.require_no_generate_elsewhere()
            self.roll_back()
            if not rows.alias:
                return
            if not sources or min(sources) < 0 or max(sources) >= len(rows):
                raise CacheArgumentError(f"rows {list(sources)} asked for; the cache has rows 0 to {len(rows) - 1}")
            self._held.flush(rows)
            self._held.write_at_once()
            self._commit()
            try:
                if rows.is_aliased:
                    origins = rows.separate()
                    view.expand_rows(origins)
                    self._writes.gradients.select_rows(origins)
                    self.states.select(origins)
                same_number = len(sources) == len(rows)
                shared_columns = rows.select(sources)
                self._writes.gradients.select_rows(sources)
                self.states.select(sources, index)
                if same_number:
                    view.reorder_rows(sources, shared_columns, index)
                else:
                    view.drop()
            except BaseException:
                view.drop()  # tables and contiguous copy may have moved by different amounts
                self.states.lose()
                raise
            renew_reservation(self.store, self, rows, self.limits, rows.num_columns)

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
            self._commit()
            self.states.park(self.rows, copies=True)
            forked = self.rows.fork()
            self.states.unpark(self.rows)
            return forked

    def take_over(self, rows: Rows, *, ended: bool = False) -> None:
        """Go on with these rows; there must be none yet.

        Args:
            ended: their call has ended, so they may be dropped.
        """
        with self.store.lock:
            self.rows = rows
            self.states.take_over(rows)
            self._num_columns_before = rows.num_columns
            kept = CallState.ENDED if ended else CallState.CONFIRMED
            self.state = kept if rows.alias else CallState.IDLE

    def join(self, rows: Rows) -> None:
        """More rows go on with those that there are, from the same column: each from its origin, or from nothing.

        The store's lock is held.
        """
        self.states.plans_ahead = False
        if not self.rows.alias:
            self.take_over(rows)
        else:
            self.states.park(self.rows)
            self.rows.extend(rows)
        self.states.put(self.rows)

    def read_layer(self, layer_idx: int) -> dict[str, Tensor]:
        """name -> [R, H, columns, D] of a layer's rows, a copy, with its gradients; empty without rows.

        All columns, or in a layer with a window those that the next token sees.
        """
        with self.store.lock:
            if not self.rows.alias or not self.store.pool.layer(layer_idx):
                return {}
            self._held.flush(self.rows, is_scheduled=self.state is CallState.SCHEDULED)
            read = gather_rows(self.store, layer_idx, self.rows)
            return self._writes.gradients.in_place_of(layer_idx, read, self.rows.alias, self.rows.num_columns)

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
            self.judge(conditions_held=conditions_held)
            if failed:
                for row in self.rows.distinct:
                    row.stop_commits(max(0, self._num_columns_before - row.pad))
                self._restore_previous()
            self._commit()
            if self.rows.alias:
                self.state = CallState.ENDED
            self.limits, self._may_step = UNLIMITED, False
            self.store.give_back_reservation(self)
            self.view.pause()

    def drop_rows(self) -> None:
        """Give all blocks and the contiguous copy back; what was committed stays in the prefix cache.

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
            self.limits, self._may_step = UNLIMITED, False
            self.view.drop()
            self._writes.gradients.clear()
            self.store.give_back_reservation(self)

    def leave_behind(self) -> None:
        """The cache is being collected, perhaps inside a line of ours: only note what the store will have to end."""
        if self.rows.distinct:
            self.store.left_behind.append(self.rows)

    def leave_reservation(self) -> None:
        """The `generate` was left without its end; this may run inside a line of ours, so the store gives it back later."""
        self.store.left_behind.append(_Reservation(self))

    def lose_threads(self, idents: frozenset[int]) -> None:
        """These threads ended with a fork: drop the rows of a call that ran in one of them. The store's lock is held."""
        if self.brackets.lose_threads(idents) or self._thread in idents:
            self._held.give_up(self.rows)  # a forked child computes nothing before it runs
            self._held.forget()
            self.drop_rows()

    def num_previous_blocks(self) -> int:
        """Blocks that only rows whose call is over hold."""
        rows = [*self.previous.distinct, *(self.rows.distinct if self.has_ended else [])]
        return num_blocks_held_only_by(rows, self.store)

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

    def require_no_generate_elsewhere(self) -> None:
        """Raises CacheBusyError while a `generate` of another thread is running."""
        if self.brackets.are_of_another_thread():
            raise CacheBusyError(
                "a generate call of another thread is running on this cache; change its rows when it has ended"
            )

    def _commit(self) -> None:
        """Commit full blocks, and keep what layers carry at their ends."""
        self.rows.commit()
        if self.states:
            self.states.keep_snapshots(self.rows)

    def judge(self, *, conditions_held: bool) -> None:
        """Keep or take back what was computed since the last judgement."""
        if conditions_held:
            self.rows.trust()
        else:
            self.store.forget_blocks(self.rows.committed, self.salt)
            self.rows.distrust()

    def _end_rows(self) -> None:
        """The running rows become the previous ones; those before them are dropped."""
        if not self.rows.alias:
            return
        self._held.give_up(self.rows)
        self.previous.free()
        self._commit()
        self.states.park(self.rows)
        self.states.forget()
        self.view.keep([row.layout()._replace(token_ids=row.true_token_ids) for row in self.rows.distinct])
        self.previous, self.rows = self.rows, Rows([], [], 0)
        self.state = CallState.IDLE
        self._held.forget()

    def _restore_previous(self) -> None:
        """Where a call ends before it ran anything, the rows of the call before are there as they were."""
        if self.previous.alias and not self.rows.alias and not self.num_scheduled:
            previous, self.previous = self.previous, Rows([], [], 0)
            self.rows = previous  # interrupted above this line, they are gone, and their blocks given back
            self.states.take_over(previous)
            self._num_columns_before = self.rows.num_columns
            self.view.drop()
