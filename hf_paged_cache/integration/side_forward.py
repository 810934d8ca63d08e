"""Forwards that we run ourselves, for scores, shared prefixes and verification, each on a sibling cache of the same store.

Owns all of such a forward: the rows that the sibling takes over, the arguments, what is committed of it, and that the
sibling's rows are dropped in the end. No cache of a user is touched.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor

from ..blocks.tokens import TokenIds
from ..call.admission import CallLimits
from ..call.call import Call
from ..call.counters import PromptCounters
from ..call.rows import Rows
from ..call.running import Bracket
from ..kv.transfers import to_device
from ..model.cache_adapters import cache_argument
from ..model.probing import input_device
from .forward_arguments import ArgumentReader
from .generate_arguments import GenerateArguments
from .hooks import AttachedCache
from .input_values import InputValues, KnownInputs, MaskValues, PositionValues, num_pads


class SiblingCache(AttachedCache, Protocol):
    """A cache on the same store, under the same conditions; `PagedPrefixCache` says what each does."""

    call: Call

    def activate_past_recording(self) -> None: ...
    def batch_repeat_interleave(self, repeats: int) -> None: ...
    def reset(self) -> None: ...


class SideRow(NamedTuple):
    """A row of which some columns run."""

    pad: int  # columns of left padding
    first_position: int
    token_ids: TokenIds  # all of it, from the first on


class SideForwards:
    """Runs forwards on sibling caches.

    Args:
        model: what is run.
        reader: says which arguments the model takes.
        make_cache: a sibling cache.
    """

    def __init__(self, model: Any, reader: ArgumentReader, make_cache: Callable[[], SiblingCache]) -> None:
        self.model = model
        self.takes_positions = reader.takes_positions  # else the model numbers its columns
        self._reader = reader
        self._make_cache = make_cache

    @contextmanager
    def sibling(self, rows: Rows | None = None) -> Iterator[SiblingCache]:
        """A sibling that goes on with `rows`, or has none; until the block is left it holds what it computed."""
        cache, block = self._make_cache(), Bracket()
        with cache.call.store.lock:
            cache.call.counters = PromptCounters()  # counted by the call that it is run for
            cache.call.kept_by = ref(block)
        try:
            if rows is not None:
                cache.call.states.plans_ahead = False  # what follows them may be no tokens
                cache.call.take_over(rows)
            yield cache
        finally:
            del block
            cache.reset()

    def run(
        self,
        cache: SiblingCache,
        rows: Sequence[Sequence[int]],
        *,
        num_logits: int = 1,
        pad: int = 0,
        first_position: int = 0,
        commits: bool = True,
        digest: bytes = b"",
        options: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Run tokens after those that the sibling holds, without gradients, and commit the blocks that they fill.

        Shorter rows are filled up on the right, where no other token sees them, with tokens of their own; those are
        never committed.

        Args:
            rows: the new tokens of each row.
            num_logits: how many of the last columns' logits are wanted.
            pad: columns of left padding, of rows that begin as of those held.
            first_position: position of the rows' first token.
            commits: False: nothing is committed, and nothing stored takes the place of what is computed.
            digest: see `GenerateArguments`.
            options: other arguments of the forward.

        Returns:
            logits of the last columns, [R, num_logits, vocabulary].

        Raises:
            OutOfBlocksError: the forward does not fit.
        """
        call, device = cache.call, input_device(self.model)
        num_held, num_new = call.num_columns, max(map(len, rows))
        num_pads = 0 if num_held else pad  # of the columns passed
        stop = num_held + num_pads + num_new
        filled = [array("q", [*[0] * num_pads, *row, *[row[-1]] * (num_new - len(row))]) for row in rows]
        mask = torch.ones((len(rows), stop), dtype=torch.int64, device=device)
        mask[:, :pad] = 0
        arguments = {**(options or {}), "attention_mask": mask}
        ids = arguments["input_ids"] = to_device([*chain(*filled)], device).view(len(rows), -1)
        arguments |= {cache_argument(self.model): cache, "use_cache": True, "return_dict": True}
        if self.takes_positions:
            arguments["position_ids"] = torch.arange(num_held, stop, device=device)[None] + first_position
        if self._reader.takes_logits_to_keep:
            arguments["logits_to_keep"] = num_logits
        if not commits:
            for row in call.rows.distinct:
                row.stop_commits(0)
        given = GenerateArguments(
            limits=CallLimits(num_prompt_columns=stop, max_columns=stop, num_rows=len(rows)),
            only_new_tokens=bool(call.rows.alias),
            num_masked=stop,
            num_given=stop - num_held,
            inputs=KnownInputs.of_columns(ids, filled, pad, num_held, first_position if self.takes_positions else None),
            digest=digest,
        )
        bracket = Bracket()
        try:
            with torch.no_grad(), cache.generating(self.model, given, ref(bracket)):
                if num_logits > 1 and not self._reader.takes_logits_to_keep:
                    cache.activate_past_recording()
                output = self.model(**arguments)
                for row, tokens in zip(call.rows.in_batch(), rows, strict=True):
                    if len(tokens) < num_new:
                        row.stop_commits(num_held + len(tokens))
        finally:
            del bracket
        logits: Tensor = output.logits[:, -num_logits:]
        return logits

    def prefill(self, cache: SiblingCache, token_ids: TokenIds, stops: Sequence[int]) -> None:
        """Run one new row's tokens in forwards that end at `stops`, without gradients, and commit the blocks that they fill.

        As `generate` runs a prompt in chunks: before the first forward the blocks of all are reserved. What is known is not
        computed again, but for the last token before each of the stops.

        Args:
            stops: numbers of tokens, the lower ones first.

        Raises:
            OutOfBlocksError: the row does not fit; nothing was computed.
        """
        device = input_device(self.model)
        given = GenerateArguments(
            limits=CallLimits(num_prompt_columns=stops[-1], max_columns=stops[-1], num_rows=1),
            num_masked=stops[-1],
            num_given=stops[-1],
        )
        bracket = Bracket()
        try:
            with torch.no_grad(), cache.generating(self.model, given, ref(bracket)):
                cache.call.states.plans_ahead = False  # the stops are where a forward is cut
                for start, stop in pairwise((0, *stops)):
                    arguments: dict[str, Any] = {"input_ids": to_device(token_ids[start:stop], device)[None]}
                    arguments["attention_mask"] = torch.ones((1, stop), dtype=torch.int64, device=device)
                    arguments |= {cache_argument(self.model): cache, "use_cache": True, "return_dict": True}
                    if self.takes_positions:
                        arguments["position_ids"] = torch.arange(start, stop, device=device)[None]
                    if self._reader.takes_logits_to_keep:
                        arguments["logits_to_keep"] = 1
                    self.model(**arguments)
        finally:
            del bracket

    def run_columns(
        self,
        cache: SiblingCache,
        rows: Sequence[SideRow],
        start: int,
        stop: int,
        *,
        digest: bytes,
        options: Mapping[str, Any],
    ) -> None:
        """Run the columns `[start, stop)` of rows that the sibling holds up to `start`, without gradients, and commit them.

        Args:
            digest: see `GenerateArguments`.
            options: other arguments of the forward.

        Raises:
            OutOfBlocksError: the forward does not fit.
        """
        device, num_new = input_device(self.model), stop - start
        pads = [min(row.pad, stop) for row in rows]
        new_pads = [num_pads(pad, start, num_new) for pad in pads]
        filled = [
            array("q", [0] * new) + row.token_ids[max(0, start - row.pad) : max(0, stop - row.pad)]
            for row, new in zip(rows, new_pads, strict=True)
        ]
        ids = to_device([*chain(*filled)], device).view(len(rows), -1)
        mask = torch.arange(stop, device=device)[None] >= to_device(pads, device)[:, None]
        arguments = {**options, "input_ids": ids, "attention_mask": mask.to(torch.int64)}
        arguments |= {cache_argument(self.model): cache, "use_cache": True, "return_dict": True}
        firsts = to_device([row.first_position for row in rows], device)[:, None]
        positions, last = None, [row.first_position + stop - 1 - row.pad for row in rows]
        if self.takes_positions:
            columns = torch.arange(start, stop, device=device)[None] - to_device(pads, device)[:, None]
            arguments["position_ids"] = columns.clamp_(min=0) + firsts
            positions = PositionValues(last, new_pads)
        if self._reader.takes_logits_to_keep:
            arguments["logits_to_keep"] = 1
        values = InputValues(filled, num_new, False, MaskValues(pads, new_pads, pads), positions, max(last))
        given = GenerateArguments(
            limits=CallLimits(num_prompt_columns=stop, max_columns=stop, num_rows=len(rows)),
            only_new_tokens=True,
            num_masked=stop,
            num_given=num_new,
            inputs=KnownInputs(ids, values),
            digest=digest,
        )
        bracket = Bracket()
        try:
            with torch.no_grad(), cache.generating(self.model, given, ref(bracket)):
                self.model(**arguments)
        finally:
            del bracket
