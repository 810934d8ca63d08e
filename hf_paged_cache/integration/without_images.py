"""Rows that resume where a prompt has placeholders that nothing fills: keys and values of an image are in the rows, and nowhere else.

Owns which of the rows of the call before a prompt resumes, and at which column, as `DynamicCache` resumes all that it holds.
Changes nothing before it is known that all of the prompt's rows can resume.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..blocks.image_tokens import shown_ids
from ..blocks.tokens import common_prefix_length
from ..call.call import Call
from ..errors import CacheArgumentError
from ..model.conditioning import Conditioning
from ..model.placeholders import Placeholders, Unfilled
from ..model.rope import RopeDeltas
from .chunked_prompt import require_slices
from .generate_arguments import GenerateArguments


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


class PromptsWithoutImages:
    """The rows of one cache, as a `generate` may resume them that is passed the whole prompt without its images.

    Args:
        call: its rows.
        conditioning: the model, as of now.
        placeholders: the model's.
    """

    def __init__(self, call: Call, conditioning: Conditioning, placeholders: Placeholders) -> None:
        self._call = call
        self._conditioning = conditioning
        self._placeholders = placeholders
        self._deltas = RopeDeltas(conditioning.model) if placeholders.kinds else None
        self._unseen_end = 0  # of a prompt that rows resume with, the column after its last; 0: all of it has run

    def check_forward(self, arguments: Mapping[str, Any], before: int, *, in_generate: bool) -> None:
        """Refuse a forward that has placeholders which nothing fills, or would run again what the rows hold.

        In `generate` the prompt was looked at as a whole; transformers' assisted generation may then run all of it. A decode step
        is not looked at.

        Raises:
            CacheArgumentError: it would; the rows have not changed.
        """
        ids = arguments.get("input_ids") if self._placeholders.kinds else None
        if ids is None:
            return
        stop = before + ids.shape[-1]
        if in_generate:
            if 0 < self._unseen_end < stop:
                raise CacheArgumentError(
                    "this way of generating runs the whole prompt after the rows that hold its images: pass these with the "
                    "whole prompt, or only the new tokens under a mask of all columns"
                )
            if stop == self._unseen_end:
                self._unseen_end = 0
        elif stop != before + 1 or not before:
            unfilled = self._placeholders.unfilled(arguments, before)
            if unfilled is not None:
                raise CacheArgumentError(
                    f"{unfilled.what}: pass {unfilled.fillers}, or call the model without this cache"
                )

    def look(self, given: GenerateArguments) -> Look | None:
        """The placeholders of a `generate` that nothing fills. No lock is held: this may wait for the device."""
        if not self._placeholders.kinds:
            return None
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

    def settle(self, given: GenerateArguments, look: Look | None, num_rows: int) -> bool:
        """Whether the rows resume. Where a prompt's placeholders need them, they are cut and ordered as it is.

        The store's lock is held.

        Raises:
            CacheArgumentError: nothing fills a placeholder, and no row holds it; or transformers would run what the rows hold again.
                Nothing has changed.
        """
        call, self._unseen_end = self._call, 0
        if look is None and not given.only_new_tokens:
            return False
        require_slices(given)
        if look is None:
            self._remember([*range(num_rows)], num_rows)
            return True
        unfilled = look.unfilled
        if given.only_new_tokens:
            raise CacheArgumentError(f"{unfilled.what}: pass {unfilled.fillers}")
        call.check_not_busy()
        call.roll_back()
        found = self._sources(given, look, num_rows)
        if isinstance(found, str):
            raise CacheArgumentError(
                f"{unfilled.what}: pass {unfilled.fillers} with the whole prompt. The rows of the last call cannot resume "
                f"in its place: {found}"
            )
        self._remember([row for _, row in found], num_rows)
        call.crop(call.num_columns - min(found)[0])
        copies = max(1, given.limits.num_rows // len(found))
        order = [row for _, row in found for _ in range(copies)]
        if order != [*range(num_rows)]:
            call.reorder(order)
        self._unseen_end = given.num_given
        return True

    def note(self) -> None:
        """A forward has run: keep what modules remember of its images."""
        if self._deltas is not None:
            self._deltas.note()

    def take_over(self, other: "PromptsWithoutImages") -> None:
        """The rows of another cache were copied."""
        if self._deltas is not None and other._deltas is not None:
            self._deltas.held = other._deltas.held

    def _remember(self, sources: list[int], num_rows: int) -> None:
        if self._deltas is not None and num_rows:
            self._deltas.put_back(sources, num_rows)

    def _sources(self, given: GenerateArguments, look: Look, num_rows: int) -> list[tuple[int, int]] | str:
        """For each row of the prompt: columns that it shares with the row of the batch that holds most of it, and that row.

        Or why they cannot resume.
        """
        rows, roots, prompt = self._call.rows, self._conditioning.roots, look.unfilled
        if given.is_ambient:
            return "a call that is not passed the cache begins anew"
        if not rows.alias:
            return "they ran without the store" if num_rows else "there are none"
        if any((facts := roots.facts_of(row.root)) is None or facts.digest != look.digest for row in rows.distinct):
            return "the model has changed since"
        # a model may generate the id of a placeholder; the last token generated is not in the rows
        ends = [end - 1 if end == rows.num_columns + 1 else end for end in prompt.ends]
        of_each = len(rows) // len(ends) if len(rows) % len(ends) == 0 else 0  # rows that a prompt was expanded to
        held = [shown_ids(row.table.token_ids) for row in rows.in_batch()]
        found = []
        for number, (tokens, end) in enumerate(zip(prompt.tokens, ends, strict=True)):
            shared = [0] * len(held)
            for index, row in enumerate(rows.in_batch()):
                if row.pad <= look.first_shown[number]:  # padding that is skipped has no keys and values
                    columns = row.pad + common_prefix_length(held[index], tokens[row.pad :])
                    shared[index] = min(columns, rows.num_columns, len(tokens) - 1)
            most = max(shared)
            of_row = "" if len(ends) == 1 else f"row {number} of "
            if most < end:
                return f"{of_row}the prompt is another one from position {most} on"
            equal = [index for index, columns in enumerate(shared) if columns == most]
            own = [index for index in equal if index // of_each == number] if of_each else []
            if not own and not self._show_the_same(equal, end):
                return f"{of_row}the prompt may be that of any of their rows {equal}, whose images may differ"
            found.append((most, (own or equal)[0]))
        kept = min(found)[0]
        if kept < max(ends):
            return "rows of the prompt leave them at different positions, before the images of all"
        if kept < rows.num_columns:
            another = f"the prompt is another one from position {kept} on"
            if self._call.states is not None:
                return f"{another}, and layers carry a state that cannot go back there"
            try:
                rows.require_resumable(kept)
            except CacheArgumentError:
                return f"{another}, and layers with a window no longer hold what is before it"
        return found

    def _show_the_same(self, batch: list[int], end: int) -> bool:
        """Whether rows of the batch hold the same images before a column: of each, it is known which one it is."""
        rows = self._call.rows
        first, *others = [rows.distinct[group] for group in dict.fromkeys(rows.alias[row] for row in batch)]
        for other in others:
            common = first.table.token_ids[: common_prefix_length(first.table.token_ids, other.table.token_ids)]
            if len(shown_ids(common)) < end - first.pad or any(token in self._placeholders.kinds for token in common):
                return False
        return True
