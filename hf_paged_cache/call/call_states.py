"""What layers carry of a call's rows, from their first forward to the end: where rows may resume, and when snapshots are taken.

States are written in place, by the model. So those of the running rows count only while no forward runs, and none has died.
The store's lock is held by whoever calls.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from ..blocks.image_tokens import hold_images
from ..errors import ForwardMismatchError
from ..kv.states import LiveStates, StateKey, States, copied, row_of, select_rows, stacked
from ..store.block_store import BlockStore
from .plan import Bounds, PlannedRow, plan
from .prefix_match import Found, match_states
from .rows import Origin, Row, Rows
from .scheduled_forward import ForwardRequest

_LOST = (
    "what layers with a state carry of these rows is lost, because a forward died or tokens were taken back, and it cannot be "
    "computed again here; reset() the cache"
)


class CallStates:
    """The states of one call's rows, a `Follower`.

    Attributes:
        are_whole: the layers carry what is after all columns of the rows; not while a forward runs, nor after one has died.
    """

    def __init__(self, store: BlockStore, live: LiveStates) -> None:
        self._store = store
        self.live = live
        self.are_whole = False

    def are_lost(self, rows: Rows) -> bool:
        """Whether the running rows must be brought back to where they stand."""
        return not self.are_whole and rows.num_columns > 0

    def num_needed(self, request: ForwardRequest) -> int:
        """So many of a prompt's last columns run in the forward over all rows."""
        is_padding = not all(row.token_ids for row in request.rows)
        return max(self.num_needed_of(request.num_new_columns, is_padding=is_padding), request.num_logits_needed)

    def num_needed_of(self, num_columns: int, *, is_padding: bool = False) -> int:
        """The same of a prompt of so many columns of which the last logits alone are asked for.

        Args:
            is_padding: a row has nothing but padding in them; of one column, models do not look whether it is padding.
        """
        return 2 if num_columns > 1 and (is_padding or self._store.states.rules.clamps_one_token) else 1

    def latest_start(self, rows: Rows, request: ForwardRequest) -> int:
        """The forward over all rows starts no further right: what is asked of it is computed in it."""
        return request.latest_start(rows.num_columns, self.num_needed(request))

    def find(self, rows: Rows, request: ForwardRequest, found: Sequence[Found] = ()) -> list[Found]:
        """Rows have begun, or resume: say from where each may, in its `origin`.

        Args:
            found: of each row of the batch, what is known of its tokens; none where they resume.

        Returns:
            the same, less what no state is known after.
        """
        if self.stands(rows):
            self.park(rows)
            if request.num_new_columns <= self.num_needed(request):
                return [*found]
        before, latest = rows.num_columns, self.latest_start(rows, request)
        origins = [row.origin for row in rows.distinct]
        found = [*found]
        for number, row in enumerate(rows.distinct):
            if request.bypass is not None or (row.commit_end is not None and row.commit_end < row.num_confirmed):
                continue
            why = match_states(self._store, row, max(0, latest - row.pad))
            if why and found:
                found = [
                    Found(row_origin(row), why) if rows.alias[at] == number else each for at, each in enumerate(found)
                ]
        go_on = all(
            origin is not None and origin.num_tokens == max(0, before - row.pad)
            for row, origin in zip(rows.distinct, origins, strict=True)
        )
        # together, as they stand
        if before and go_on and len({planned.start for planned in self.as_planned(rows)}) > 1:
            for row, origin in zip(rows.distinct, origins, strict=True):
                row.origin = origin
        return found

    def stands(self, rows: Rows) -> bool:
        """Whether the layers carry what is after all columns of the rows."""
        return self.are_whole and rows.num_columns > 0

    def as_planned(self, rows: Rows) -> list[PlannedRow]:
        """The running rows, for a plan."""
        planned = []
        for row in rows.distinct:
            known, start = row_origin(row), None
            if row.origin is not None and (known or row.origin.states):
                start = row.pad + known if known > 0 else rows.num_columns
            elif 0 < rows.num_columns <= row.pad:
                start = rows.num_columns  # padding so far: it begins there as well as anywhere
            planned.append(PlannedRow(row.pad, start))
        return planned

    def joint_column(self, rows: Rows, request: ForwardRequest) -> int:
        """Where all rows can resume together, without a forward of our own; rows whose states do not fit begin anew.

        Raises:
            ForwardMismatchError: there is no such column: what layers carry is lost.
        """
        before, stop = rows.num_columns, rows.num_columns + request.num_new_columns
        width = self._store.states.rules.width
        bounds = Bounds(before, stop, self.latest_start(rows, request), forward_cost=0, is_exact=True, width=width)
        found = plan(self.as_planned(rows), bounds, may_run_ahead=False)
        if found is None:
            self.require_known(rows)
            raise ForwardMismatchError(_LOST)
        self.begin_anew(rows, found.cold, found.column)
        return found.column

    def begin_anew(self, rows: Rows, cold: Collection[int], column: int | None) -> None:
        """These running rows do not resume from what is known of their states, unless that is at `column`."""
        for number in cold:
            row = rows.distinct[number]
            if row_origin(row) != max(0, (column or 0) - row.pad):
                row.origin = None

    def stop_commits(self, rows: Rows, request: ForwardRequest) -> None:
        """Where one token is computed otherwise than several, nothing that was computed so is ever found."""
        if rows.num_columns and request.num_new_columns == 1:
            self.stop_step_commits(rows)

    def stop_step_commits(self, rows: Rows) -> None:
        """The same for a decode step."""
        if self._store.states.rules.clamps_one_token:
            for row in rows.distinct:
                row.stop_commits(row.num_confirmed)

    def require_known(self, rows: Rows) -> None:
        """Refuse rows whose tokens alone do not say what layers carry after them.

        Raises:
            ForwardMismatchError: there are such.
        """
        for row in rows.distinct:
            if row.num_true_tokens < row.num_confirmed or hold_images(row.table.token_ids):
                raise ForwardMismatchError(_LOST)

    def start_forward(self, rows: Rows, column: int, stop: int) -> None:
        """A forward of the columns `[column, stop)` begins: of each row, its origin is there, or it is padding so far."""
        at_hand = (
            self.are_whole
            and rows.num_columns == column
            and all(row.origin is None or row.origin.num_tokens == max(0, column - row.pad) for row in rows.distinct)
        )
        self.are_whole = False  # until it is confirmed
        if column == 0:
            self.live.clear()
        elif not at_hand:
            self.live.put(stacked([{} if row.origin is None else row.origin.states for row in rows.distinct]))
        for row in rows.distinct:
            row.origin = None
            # what is computed again is known no more: what comes after it follows from what is computed now
            row.num_known = min(row.num_known, max(0, column - row.pad))
        self.record(rows, column, stop)

    def keep_last(self, rows: Rows) -> None:
        """A decode step begins, before which blocks were filled: where that is a place for one, a row gets a snapshot.

        It takes the place of the one that the row got before it.
        """
        states, held = self._store.states, None
        for number, row in enumerate(rows.distinct):
            num_tokens = row.num_confirmed
            if num_tokens % states.align or num_tokens > row.table.num_committed_blocks * self._store.block_size:
                continue
            held = self.live.read() if held is None else held
            if self._keep(rows, row, num_tokens, row_of(held, number)):
                if row.last_kept:
                    states.drop(row.table.block_ids, row.last_kept)
                row.last_kept = num_tokens

    def keep_snapshots(self, rows: Rows) -> None:
        """Blocks were committed: keep what was recorded of the last forward, and what is after it, where that is a place for one."""
        states, recorder = self._store.states, self.live.recorder
        if recorder.recorded:
            for at, (number, num_tokens) in enumerate(recorder.places):
                row = rows.distinct[number]
                if num_tokens <= row.num_true_tokens:
                    recorded = {key: held[at : at + 1] for key, held in recorder.recorded.items()}
                    self._keep(rows, row, num_tokens, recorded)
        recorder.start_forward()
        if not self.stands(rows):
            return
        held: Mapping[StateKey, Tensor] | None = None
        for number, row in enumerate(rows.distinct):
            num_tokens = row.num_confirmed
            if num_tokens > 0 and num_tokens % states.align == 0 and row.num_true_tokens == num_tokens:
                held = self.live.read() if held is None else held
                self._keep(rows, row, num_tokens, row_of(held, number))

    def _keep(self, rows: Rows, row: Row, num_tokens: int, states: States) -> bool:
        """Keep a snapshot of a row; whether that is new. Where the conditions of its tokens turn out not to have held, its block
        is forgotten, and it with that, also where others have committed the block.
        """
        states_of, block_ids = self._store.states, row.table.block_ids
        is_new = states_of.keep(block_ids, num_tokens, states)
        if is_new and row.num_trusted < num_tokens:
            block_hash = self._store.allocator.block_hash_of(block_ids[num_tokens // self._store.block_size - 1])
            if block_hash is not None:
                rows.committed.append(block_hash)
        return is_new

    def record(self, rows: Rows, start: int, stop: int) -> None:
        """A forward is scheduled whose convolutions show their states at all of its columns."""
        states = self._store.states
        if not states.rules.is_recorded or stop - start < states.align:
            self.live.recorder.start_forward()
            return
        places = [
            (number, num_tokens)
            for number, row in enumerate(rows.distinct)
            for num_tokens in range(states.align, stop - row.pad, states.align)
            if num_tokens + row.pad > start and not states.has(row.table.block_ids, num_tokens)
        ][: states.kept.most]
        columns = [num_tokens + rows.distinct[number].pad - start for number, num_tokens in places]
        self.live.recorder.start_forward(stop - start, places, columns)

    def select(self, sources: Sequence[int], shared_columns: int = 0, index: Tensor | None = None) -> None:
        """See `Follower`."""
        if self.are_whole:
            self.are_whole = False  # interrupted, some layers have changed
            self.live.select(sources, index)
            self.are_whole = True

    def crop(self, start: int, stop: int) -> None:
        """See `Follower`; of no columns, what was kept to take drafts back may go."""
        were_whole, self.are_whole = self.are_whole, False
        is_cropped = were_whole and self.live.crop(stop - start)
        if is_cropped or start == stop:
            self.are_whole = were_whole
        else:
            self.drop()

    def drop(self) -> None:
        """The rows have ended, a forward has died, or what layers carry is of other tokens."""
        self.are_whole = False
        self.live.clear()
        self.live.recorder.start_forward()

    def of_batch(self, rows: Rows) -> dict[StateKey, Tensor]:
        """Copies of what layers carry of each row of the batch, for a call that resumes without the store.

        Raises:
            ForwardMismatchError: it is lost.
        """
        if not rows.num_columns:
            return {}
        if self.stands(rows):
            return select_rows(self.live.read(), rows.alias)
        origins = [row.origin for row in rows.distinct]  # of rows that were taken over from another call
        if not all(
            origin is not None and origin.num_tokens == max(0, rows.num_columns - row.pad)
            for origin, row in zip(origins, rows.distinct, strict=True)
        ):
            raise ForwardMismatchError(_LOST)
        return select_rows(stacked([origin.states for origin in origins if origin is not None]), rows.alias)

    def park(self, rows: Rows, *, copies: bool = False) -> None:
        """Give each row what layers carry of it, where that is known: the rows end here, or are copied."""
        if not self.stands(rows):
            return
        held: Mapping[StateKey, Tensor] = self.live.read()
        if copies:
            held = copied(held)
        for number, row in enumerate(rows.distinct):
            row.origin = Origin(row.num_confirmed, row_of(held, number))

    def unpark(self, rows: Rows) -> None:
        """The rows resume here: what the layers carry of them is overwritten, and nobody may resume from it."""
        if self.stands(rows):
            for row in rows.distinct:
                row.origin = None

    def put(self, rows: Rows) -> None:
        """Let the layers carry what is at the rows' origins; of a row without one, nothing."""
        self.are_whole = False
        self.live.clear()
        if rows.num_columns:
            self.live.put(stacked([{} if row.origin is None else row.origin.states for row in rows.distinct]))
        for row in rows.distinct:
            row.origin = None
        self.are_whole = True


def row_origin(row: Row) -> int:
    """Tokens after which a row may resume; 0: from its beginning."""
    return 0 if row.origin is None else row.origin.num_tokens
