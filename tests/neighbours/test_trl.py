"""TRL's GRPOTrainer: generation on our cache in a loop where every optimizer step makes what was cached old."""

import functools
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.model import weights

from ..internals import see_no_change_of_the_model
from ..tiny_models import CHARACTERS, build, character_tokenizer
from . import tiny_training
from .recorder import Recorder, are_same_steps, assert_same_steps
from .tiny_training import NUM_STEPS, PREAMBLE, data


class Trained(NamedTuple):
    """What a run leaves behind."""

    steps: list[Tensor]
    weights: dict[str, Tensor]
    cache: PagedPrefixCache | None
    trainer: GRPOTrainer


def trained(
    tokenizer: Any, folder: Path, *, use_cache: bool, only: str = "", peft_config: Any = None, **settings: Any
) -> Trained:
    """Train the weights of a tiny model that have `only` in their names; with `use_cache`, inside `with cache:`."""
    model = build("llama", max_position_embeddings=2048)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(only in name)
    config = GRPOConfig(**tiny_training.settings(folder, num_generations=4, max_completion_length=6, **settings))
    trainer = GRPOTrainer(model=model, args=config, peft_config=peft_config, **data(tokenizer))
    cache = PagedPrefixCache(trainer.model, trust_hooks=True) if use_cache else None
    recorder = Recorder(model)
    with nullcontext() if cache is None else cache:
        trainer.train()
    weights = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    return Trained(recorder.steps, weights, cache, trainer)


def assert_same_run(wanted: Trained, got: Trained) -> None:
    assert len(wanted.steps) >= NUM_STEPS * 4
    assert_same_steps(wanted.steps, got.steps)
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(got.weights[name], weight, rtol=0, atol=1e-5)


@functools.cache
def trained_without(only: str = "", setting: str = "all weights") -> Trained:
    """Without the cache: the same for all tests."""
    with TemporaryDirectory() as folder:
        tokenizer = character_tokenizer(CHARACTERS)
        return trained(tokenizer, Path(folder), use_cache=False, only=only, **SETTINGS[setting])


SETTINGS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "several updates of a generation": {"num_iterations": 2, "max_steps": 2 * NUM_STEPS},
    "LoRA": {"peft_config": LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", lora_dropout=0.0)},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_training_is_the_same_and_no_step_gets_keys_and_values_of_one_before(
    tiny_tokenizer: Any, tmp_path: Path, setting: str
) -> None:
    wanted = trained_without(setting=setting)
    got = trained(tiny_tokenizer, tmp_path, use_cache=True, **SETTINGS[setting])
    assert_same_run(wanted, got)
    first, last = wanted.steps[0], wanted.steps[-6]  # two prefills: the weights did change
    assert float((first - last).abs().max()) > 0.01 * float(first.abs().max())
    assert got.cache is not None
    stats = got.cache.stats()
    assert stats.num_calls == NUM_STEPS
    # The four samples of a prompt were computed as one, and so was what prompts share.
    assert stats.computed_tokens < stats.prompt_tokens // 4


def test_training_the_embedding_alone_is_the_same(
    tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rows of the batch change, and the optimizer that is the default, a fused one, changes no version."""
    monkeypatch.setattr(weights, "_VALUES_PER_TENSOR", 1)  # of the pad's row, as if the vocabulary were large
    wanted = trained_without("embed_tokens")
    assert_same_run(wanted, trained(tiny_tokenizer, tmp_path, use_cache=True, only="embed_tokens"))


def test_keys_and_values_of_an_earlier_step_would_be_noticed(
    tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail: with a digest that never changes, old blocks are served and the run is another."""
    wanted = trained_without()
    see_no_change_of_the_model(monkeypatch)
    got = trained(tiny_tokenizer, tmp_path, use_cache=True)
    assert not are_same_steps(wanted.steps, got.steps)


def test_evaluating_twice_reuses(tiny_tokenizer: Any, tmp_path: Path) -> None:
    def rewards(run: Trained, cache: PagedPrefixCache | None) -> list[float]:
        questions = Dataset.from_dict({"prompt": [PREAMBLE + "How?", PREAMBLE + "Why not?"]})
        torch.manual_seed(1)
        with nullcontext() if cache is None else cache:
            return [run.trainer.evaluate(questions)["eval_reward"] for _ in range(2)]

    wanted = trained(tiny_tokenizer, tmp_path, use_cache=False)
    got = trained(tiny_tokenizer, tmp_path, use_cache=True)
    assert got.cache is not None
    assert rewards(got, got.cache) == rewards(wanted, None)
    assert_same_steps(wanted.steps, got.steps)
    assert got.cache.last_call.computed_tokens < got.cache.last_call.prompt_tokens // 4 * 0.6
