"""A few-shot evaluation: many questions behind one prompt, read from JSONL files with `datasets`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import Timing
from torch import Tensor
from transformers import DynamicCache

from hf_paged_cache import PagedPrefixCache

from .continuous_batching import Served, serve
from .conversations import CONVERSATIONS
from .line import BASELINE, BATCHING, FLOOR, LIMIT, OURS, Line
from .registry import Lines, Repeat, scene
from .ways import Measured, Way, from_scratch, on_ours, on_ready, run_round, share_not_computed, timed_call, turned
from .workbench import QUESTION_TOKENS, Bench

DATA = Path(__file__).parents[1] / "data"
INSTRUCTION = "Answer the next question with a single word or name, and nothing else.\n"
NUM_WARMUP_REQUESTS = 17


@scene(CONVERSATIONS, minutes=13.5)
def few_shot(bench: Bench, repeat: Repeat) -> Lines:
    """100 questions of 16 tokens behind a few-shot prompt of 1,024, one by one from an empty cache; 1 new token."""
    prompt, questions = read_prompts(bench)
    cache, ready = PagedPrefixCache(bench.model), DynamicCache(config=bench.model.config)
    prefill = bench.clock.time(lambda: bench.prefill(prompt, ready))[0]
    measured, answers = Measured(), []
    for number, question in enumerate(questions):
        ids = torch.cat((prompt, question), dim=1)
        ways: dict[str, Way] = {
            BASELINE: from_scratch(bench, ids),
            LIMIT: on_ready(bench, ready, ids),
            OURS: on_ours(bench, cache, ids),
        }
        order = turned(list(ways), number)
        seconds, tokens = run_round(bench, ways, order, measured, lambda way: timed_call(bench, way))
        measured.rounds.append(seconds)
        answers.append(tokens[0, ids.shape[1] :].tolist())
    totals = {name: sum(measured.seconds(name)) for name in (BASELINE, LIMIT, OURS)}
    totals[FLOOR] = prefill + totals.pop(LIMIT)
    kv_bytes, details = dict(measured.kv_bytes), {"a_question": measured.timings()}
    batched = _batched(bench, prompt, questions)
    if batched is not None:
        totals[BATCHING], kv_bytes[BATCHING] = sum(batched.seconds), batched.kv_bytes
        details["continuous_batching"] = {
            "same_answers": sum(theirs == mine for theirs, mine in zip(batched.tokens, answers, strict=True)),
            "requests_per_batch": batched.requests_per_batch,
            "first_request_seconds": batched.seconds[0],
        }
    ways_taken = {name: Timing.of([seconds]) for name, seconds in totals.items()}

    def line(against: str, **bar: Any) -> Line:
        ratio = totals[against] / totals[OURS]
        return Line(
            what=f"{len(questions)} questions in all, against {against}",
            value=ratio,
            kind="ratio",
            spread=Timing.of([ratio]),
            ways=ways_taken,
            against=against,
            hit_rate=share_not_computed(cache.stats()),
            kv_bytes=kv_bytes,
            details=details,
            **bar,
        )

    yield "few_shot", line(BASELINE, at_least=bench.bar(11.0), floor=FLOOR)
    if batched is not None:
        yield f"few_shot / {BATCHING}", line(BATCHING)


def read_prompts(bench: Bench) -> tuple[Tensor, list[Tensor]]:
    """The few-shot prompt, [1, shared], and the questions, [1, 16] each: the ends of what the files say."""
    shots, questions = _read("shots"), _read("questions")
    text = "".join(f"Question: {shot['question']}\nAnswer: {shot['answer']}\n" for shot in shots)
    ids = _encode(bench, text)
    prompt = (ids * (bench.sizes.shared // len(ids) + 1))[-bench.sizes.shared :]
    asked = [_encode(bench, f"{INSTRUCTION}Question: {row['question']}\nAnswer:") for row in questions]
    tensors = [
        torch.tensor([of], device=bench.model.device) for of in (prompt, *(of[-QUESTION_TOKENS:] for of in asked))
    ]
    return tensors[0], tensors[1 : 1 + bench.sizes.num_questions]


def _read(name: str) -> list[dict[str, str]]:
    import datasets

    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:  # its copy of so small a file is worth nothing to anyone
        rows = datasets.load_dataset("json", data_files=str(DATA / f"{name}.jsonl"), split="train", cache_dir=folder)
        return rows.to_list()


def _encode(bench: Bench, text: str) -> list[int]:
    """Token ids; a model of random weights has no tokenizer, and gets a token a byte."""
    if bench.tokenizer is not None:
        return bench.tokenizer(text, add_special_tokens=False)["input_ids"]
    vocabulary = bench.model.config.get_text_config().vocab_size
    return [byte % vocabulary for byte in text.encode()]


def _batched(bench: Bench, prompt: Tensor, questions: list[Tensor]) -> Served | None:
    """The same requests, and others of the same lengths to warm the manager up with."""
    other = bench.tokens(1, bench.sizes.shared)
    warmup = bench.behind(other, min(NUM_WARMUP_REQUESTS, len(questions)))
    return serve(bench, [torch.cat((prompt, question), dim=1)[0].tolist() for question in questions], warmup.tolist())
