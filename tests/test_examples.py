"""The examples run as they stand, on a tiny model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hf_paged_cache

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="the examples are not beside the tests")


@pytest.fixture
def model_folder(tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any) -> str:
    folder = tmp_path / "model"
    tiny_llama.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


def run_example(name: str, *arguments: str) -> list[str]:
    """What it prints, line by line."""
    environment = {**os.environ, "PYTHONPATH": str(Path(hf_paged_cache.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_save_and_load_computes_in_its_first_run_alone(model_folder: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    runs = [run_example("save_and_load.py", folder, "--model", model_folder) for _ in range(2)]
    computed, answer = runs[0][0], runs[0][-1]
    assert " 0 known" in computed
    assert runs[1][0].startswith("loaded ")
    assert runs[1][0].endswith("not loaded: none")
    assert runs[1][1].endswith(" 0 computed")
    assert runs[1][2].startswith("saved 0 new blocks")
    assert runs[1][-1].split()[0] == answer.split()[0]
