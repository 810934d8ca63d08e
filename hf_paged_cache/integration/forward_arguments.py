"""A forward's arguments -> what it asks of the cache, and back: the same arguments for the rows and columns that run.

Never guesses: token ids, a mask of the form 0...01...1 and positions that count up are read. Whatever else is passed
is named as the reason why the forward is computed without reuse. Inputs are shortened by name, never by shape.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain
from typing import Any

from torch import Tensor

from ..call.held_steps import PassedStep, count_on
from ..call.rows import Row, Rows
from ..call.scheduled_forward import ForwardRequest, RowInput, ScheduledForward
from ..errors import CacheArgumentError
from ..kv.transfers import to_device
from ..model.output_flags import OUTPUT_FLAGS, outputs_of
from ..model.trial import Numbering
from .input_values import KnownInputs, MaskValues, PositionValues, num_pads, read_inputs

# Read here, or without influence on keys and values. Any other argument makes the forward one without reuse, unless it is what
# the model's forward takes where it is left out.
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


@dataclass(frozen=True)
class ArgumentReader:
    """Reads the arguments of one model's forwards.

    Attributes:
        config: the model's, for outputs that it asks for by default.
        takes_positions: the forward has `position_ids`; where it has not, positions follow the mask.
        takes_logits_to_keep: the forward can leave out logits.
        changes_with: whether keys and values may be others where this output is asked for.
        defaults: what the forward takes for arguments that are left out.
        default_numbering: what the model numbers where no positions are passed: see `model.trial`.
        cross_inputs: arguments that a cross attention reads; refused.
        carries_states: of some layers, which do not look at the mask of a forward of one column.
        sees_columns: some layers attend to earlier columns, which their mask may hide.
    """

    config: Any
    _: KW_ONLY
    takes_positions: bool
    takes_logits_to_keep: bool
    changes_with: Callable[[str], bool]
    defaults: Mapping[str, Any]
    default_numbering: Numbering | None = "columns"
    cross_inputs: Sequence[str] = ()
    carries_states: bool = False
    sees_columns: bool = True

    def read(
        self,
        arguments: Mapping[str, Any],
        rows: Rows,
        *,
        in_generate: bool,
        records_drafts: bool,
        known: KnownInputs | None = None,
    ) -> ForwardRequest:
        """Read a forward's arguments. The roots of its rows are the caller's to add.

        Args:
            arguments: by name.
            rows: those that resume; none for a first forward.
            in_generate: it is `generate` that calls, and trusts only the last logits.
            records_drafts: drafts are verified, so `generate` may want logits that it does not ask for.
            known: what is passed, where that is known; else it is read, which waits for its device.

        Raises:
            CacheArgumentError: ids, mask or positions contradict each other or the rows; or a cross attention is used.
        """
        for name in self.cross_inputs:
            if arguments.get(name) is not None:
                raise CacheArgumentError(
                    f"{name} was passed, and cross attention keeps keys and values that are no tokens'; call the model "
                    "without past_key_values, or use generate, which then leaves this cache out"
                )
        before, running = rows.num_columns, rows.in_batch()
        if known is not None and known.token_ids is arguments.get("input_ids"):
            given = known.values
        else:
            given = read_inputs(arguments, len(running), before, takes_positions=self.takes_positions)
            if running and not self.sees_columns and arguments.get("attention_mask") is None:
                given = given._replace(mask=_mask_of(running, before, given.num_new_columns))
        num_new, mask = given.num_new_columns, given.mask
        self._require_kept(arguments, running, mask)
        why_no_ids = None
        if given.are_embeddings:
            instead = "codes of its own" if arguments.get("inputs_embeds") is None else "embeddings"
            why_no_ids = f"{instead} were passed instead of token ids"
        bypass = (
            self._unread(arguments)
            or why_no_ids
            or mask.why_unusual
            # generate itself counts them right
            or (None if in_generate else _miscounted(arguments.get("cache_position"), before, num_new))
            or self._why_other_padding(running, mask.pads, before, num_new)
        )
        pads = mask.pads if bypass is None else [row.pad for row in running] or [0] * given.num_rows
        firsts, why = self._first_positions(given.positions, rows, pads, num_new, is_bypassed=bypass is not None)
        bypass = bypass or why
        all_outputs = _other_outputs(arguments, self.config)
        keep_columns, num_needed = all_outputs, 1
        if all_outputs is None:
            keep_columns, num_needed = self._read_logits(arguments, in_generate, records_drafts)
        inputs = []
        for tokens, pad, first, num_zeros in zip(given.token_ids, pads, firsts, mask.num_zeros, strict=True):
            skipped = num_pads(pad, before, num_new)
            inputs.append(RowInput(tokens[skipped:], pad, first, num_hidden=max(0, num_zeros - skipped)))
        return ForwardRequest(
            rows=tuple(inputs),
            num_new_columns=num_new,
            num_logits_needed=max(1, min(num_needed, num_new)),
            bypass=bypass,
            keep_columns=keep_columns,
            may_alias=bypass is None and all_outputs is None,
            max_position=given.max_position,
        )

    def read_step(self, arguments: Mapping[str, Any], rows: Rows) -> list[int] | PassedStep | None:
        """The token of each row, where a forward is a plain decode step of `generate`, which extends mask and positions.

        Where to read would be to wait for a device, what was passed: it is a plain step by its shapes.

        None for anything unusual; then `read` says what it is.
        """
        ids, mask, positions = map(arguments.get, ("input_ids", "attention_mask", "position_ids"))
        running, before = rows.distinct, rows.num_columns
        num_rows = len(running)
        if not isinstance(ids, Tensor) or ids.shape != (num_rows, 1):
            return None
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != (num_rows, before + 1)):
            return None
        if arguments.get("inputs_embeds") is not None or self._unread(arguments) is not None:
            return None
        if positions is None:
            firsts = [row.first_position for row in running]
            if self.takes_positions and self._first_by_default([row.pad for row in running]) != firsts:
                return None
        elif not isinstance(positions, Tensor) or positions.shape not in ((num_rows, 1), (1, 1)):
            return None
        if PassedStep.may_be_held(ids, mask, positions):
            return PassedStep(before, ids, None if mask is None else mask.count_nonzero(dim=1), positions)
        if mask is not None and not _shows_all(mask, [row.pad for row in running]):
            return None
        if positions is not None and not count_on([*chain.from_iterable(positions.tolist())], rows, before):
            return None
        return [*chain.from_iterable(ids.tolist())]

    def _unread(self, arguments: Mapping[str, Any]) -> str | None:
        """An argument that may condition keys and values and is none of those read here."""
        for name, value in arguments.items():
            if value is None or name in _READ or self._is_default(name, value):
                continue
            if name in OUTPUT_FLAGS:
                if value and self.changes_with(name):
                    return f"keys and values of this model depend on {name}"
            elif not isinstance(value, dict | list | tuple) or value:  # an empty one, as of images where there are none
                return f"the argument {name} may condition keys and values"
        return None

    def _require_kept(self, arguments: Mapping[str, Any], running: Sequence[Row], mask: MaskValues) -> None:
        """Refuse what would look at padding whose keys and values are not kept.

        Raises:
            CacheArgumentError: the mask shows some; or an output is asked for, under which a model may look at it.
        """
        for number, (row, shown) in enumerate(zip(running, mask.first_shown, strict=False)):
            if shown < row.pad:
                raise CacheArgumentError(
                    f"the attention mask shows column {shown} of row {number}, which was padding and has no keys and values; "
                    "pass the mask of all columns, or cache.reset() first"
                )
        for flag in OUTPUT_FLAGS if running else ():
            if arguments.get(flag) and self.changes_with(flag):
                _require_kept_padding(
                    running,
                    f"{flag} was asked for, with which attention of this model may see the rows' padding",
                    f"ask for {flag} from the rows' first forward on, load the model with attn_implementation='eager', or leave it out",
                )

    def _why_other_padding(self, running: Sequence[Row], pads: Sequence[int], before: int, num_new: int) -> str | None:
        """Why rows cannot have this padding: only one that has had nothing but padding may get more of it."""
        for row, pad in zip(running, pads, strict=False):
            if row.pad != pad and row.table.num_tokens:
                return "the padding of a row has changed"
        if self.carries_states and num_new == 1 and max(pads) > before:
            if self.sees_columns:
                _require_kept_padding(
                    running,
                    f"column {before} is padding of a row and comes alone, so layers with a state take it for a token that sees the "
                    "padding before it",
                    "pass the padding and the row's first token in one forward",
                )
            return "layers with a state do not look at the mask of a forward of one column, which is padding here"
        return None

    def _is_default(self, name: str, value: Any) -> bool:
        """Whether an argument is the flag, number or word that the forward takes where it is left out."""
        default = self.defaults.get(name)
        return type(value) is type(default) and isinstance(value, bool | int | float | str) and value == default

    def _first_by_default(self, pads: Sequence[int]) -> list[int] | None:
        """The position of each row's first token where none are passed."""
        if self.default_numbering is None:
            return None
        return [pad if self.default_numbering == "columns" else 0 for pad in pads]

    def _first_positions(
        self, given: PositionValues | None, rows: Rows, pads: Sequence[int], num_new: int, *, is_bypassed: bool
    ) -> tuple[list[int], str | None]:
        """The position of each row's first token, and why they do not simply count on."""
        running, before = rows.in_batch(), rows.num_columns
        expected = [row.first_position for row in running] or [0] * len(pads)
        if not self.takes_positions:
            return expected, None
        if given is None:
            first = self._first_by_default(pads)
            if first is None:
                return expected, "without position_ids it is not known which positions this model gives its tokens"
            if running and first != expected:
                return expected, "positions were not passed for padded rows"
            return first, None
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
            position = given.last[at] - (num_new - 1 - skipped)  # of the first new token
            start = position - max(0, before - pad)
            if running and start != expected[row]:
                if start < 0 and not is_bypassed:  # from 0 on it may only count otherwise: tokens, not columns
                    raise CacheArgumentError(
                        f"row {row} goes on at position {position}, but the cache holds {max(0, before - pad)} tokens of "
                        "it: pass positions that go on behind these, or none; or cache.reset() first, for a new prompt"
                    )
                return expected, "positions do not go on where the row stopped"
            firsts.append(start)
        return firsts, None

    def _read_logits(
        self, arguments: Mapping[str, Any], in_generate: bool, records_drafts: bool
    ) -> tuple[str | None, int]:
        """Why the logits of all columns are needed, and how many are at least."""
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


