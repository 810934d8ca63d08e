"""A batch job that is killed at random moments and started again: the same output file, each prompt once.

Run it with `python -m tests.killed_jobs --times 20 --seed 0`, which kills the command itself, on the demo's model or another
one; the suite kills forked processes that run `generate_all` on a tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

Start = Callable[[Path], int]  # begins the job with this output in a process of its own; returns its id


def few_shot_prompts(num_tasks: int, num_prompts: int, num_shots: int, seed: int = 0) -> list[str]:
    """Prompts of several tasks in random order, each task with shots of its own."""
    random_ = random.Random(seed)
    words = [
        "red",
        "blue",
        "green",
        "one",
        "two",
        "six",
        "sun",
        "moon",
        "star",
        "tree",
        "leaf",
        "root",
        "bird",
        "fish",
        "cat",
    ]
    heads = [
        f"Task {task}.\n"
        + "".join(f"Q: {' '.join(random_.choices(words, k=4))}\nA: {random_.choice(words)}\n" for _ in range(num_shots))
        for task in range(num_tasks)
    ]
    prompts = [
        f"{heads[number % num_tasks]}Q: {' '.join(random_.choices(words, k=random_.randint(2, 8)))}\nA:"
        for number in range(num_prompts)
    ]
    random_.shuffle(prompts)
    return prompts


def done_rows(out: Path) -> list[int]:
    """Rows of all whole lines of the journal."""
    journal = out.with_name(f"{out.name}.journal")
    if not journal.exists():
        return []
    lines = journal.read_bytes().split(b"\n")[1:-1]
    return [row for line in lines for row in json.loads(line)["rows"]]


def exit_status(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill_again_and_again(start: Start, folder: Path, *, times: int, seed: int, longest: float) -> int:
    """Kill the job `times` times, each after at most `longest` seconds, and let it end; returns how often it ended.

    Raises:
        AssertionError: an output is not that of a job that nobody killed, or a row is done twice.
    """
    random_, whole = random.Random(seed), folder / "whole.jsonl"
    assert exit_status(start(whole)) == 0
    wanted = whole.read_bytes()
    num_killed = num_ended = 0
    while num_killed < times or num_ended == 0:
        out = folder / f"killed-{num_ended}.jsonl"
        process = start(out)
        if num_killed < times:
            time.sleep(random_.uniform(0, longest))
            os.kill(process, signal.SIGKILL)
        status = exit_status(process)
        rows = done_rows(out)
        assert len(rows) == len({*rows}), f"kill {num_killed}: rows are done twice"
        if status == -signal.SIGKILL and (rows or not out.exists() or out.read_bytes() != wanted):
            num_killed += 1
            continue
        assert status in (0, -signal.SIGKILL), f"kill {num_killed}: the job ended with {status}"
        assert out.read_bytes() == wanted, f"kill {num_killed}: another output"
        num_ended += 1
    return num_ended


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=120)
    parser.add_argument("--longest", type=float, default=30.0, help="seconds until a kill, at most")
    parser.add_argument("--model", default=None, help="a folder or a name; default: the demo's")
    parser.add_argument("options", nargs="*", help="further options of the command, after --")
    given = parser.parse_args()
    model = given.model
    if model is None:
        from hf_paged_cache.cli import demo_model

        model = str(demo_model._find_demo_model(progress=False))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = folder / "prompts.jsonl"
        lines = [json.dumps({"id": n, "prompt": text}) for n, text in enumerate(few_shot_prompts(3, given.prompts, 12))]
        prompts.write_text("\n".join(lines), encoding="utf-8")

        def start(out: Path) -> int:
            command = [sys.executable, "-m", "hf_paged_cache", "generate", str(prompts), "--model", model, "--out", str(out), "--max-new-tokens", "8", *given.options]  # fmt: skip
            return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid

        num_ended = kill_again_and_again(start, folder, times=given.times, seed=given.seed, longest=given.longest)
        print(f"killed {given.times} times; {num_ended} jobs came to their end, all with the same output of {len(lines)} rows")  # noqa: T201  # fmt: skip


if __name__ == "__main__":
    main()
