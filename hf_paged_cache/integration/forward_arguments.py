"""A forward's arguments -> what it asks of the cache, and back: the same arguments for the rows and columns that run.

Never guesses: token ids, a mask of the form 0...01...1 and positions that count on are read; whatever else is passed
is named as the reason why the forward is computed without reuse. Inputs are shortened by name, never by shape.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..blocks.tokens import TokenIds
from ..call.scheduled_forward import ScheduledForward
from ..errors import CacheArgumentError

# Read here, or without influence on keys and values. Any other argument that is no plain number, flag or name makes
# the forward one without reuse.
_READ = frozenset(
    {
        "input_ids",
        "inputs_embeds",
        "attention_mask",
        "position_ids",
        "past_key_values",
        "cache_position",
        "logits_to_keep",
        "labels",
        "use_cache",
        "return_dict",
        "tokenizer",  # `generate` passes on what it was given for stop strings
        "assistant_tokenizer",
    }
)
_OUTPUT_FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")


class RunningRow(NamedTuple):
    """What is known of a batch row that runs already."""

    pad: int
    num_tokens: int
    first_position: int


@dataclass(frozen=True, slots=True)
class ForwardArguments:
    """What a forward's arguments say.

    Attributes:
        token_ids: the new tokens of each row, without padding; -1 for embeddings.
        pads, first_positions: of each row.
        num_new_columns: columns of the forward, padding included.
        bypass: why it cannot be reused; None when it can.
        keep_columns: why known columns must be computed all the same; None when they need not.
        num_logits_needed: of the last columns.
        may_alias: whether equal rows may run once.
    """

    token_ids: tuple[TokenIds, ...]
    pads: tuple[int, ...]
    first_positions: tuple[int, ...]
    num_new_columns: int
    bypass: str | None
    keep_columns: str | None
    num_logits_needed: int
    may_alias: bool


class ArgumentReader:
    """Reads the arguments of one model's forwards.

    Args:
        config: the model's, for outputs that it asks for by default.
        takes_positions: the forward has `position_ids`; where it has not, positions follow the mask.
        takes_logits_to_keep: the forward can leave out logits.
        remembers_positions: where no positions are passed, they follow from the forward before.
        cross_inputs: arguments that a cross attention reads; refused.
    """

    def __init__(
        self,
        config: Any,
        *,
        takes_positions: bool,
        takes_logits_to_keep: bool,
        remembers_positions: bool = False,
        cross_inputs: Sequence[str] = (),
    ) -> None:
        self._config = config
        self._remembers_positions = remembers_positions
        self._cross_inputs = cross_inputs
        self._takes_positions = takes_positions
        self.takes_logits_to_keep = takes_logits_to_keep

    def read(
        self,
        arguments: Mapping[str, Any],
        running: Sequence[RunningRow],
        num_columns_before: int,
        *,
        in_generate: bool,
        records_drafts: bool,
        is_behind_prompt: bool = False,
    ) -> ForwardArguments:
        """Read a forward's arguments.

        Args:
            arguments: by name.
            running: the rows that go on; none for a first forward.
            num_columns_before: columns the cache has.
            in_generate: it is `generate` that calls, and trusts only the last logits.
            records_drafts: drafts are verified, so `generate` may want logits that it does not ask for.
            is_behind_prompt: all columns are generated ones, so the mask of the rows is as it was.
        Raises:
            CacheArgumentError: ids, mask or positions contradict each other or the rows; or a cross attention is used.
        """
        ids = arguments.get("input_ids")
        if (
            crossed := next((name for name in self._cross_inputs if arguments.get(name) is not None), None)
        ) is not None:
            raise CacheArgumentError(
                f"{crossed} was passed, and cross attention keeps keys and values that are no tokens'; call the model "
                "without past_key_values, or use generate, which then leaves this cache out"
            )
        if is_behind_prompt and running and ids is not None and ids.dim() == 2 and ids.shape[1] == 1:
            step = self._read_step(arguments, ids, running, num_columns_before)
            if step is not None:
                return step
        columns, why_no_ids = _read_ids(arguments)
        num_rows, num_new = len(columns), len(columns[0]) if columns else 0
        if running and num_rows != len(running):
            raise CacheArgumentError(
                f"the cache runs {len(running)} rows, got {num_rows}; cache.reset() it for another batch"
            )
        pads, why_no_pads = _read_mask(arguments.get("attention_mask"), num_rows, num_columns_before + num_new)
        bypass = _unread(arguments) or why_no_ids or why_no_pads
        if bypass is None and any(_has_other_padding(row, pad) for row, pad in zip(running, pads, strict=False)):
            bypass = "the padding of a row has changed"
        if bypass is not None:
            pads = [row.pad for row in running] or [0] * num_rows
        first_positions, why = self._read_positions(
            arguments.get("position_ids"), running, pads, num_columns_before, num_new, is_bypassed=bypass is not None
        )
        keep_columns, num_logits_needed = self._read_outputs(arguments, in_generate, records_drafts)
        may_alias = bypass is None and why is None and not _other_outputs(arguments, self._config)
        return ForwardArguments(
            token_ids=tuple(
                tokens[min(num_new, max(0, pad - num_columns_before)) :]
                for tokens, pad in zip(columns, pads, strict=True)
            ),
            pads=tuple(pads),
            first_positions=tuple(first_positions),
            num_new_columns=num_new,
            bypass=bypass or why,
            keep_columns=keep_columns,
            num_logits_needed=max(1, min(num_logits_needed, num_new)),
            may_alias=may_alias,
        )

    def _read_step(
        self, arguments: Mapping[str, Any], ids: Tensor, running: Sequence[RunningRow], before: int
    ) -> ForwardArguments | None:
        """One token a row, inside `generate`, which extends mask and positions itself; None for anything unusual."""
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != before + 1):
            return None
        if ids.shape[0] != len(running) or _unread(arguments) is not None or arguments.get("inputs_embeds") is not None:
            return None
        tokens = ids.tolist()
        if positions is not None:
            if positions.dim() != 2 or positions.shape[1] != 1:
                return None
            given = positions.tolist()
            if len(given) == 1:
                given = given * len(running)
            if any(row.first_position + row.num_tokens != at for row, (at,) in zip(running, given, strict=True)):
                return None
        return ForwardArguments(
            token_ids=tuple(array("q", row) for row in tokens),
            pads=tuple(row.pad for row in running),
            first_positions=tuple(row.first_position for row in running),
            num_new_columns=1,
            bypass=None,
            keep_columns=None,
            num_logits_needed=1,
            may_alias=False,
        )

    def _read_positions(
        self,
        positions: Any,
        running: Sequence[RunningRow],
        pads: Sequence[int],
        before: int,
        num_new: int,
        *,
        is_bypassed: bool,
    ) -> tuple[list[int], str | None]:
        """The position of each row's first token, and why they do not simply count on."""
        expected = [row.first_position for row in running] or [0] * len(pads)
        if not self._takes_positions:
            return expected, None
        if positions is None:
            if self._remembers_positions:
                return expected, "without position_ids the model counts on from what it saw in an earlier call"
            # the model numbers columns, whatever the padding
            first = list(pads)
            if running and first != expected:
                return expected, "positions were not passed for padded rows"
            return first, None
        if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[0] not in (1, len(pads)):
            return expected, "positions are not one number a token"
        if positions.shape[1] != num_new:
            return expected, "positions of another length than the token ids"
        firsts = []
        for row, pad in enumerate(pads):
            given = positions[row if positions.shape[0] > 1 else 0]
            skipped = min(num_new, max(0, pad - before))
            given = given[skipped:]
            if given.numel() == 0:
                firsts.append(expected[row])
                continue
            start = int(given[0]) - max(0, before - pad)
            counted = torch.arange(given.numel(), dtype=given.dtype, device=given.device) + given[0]
            if not torch.equal(given, counted):
                return expected, "positions do not count up by one"
            if running and start != expected[row]:
                if start < expected[row] and not is_bypassed:
                    raise CacheArgumentError(
                        f"row {row} goes on at position {int(given[0])}, but the cache holds its first "
                        f"{max(0, before - pad)} tokens: call generate on the model that the cache is attached to, or "
                        "cache.reset() first"
                    )
                return expected, "positions do not go on where the row stopped"
            firsts.append(start)
        return firsts, None

    def _read_outputs(
        self, arguments: Mapping[str, Any], in_generate: bool, records_drafts: bool
    ) -> tuple[str | None, int]:
        """Why all columns must be computed, and how many logits are needed at least."""
        other = _other_outputs(arguments, self._config)
        if other is not None:
            return other, 1
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


