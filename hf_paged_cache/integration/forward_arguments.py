"""Reads what a forward asks of the cache from its arguments, and cuts the arguments to the rows and columns that run.

Token ids, a mask of the form 0...01...1 and positions that count up are read. Whatever else is passed is named as the
reason why the forward is computed without reuse.
"""

import inspect
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import CacheArgumentError
from ..kv.tensors import read_arrays, to_device
from ..model.fingerprint import OUTPUT_FLAGS
from ..model.support import numbers_columns, takes
from ..rows.request import ForwardRequest, RowInput
from ..rows.rows import Rows

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")  # types of tokens, [R, T]; of text: 0
# Arguments that are read here, or have no influence on keys and values; any other that is no default prevents reuse.
_READ = {
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position"),
    *("past_key_values", "cache_params", "logits_to_keep", "labels", "use_cache", "return_dict"),
    *("tokenizer", "assistant_tokenizer"),  # `generate` passes on what it was given for stop strings
    *OUTPUT_FLAGS,
}
CROSS_INPUTS = ("encoder_hidden_states", "encoder_outputs", "cross_attention_states", "pixel_values")
_ALL_LOGITS = "the logits of all tokens were asked for"


class ArgumentReader:
    """`ArgumentReader` reads the arguments of one model's forwards."""

    def __init__(self, model: Any, *, carries_states: bool, sees_columns: bool) -> None:
        self.model = model
        self._carries_states = carries_states  # such layers do not look at the mask of a forward of one column
        self._sees_columns = sees_columns  # some layers attend to earlier columns, which the mask may hide
        # without positions, these follow the mask
        self.takes_positions, self.takes_logits_to_keep = takes(model, "position_ids"), takes(model, "logits_to_keep")
        self._arguments, self._numbers_columns = inspect.signature(model.forward).parameters, numbers_columns(model)
        self._cross_inputs = cross_inputs(model)

    def read(self, arguments: Mapping[str, Any], rows: Rows, by_default: Sequence[str]) -> ForwardRequest:
        """Read the arguments of a forward of rows, which has the outputs `by_default` unless they say otherwise."""
        before = rows.n
        # a row of padding alone has as much of it as there are columns: a forward that brought more may have failed
        old_pads = [min(prompt.pad, before) for prompt in rows.prompts] if rows.prompts else []
        has_padding = any(old_pads) and rows.filled > 0 and rows.first is not None
        why = self._why_unread(arguments, by_default, resumes_padding=has_padding)
        num_rows, num_new = shape_of(arguments, before)
        if old_pads and num_rows != len(old_pads):
            raise CacheArgumentError(
                f"the cache runs {len(old_pads)} rows, got {num_rows}; cache.reset() it for another batch"
            )
        ids, shown, positions = _values(arguments, num_rows, before, num_new)
        pads, why_other = self._pads(arguments.get("attention_mask"), shown, old_pads, before, num_rows, num_new)
        why, numbered = why or why_other, None if rows.in_generate else arguments.get("cache_position")
        if numbered is not None and why is None:  # `generate` itself numbers columns right
            if not isinstance(numbered, Tensor) or numbered.tolist() != [*range(before, before + num_new)]:
                why = "cache_position does not number the columns that are passed"
        if why is not None:
            pads = old_pads or [0] * num_rows
        firsts, why_other = self._first_positions(arguments.get("position_ids"), positions, rows, pads, num_new)
        why, why_all, num_logits = why or why_other, None, arguments.get("logits_to_keep")
        if arguments.get("labels") is not None:
            why_all = "labels were passed, and a loss covers all tokens"
        elif arguments.get("return_dict") is False or not getattr(self.model.config, "return_dict", True):
            why_all = "a tuple was asked for (return_dict=False)"
        may_alias = why is None and why_all is None
        if not self.takes_logits_to_keep:
            num_logits = 1
            if not rows.in_generate:
                why_all = why_all or _ALL_LOGITS
            elif rows.records_drafts:
                why_all = why_all or "the model cannot say which logits it needs while drafts are verified"
        elif not isinstance(num_logits, int) or isinstance(num_logits, bool) or num_logits <= 0:
            num_logits, why_all = 1, why_all or f"{_ALL_LOGITS} (pass logits_to_keep=1 for the last one's)"
        inputs = list[RowInput]()
        for of_row, pad, first in zip(ids, pads, firsts, strict=True):
            inputs.append(RowInput(array("q", of_row[max(0, pad - before) :].tobytes()), pad, first))
        return ForwardRequest(
            rows=tuple(inputs),
            num_new_columns=num_new,
            num_logits_needed=max(1, min(num_logits, num_new)),
            bypass=why,
            keep_columns=why_all,
            may_alias=may_alias,
            max_position=None if positions is None else int(positions.max()),
        )

    def _why_unread(
        self, arguments: Mapping[str, Any], by_default: Sequence[str], *, resumes_padding: bool
    ) -> str | None:
        """Return, in words, what may condition keys and values and is not read; None: there is nothing.

        Outputs beside logits cover all tokens, and some models compute otherwise with them. What layers would read that
        rows cannot hold is refused: a cross attention's, and padding.
        """
        asked = None
        for flag in OUTPUT_FLAGS:
            wanted = arguments.get(flag)
            if flag in by_default if wanted is None else wanted:
                asked = asked or flag
                if resumes_padding and flag == "output_attentions":
                    raise CacheArgumentError(
                        "output_attentions was asked for, with which attention of some models sees the rows' padding, "
                        "and keys and values of that padding are not kept: ask for it from the rows' first forward on, "
                        "or cache.reset() first"
                    )
        unread = None
        for name, value in arguments.items():
            if value is None or name in _READ:
                continue
            if name in self._cross_inputs:
                raise CacheArgumentError(
                    f"{name} was passed, and cross attention keeps keys and values that are no tokens'; call the model "
                    "without past_key_values, or use generate, which then leaves this cache out"
                )
            default = self._arguments[name].default if name in self._arguments else None
            if isinstance(value, bool | int | float | str) and type(value) is type(default) and value == default:
                continue
            if not isinstance(value, dict | list | tuple) or value:  # an empty one, as of no images, says nothing
                unread = unread or f"the argument {name} may condition keys and values"
        if unread is not None or asked is not None:
            return unread or f"{asked} was asked for"
        if arguments.get("inputs_embeds") is not None:
            return "embeddings were passed instead of token ids"
        return "codes of its own were passed instead of token ids" if arguments.get("input_ids") is None else None

    def _pads(
        self, mask: Any, shown: np.ndarray | None, old_pads: Sequence[int], before: int, num_rows: int, num_new: int
    ) -> tuple[list[int], str | None]:
        """Return how many columns of left padding each row has, and why rows cannot have these; None: they can.

        A mask of rows and columns shows the columns `shown`. Padding `old_pads` of rows that resume has no keys and
        values: it is refused that it may be seen.
        """
        if mask is None and old_pads and not self._sees_columns:
            return [*old_pads], None  # there is nothing that it could hide
        why, num_columns = None, before + num_new
        pads = first_shown = [0] * num_rows
        if shown is not None:
            pads, first_shown = (num_columns - shown.sum(axis=1)).tolist(), shown.argmax(axis=1).tolist()
        elif mask is not None:
            kind = f"{mask.dim()}-D tensor" if isinstance(mask, Tensor) else type(mask).__name__
            why = f"the attention mask is a {kind}, not [rows, columns]"
        for number, (pad, first) in enumerate(zip(pads, first_shown, strict=True)):
            if pad not in (first, num_columns) and why is None:
                why = f"the attention mask of row {number} has zeros after its first one (right padding or holes)"
            old = old_pads[number] if old_pads else pad
            if first < old and pad != num_columns and old_pads:
                shows = f"the attention mask shows column {first} of row {number}, which was padding and"
                if shown is None and mask is not None:
                    shows = f"{why}, and cannot be asked whether it hides the padding of row {number}, which"
                raise CacheArgumentError(
                    f"{shows} has no keys and values; pass a mask of [rows, columns], of all columns, or cache.reset() "
                    "first"
                )
            if old not in (pad, before) and why is None:  # only a row of padding alone may get more
                why = "the padding of a row has changed"
        if why is None and self._carries_states and num_new == 1 and max(pads) > before:
            if self._sees_columns and any(old_pads):
                raise CacheArgumentError(
                    f"column {before} is padding of a row and comes alone, so layers with a state take it for a token "
                    "that sees the padding before it, and keys and values of that padding are not kept: pass the "
                    "padding and the row's first token in one forward"
                )
            why = "layers with a state do not look at the mask of a forward of one column, which is padding here"
        return pads, why

    def _first_positions(
        self, given: Any, numbers: np.ndarray | None, rows: Rows, pads: Sequence[int], num_new: int
    ) -> tuple[list[int], str | None]:
        """Return the position of each row's first token, and why positions, as given, do not simply count on."""
        firsts = [prompt.first_position for prompt in rows.prompts] if rows.prompts else [0] * len(pads)
        if not self.takes_positions:
            return firsts, None
        if given is None:
            if not self._numbers_columns:
                return firsts, "without position_ids it is not known which positions this model gives its tokens"
            if rows.prompts and [*pads] != firsts:
                return firsts, "positions were not passed for padded rows"
            return [*pads], None
        if not isinstance(given, Tensor) or given.dim() != 2 or given.is_floating_point():
            return firsts, "positions are not one integer for each token"
        if given.shape not in ((1, num_new), (len(pads), num_new)):
            return firsts, "positions of another number of rows or columns than the token ids"
        if numbers is None:
            return firsts, None
        columns = np.arange(rows.n, rows.n + num_new)
        for number, pad in enumerate(pads):
            own = numbers[number if len(numbers) > 1 else 0] - columns + pad  # the first position, as each token has it
            own = own[max(0, pad - rows.n) :]
            if (own != own[-1:]).any():
                return firsts, "positions do not count up by one"
            if rows.prompts and own.size and own[-1] != firsts[number]:
                return firsts, "positions do not continue where the row stopped"
            if own.size:
                firsts[number] = int(own[-1])
        return firsts, None


