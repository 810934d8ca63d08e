"""Reads what a forward asks of the cache from its arguments, and cuts the arguments to the rows and columns that run.

Token ids, a mask of the form 0...01...1 and positions that count up are read. Whatever else is passed is named as the
reason why the forward is computed without reuse.
"""

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import CacheArgumentError
from ..kv.tensors import read_arrays, to_device
from ..model.fingerprint import OUTPUT_FLAGS
from ..model.support import default_arguments, numbers_columns, takes
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
    """`ArgumentReader` reads the arguments of one model's forwards.

    Args:
        carries_states: whether some layers carry states; they do not look at the mask of a forward of one column.
        sees_columns: whether some layers attend to earlier columns, which the mask may hide.

    Attributes:
        takes_positions: True if the forward has `position_ids`; if not, positions follow the mask.
    """

    def __init__(self, model: Any, *, carries_states: bool, sees_columns: bool) -> None:
        self.model, self._carries_states, self._sees_columns = model, carries_states, sees_columns
        self.takes_positions, self.takes_logits_to_keep = takes(model, "position_ids"), takes(model, "logits_to_keep")
        self._defaults, self._numbers_columns = default_arguments(model), numbers_columns(model)
        self._cross_inputs = cross_inputs(model)

    def read(self, arguments: Mapping[str, Any], rows: Rows, by_default: Sequence[str]) -> ForwardRequest:
        """Read the arguments of a forward of rows. The caller adds the roots of the rows.

        Args:
            by_default: outputs that are computed unless the arguments say otherwise.

        Raises:
            CacheArgumentError: ids, mask or positions contradict each other or the rows; or a cross attention is used.
        """
        before = rows.n
        # a row of padding alone has as much of it as there are columns: a forward that brought more may have failed
        old_pads = [min(prompt.pad, before) for prompt in rows.prompts]
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
        why, why_all = why or why_other, None
        if arguments.get("labels") is not None:
            why_all = "labels were passed, and a loss covers all tokens"
        elif arguments.get("return_dict") is False or not getattr(self.model.config, "return_dict", True):
            why_all = "a tuple was asked for (return_dict=False)"
        why_logits, num_logits = self._logits_needed(
            arguments.get("logits_to_keep"), in_generate=rows.in_generate, records_drafts=rows.records_drafts
        )
        inputs = [
            RowInput(array("q", of_row[max(0, pad - before) :].tobytes()), pad, first)
            for of_row, pad, first in zip(ids, pads, firsts, strict=True)
        ]
        return ForwardRequest(
            rows=tuple(inputs),
            num_new_columns=num_new,
            num_logits_needed=max(1, min(num_logits, num_new)),
            bypass=why,
            keep_columns=why_all or why_logits,
            may_alias=why is None and why_all is None,
            max_position=None if positions is None else int(positions.max()),
        )

    def _why_unread(
        self, arguments: Mapping[str, Any], by_default: Sequence[str], *, resumes_padding: bool
    ) -> str | None:
        """Return, in words, what may condition keys and values and is not read; None: there is nothing.

        Outputs beside logits cover all tokens, and some models compute otherwise with them.

        Args:
            resumes_padding: whether rows resume whose padding has keys and values that no model would compute.

        Raises:
            CacheArgumentError: layers would read what rows cannot hold: a cross attention's, or padding.
        """
        for name in self._cross_inputs:
            if arguments.get(name) is not None:
                raise CacheArgumentError(
                    f"{name} was passed, and cross attention keeps keys and values that are no tokens'; call the model "
                    "without past_key_values, or use generate, which then leaves this cache out"
                )
        flags = [f for f in OUTPUT_FLAGS if (f in by_default if arguments.get(f) is None else arguments[f])]
        if resumes_padding and "output_attentions" in flags:
            raise CacheArgumentError(
                "output_attentions was asked for, with which attention of some models sees the rows' padding, and keys "
                "and values of that padding are not kept: ask for it from the rows' first forward on, "
                "or cache.reset() first"
            )
        for name, value in arguments.items():
            if value is None or name in _READ:
                continue
            default = self._defaults.get(name)
            if isinstance(value, bool | int | float | str) and type(value) is type(default) and value == default:
                continue
            if not isinstance(value, dict | list | tuple) or value:  # an empty one, as of no images, says nothing
                return f"the argument {name} may condition keys and values"
        if flags:
            return f"{flags[0]} was asked for"
        if arguments.get("inputs_embeds") is not None:
            return "embeddings were passed instead of token ids"
        return "codes of its own were passed instead of token ids" if arguments.get("input_ids") is None else None

    def _pads(
        self, mask: Any, shown: np.ndarray | None, old_pads: Sequence[int], before: int, num_rows: int, num_new: int
    ) -> tuple[list[int], str | None]:
        """Return how many columns of left padding each row has, and why rows cannot have these; None: they can.

        Args:
            shown: columns that the mask shows, [rows, columns]; None: it is none of rows and columns, or there is none.
            old_pads: padding of the rows that resume, which have `before` columns; none in a first forward.

        Raises:
            CacheArgumentError: padding of rows that resume may be seen, which has no keys and values.
        """
        why = None
        if mask is None and old_pads and not self._sees_columns:
            return [*old_pads], None  # there is nothing that it could hide
        pads = first_shown = [0] * num_rows
        if shown is not None:
            pads, firsts = (before + num_new - shown.sum(axis=1)).tolist(), shown.argmax(axis=1).tolist()
            first_shown = [pad if pad == before + num_new else first for pad, first in zip(pads, firsts, strict=True)]
        elif mask is not None:
            kind = f"{mask.dim()}-D tensor" if isinstance(mask, Tensor) else type(mask).__name__
            why = f"the attention mask is a {kind}, not [rows, columns]"
        for number, (old, first) in enumerate(zip(old_pads, first_shown, strict=False)):
            if first < old:
                shows = f"the attention mask shows column {first} of row {number}, which was padding and"
                if why is not None:
                    shows = f"{why}, and cannot be asked whether it hides the padding of row {number}, which"
                raise CacheArgumentError(
                    f"{shows} has no keys and values; pass a mask of [rows, columns], of all columns, or cache.reset() "
                    "first"
                )
        for number, (pad, first) in enumerate(zip(pads, first_shown, strict=True)):
            if pad != first and why is None:
                why = f"the attention mask of row {number} has zeros after its first one (right padding or holes)"
        for old, pad in zip(old_pads, pads, strict=False):
            if old != pad and old < before and why is None:  # only a row of padding alone may get more
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
        """Return the position of each row's first token, and why positions, as given, do not simply count on.

        Args:
            numbers: values of the positions that are given; None: there are none.
        """
        expected = [prompt.first_position for prompt in rows.prompts] or [0] * len(pads)
        if not self.takes_positions:
            return expected, None
        if given is None:
            if not self._numbers_columns:
                return expected, "without position_ids it is not known which positions this model gives its tokens"
            if rows.prompts and [*pads] != expected:
                return expected, "positions were not passed for padded rows"
            return [*pads], None
        if not isinstance(given, Tensor) or given.dim() != 2 or given.is_floating_point():
            return expected, "positions are not one integer for each token"
        if given.shape not in ((1, num_new), (len(pads), num_new)):
            return expected, "positions of another number of rows or columns than the token ids"
        if numbers is None:
            return expected, None
        columns, firsts = np.arange(rows.n, rows.n + num_new), [*expected]
        for number, pad in enumerate(pads):
            own = numbers[number if len(numbers) > 1 else 0] - columns + pad  # the first position, as each token has it
            own = own[max(0, pad - rows.n) :]
            if (own != own[-1:]).any():
                return expected, "positions do not count up by one"
            if rows.prompts and own.size and own[-1] != expected[number]:
                return expected, "positions do not continue where the row stopped"
            firsts[number] = int(own[-1]) if own.size else expected[number]
        return firsts, None

    def _logits_needed(self, kept: Any, *, in_generate: bool, records_drafts: bool) -> tuple[str | None, int]:
        """Return why the logits of all columns are needed, if they are, and of how many last columns at least."""
        if self.takes_logits_to_keep:
            if isinstance(kept, int) and not isinstance(kept, bool) and kept > 0:
                return None, kept
            return f"{_ALL_LOGITS} (pass logits_to_keep=1 for the last one's)", 1
        if not in_generate:
            return _ALL_LOGITS, 1
        return ("the model cannot say which logits it needs while drafts are verified" if records_drafts else None), 1


def cross_inputs(model: Any) -> tuple[str, ...]:
    """Return the names of arguments that a cross attention of a model may attend to."""
    has_layers = getattr(model.config.get_text_config(decoder=True), "cross_attention_layers", None)
    return CROSS_INPUTS if has_layers else CROSS_INPUTS[:-1]


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


def shape_of(arguments: Mapping[str, Any], before: int) -> tuple[int, int]:
    """Return the numbers of rows and new columns: of embeddings or ids, or of a mask after `before` columns, or of
    positions.
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
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Read the values of token ids, mask and positions of all rows, in one wait for their device.

    Returns:
        token ids of all new columns, -1 for each embedding; which columns a mask of [rows, columns] shows; and the
        positions. None: there are none.
    """
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
    found = read_arrays([tensor for tensor in (ids, mask, positions) if tensor is not None])
    token_ids = np.full((num_rows, num_new), -1) if ids is None else found.pop(0)
    return token_ids, None if mask is None else found.pop(0), None if positions is None else found.pop(0)
