"""Reads what a forward asks of the cache from its arguments, and cuts the arguments to the rows and columns that run.

Nothing is guessed: token ids, a mask of the form 0...01...1 and positions that count up are read. Whatever else is
passed is named as the reason why the forward is computed without reuse. Inputs are shortened by name, never by shape.
"""

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..blocks.tokens import TokenIds
from ..call.request import ForwardRequest, RowInput
from ..errors import CacheArgumentError
from ..kv.transfers import read_arrays, to_device
from ..model.conditioning import OUTPUT_FLAGS

_HIDING = -1000.0  # an additive mask hides scores that it lowers by more than this: their exponential is 0
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")  # types of tokens, [R, T]; of text: 0
# Arguments that are read here, or have no influence on keys and values. With any other argument the forward is computed
# without reuse, unless its value is what the model's forward takes where the argument is left out.
_READ = {
    *(
        "input_ids",
        "inputs_embeds",
        "attention_mask",
        "position_ids",
        "cache_position",
        "past_key_values",
        "cache_params",
    ),
    *("logits_to_keep", "labels", "use_cache", "return_dict"),
    *("tokenizer", "assistant_tokenizer"),  # `generate` passes on what it was given for stop strings
}


class RunningRow(Protocol):
    """`RunningRow` is a row that resumes."""

    @property
    def pad(self) -> int: ...  # columns of left padding

    @property
    def first_position(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...  # tokens that the row has

    @property
    def shift(
        self,
    ) -> int | None: ...  # how far images have moved the positions of the text after the images; None: not known


class RunningRows(Protocol):
    """`RunningRows` holds the rows that resume."""

    @property
    def num_columns(self) -> int: ...

    @property
    def lacks_padding(self) -> bool: ...  # keys and values of padding are not what a model would compute

    def in_batch(self) -> Sequence[RunningRow]: ...


class Cut(NamedTuple):
    """`Cut` says which rows and columns of a forward run.

    Attributes:
        start: first column that runs.
        sources: running row -> the row of the batch it stands for.
        copies: row of the batch -> the row that runs for it; None: all rows run.
    """

    start: int
    sources: Sequence[int]
    copies: Sequence[int] | None


class MaskValues(NamedTuple):
    """`MaskValues` is what a mask says of each row, and why the mask is not of the form 0...01...1."""

    pads: list[int]  # columns of left padding
    num_zeros: list[int]  # new columns that the mask hides
    first_shown: Sequence[int | None]  # first column that the mask does not hide; None: the mask cannot be asked
    why_unusual: str | None = None


class PositionValues(NamedTuple):
    """`PositionValues` holds the position of each row's last token, or one for all rows; or why there are none."""

    last: Sequence[int] = ()
    run_starts: Sequence[int] = ()  # new column from which on positions count up by one, for each row or for all
    why_unusual: str | None = None


class InputValues(NamedTuple):
    """`InputValues` is what a forward was passed.

    Attributes:
        token_ids: token ids of each row, all columns; -1 for each embedding.
        num_new_columns: number of columns of the ids.
        are_embeddings: True if there are no ids.
        mask: what the mask says of each row.
        positions: positions of the tokens; None: none were passed, or the model takes none.
        max_position: largest position, that of padding included; None: none were passed.
    """

    token_ids: list[TokenIds]
    num_new_columns: int
    are_embeddings: bool
    mask: MaskValues
    positions: PositionValues | None
    max_position: int | None

    @property
    def num_rows(self) -> int:
        """Number of rows of the batch."""
        return len(self.token_ids)


@dataclass(frozen=True)
class ArgumentReader:
    """`ArgumentReader` reads the arguments of one model's forwards.

    Attributes:
        config: config of the model, which may ask for tuples.
        attention: returns the name of the model's attention now.
        takes_positions: True if the forward has `position_ids`; if not, positions follow the mask.
        takes_logits_to_keep: True if the forward can leave out logits.
        defaults: what the forward takes for arguments that are left out.
        numbers_columns: True if the model numbers columns where no positions are passed. If not, it is not known.
        cross_inputs: arguments that a cross attention reads; they are refused.
        carries_states: True if some layers carry states; they do not look at the mask of a forward of one column.
        sees_columns: True if some layers attend to earlier columns, which the mask may hide.
    """

    config: Any
    attention: Callable[[], str | None]
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
        rows: RunningRows,
        *,
        in_generate: bool,
        records_drafts: bool,
        by_default: Sequence[str] = (),
    ) -> ForwardRequest:
        """Read a forward's arguments. The caller adds the roots of the rows.

        Args:
            arguments: arguments of the forward, by name.
            rows: rows that resume; none for a first forward.
            in_generate: whether `generate` calls, which uses only the last logits.
            records_drafts: whether drafts are verified; `generate` may then want logits that it does not ask for.
            by_default: outputs that are computed unless the arguments say otherwise.

        Raises:
            CacheArgumentError: ids, mask or positions contradict each other or the rows; or a cross attention is used.
        """
        self._require_readable(arguments, rows, by_default)
        before, running = rows.num_columns, rows.in_batch()
        given = read_inputs(
            arguments,
            len(running),
            before,
            takes_positions=self.takes_positions,
            booleans_hide=self.attention() == "sdpa",
        )
        if running and not self.sees_columns and arguments.get("attention_mask") is None:
            given = given._replace(mask=_mask_of(running, before, given.num_new_columns))
        num_new, mask = given.num_new_columns, given.mask
        if running:
            self._require_kept(running, mask)
        bypass = (
            self._unread(arguments)
            or _asked_output(arguments, by_default)
            or _why_no_ids(given, arguments)
            or mask.why_unusual
            # `generate` itself numbers columns right
            or (None if in_generate else _miscounted(arguments.get("cache_position"), before, num_new))
            or self._why_other_padding(running, mask.pads, before, num_new)
        )
        pads = mask.pads if bypass is None else [row.pad for row in running] or [0] * given.num_rows
        firsts, why = self._first_positions(given.positions, rows, pads, num_new, is_bypassed=bypass is not None)
        bypass = bypass or why
        all_outputs = _all_outputs(arguments, self.config)
        keep_columns, num_needed = all_outputs, 1
        if all_outputs is None:
            keep_columns, num_needed = self._read_logits(arguments, in_generate, records_drafts)
        return ForwardRequest(
            rows=_rows_after(before, given, pads, firsts),
            num_new_columns=num_new,
            num_logits_needed=max(1, min(num_needed, num_new)),
            bypass=bypass,
            keep_columns=keep_columns,
            may_alias=bypass is None and all_outputs is None,
            max_position=given.max_position,
        )

    def _require_readable(self, arguments: Mapping[str, Any], rows: RunningRows, by_default: Sequence[str]) -> None:
        """Refuse a forward whose layers would read what rows cannot hold.

        Raises:
            CacheArgumentError: a cross attention is used, or attention may see padding whose keys and values are not
                kept.
        """
        for name in self.cross_inputs:
            if arguments.get(name) is not None:
                raise CacheArgumentError(
                    f"{name} was passed, and cross attention keeps keys and values that are no tokens'; call the model "
                    "without past_key_values, or use generate, which then leaves this cache out"
                )
        if rows.lacks_padding and _asked_output(arguments, by_default, ("output_attentions",)) is not None:
            raise CacheArgumentError(
                "output_attentions was asked for, with which attention of some models sees the rows' padding, and keys and values "
                "of that padding are not kept: ask for it from the rows' first forward on, or cache.reset() first"
            )

    def _unread(self, arguments: Mapping[str, Any]) -> str | None:
        """Return, in words, an argument not read here that may condition keys and values; None: there is none."""
        for name, value in arguments.items():
            if value is None or name in _READ or self._is_default(name, value):
                continue
            # an empty argument, as of images where there are none, says nothing
            if name not in OUTPUT_FLAGS and (not isinstance(value, dict | list | tuple) or value):
                return f"the argument {name} may condition keys and values"
        return None

    def _require_kept(self, running: Sequence[RunningRow], mask: MaskValues) -> None:
        """Refuse a mask that shows padding whose keys and values are not kept.

        Raises:
            CacheArgumentError: the mask shows such padding, or cannot be asked whether it does.
        """
        for number, (row, shown) in enumerate(zip(running, mask.first_shown, strict=False)):
            if shown is None and row.pad:
                raise CacheArgumentError(
                    f"{mask.why_unusual}, and cannot be asked whether it hides the padding of row {number}, which has no keys and "
                    "values; pass a mask of [rows, columns], of all columns, or cache.reset() first"
                )
            if shown is not None and shown < row.pad:
                raise CacheArgumentError(
                    f"the attention mask shows column {shown} of row {number}, which was padding and has no keys and values; "
                    "pass the mask of all columns, or cache.reset() first"
                )

    def _why_other_padding(
        self, running: Sequence[RunningRow], pads: Sequence[int], before: int, num_new: int
    ) -> str | None:
        """Return why rows cannot have this padding: only a row of padding alone may get more; None: they can."""
        for row, pad in zip(running, pads, strict=False):
            if row.pad != pad and row.num_tokens:
                return "the padding of a row has changed"
        if self.carries_states and num_new == 1 and max(pads) > before:
            if self.sees_columns and lacks_padding(running):
                raise CacheArgumentError(
                    f"column {before} is padding of a row and comes alone, so layers with a state take it for a token that sees the "
                    "padding before it, and keys and values of that padding are not kept: pass the padding and the row's first token "
                    "in one forward"
                )
            return "layers with a state do not look at the mask of a forward of one column, which is padding here"
        return None

    def _is_default(self, name: str, value: Any) -> bool:
        """Return whether an argument is the flag, number or word that the forward takes where it is left out."""
        default = self.defaults.get(name)
        return type(value) is type(default) and isinstance(value, bool | int | float | str) and value == default

    def _first_positions(
        self, given: PositionValues | None, rows: RunningRows, pads: Sequence[int], num_new: int, *, is_bypassed: bool
    ) -> tuple[list[int], str | None]:
        """Return the position of each row's first token, and why positions do not simply count on."""
        running, before = rows.in_batch(), rows.num_columns
        expected = [row.first_position for row in running] or [0] * len(pads)
        if not self.takes_positions:
            return expected, None
        if given is None:
            if not self.numbers_columns:
                return expected, "without position_ids it is not known which positions this model gives its tokens"
            if running and [*pads] != expected:
                return expected, "positions were not passed for padded rows"
            return [*pads], None
        if given.why_unusual is not None:
            return expected, given.why_unusual
        firsts = []
        for row, pad in enumerate(pads):
            skipped, at = num_pads(pad, before, num_new), row if len(given.last) > 1 else 0
            if skipped == num_new:
                firsts.append(expected[row])
                continue
            if given.run_starts[at] > skipped:
                return expected, "positions do not count up by one"
            position = given.last[at] - (num_new - 1 - skipped)  # position of the first new token
            start = position - max(0, before - pad)
            if running and start != expected[row]:
                if start < 0 and not is_bypassed:  # other starts may come from counting tokens, not columns
                    raise CacheArgumentError(
                        f"row {row} resumes at position {position}, but the cache holds {max(0, before - pad)} tokens of "
                        "it: pass positions that continue these, or none; or cache.reset() first, for a new prompt"
                    )
                return expected, "positions do not continue where the row stopped"
            firsts.append(start)
        return firsts, None

    def _read_logits(
        self, arguments: Mapping[str, Any], in_generate: bool, records_drafts: bool
    ) -> tuple[str | None, int]:
        """Return why the logits of all columns are needed, if they are, and how many are needed at least."""
        if self.takes_logits_to_keep:
            kept = arguments.get("logits_to_keep")
            if isinstance(kept, int) and not isinstance(kept, bool) and kept > 0:
                return None, kept
            return "the logits of all tokens were asked for (pass logits_to_keep=1 for the last one's)", 1
        if not in_generate:
            return "the logits of all tokens were asked for", 1
        if records_drafts:
            return "the model cannot say which logits it needs while drafts are verified", 1
        return None, 1


