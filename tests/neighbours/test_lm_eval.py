"""lm-evaluation-harness: a few-shot generation task and a multiple choice give the same scores, and compute far less.

The model is `hf-paged`, and for generation also the harness's own inside `with cache:`.
"""

import functools
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from lm_eval import simple_evaluate
from lm_eval.models.hf_vlms import HFMultimodalLM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel

from hf_paged_cache import CacheArgumentError, PagedPrefixCache
from hf_paged_cache.lm_eval import PagedHFLM, PagedHFMultimodalLM

from ..conformance.image_zoo import tiny
from ..promise.test_image_pipelines import picture, processor
from ..reference import TOLERANCE, zero_blocks
from ..tiny_models import CHARACTERS, build, character_tokenizer
from .recorder import Recorder, are_same_steps, assert_same_steps

EXAMPLES = Path(__file__).parents[2] / "examples"
NUM_SHOTS = 4
CHOICES = ["a dog", "a bird", "no idea", "x"]
ANIMALS = ["barks loudly", "sings in trees", "flies away", "fetches sticks", "wags its tail", "lays eggs", "has wings"]


def task(folder: Path, **settings: Any) -> dict[str, Any]:
    """A few-shot task on local JSON lines."""
    folder.mkdir(exist_ok=True)
    for split, names in (("shots", ANIMALS[:NUM_SHOTS]), ("questions", ANIMALS[NUM_SHOTS:])):
        lines = [
            json.dumps({"what": name, "label": number % 2, "answer": CHOICES[number % 2]})
            for number, name in enumerate(names)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return {
        "task": "animals",
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {split: str(folder / f"{split}.jsonl") for split in ("shots", "questions")},
            "cache_dir": str(folder / "datasets"),
        },
        "test_split": "questions",
        "fewshot_split": "shots",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": NUM_SHOTS,
        "doc_to_text": "Question: what is it that {{what}}?\nAnswer:",
        **settings,
    }


ASKED: dict[str, Any] = {
    "output_type": "generate_until",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n", "~"], "max_gen_toks": 6},
    "metric_list": [{"metric": "exact_match"}],
}
CHOSEN: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_target": "label",
    "doc_to_choice": CHOICES,
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}


def evaluate(lm: HFLM, folder: Path, settings: dict[str, Any]) -> tuple[dict[str, float], list[Any]]:
    """Scores by name, and what the model answered to every request."""
    result = simple_evaluate(
        lm, tasks=[task(folder, **settings)], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0
    )
    scores = {name: value for name, value in result["results"]["animals"].items() if isinstance(value, float)}
    return scores, [sample["resps"] for sample in result["samples"]["animals"]]


