"""A few-shot prompt is computed once, and warm in the first call of every later run: python examples/save_and_load.py, twice.

The first run computes the prompt and saves it. Each later one loads it, and computes the question alone.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache


def answer(model: PreTrainedModel, folder: Path, shots: list[int], question: list[int]) -> list[int]:
    """Ask one question behind the shots, which are loaded if they were saved, and else computed and saved."""
    cache = PagedPrefixCache(model)
    if folder.is_dir():
        loaded = cache.store.load(folder)
        print(f"loaded {loaded.num_blocks} blocks")
        for why in loaded.not_loaded:
            print(f"not loaded: {why}")
    if cache.lookup(shots).num_blocks < len(shots) // cache.store.blocks.block_size:
        cache.prefill(shots)
        print(f"computed {len(shots)} tokens, saved {cache.store.save(folder, [shots]).num_blocks} blocks")
    inputs: dict[str, Any] = {"input_ids": torch.tensor([shots + question])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    start = time.perf_counter()
    output = model.generate(**inputs, past_key_values=cache, max_new_tokens=16, do_sample=False)
    reused, prompt = cache.last_call.reused_tokens, cache.last_call.prompt_tokens
    print(f"answered in {time.perf_counter() - start:.2f} s; {reused} of {prompt} prompt tokens were known")
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def main() -> None:
    from hf_paged_cache.cli.demo_model import load_demo_model
    from hf_paged_cache.cli.questions import QUESTIONS, SHOTS, ask, few_shot_prompt

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("saved-prompts"))
    folder = parser.parse_args().folder
    model, tokenizer = load_demo_model()
    shots = tokenizer(few_shot_prompt(len(SHOTS)))["input_ids"]
    question = tokenizer(ask(QUESTIONS[0]), add_special_tokens=False)["input_ids"]
    print(tokenizer.decode(answer(model, folder, shots, question)))


if __name__ == "__main__":
    main()
