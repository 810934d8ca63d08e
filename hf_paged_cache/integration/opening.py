"""The first forward of rows: its prompt is read, what is known of it is leased, rows are filled with it, and the rest is left to run."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..blocks.image_tokens import hold_images, whole_images
from ..blocks.roots import RootFacts
from ..blocks.sight import Sight
from ..call.call_state import CallState
from ..call.counters import PromptCounters
from ..call.fill import fill
from ..call.limits import UNLIMITED
from ..call.match import Known, match, previous_rows
from ..call.record import count_bypassed, count_prompt
from ..call.request import ForwardRequest, RequestRead, RowInput
from ..errors import CacheArgumentError
from ..kv.stopwatch import Stopwatch
from ..model.cache_adapters import own_cache_class
from ..model.support import cache_layers
from ..rows.kinds import kinds_of
from ..rows.layers import SPARE
from ..rows.rows import Rows, RunsRows
from ..rows.shared import IN_CHUNKS as READ_IN_CHUNKS
from ..rows.shared import MODEL_LOOKS
from ..rows.states import StatePlaces
from ..store.tier_load import Wanted
from .begin import RunningRows
from .capturing import Capturing
from .chunked_prompt import IN_CHUNKS, ChunkedPrompt
from .current import drain
from .forward_arguments import for_cut
from .generate_arguments import GenerateArguments
from .image_inputs import Seen
from .keeping import Keeping
from .prompt_images import ENCODED, PromptImages
from .ranks import Ranks, tokens_as_bytes
from .shared_prefill import SharedPrefill
from .side_forward import SideForwards
from .store_parts import StoreParts

GRADIENTS = (
    "gradients are on and may flow through every token (run the forward in torch.no_grad() where none are needed)"
)
_POSITIONS_OF_PADDING = "positions of padding are the largest, and rotary frequencies follow the largest that runs"
_MOST_MAPPED_AHEAD = 4096  # columns, of prompts that are shorter
_MOST_TAKEN_BACK = 32  # tokens of drafts that layers with a window can take back
_NO_ROWS = RunningRows(0, [])  # of a first forward


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
        seen: its images.
    """

    request: ForwardRequest
    running: Sequence[RowInput]
    members: Sequence[int]
    copies: Sequence[int]
    adapters: list[str] | None
    may_alias: bool
    seen: Seen


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
        parts: what they share with all calls of the store.
        salt: part of every root, and the namespace of the blocks.
        keeping: keeps what runs ahead.
        counters: of the cache.
        ranks: the processes that share the model.

    Attributes:
        reads_only: a first forward is not run, and what it asks for is raised as RequestRead.
    """

    def __init__(
        self, calls: RunsRows, parts: StoreParts, salt: bytes, keeping: Keeping, counters: PromptCounters, ranks: Ranks
    ) -> None:
        self.store = store = parts.blocks
        self.conditioning = conditioning = parts.conditioning
        self._calls, self.keeping, self._salt, self._looks = calls, keeping, salt, parts.looks
        self._reader, self._image_inputs = parts.argument_reader, parts.image_inputs
        rules, states = store.states.rules, store.states
        places = StatePlaces(states.align, rules.is_recorded, rules.clamps_one_token, states.kept.most)
        kinds = kinds_of(cache_layers(conditioning.model), places)  # rows of a model that was changed since get more
        self._kinds = kinds._replace(margin=store.block_size + _MOST_TAKEN_BACK)
        self.capturing: Capturing | None = None
        self._counters, self._placeholders, self.reads_only = counters, parts.placeholders, False
        self._ahead, self._ranks = SharedPrefill(self, SideForwards(parts.model, parts.argument_reader)), ranks

    def new_rows(self) -> Rows:
        """Rows that no forward has run yet."""
        kinds = self._kinds
        if self.store.states:
            kinds = kinds._replace(places=kinds.places._replace(most=self.store.states.kept.most))
        rows = Rows(self._calls, kinds._replace(sights=self.sights()), self._looks)
        rows.must_present = own_cache_class(self.conditioning.model) is not None
        return rows

    def count_with(self, counters: PromptCounters) -> None:
        """Calls are counted here from now on."""
        self._counters = counters

    def sights(self) -> Mapping[int, Sight]:
        """Layer index -> its window. Ranks settle what each knows in tokens, without a look at windows, so there are none."""
        return {} if self._ranks.are_several else self.conditioning.sights()

    def open(self, rows: Rows, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let rows begin with what is known, and cut it from the arguments of their first forward.

        Where memory runs out, the rows of the call before are given up, then what the pool need not hold, and it is tried again.

        Raises:
            CacheArgumentError: the arguments contradict each other.
        """
        self._ranks.is_settled = False
        try:
            return self._open(rows, arguments)
        except Exception as error:
            self._ranks.tell_refusal(error)
            raise

    def _open(self, rows: Rows, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        drain(self.store)
        if rows.state is None:
            rows.state = CallState("forward", UNLIMITED, beams=False, runs_only_forwards=True)
        rows.state.is_in_step = rows.state.is_in_step or not self._ranks.may_run_more
        may_run_ahead = may_give_way = True
        while True:
            prompt, why = self._read(rows, arguments)
            if why is not None:
                self._agree(rows, prompt, ())
                return self.bypass(rows, arguments, why, prompt.request)
            previous, rows.previous, is_short = rows.previous, None, False
            try:
                begun = self._begin(rows, prompt, arguments, previous, may_run_ahead=may_run_ahead)
                if begun is not None:
                    return self._begun(rows, prompt, begun, arguments)
            except torch.OutOfMemoryError:
                if (previous is None and not may_give_way) or self._ranks.are_several:
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
        request, why, seen = self.read(rows, arguments, _NO_ROWS, state.images)
        named, why_unnamed = seen.named(request, self.store.block_size)
        why = why or why_unnamed
        request = replace(request, rows=tuple(named), has_images=seen.images is not None)
        adapters = conditioning.adapter_names()
        if why is None and not rows.kinds.sights == self.sights() == self.store.windows_now():
            why = "layers have other windows than before, or calls with the windows of before hold blocks"
        why = why or self._why_bypassed(adapters, len(request.rows))
        if state.chunked is not None:
            why = why or state.chunked.why_bypassed(request, self.store.block_size)
        if why is not None:
            if self.reads_only:
                raise RequestRead(replace(request, bypass=why))
            return _Prompt(request, (), (), (), adapters, may_alias=False, seen=seen), why
        if state.chunked is not None:
            request = replace(request, keep_columns=request.keep_columns or IN_CHUNKS, may_alias=False)
        request = self._follow_length(state, request)
        inputs = self.with_roots(state, request, adapters)
        if self.reads_only:
            raise RequestRead(replace(request, rows=tuple(inputs)))
        may_alias = request.may_alias and adapters is None
        members, copies = _distinct(inputs) if may_alias else ([*range(len(inputs))], [*range(len(inputs))])
        return _Prompt(request, [inputs[at] for at in members], members, copies, adapters, may_alias, seen), None

    def read(
        self, rows: Rows, arguments: Mapping[str, Any], running: RunningRows, images: PromptImages | None = None
    ) -> tuple[ForwardRequest, str | None, Seen]:
        """What a forward asks for; why it reuses and keeps nothing, if its arguments say so; and its images.

        Args:
            running: the rows that resume; none for a first forward.
            images: that `generate` was passed; None: they are among the arguments.

        Raises:
            CacheArgumentError: the arguments contradict each other.
        """
        if not rows.in_generate:
            self.require_filled(arguments, running.num_columns)
        seen = self._image_inputs.see(arguments, running, images)
        request = self._reader.read(
            seen.plain,
            running,
            in_generate=rows.in_generate,
            records_drafts=rows.records_drafts,
            by_default=self.conditioning.outputs,
        )
        return request, seen.why_whole or request.bypass, seen

    def require_filled(self, arguments: Mapping[str, Any], before: int) -> None:
        """Refuse a forward of a prompt that has placeholders which nothing fills.

        Args:
            before: columns of the rows that resume.

        Raises:
            CacheArgumentError: it does.
        """
        ids = arguments.get("input_ids") if self._placeholders.kinds else None
        if ids is None or (before and ids.shape[-1] == 1):  # a model may generate the id of a placeholder
            return
        unfilled = self._placeholders.unfilled(arguments, before)
        if unfilled is not None:
            raise CacheArgumentError(f"{unfilled.what}: pass {unfilled.fillers}, or call the model without this cache")

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
        num_needed = request.num_logits_needed
        if rows.states is not None:
            is_padding = not all(row.token_ids for row in request.rows)
            num_needed = max(num_needed, rows.states.num_needed(request.num_new_columns, is_padding=is_padding))
        latest = request.latest_start(0, num_needed)
        brought = self._load(running, latest)
        hides_images = any(row.shift or hold_images(row.token_ids) for row in running)
        # a shorter forward has other frequencies, and processes in step run equally many forwards
        may_run_ahead = may_run_ahead and not (rows.state.regime or rows.state.is_in_step or hides_images)
        may_share = prompt.may_alias and may_run_ahead
        try:
            known = self._known(rows, running, previous, latest, brought)
            num_found = [row.num_found for row in known]
            self._agree(rows, prompt, known)
            if rows.is_exact and (apart := _ends_apart(running, known)):
                column, together = self._known_together(rows, running, previous, min(latest, *apart), brought)
                cost = len(running) * (request.num_new_columns - column)
                if may_share and self._ahead.cost(running, known, request, latest) < cost:
                    self._give_back(together)
                else:
                    self._give_back(known)
                    for row, first in zip(together, known, strict=True):
                        row.stopped = first.stopped
                        if not column:
                            row.forget()
                    known, latest = together, column or latest
            start, ahead, made = self._ahead.run(
                running, known, request, latest, arguments, previous, may_share=may_share, is_exact=rows.is_exact
            )
            if hides_images and not rows.is_exact:
                start = _without_cuts(running, start)
            if made and not self.keeping.held_so_far(rows):
                if not self._ranks.are_several:  # they do not all begin again
                    return None
                rows.judge(0, held=False)
            for each in made if not rows.is_suspect else ():
                self.keeping.keep_ahead(each)
            stop = request.num_new_columns
            self.begin_captured(rows, request, prompt.adapters, start, stop)
            self._may_be_lazy(rows)
            wanted = self._columns_to_make(rows, stop)
            fill(self.store, rows, running, known, start, wanted, previous, copies=prompt.copies, takes_over=True)
            return _Begun(known, num_found, start, ahead)
        finally:
            self._give_back(known)

    def _agree(self, rows: Rows, prompt: _Prompt, known: Sequence[Known]) -> None:
        """Where several ranks run the call, let rows know no more than on each of them; one message a call.

        Raises:
            PagedCacheError: a rank has refused the call, or is passed something else.
        """
        least = self._settle(rows, prompt.request, bool(prompt.running), [of_row.num_tokens for of_row in known])
        for of_row, num_tokens in zip(known, least, strict=True):
            of_row.limit(num_tokens)

    def agree_to_go_on(self, rows: Rows, request: ForwardRequest) -> None:
        """A forward of a loop goes on, on all ranks.

        Raises:
            PagedCacheError: see `_agree`.
        """
        self._ranks.is_settled = False
        self._settle(rows, request, True, ())

    def tell_refusal(self, rows: Rows, error: Exception) -> None:
        """A forward of a loop is refused, which other ranks are told."""
        if not rows.in_generate:
            self._ranks.is_settled = False
            self._ranks.tell_refusal(error)

    def _settle(self, rows: Rows, request: ForwardRequest, is_kept: bool, numbers: Sequence[int]) -> Sequence[int]:
        ranks, state = self._ranks, rows.state
        if not ranks.start_together:
            return numbers
        same = {
            "the token ids": tokens_as_bytes([row.token_ids for row in request.rows]),
            "the columns, padding or positions": [
                (rows.n, request.num_new_columns),
                [(row.pad, row.first_position, row.num_hidden) for row in request.rows],
            ],
            "the arguments of generate": [
                (rows.in_generate, state.is_in_step, sorted(state.limits.end_of_sequence)),
                (state.limits.num_prompt_columns, state.limits.max_columns, state.limits.num_rows),
            ],
            "what is asked of the forward": [
                (request.num_logits_needed, is_kept, request.keep_columns is None, request.may_alias),
            ],
        }
        least = ranks.agree("a forward", same, numbers)
        ranks.is_settled = True
        return least

    def _load(self, rows: Sequence[RowInput], latest: int) -> Mapping[int, str]:
        """Have what lower tiers know of rows in the pool. Returns block -> tier that it came from."""
        if not self.store.tiers or latest <= 0:
            return {}
        below = [Wanted(row.root, row.salt, row.token_ids, latest - row.pad) for row in rows if row.pad < latest]
        return self.store.tiers.load(below)

    def _give_back(self, known: Sequence[Known]) -> None:
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
            rows.seen.dense = MODEL_LOOKS if rows.chunks is None else READ_IN_CHUNKS
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
        if state.chunked is not None and not math.isinf(state.limits.num_prompt_columns):
            rows.prompt_end = int(state.limits.num_prompt_columns)
            rows.reads_next = request.num_new_columns < rows.prompt_end
        rows.common_columns = request.num_new_columns if state.beams and are_aliased else 0
        if start or are_aliased:
            arguments = for_cut(arguments, Cut(start, members, rows.copies), 0, self._image_inputs.whole)
        elif state.images is None:
            return arguments
        return self._encoded(state, arguments, prompt.seen.images, members, len(request.rows), start)

    def _encoded(
        self,
        state: CallState,
        arguments: Mapping[str, Any],
        images: PromptImages | None,
        members: Sequence[int],
        num_rows: int,
        start: int,
    ) -> Mapping[str, Any]:
        """Arguments with what the towers make of the images from a column on, in place of the images.

        Args:
            members: row that runs -> the row of the batch that it is.
            num_rows: of the batch.
        """
        state.images = None
        if images is None:
            return arguments
        encoded = images.encode(members, num_rows, start)
        plain = {name: value for name, value in arguments.items() if name not in (*images.arguments, ENCODED)}
        return {**plain, ENCODED: encoded} if encoded else plain

    def bypass(self, rows: Rows, arguments: Mapping[str, Any], why: str, request: ForwardRequest) -> Mapping[str, Any]:
        """From here on the rows run on transformers' own layers."""
        begins, rows.previous = not rows.is_open, None
        rows.bypass(why, list(cache_layers(self.conditioning.model)))
        state = rows.state
        if state.images is not None:
            num_rows = len(arguments["input_ids"])
            images, state.images = state.images, None
            arguments = {**arguments, ENCODED: images.encode(range(num_rows), num_rows)}
        if begins and state.chunked is not None:
            rows.reads_next = request.num_new_columns < state.limits.num_prompt_columns
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
        elif self._image_inputs.takes_images:
            unusual = "the model takes images"
        elif rows.reads_all:
            unusual = "a function that is not transformers' says what each step is passed"
        most = rows.state.limits.max_columns
        said = self.capturing.begin(rows, len(request.rows), start, stop, max_columns=most, unusual=unusual)
        rows.state.captured = "" if self.capturing.capture is False else said

    def _follow_length(self, state: CallState, request: ForwardRequest) -> ForwardRequest:
        """Where rotary frequencies depend on length, the model gets those of the prompt, which are a part of the rows' prefix keys."""
        rope, last = self.conditioning.rope, request.num_new_columns - 1
        if not rope.depends_on_length:
            state.regime = b""
            return request
        state.regime = rope.at(last if request.max_position is None else request.max_position)
        largest = max(row.first_position + last - row.pad for row in request.rows)
        if request.keep_columns is None and (request.max_position or 0) > largest:
            return replace(request, keep_columns=_POSITIONS_OF_PADDING)
        return request

    def with_roots(self, state: CallState, request: ForwardRequest, adapters: list[str] | None) -> list[RowInput]:
        """The rows of the batch under their prefix keys."""
        inputs, chunked = [], state.chunked
        for number, row in enumerate(request.rows):
            counted_from = row.pad
            if self._reader.takes_positions:
                counted_from = self.conditioning.state_traits.root_padding(row.pad)
            adapter = "" if adapters is None else adapters[number]
            regime = state.regime if chunked is None else state.regime + chunked.shape_of(number, request)
            facts = RootFacts(state.digest, self._salt, regime, adapter, counted_from, row.first_position)
            inputs.append(row._replace(root=self.conditioning.roots.of(facts), salt=self._salt))
        return inputs

    def begin_chunks(self, rows: Rows, chunked: ChunkedPrompt, given: GenerateArguments) -> None:
        """Let rows begin with what is known of a prompt in whole chunks, so that `generate` passes the chunks after it."""
        rows.state.chunked, rows.chunks = chunked, chunked.chunks
        model, takes_positions = self.conditioning.model, self._reader.takes_positions
        arguments = chunked.arguments(model, given, takes_positions=takes_positions)
        is_alone = self._ranks.may_run_more and not rows.state.is_in_step
        if arguments is None or self.conditioning.rope.depends_on_length or not is_alone:
            return
        with torch.no_grad():  # as `generate` runs them
            prompt, why = self._read(rows, arguments)
        if why is not None:
            return  # the first forward says so
        request = chunked.request_of_prompt(replace(prompt.request, rows=tuple(prompt.running)))
        latest, size = request.num_new_columns - request.num_logits_needed, chunked.chunks.size
        with suppress(torch.OutOfMemoryError):
            inputs, previous = request.rows, rows.previous
            brought = self._load(inputs, latest)
            column, known = self._known_together(rows, inputs, previous, latest // size * size, brought, size)
            if self._ranks.start_together:
                tokens = tokens_as_bytes([row.token_ids for row in inputs])
                (column,) = self._ranks.agree("a prompt in chunks", {"the token ids": tokens}, [column])
            try:
                if column:
                    wanted = self._columns_to_make(rows, request.num_new_columns)
                    fill(self.store, rows, prompt.running, known, column, wanted, rows.previous)
                    self._begun_chunks(rows, chunked.request_of_columns(column), known, column)
                    chunked.known = column
            finally:
                self._give_back(known)

    def _known(
        self,
        rows: Rows,
        inputs: Sequence[RowInput],
        previous: Rows | None,
        latest: int,
        brought: Mapping[int, str] = MappingProxyType({}),
    ) -> list[Known]:
        """What is known of rows that begin; their leases are the caller's to give back.

        Args:
            previous: of the call before.
            latest: the last column at which they may start.
            brought: see `match`.
        """
        chains = {} if previous is None or previous.state is None else previous.state.chains
        with self.store.lock:
            self.store.settle()
            exactly = latest if rows.is_exact else None
            known = match(self.store, inputs, previous_rows(previous), chains, exactly, brought)
            self.store.pool.join_streams()
        return known

    def _known_together(
        self,
        rows: Rows,
        inputs: Sequence[RowInput],
        previous: Rows | None,
        latest: int,
        brought: Mapping[int, str] = MappingProxyType({}),
        size: int = 1,
    ) -> tuple[int, list[Known]]:
        """The last column that is a multiple of `size` at which all rows can start without any forward first; 0: there is none. And what is
        known of them.
        """
        while True:
            known = self._known(rows, inputs, previous, latest, brought)
            ends = [row.pad + of_row.num_tokens for row, of_row in zip(inputs, known, strict=True)]
            column = min(*ends, latest) // size * size
            if all(row.pad >= column for row in inputs):
                column = 0
            there = [row.pad >= column or end == column for row, end in zip(inputs, ends, strict=True)]
            if not column or not rows.is_exact or all(there):
                return column, known
            self._give_back(known)
            latest = column

    def _begun_chunks(self, rows: Rows, request: ForwardRequest, known: Sequence[Known], column: int) -> None:
        """The rows hold what is known: count it, and expect the next chunk."""
        state, numbers = rows.state, [*range(len(known))]
        num_found = [row.num_tokens for row in known]
        state.counts = count_prompt(request, known, num_found, numbers, numbers, column, {})
        for row in known:
            state.chains[row.chain.root] = row.chain
        with self.store.lock:
            self._counters.add_forward(state, state.counts, begins=True, bypassed=False)
        rows.seen.dense = READ_IN_CHUNKS if len(known) > 1 else ""
        rows.previous, rows.reads_next = None, True
        rows.prompt_end = int(state.limits.num_prompt_columns)

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
        looks = self._looks.model_looks or rows.kinds.indexed or rows.chunks is not None  # chunks promise bits
        rows.may_be_lazy = self.conditioning.attention == "sdpa" and not looks

    def why_in_general(self) -> str | None:
        """Why rows reuse and keep nothing, as the model is now, whatever they are; None: they may."""
        if (why := self.conditioning.bypass()) is not None:
            return why
        if self.store.states and self._ranks.are_several:
            return "layers carry states, and other processes share the model"
        return None

    def _why_bypassed(self, adapters: list[str] | None, num_rows: int) -> str | None:
        if (why := self.why_in_general()) is not None:
            return why
        if adapters is not None and len(adapters) != num_rows:
            return f"{len(adapters)} adapter names were given for {num_rows} rows; pass one for each row"
        return GRADIENTS if torch.is_grad_enabled() else None


def _ends_apart(rows: Sequence[RowInput], known: Sequence[Known]) -> list[int]:
    """The columns up to which rows are known; none where all can start at one."""
    ends = [row.pad + of_row.num_tokens for row, of_row in zip(rows, known, strict=True)]
    column = min(ends)
    return [] if all(end == column or row.pad >= column for row, end in zip(rows, ends, strict=True)) else ends


def _without_cuts(rows: Sequence[RowInput], column: int) -> int:
    """The last column up to `column` before which no image of a row is cut."""
    while True:
        starts = [row.pad + whole_images(row.token_ids, column - row.pad) for row in rows if row.pad < column]
        if not starts or min(starts) == column:
            return column if starts else 0
        column = min(starts)


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