def for_cut(
    arguments: Mapping[str, Any],
    forward: Cut,
    num_columns_before: int,
    whole: Collection[str] = ("attention_mask",),
) -> dict[str, Any]:
    """Cut a forward's arguments to the rows and columns that run.

    Args:
        num_columns_before: number of columns that the rows have.
        whole: names of arguments that keep all their columns.
    """
    changed = dict(arguments)
    skipped = forward.start - num_columns_before
    ids, rows = changed.get("input_ids"), None
    if forward.copies is not None and ids is not None:
        rows = to_device(forward.sources, ids.device)
    for name in ("input_ids", "position_ids", "attention_mask", *TOKEN_TYPES):
        value = changed.get(name)
        if not isinstance(value, Tensor):
            continue
        dim = value.dim() - 2  # positions of several numbers are [N, rows, columns]
        if rows is not None and value.shape[dim] > 1:  # a single row of positions stands for all
            value = value.index_select(dim, rows.to(value.device))
        if skipped and name not in whole:
            value = value[..., skipped:]
        changed[name] = value
    if skipped and isinstance(changed.get("cache_position"), Tensor):
        changed["cache_position"] = changed["cache_position"][skipped:]
    return changed


def lacks_padding(running: Sequence[RunningRow]) -> bool:
    """Return whether rows have padding whose keys and values are not kept."""
    return any(row.pad for row in running)


