"""Some seconds of `benchmarks/soak`, in a process of its own; half an hour is a command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

if not (ROOT / "benchmarks").exists():
    pytest.skip("the benchmarks are not beside the tests", allow_module_level=True)


def test_a_short_soak_loses_no_block_and_gives_no_wrong_result(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0.25", "--seed", "0", "--shrink", "60"]
    run = subprocess.run([*command, "--json", str(path)], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, f"{run.stdout[-8000:]}\n{run.stderr[-8000:]}"
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["problems"] == []
    assert report["counts"]["calls"] > 30
    assert report["num_faults"] > 5
    assert report["faults"]["interrupt"] > 0
    assert report["counts"]["times at rest"] > 0
