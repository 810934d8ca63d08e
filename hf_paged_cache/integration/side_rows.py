"""Runs forwards of our own, for scores, prefills, checks and what runs ahead of a call, on rows of their own.

What they compute is kept as that of any call is, and counted by whoever asks for it.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from ..call.counters import PromptCounters
from ..kv.tensors import to_device
from ..model.rope import RopeDeltas
from ..model.support import cache_argument
from ..model.trial import input_device
from ..rows.request import CallLimits, CallState, ForwardRequest, RequestRead, RowInput
from ..rows.rows import Rows
from .forward_arguments import ArgumentReader
from .generate_arguments import GenerateArguments

# Arguments of a `generate` that runs one prompt, whatever the model's generation config says.
_FIRST_TOKEN: dict[str, Any] = {
    **{"max_new_tokens": 1, "do_sample": False, "num_beams": 1, "num_return_sequences": 1, "use_cache": True},
    **dict.fromkeys(("prefill_chunk_size", "prompt_lookup_num_tokens", "cache_implementation", "stop_strings")),
    **{"return_dict_in_generate": True, "output_logits": True},
}


class SideRows:
    """`SideRows` runs calls on rows of their own, of another cache on the same store each."""

    def __init__(self, reader: ArgumentReader, make_cache: Callable[[], Any]) -> None:
        self.model, self._reader, self._make_cache = reader.model, reader, make_cache

    def _cache(self) -> Any:
        """Make a cache that counts by itself: the call for which it runs counts its forwards."""
        cache = self._make_cache()
        cache._calls.counters = PromptCounters()
        return cache

    def begin(self, kind: str) -> Rows:
        """Begin a call of this kind, and return its rows, before their first forward."""
        state = CallState(kind, is_in_step=kind == "prefill")  # forwards of a prefill are cut already
        rows: Rows = self._cache()._calls.new_rows(state)
        rows.in_generate = True
        return rows

    def run(self, rows: Rows, inputs: Sequence[RowInput], stops: Sequence[int] = (), *, num_logits: int = 1) -> Tensor:
        """Run tokens after the tokens that rows hold; return the last logits, [R, num_logits, vocabulary].

        Forwards end at the columns `stops`, the lower ones first; without any, one forward runs all tokens.
        """
        start = rows.n
        stops = stops or [max(max(start, row.pad) + len(row.token_ids) for row in inputs)]
        if num_logits > 1 and not self._reader.takes_logits_to_keep:
            rows.records_drafts = True  # the logits of all columns are wanted
        for span in pairwise((start, *stops)):
            logits = run_columns(self._reader, rows, inputs, *span, num_held=start, num_logits=num_logits)
        for prompt, row in zip(rows.prompts, inputs, strict=False):
            prompt.most_kept = max(0, start - row.pad) + len(row.token_ids)
        return logits[:, -num_logits:]

    def run_chunks(self, row: RowInput, size: int, num_logits: int) -> tuple[Tensor, Rows]:
        """Run a row of tokens in forwards of `size` columns, as `generate` does with `prefill_chunk_size`.

        Return the last logits, [1, num_logits, vocabulary], the same bits whatever is known, and the rows, closed.
        """
        num_tokens, calls = len(row.token_ids), self._cache()._calls
        given = GenerateArguments(
            limits=CallLimits(num_prompt_columns=num_tokens, max_columns=num_tokens, num_rows=1),
            num_masked=num_tokens,
            num_given=num_tokens,
            passed=_arguments_of(self._reader, [row], 0, num_tokens),
            chunk_size=size,
            num_logits=num_logits,
        )
        rows = calls.begin(self.model, given, None)
        found, first = [], num_tokens - num_logits
        for start in range(rows.n, num_tokens, size):
            stop = min(num_tokens, start + size)
            # all logits of a forward are computed if one of them is wanted
            logits = run_columns(self._reader, rows, [row], start, stop, num_logits=1 if stop <= first else 0)
            if stop > first:
                found.append(logits[:, max(0, first - start) :])
        calls.close(rows)
        return torch.cat(found, dim=1), rows

    def generate(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Rows]:
        """Run a prompt, as a processor returns it, and return its last logits, [1, 1, vocabulary], and the rows."""
        cache = self._cache()
        logits: Tensor = self._generate(cache, inputs).logits[0][:, None]
        return logits, cache._current.take()

    def request_of(self, inputs: Mapping[str, Any]) -> ForwardRequest:
        """Return what `generate` asks of a cache for a prompt; no forward runs."""
        cache = self._cache()
        cache._calls.reads_only = True
        try:
            self._generate(cache, inputs)
        except RequestRead as read:
            return read.request
        raise AssertionError("generate ran no forward")

    def _generate(self, cache: Any, inputs: Mapping[str, Any]) -> Any:
        """Run a prompt; what modules keep of images is as before."""
        deltas = RopeDeltas(self.model)
        try:
            with torch.no_grad():
                return self.model.generate(**{**inputs, **_FIRST_TOKEN, "past_key_values": cache})
        finally:
            deltas.put_back()


def row_of(tokens: Sequence[int], pad: int = 0, shift: int | None = 0) -> RowInput:
    """Make a row that runs these tokens."""
    return RowInput(array("q", tokens), pad, 0, shift=shift)


def run_columns(
    reader: ArgumentReader,
    rows: Rows,
    inputs: Sequence[RowInput],
    start: int,
    stop: int,
    *,
    num_held: int = 0,
    num_logits: int = 1,
    options: Mapping[str, Any] | None = None,
) -> Tensor:
    """Run the columns `[start, stop)` on rows, without gradients, and return the last `num_logits` logits; 0: all.

    `num_held` columns are before the tokens of `inputs`. Shorter rows are filled up on the right with their own last
    token; no other token sees these. `options` are other arguments of the forward.
    """
    given = {**(options or {}), cache_argument(type(reader.model)): rows, "use_cache": True, "return_dict": True}
    if reader.takes_logits_to_keep:
        given["logits_to_keep"] = num_logits
    with torch.no_grad():
        logits: Tensor = reader.model(**given, **_arguments_of(reader, inputs, start, stop, num_held)).logits
    return logits


def _arguments_of(
    reader: ArgumentReader, inputs: Sequence[RowInput], start: int, stop: int, num_held: int = 0
) -> dict[str, Tensor]:
    """Return ids, mask and positions of a forward of the columns `[start, stop)`; see `run_columns`."""
    device, num_new, filled = input_device(reader.model), stop - start, []
    pads = [min(row.pad, stop) for row in inputs]
    for row, pad in zip(inputs, pads, strict=True):
        first = max(num_held, row.pad)  # column of the row's first token
        padding = array("q", [0]) * min(num_new, max(0, pad - start))
        tokens = padding + row.token_ids[max(0, start - first) : max(0, stop - first)]
        filled.append(tokens + row.token_ids[-1:] * (num_new - len(tokens)))
    ids = to_device([*chain(*filled)], device).view(len(inputs), -1)
    mask = torch.arange(stop, device=device)[None] >= to_device(pads, device)[:, None]
    arguments = {"input_ids": ids, "attention_mask": mask.to(torch.int64)}
    if reader.takes_positions:
        firsts = to_device([row.first_position + (row.shift or 0) for row in inputs], device)[:, None]
        columns = torch.arange(start, stop, device=device)[None] - to_device(pads, device)[:, None]
        arguments["position_ids"] = columns.clamp_(min=0) + firsts
    return arguments
