"""TRL's log and transformers' server, where each `generate` has a cache.

The trainer itself runs in `test_examples.py`.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.every_generate import EveryGenerate
from hf_paged_cache.trainer import PrefixCacheCallback

from ..neighbours.tiny_training import PREAMBLE, QUESTIONS
from ..tiny_models import build


def test_the_callback_counts_what_is_new_since_the_last_log(every: EveryGenerate) -> None:
    model, ids = build("llama"), torch.arange(1, 51)[None]
    cache = PagedPrefixCache(build("llama"))
    for callback, cached, call, hit_rates in (
        (PrefixCacheCallback(), model, {}, (0.0, 0.96)),
        (PrefixCacheCallback(cache), cache.store.model, {"past_key_values": cache}, (0.0, 0.98)),
    ):
        logs = {"loss": 1.0}
        args: Any = (None, SimpleNamespace(log_history=[dict(logs)]), None)
        callback.on_log(*args, logs=logs, model=model)
        assert logs == {"loss": 1.0}  # nothing has run
        for hit_rate in hit_rates:
            cached.generate(ids, **call, max_new_tokens=1)
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