def _mask_of(running: Sequence[RunningRow], before: int, num_new: int) -> MaskValues:
    """Return the mask of rows that resume without one, if none could hide earlier columns: new columns are tokens."""
    pads = [min(row.pad, before) for row in running]
    return MaskValues(pads, [num_pads(pad, before, num_new) for pad in pads], pads)


def _miscounted(cache_position: Any, before: int, num_new: int) -> str | None:
    """Return why `cache_position` does not number the new columns; None: it does.

    Models that take no positions may go by `cache_position`.
    """
    if cache_position is None:
        return None
    counts_on = isinstance(cache_position, Tensor) and cache_position.tolist() == [*range(before, before + num_new)]
    return None if counts_on else "cache_position does not number the columns that are passed"


def _why_no_ids(given: InputValues, arguments: Mapping[str, Any]) -> str | None:
    """Return, in words, what was passed in place of token ids; None: token ids were passed."""
    if not given.are_embeddings:
        return None
    instead = "codes of its own" if arguments.get("inputs_embeds") is None else "embeddings"
    return f"{instead} were passed instead of token ids"


def _rows_after(before: int, given: InputValues, pads: Sequence[int], firsts: Sequence[int]) -> tuple[RowInput, ...]:
    """Return the rows of a forward without their padding, after `before` columns; they have no roots yet."""
    rows = []
    for tokens, pad, first, num_zeros in zip(given.token_ids, pads, firsts, given.mask.num_zeros, strict=True):
        skipped = num_pads(pad, before, given.num_new_columns)
        rows.append(RowInput(tokens[skipped:], pad, first, num_hidden=max(0, num_zeros - skipped)))
    return tuple(rows)


