"""The process in which the tests of this folder run: it has started the simulated device, and runs one test after the other.

`python -m tests.accelerator.process` reads a line of JSON, the arguments of one run of pytest, and answers with one: its exit status and
what it printed.
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import subprocess
import sys
from pathlib import Path


class Process:
    """Started by the first test that it runs; ends with the process that started it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, *arguments: str) -> tuple[int, str]:
        """The exit status of pytest with `arguments`, and what it printed."""
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.accelerator.process"],
                cwd=Path(__file__).parents[2],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(arguments) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BaseException:  # interrupted: its answer would be the next one's
            self._process.kill()
            raise
        if not answer:
            return -1, f"the process of the simulated device has ended with {self._process.wait()}"
        status, printed = json.loads(answer)
        return status, printed


def _answer() -> None:
    import pytest

    from .backend import start

    start()
    import transformers.generation  # noqa: F401

    gc.freeze()  # tests collect often, and need not look through all that was imported
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else prints
    for line in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            status = pytest.main(json.loads(line))
        answers.write(json.dumps((int(status), printed.getvalue())) + "\n")
        answers.flush()


if __name__ == "__main__":
    _answer()
