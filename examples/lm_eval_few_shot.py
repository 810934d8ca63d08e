"""lm-evaluation-harness on a prefix cache: a few-shot task, asked as a question and as a multiple choice, without and with it.

    pip install '.[demo,neighbours]' && python examples/lm_eval_few_shot.py

`PagedHFLM` below is all that is needed; copy it. Few-shot examples must be the same for all questions (`sampler: first_n`), or
there is nothing to share.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch.nn.functional import log_softmax
from tqdm import tqdm

from hf_paged_cache import PagedPrefixCache

REVIEWS = Path(__file__).with_name("reviews.jsonl")
NUM_SHOTS, NUM_QUESTIONS = 12, 12


class PagedHFLM(HFLM):
    """The harness's HF model; what requests have in common is computed once. The same answers.

    `generate_until` needs nothing but `with cache:`. Multiple choice does: the harness scores continuations by plain
    forwards without any cache, and asks for the logits of whole prompts. Here each request is one forward on the
    cache, which computes what no request before it had.
    """

    def __init__(self, pretrained: Any, **options: Any) -> None:
        super().__init__(pretrained, **options)
        self.cache = PagedPrefixCache(self.model)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        with self.cache:
            return super().generate_until(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        answers = []
        for names, context, continuation in tqdm(requests, disable=disable_tqdm, desc="Running loglikelihood requests"):
            answers.append(self._score(context, continuation))
            if names is not None:
                self.cache_hook.add_partial("loglikelihood", names, answers[-1])
        return answers

    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """The log-probability of a continuation, and whether it is what the model would say."""
        ids = (context + continuation)[-(self.max_length + 1) : -1]
        with torch.no_grad():
            logits = self.model(
                torch.tensor([ids], device=self.device), past_key_values=self.cache, logits_to_keep=len(continuation)
            ).logits[0]
        self.cache.reset()
        chosen = torch.tensor(continuation, device=self.device)
        scores = log_softmax(logits, dim=-1, dtype=self.softmax_dtype).gather(-1, chosen[:, None])
        return float(scores.sum()), bool((logits.argmax(dim=-1) == chosen).all())


def review_tasks() -> list[dict[str, Any]]:
    """Is a review positive or negative? Once as a question, once as a multiple choice."""
    reviews = Dataset.from_json(str(REVIEWS))
    splits = {"shots": reviews.select(range(NUM_SHOTS)), "questions": reviews.select(range(NUM_SHOTS, len(reviews)))}
    shared = {
        "custom_dataset": lambda **_: splits,
        "test_split": "questions",
        "fewshot_split": "shots",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": NUM_SHOTS,
        "doc_to_text": "Review: {{text}}\nThis review is",
        "doc_to_target": "{{label}}",
    }
    return [
        {
            **shared,
            "task": "reviews_asked",
            "output_type": "generate_until",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4},
            "metric_list": [{"metric": "exact_match", "ignore_case": True}],
            "filter_list": [
                {"name": "stripped", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}
            ],
        },
        {
            **shared,
            "task": "reviews_chosen",
            "output_type": "multiple_choice",
            "doc_to_choice": ["positive", "negative"],
            "metric_list": [{"metric": "acc"}],
        },
    ]


def evaluate(lm: HFLM, tasks: list[dict[str, Any]], limit: int | None = None) -> dict[str, Any]:
    """What the harness says of a model: scores, and every answer."""
    return simple_evaluate(
        lm, tasks=list(tasks), limit=limit, task_manager=TaskManager(include_defaults=False), bootstrap_iters=0
    )


def main() -> None:
    from hf_paged_cache.cli.demo_model import load_demo_model

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model, tokenizer = load_demo_model()
    print(f"{NUM_QUESTIONS} reviews after {NUM_SHOTS} labelled ones, CPU seconds")
    for task in review_tasks():
        for kind in (HFLM, PagedHFLM):
            lm = kind(model, tokenizer=tokenizer)
            started = time.process_time()
            results = evaluate(lm, [task], NUM_QUESTIONS)["results"][task["task"]]
            seconds = time.process_time() - started
            scores = {
                name.split(",")[0]: round(float(value), 4)
                for name, value in results.items()
                if name.startswith(("acc,", "exact_match,"))
            }
            print(f"{task['task']:<14}  {kind.__name__:<9}  {seconds:5.1f} s  {scores}")
        stats = lm.cache.stats()
        print(f"{'':<14}  computed {stats.computed_tokens / stats.prompt_tokens:.0%} of {stats.prompt_tokens} tokens")
        lm.cache.detach()


if __name__ == "__main__":
    main()