def _asked_output(
    arguments: Mapping[str, Any], by_default: Sequence[str], flags: Sequence[str] = OUTPUT_FLAGS
) -> str | None:
    """Return, in words, an output beside logits that is asked for; None: there is none.

    Such an output covers all tokens, and some models compute otherwise with it.
    """
    for flag in flags:
        value = arguments.get(flag)
        if flag in by_default if value is None else value:
            return f"{flag} was asked for"
    return None


def _all_outputs(arguments: Mapping[str, Any], config: Any) -> str | None:
    """Return, in words, what is asked for beside logits that covers all tokens or rows; None: nothing."""
    if arguments.get("labels") is not None:
        return "labels were passed, and a loss covers all tokens"
    if arguments.get("return_dict") is False or not getattr(config, "return_dict", True):
        return "a tuple was asked for (return_dict=False)"
    return None


def read_inputs(
    arguments: Mapping[str, Any],
    num_running: int,
    before: int,
    *,
    takes_positions: bool,
    booleans_hide: bool,
) -> InputValues:
    """Read the values of token ids, mask and positions of all rows, in one wait for their device.

    Args:
        arguments: arguments of the forward, by name.
        num_running: number of rows that resume; 0 for a first forward.
        before: number of columns that these rows have.
        takes_positions: whether the model's forward has `position_ids`.
        booleans_hide: whether attention hides what a mask of four dimensions says is false. Some attentions add such a
            mask to scores, where it hides nothing.

    Raises:
        CacheArgumentError: there are no ids and no embeddings; or the number of rows, or of columns of the mask, is
            another one.
    """
    ids: Tensor | None = arguments.get("input_ids") if arguments.get("inputs_embeds") is None else None
    if ids is not None and ids.dim() != 2:
        raise CacheArgumentError(f"input_ids must be [rows, tokens], got {tuple(ids.shape)}")
    if ids is not None and (ids.is_floating_point() or ids.is_complex()):
        raise CacheArgumentError(f"input_ids must be integers, got a tensor of {ids.dtype}")
    num_rows, num_new = shape_of(arguments, before)
    if num_running and num_rows != num_running:
        raise CacheArgumentError(
            f"the cache runs {num_running} rows, got {num_rows}; cache.reset() it for another batch"
        )
    shown, why_no_mask = _shown_by(arguments.get("attention_mask"), num_rows, before, num_new, booleans_hide)
    positions = arguments.get("position_ids")
    has_positions = isinstance(positions, Tensor) and positions.numel() > 0
    wanted = ids, shown, positions if has_positions else None
    found = read_arrays([tensor for tensor in wanted if tensor is not None])
    numbers = None if ids is None else found.pop(0)
    if numbers is None:
        token_ids = [array("q", [-1]) * num_new] * num_rows
    else:
        token_ids = [*map(array, repeat("q"), map(np.ndarray.tobytes, numbers))]
    masked = _mask_values(None if shown is None else found.pop(0) != 0, why_no_mask, num_rows, before, num_new)
    numbers = found.pop(0) if has_positions else None
    counted = None
    if takes_positions and positions is not None:
        counted = _count(positions, numbers, num_rows, num_new)
    return InputValues(
        token_ids, num_new, ids is None, masked, counted, None if numbers is None else int(numbers.max())
    )


