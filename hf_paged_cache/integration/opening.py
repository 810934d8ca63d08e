"""Opens rows before their first forward: leases what is known of what they ask for, and fills them with it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..blocks.image_tokens import hold_images, whole_images
from ..call.call_state import CallState
from ..call.counters import count_bypassed, count_prompt
from ..call.fill import fill
from ..call.find import Finding, Known
from ..call.request import ForwardRequest, RowInput
from ..model.layers import cache_layers
from ..rows.kinds import kinds_of
from ..rows.layers import SPARE
from ..rows.rows import Rows
from ..rows.shared import IN_CHUNKS as READ_IN_CHUNKS
from ..rows.shared import MODEL_LOOKS
from ..rows.states import StatePlaces
from ..stats import RowStats
from .asking import Asking, FirstForward
from .capturing import Capturing
from .chunked_prompt import ChunkedPrompt
from .forward_arguments import cut
from .generate_arguments import GenerateArguments
from .keeping import Keeping
from .ranks import Ranks, tokens_as_bytes
from .shared_prefill import SharedPrefill
from .side_forward import SideForwards
from .store_parts import StoreParts

_MOST_MAPPED_AHEAD = 4096  # columns made ahead for shorter prompts, on a host
_MOST_TAKEN_BACK = 32  # most tokens of drafts that layers with a window can take back


class Opening:
    """`Opening` opens the rows of one cache: see `Calls` for what it is made of."""

    def __init__(
        self, calls: Any, parts: StoreParts, salt: bytes, keeping: Keeping, ranks: Ranks, capturing: Capturing
    ) -> None:
        self.store = store = parts.blocks
        self.fingerprint, self.asking = parts.fingerprint, Asking(parts, salt, ranks)
        self._calls, self._keeping, self._looks, self._image_inputs = calls, keeping, parts.looks, parts.image_inputs
        rules, states = store.states.rules, store.states
        places = StatePlaces(states.align, rules.is_recorded, rules.clamps_one_token, states.kept.most)
        kinds = kinds_of(cache_layers(parts.model), places)  # rows of a model that has changed get more layers
        self._kinds = kinds._replace(margin=store.block_size + _MOST_TAKEN_BACK)
        self._capturing, self._ranks = capturing, ranks
        self._side = SideForwards(parts.model, parts.argument_reader)
        self._ahead = SharedPrefill(self.store, self.run_ahead, self._side)

    def new_rows(self) -> Rows:
        """Make rows that no forward has run yet."""
        kinds = self._kinds
        if self.store.states:
            kinds = kinds._replace(places=kinds.places._replace(most=self.store.states.kept.most))
        return Rows(self._calls, kinds._replace(windows=self.asking.windows()), self._looks)

    def open(self, rows: Rows, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let rows begin with what is known, and cut this part from the arguments of their first forward.

        Where memory runs out, the rows of the call before are given up, then what the pool need not hold, and opening
        is tried again.
        """
        rows.state.is_in_step = rows.state.is_in_step or not self._ranks.may_run_more
        may_run_ahead = may_give_way = True
        while True:
            asked = self.asking.first(rows, arguments)
            if asked.why_bypassed is not None:
                self._agree(rows, asked.request, (), is_kept=False)
                return self._begin_bypassed(rows, arguments, asked)
            previous, rows.previous, is_short = rows.previous, None, False
            try:
                start = self._begin(rows, asked, arguments, previous, may_run_ahead=may_run_ahead)
                if start is not None:
                    return self._arguments_from(rows, asked, start, arguments)
            except torch.OutOfMemoryError:
                if (previous is None and not may_give_way) or self._ranks.are_several:
                    raise
                is_short = True
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
        asked: FirstForward,
        arguments: Mapping[str, Any],
        previous: Rows | None,
        *,
        may_run_ahead: bool,
    ) -> int | None:
        """Fill rows with what is known, and with what runs ahead; return the column at which they start.

        None: the model has changed meanwhile.
        """
        request, running = asked.request, asked.running
        latest = request.latest_start(_num_needed(rows, request))
        hides_images = any(row.shift or hold_images(row.token_ids) for row in running)
        # a shorter forward would have other frequencies, and processes in step must run equally many forwards
        may_run_ahead = may_run_ahead and not (rows.state.regime or rows.state.is_in_step or hides_images)
        may_share = request.may_alias and may_run_ahead
        with Finding(self.store, running, latest, previous, is_exact=rows.is_exact) as found:
            found.look(latest)
            num_found = [row.num_found for row in found.known]
            self._agree(rows, request, found.known)
            if rows.is_exact and found.are_apart():
                latest = self._start_together(found, request, latest, may_share=may_share)
            start, num_ahead, made = self._ahead.run(
                running, found.known, request, latest, arguments, may_share=may_share, is_exact=rows.is_exact
            )
            if hides_images and not rows.is_exact:
                start = _without_cuts(running, start)
            if not made or self._keeping.is_same(rows):
                for each in made:
                    self._keeping.keep_ahead(each, rows.state.resets)
            elif self._ranks.are_several:  # they would not all begin again
                rows.keep_less(0)
            else:
                return None
            stop = request.num_new_columns
            self.begin_captured(rows, request, start, stop)
            self._may_be_lazy(rows)
            wanted, copies = self._columns_to_make(rows, stop), asked.copies
            fill(self.store, rows, running, found.known, start, wanted, copies=copies, takes_over=True)
            counts = count_prompt(request, found.known, num_found, asked.members, copies, start, num_ahead)
            _note_begun(rows.state, counts, found.known)
            return start

    def _start_together(self, found: Finding, request: ForwardRequest, latest: int, *, may_share: bool) -> int:
        """Let rows that are known to several columns start at one of these, unless running ahead costs less.

        Return the last column at which they may start.
        """
        known, inputs = found.known, found.inputs
        of_ahead = self._ahead.cost(inputs, known, request, latest) if may_share else math.inf
        column = found.look_together(min(latest, *found.ends()))
        if of_ahead < len(inputs) * (request.num_new_columns - column):
            found.look(latest)
            return latest
        for row, first in zip(found.known, known, strict=True):
            row.stopped = first.stopped
            if not column:
                row.forget()
        return column or latest

    def _agree(self, rows: Rows, request: ForwardRequest, known: Sequence[Known], *, is_kept: bool = True) -> None:
        """Limit what is known of rows to what every rank knows, if several ranks run the call; one message a call."""
        least = self._ranks.settle(rows, request, [row.num_tokens for row in known], is_kept=is_kept)
        for row, num_tokens in zip(known, least, strict=True):
            row.limit(num_tokens)

    def _arguments_from(
        self, rows: Rows, asked: FirstForward, start: int, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Return the arguments of the first forward of rows that are filled, from column `start` on."""
        request, members, copies, state = asked.request, asked.members, asked.copies, rows.state
        are_aliased = len(members) < len(copies)
        rows.copies = [*copies] if are_aliased else None
        if len(copies) > 1 and not rows.may_be_lazy:
            rows.seen.dense = MODEL_LOOKS if rows.chunks is None else READ_IN_CHUNKS
        elif len(copies) > 1 and rows.captured is not None:
            rows.seen.dense = "captured rows are read each by itself"
        rows.prompt_end = request.num_new_columns if rows.in_generate else 0
        if state.chunked is not None and not math.isinf(state.limits.num_prompt_columns):
            rows.prompt_end = int(state.limits.num_prompt_columns)
            rows.reads_next = request.num_new_columns < rows.prompt_end
        if start or are_aliased:
            arguments = cut(arguments, start, members if are_aliased else None, self._image_inputs.whole)
        elif state.images is None:
            return arguments
        state.images = None
        return arguments if asked.images is None else asked.images.encoded(arguments, members, len(copies), start)

    def _begin_bypassed(self, rows: Rows, arguments: Mapping[str, Any], asked: FirstForward) -> Mapping[str, Any]:
        """Let rows begin on transformers' own layers; return the arguments of their first forward."""
        state, why = rows.state, asked.why_bypassed or ""
        arguments = self.bypass(rows, arguments, why)
        if state.chunked is not None:
            rows.reads_next = asked.request.num_new_columns < state.limits.num_prompt_columns
        _note_begun(state, count_bypassed([len(row.token_ids) for row in asked.request.rows], why), ())
        return arguments

    def bypass(self, rows: Rows, arguments: Mapping[str, Any], why: str) -> Mapping[str, Any]:
        """Let rows run on transformers' own layers from here on; return the arguments of their forward."""
        rows.previous = None
        rows.bypass(why, list(cache_layers(self.fingerprint.model)))
        images, rows.state.images = rows.state.images, None
        if images is None:
            return arguments
        num_rows = len(arguments["input_ids"])
        return images.encoded(arguments, range(num_rows), num_rows)  # type: ignore[no-any-return]

    def give_way(self, rows: Rows) -> None:
        """Give up the arena, and what the pool need not hold, when memory is short and these rows are given up."""
        self._capturing.give_way(rows)
        with self.store.lock:
            self.store.make_way()

    def begin_captured(self, rows: Rows, request: ForwardRequest, start: int, stop: int) -> None:
        """Let the next forward, of the columns `[start, stop)`, and later ones run by graphs, if they may be."""
        if not self._capturing.is_asked:
            return
        unusual = request.keep_columns
        if self.fingerprint.adapter_names is not None:
            unusual = "adapters were given for each row"
        if rows.state.is_custom:
            unusual = "custom_generate calls the model in its own way"
        elif self._image_inputs.takes_images:
            unusual = "the model takes images"
        elif rows.reads_all:
            unusual = "a function that is not transformers' says what each step is passed"
        most = rows.state.limits.max_columns
        rows.state.captured = self._capturing.begin(
            rows, len(request.rows), start, stop, max_columns=most, unusual=unusual
        )

    def begin_chunks(self, rows: Rows, chunked: ChunkedPrompt, given: GenerateArguments) -> None:
        """Let rows begin with what is known of a prompt, in whole chunks, so that `generate` passes later chunks."""
        rows.state.chunked, rows.chunks = chunked, chunked.chunks
        model, takes_positions = self.fingerprint.model, self._side.takes_positions
        arguments = chunked.arguments(model, given, takes_positions=takes_positions)
        is_alone = self._ranks.may_run_more and not rows.state.is_in_step
        if arguments is None or self.fingerprint.rope.depends_on_length or not is_alone:
            return
        with torch.no_grad():  # `generate` runs forwards without gradients, too
            asked = self.asking.first(rows, arguments)
        if asked.why_bypassed is not None or asked.images is not None:
            return  # the first forward is bypassed for this reason, or the one that brings images
        request = chunked.request_of_prompt(replace(asked.request, rows=tuple(asked.running)))
        latest, size = request.num_new_columns - request.num_logits_needed, chunked.chunks.size
        inputs, is_exact = request.rows, rows.is_exact
        try:
            with Finding(self.store, inputs, latest, rows.previous, is_exact=is_exact) as found:
                column = found.look_together(latest // size * size, size)
                if self._ranks.start_together:
                    tokens = tokens_as_bytes([row.token_ids for row in inputs])
                    (column,) = self._ranks.agree("a prompt in chunks", {"the token ids": tokens}, [column])
                if column:
                    wanted = self._columns_to_make(rows, request.num_new_columns)
                    fill(self.store, rows, inputs, found.known, column, wanted)
                    numbers, num_found = [*range(len(inputs))], [row.num_tokens for row in found.known]
                    request = chunked.request_of_columns(column)
                    counts = count_prompt(request, found.known, num_found, numbers, numbers, column, {})
                    _note_begun(rows.state, counts, found.known)
                    rows.seen.dense = READ_IN_CHUNKS if len(inputs) > 1 else ""
                    rows.previous = None
                    rows.reads_next = True
                    rows.prompt_end = int(rows.state.limits.num_prompt_columns)
        except torch.OutOfMemoryError:  # the first forward opens the rows, and gives way to them
            rows.reset()

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
        rows.may_be_lazy = self.fingerprint.attention == "sdpa" and not looks


def _note_begun(state: CallState, counts: list[RowStats], known: Sequence[Known]) -> None:
    """Note what rows have begun with: its counts, and the hashes that are known of it."""
    state.counts, state.pending = counts, (counts, True)
    for row in known:
        held = state.chains.get(row.chain.root)
        if held is None or len(held) < len(row.chain):
            state.chains[row.chain.root] = row.chain


def _num_needed(rows: Rows, request: ForwardRequest) -> int:
    """Return how many of the last columns must be computed, whatever is known."""
    if rows.states is None:
        return request.num_logits_needed
    is_padding = not all(row.token_ids for row in request.rows)
    return max(request.num_logits_needed, rows.states.num_needed(request.num_new_columns, is_padding=is_padding))


def _without_cuts(rows: Sequence[RowInput], column: int) -> int:
    """Return the last column, `column` at most, that cuts no image of a row."""
    while True:
        starts = [row.pad + whole_images(row.token_ids, column - row.pad) for row in rows if row.pad < column]
        if not starts or min(starts) == column:
            return column if starts else 0
        column = min(starts)