def for_scheduled(arguments: Mapping[str, Any], forward: ScheduledForward, num_columns_before: int) -> dict[str, Any]:
    """The arguments for the rows and columns that run; the mask keeps all its columns."""
    changed = dict(arguments)
    skipped = forward.start - num_columns_before
    ids, rows = changed.get("input_ids"), None
    if forward.copies is not None and ids is not None:
        rows = to_device(forward.sources, ids.device)
    for name in ("input_ids", "position_ids", "attention_mask"):
        value = changed.get(name)
        if not isinstance(value, Tensor):
            continue
        if rows is not None and value.shape[0] > 1:  # a single row of positions stands for all
            value = value.index_select(0, rows.to(value.device))
        if skipped and name != "attention_mask":
            value = value[..., skipped:]
        changed[name] = value
    if skipped and isinstance(changed.get("cache_position"), Tensor):
        changed["cache_position"] = changed["cache_position"][skipped:]
    return changed


def _require_kept_padding(running: Sequence[Row], why: str, instead: str) -> None:
    """Refuse a forward whose attention may see padding, of rows that have begun without it.

    Raises:
        CacheArgumentError: keys and values of their padding are not kept.
    """
    if any(row.pad and row.commit_end != 0 for row in running):
        raise CacheArgumentError(f"{why}, and keys and values of that padding are not kept: {instead}")