def num_pads(pad: int, before: int, num_new: int) -> int:
    """Return how many of the new columns are left padding."""
    return min(num_new, max(0, pad - before))


def shape_of(arguments: Mapping[str, Any], before: int) -> tuple[int, int]:
    """Return the numbers of rows and new columns of a forward.

    They are those of its embeddings or ids; else of its mask, after `before` columns, or of its positions.

    Raises:
        CacheArgumentError: the forward has none of these.
    """
    for name in ("inputs_embeds", "input_ids"):
        given = arguments.get(name)
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


def _shown_by(
    mask: Any, num_rows: int, before: int, num_new: int, booleans_hide: bool
) -> tuple[Tensor | None, str | None]:
    """Return which columns a mask shows, [rows, columns], and why it is no mask of rows and columns.

    The columns are None where there is no mask, or it cannot be asked. The reason is None where there is no mask, or it
    is one of rows and columns.
    """
    if mask is None:
        return None, None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        kind = f"{mask.dim()}-D tensor" if isinstance(mask, Tensor) else type(mask).__name__
        seen = _seen_by_any(mask, num_rows, before + num_new, booleans_hide) if before else None
        return seen, f"the attention mask is a {kind}, not [rows, columns]"
    if mask.shape != (num_rows, before + num_new):
        raise CacheArgumentError(
            f"the attention mask is {tuple(mask.shape)}; with the cache's tokens and the new ones it must be "
            f"{(num_rows, before + num_new)}: pass ids that continue exactly where the rows stopped, or cache.reset() first"
        )
    return mask != 0 if mask.is_floating_point() else mask, None


