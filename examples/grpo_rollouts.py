"""GRPO with TRL: the samples of a prompt share its blocks, and after each optimizer step nothing of before is found.

pip install trl; python examples/grpo_rollouts.py [--model FOLDER_OR_NAME] [--steps 2]
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.cli.demo_model import load_or_exit

PROMPTS = ["Write a word that rhymes with light: ", "Write a word that rhymes with day: "]


def short_is_good(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(completion)) for completion in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder, or a name on the hub; default: SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--samples", type=int, default=4, help="of each prompt")
    given = parser.parse_args()

    model, tokenizer = load_or_exit(given.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=given.steps,
            per_device_train_batch_size=given.samples,
            num_generations=given.samples,
            max_completion_length=8,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=model.device.type == "cpu",
        )
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=short_is_good,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS * given.steps]),
        )
        with PagedPrefixCache(trainer.model) as cache:
            trainer.train()
            stats = cache.stats()
    print(f"{stats.num_calls} calls: computed {stats.computed_tokens} of {stats.prompt_tokens} prompt tokens")


if __name__ == "__main__":
    main()