def for_ticket(arguments: Mapping[str, Any], ticket: ScheduledForward, num_columns_before: int) -> dict[str, Any]:
    """The arguments for the rows and columns that the ticket lets run; the mask keeps all its columns."""
    changed = dict(arguments)
    skipped = ticket.start - num_columns_before
    ids = changed.get("input_ids")
    rows = None
    if ticket.copies is not None and ids is not None:
        rows = torch.tensor(ticket.sources, device=ids.device)
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


def _read_ids(arguments: Mapping[str, Any]) -> tuple[list[TokenIds], str | None]:
    """The token ids of each row, all columns; -1 for each embedding, and why that is no token."""
    ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    if embeds is not None:
        num_rows, num_columns = embeds.shape[:2]
        return [array("q", [-1]) * num_columns] * num_rows, "embeddings were passed instead of token ids"
    if ids is None:
        raise CacheArgumentError("a forward without input_ids and without inputs_embeds")
    if ids.dim() != 2:
        raise CacheArgumentError(f"input_ids must be [rows, tokens], got {tuple(ids.shape)}")
    return [array("q", row) for row in ids.tolist()], None


def _has_other_padding(row: RunningRow, pad: int) -> bool:
    """Whether a running row cannot have that padding: only one that has had nothing but padding may get more of it."""
    return row.pad != pad and (row.num_tokens > 0 or pad < row.pad)