def _seen_by_any(mask: Any, num_rows: int, num_columns: int, booleans_hide: bool) -> Tensor | None:
    """Return which columns some query sees, [rows, columns], by a mask or by any of several masks.

    None: a mask has another form than [rows or 1, heads, queries, columns], or its booleans hide nothing.
    """
    if isinstance(mask, Mapping):
        seen = [_seen_by_any(each, num_rows, num_columns, booleans_hide) for each in mask.values()]
        known = [each for each in seen if each is not None]
        return torch.stack(known).any(dim=0) if known and len(known) == len(seen) else None
    if not isinstance(mask, Tensor) or mask.dim() != 4 or len(mask) not in (1, num_rows):
        return None
    if mask.dtype == torch.bool and not booleans_hide:
        return None
    shown = mask if mask.dtype == torch.bool else mask > _HIDING
    columns = shown.flatten(1, 2).any(dim=1)[:, -num_columns:]  # a mask with a window has only the last columns
    hidden = columns.new_zeros(len(columns), num_columns - columns.shape[1])
    return torch.cat((hidden, columns), dim=1).expand(num_rows, -1)


def _mask_values(
    shown: np.ndarray | None, why_unusual: str | None, num_rows: int, before: int, num_new: int
) -> MaskValues:
    """Return what a mask says of each row.

    Args:
        shown: columns that the mask shows, [rows, columns] booleans; None: there is no mask, or it cannot be asked.
        why_unusual: why it is no mask of rows and columns.
    """
    none, num_columns = [0] * num_rows, before + num_new
    if shown is None:
        return MaskValues(none, none, none if why_unusual is None else [None] * num_rows, why_unusual)
    if shown.all():
        return MaskValues(none, none, none, why_unusual)
    pads = (num_columns - shown.sum(axis=1)).tolist()
    first_ones = shown.argmax(axis=1).tolist()
    first_shown = [pad if pad == num_columns else first for pad, first in zip(pads, first_ones, strict=True)]
    if why_unusual is not None:
        return MaskValues(none, none, first_shown, why_unusual)
    for row, (pad, first) in enumerate(zip(pads, first_shown, strict=True)):
        if pad != first:
            why = f"the attention mask of row {row} has zeros after its first one (right padding or holes)"
            return MaskValues(none, (num_new - shown[:, before:].sum(axis=1)).tolist(), first_shown, why)
    return MaskValues(pads, [num_pads(pad, before, num_new) for pad in pads], pads)


def _count(positions: Any, numbers: np.ndarray | None, num_rows: int, num_new: int) -> PositionValues:
    """Read each row's last position, or one for all rows, and from which column on positions count up by one.

    Where positions do not number tokens, the result says why.
    """
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[0] not in (1, num_rows):
        return PositionValues(why_unusual="positions are not one number a token")
    if positions.shape[1] != num_new:
        return PositionValues(why_unusual="positions of another length than the token ids")
    if positions.is_floating_point():
        return PositionValues(why_unusual="positions are no integers")
    if numbers is None:
        return PositionValues()
    starts = numbers - np.arange(num_new)  # these are equal as long as positions count up by one
    differ = starts != starts[:, -1:]
    if not differ.any():
        return PositionValues(numbers[:, -1].tolist(), [0] * len(numbers))
    behind_others = (differ * np.arange(1, num_new + 1)).max(axis=1)
    return PositionValues(numbers[:, -1].tolist(), behind_others.tolist())
