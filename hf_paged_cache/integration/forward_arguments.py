"""Reads what a forward asks of the cache from its arguments, and cuts the arguments to the rows and columns that run.

Nothing is guessed: token ids, a mask of the form 0...01...1 and positions that count up are read. Whatever else is
passed is named as the reason why the forward is computed without reuse. Inputs are shortened by name, never by shape.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..blocks.tokens import TokenIds
from ..call.request import ForwardRequest, RowInput
from ..errors import CacheArgumentError
from ..kv.transfers import read_arrays, to_device
from ..model.fingerprint import OUTPUT_FLAGS

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")  # types of tokens, [R, T]; of text: 0
# Arguments that are read here, or have no influence on keys and values. With any other argument the forward is computed
# without reuse, unless its value is what the model's forward takes where the argument is left out.
_READ = {
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position"),
    *("past_key_values", "cache_params", "logits_to_keep", "labels", "use_cache", "return_dict"),
    *("tokenizer", "assistant_tokenizer"),  # `generate` passes on what it was given for stop strings
    *OUTPUT_FLAGS,
}


class RunningRow(NamedTuple):
    """`RunningRow` is a row that resumes."""

    pad: int  # columns of left padding
    first_position: int
    num_tokens: int  # tokens that the row has
    shift: int | None  # how far images have moved the positions of the text after the images; None: not known


class RunningRows(NamedTuple):
    """`RunningRows` holds the rows that a forward resumes; none for a first forward."""

    num_columns: int = 0
    rows: Sequence[RunningRow] = ()
    lacks_padding: bool = False  # keys and values of padding are not what a model would compute


@dataclass(frozen=True)
class ArgumentReader:
    """`ArgumentReader` reads the arguments of one model's forwards.

    Attributes:
        config: config of the model, which may ask for tuples.
        takes_positions: True if the forward has `position_ids`; if not, positions follow the mask.
        defaults: what the forward takes for arguments that are left out.
        numbers_columns: True if the model numbers columns where no positions are passed. If not, it is not known.
        cross_inputs: arguments that a cross attention reads; they are refused.
        carries_states: True if some layers carry states; they do not look at the mask of a forward of one column.
        sees_columns: True if some layers attend to earlier columns, which the mask may hide.
    """

    config: Any
    _: KW_ONLY
    takes_positions: bool
    takes_logits_to_keep: bool
    defaults: Mapping[str, Any]
    numbers_columns: bool = True
    cross_inputs: Sequence[str] = ()
    carries_states: bool = False
    sees_columns: bool = True

    def read(
        self,
        arguments: Mapping[str, Any],
        running: RunningRows,
        *,
        in_generate: bool,
        records_drafts: bool,
        by_default: Sequence[str] = (),
    ) -> ForwardRequest:
        """Read a forward's arguments. The caller adds the roots of the rows.

        Args:
            in_generate: whether `generate` calls, which uses only the last logits.
            records_drafts: whether drafts are verified; `generate` may then want logits that it does not ask for.
            by_default: outputs that are computed unless the arguments say otherwise.

        Raises:
            CacheArgumentError: ids, mask or positions contradict each other or the rows; or a cross attention is used.
        """
        self._require_readable(arguments, running, by_default)
        before = running.num_columns
        num_rows, num_new = shape_of(arguments, before)
        if running.rows and num_rows != len(running.rows):
            raise CacheArgumentError(
                f"the cache runs {len(running.rows)} rows, got {num_rows}; cache.reset() it for another batch"
            )
        token_ids, shown, positions = _values(arguments, num_rows, before, num_new)
        pads, why_unusual = self._read_mask(arguments.get("attention_mask"), shown, running, num_rows, before + num_new)
        bypass = (
            self._why_unread(arguments, by_default)
            or why_unusual
            # `generate` itself numbers columns right
            or (None if in_generate else _why_miscounted(arguments.get("cache_position"), before, num_new))
            or self._why_other_padding(running, pads, num_new)
        )
        if bypass is not None:
            pads = [row.pad for row in running.rows] or [0] * num_rows
        firsts, why = self._first_positions(arguments.get("position_ids"), positions, running, pads, num_new)
        bypass = bypass or why
        keep_columns, num_needed = self._read_outputs(arguments, in_generate, records_drafts)
        rows = [
            RowInput(tokens[num_pads(pad, before, num_new) :], pad, first)
            for tokens, pad, first in zip(token_ids, pads, firsts, strict=True)
        ]
        return ForwardRequest(
            rows=tuple(rows),
            num_new_columns=num_new,
            num_logits_needed=max(1, min(num_needed, num_new)),
            bypass=bypass,
            keep_columns=keep_columns,
            may_alias=bypass is None and self._why_all_outputs(arguments) is None,
            max_position=None if positions is None else int(positions.max()),
        )

    def _require_readable(self, arguments: Mapping[str, Any], running: RunningRows, by_default: Sequence[str]) -> None:
        """Refuse a forward whose layers would read what rows cannot hold: a cross attention's, or padding."""
        for name in self.cross_inputs:
            if arguments.get(name) is not None:
                raise CacheArgumentError(
                    f"{name} was passed, and cross attention keeps keys and values that are no tokens'; call the model "
                    "without past_key_values, or use generate, which then leaves this cache out"
                )
        if running.lacks_padding and _is_asked("output_attentions", arguments, by_default):
            raise CacheArgumentError(
                "output_attentions was asked for, with which attention of some models sees the rows' padding, and keys "
                "and values of that padding are not kept: ask for it from the rows' first forward on, "
                "or cache.reset() first"
            )

    def _why_unread(self, arguments: Mapping[str, Any], by_default: Sequence[str]) -> str | None:
        """Return, in words, what may condition keys and values and is not read; None: there is nothing.

        Outputs beside logits cover all tokens, and some models compute otherwise with them.
        """
        for name, value in arguments.items():
            if value is None or name in _READ or self._is_default(name, value):
                continue
            if not isinstance(value, dict | list | tuple) or value:  # an empty one, as of no images, says nothing
                return f"the argument {name} may condition keys and values"
        for flag in OUTPUT_FLAGS:
            if _is_asked(flag, arguments, by_default):
                return f"{flag} was asked for"
        if arguments.get("inputs_embeds") is not None:
            return "embeddings were passed instead of token ids"
        return "codes of its own were passed instead of token ids" if arguments.get("input_ids") is None else None

    def _is_default(self, name: str, value: Any) -> bool:
        """Return whether an argument is the flag, number or word that the forward takes where it is left out."""
        default = self.defaults.get(name)
        return type(value) is type(default) and isinstance(value, bool | int | float | str) and value == default

    def _read_mask(
        self, mask: Any, shown: np.ndarray | None, running: RunningRows, num_rows: int, num_columns: int
    ) -> tuple[list[int], str | None]:
        """Return how many columns of left padding each row has, and why a mask is not of the form 0...01...1.

        A mask that may show padding of rows that resume is refused: that padding has no keys and values.

        Args:
            shown: columns that the mask shows, [rows, columns]; None: it is none of rows and columns, or there is none.
        """
        if mask is None and running.rows and not self.sees_columns:
            return [row.pad for row in running.rows], None  # there is nothing that it could hide
        pads = first_shown = [0] * num_rows
        if shown is not None:
            pads, firsts = (num_columns - shown.sum(axis=1)).tolist(), shown.argmax(axis=1).tolist()
            first_shown = [pad if pad == num_columns else first for pad, first in zip(pads, firsts, strict=True)]
        elif mask is not None:
            kind = f"{mask.dim()}-D tensor" if isinstance(mask, Tensor) else type(mask).__name__
            why = f"the attention mask is a {kind}, not [rows, columns]"
            for number, row in enumerate(running.rows):
                if row.pad:
                    raise CacheArgumentError(
                        f"{why}, and cannot be asked whether it hides the padding of row {number}, which has no keys "
                        "and values; pass a mask of [rows, columns], of all columns, or cache.reset() first"
                    )
            return pads, why
        for number, (row, first) in enumerate(zip(running.rows, first_shown, strict=False)):
            if first < row.pad:
                raise CacheArgumentError(
                    f"the attention mask shows column {first} of row {number}, which was padding and has no keys and "
                    "values; pass the mask of all columns, or cache.reset() first"
                )
        for number, (pad, first) in enumerate(zip(pads, first_shown, strict=True)):
            if pad != first:
                return (
                    pads,
                    f"the attention mask of row {number} has zeros after its first one (right padding or holes)",
                )
        return pads, None

    def _why_other_padding(self, running: RunningRows, pads: Sequence[int], num_new: int) -> str | None:
        """Return why rows cannot have this padding: only a row of padding alone may get more; None: they can."""
        before = running.num_columns
        for row, pad in zip(running.rows, pads, strict=False):
            if row.pad != pad and row.num_tokens:
                return "the padding of a row has changed"
        if self.carries_states and num_new == 1 and max(pads) > before:
            if self.sees_columns and any(row.pad for row in running.rows):
                raise CacheArgumentError(
                    f"column {before} is padding of a row and comes alone, so layers with a state take it for a token "
                    "that sees the padding before it, and keys and values of that padding are not kept: pass the "
                    "padding and the row's first token in one forward"
                )
            return "layers with a state do not look at the mask of a forward of one column, which is padding here"
        return None

    def _first_positions(
        self, given: Any, numbers: np.ndarray | None, running: RunningRows, pads: Sequence[int], num_new: int
    ) -> tuple[list[int], str | None]:
        """Return the position of each row's first token, and why positions, as given, do not simply count on."""
        before = running.num_columns
        expected = [row.first_position for row in running.rows] or [0] * len(pads)
        if not self.takes_positions:
            return expected, None
        if given is None:
            if not self.numbers_columns:
                return expected, "without position_ids it is not known which positions this model gives its tokens"
            if running.rows and [*pads] != expected:
                return expected, "positions were not passed for padded rows"
            return [*pads], None
        if (why := _why_not_counted(given, len(pads), num_new)) is not None:
            return expected, why
        if numbers is None:
            return expected, None
        starts = numbers - np.arange(num_new)  # equal as long as positions count up by one
        behind_others = ((starts != starts[:, -1:]) * np.arange(1, num_new + 1)).max(axis=1).tolist()
        last, firsts = starts[:, -1].tolist(), []
        for row, pad in enumerate(pads):
            skipped, at = num_pads(pad, before, num_new), row if len(last) > 1 else 0
            if skipped == num_new:
                firsts.append(expected[row])
                continue
            if behind_others[at] > skipped:
                return expected, "positions do not count up by one"
            start = last[at] + skipped - max(0, before - pad)
            if running.rows and start != expected[row]:
                return expected, "positions do not continue where the row stopped"
            firsts.append(start)
        return firsts, None

    def _read_outputs(
        self, arguments: Mapping[str, Any], in_generate: bool, records_drafts: bool
    ) -> tuple[str | None, int]:
        """Return why all columns are needed, if they are, and of how many at least the logits are."""
        if (why := self._why_all_outputs(arguments)) is not None:
            return why, 1
        if self.takes_logits_to_keep:
            kept = arguments.get("logits_to_keep")
            if isinstance(kept, int) and not isinstance(kept, bool) and kept > 0:
                return None, kept
            return "the logits of all tokens were asked for (pass logits_to_keep=1 for the last one's)", 1
        if not in_generate:
            return "the logits of all tokens were asked for", 1
        return ("the model cannot say which logits it needs while drafts are verified" if records_drafts else None), 1

    def _why_all_outputs(self, arguments: Mapping[str, Any]) -> str | None:
        """Return, in words, what is asked for beside logits that covers all tokens or rows; None: nothing."""
        if arguments.get("labels") is not None:
            return "labels were passed, and a loss covers all tokens"
        if arguments.get("return_dict") is False or not getattr(self.config, "return_dict", True):
            return "a tuple was asked for (return_dict=False)"
        return None


