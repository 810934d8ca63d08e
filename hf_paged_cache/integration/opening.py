"""Opens rows before their first forward: leases what is known of what they ask for, and fills them with it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..blocks.image_tokens import hold_images, whole_images
from ..call.counters import count_bypassed, count_prompt
from ..call.fill import fill
from ..call.find import Finding, Known
from ..call.keep import keep
from ..model.layers import cache_layers
from ..rows.request import CallState, ForwardRequest, RowInput
from ..rows.rows import Rows
from ..rows.shared import IN_CHUNKS as READ_IN_CHUNKS
from ..rows.shared import MODEL_LOOKS
from ..stats import RowStats
from .asking import FirstForward, read_first
from .chunked_prompt import ChunkedPrompt
from .forward_arguments import cut
from .generate_arguments import GenerateArguments
from .keeping import is_same
from .parts import CallParts
from .shared_prefill import run_ahead

_MODEL_CHANGED = "the model changed while a part of the prompt was computed first"


def open_rows(
    calls: CallParts, rows: Rows, arguments: Mapping[str, Any], *, may_run_ahead: bool = True
) -> Mapping[str, Any]:
    """Let rows begin with what is known, and cut this part from the arguments of their first forward."""
    state, groups = rows.state, calls.fingerprint.rank_groups
    if groups and not calls.ranks.may_run_more:
        state.is_in_step = True
    asked = read_first(calls, rows, arguments)
    request, copies = asked.request, asked.copies
    if asked.why_bypassed is not None:
        calls.ranks.settle(rows, request, is_kept=False)
        return _begin_bypassed(calls, rows, arguments, asked, asked.why_bypassed)
    start = _fill_known(calls, rows, asked, arguments, may_run_ahead=may_run_ahead)
    if start is None:
        return _begin_bypassed(calls, rows, arguments, asked, _MODEL_CHANGED)
    are_aliased = rows.copies is not None
    if len(copies) > 1 and not rows.may_be_lazy:
        rows.seen.dense = MODEL_LOOKS if rows.chunks is None else READ_IN_CHUNKS
    elif len(copies) > 1 and rows.captured is not None:
        rows.seen.dense = "captured rows are read each by itself"
    rows.prompt_end = request.num_new_columns if rows.in_generate else 0
    if state.chunked is not None and not math.isinf(state.limits.num_prompt_columns):
        rows.prompt_end = int(state.limits.num_prompt_columns)
        rows.reads_next = request.num_new_columns < rows.prompt_end
    if start or are_aliased:
        arguments = cut(arguments, start, asked.members if are_aliased else None, calls.image_inputs.whole)
    if state.images is None and not start and not are_aliased:
        return arguments
    state.images = None
    if asked.images is None:
        return arguments
    return asked.images.encoded(arguments, asked.members, len(copies), start)


def _fill_known(
    calls: CallParts, rows: Rows, asked: FirstForward, arguments: Mapping[str, Any], *, may_run_ahead: bool
) -> int | None:
    """Fill rows with what is known, and with what runs ahead; return the column at which they start.

    None: the model has changed meanwhile.
    """
    state, request, running, is_exact = rows.state, asked.request, asked.running, rows.is_exact
    previous, rows.previous = rows.previous, None
    num_needed = request.num_logits_needed
    if rows.states is not None:
        is_padding = not all(row.token_ids for row in running)
        num_needed = max(num_needed, rows.states.num_needed(request.num_new_columns, is_padding=is_padding))
    latest = request.num_new_columns - num_needed if request.keep_columns is None else 0
    hides_images = calls.image_inputs.takes_images and any(row.shift or hold_images(row.token_ids) for row in running)
    # a shorter forward would have other frequencies, and processes in step must run equally many forwards
    may_run_ahead = may_run_ahead and not (state.regime or state.is_in_step or hides_images)
    may_share = request.may_alias and may_run_ahead
    with Finding(calls.store, running, latest, previous, is_exact=is_exact) as found:
        found.look(latest)
        num_found = [row.num_found for row in found.known]
        if calls.fingerprint.rank_groups:
            _agree(calls, rows, request, found.known)
        ahead = run_ahead(calls, found, request, latest, arguments, may_share=may_share)
        start = _without_cuts(running, ahead.start) if hides_images and not is_exact else ahead.start
        if not ahead.made or is_same(calls, rows):
            for each in ahead.made:
                keep(calls.store, each, CallState("ahead", resets=state.resets), calls.salt)
        elif calls.fingerprint.rank_groups:  # they would not all be bypassed
            rows.keep_less(0)
        else:
            return None
        stop = request.num_new_columns
        if calls.capturing.is_asked:
            begin_captured(calls, rows, request, start, stop)
        rows.may_be_lazy = calls.may_be_lazy(rows)
        rows.copies = [*asked.copies] if len(running) < len(asked.copies) else None
        fill(calls.store, rows, running, found.known, start, calls.columns_to_make(rows, stop), takes_over=True)
        counts = count_prompt(request, found.known, num_found, asked.members, asked.copies, start, ahead.num_computed)
        _note_begun(state, counts, found.known)
        return start


def _agree(calls: CallParts, rows: Rows, request: ForwardRequest, known: Sequence[Known]) -> None:
    """Limit what is known of rows to what every rank knows; one message a call."""
    least = calls.ranks.settle(rows, request, [row.num_tokens for row in known])
    for row, num_tokens in zip(known, least, strict=True):
        row.limit(num_tokens)


def _begin_bypassed(
    calls: CallParts, rows: Rows, arguments: Mapping[str, Any], asked: FirstForward, why: str
) -> Mapping[str, Any]:
    """Let rows begin on transformers' own layers; return the arguments of their first forward."""
    state = rows.state
    arguments = bypass(calls, rows, arguments, why)
    if state.chunked is not None:
        rows.reads_next = asked.request.num_new_columns < state.limits.num_prompt_columns
    _note_begun(state, count_bypassed([len(row.token_ids) for row in asked.request.rows], why), ())
    return arguments


