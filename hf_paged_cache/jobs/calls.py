"""Runs one batch of a job on the model: pads rows into one `generate`, and cuts its output into completions.

A batch for which there is no memory is run in halves. Owns no order and no file.
"""

import hashlib
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.generation import logits_process, stopping_criteria

from ..cache import PagedPrefixCache
from ..errors import CacheArgumentError
from ..model.identity import sampled_digest
from ..model.probing import input_device
from ..model.support import unwrapped
from ..prefix_store import PrefixStore
from .options import REPLACED, How, generation_config
from .prompts import require_positions
from .rows import RowError

Completion = str | list[str]  # several texts if `num_return_sequences` says so


class Record(NamedTuple):
    """`Record` holds rows that are done, by their numbers, and name -> what was counted; see `BatchSummary`."""

    rows: list[int]
    completions: list[Completion]
    counts: dict[str, float]


class Answered(NamedTuple):
    """`Answered` holds what a call of `generate` gave: new tokens and text of each sequence, and its times."""

    token_ids: list[list[int]]
    texts: list[str]
    first_token_seconds: float
    seconds: float


class BatchCalls:
    """`BatchCalls` runs batches of one job.

    Args:
        how: options of the job. The samples of each batch follow from the seed and the batch's rows.
        cache: cache on which batches run, or a store for a new cache; None: a new cache with the job's options.

    Raises:
        CacheArgumentError: options do not fit the model; see `generation_config`.
    """

    def __init__(
        self, model: Any, tokenizer: Any, how: How, cache: PagedPrefixCache | PrefixStore | None = None
    ) -> None:
        self.config = config = generation_config(unwrapped(model), how.generation)
        if not isinstance(cache, PagedPrefixCache):
            cache = PagedPrefixCache(model if cache is None else cache, **how.of_cache)
        self.model: Any = cache.store.model
        self.cache, self.tokenizer, self._seed = cache, tokenizer, how.seed
        self._words = words = getattr(tokenizer, "tokenizer", tokenizer)
        eos, pad = config.eos_token_id, config.pad_token_id
        self._ends = {eos} if isinstance(eos, int) else set(eos or ())
        is_token = isinstance(pad, int) and pad >= 0
        padding = pad if is_token else max(0, min(self._ends, default=0))
        self._options = {**how.generation, **REPLACED, "pad_token_id": padding}
        self._stop: stopping_criteria.StopStringCriteria | None = None
        if config.stop_strings:
            self._stop = stopping_criteria.StopStringCriteria(words, config.stop_strings)
            self._options |= {
                "tokenizer": words,
                "stopping_criteria": stopping_criteria.StoppingCriteriaList([_PadsWhatHasEnded()]),
            }

    def named(self) -> dict[str, str]:
        """Return facts by which the model is known again."""
        return {"model": self.model.config.name_or_path, "weights": sampled_digest(self.model)[:16]}

    def require_room(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Refuse prompts for which the model has no positions, or with placeholders of images, which nothing fills.

        Raises:
            RowError: there is such a prompt; the error names the first one.
        """
        require_positions(self.model.config, prompts, self._options["max_new_tokens"])
        for number, tokens in prompts.items():
            if why := self.cache.store.placeholders.why_no_text(tokens):
                raise RowError(number, f"its prompt {why}")

    def try_out(self, prompts: Sequence[Sequence[int]]) -> None:
        """Make one call of two new tokens on the first two tokens of two rows at most, before anything is written.

        Raises:
            CacheArgumentError: `generate` does not take the options, or not for so many rows.
        """
        num_new = min(2, self._options["max_new_tokens"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of least lengths, which are longer than this call
            try:
                self._generate([0], _padded([each[:2] for each in prompts]), None, max_new_tokens=num_new)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # transformers looks at options where it uses them, and raises whatever comes
                said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                raise CacheArgumentError(f"generate cannot run so: {shorten(said, 300, placeholder=' ...')}") from error

    def reads_once(self) -> bool:
        """Return whether the model's attention reads once what rows share.

        Two short rows show it, in a store of their own.
        """
        cache = PagedPrefixCache(self.model, block_size=4, num_blocks=64)
        cache.store.looks.weighs_launches = False
        cache.prefill([1] * 8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as in `try_out`
            self._generate([0], _padded([[1] * 9, [1] * 8 + [2]]), cache, max_new_tokens=1)
        return cache.last_call.read_once_tokens > 0 and not cache.last_call.dense

    def run(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Iterator[Record]:
        """Yield the completions of rows, in one record, or in several if the rows do not fit into one call.

        Raises:
            torch.OutOfMemoryError: a row does not fit by itself.
        """
        waiting = [(list(rows), list(prompts))]
        while waiting:
            numbers, tokens = waiting.pop()
            half = len(numbers) // 2
            try:
                yield self._run(numbers, tokens)
            except torch.OutOfMemoryError:
                if not half:
                    raise
                waiting += [(numbers[half:], tokens[half:]), (numbers[:half], tokens[:half])]

    def _run(self, rows: list[int], prompts: list[Sequence[int]]) -> Record:
        cache, count = self.cache, self.config.num_return_sequences or 1
        num_bypassed, num_tokens = cache.stats().num_bypassed_calls, sum(map(len, prompts))
        done = self.answer(rows, prompts, cache)
        counts = {
            "prompt_tokens": num_tokens,
            "reused_tokens": max(0, num_tokens - cache.last_call.computed_tokens),
            "new_tokens": sum(map(len, done.token_ids)),
            "num_batches": 1,
            "num_bypassed": len(rows) * (cache.stats().num_bypassed_calls > num_bypassed),
            "seconds": done.seconds,
        }
        groups = [done.texts[start : start + count] for start in range(0, len(done.texts), count)]
        return Record(rows, [each if count > 1 else each[0] for each in groups], counts)

    def answer(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], cache: PagedPrefixCache | None, **options: Any
    ) -> Answered:
        """Make one call of `generate` and time it; on a `DynamicCache` if `cache` is None.

        Args:
            options: options of `generate` in place of the job's.
        """
        inputs, clock = _padded(prompts), _FirstTokenClock()
        started = time.perf_counter()
        output = self._generate(
            rows, inputs, cache, logits_processor=logits_process.LogitsProcessorList([clock]), **options
        )
        new = [self._cut(row, inputs["input_ids"].shape[1]) for row in output.cpu()]  # waits for the device
        seconds = time.perf_counter() - started
        texts = [str(self._words.decode(each, skip_special_tokens=True)) for each in new]
        return Answered(new, texts, (clock.first_at or started) - started, seconds)

    def _generate(
        self, rows: Sequence[int], inputs: dict[str, Tensor], cache: PagedPrefixCache | None, **options: Any
    ) -> Tensor:
        device = input_device(self.model)
        with self._seeded(rows):
            output: Tensor = self.model.generate(
                **{name: value.to(device) for name, value in inputs.items()},
                past_key_values=DynamicCache(config=self.model.config) if cache is None else cache,
                **{**self._options, **options},
            )
        return output

    def _cut(self, row: Tensor, num_prompt: int) -> list[int]:
        """Return the tokens that a padded row has generated after `num_prompt` columns.

        They go to the row's first end token, or to where a stop string ends. After that `generate` pads, with a token
        that the model may have generated itself in another row.
        """
        new: list[int] = row[num_prompt:].tolist()
        length = next((place + 1 for place, token in enumerate(new) if token in self._ends), len(new))
        if self._stop is not None:
            num_pads = next((n for n, token in enumerate(reversed(new[:length])) if token != new[-1]), length)
            for end in range(max(1, length - num_pads), length):
                if self._stop(row[None, : num_prompt + end], None).item():
                    return new[:end]
        return new[:length]

    @contextmanager
    def _seeded(self, rows: Sequence[int]) -> Iterator[None]:
        """Let samples follow from the seed and the rows; afterwards torch continues as if none had been drawn."""
        if not self.config.do_sample:
            yield
            return
        digest = hashlib.sha256(f"{self._seed}: {[*rows]}".encode()).digest()
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        devices = range(torch.accelerator.device_count()) if accelerator else ()  # devices that manual_seed seeds, too
        with torch.random.fork_rng(devices, device_type=accelerator.type if accelerator else "cuda"):
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            yield


def _padded(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Return token ids and mask, [rows, longest], padded on the left with a row's own first token.

    Nothing attends to padding, but penalties on repeated tokens count it. So padding is a token that the row has
    anyway.
    """
    longest = max(map(len, prompts))
    ids = [[prompt[0]] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids, device="cpu"), "attention_mask": torch.tensor(mask, device="cpu")}


class _PadsWhatHasEnded(stopping_criteria.StoppingCriteria):
    """`_PadsWhatHasEnded` stops nothing, but lets `generate` pad rows that have come to a stop string.

    If no criterion names an end of sequence, `generate` continues such rows.
    """

    eos_token_id = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class _FirstTokenClock(logits_process.LogitsProcessor):
    """`_FirstTokenClock` notes when the logits of the first new token were there; it changes none."""

    first_at: float | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.first_at is None:
            if scores.device.type != "cpu":
                getattr(torch, scores.device.type).synchronize()
            self.first_at = time.perf_counter()
        return scores
