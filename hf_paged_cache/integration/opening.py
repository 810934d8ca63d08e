"""Opens rows before their first forward: reads the prompt, leases what is known, and fills the rows with it."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..blocks.image_tokens import hold_images, whole_images
from ..call.call_state import CallState
from ..call.counters import PromptCounters
from ..call.fill import fill
from ..call.limits import UNLIMITED
from ..call.match import Known
from ..call.record import count_bypassed, count_prompt
from ..call.request import ForwardRequest, RowInput
from ..model.support import cache_layers
from ..rows.kinds import kinds_of
from ..rows.layers import SPARE
from ..rows.rows import Rows
from ..rows.shared import IN_CHUNKS as READ_IN_CHUNKS
from ..rows.shared import MODEL_LOOKS
from ..rows.states import StatePlaces
from .asking import Asking, Prompt, num_shown
from .capturing import Capturing
from .chunked_prompt import ChunkedPrompt
from .current import drain
from .finding import Finding
from .forward_arguments import Cut, for_cut
from .generate_arguments import GenerateArguments
from .keeping import Keeping
from .prompt_images import ENCODED, PromptImages
from .ranks import Ranks, tokens_as_bytes
from .shared_prefill import SharedPrefill
from .side_forward import SideForwards
from .store_parts import StoreParts

_MOST_MAPPED_AHEAD = 4096  # columns made ahead for shorter prompts, on a host
_MOST_TAKEN_BACK = 32  # most tokens of drafts that layers with a window can take back


class _Begun(NamedTuple):
    """`_Begun` says how rows have begun.

    Attributes:
        known: what is known of each running row.
        num_found: tokens of each running row that were there before the call.
        start: column from which on the rows run.
        ahead: row that runs -> tokens that were computed ahead for it.
    """

    known: Sequence[Known]
    num_found: Sequence[int]
    start: int
    ahead: Mapping[int, int]


class Opening:
    """`Opening` opens the rows of one cache.

    Args:
        calls: calls to which the rows belong.
        parts: what calls share with all other calls of the store.
        salt: part of every root, and the namespace of the blocks.
        keeping: keeps what runs ahead.
        counters: counters of the cache.
        ranks: processes that share the model.

    Attributes:
        asking: reads what forwards ask for.
    """

    def __init__(
        self, calls: Any, parts: StoreParts, salt: bytes, keeping: Keeping, counters: PromptCounters, ranks: Ranks
    ) -> None:
        self.store = store = parts.blocks
        self.conditioning = conditioning = parts.conditioning
        self._calls, self.keeping, self._looks, self._image_inputs = calls, keeping, parts.looks, parts.image_inputs
        self.asking, self._finding = Asking(parts, salt, ranks), Finding(store)
        rules, states = store.states.rules, store.states
        places = StatePlaces(states.align, rules.is_recorded, rules.clamps_one_token, states.kept.most)
        kinds = kinds_of(cache_layers(conditioning.model), places)  # rows of a model that has changed get more layers
        self._kinds = kinds._replace(margin=store.block_size + _MOST_TAKEN_BACK)
        self.capturing: Capturing | None = None
        self._counters, self._ranks, self._side = counters, ranks, SideForwards(parts.model, parts.argument_reader)
        self._ahead = SharedPrefill(self.store, self.run_ahead, self._side)

    def new_rows(self) -> Rows:
        """Make rows that no forward has run yet."""
        kinds = self._kinds
        if self.store.states:
            kinds = kinds._replace(places=kinds.places._replace(most=self.store.states.kept.most))
        return Rows(self._calls, kinds._replace(sights=self.asking.sights()), self._looks)

    def count_with(self, counters: PromptCounters) -> None:
        """Count calls in `counters` from now on."""
        self._counters = counters

    def open(self, rows: Rows, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let rows begin with what is known, and cut this part from the arguments of their first forward.

        Where memory runs out, the rows of the call before are given up, then what the pool need not hold, and opening
        is tried again.

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
            rows.state = CallState("forward", UNLIMITED, beams=False)
        rows.state.is_in_step = rows.state.is_in_step or not self._ranks.may_run_more
        may_run_ahead = may_give_way = True
        while True:
            prompt, why = self.asking.first(rows, arguments)
            if why is not None:
                self._agree(rows, prompt, ())
                return self.bypass(rows, arguments, why, prompt.request)
            previous, rows.previous, is_short = rows.previous, None, False
            if previous is not None:
                previous.is_lent = True
            try:
                begun = self._begin(rows, prompt, arguments, previous, may_run_ahead=may_run_ahead)
                if begun is not None:
                    return self._begun(rows, prompt, begun, arguments)
            except torch.OutOfMemoryError:
                if (previous is None and not may_give_way) or self._ranks.are_several:
                    raise
                is_short = True
            finally:
                if previous is not None:
                    previous.is_lent = False
            may_run_ahead = False
            if not is_short:  # the model has changed, so what ran ahead is of no use
                rows.previous = previous
                continue
            rows.reset()
            if rows.captured is not None:
                rows.captured.close()  # the captured call was for other columns
            if previous is None:
                may_give_way = False
                self.give_way(rows)
            del previous  # nobody holds the rows of the call before any more

    def _begin(
        self,
        rows: Rows,
        prompt: Prompt,
        arguments: Mapping[str, Any],
        previous: Rows | None,
        *,
        may_run_ahead: bool,
    ) -> _Begun | None:
        """Find what is known, run what runs ahead, and fill the rows. None: the model has changed meanwhile.

        Args:
            previous: rows of the call before.
        """
        request, running = prompt.request, prompt.running
        known: list[Known] = []
        num_needed = request.num_logits_needed
        if rows.states is not None:
            is_padding = not all(row.token_ids for row in request.rows)
            num_needed = max(num_needed, rows.states.num_needed(request.num_new_columns, is_padding=is_padding))
        latest = request.latest_start(num_needed)
        brought = self._finding.load(running, latest)
        hides_images = any(row.shift or hold_images(row.token_ids) for row in running)
        # a shorter forward would have other frequencies, and processes in step must run equally many forwards
        may_run_ahead = may_run_ahead and not (rows.state.regime or rows.state.is_in_step or hides_images)
        may_share = prompt.may_alias and may_run_ahead
        try:
            known = self._finding.known(rows, running, previous, latest, brought)
            num_found = [row.num_found for row in known]
            self._agree(rows, prompt, known)
            if rows.is_exact and (apart := _ends_apart(running, known)):
                column, together = self._finding.together(rows, running, previous, min(latest, *apart), brought)
                cost = len(running) * (request.num_new_columns - column)
                if may_share and self._ahead.cost(running, known, request, latest) < cost:
                    self._finding.give_back(together)
                else:
                    known, latest = self._start_together(known, together, column), column or latest
            start, ahead, made = self._ahead.run(
                running, known, request, latest, arguments, may_share=may_share, is_exact=rows.is_exact
            )
            if hides_images and not rows.is_exact:
                start = _without_cuts(running, start)
            if made and not self.keeping.held_so_far(rows):
                if not self._ranks.are_several:  # several ranks would not all begin again
                    return None
                rows.judge(0, held=False)
            for each in made if not rows.is_suspect else ():
                self.keeping.keep_ahead(each, rows.state.resets)
            stop = request.num_new_columns
            self.begin_captured(rows, request, prompt.adapters, start, stop)
            self._may_be_lazy(rows)
            wanted = self._columns_to_make(rows, stop)
            fill(self.store, rows, running, known, start, wanted, copies=prompt.copies, takes_over=True)
            return _Begun(known, num_found, start, ahead)
        finally:
            self._finding.give_back(known)

    def _start_together(self, known: Sequence[Known], together: list[Known], column: int) -> list[Known]:
        """Let rows that could each start further right start at one column; return what is known of them there.

        Args:
            known: what is known of the rows where each of them could start.
            together: what is known of the rows at `column`.
            column: column at which all rows start; 0: there is none.
        """
        self._finding.give_back(known)
        for row, first in zip(together, known, strict=True):
            row.stopped = first.stopped
            if not column:
                row.forget()
        return together

    def _agree(self, rows: Rows, prompt: Prompt, known: Sequence[Known]) -> None:
        """Limit what is known of rows to what every rank knows, if several ranks run the call; one message a call.

        Raises:
            PagedCacheError: see `Ranks.settle`.
        """
        numbers = [of_row.num_tokens for of_row in known]
        least = self._ranks.settle(rows, prompt.request, numbers, is_kept=bool(prompt.running))
        for of_row, num_tokens in zip(known, least, strict=True):
            of_row.limit(num_tokens)

    def _begun(self, rows: Rows, prompt: Prompt, begun: _Begun, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Count what filled rows began with, and return the arguments of their first forward."""
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
        rows.prompt_end = request.num_new_columns if rows.in_generate else 0
        if state.chunked is not None and not math.isinf(state.limits.num_prompt_columns):
            rows.prompt_end = int(state.limits.num_prompt_columns)
            rows.reads_next = request.num_new_columns < rows.prompt_end
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
        """Return arguments with what the towers make of the images from a column on, in place of these images.

        Args:
            members: row that runs -> the row of the batch that it is.
            num_rows: number of rows of the batch.
            start: first column whose images are encoded.
        """
        state.images = None
        if images is None:
            return arguments
        encoded = images.encode(members, num_rows, start)
        plain = {name: value for name, value in arguments.items() if name not in (*images.arguments, ENCODED)}
        return {**plain, ENCODED: encoded} if encoded else plain

    def bypass(self, rows: Rows, arguments: Mapping[str, Any], why: str, request: ForwardRequest) -> Mapping[str, Any]:
        """Let rows run on transformers' own layers from here on; return the arguments of their forward."""
        begins = not rows.is_open
        rows.give_up_previous()
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
            with self.store.lock:
                self._counters.note_bypass()
        return arguments

    def give_way(self, rows: Rows) -> None:
        """Give up the arena, and what the pool need not hold, when memory is short and these rows are given up."""
        if self.capturing is not None:
            self.capturing.give_way(rows)
        with self.store.lock:
            self.store.make_way()

    def begin_captured(
        self, rows: Rows, request: ForwardRequest, adapters: list[str] | None, start: int, stop: int
    ) -> None:
        """Let the next forward, of the columns `[start, stop)`, and later ones run by graphs, if they may be."""
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

    def begin_chunks(self, rows: Rows, chunked: ChunkedPrompt, given: GenerateArguments) -> None:
        """Let rows begin with what is known of a prompt, in whole chunks, so that `generate` passes later chunks."""
        rows.state.chunked, rows.chunks = chunked, chunked.chunks
        model, takes_positions = self.conditioning.model, self._side.takes_positions
        arguments = chunked.arguments(model, given, takes_positions=takes_positions)
        is_alone = self._ranks.may_run_more and not rows.state.is_in_step
        if arguments is None or self.conditioning.rope.depends_on_length or not is_alone:
            return
        with torch.no_grad():  # `generate` runs forwards without gradients, too
            prompt, why = self.asking.first(rows, arguments)
        if why is not None:
            return  # the first forward is bypassed for this reason
        request = chunked.request_of_prompt(replace(prompt.request, rows=tuple(prompt.running)))
        latest, size = request.num_new_columns - request.num_logits_needed, chunked.chunks.size
        with suppress(torch.OutOfMemoryError):
            inputs, previous = request.rows, rows.previous
            brought = self._finding.load(inputs, latest)
            column, known = self._finding.together(rows, inputs, previous, latest // size * size, brought, size)
            if self._ranks.start_together:
                tokens = tokens_as_bytes([row.token_ids for row in inputs])
                (column,) = self._ranks.agree("a prompt in chunks", {"the token ids": tokens}, [column])
            try:
                if column:
                    wanted = self._columns_to_make(rows, request.num_new_columns)
                    fill(self.store, rows, prompt.running, known, column, wanted)
                    self._begun_chunks(rows, chunked.request_of_columns(column), known, column)
                    chunked.known = column
            finally:
                self._finding.give_back(known)

    def _begun_chunks(self, rows: Rows, request: ForwardRequest, known: Sequence[Known], column: int) -> None:
        """Count what is known of the prompt, which the rows hold, and expect the next chunk."""
        state, numbers = rows.state, [*range(len(known))]
        num_found = [row.num_tokens for row in known]
        state.counts = count_prompt(request, known, num_found, numbers, numbers, column, {})
        for row in known:
            state.chains[row.chain.root] = row.chain
        with self.store.lock:
            self._counters.add_forward(state, state.counts, begins=True, bypassed=False)
        rows.seen.dense = READ_IN_CHUNKS if len(known) > 1 else ""
        rows.give_up_previous()
        rows.reads_next = True
        rows.prompt_end = int(state.limits.num_prompt_columns)

    def run_ahead(
        self,
        inputs: Sequence[RowInput],
        known: Sequence[Known],
        start: int,
        stop: int,
    ) -> Rows:
        """Make rows that run ahead: they have their columns before `start`, and room up to column `stop`."""
        rows = self.new_rows()
        self._may_be_lazy(rows)
        fill(self.store, rows, inputs, known, start, stop)
        return rows

    def _columns_to_make(self, rows: Rows, stop: int) -> int:
        """Return for how many columns rows get room that have `stop` columns after their first forward."""
        most = rows.state.limits.max_columns
        # an accelerator takes every byte when it is asked for; a host may refuse to map what nobody would have written
        ahead = max(256, stop // 4) if self.store.pool.accelerators else max(_MOST_MAPPED_AHEAD, stop)
        return stop + SPARE if math.isinf(most) else min(max(stop, int(most)), stop + ahead)

    def _may_be_lazy(self, rows: Rows) -> None:
        looks = self._looks.model_looks or rows.kinds.indexed or rows.chunks is not None  # chunks promise bits
        rows.may_be_lazy = self.conditioning.attention == "sdpa" and not looks


def _ends_apart(rows: Sequence[RowInput], known: Sequence[Known]) -> list[int]:
    """Return the columns up to which rows are known; none where all rows can start at one column."""
    ends = [row.pad + of_row.num_tokens for row, of_row in zip(rows, known, strict=True)]
    column = min(ends)
    return [] if all(end == column or row.pad >= column for row, end in zip(rows, ends, strict=True)) else ends


def _without_cuts(rows: Sequence[RowInput], column: int) -> int:
    """Return the last column, `column` at most, that cuts no image of a row."""
    while True:
        starts = [row.pad + whole_images(row.token_ids, column - row.pad) for row in rows if row.pad < column]
        if not starts or min(starts) == column:
            return column if starts else 0
        column = min(starts)