def bypass(calls: CallParts, rows: Rows, arguments: Mapping[str, Any], why: str) -> Mapping[str, Any]:
    """Let rows run on transformers' own layers from here on; return the arguments of their forward."""
    rows.previous = None
    rows.bypass(why, list(cache_layers(calls.model)))
    images, rows.state.images = rows.state.images, None
    if images is None:
        return arguments
    num_rows = len(arguments["input_ids"])
    return images.encoded(arguments, range(num_rows), num_rows)  # type: ignore[no-any-return]


def begin_captured(calls: CallParts, rows: Rows, request: ForwardRequest, start: int, stop: int) -> None:
    """Let the next forward, of the columns `[start, stop)`, and later ones run by graphs, if they may be."""
    unusual, state = request.keep_columns, rows.state
    if state.adapters is not None:
        unusual = "adapters were given for each row"
    if state.is_custom:
        unusual = "custom_generate calls the model in its own way"
    elif calls.image_inputs.takes_images:
        unusual = "the model takes images"
    elif rows.reads_all:
        unusual = "a function that is not transformers' says what each step is passed"
    most = state.limits.max_columns
    state.captured = calls.capturing.begin(rows, len(request.rows), start, stop, max_columns=most, unusual=unusual)


def begin_chunks(calls: CallParts, rows: Rows, chunked: ChunkedPrompt, given: GenerateArguments) -> None:
    """Let rows begin with what is known of a prompt, in whole chunks, so that `generate` passes later chunks."""
    state, fingerprint = rows.state, calls.fingerprint
    state.chunked, rows.chunks = chunked, chunked.chunks
    arguments = chunked.arguments(calls.model, given, takes_positions=calls.reader.takes_positions)
    is_alone = calls.ranks.may_run_more and not state.is_in_step
    if arguments is None or fingerprint.rope.depends_on_length or not is_alone:
        return
    with torch.no_grad():  # `generate` runs forwards without gradients, too
        asked = read_first(calls, rows, arguments)
    if asked.why_bypassed is not None or asked.images is not None:
        return  # the first forward is bypassed for this reason, or the one that brings images
    request = chunked.request_of_prompt(replace(asked.request, rows=tuple(asked.running)))
    latest, size, inputs = request.num_new_columns - request.num_logits_needed, chunked.chunks.size, request.rows
    try:
        with Finding(calls.store, inputs, latest, rows.previous, is_exact=rows.is_exact) as found:
            column = found.look_together(latest // size * size, size)
            if calls.ranks.start_together:
                tokens = [row.token_ids.tobytes() for row in inputs]
                (column,) = calls.ranks.agree("a prompt in chunks", {"the token ids": tokens}, [column])
            if not column:
                return
            fill(calls.store, rows, inputs, found.known, column, calls.columns_to_make(rows, request.num_new_columns))
            numbers, num_found = range(len(inputs)), [row.num_tokens for row in found.known]
            request = replace(request, num_new_columns=column, num_logits_needed=1)  # the others are counted later
            _note_begun(state, count_prompt(request, found.known, num_found, numbers, numbers, column, {}), found.known)
    except torch.OutOfMemoryError:  # the first forward opens the rows, and gives way to them
        rows.reset()
        return
    rows.seen.dense = READ_IN_CHUNKS if len(inputs) > 1 else ""
    rows.previous = None
    rows.reads_next = True
    rows.prompt_end = int(state.limits.num_prompt_columns)


def _note_begun(state: CallState, counts: list[RowStats], known: Sequence[Known]) -> None:
    """Note what rows have begun with: its counts, and the hashes that are known of it."""
    state.counts, state.pending = counts, (counts, True)
    for row in known:
        held = state.chains.get(row.chain.root)
        if held is None or len(held.token_ids) < len(row.chain.token_ids):
            state.chains[row.chain.root] = row.chain


def _without_cuts(rows: Sequence[RowInput], column: int) -> int:
    """Return the last column, `column` at most, that cuts no image of a row."""
    while True:
        starts = [row.pad + whole_images(row.token_ids, column - row.pad) for row in rows if row.pad < column]
        if not starts or min(starts) == column:
            return column if starts else 0
        column = min(starts)
