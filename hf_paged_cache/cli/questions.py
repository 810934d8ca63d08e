"""Lays out the demo's questions, and the solved examples before every question, as text; both are in questions.json."""

from __future__ import annotations

import json
from pathlib import Path

_DATA = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))

SHOTS: list[tuple[str, str]] = [(question, answer) for question, answer in _DATA["shots"]]  # about 1,000 tokens
QUESTIONS: list[str] = _DATA["questions"]


def few_shot_prompt(num_shots: int) -> str:
    """Return the instruction and the first `num_shots` solved examples, which all questions share."""
    return "Answer each question in one short sentence.\n" + "".join(f"{ask(q)} {a}\n" for q, a in SHOTS[:num_shots])


def ask(question: str) -> str:
    """Return the text of one question after the shared part; the model continues after `Answer:`."""
    return f"Question: {question}\nAnswer:"