def cross_inputs(model: Any) -> tuple[str, ...]:
    """Return the names of arguments that a cross attention of a model may attend to."""
    has_layers = getattr(model.config.get_text_config(decoder=True), "cross_attention_layers", None)
    return CROSS_INPUTS if has_layers else CROSS_INPUTS[:-1]


def cut(
    arguments: Mapping[str, Any], start: int, sources: Sequence[int] | None, whole: Collection[str]
) -> dict[str, Any]:
    """Cut a first forward's arguments to the columns from `start` on, but for those that keep the `whole` of theirs.

    Of the batch only the rows `sources` run; None: all do.
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


def shape_of(arguments: Mapping[str, Any], before: int) -> tuple[int, int]:
    """Return the numbers of rows and new columns: of embeddings or ids, or of a mask after `before` columns."""
    given, ids = arguments.get("inputs_embeds"), arguments.get("input_ids")
    if given is None and ids is not None:
        if ids.dim() != 2:
            raise CacheArgumentError(f"input_ids must be [rows, tokens], got {tuple(ids.shape)}")
        if ids.is_floating_point() or ids.is_complex():
            raise CacheArgumentError(f"input_ids must be integers, got a tensor of {ids.dtype}")
        given = ids
    if given is not None:
        return given.shape[0], given.shape[1] if given.shape[0] else 0
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return mask.shape[0], max(0, mask.shape[1] - before)
    raise CacheArgumentError(
        "a forward without input_ids and without inputs_embeds, and without an attention_mask of [rows, columns] that "
        "would tell how many columns it has; pass one of them"
    )


def _values(
    arguments: Mapping[str, Any], num_rows: int, before: int, num_new: int
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Read the values of token ids (-1: an embedding), mask and positions of all rows, in one wait for their device."""
    ids = arguments.get("input_ids") if arguments.get("inputs_embeds") is None else None
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    mask = mask != 0 if isinstance(mask, Tensor) and mask.dim() == 2 else None
    positions = positions if isinstance(positions, Tensor) and positions.numel() else None
    if mask is not None and mask.shape != (num_rows, before + num_new):
        raise CacheArgumentError(
            f"the attention mask is {tuple(mask.shape)}; with the cache's tokens and the new ones it must be "
            f"{(num_rows, before + num_new)}: pass ids that continue exactly where the rows stopped, "
            "or cache.reset() first"
        )
    token_ids, shown, numbers = read_arrays((ids, mask, positions))
    return np.full((num_rows, num_new), -1) if ids is None else token_ids, shown, numbers