def _read_mask(mask: Any, num_rows: int, num_columns: int) -> tuple[list[int], str | None]:
    """Columns of left padding of each row; or why the mask is not of the form 0...01...1."""
    if mask is None:
        return [0] * num_rows, None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        kind = f"{mask.dim()}-D tensor" if isinstance(mask, Tensor) else type(mask).__name__
        return [0] * num_rows, f"the attention mask is a {kind}, not [rows, columns]"
    if mask.shape != (num_rows, num_columns):
        raise CacheArgumentError(
            f"the attention mask is {tuple(mask.shape)}; with the cache's tokens and the new ones it must be "
            f"{(num_rows, num_columns)}: pass ids that go on exactly where the rows stopped, or cache.reset() first"
        )
    ones = mask != 0
    counts = ones.sum(dim=1)
    form = torch.stack((counts, ones.int().argmax(dim=1))).tolist()
    pads = [num_columns - count for count in form[0]]
    for row, (pad, first) in enumerate(zip(pads, form[1], strict=True)):
        if pad != num_columns and pad != first:
            return [
                0
            ] * num_rows, f"the attention mask of row {row} has zeros behind its first one (right padding or holes)"
    return pads, None


def _unread(arguments: Mapping[str, Any]) -> str | None:
    """An argument that may condition keys and values and is none of those read here."""
    for name, value in arguments.items():
        if value is None or name in _READ:
            continue
        if isinstance(value, bool | int) and (value or name != "is_causal"):  # what is to be put out, or counted
            continue
        if not isinstance(value, dict | list | tuple) or value:  # an empty one, as of images where there are none
            return f"the argument {name} may condition keys and values"
    return None


def _other_outputs(arguments: Mapping[str, Any], config: Any) -> str | None:
    """Outputs besides logits that cover all tokens or rows."""
    for name in _OUTPUT_FLAGS:
        value = arguments.get(name)
        if value is None:
            value = getattr(config, name, None)
        if value:
            return f"{name} was asked for, which covers all tokens"
    if arguments.get("labels") is not None:
        return "labels were passed, and a loss covers all tokens"
    if arguments.get("return_dict") is False or not getattr(config, "return_dict", True):
        return "a tuple was asked for (return_dict=False)"
    return None