@pytest.mark.parametrize(("way", "batch_size"), [("with cache", 1), ("PagedHFLM", 2)])
def test_a_few_shot_generation_task(
    model: PreTrainedModel,
    cache: PagedPrefixCache,
    recorder: Recorder,
    tiny_tokenizer: Any,
    tmp_path: Path,
    way: str,
    batch_size: int,
) -> None:
    lm = HFLM(model, tokenizer=tiny_tokenizer, batch_size=batch_size)
    ours = PagedHFLM(model, tokenizer=tiny_tokenizer, batch_size=batch_size)
    ours.cache = cache  # trusts the recorder's hooks
    (wanted, answers), steps = recorder.during(evaluate, lm, tmp_path, ASKED)
    assert len({str(answer) for answer in answers}) > 1
    assert "exact_match,none" in wanted

    def with_ours() -> Any:
        if way == "PagedHFLM":
            return evaluate(ours, tmp_path, ASKED)
        with cache:
            return evaluate(lm, tmp_path, ASKED)

    (scores, given), our_steps = recorder.during(with_ours)
    assert (scores, given) == (wanted, answers)
    assert_same_steps(steps, our_steps)
    stats = cache.stats()
    assert stats.num_calls == -(-len(answers) // batch_size)
    assert stats.computed_tokens < 0.8 * stats.prompt_tokens
    zero_blocks(cache)
    assert not are_same_steps(steps, recorder.during(with_ours)[1])


@functools.cache
def chosen_without() -> tuple[dict[str, float], list[Any]]:
    """What the harness's own model says of the multiple choice, which the model of all tests here is asked once."""
    model, tokenizer = build("llama", max_position_embeddings=2048), character_tokenizer(CHARACTERS)
    with TemporaryDirectory() as folder:
        return evaluate(HFLM(model, tokenizer=tokenizer), Path(folder), CHOSEN)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_multiple_choice_task(model: PreTrainedModel, tiny_tokenizer: Any, tmp_path: Path, batch_size: int) -> None:
    wanted, answers = chosen_without()
    ours = PagedHFLM(model, tokenizer=tiny_tokenizer, batch_size=batch_size)
    scores, given = evaluate(ours, tmp_path, CHOSEN)
    assert scores == wanted
    assert {"acc,none", "acc_norm,none"} <= scores.keys()
    assert len(answers) == len(ANIMALS) - NUM_SHOTS
    assert same_log_probabilities(answers, given)
    stats = ours.cache.stats()
    assert stats.num_calls == -(-len(answers) // batch_size)  # contexts of a batch are one call
    assert stats.computed_tokens < 0.25 * stats.prompt_tokens
    zero_blocks(ours.cache)
    assert not same_log_probabilities(answers, evaluate(ours, tmp_path, CHOSEN)[1])


def same_log_probabilities(wanted: list[Any], got: list[Any]) -> bool:
    """Of every choice of every question, and whether it is what the model would say."""
    for ours, theirs in zip(got, wanted, strict=True):
        for [(log_probability, is_greedy)], [(expected, expected_greedy)] in zip(ours, theirs, strict=True):
            if is_greedy != expected_greedy or abs(log_probability - expected) > TOLERANCE * abs(expected):
                return False
    return True


def test_the_tasks_beside_the_examples_share_what_comes_before_each_question(
    model: PreTrainedModel, tiny_tokenizer: Any
) -> None:
    tasks = TaskManager(include_path=str(EXAMPLES / "lm_eval"), include_defaults=False)
    for name in ("pages_asked", "reviews_chosen", "reviews_read"):
        ours = PagedHFLM(model, tokenizer=tiny_tokenizer, batch_size=2, max_length=16384)
        simple_evaluate(ours, tasks=[name], task_manager=tasks, limit=2, bootstrap_iters=0)
        stats = ours.cache.stats()
        assert stats.prompt_tokens > 0
        assert (stats.computed_tokens < 0.6 * stats.prompt_tokens) == (not name.endswith("_read"))


def test_rolling_log_likelihoods(model: PreTrainedModel, tiny_tokenizer: Any, tmp_path: Path) -> None:
    """Perplexity of texts, as of the harness's language modelling tasks."""
    rolling = {
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "All of them: {{what}}",
        "num_fewshot": 0,
        "doc_to_text": "",
    }
    metrics = {"metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}]}
    wanted, _ = evaluate(HFLM(model, tokenizer=tiny_tokenizer), tmp_path, rolling | metrics)
    ours = PagedHFLM(model, tokenizer=tiny_tokenizer)
    scores, _ = evaluate(ours, tmp_path, rolling | metrics)
    assert scores == pytest.approx(wanted, rel=1e-4)
    assert scores["byte_perplexity,none"] > 1


def test_batch_size_auto_and_contexts_longer_than_the_pool(
    model: PreTrainedModel, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = chosen_without()
    ours = PagedHFLM(model, tokenizer=tiny_tokenizer, batch_size="auto")
    scores, given = evaluate(ours, tmp_path, CHOSEN)
    assert scores == wanted[0]
    assert same_log_probabilities(wanted[1], given)
    assert ours.cache.stats().num_calls == 1  # all contexts in a batch
    monkeypatch.setattr(
        "hf_paged_cache.lm_eval.free_bytes", lambda device: 2**20
    )  # less than of two rows: one at a time
    ours = PagedHFLM(model, tokenizer=tiny_tokenizer, batch_size="auto", num_blocks=3)  # less than a context
    assert same_log_probabilities(wanted[1], evaluate(ours, tmp_path, CHOSEN)[1])
    stats = ours.cache.stats()
    assert (stats.num_blocks, stats.num_calls) == (3, len(ANIMALS) - NUM_SHOTS)
    assert stats.computed_tokens < 0.25 * stats.prompt_tokens  # its continuations share each context all the same


def test_options_of_a_store_are_read_before_the_model_is() -> None:
    with pytest.raises(CacheArgumentError, match="block_size is 0"):
        PagedHFLM("no such folder", block_size=0)


def test_the_harness_s_own_store_of_answers_is_filled(
    model: PreTrainedModel, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    ours = PagedHFLM(model, tokenizer=tiny_tokenizer)
    for _ in range(2):
        simple_evaluate(
            ours,
            tasks=[task(tmp_path, **CHOSEN)],
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
            use_cache=str(tmp_path / "answers"),
        )
        assert ours.cache.stats().num_calls == len(ANIMALS) - NUM_SHOTS


SEEN: dict[str, Any] = {
    "output_type": "generate_until",
    "num_fewshot": 0,
    "doc_to_text": "w1 w2 <image> w3 w{{label}} w{{what.__len__()}}",
    "doc_to_image": lambda doc: [picture(doc["label"])],
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["~"], "max_gen_toks": 6},
    "metric_list": [{"metric": "exact_match"}],
}


def test_a_task_with_images_computes_each_image_once(tmp_path: Path) -> None:
    model, layout = tiny("llava")
    words = processor(model)
    words.tokenizer.eos_token = "w125"
    for saved in (model, words):
        saved.save_pretrained(tmp_path / "model")
    theirs, ours = (
        kind(str(tmp_path / "model"), batch_size=1, device="cpu") for kind in (HFMultimodalLM, PagedHFMultimodalLM)
    )
    recorders = [Recorder(each.model) for each in (theirs, ours)]
    ours.cache = PagedPrefixCache(ours.model, trust_hooks=True)  # the recorder's
    wanted, steps = recorders[0].during(evaluate, theirs, tmp_path, SEEN)
    assert len({str(answer) for answer in wanted[1]}) > 1
    num_images = len(ANIMALS) - NUM_SHOTS
    for num_known in (num_images - 2, num_images):
        before = ours.cache.stats().reused_tokens
        got, our_steps = recorders[1].during(evaluate, ours, tmp_path, SEEN)
        assert got == wanted
        assert_same_steps(steps, our_steps)
        assert ours.cache.stats().reused_tokens - before >= layout.num_tokens * num_known
    zero_blocks(ours.cache)
    assert not are_same_steps(steps, recorders[1].during(evaluate, ours, tmp_path, SEEN)[1])


def test_a_model_that_is_not_causal_is_refused_by_name(tiny_tokenizer: Any) -> None:
    with pytest.raises(CacheArgumentError, match=r"the backend is seq2seq; use --model hf"):
        PagedHFLM(build("t5"), tokenizer=tiny_tokenizer, backend="seq2seq")
