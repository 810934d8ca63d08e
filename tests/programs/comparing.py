"""Programs of others, run with and without `hf-paged-cache run`: what they print must not differ by a byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

PROGRAMS = Path(__file__).parent / "scripts"
EXIT_CODES = {"exits": 3, "raises": 1}  # of all others: 0
NAMES = sorted(path.stem for path in PROGRAMS.glob("*.py") if path.stem != "shared")
# with --cpu accelerate starts one process, however many are asked for
LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
LAUNCH += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
COMMAND = (sys.executable, "-c", "from hf_paged_cache.cli import main; main()", "run")


class Ran(NamedTuple):
    exit_code: int
    stdout: bytes
    stderr: str
    models: list[dict[str, Any]]  # of all processes


def save_model(folder: Path) -> Path:
    """A tiny model and its tokenizer."""
    from ..tiny_models import CHARACTERS, build, character_tokenizer

    build("llama", max_position_embeddings=2048).save_pretrained(folder)
    character_tokenizer(CHARACTERS).save_pretrained(folder)
    return folder


def run_program(arguments: list[str], *, stats: Path | None = None, options: tuple[str, ...] = ()) -> Ran:
    """Run one; with `stats` under the command."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable] if stats is None else [*COMMAND, "--stats", str(stats), *options]
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, timeout=600, check=False)
    lines = [] if stats is None or not stats.exists() else stats.read_text("utf-8").splitlines()
    models = [model for line in lines for model in json.loads(line)["models"]]
    return Ran(done.returncode, done.stdout, done.stderr.decode(), models)


def compared(name: str, folder: Path, stats: Path) -> tuple[Ran, Ran]:
    """A program without and with the command."""
    arguments = [*(LAUNCH if name == "launched" else ()), str(PROGRAMS / f"{name}.py"), str(folder)]
    return run_program(arguments), run_program(arguments, stats=stats)
