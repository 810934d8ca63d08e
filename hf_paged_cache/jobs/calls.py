"""Runs the rows of a job on a model: in batches, each padded into one `generate`, whose output is cut into completions.

A batch for which there is no memory is run in halves.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import StopStringCriteria

from ..cache import PagedPrefixCache
from ..errors import CacheArgumentError
from ..model.support import unwrapped
from ..model.trial import input_device, measure_bytes_per_token
from ..store.memory_budget import free_bytes
from .options import REPLACED, How, generation_config, may_pad, refusal
from .order import Limits, batches, ordered
from .prompts import Row, RowError, tokenized

Completion = str | list[str]  # several texts if `num_return_sequences` says so

_MOST_ROWS = 64  # with more, a forward's own cost is small beside that of its rows
_OF_FREE_MEMORY = 4  # rows take at most one part in so many of the free memory; blocks and forwards need the rest


class Record(NamedTuple):
    """`Record` holds rows that are done, by their numbers, and name -> what was counted; see `BatchSummary`."""

    rows: list[int]
    completions: list[Completion]
    counts: dict[str, float]


def complete(model: Any, tokenizer: Any, cache: Any, how: How, rows: Mapping[int, Row]) -> Iterator[Record]:
    """Run rows, by their numbers; what can be refused is refused before the first one is done."""
    calls, numbers = BatchCalls(model, tokenizer, how, cache), [*rows]
    model, config = calls.model, calls.config
    tokens = tokenized(rows, how.column, tokenizer, model.config, how.max_new_tokens)
    for number, ids in zip(numbers, tokens, strict=True):
        if why := calls.cache.store.image_inputs.why_no_text(ids):
            raise RowError(number, f"its prompt {why}")
    num_sequences, most_tokens = max(config.num_beams or 1, config.num_return_sequences or 1), math.inf
    num_prompts = 1 if config.prompt_lookup_num_tokens else how.batch_size  # such drafts are for one row
    if num_prompts is None:  # as many prompts as pay and as memory has room for
        num_prompts = max(1, _MOST_ROWS // num_sequences)
        free = free_bytes(input_device(model)) / _OF_FREE_MEMORY
        most_tokens = free / max(1, measure_bytes_per_token(model))
    pads = may_pad(config, min(map(len, tokens)))
    limits = Limits(num_prompts, most_tokens, how.max_new_tokens, num_sequences, pads)
    for batch in batches(ordered(tokens), limits):
        yield from calls.run([numbers[at] for at in batch], [tokens[at] for at in batch])
    calls.cache.reset()


class BatchCalls:
    """`BatchCalls` runs batches of one job; the samples of each follow from the job's seed and the batch's rows."""

    def __init__(self, model: Any, tokenizer: Any, how: How, cache: Any = None) -> None:
        if not callable(tokenizer):
            raise CacheArgumentError(f"tokenizer is of type {type(tokenizer).__name__}; give the model's")
        if isinstance(cache, PagedPrefixCache) and how.of_cache:
            given = " and ".join(how.of_cache)
            raise CacheArgumentError(f"{given}: of the cache, which is there already; give it to PagedPrefixCache")
        if not isinstance(cache, PagedPrefixCache):
            cache = PagedPrefixCache(model if cache is None else cache, **how.of_cache)
        self.cache, self.model, self._seed = cache, unwrapped(model), how.seed
        if cache.store.model is not self.model:
            raise CacheArgumentError("cache is of another model than the one given")
        self.config = config = generation_config(self.model, how.generation)
        self._given, self._has_run = how.generation, False
        self._words = getattr(tokenizer, "tokenizer", tokenizer)
        eos, pad = config.eos_token_id, config.pad_token_id
        self._stop: StopStringCriteria | None = None
        try:
            self._ends = {eos} if isinstance(eos, int) else set(eos or ())
            if config.stop_strings is not None:
                self._stop = StopStringCriteria(self._words, config.stop_strings)
            if not isinstance(pad, int) or pad < 0:
                pad = max(0, min(self._ends, default=0))
        except (TypeError, ValueError) as error:
            raise refusal(self._given, error) from error
        self._options = {**how.generation, **REPLACED, "pad_token_id": pad, "tokenizer": self._words}

    def run(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Iterator[Record]:
        """Yield the completions of rows, in one record, or in several if the rows do not fit into one call."""
        half = len(rows) // 2
        try:
            yield self.answer(rows, prompts)
        except torch.OutOfMemoryError:
            if not half:
                raise
        else:
            return
        yield from self.run(rows[:half], prompts[:half])
        yield from self.run(rows[half:], prompts[half:])

    def answer(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Record:
        """Return the completions of rows that fit into one call of `generate`."""
        cache, count = self.cache, self.config.num_return_sequences or 1
        started, num_bypassed = time.perf_counter(), cache.stats().num_bypassed_calls
        new = self._new_tokens(self._generate(rows, prompts), max(map(len, prompts)))
        texts = [str(self._words.decode(each, skip_special_tokens=True)) for each in new]
        num_tokens = sum(map(len, prompts))
        counts = {
            "prompt_tokens": num_tokens,
            "reused_tokens": max(0, num_tokens - cache.last_call.computed_tokens),
            "new_tokens": sum(map(len, new)),
            "num_batches": 1,
            "num_bypassed": len(rows) * (cache.stats().num_bypassed_calls > num_bypassed),
            "seconds": time.perf_counter() - started,
        }
        of_rows = [texts[start : start + count] for start in range(0, len(texts), count)]
        return Record([*rows], [each if count > 1 else each[0] for each in of_rows], counts)

    def _generate(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Return what `generate` gives for prompts, padded on the left.

        Nothing attends to padding, but penalties on repeated tokens count it. So it is the row's own first token.
        """
        longest, device = max(map(len, prompts)), input_device(self.model)
        ids = [[prompt[0]] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        inputs = [torch.tensor(each, device="cpu").to(device) for each in (ids, mask)]
        given = {"input_ids": inputs[0], "attention_mask": inputs[1], "past_key_values": self.cache}
        seed = hashlib.sha256(f"{self._seed}: {[*rows]}".encode()).digest()[:7]
        draws = bool(self.config.do_sample)
        try:
            with torch.random.fork_rng(range(torch.cuda.device_count()), enabled=draws):  # so torch's own draws go on
                if draws:
                    torch.manual_seed(int.from_bytes(seed, "big"))
                output: Tensor = self.model.generate(**given, **self._options)
        except (TypeError, ValueError, LookupError, AttributeError) as error:  # options are looked at where they count
            if self._has_run or isinstance(error, CacheArgumentError):
                raise
            raise refusal(self._given, error) from error
        self._has_run = True
        return output.cpu()  # waits for the device

    def _new_tokens(self, output: Tensor, num_prompt: int) -> list[list[int]]:
        """Return the tokens that each row has generated after `num_prompt` columns.

        They go to the row's first end token, or to where a stop string ends first; the rest is padding.
        """
        new = output[:, num_prompt:].tolist()
        lengths = [next((n for n, token in enumerate(row, 1) if token in self._ends), len(row)) for row in new]
        if self._stop is not None:
            ids = output.clamp(min=0)  # beams may be padded with -1
            for length in range(output.shape[1] - num_prompt, 0, -1):
                is_end = self._stop(ids[:, : num_prompt + length], None).tolist()
                lengths = [min(length, known) if ends else known for ends, known in zip(is_end, lengths, strict=True)]
        return [row[:length] for row, length in zip(new, lengths, strict=True)]
