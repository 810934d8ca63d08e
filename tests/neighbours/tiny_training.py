"""What TRL's trainers train on here: questions that begin alike, a reward, and the settings of three quick steps."""

from pathlib import Path
from typing import Any

from datasets import Dataset

PREAMBLE = "A long preamble that all of the questions share, word by word. "
QUESTIONS = ("Who?", "What?", "When?", "Where?", "Whose?", "Which?", "Why?", "Since when?")
NUM_STEPS = 3


def variety(completions: list[str], **_: Any) -> list[float]:
    """The reward: how many different characters a completion has."""
    return [float(len(set(completion))) for completion in completions]


def data(tokenizer: Any) -> dict[str, Any]:
    """Arguments of a trainer."""
    prompts = Dataset.from_dict({"prompt": [PREAMBLE + question for question in QUESTIONS]})
    return {"reward_funcs": variety, "train_dataset": prompts, "processing_class": tokenizer}


def settings(folder: Path, **others: Any) -> dict[str, Any]:
    """Arguments of a trainer's config."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "max_steps": NUM_STEPS,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 5,
        **others,
    }