def _shows_all(mask: Tensor, pads: Sequence[int]) -> bool:
    """Whether a mask shows all columns of each row but its padding."""
    if len(pads) == 1 or not any(pads):  # then one number tells, which takes a fourth of the time
        return mask.count_nonzero().item() == mask.numel() - sum(pads)
    num_columns = mask.shape[1]
    return mask.count_nonzero(dim=1).tolist() == [num_columns - pad for pad in pads]


def _mask_of(running: Sequence[Row], before: int, num_new: int) -> MaskValues:
    """Of rows that resume where no mask was passed, and none could hide what is before: new columns are tokens."""
    pads = [min(row.pad, before) for row in running]
    return MaskValues(pads, [num_pads(pad, before, num_new) for pad in pads], pads)


def _miscounted(cache_position: Any, before: int, num_new: int) -> str | None:
    """Why `cache_position` does not number the new columns; models that take no positions may go by it."""
    if cache_position is None:
        return None
    counts_on = isinstance(cache_position, Tensor) and cache_position.tolist() == [*range(before, before + num_new)]
    return None if counts_on else "cache_position does not number the columns that are passed"


def _other_outputs(arguments: Mapping[str, Any], config: Any) -> str | None:
    """Outputs besides logits that cover all tokens or rows."""
    by_default = dict.fromkeys(outputs_of(config), True)
    for name in OUTPUT_FLAGS:
        value = arguments.get(name)
        if by_default.get(name) if value is None else value:
            return f"{name} was asked for, which covers all tokens"
    if arguments.get("labels") is not None:
        return "labels were passed, and a loss covers all tokens"
    if arguments.get("return_dict") is False or not getattr(config, "return_dict", True):
        return "a tuple was asked for (return_dict=False)"
    return None
