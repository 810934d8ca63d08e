"""TRL's trainers and transformers' server under `hf-paged-cache run`: the same rewards, weights and answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin, Trainer
from trl import GRPOConfig, GRPOTrainer

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.every_generate import EveryGenerate
from hf_paged_cache.trainer import PrefixCacheCallback

from ..neighbours.tiny_training import NUM_STEPS, PREAMBLE, QUESTIONS, data, settings
from ..tiny_models import build

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(tokenizer: Any, folder: Path, callbacks: list[Any]) -> Trainer:
    """A tiny model after three steps of GRPO."""
    config = GRPOConfig(**settings(folder, logging_steps=1, num_generations=4, max_completion_length=6))
    model = build("llama", max_position_embeddings=2048)
    trainer = GRPOTrainer(model=model, args=config, callbacks=callbacks, **data(tokenizer))
    trainer.train()
    return trainer


def test_a_trainer_gets_the_same_rewards_and_weights(
    every: EveryGenerate, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setattr(GenerationMixin, "generate", GenerationMixin.generate.__wrapped__)
        plain = trained(tiny_tokenizer, tmp_path, [])
    ours = trained(tiny_tokenizer, tmp_path, [PrefixCacheCallback()])
    for name, weight in plain.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[name], weight, rtol=0, atol=1e-5)
    rewards = [
        [value for entry in trainer.state.log_history for name, value in entry.items() if "reward" in name]
        for trainer in (plain, ours)
    ]
    assert rewards[0]
    assert rewards[1] == pytest.approx(rewards[0], rel=1e-4, abs=1e-4)
    (found,) = every.counts()
    assert found["num_calls"] == NUM_STEPS
    assert found["computed_tokens"] < found["prompt_tokens"] // 2  # the samples of a prompt run once
    logged = [
        entry["prefix_cache/shared_rate"] for entry in ours.state.log_history if "prefix_cache/shared_rate" in entry
    ]
    assert len(logged) == NUM_STEPS
    assert all(share > 0.5 for share in logged)


def test_the_callback_adds_nothing_without_a_cache_and_counts_what_is_new_with_one() -> None:
    model = build("llama")
    callback, logs = PrefixCacheCallback(), {"loss": 1.0}
    args: Any = (None, type("State", (), {"log_history": [dict(logs)]})(), None)
    callback.on_log(*args, logs=logs, model=model)
    assert logs == {"loss": 1.0}
    cache = PagedPrefixCache(model)
    callback, ids = PrefixCacheCallback(cache), torch.arange(1, 51)[None]
    for hit_rate in (0.0, 0.98):
        model.generate(ids, past_key_values=cache, max_new_tokens=1)
        callback.on_log(*args, logs=logs, model=model)
        assert logs["prefix_cache/hit_rate"] == args[1].log_history[-1]["prefix_cache/hit_rate"] == hit_rate


def test_a_chat_of_six_turns_is_reused_by_what_transformers_serve_generates_with(
    every: EveryGenerate, tiny_tokenizer: Any
) -> None:
    """`transformers chat` talks to such a server, and runs no model. The rest of the server needs `openai`."""
    from transformers.cli.serving.utils import GenerateManager

    model, manager = build("llama", max_position_embeddings=2048), GenerateManager()
    how, chat = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0), PREAMBLE
    for turn in range(6):
        chat += f" User: {QUESTIONS[turn]} Assistant:"
        inputs = tiny_tokenizer(chat, return_tensors="pt", return_token_type_ids=False)
        plain = model.generate(**inputs, generation_config=how, past_key_values=DynamicCache(config=model.config))
        asked = manager.generate_non_streaming(model, tiny_tokenizer, dict(inputs), how, str(turn))
        text, num_prompt, ids = asyncio.run(asked)
        assert ids.equal(plain[0, num_prompt:])
        chat += text
    (found,) = every.counts()
    assert found["num_calls"] == 6
    assert found["reused_tokens"] > 0.7 * found["prompt_tokens"]
