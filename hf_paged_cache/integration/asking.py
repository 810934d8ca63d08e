"""Reads what forwards ask for, under the model as it is: rows with prefix keys, or why they reuse and keep nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..blocks import RootFacts
from ..errors import CacheArgumentError
from ..rows.request import CallState, ForwardRequest, RequestRead, RowInput
from ..rows.rows import Rows
from .chunked_prompt import IN_CHUNKS
from .images import PromptImages, Seen
from .parts import CallParts

GRADIENTS = (
    "gradients are on and may flow through every token (run the forward in torch.no_grad() where none are needed)"
)
_POSITIONS_OF_PADDING = "positions of padding are the largest, and rotary frequencies follow the largest that runs"


class FirstForward(NamedTuple):
    """`FirstForward` says what the first forward of rows asks for."""

    request: ForwardRequest
    images: PromptImages | None  # images that begin with it
    why_bypassed: str | None = None  # why it reuses and keeps nothing; the fields below are then empty
    running: Sequence[RowInput] = ()  # rows that run; equal rows of the batch run as one
    members: Sequence[int] = ()  # row that runs -> the row of the batch that it is
    copies: Sequence[int] = ()  # row of the batch -> the row that runs for it


def read_first(calls: CallParts, rows: Rows, arguments: Mapping[str, Any]) -> FirstForward:
    """Return what a first forward asks for under the model as it is, which the rows' state notes."""
    state, fingerprint, store = rows.state, calls.fingerprint, calls.store
    state.seen = rows.seen
    state.digest = fingerprint.digest()
    with store.lock:
        state.resets = store.resets_of(calls.salt)
    state.was_alone = not fingerprint.may_change_in_a_forward()
    state.calls_back = state.calls_back or fingerprint.own_forward is not None
    state.adapters = fingerprint.adapter_names
    rows.escaped = rows.escaped or fingerprint.foreign_code is not None  # a hook of others may keep the rows
    request, why, seen = read(calls, rows, arguments)
    if not calls.image_inputs.is_plain:
        named, why_unnamed = seen.named(request, store.block_size)
        request, why = replace(request, rows=tuple(named)), why or why_unnamed
    why = why or _why_bypassed(calls, rows, request)
    if why is not None:
        if calls.reads_only:
            raise RequestRead(replace(request, bypass=why))
        return FirstForward(request, seen.images, why)
    if state.chunked is not None:
        request = replace(request, keep_columns=request.keep_columns or IN_CHUNKS)
    state.regime = b""
    if fingerprint.rope.depends_on_length:
        request = _follow_length(calls, state, request)
    inputs = with_roots(calls, state, request)
    if calls.reads_only:
        raise RequestRead(replace(request, rows=tuple(inputs)))
    may_alias = request.may_alias and state.chunked is None and state.adapters is None
    members: Sequence[int] = range(len(inputs))
    copies = members
    if may_alias and len(inputs) > 1:
        members, copies = _distinct(inputs)
        inputs = [inputs[at] for at in members]
    if may_alias != request.may_alias:
        request = replace(request, may_alias=may_alias)
    return FirstForward(request, seen.images, None, inputs, members, copies)


def read(calls: CallParts, rows: Rows, arguments: Mapping[str, Any]) -> tuple[ForwardRequest, str | None, Seen]:
    """Return what a forward asks for, why it reuses and keeps nothing if its arguments say so, and its images."""
    if not rows.in_generate:
        require_filled(calls, arguments, rows.n)
    images_of = calls.image_inputs
    seen = Seen(arguments) if images_of.is_plain else images_of.see(arguments, rows)
    request = calls.reader.read(seen.plain, rows, calls.fingerprint.outputs)
    return request, seen.why_whole or request.bypass, seen


def require_filled(calls: CallParts, arguments: Mapping[str, Any], before: int) -> None:
    """Refuse a prompt, after `before` columns, with placeholders that nothing fills: images come with every prompt."""
    ids = arguments.get("input_ids") if calls.placeholders.kinds else None
    if ids is None or (before and ids.shape[-1] == 1):  # a model may generate the id of a placeholder
        return
    unfilled = calls.placeholders.unfilled(arguments, before)
    if unfilled is not None:
        raise CacheArgumentError(f"{unfilled}, or call the model without this cache")


def with_roots(calls: CallParts, state: CallState, request: ForwardRequest) -> list[RowInput]:
    """Return the rows of the batch with their prefix keys."""
    inputs, regime, fingerprint = [], state.regime, calls.fingerprint
    for number, row in enumerate(request.rows):
        counted_from = row.pad
        if calls.reader.takes_positions:
            counted_from = fingerprint.state_traits.root_padding(row.pad)
        if state.chunked is not None:
            regime = state.regime + state.chunked.shape_of(number, request)
        adapter = "" if state.adapters is None else state.adapters[number]
        facts = RootFacts(state.digest, calls.salt, regime, adapter, counted_from, row.first_position)
        inputs.append(row._replace(root=fingerprint.roots.of(facts), salt=calls.salt))
    return inputs


def why_in_general(calls: CallParts) -> str | None:
    """Return why no row may reuse or keep anything, under the model as it is now; None: rows may."""
    if (why := calls.fingerprint.bypass()) is not None:
        return why
    if calls.store.states and calls.fingerprint.rank_groups:
        return "layers carry states, and other processes share the model"
    return None


def _why_bypassed(calls: CallParts, rows: Rows, request: ForwardRequest) -> str | None:
    """Return why rows may not reuse or keep anything, whatever the arguments of their forward say."""
    windows = {} if calls.fingerprint.rank_groups else calls.fingerprint.windows
    if not rows.kinds.windows == windows == calls.store.windows.window_of:
        return "layers have other windows than before, or calls with the windows of before hold blocks"
    if (why := why_in_general(calls)) is not None:
        return why
    adapters, chunked = rows.state.adapters, rows.state.chunked
    if adapters is not None and len(adapters) != len(request.rows):
        return f"{len(adapters)} adapter names were given for {len(request.rows)} rows; pass one for each row"
    if torch.is_grad_enabled():
        return GRADIENTS
    return None if chunked is None else chunked.why_bypassed(request, calls.store.block_size)


def _follow_length(calls: CallParts, state: CallState, request: ForwardRequest) -> ForwardRequest:
    """Set the model's rotary frequencies, which depend on length, to those of the prompt; return the request.

    These frequencies are a part of the rows' prefix keys.
    """
    last = request.num_new_columns - 1
    state.regime = calls.fingerprint.rope.at(last if request.max_position is None else request.max_position)
    largest = max(row.first_position + last - row.pad for row in request.rows)
    if request.keep_columns is None and (request.max_position or 0) > largest:
        return replace(request, keep_columns=_POSITIONS_OF_PADDING)
    return request


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
