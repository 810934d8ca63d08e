"""Runs forwards of our own, for scores and prefills, each on rows of its own: no cache of a user is touched.

What they compute is kept as that of any call is, and counted by whoever asks for it.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..call.counters import PromptCounters
from ..call.limits import CallLimits
from ..call.request import ForwardRequest, RequestRead, RowInput
from ..model.cache_adapters import cache_argument
from ..model.rope import RopeDeltas
from ..rows.rows import Rows
from .generate_arguments import GenerateArguments
from .side_forward import FIRST_TOKEN, SideForwards
from .store_parts import StoreParts


class SideRows:
    """`SideRows` runs forwards on rows of their own.

    Args:
        parts: the model, and the reader of its arguments.
        make_cache: makes another cache on the same store.
    """

    def __init__(self, parts: StoreParts, make_cache: Callable[[], Any]) -> None:
        self.model, self.takes_positions = parts.model, parts.argument_reader.takes_positions
        self._side, self._make_cache = SideForwards(parts.model, parts.argument_reader), make_cache
        self._deltas = RopeDeltas(parts.model)

    def _cache(self) -> Any:
        cache = self._make_cache()
        cache._calls.counters = PromptCounters()  # the call for which this cache runs counts its forwards
        return cache

    def begin(self, kind: str) -> Rows:
        """Begin a call of this kind, and return its rows, before their first forward."""
        rows: Rows = self._cache()._calls.begin_side(kind)
        rows.state.is_in_step = kind == "prefill"  # forwards of a prefill are cut already
        return rows

    def run(self, rows: Rows, inputs: Sequence[RowInput], stops: Sequence[int] = (), *, num_logits: int = 1) -> Tensor:
        """Run tokens after the tokens that rows hold, without gradients.

        Shorter rows are filled up on the right with their own last token; no other token sees these.

        Args:
            inputs: what each row runs; without roots.
            stops: columns at which forwards end, the lower ones first; none: one forward of all tokens.
            num_logits: number of last columns whose logits are wanted.

        Returns:
            logits of the last columns of the last forward, [R, num_logits, vocabulary].
        """
        start, side = rows.num_columns, self._side
        stops = stops or [max(max(start, row.pad) + len(row.token_ids) for row in inputs)]
        always: dict[str, Any] = {cache_argument(self.model): rows, "use_cache": True, "return_dict": True}
        if side.takes_logits_to_keep:
            always["logits_to_keep"] = num_logits
        elif num_logits > 1:
            rows.records_drafts = True  # the logits of all columns are wanted
        with torch.no_grad():
            for span in pairwise((start, *stops)):
                output = self.model(**always, **side.arguments_of(inputs, *span, num_held=start))
        for prompt, row in zip(rows.prompts, inputs, strict=False):
            prompt.most_kept = max(0, start - row.pad) + len(row.token_ids)
        logits: Tensor = output.logits[:, -num_logits:]
        return logits

    def run_chunks(self, row: RowInput, size: int, num_logits: int) -> tuple[Tensor, Rows]:
        """Run a row of tokens in forwards of `size` columns, as `generate` does with `prefill_chunk_size`.

        The logits are the same bits, whatever is known. All logits of a forward are computed if one of them is wanted.

        Returns:
            logits of the last columns, [1, num_logits, vocabulary]; and the rows, which are closed.
        """
        num_tokens, side, calls = len(row.token_ids), self._side, self._cache()._calls
        given = GenerateArguments(
            limits=CallLimits(num_prompt_columns=num_tokens, max_columns=num_tokens, num_rows=1),
            num_masked=num_tokens,
            num_given=num_tokens,
            passed=side.arguments_of([row], 0, num_tokens),
            chunk_size=size,
            num_logits=num_logits,
        )
        rows = calls.begin(given, None)
        always: dict[str, Any] = {cache_argument(self.model): rows, "use_cache": True, "return_dict": True}
        found, first = [], num_tokens - num_logits
        with torch.no_grad():
            for start in range(rows.n, num_tokens, size):
                stop = min(num_tokens, start + size)
                if side.takes_logits_to_keep:
                    always["logits_to_keep"] = 1 if stop <= first else 0
                logits = self.model(**always, **side.arguments_of([row], start, stop)).logits
                if stop > first:
                    found.append(logits[:, max(0, first - start) :])
        calls.close(rows)
        return torch.cat(found, dim=1), rows

    def generate(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Rows]:
        """Run a prompt as `generate` does, whatever it has besides token ids, and keep the blocks that it fills.

        Effects: what modules keep of images is as before.

        Args:
            inputs: one prompt, as a processor returns it.

        Returns:
            logits of the prompt's last token, [1, 1, vocabulary]; and the rows.
        """
        cache = self._cache()
        with self._deltas.unchanged(), torch.no_grad():
            output = self.model.generate(**{**inputs, **FIRST_TOKEN, "past_key_values": cache})
        logits: Tensor = output.logits[0][:, None]
        return logits, cache._current.take()

    def request_of(self, inputs: Mapping[str, Any]) -> ForwardRequest:
        """Return what `generate` asks of a cache for a prompt, whatever the prompt has besides token ids.

        Effects: none; no forward runs.

        Args:
            inputs: see `generate`.
        """
        cache = self._cache()
        cache._calls.opening.asking.reads_only = True
        try:
            with self._deltas.unchanged(), torch.no_grad():
                self.model.generate(**{**inputs, **FIRST_TOKEN, "past_key_values": cache})
        except RequestRead as read:
            return read.request
        raise AssertionError("generate ran no forward")

    def fork(self, rows: Rows, sources: Sequence[int]) -> Rows:
        """Make rows that go on beside `rows`, row `i` from row `sources[i]`."""
        return self._cache()._calls.fork(rows, sources)  # type: ignore[no-any-return]

    def close(self, rows: Rows) -> None:
        """End a call, and keep what is complete."""
        rows.calls.close(rows)


def row_of(tokens: Sequence[int], pad: int = 0, shift: int | None = 0) -> RowInput:
    """Make a row that runs these tokens."""
    return RowInput(array("q", tokens), pad, 0, shift=shift)
