"""Rows that go on where a prompt has placeholders that nothing fills: keys and values of an image are in the rows, and nowhere else.

Owns which of the rows of the call before a prompt goes on from, and from which column, as `DynamicCache` goes on from all that it
holds; and what modules remember of the images of those rows. Changes nothing before it is known that all of the prompt's
rows can go on.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..blocks.tokens import common_prefix_length
from ..call.call import Call
from ..errors import CacheArgumentError
from ..model.conditioning import Conditioning
from ..model.placeholders import Placeholders, Unfilled
from .generate_arguments import GenerateArguments
from .own_layers import OwnLayers


class _Source(NamedTuple):
    """Where a row of a prompt goes on: the row of the batch that holds most of it, and how many columns they share."""

    row: int
    num_columns: int


class GoingOn:
    """The rows of one cache, as a `generate` may go on with them that is passed the whole prompt without its images.

    Args:
        call: its rows.
        own_layers: where they are while a call is bypassed.
        conditioning: the model, as of now.
        placeholders: the model's.
    """

    def __init__(
        self, call: Call, own_layers: OwnLayers, conditioning: Conditioning, placeholders: Placeholders
    ) -> None:
        self._call = call
        self._own_layers = own_layers
        self._conditioning = conditioning
        self._placeholders = placeholders
        self._deltas = _RopeDeltas(conditioning.model) if placeholders else None
        self._unseen_end = 0  # of a prompt that rows go on with, the column behind its last; 0: all of it has run

    def require_filled(self, arguments: Mapping[str, Any]) -> None:
        """Refuse a forward outside of `generate` whose placeholders nothing fills; a decode step is not looked at.

        Raises:
            CacheArgumentError: naming the first one.
        """
        ids = arguments.get("input_ids") if self._placeholders else None
        if ids is None:
            return
        before = self._own_layers.num_columns if self._own_layers.has_rows else self._call.num_columns
        if before and ids.shape[-1] == 1:
            return
        unfilled = self._placeholders.unfilled(arguments, before)
        if unfilled is not None:
            raise CacheArgumentError(f"{unfilled.what}: pass {unfilled.fillers}, or call the model without this cache")

    def require_new_tokens(self, arguments: Mapping[str, Any]) -> None:
        """Refuse a forward of `generate` that would run again what the rows hold, as transformers' assisted generation does.

        Raises:
            CacheArgumentError: it would; the rows have not changed.
        """
        ids = arguments.get("input_ids") if self._unseen_end else None
        if ids is None:
            return
        stop = self._call.num_columns + ids.shape[-1]
        if stop > self._unseen_end:
            raise CacheArgumentError(
                "this way of generating runs the whole prompt behind the rows that hold its images: pass these with the "
                "whole prompt, or only the new tokens under a mask of all columns"
            )
        if stop == self._unseen_end:
            self._unseen_end = 0

    def look(self, given: GenerateArguments) -> "Look | None":
        """The placeholders of a `generate` that nothing fills. No lock is held: this may wait for the device."""
        before = given.num_masked - given.num_given if given.only_new_tokens else 0
        unfilled = self._placeholders.unfilled(given.passed, before)
        if unfilled is None:
            return None
        if not self._call.is_in_use:
            self._call.catch_up()
        num_columns = len(unfilled.tokens[0])
        mask, first_shown = given.passed.get("attention_mask"), [num_columns] * len(unfilled.tokens)
        if isinstance(mask, Tensor) and mask.shape == (len(first_shown), num_columns):
            first_shown = (mask != 0).int().argmax(dim=1).tolist()
        return Look(unfilled, first_shown, given.digest or self._conditioning.digest())

    def settle(self, given: GenerateArguments, look: "Look | None") -> bool:
        """Whether the rows go on. Where a prompt's placeholders need them, they are cut and ordered as it is.

        The store's lock is held.

        Raises:
            CacheArgumentError: nothing fills a placeholder, and no row holds it; nothing has changed.
        """
        call, own, self._unseen_end = self._call, self._own_layers, 0
        num_rows = own.num_rows if own.has_rows else len(call.rows)
        if look is None:
            if given.only_new_tokens:
                self._put_back([*range(num_rows)], num_rows)
            return given.only_new_tokens
        unfilled = look.unfilled
        if given.only_new_tokens:
            raise CacheArgumentError(f"{unfilled.what}: pass {unfilled.fillers}")
        call.check_not_busy()
        call.roll_back()
        found = self._sources(given, look)
        if isinstance(found, str):
            raise CacheArgumentError(
                f"{unfilled.what}: pass {unfilled.fillers} with the whole prompt. The rows of the last call cannot go on "
                f"in its place: {found}"
            )
        self._put_back([source.row for source in found], num_rows)
        call.crop(call.num_columns - min(source.num_columns for source in found))
        copies = max(1, given.limits.num_rows // len(found))
        order = [source.row for source in found for _ in range(copies)]
        if order != [*range(num_rows)]:
            call.reorder(order)
        self._unseen_end = given.num_given
        return True

    def note(self) -> None:
        """A forward has run: keep what modules remember of its images."""
        if self._deltas is not None:
            self._deltas.note()

    def take_over(self, other: "GoingOn") -> None:
        """The rows of another cache were copied."""
        if self._deltas is not None and other._deltas is not None:
            self._deltas.held = other._deltas.held

    def _put_back(self, sources: list[int], num_rows: int) -> None:
        if self._deltas is not None and num_rows:
            self._deltas.put_back(sources, num_rows)

    def _sources(self, given: GenerateArguments, look: "Look") -> list[_Source] | str:
        """For each row of the prompt, where it goes on; or why it cannot."""
        rows, roots = self._call.rows, self._conditioning.roots
        if given.is_ambient:
            return "a call that is not passed the cache begins anew"
        if self._own_layers.has_rows:
            return "they ran without the store"
        if not rows.alias:
            return "there are none"
        if any((facts := roots.facts_of(row.root)) is None or facts.digest != look.digest for row in rows.distinct):
            return "the model has changed since"
        held = [(row.pad, row.table.token_ids) for row in rows.in_batch()]
        # a model may generate the id of a placeholder; the last token generated is not in the rows
        ends = [end - 1 if end == rows.num_columns + 1 else end for end in look.unfilled.ends]
        found = []
        for number, (tokens, end) in enumerate(zip(look.unfilled.tokens, ends, strict=True)):
            sources = [
                _Source(index, min(pad + common_prefix_length(known, tokens[pad:]), rows.num_columns, len(tokens) - 1))
                for index, (pad, known) in enumerate(held)
                if pad <= look.first_shown[number]  # padding that is skipped has no keys and values
            ]
            best = max(sources, key=lambda source: source.num_columns, default=_Source(0, 0))
            if best.num_columns < end:
                of_row = "" if len(look.unfilled.tokens) == 1 else f"row {number} of "
                return f"{of_row}the prompt is another one from position {best.num_columns} on"
            found.append(best)
        kept = min(source.num_columns for source in found)
        if kept < max(ends):
            return "rows of the prompt leave them at different positions, before the images of all"
        if kept < rows.num_columns:
            if self._call.states:
                return f"the prompt is another one from position {kept} on, and layers carry a state that cannot go back there"
            try:
                rows.require_resumable(kept)
            except CacheArgumentError:
                return f"the prompt is another one from position {kept} on, and layers with a window no longer hold what is before it"
        return found


class Look(NamedTuple):
    """What a look at a prompt has shown.

    Attributes:
        unfilled: placeholders that nothing fills.
        first_shown: of each row, the first column that the mask shows; all of them where there is no mask.
        digest: of the model, as it is.
    """

    unfilled: Unfilled
    first_shown: list[int]
    digest: bytes


class _RopeDeltas:
    """How far images have moved the positions behind them, which some models keep in a module, of the last call alone.

    Attributes:
        held: of the rows' last forward of several tokens, for each such module: [prompts, 1], or None.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[Any] = [module for module in model.modules() if hasattr(module, "rope_deltas")]
        self.held: list[Tensor | None] = []

    def note(self) -> None:
        self.held = [module.rope_deltas for module in self._modules]

    def put_back(self, sources: list[int], num_rows: int) -> None:
        """Have the modules remember what they did, of rows `sources` of the batch of `num_rows`."""
        for module, deltas in zip(self._modules, self.held, strict=False):
            if deltas is None or not len(deltas) or num_rows % len(deltas):
                continue
            index = torch.tensor(sources, device=deltas.device) // (num_rows // len(deltas))
            module.rope_deltas = deltas.index_select(0, index)