def cut(
    arguments: Mapping[str, Any], start: int, sources: Sequence[int] | None, whole: Collection[str]
) -> dict[str, Any]:
    """Cut a first forward's arguments to the columns from `start` on.

    Args:
        sources: row that runs -> row of the batch that it stands for; None: all rows run.
        whole: names of arguments that keep all their columns.
    """
    changed = dict(arguments)
    rows = None if sources is None else to_device(sources, changed["input_ids"].device)
    for name in ("input_ids", "position_ids", "attention_mask", *TOKEN_TYPES):
        value = changed.get(name)
        if not isinstance(value, Tensor):
            continue
        dim = value.dim() - 2  # positions of several numbers are [N, rows, columns]
        if rows is not None and value.shape[dim] > 1:  # a single row of positions stands for all
            value = value.index_select(dim, rows.to(value.device))
        changed[name] = value if name in whole else value[..., start:]
    if isinstance(changed.get("cache_position"), Tensor):
        changed["cache_position"] = changed["cache_position"][start:]
    return changed


def num_pads(pad: int, before: int, num_new: int) -> int:
    """Return how many of the new columns are left padding."""
    return min(num_new, max(0, pad - before))


def shape_of(arguments: Mapping[str, Any], before: int) -> tuple[int, int]:
    """Return the numbers of rows and new columns of a forward.

    They are those of its embeddings or ids; else of its mask, after `before` columns, or of its positions.
    """
    embeddings, ids = arguments.get("inputs_embeds"), arguments.get("input_ids")
    if embeddings is None and ids is not None:
        if ids.dim() != 2:
            raise CacheArgumentError(f"input_ids must be [rows, tokens], got {tuple(ids.shape)}")
        if ids.is_floating_point() or ids.is_complex():
            raise CacheArgumentError(f"input_ids must be integers, got a tensor of {ids.dtype}")
    given = ids if embeddings is None else embeddings
    if given is not None:
        return given.shape[0], given.shape[1] if given.shape[0] else 0
    for name, num_old in (("attention_mask", before), ("position_ids", 0)):
        given = arguments.get(name)
        if isinstance(given, Tensor) and given.dim() == 2:
            return given.shape[0], max(0, given.shape[1] - num_old)
    raise CacheArgumentError(
        "a forward without input_ids and without inputs_embeds, and without an attention_mask or position_ids of "
        "[rows, columns] that would tell how many columns it has; pass one of them"
    )


