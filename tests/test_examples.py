"""Examples run, with a model small enough for a test."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from .reference import row
from .tiny_models import tiny

EXAMPLE = Path(__file__).parents[1] / "examples" / "save_and_load.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("save_and_load", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_one_run_saves_the_next_one_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, shots, question = tiny("llama"), row((1, 96)), row((2, 7))
    first = example().answer(model, tmp_path / "saved", shots, question)
    assert "computed 96 tokens, saved 6 blocks" in capsys.readouterr().out
    assert example().answer(model, tmp_path / "saved", shots, question) == first
    told = capsys.readouterr().out
    assert "loaded 6 blocks" in told
    assert "computed" not in told
    assert "96 of 103 prompt tokens were known" in told
