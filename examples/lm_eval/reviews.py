"""The reviews beside this folder, as splits of a task: twelve labelled examples, which precede each question, and the
questions.
"""

from pathlib import Path
from typing import Any

from datasets import Dataset

NUM_SHOTS = 12
PAGE = 3  # reviews


def splits(**_: Any) -> dict[str, Dataset]:
    """Reviews, each positive or negative."""
    reviews = _reviews()
    return {"shots": reviews.select(range(NUM_SHOTS)), "questions": reviews.select(range(NUM_SHOTS, len(reviews)))}


def pages(**_: Any) -> dict[str, Dataset]:
    """Pages of three reviews each, by what most of them are."""
    texts, labels = _reviews()["text"], _reviews()["label"]
    first_question = NUM_SHOTS * PAGE
    starts = {"shots": range(0, first_question, PAGE), "questions": range(first_question, len(texts) - PAGE + 1)}
    return {
        split: Dataset.from_list(
            [
                {
                    "text": " ".join(texts[start : start + PAGE]),
                    "label": "positive" if labels[start : start + PAGE].count("positive") > PAGE // 2 else "negative",
                }
                for start in of_split
            ]
        )
        for split, of_split in starts.items()
    }


def _reviews() -> Dataset:
    return Dataset.from_json(str(Path(__file__).parents[1] / "reviews.jsonl"))
