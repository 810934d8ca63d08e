"""Programs run in processes of their own, with and without `hf-paged-cache run`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

PROGRAMS = Path(__file__).parent / "scripts"
COMMAND = (sys.executable, "-c", "from hf_paged_cache.cli import main; main()", "run")


class Ran(NamedTuple):
    exit_code: int
    stdout: bytes
    stderr: str
    models: list[dict[str, Any]]


def run_program(arguments: list[str], *, stats: Path | None = None, options: tuple[str, ...] = ()) -> Ran:
    """Run one; with `stats` under the command."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable] if stats is None else [*COMMAND, "--stats", str(stats), *options]
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, timeout=600, check=False)
    models = [] if stats is None or not stats.exists() else json.loads(stats.read_text("utf-8"))["models"]
    return Ran(done.returncode, done.stdout, done.stderr.decode(), models)
