"""One batch of a job on the model: its rows padded into one `generate`, and what comes back cut into completions.

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
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from ..cache import PagedPrefixCache
from ..errors import CacheArgumentError
from ..model.identity import sampled_digest
from ..model.placeholders import Placeholders
from ..model.probing import input_device
from ..model.support import unwrapped
from ..prefix_store import PrefixStore
from .journal import Completion, Record
from .options import REPLACED, How, generation_config
from .pictures import FIRST_NAME, ChatTokens, chat_inputs


class Described(NamedTuple):
    """What a job must know of its model.

    Attributes:
        config: the model's.
        placeholders: the model's token ids that are no text.
        generation_config: what its calls go by.
    """

    tokenizer: Any
    config: Any
    placeholders: Placeholders
    generation_config: GenerationConfig
    block_size: int


class Answered(NamedTuple):
    """What a call of `generate` gave: new tokens and text of each sequence, its times, and its decode steps."""

    token_ids: list[list[int]]
    texts: list[str]
    first_token_seconds: float
    seconds: float
    num_steps: int


class BatchCalls:
    """Runs batches of one job.

    Args:
        how: the job's options. Samples of each batch have a stream of their own, that follows from the seed and its rows.
        cache: to run on, or a store to make one of; None: a new one, with the job's options.

    Raises:
        CacheArgumentError: options that do not fit the model; see `generation_config`.
    """

    def __init__(
        self, model: Any, tokenizer: Any, how: How, cache: PagedPrefixCache | PrefixStore | None = None
    ) -> None:
        self._config = config = generation_config(unwrapped(model), how.generation)
        if not isinstance(cache, PagedPrefixCache):
            cache = PagedPrefixCache(model if cache is None else cache, **how.of_cache)
        self.cache = cache
        self._model: Any = self.cache.store.model
        self._processor, self._seed = tokenizer, how.seed
        self._tokenizer = tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        self._samples = bool(config.do_sample)
        self._num_returned = config.num_return_sequences or 1
        eos, pad = config.eos_token_id, config.pad_token_id
        self._ends = {eos} if isinstance(eos, int) else set(eos or ())
        is_token = isinstance(pad, int) and pad >= 0
        padding = pad if is_token else max(0, min(self._ends, default=0))
        self._options = {**how.generation, **REPLACED, "pad_token_id": padding}
        self._stop: StopStringCriteria | None = None
        if config.stop_strings:
            self._stop = StopStringCriteria(tokenizer, config.stop_strings)
            self._options |= {"tokenizer": tokenizer, "stopping_criteria": StoppingCriteriaList([_PadsWhatHasEnded()])}

    def describe(self) -> Described:
        """The model, as the job must know it."""
        store = self.cache.store
        return Described(self._processor, self._model.config, store.placeholders, self._config, store.blocks.block_size)

    def digest(self) -> str:
        """Of the model; see `sampled_digest`."""
        return sampled_digest(self._model)

    def try_out(self, prompts: Sequence[Sequence[int]]) -> None:
        """Make one call of two new tokens at most, so that options which `generate` refuses are refused before anything is written.

        Args:
            prompts: token ids of two rows at most, and of no more than a batch has; the first two tokens of each run.

        Raises:
            CacheArgumentError: `generate` takes the options not, or not for so many rows.
        """
        num_new = min(2, self._options["max_new_tokens"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of least lengths, which are longer than this call
            try:
                self._generate([0], _padded([_first_text(each) for each in prompts]), None, max_new_tokens=num_new)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # transformers looks at options where it uses them, and raises whatever comes
                said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                raise CacheArgumentError(f"generate cannot run so: {shorten(said, 300, placeholder=' ...')}") from error

    def reads_once(self, one: int, other: int) -> bool:
        """Whether the model's attention reads once what rows share, as two short rows show, in a store of their own.

        Args:
            one, other: two token ids.
        """
        cache = PagedPrefixCache(self._model, block_size=4, num_blocks=64)
        cache.store.looks.weighs_launches = False
        cache.prefill([one] * 8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # as in `try_out`
            self._generate([0], _padded([[one] * 9, [one] * 8 + [other]]), cache, max_new_tokens=1)
        call = cache.last_call
        return call.read_once_tokens > 0 and not call.dense

    def run(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], done: frozenset[int] = frozenset()
    ) -> Iterator[Record]:
        """The completions of rows, in one record, or in several where they do not fit into one call.

        Args:
            rows: their numbers.
            prompts: token ids of each.
            done: of the rows, those that were done in an earlier run, in parts: the others run in the parts that are left.

        Raises:
            torch.OutOfMemoryError: a row does not fit by itself.
        """
        waiting = [(list(rows), list(prompts))]
        while waiting:
            numbers, tokens = waiting.pop()
            if done.issuperset(numbers):
                continue
            half = len(numbers) // 2
            if done.isdisjoint(numbers):
                try:
                    yield self._run(numbers, tokens)
                    continue
                except torch.OutOfMemoryError:
                    if not half:
                        raise
            waiting += [(numbers[half:], tokens[half:]), (numbers[:half], tokens[:half])]

    def _run(self, rows: list[int], prompts: list[Sequence[int]]) -> Record:
        cache = self.cache
        num_bypassed = cache.stats().num_bypassed_calls
        done = self.answer(rows, prompts, cache)
        texts, count = done.texts, self._num_returned
        num_tokens = sum(map(len, prompts))
        is_bypassed = cache.stats().num_bypassed_calls > num_bypassed
        counts = {
            "prompt_tokens": num_tokens,
            "computed_tokens": min(num_tokens, cache.last_call.computed_tokens),
            "new_tokens": sum(map(len, done.token_ids)),
            "seconds": done.seconds,
            "prefill_seconds": done.first_token_seconds,
            "decode_steps": done.num_steps,
            "bypassed": len(rows) * is_bypassed,
        }
        completions: list[Completion] = [*texts]
        if count > 1:
            completions = [texts[start : start + count] for start in range(0, len(texts), count)]
        return Record(rows, completions, counts)

    def answer(
        self, rows: Sequence[int], prompts: Sequence[Sequence[int]], cache: PagedPrefixCache | None, **options: Any
    ) -> Answered:
        """One call of `generate`, timed; on a `DynamicCache` if `cache` is None.

        Args:
            options: of `generate`, in place of the job's.
        """
        first = prompts[0]
        inputs = chat_inputs(self._processor, first.chat) if isinstance(first, ChatTokens) else _padded(prompts)
        clock = _FirstTokenClock()
        started = time.perf_counter()
        output = self._generate(rows, inputs, cache, logits_processor=LogitsProcessorList([clock]), **options)
        new = [self._cut(row, inputs["input_ids"].shape[1]) for row in output.cpu()]  # waits for the device
        seconds = time.perf_counter() - started
        texts = [str(self._tokenizer.decode(each, skip_special_tokens=True)) for each in new]
        return Answered(new, texts, (clock.first_at or started) - started, seconds, max(0, clock.num_steps - 1))

    def _generate(
        self, rows: Sequence[int], inputs: Mapping[str, Any], cache: PagedPrefixCache | None, **options: Any
    ) -> Tensor:
        device = input_device(self._model)
        with self._seeded(rows):
            output: Tensor = self._model.generate(
                **{name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()},
                past_key_values=DynamicCache(config=self._model.config) if cache is None else cache,
                **{**self._options, **options},
            )
        return output

    def _cut(self, row: Tensor, num_prompt: int) -> list[int]:
        """The tokens that a row has generated: to its first end of sequence, or to where a stop string ends.

        After that `generate` pads, with a token that the model may have generated itself in another row.

        Args:
            row: [T], the padded prompt and what came after it.
            num_prompt: tokens of the padded prompt.
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
        """Samples that follow from the seed and the rows; afterwards torch continues as if none had been drawn."""
        if not self._samples:
            yield
            return
        digest = hashlib.sha256(f"{self._seed}: {[*rows]}".encode()).digest()
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        devices = range(torch.accelerator.device_count()) if accelerator else ()  # those that manual_seed seeds, too
        with torch.random.fork_rng(devices, device_type=accelerator.type if accelerator else "cuda"):
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            yield


def _first_text(tokens: Sequence[int]) -> list[int]:
    return [token for token in tokens if token < FIRST_NAME][:2] or [0]


def _padded(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Token ids and mask, [rows, longest]: padded on the left with a row's own first token.

    Nothing attends to padding, but penalties on repeated tokens count it: so it is none that the row has not.
    """
    longest = max(map(len, prompts))
    ids = [[prompt[0]] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids, device="cpu"), "attention_mask": torch.tensor(mask, device="cpu")}


class _PadsWhatHasEnded(StoppingCriteria):
    """Stops nothing. Where no criterion names an end of sequence, `generate` continues rows that have come to a stop string."""

    eos_token_id = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class _FirstTokenClock(LogitsProcessor):
    """Notes when the logits of the first new token were there, and how often there were any; changes none."""

    def __init__(self) -> None:
        self.first_at: float | None = None
        self.num_steps = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.num_steps += 1
        if self.first_at is None:
            if scores.device.type != "cpu":
                getattr(torch, scores.device.type).synchronize()
            self.first_at = time.perf_counter()
        return scores
