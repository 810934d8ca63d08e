"""Forwards that we run ourselves, for scores, shared prefixes and verification, each on a sibling cache of the same store.

Owns all of such a forward: the rows that the sibling takes over, the arguments, what is committed of it, and that the
sibling's rows are dropped in the end. No cache of a user is touched.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ..call.admission import CallLimits
from ..call.call import Call
from ..call.counters import PromptCounters
from ..call.rows import Rows
from ..call.running import Bracket
from ..call.scheduled_forward import ForwardRequest, RequestRead, RowInput
from ..kv.transfers import to_device
from ..model.cache_adapters import cache_argument
from ..model.probing import input_device
from ..model.rope import RopeDeltas
from .forward_arguments import ArgumentReader, InputValues, KnownInputs, MaskValues, PositionValues, num_pads
from .generate_arguments import GenerateArguments

# What a `generate` is passed that runs a prompt, whatever the model's generation config says.
FIRST_TOKEN: dict[str, Any] = {
    **{"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "num_return_sequences": 1, "use_cache": True},
    **dict.fromkeys(("prefill_chunk_size", "prompt_lookup_num_tokens", "cache_implementation", "stop_strings")),
    **{"return_dict_in_generate": True, "output_logits": True},
}


class SideForwards:
    """Runs forwards on sibling caches.

    Args:
        model: what is run.
        reader: says which arguments the model takes.
        make_cache: a sibling cache.
    """

    def __init__(self, model: Any, reader: ArgumentReader, make_cache: Callable[[], Any]) -> None:
        self.model = model
        self.takes_positions = reader.takes_positions  # else the model numbers its columns
        self.takes_logits_to_keep = reader.takes_logits_to_keep
        self._reader = reader
        self._make_cache = make_cache
        self._deltas = RopeDeltas(model)

    @contextmanager
    def sibling(self, rows: Rows | None = None) -> Iterator[Any]:
        """A sibling that continues with `rows`, or has none; until the block is left it holds what it computed."""
        cache, block = self._make_cache(), Bracket()
        with cache.call.store.lock:
            cache.call.counters = PromptCounters()  # counted by the call that it is run for
            cache.call.kept_by = ref(block)
            cache.call.plans_ahead = rows is None or cache.call.states is None  # what follows them may be no tokens
        try:
            if rows is not None:
                cache.call.take_over(rows)
            yield cache
        finally:
            del block
            cache.reset()

    def run(
        self,
        cache: Any,
        rows: Sequence[RowInput],
        stops: Sequence[int] = (),
        *,
        num_logits: int = 1,
        digest: bytes = b"",
        options: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Run tokens after those that the sibling holds, without gradients, and commit the blocks that they fill.

        As `generate` runs a prompt, in chunks where there are several stops: before the first forward the blocks of all are
        reserved. What is known is not computed again, but for the last token before each stop. Shorter rows are filled up on the right,
        where no other token sees them, with tokens of their own; those are never committed.

        Args:
            rows: what each runs; without roots.
            stops: columns at which forwards end, the lower ones first; none: one forward, of all tokens.
            num_logits: how many of the last columns' logits are wanted.
            digest: see `GenerateArguments`.
            options: other arguments of the forward.

        Returns:
            logits of the last columns of the last forward, [R, num_logits, vocabulary].

        Raises:
            OutOfBlocksError: the rows do not fit; nothing was computed.
        """
        call: Call = cache.call
        start = call.num_columns
        with call.store.lock:
            call.plans_ahead = call.plans_ahead and not stops  # there forwards are cut
        stops = stops or [max(max(start, row.pad) + len(row.token_ids) for row in rows)]
        spans = [*pairwise((start, *stops))]
        arguments, known = self._passed(rows, start, *spans[0])
        given = GenerateArguments(
            limits=CallLimits(num_prompt_columns=stops[-1], max_columns=stops[-1], num_rows=len(rows)),
            only_new_tokens=bool(call.rows.alias),
            num_masked=stops[-1],
            num_given=stops[-1] - start,
            inputs=known,
            digest=digest,
        )
        always = {**(options or {}), cache_argument(self.model): cache, "use_cache": True, "return_dict": True}
        if self._reader.takes_logits_to_keep:
            always["logits_to_keep"] = num_logits
        bracket = Bracket()
        try:
            with torch.no_grad(), cache.generating(self.model, given, ref(bracket)):
                if num_logits > 1 and not self._reader.takes_logits_to_keep:
                    cache.activate_past_recording()
                for span in spans:
                    if span[0] > start:
                        arguments, _ = self._passed(rows, start, *span)
                    output = self.model(**always, **arguments)
                for running, row in zip(call.rows.in_batch(), rows, strict=True):
                    num_tokens = max(0, start - row.pad) + len(row.token_ids)
                    if num_tokens < stops[-1] - row.pad:
                        running.stop_commits(num_tokens)
        finally:
            del bracket
        logits: Tensor = output.logits[:, -num_logits:]
        return logits

    def generate(self, cache: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Run a prompt as `generate` does, whatever it has besides token ids, and commit the blocks that it fills.

        Effects: what modules keep of images is as before.

        Args:
            inputs: as a processor returns them, of one prompt.

        Returns:
            logits of its last token, [1, 1, vocabulary].

        Raises:
            OutOfBlocksError: it does not fit; nothing was computed.
        """
        with self._deltas.unchanged(), torch.no_grad():
            output = self.model.generate(**{**inputs, **FIRST_TOKEN, "past_key_values": cache})
        logits: Tensor = output.logits[0][:, None]
        return logits

    def request_of(self, inputs: Mapping[str, Any]) -> ForwardRequest:
        """What `generate` asks of a cache for a prompt, whatever it has besides token ids. Nothing runs, nothing is changed.

        Args:
            inputs: see `generate`.
        """
        with self.sibling() as cache:
            cache._session.reads_only = True
            try:
                self.generate(cache, inputs)
            except RequestRead as read:
                return read.request
        raise AssertionError("generate ran no forward")

    def run_chunks(self, cache: Any, row: RowInput, size: int, num_logits: int) -> Tensor:
        """Run a row of tokens in forwards of `size` columns, as `generate` does with `prefill_chunk_size`: the same bits, whatever
        is known. All logits of a forward are computed where one of them is wanted.

        Returns:
            logits of the last columns, [1, num_logits, vocabulary].

        Raises:
            OutOfBlocksError: the row does not fit; nothing was computed.
        """
        call: Call = cache.call
        num_tokens = len(row.token_ids)
        arguments, _ = self._passed([row], 0, 0, num_tokens)
        given = GenerateArguments(
            limits=CallLimits(num_prompt_columns=num_tokens, max_columns=num_tokens, num_rows=1),
            num_masked=num_tokens,
            num_given=num_tokens,
            passed=arguments,
            chunk_size=size,
            num_logits=num_logits,
        )
        always = {cache_argument(self.model): cache, "use_cache": True, "return_dict": True}
        found, first, bracket = [], num_tokens - num_logits, Bracket()
        try:
            with torch.no_grad(), cache.generating(self.model, given, ref(bracket)):
                for start in range(call.num_columns, num_tokens, size):
                    stop = min(num_tokens, start + size)
                    passed, _ = self._passed([row], 0, start, stop)
                    if self._reader.takes_logits_to_keep:
                        always["logits_to_keep"] = 1 if stop <= first else 0
                    logits = self.model(**always, **passed).logits
                    if stop > first:
                        found.append(logits[:, max(0, first - start) :])
        finally:
            del bracket
        return torch.cat(found, dim=1)

    def arguments_after(self, rows: Sequence[RowInput], held: int, start: int, stop: int) -> dict[str, Tensor]:
        """What a forward of the columns `[start, stop)` is passed, where the rows' tokens begin after `held` columns."""
        return self._passed(rows, held, start, stop)[0]

    def arguments_of(self, rows: Sequence[RowInput], start: int, stop: int) -> dict[str, Tensor]:
        """What a forward of the columns `[start, stop)` of rows is passed, of which all tokens are given."""
        return self._passed(rows, 0, start, stop)[0]

    def _passed(
        self, rows: Sequence[RowInput], held: int, start: int, stop: int
    ) -> tuple[dict[str, Tensor], KnownInputs]:
        """What a forward of the columns `[start, stop)` is passed, where the rows' tokens begin after `held` columns."""
        device, num_new = input_device(self.model), stop - start
        pads = [min(row.pad, stop) for row in rows]
        new_pads = [num_pads(pad, start, num_new) for pad in pads]
        filled = []
        for row, num_pad in zip(rows, new_pads, strict=True):
            first = max(held, row.pad)  # column of the row's first token
            tokens = array("q", [*[0] * num_pad, *row.token_ids[max(0, start - first) : max(0, stop - first)]])
            filled.append(tokens + array("q", row.token_ids[-1:]) * (num_new - len(tokens)))
        ids = to_device([*chain(*filled)], device).view(len(rows), -1)
        mask = torch.arange(stop, device=device)[None] >= to_device(pads, device)[:, None]
        arguments, positions = {"input_ids": ids, "attention_mask": mask.to(torch.int64)}, None
        last = [row.first_position + stop - 1 - row.pad for row in rows]
        if self.takes_positions:
            firsts = to_device([row.first_position + (row.shift or 0) for row in rows], device)[:, None]
            columns = torch.arange(start, stop, device=device)[None] - to_device(pads, device)[:, None]
            arguments["position_ids"] = columns.clamp_(min=0) + firsts
            positions = PositionValues(last, new_pads)
        values = InputValues(
            filled, num_new, False, MaskValues(pads, new_pads, pads), positions, max(last) if positions else None
        )
        return arguments, KnownInputs(ids, values)
