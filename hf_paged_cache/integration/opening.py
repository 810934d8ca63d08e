"""The first forward of rows: its prompt is read, what is known of it is leased, rows are filled with it, and the rest is left to run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..attention.shared_reads import MODEL_LOOKS
from ..blocks.roots import RootFacts
from ..call.admission import UNLIMITED
from ..call.call_state import CallState
from ..call.fill import fill
from ..call.match import Known, match, previous_rows
from ..call.record import count_bypassed, count_prompt
from ..call.rows import Rows as NoRows
from ..call.scheduled_forward import ForwardRequest, RowInput
from ..kv.stopwatch import Stopwatch
from ..model.conditioning import Conditioning
from ..model.support import cache_layers
from ..rows.layers import SPARE
from ..rows.rows import Rows, RunsRows
from ..rows.shared import Looks
from ..store.block_store import BlockStore
from .capturing import Capturing
from .current import drain
from .forward_arguments import ArgumentReader, RunningRows, for_scheduled
from .image_inputs import ImageInputs
from .keeping import Keeping
from .shared_prefill import SharedPrefill
from .side_forward import SideForwards

GRADIENTS = (
    "gradients are on and may flow through every token (run the forward in torch.no_grad() where none are needed)"
)
_MOST_MAPPED_AHEAD = 4096  # columns, of prompts that are shorter
_MOST_TAKEN_BACK = 32  # tokens of drafts that layers with a window can take back
_NO_ROWS = NoRows([], [], 0)  # of a first forward


class Cut(NamedTuple):
    """Which rows and columns of the first forward run: see `forward_arguments.Cut`."""

    start: int
    sources: Sequence[int]
    copies: Sequence[int] | None


class _Prompt(NamedTuple):
    """What a first forward asks for.

    Attributes:
        running: the rows that run; equal ones are one.
        members: row that runs -> the row of the batch that it is.
        copies: row of the batch -> the row that runs for it.
        adapters: of each row of the batch, where PEFT was told.
    """

    request: ForwardRequest
    running: Sequence[RowInput]
    members: Sequence[int]
    copies: Sequence[int]
    adapters: list[str] | None
    may_alias: bool


class _Begun(NamedTuple):
    """How rows have begun.

    Attributes:
        num_found: tokens of each running row that were there before the call.
        start: the column from which on they run.
        ahead: row that runs -> tokens that were computed for it first.
    """

    known: Sequence[Known]
    num_found: Sequence[int]
    start: int
    ahead: Mapping[int, int]


class Opening:
    """Opens the rows of one cache.

    Args:
        calls: whose rows they are.
        store: the blocks.
        conditioning: the model, and what its keys and values depend on.
        reader: of the forwards' arguments.
        image_inputs: says which arguments are types of text.
        salt: part of every root, and the namespace of the blocks.
        side: makes the arguments of forwards of our own.
        looks: whether the model looks at keys and values itself.
        keeping: keeps what runs ahead.
    """

    def __init__(
        self,
        calls: RunsRows,
        store: BlockStore,
        conditioning: Conditioning,
        reader: ArgumentReader,
        image_inputs: ImageInputs,
        salt: bytes,
        side: SideForwards,
        looks: Looks,
        keeping: Keeping,
    ) -> None:
        self._calls, self.store, self.conditioning, self.keeping = calls, store, conditioning, keeping
        self._reader, self._image_inputs, self._salt, self._looks = reader, image_inputs, salt, looks
        self._num_layers = len(cache_layers(conditioning.model))  # rows of a model that was changed since get more
        self.capturing: Capturing | None = None
        self._ahead = SharedPrefill(self, side)

    def new_rows(self) -> Rows:
        """Rows that no forward has run yet."""
        sights, margin = self.conditioning.sights(), self.store.block_size + _MOST_TAKEN_BACK
        return Rows(self._calls, self._num_layers, self._looks, sights, margin)

    def open(self, rows: Rows, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let rows begin with what is known, and cut it from the arguments of their first forward.

        Where memory runs out, the rows of the call before are given up, then what the pool need not hold, and it is tried again.

        Raises:
            CacheArgumentError: the arguments contradict each other.
        """
        drain(self.store)
        if rows.state is None:
            rows.state = CallState("forward", UNLIMITED, beams=False, runs_only_forwards=True)
        may_run_ahead = may_give_way = True
        while True:
            prompt, why = self._read(rows, arguments)
            if why is not None:
                return self.bypass(rows, arguments, why, prompt.request)
            previous, rows.previous, is_short = rows.previous, None, False
            try:
                begun = self._begin(rows, prompt, arguments, previous, may_run_ahead=may_run_ahead)
                if begun is not None:
                    return self._begun(rows, prompt, begun, arguments)
            except torch.OutOfMemoryError:
                if previous is None and not may_give_way:
                    raise
                is_short = True
            may_run_ahead = False
            if not is_short:  # what ran ahead is of another model
                rows.previous = previous
                continue
            rows.reset()
            if rows.captured is not None:
                rows.captured.close()  # it was for other columns
            if previous is None:
                may_give_way = False
                self.give_way(rows)
            del previous  # nobody holds them any more

    def _read(self, rows: Rows, arguments: Mapping[str, Any]) -> tuple[_Prompt, str | None]:
        """What a first forward asks for, under the model as it is; and why it reuses and keeps nothing, if it does."""
        state, conditioning = rows.state, self.conditioning
        state.seen = rows.seen
        state.digest, state.resets = conditioning.digest(), self.keeping.resets()
        state.was_alone = not conditioning.may_change_in_a_forward()
        rows.escaped = rows.escaped or conditioning.learns  # a hook of others may keep them
        request, why = self.read(rows, arguments, _NO_ROWS)
        adapters = conditioning.adapter_names()
        if why is None and not rows.sights == conditioning.sights() == self.store.windows_now():
            why = "layers have other windows than before, or calls with the windows of before hold blocks"
        why = why or self._why_bypassed(adapters, len(request.rows))
        if why is not None:
            return _Prompt(request, (), (), (), adapters, may_alias=False), why
        inputs = [self.with_root(state.digest, row, adapters, at) for at, row in enumerate(request.rows)]
        may_alias = request.may_alias and adapters is None
        members, copies = _distinct(inputs) if may_alias else ([*range(len(inputs))], [*range(len(inputs))])
        return _Prompt(request, [inputs[at] for at in members], members, copies, adapters, may_alias), None

    def read(self, rows: Rows, arguments: Mapping[str, Any], running: RunningRows) -> tuple[ForwardRequest, str | None]:
        """What a forward asks for; and why it reuses and keeps nothing, if its arguments say so.

        Args:
            running: the rows that resume; none for a first forward.

        Raises:
            CacheArgumentError: the arguments contradict each other.
        """
        seen = self._image_inputs.see(arguments, _NO_ROWS, None)
        request = self._reader.read(
            seen.plain,
            running,
            in_generate=rows.in_generate,
            records_drafts=rows.records_drafts,
            by_default=self.conditioning.outputs,
        )
        return request, seen.why_whole or request.bypass

    def _begin(
        self,
        rows: Rows,
        prompt: _Prompt,
        arguments: Mapping[str, Any],
        previous: Rows | None,
        *,
        may_run_ahead: bool,
    ) -> _Begun | None:
        """Find what is known, run what comes first, and fill the rows. None: the model has changed meanwhile.

        Args:
            previous: of the call before.
        """
        request, running = prompt.request, prompt.running
        known: list[Known] = []
        latest = request.latest_start(0, request.num_logits_needed)
        try:
            with self.store.lock:
                self.store.settle()
                chains = {} if previous is None or previous.state is None else previous.state.chains
                exactly = latest if rows.windows is not None else None
                known = match(self.store, running, previous_rows(previous), chains, exactly)
                self.store.pool.join_streams()
            num_found = [row.num_tokens for row in known]
            may_share = prompt.may_alias and may_run_ahead
            start, ahead = self._ahead.run(
                running,
                known,
                request,
                latest,
                arguments,
                previous,
                may_share=may_share,
                is_exact=rows.windows is not None,
            )
            if ahead and not self.keeping.held_so_far(rows):
                return None
            self._ahead.keep(known)
            stop = request.num_new_columns
            self.begin_captured(rows, request, prompt.adapters, start, stop)
            self._may_be_lazy(rows)
            wanted = self._columns_to_make(rows, stop)
            fill(self.store, rows, running, known, start, wanted, previous, copies=prompt.copies, takes_over=True)
            return _Begun(known, num_found, start, ahead)
        finally:
            for row in known:
                if row.lease is not None:
                    with self.store.lock:
                        if not row.lease.is_freed:
                            self.store.leases.give_back(row.lease)

    def _begun(self, rows: Rows, prompt: _Prompt, begun: _Begun, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The rows are filled: count what they began with, and say what their first forward runs."""
        request, members, copies, state = prompt.request, prompt.members, prompt.copies, rows.state
        known, start = begun.known, begun.start
        are_aliased = len(members) < len(copies)
        rows.copies = [*copies] if are_aliased else None
        if len(copies) > 1 and not rows.may_be_lazy:
            rows.seen.dense = MODEL_LOOKS
        elif len(copies) > 1 and rows.captured is not None:
            rows.seen.dense = "captured rows are read each by itself"
        state.counts = count_prompt(request, known, begun.num_found, members, copies, start, begun.ahead)
        state.pending = state.counts, True
        for row in known:
            held = state.chains.get(row.chain.root)
            if held is None or len(held) < len(row.chain):
                state.chains[row.chain.root] = row.chain
        with self.store.lock:
            is_warm, num_new = bool(self.store.writing_layers), request.num_new_columns - start
            if self.store.tiers.is_telling(num_new) and (is_warm or not self.store.pool.accelerators):
                # the first forward warms up, which takes long on an accelerator
                state.stopwatch = Stopwatch(self.store.pool.accelerators), num_new * len(prompt.running), not is_warm
        rows.prompt_end = request.num_new_columns if rows.in_generate else 0
        rows.common_columns = request.num_new_columns if state.beams and are_aliased else 0
        if not start and not are_aliased:
            return arguments
        return for_scheduled(arguments, Cut(start, members, rows.copies), 0, self._image_inputs.whole)

    def bypass(self, rows: Rows, arguments: Mapping[str, Any], why: str, request: ForwardRequest) -> Mapping[str, Any]:
        """From here on the rows run on transformers' own layers."""
        begins, rows.previous = not rows.is_open, None
        rows.bypass(why, list(cache_layers(self.conditioning.model)))
        state = rows.state
        if begins:
            state.counts = count_bypassed(num_shown(request), why)
            state.pending = state.counts, True
        else:
            for row in state.counts:
                row.stopped += f"; then {why}"
        return arguments

    def give_way(self, rows: Rows) -> None:
        """Memory is short, and these rows are given up: so is what the pool need not hold, and the arena."""
        if self.capturing is not None:
            self.capturing.give_way(rows)
        with self.store.lock:
            self.store.make_way()

    def begin_captured(
        self, rows: Rows, request: ForwardRequest, adapters: list[str] | None, start: int, stop: int
    ) -> None:
        """The next forward runs the columns `[start, stop)`; it and those after it may be replays."""
        if self.capturing is None:
            return
        unusual = "adapters were given for each row" if adapters is not None else request.keep_columns
        if rows.state.is_custom:
            unusual = "custom_generate calls the model in its own way"
        elif rows.reads_all:
            unusual = "a function that is not transformers' says what each step is passed"
        most = rows.state.limits.max_columns
        said = self.capturing.begin(rows, len(request.rows), start, stop, max_columns=most, unusual=unusual)
        rows.state.captured = "" if self.capturing.capture is False else said

    def with_root(self, digest: bytes, row: RowInput, adapters: list[str] | None, at: int) -> RowInput:
        """A row of the batch under its prefix key.

        Args:
            at: its number.
        """
        counted_from = row.pad
        if self._reader.takes_positions:
            counted_from = self.conditioning.state_traits.root_padding(row.pad)
        adapter = "" if adapters is None else adapters[at]
        facts = RootFacts(digest, self._salt, b"", adapter, counted_from, row.first_position)
        return row._replace(root=self.conditioning.roots.of(facts), salt=self._salt)

    def run_ahead(
        self,
        inputs: Sequence[RowInput],
        known: Sequence[Known],
        start: int,
        stop: int,
        previous: Rows | None,
    ) -> Rows:
        """Rows that run ahead, and have their columns before `start`; they run to column `stop`."""
        rows = self.new_rows()
        self._may_be_lazy(rows)
        fill(self.store, rows, inputs, known, start, stop, previous)
        return rows

    def _columns_to_make(self, rows: Rows, stop: int) -> int:
        """How many columns rows get room for that have so many after their first forward."""
        most = rows.state.limits.max_columns
        # on an accelerator every byte is taken when it is asked for; a host may refuse to map what nobody would have written
        ahead = max(256, stop // 4) if self.store.pool.accelerators else max(_MOST_MAPPED_AHEAD, stop)
        return stop + SPARE if math.isinf(most) else min(max(stop, int(most)), stop + ahead)

    def _may_be_lazy(self, rows: Rows) -> None:
        rows.may_be_lazy = self.conditioning.attention == "sdpa" and not self._looks.model_looks

    def _why_bypassed(self, adapters: list[str] | None, num_rows: int) -> str | None:
        if (why := self.conditioning.bypass()) is not None:
            return why
        if adapters is not None and len(adapters) != num_rows:
            return f"{len(adapters)} adapter names were given for {num_rows} rows; pass one for each row"
        return GRADIENTS if torch.is_grad_enabled() else None


def num_shown(request: ForwardRequest) -> list[int]:
    """Tokens of each row that its mask shows."""
    return [len(row.token_ids) - row.num_hidden for row in request.rows]


def _distinct(rows: Sequence[RowInput]) -> tuple[list[int], list[int]]:
    """Rows that differ, by their numbers; and for each row the place among these of the one that is equal to it."""
    places: dict[tuple[bytes, int, bytes], int] = {}
    members, copies = list[int](), list[int]()
    for number, row in enumerate(rows):
        key = (row.root, row.pad, row.token_ids.tobytes())
        if key not in places:
            places[key] = len(members)
            members.append(number)
        copies.append(places[key])
    return members, copies
