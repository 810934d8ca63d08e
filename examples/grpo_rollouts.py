"""GRPO with TRL: under `hf-paged-cache run` the samples of a prompt are computed as one. Without it, this trains the
same.

pip install trl; hf-paged-cache run examples/grpo_rollouts.py [--model FOLDER_OR_NAME] [--steps 2]
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from hf_paged_cache.cli.demo_model import load_demo_model
from hf_paged_cache.trainer import PrefixCacheCallback

PROMPTS = ["Write a word that rhymes with light: ", "Write a word that rhymes with day: "]


def short_is_good(completions: list[str], **_: Any) -> list[float]:
    return [-float(len(completion)) for completion in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder, or a name on the hub; default: SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--samples", type=int, default=4, help="of each prompt")
    given = parser.parse_args()

    model, tokenizer = load_demo_model(given.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=given.steps,
            per_device_train_batch_size=given.samples,
            num_generations=given.samples,
            max_completion_length=8,
            logging_steps=1,
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
            callbacks=[PrefixCacheCallback()],  # optional: adds to what is logged
        )
        trainer.train()
    for entry in trainer.state.log_history[: given.steps]:
        share = entry.get("prefix_cache/shared_rate", 0.0)
        print(f"reward {entry['reward']:.1f}, {share:.0%} of the prompt tokens computed once for several samples")


if __name__ == "__main__":
    main()
