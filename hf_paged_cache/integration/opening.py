"""Opens rows: reads what their first forward asks for, leases what is known of it, and fills the rows with that."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, cast

import torch

from ..blocks import RootFacts
from ..blocks.image_tokens import whole_images
from ..call.counters import PromptCounters, count_bypassed, count_prompt
from ..call.fill import fill
from ..call.find import Finding
from ..call.keep import keep
from ..model.fingerprint import Fingerprint
from ..model.layers import cache_layers, own_cache_class, presented
from ..rows.captured import Capturing
from ..rows.layers import kinds_of
from ..rows.request import CallState, ForwardRequest, RequestRead, RowInput, RowsCalls
from ..rows.rows import Rows
from ..rows.shared import IN_CHUNKS as READ_IN_CHUNKS
from ..rows.shared import MODEL_LOOKS, Looks
from ..store.block_store import BlockStore
from .chunked_prompt import IN_CHUNKS, ChunkedPrompt
from .forward_arguments import ArgumentReader, cut
from .generate_arguments import GenerateArguments
from .images import ImageInputs, PromptImages, Seen
from .ranks import Ranks
from .shared_prefill import Ahead, run_ahead

GRADIENTS = (
    "gradients are on and may flow through every token (run the forward in torch.no_grad() where none are needed)"
)
_MODEL_CHANGED = "the model changed while a part of the prompt was computed first"
_OTHER_WINDOWS = "layers have other windows than when the store was built; build another one for the model as it is now"
_POSITIONS_OF_PADDING = "positions of padding are the largest, and rotary frequencies follow the largest that runs"
_NUM_FOUND = attrgetter("num_found")
_MOST_TAKEN_BACK = 32  # most tokens of drafts that layers with a window can take back


class StoreParts(Protocol):
    """`StoreParts` is a `PrefixStore`, as the calls of its caches see it."""

    model: Any
    blocks: BlockStore
    fingerprint: Fingerprint
    argument_reader: ArgumentReader
    image_inputs: ImageInputs
    looks: Looks


class FirstForward(NamedTuple):
    """`FirstForward` says what the first forward of rows asks for."""

    request: ForwardRequest
    images: PromptImages | None  # images that begin with it
    why_bypassed: str | None = None  # why it reuses and keeps nothing; the fields below are then empty
    running: Sequence[RowInput] = ()  # rows that run; equal rows of the batch run as one
    members: Sequence[int] = ()  # row that runs -> the row of the batch that it is
    copies: Sequence[int] = ()  # row of the batch -> the row that runs for it


class Opening:
    """`Opening` has what the calls of one cache share, and opens their rows. It holds no rows.

    The salt is part of every root, and the namespace of the blocks. Where `reads_only` is true, a first forward does
    not run, and what it asks for is raised as RequestRead. Where `captures` is, calls may run by graphs.
    """

    def __init__(
        self, parts: StoreParts, salt: bytes, counters: PromptCounters, ranks: Ranks, capturing: Capturing
    ) -> None:
        self.model, self.store, self.fingerprint = parts.model, parts.blocks, parts.fingerprint
        self.reader, self.image_inputs = parts.argument_reader, parts.image_inputs
        self.looks = parts.looks
        self.salt, self.counters, self.ranks, self.capturing = salt, counters, ranks, capturing
        self.reads_only, self.captures = False, capturing.attach()
        self._insists_on_class = own_cache_class(self.model) is not None
        self.has_deltas = any(hasattr(module, "rope_deltas") for module in self.model.modules())
        self._kinds = kinds_of(cache_layers(self.model))._replace(  # rows of a model that has changed get more layers
            windows=self.store.window_of,
            margin=self.store.block_size + _MOST_TAKEN_BACK,
            align=self.store.align,
            most_inside=self.store.snapshots.most if self.store.rules.is_recorded else 0,
            clamps_one_token=self.store.rules.clamps_one_token,
        )

    def new_rows(self, state: CallState) -> Rows:
        """Make rows of a call that no forward has run yet."""
        rows = Rows(cast("RowsCalls", self), self._kinds, self.looks, state)
        return presented(self.model, rows) if self._insists_on_class else rows

    # What a forward asks for.

    def read(self, rows: Rows, arguments: Mapping[str, Any]) -> tuple[ForwardRequest, str | None, Seen]:
        """Return what a forward asks for, why it reuses and keeps nothing if its arguments say so, and its images."""
        seen, images_of = Seen(arguments), self.image_inputs
        if not images_of.is_plain:
            if not rows.in_generate:
                images_of.require_filled(arguments, rows.n)
            seen = images_of.see(arguments, rows)
        request = self.reader.read(seen.plain, rows, self.fingerprint.outputs)
        return request, seen.why_whole or request.bypass, seen

    def _read_first(self, rows: Rows, arguments: Mapping[str, Any]) -> FirstForward:
        """Return what a first forward asks for under the model as it is, which the rows' state notes."""
        state, fingerprint, store = rows.state, self.fingerprint, self.store
        state.seen, state.digest, state.regime = rows.seen, fingerprint.digest(), b""
        with store.lock:
            state.resets = store.resets_of(self.salt)
        if rows.previous is not None and rows.previous.state.resets != state.resets:
            rows.previous = None  # a reset has come after those rows began: what they hold is to be forgotten
        state.was_alone = not fingerprint.may_change_in_a_forward()
        state.calls_back = state.calls_back or fingerprint.own_forward is not None
        state.adapters = fingerprint.adapter_names
        rows.escaped = rows.escaped or fingerprint.foreign_code is not None  # a hook of others may keep the rows
        request, why, seen = self.read(rows, arguments)
        if not self.image_inputs.is_plain:
            named, why_unnamed = seen.named(request, store.block_size)
            request, why = replace(request, rows=tuple(named)), why or why_unnamed
        why, num_rows = why or self.why_in_general(), len(request.rows)
        if why is None and state.adapters is not None and len(state.adapters) != num_rows:
            why = f"{len(state.adapters)} adapter names were given for {num_rows} rows; pass one for each row"
        if why is None and torch.is_grad_enabled():
            why = GRADIENTS
        if why is None and state.chunked is not None:
            why = state.chunked.why_bypassed(request, store.block_size)
        inputs: Sequence[RowInput] = request.rows
        if why is None:
            if state.chunked is not None:
                request = replace(request, keep_columns=request.keep_columns or IN_CHUNKS)
            if fingerprint.rope.depends_on_length:
                request = self._follow_length(state, request)
            inputs = self.with_roots(state, request)
        if self.reads_only:
            raise RequestRead(replace(request, rows=tuple(inputs), bypass=why))
        if why is not None:
            return FirstForward(request, seen.images, why)
        may_alias = request.may_alias and state.chunked is None and state.adapters is None
        members: Sequence[int] = range(len(inputs))
        copies = members
        if may_alias and len(inputs) > 1:
            members, copies = _distinct(inputs)
            inputs = [inputs[at] for at in members]
        if may_alias != request.may_alias:
            request = replace(request, may_alias=may_alias)
        return FirstForward(request, seen.images, None, inputs, members, copies)

    def why_in_general(self) -> str | None:
        """Return why no row may reuse or keep anything, under the model as it is now; None: rows may."""
        fingerprint = self.fingerprint
        why = fingerprint.bypass()
        if why is None and fingerprint.rank_groups:
            return "layers carry states, and other processes share the model" if self.store.has_states else None
        if why is None and fingerprint.windows != self.store.window_of:
            return _OTHER_WINDOWS
        return why

    def _follow_length(self, state: CallState, request: ForwardRequest) -> ForwardRequest:
        """Set rotary frequencies that depend on length to those of the prompt; they are a part of its prefix keys."""
        last = request.num_new_columns - 1
        state.regime = self.fingerprint.rope.at(last if request.max_position is None else request.max_position)
        largest = max(row.first_position + last - row.pad for row in request.rows)
        if request.keep_columns is None and (request.max_position or 0) > largest:
            return replace(request, keep_columns=_POSITIONS_OF_PADDING)
        return request

    def with_roots(self, state: CallState, request: ForwardRequest) -> list[RowInput]:
        """Return the rows of the batch with their prefix keys."""
        inputs, regime, fingerprint = [], state.regime, self.fingerprint
        for number, row in enumerate(request.rows):
            counted_from = row.pad
            if row.pad and self.reader.takes_positions:
                counted_from = min(row.pad, fingerprint.state_traits.num_pads_that_show)
            if state.chunked is not None:
                regime = state.regime + state.chunked.shape_of(number, request)
            adapter = "" if state.adapters is None else state.adapters[number]
            facts = RootFacts(state.digest, self.salt, regime, adapter, counted_from, row.first_position)
            inputs.append(row._replace(root=fingerprint.roots.of(facts), salt=self.salt))
        return inputs

    # How rows begin.

    def _open(self, rows: Rows, arguments: Mapping[str, Any], *, may_run_ahead: bool = True) -> Mapping[str, Any]:
        """Let rows begin with what is known, and cut this part from the arguments of their first forward."""
        state, num_whole = rows.state, rows.state.limits.num_prompt_columns
        if self.fingerprint.rank_groups and not self.ranks.may_run_more:
            state.is_in_step = True
        asked = self._read_first(rows, arguments)
        request, copies, why, start = asked.request, asked.copies, asked.why_bypassed, None
        if why is not None:
            self.ranks.settle(rows, request, is_kept=False)
        else:
            start = self._fill(rows, asked, arguments, may_run_ahead=may_run_ahead)
        if state.chunked is not None:
            rows.reads_next = request.num_new_columns < num_whole
        if start is None:
            state.pending = count_bypassed([len(row.token_ids) for row in request.rows], why or _MODEL_CHANGED)
            return self.bypass(rows, arguments, why or _MODEL_CHANGED)
        are_aliased = rows.copies is not None
        if len(copies) > 1 and not rows.may_be_lazy:
            rows.seen.dense = MODEL_LOOKS if rows.chunks is None else READ_IN_CHUNKS
        elif len(copies) > 1 and rows.captured is not None:
            rows.seen.dense = "captured rows are read each by itself"
        rows.prompt_end = request.num_new_columns if rows.in_generate else 0
        if state.chunked is not None and num_whole:
            rows.prompt_end = num_whole
        if start or are_aliased:
            arguments = cut(arguments, start, asked.members if are_aliased else None, self.image_inputs.whole)
        if asked.images is not None and (start or are_aliased or state.images is not None):
            arguments = asked.images.encoded(arguments, asked.members, len(copies), start)
        state.images = None
        return arguments

    def _fill(
        self, rows: Rows, asked: FirstForward, arguments: Mapping[str, Any], *, may_run_ahead: bool
    ) -> int | None:
        """Fill rows with what is known, and with what runs ahead; return the column at which they start.

        None: the model has changed meanwhile.
        """
        state, request, running, is_exact = rows.state, asked.request, asked.running, rows.is_exact
        previous, rows.previous = rows.previous, None
        num_needed, stop, groups = request.num_logits_needed, request.num_new_columns, self.fingerprint.rank_groups
        if rows.states is not None:
            is_padding = not all(row.token_ids for row in running)
            num_needed = max(num_needed, rows.states.num_needed(stop, is_padding=is_padding))
        latest = stop - num_needed if request.keep_columns is None else 0
        hides_images = self.image_inputs.takes_images and any(row.shift or row.holds_images for row in running)
        # a shorter forward would have other frequencies, and processes in step must run equally many forwards
        may_run_ahead = may_run_ahead and not (state.regime or state.is_in_step or hides_images)
        model_looks = self.looks.model_looks or rows.kinds.indexed or rows.chunks is not None  # chunks promise bits
        rows.may_be_lazy = self.fingerprint.attention == "sdpa" and not model_looks
        with closing(Finding(self.store, running, previous, is_exact)) as found:
            found.look(latest)
            num_found = [*map(_NUM_FOUND, found.known)]
            if groups:  # every rank knows as much; one message a call
                least = self.ranks.settle(rows, request, [row.num_tokens for row in found.known])
                for row, num_tokens in zip(found.known, least, strict=True):
                    row.limit(num_tokens)
            ahead = Ahead(0)
            if len(running) == 1 and not is_exact:
                column = min(running[0].pad + found.known[0].num_tokens, latest)
                ahead = Ahead(column if column > running[0].pad else 0)
            elif latest > 0:
                may_share = request.may_alias and may_run_ahead and stop > self.store.block_size
                ahead = run_ahead(self.store, self.reader, rows, found, stop, latest, arguments, may_share=may_share)
            start = _without_cuts(running, ahead.start) if hides_images and not is_exact else ahead.start
            if not ahead.made or self.is_same(rows):
                for each in ahead.made:
                    keep(self.store, each, CallState("ahead", resets=state.resets), self.salt)
            elif groups:  # they would not all be bypassed
                rows.keep_less(0)
            else:
                return None
            if self.captures:
                self.begin_captured(rows, request, start, stop)
            rows.copies = [*asked.copies] if len(running) < len(asked.copies) else None
            fill(self.store, rows, running, found.known, start, stop, takes_over=True)
            state.pending = count_prompt(
                request, found.known, num_found, asked.members, asked.copies, start, ahead.num_computed
            )
            for row in found.known:
                if row.chain is not None:
                    state.chains[row.chain.root] = row.chain
        return start

    def bypass(self, rows: Rows, arguments: Mapping[str, Any], why: str) -> Mapping[str, Any]:
        """Let rows run on transformers' own layers from here on; return the arguments of their forward."""
        rows.previous = None
        rows.bypass(why)
        images, rows.state.images = rows.state.images, None
        if images is None:
            return arguments
        num_rows = len(arguments["input_ids"])
        return images.encoded(arguments, range(num_rows), num_rows)  # type: ignore[no-any-return]

    def begin_captured(self, rows: Rows, request: ForwardRequest, start: int, stop: int) -> None:
        """Let the next forward, of the columns `[start, stop)`, and later ones run by graphs, if they may be."""
        unusual, state = request.keep_columns, rows.state
        if state.adapters is not None:
            unusual = "adapters were given for each row"
        if state.is_custom:
            unusual = "custom_generate calls the model in its own way"
        elif self.image_inputs.takes_images:
            unusual = "the model takes images"
        elif rows.reads_all:
            unusual = "a function that is not transformers' says what each step is passed"
        state.captured = self.capturing.begin(rows, len(request.rows), start, stop, unusual)

    def begin_chunks(self, rows: Rows, chunked: ChunkedPrompt, given: GenerateArguments) -> None:
        """Let rows begin with what is known of a prompt, in whole chunks, so that `generate` passes later chunks."""
        state = rows.state
        state.chunked, rows.chunks = chunked, chunked.chunks
        arguments = chunked.arguments(self.model, given, takes_positions=self.reader.takes_positions)
        are_in_step = self.fingerprint.rank_groups or state.is_in_step
        if arguments is None or are_in_step or self.fingerprint.rope.depends_on_length:
            return
        with torch.no_grad():  # `generate` runs forwards without gradients, too
            asked = self._read_first(rows, arguments)
        if asked.why_bypassed is not None or asked.images is not None:
            return  # the first forward is bypassed for this reason, or the one that brings images
        chunked.prompt = request = replace(asked.request, rows=tuple(asked.running), keep_columns=None)
        stop, size, inputs = request.num_new_columns, chunked.chunks.size, request.rows
        latest = (stop - chunked.num_logits) // size * size
        try:
            with closing(Finding(self.store, inputs, rows.previous, rows.is_exact)) as found:
                column = found.look_together(latest, size)
                if not column:
                    return
                fill(self.store, rows, inputs, found.known, column, stop)
                numbers, num_found = range(len(inputs)), [row.num_tokens for row in found.known]
                request = replace(request, num_new_columns=column, num_logits_needed=1)  # others are counted later
                state.pending = count_prompt(request, found.known, num_found, numbers, numbers, column, {})
        except torch.OutOfMemoryError:  # the first forward opens the rows, and gives way to them
            rows.reset()
            return
        rows.seen.dense = READ_IN_CHUNKS if len(inputs) > 1 else ""
        rows.previous = None
        rows.reads_next = True
        rows.prompt_end = state.limits.num_prompt_columns

    def is_same(self, rows: Rows) -> bool:
        """Return whether the model is as it was when the rows began, and rows may be kept."""
        state, fingerprint = rows.state, self.fingerprint
        # of a call of one forward, or where nobody could act between two
        is_one_forward = rows.num_forwards <= 1 or not (state.calls_back or rows.reads_all)
        if is_one_forward and state.was_alone and not fingerprint.may_change_in_a_forward():
            return True
        return self.looks_same(state)

    def looks_same(self, state: CallState) -> bool:
        """Look at the model: return whether it is as when the call's rows began, and rows may be kept."""
        fingerprint = self.fingerprint
        is_same = fingerprint.digest() == state.digest and fingerprint.adapter_names == state.adapters
        return is_same and fingerprint.bypass() is None


def _distinct(rows: Sequence[RowInput]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the numbers of rows that differ, and for each row the place of its equal among them."""
    places: dict[tuple[bytes, int, bytes], int] = {}
    members, copies = list[int](), list[int]()
    for number, row in enumerate(rows):
        key = (row.root, row.pad, row.token_ids.tobytes())
        if key not in places:
            places[key] = len(members)
            members.append(number)
        copies.append(places[key])
    return members, copies


def _without_cuts(rows: Sequence[RowInput], column: int) -> int:
    """Return the last column, `column` at most, that cuts no image of a row."""
    while True:
        starts = [row.pad + whole_images(row.token_ids, column - row.pad) for row in rows if row.pad < column]
        if not starts or min(starts) == column:
            return column if starts else 0
        column = min(starts)