def _values(
    arguments: Mapping[str, Any], num_rows: int, before: int, num_new: int
) -> tuple[list[TokenIds], np.ndarray | None, np.ndarray | None]:
    """Read the values of token ids, mask and positions of all rows, in one wait for their device.

    Returns:
        token ids of each row, all new columns, -1 for each embedding; which columns a mask of [rows, columns] shows;
        and the positions. None: there are none.
    """
    ids = arguments.get("input_ids") if arguments.get("inputs_embeds") is None else None
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
    positions = positions if isinstance(positions, Tensor) and positions.numel() else None
    if mask is not None and mask.shape != (num_rows, before + num_new):
        raise CacheArgumentError(
            f"the attention mask is {tuple(mask.shape)}; with the cache's tokens and the new ones it must be "
            f"{(num_rows, before + num_new)}: pass ids that continue exactly where the rows stopped, "
            "or cache.reset() first"
        )
    shown = mask != 0 if mask is not None and mask.is_floating_point() else mask
    given = {"ids": ids, "mask": shown, "positions": positions}
    wanted = {name: tensor for name, tensor in given.items() if tensor is not None}
    found = dict(zip(wanted, read_arrays([*wanted.values()]), strict=True))
    if ids is None:
        token_ids = [array("q", [-1]) * num_new] * num_rows
    else:
        token_ids = [array("q", row.tobytes()) for row in found["ids"]]
    return token_ids, found["mask"] != 0 if "mask" in found else None, found.get("positions")


def _is_asked(flag: str, arguments: Mapping[str, Any], by_default: Sequence[str]) -> bool:
    """Return whether an output is asked for."""
    value = arguments.get(flag)
    return flag in by_default if value is None else bool(value)


def _why_miscounted(cache_position: Any, before: int, num_new: int) -> str | None:
    """Return why `cache_position` does not number the new columns; None: it does.

    Models that take no positions may go by `cache_position`.
    """
    if cache_position is None:
        return None
    counts_on = isinstance(cache_position, Tensor) and cache_position.tolist() == [*range(before, before + num_new)]
    return None if counts_on else "cache_position does not number the columns that are passed"


def _why_not_counted(positions: Any, num_rows: int, num_new: int) -> str | None:
    """Return why positions are not one number for each new token; None: they are."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.is_floating_point():
        return "positions are not one integer for each token"
    is_alike = positions.shape[0] in (1, num_rows) and positions.shape[1] == num_new
    return None if is_alike else "positions of another number of rows or columns than the token ids"
