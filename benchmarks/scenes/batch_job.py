"""The batch job on few-shot tasks in random order: against a plain loop of batches, and against ours in the order
given.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import torch
from harness import Timing, garbage_collection
from torch import Tensor
from transformers import DynamicCache

from hf_paged_cache import PagedPrefixCache, PrefixStore, generate_all
from hf_paged_cache.jobs.options import generation_config

from .line import BASELINE, GIVEN_ORDER, OURS, Line
from .registry import Lines, Repeat, scene
from .workbench import NEW_TOKENS, Bench

BATCH = 8
_QUESTION = (10, 40)  # tokens of a question, from and to


class IdTokenizer:
    """Prompts are token ids, written as numbers, and so are completions: what is timed is the model."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [int(token) for token in text.split()]}

    def decode(self, ids: Sequence[int], **_: object) -> str:
        return " ".join(map(str, ids))


@scene("Batch job", minutes=25)
def batch_job(bench: Bench, repeat: Repeat) -> Lines:
    """400 prompts of 3 tasks of 1,024 tokens in random order, and 40 tasks of 10 prompts in a pool that holds 8 of
    them.
    """
    shared, share = bench.sizes.shared, bench.sizes.num_questions / 100
    num_prompts = max(2 * BATCH, round(400 * share))
    prompts = _prompts(bench, 3, num_prompts)
    seconds, completions, hit_rate = _job(bench, prompts, None)
    loop, num_loop = _loop(bench, prompts, completions, repeat(6), lambda: DynamicCache(config=bench.model.config))
    yield (
        "batch_job",
        _line(
            f"{num_prompts} prompts of 3 tasks in random order, in batches of {BATCH}, {NEW_TOKENS} new tokens",
            {BASELINE: loop, OURS: seconds},
            BASELINE,
            hit_rate,
            num_loop,
            bench.bar(6.0),
        ),
    )
    num_tasks = max(4, round(40 * share))
    prompts = _prompts(bench, num_tasks, 10 * num_tasks)
    num_held = 8 if num_tasks > 8 else 2
    num_blocks = 1 + num_held * -(-shared // 16) + BATCH * -(-(_QUESTION[1] + NEW_TOKENS + 16) // 16)
    seconds, completions, hit_rate = _job(bench, prompts, num_blocks)
    cache = PagedPrefixCache(PrefixStore(bench.model, num_blocks=num_blocks))
    _loop(bench, prompts[:BATCH], completions[:BATCH], 1, lambda: cache)  # fills the pool
    loop, num_loop = _loop(bench, prompts, completions, repeat(12), lambda: cache)
    yield (
        "batch_job / order",
        _line(
            f"{num_tasks} tasks of 10 prompts in a pool for {num_held}: against ours in the order given",
            {GIVEN_ORDER: loop, OURS: seconds},
            GIVEN_ORDER,
            hit_rate,
            num_loop,
            bench.bar(2.5),
        ),
    )


def _prompts(bench: Bench, num_tasks: int, num_prompts: int) -> list[list[int]]:
    """Each of a task of `shared` tokens, and of a question of its own; in random order."""
    random_ = random.Random(0)
    tasks = [bench.tokens(1, bench.sizes.shared)[0].tolist() for _ in range(num_tasks)]
    prompts = [
        tasks[number % num_tasks] + bench.tokens(1, random_.randint(*_QUESTION))[0].tolist()
        for number in range(num_prompts)
    ]
    random_.shuffle(prompts)
    return prompts


def _job(bench: Bench, prompts: Sequence[Sequence[int]], num_blocks: int | None) -> tuple[float, list[str], float]:
    """Seconds of the whole job, its completions, and the share of tokens reused."""
    texts = [" ".join(map(str, prompt)) for prompt in prompts]
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    generation_config(bench.model, options)  # imports what the first job would
    with garbage_collection(enabled=False):
        started = time.perf_counter()
        store = PrefixStore(bench.model, num_blocks=num_blocks)
        result = generate_all(
            bench.model, IdTokenizer(), texts, batch_size=BATCH, cache=store, progress=False, **options
        )
        seconds = time.perf_counter() - started
    completions = [str(each) for each in result.completions or ()]
    return seconds, completions, result.summary.reused_tokens / result.summary.prompt_tokens


def _loop(
    bench: Bench,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[str],
    num_timed: int,
    cache: Callable[[], DynamicCache | PagedPrefixCache],
) -> tuple[float, int]:
    """Seconds that batches in the order given take, padded on the left: of `num_timed` batches, spread over the job, as
    if of all.

    Raises:
        AssertionError: other tokens than the job's, in fp32.
    """
    starts = [*range(0, len(prompts), BATCH)]
    chosen = starts[:: max(1, len(starts) // num_timed)][:num_timed]
    seconds = 0.0
    for start in chosen:
        some = prompts[start : start + BATCH]
        ids, mask = _padded(some)
        with garbage_collection(enabled=False):
            started = time.perf_counter()
            output = bench.model.generate(
                input_ids=ids.to(bench.model.device),
                attention_mask=mask.to(bench.model.device),
                past_key_values=cache(),
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
            )
            texts = [" ".join(map(str, row)) for row in output[:, ids.shape[1] :].tolist()]
            seconds += time.perf_counter() - started
        if bench.is_exact:
            assert texts == [*completions[start : start + BATCH]], (
                f"other tokens than the job's in the batch from prompt {start} on"
            )
    return seconds * len(prompts) / sum(len(prompts[start : start + BATCH]) for start in chosen), len(chosen)


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return ids, mask


def _line(
    what: str, seconds: dict[str, float], against: str, hit_rate: float, num_timed: int, at_least: float | None
) -> Line:
    ratio = seconds[against] / seconds[OURS]
    return Line(
        what=what,
        value=ratio,
        kind="ratio",
        spread=Timing.of([ratio]),
        ways={name: Timing.of([taken]) for name, taken in seconds.items()},
        against=against,
        hit_rate=hit_rate,
        at_least=at_least,
        details={"batches_timed_of_the_other": num_timed},
    )
