"""Reads what forwards ask for, under the model as it is: rows with prefix keys, or why they reuse and keep nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..blocks.roots import RootFacts
from ..blocks.window import Window
from ..call.call_state import CallState
from ..call.request import ForwardRequest, RequestRead, RowInput
from ..errors import CacheArgumentError
from ..rows.rows import Rows
from .chunked_prompt import IN_CHUNKS
from .forward_arguments import RunningRow, RunningRows
from .images import PromptImages, Seen
from .ranks import Ranks
from .store_parts import StoreParts

GRADIENTS = (
    "gradients are on and may flow through every token (run the forward in torch.no_grad() where none are needed)"
)
_POSITIONS_OF_PADDING = "positions of padding are the largest, and rotary frequencies follow the largest that runs"


class FirstForward(NamedTuple):
    """`FirstForward` says what the first forward of rows asks for.

    Attributes:
        request: what the forward asks for.
        images: images that begin with it; None: there are none.
        why_bypassed: why it reuses and keeps nothing; the attributes below are then empty. None: it may.
        running: rows that run; equal rows of the batch run as one.
        members: row that runs -> the row of the batch that it is.
        copies: row of the batch -> the row that runs for it.
    """

    request: ForwardRequest
    images: PromptImages | None
    why_bypassed: str | None = None
    running: Sequence[RowInput] = ()
    members: Sequence[int] = ()
    copies: Sequence[int] = ()


class Asking:
    """`Asking` reads the forwards of one cache: see `Calls` for what it is made of.

    Attributes:
        reads_only: True if a first forward is not to run; what it asks for is raised as RequestRead.
    """

    def __init__(self, parts: StoreParts, salt: bytes, ranks: Ranks) -> None:
        self.reads_only = False
        self._store, self._fingerprint, self._salt, self._ranks = parts.blocks, parts.fingerprint, salt, ranks
        self._reader, self._image_inputs = parts.argument_reader, parts.image_inputs
        self._placeholders = parts.placeholders

    def first(self, rows: Rows, arguments: Mapping[str, Any]) -> FirstForward:
        """Return what a first forward asks for under the model as it is, which the rows' state notes."""
        state, fingerprint = rows.state, self._fingerprint
        state.seen = rows.seen
        state.digest = fingerprint.digest()
        with self._store.lock:
            state.resets = self._store.resets_of(self._salt)
        state.was_alone = not fingerprint.may_change_in_a_forward()
        state.calls_back = state.calls_back or fingerprint.own_forward is not None
        rows.escaped = rows.escaped or fingerprint.foreign_code is not None  # a hook of others may keep the rows
        request, why, seen = self.read(rows, arguments, RunningRows(), state.images)
        named, why_unnamed = seen.named(request, self._store.block_size)
        request, adapters = replace(request, rows=tuple(named)), fingerprint.adapter_names
        why = why or why_unnamed or self._why_bypassed(rows, request, adapters)
        if why is not None:
            if self.reads_only:
                raise RequestRead(replace(request, bypass=why))
            return FirstForward(request, seen.images, why)
        if state.chunked is not None:
            request = replace(request, keep_columns=request.keep_columns or IN_CHUNKS, may_alias=False)
        request = self._follow_length(state, replace(request, may_alias=request.may_alias and adapters is None))
        inputs = self.with_roots(state, request)
        if self.reads_only:
            raise RequestRead(replace(request, rows=tuple(inputs)))
        members, copies = _distinct(inputs) if request.may_alias else ([*range(len(inputs))], [*range(len(inputs))])
        return FirstForward(request, seen.images, None, [inputs[at] for at in members], members, copies)

    def read(
        self, rows: Rows, arguments: Mapping[str, Any], running: RunningRows, images: PromptImages | None
    ) -> tuple[ForwardRequest, str | None, Seen]:
        """Return what a forward asks for, why it reuses and keeps nothing if its arguments say so, and its images.

        Args:
            images: images that `generate` was passed; None: they are among the arguments.
        """
        if not rows.in_generate:
            self.require_filled(arguments, running.num_columns)
        images_of = self._image_inputs
        seen = Seen(arguments) if images_of.is_plain else images_of.see(arguments, running, images)
        request = self._reader.read(
            seen.plain,
            running,
            in_generate=rows.in_generate,
            records_drafts=rows.records_drafts,
            by_default=self._fingerprint.outputs,
        )
        return request, seen.why_whole or request.bypass, seen

    def require_filled(self, arguments: Mapping[str, Any], before: int) -> None:
        """Refuse a prompt that has placeholders which nothing fills: images must come with every prompt.

        Args:
            before: number of columns of the rows that resume.

        Raises:
            CacheArgumentError: the prompt has such placeholders.
        """
        ids = arguments.get("input_ids") if self._placeholders.kinds else None
        if ids is None or (before and ids.shape[-1] == 1):  # a model may generate the id of a placeholder
            return
        unfilled = self._placeholders.unfilled(arguments, before)
        if unfilled is not None:
            raise CacheArgumentError(f"{unfilled}, or call the model without this cache")

    def with_roots(self, state: CallState, request: ForwardRequest) -> list[RowInput]:
        """Return the rows of the batch with their prefix keys."""
        inputs, chunked, adapters = [], state.chunked, self._fingerprint.adapter_names
        for number, row in enumerate(request.rows):
            counted_from = row.pad
            if self._reader.takes_positions:
                counted_from = self._fingerprint.state_traits.root_padding(row.pad)
            adapter = "" if adapters is None else adapters[number]
            regime = state.regime if chunked is None else state.regime + chunked.shape_of(number, request)
            facts = RootFacts(state.digest, self._salt, regime, adapter, counted_from, row.first_position)
            inputs.append(row._replace(root=self._fingerprint.roots.of(facts), salt=self._salt))
        return inputs

    def why_in_general(self) -> str | None:
        """Return why no row may reuse or keep anything, under the model as it is now; None: rows may."""
        if (why := self._fingerprint.bypass()) is not None:
            return why
        if self._store.states and self._ranks.are_several:
            return "layers carry states, and other processes share the model"
        return None

    def windows(self) -> Mapping[int, Window]:
        """Return layer index -> window; nothing for several ranks, which settle what they know in tokens alone."""
        return {} if self._ranks.are_several else self._fingerprint.windows

    def _why_bypassed(self, rows: Rows, request: ForwardRequest, adapters: list[str] | None) -> str | None:
        """Return why rows may not reuse or keep anything, whatever the arguments of their forward say."""
        if not rows.kinds.windows == self.windows() == self._store.windows_now():
            return "layers have other windows than before, or calls with the windows of before hold blocks"
        if (why := self.why_in_general()) is not None:
            return why
        if adapters is not None and len(adapters) != len(request.rows):
            return f"{len(adapters)} adapter names were given for {len(request.rows)} rows; pass one for each row"
        if torch.is_grad_enabled():
            return GRADIENTS
        chunked = rows.state.chunked
        return None if chunked is None else chunked.why_bypassed(request, self._store.block_size)

    def _follow_length(self, state: CallState, request: ForwardRequest) -> ForwardRequest:
        """Set the model's rotary frequencies to those of the prompt, if they depend on length; return the request.

        These frequencies are a part of the rows' prefix keys.
        """
        rope, last = self._fingerprint.rope, request.num_new_columns - 1
        if not rope.depends_on_length:
            state.regime = b""
            return request
        state.regime = rope.at(last if request.max_position is None else request.max_position)
        largest = max(row.first_position + last - row.pad for row in request.rows)
        if request.keep_columns is None and (request.max_position or 0) > largest:
            return replace(request, keep_columns=_POSITIONS_OF_PADDING)
        return request


def running_rows(rows: Rows) -> RunningRows:
    """Return rows that resume, as the reader of arguments sees them.

    A row of padding alone has as much padding as there are columns: a forward that brought more may have failed.
    """
    n, began = rows.n, any(layer.filled for layer in rows.layers)
    running = [RunningRow(min(p.pad, n), p.first_position, max(0, n - p.pad), p.shift) for p in rows.prompts]
    return RunningRows(n, running, began and any(row.pad for row in running))


def _distinct(rows: Sequence[RowInput]) -> tuple[list[int], list[int]]:
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
