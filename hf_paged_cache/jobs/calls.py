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
from transformers.generation.stopping_criteria import StopStringCriteria

from ..cache import PagedPrefixCache
from ..errors import CacheArgumentError
from ..model.identity import sampled_digest
from ..model.support import unwrapped
from ..model.trial import input_device
from ..prefix_store import PrefixStore
from .options import REPLACED, How, generation_config
from .prompts import RowError, require_positions

Completion = str | list[str]  # several texts if `num_return_sequences` says so


class Record(NamedTuple):
    """`Record` holds rows that are done, by their numbers, and name -> what was counted; see `BatchSummary`."""

    rows: list[int]
    completions: list[Completion]
    counts: dict[str, float]


class BatchCalls:
    """`BatchCalls` runs batches of one job on a cache, on a new one of a store, or on a new one with the job's options.

    The samples of each batch follow from the job's seed and the batch's rows.
    """

    def __init__(
        self, model: Any, tokenizer: Any, how: How, cache: PagedPrefixCache | PrefixStore | None = None
    ) -> None:
        self.config = config = generation_config(unwrapped(model), how.generation)
        if not isinstance(cache, PagedPrefixCache):
            cache = PagedPrefixCache(model if cache is None else cache, **how.of_cache)
        self.model: Any = cache.store.model
        self.cache, self.tokenizer, self._seed = cache, tokenizer, how.seed
        self._words = getattr(tokenizer, "tokenizer", tokenizer)
        eos, pad = config.eos_token_id, config.pad_token_id
        self._ends = {eos} if isinstance(eos, int) else set(eos or ())
        if not isinstance(pad, int) or pad < 0:
            pad = max(0, min(self._ends, default=0))
        self._options = {**how.generation, **REPLACED, "pad_token_id": pad}
        self._stop: StopStringCriteria | None = None
        if config.stop_strings:
            self._options["tokenizer"] = self._words
            self._stop = StopStringCriteria(self._words, config.stop_strings)

    def facts(self) -> dict[str, str]:
        """Return facts by which the model is known again."""
        return {"model": self.model.config.name_or_path, "weights": sampled_digest(self.model)[:16]}

    def require_room(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Refuse prompts for which the model has no positions, or with placeholders of images, which nothing fills."""
        require_positions(self.model.config, prompts, self._options["max_new_tokens"])
        for number, tokens in prompts.items():
            if why := self.cache.store.placeholders.why_no_text(tokens):
                raise RowError(number, f"its prompt {why}")

    def try_out(self, num_rows: int) -> bool:
        """Make two short calls on a small cache, and return whether the second one has read once what rows share.

        Options that `generate` does not take are refused so before anything is written.
        """
        cache = PagedPrefixCache(self.model, block_size=4, num_blocks=64)
        cache.store.looks.weighs_launches = False
        prompts = ([1] * 9, [1] * 8 + [2])[:num_rows]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of least lengths, which are longer than these calls
            for _ in range(2):
                cache.reset()
                try:
                    self._generate([0], prompts, cache, max_new_tokens=min(2, self._options["max_new_tokens"]))
                except torch.OutOfMemoryError:
                    raise
                except (
                    Exception
                ) as error:  # transformers looks at options where it uses them, and raises whatever comes
                    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                    said = shorten(said, 300, placeholder=" ...")
                    raise CacheArgumentError(f"generate cannot run so: {said}") from error
        return cache.last_call.read_once_tokens > 0 and not cache.last_call.dense

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
        new = self._new_tokens(self._generate(rows, prompts, cache), max(map(len, prompts)))
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

    def _generate(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], cache: PagedPrefixCache, **options: Any
    ) -> Tensor:
        """Return what `generate` gives for prompts, padded on the left with a row's own first token.

        Nothing attends to padding, but penalties on repeated tokens count it. So padding is a token that the row has
        anyway.
        """
        longest, device = max(map(len, prompts)), input_device(self.model)
        ids = [[prompt[0]] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with self._seeded(rows):
            output: Tensor = self.model.generate(
                input_ids=torch.tensor(ids, device="cpu").to(device),
                attention_mask=torch.tensor(mask, device="cpu").to(device),
                past_key_values=cache,
                **{**self._options, **options},
            )
        return output.cpu()  # waits for the device

    def _new_tokens(self, output: Tensor, num_prompt: int) -> list[list[int]]:
        """Return the tokens that each padded row has generated after `num_prompt` columns.

        They go to the row's first end token, or to where a stop string ends first. What `generate` gives after that,
        padding or more tokens, is none of the row's.
        """
        new = output[:, num_prompt:].tolist()
        lengths = [next((n for n, token in enumerate(row, 1) if token in self._ends), len(row)) for row in new]
        if self._stop is not None:
            ids = output.clamp(min=0)  # beams may be padded with -1
            for length in range(output.shape[1] - num_prompt, 0, -1):
                is_end = self._stop(ids[:, : num_prompt + length], None).tolist()
                lengths = [min(length, known) if ends else known for ends, known in zip(is_end, lengths, strict=True)]
        return [row[:length] for row, length in zip(new, lengths, strict=True)]

    @contextmanager
    def _seeded(self, rows: Sequence[int]) -> Iterator[None]:
        """Let samples follow from the seed and the rows; afterwards torch continues as if none had been drawn."""
        if not self.config.do_sample:
            yield
            return
        digest = hashlib.sha256(f"{self._seed}: {[*rows]}".encode()).digest()
        with torch.random.fork_rng(range(torch.cuda.device_count())):  # manual_seed seeds all of them
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            yield
