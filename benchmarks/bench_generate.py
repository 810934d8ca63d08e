"""What `generate` costs with PagedPrefixCache, against DynamicCache in the same run: `python benchmarks/bench_generate.py`.

SmolLM2-135M, fp32, greedy unless a scene says otherwise. Each repetition draws random tokens, runs `DynamicCache` and ours on them in
turn (who goes first alternates) and asserts that both gave the same tokens. What stands in the table: median over
median, and least and greatest of the ratios pair by pair. The number of new tokens is exact (`min_new_tokens`). Filling
the cache, emptying it and two warm-up repetitions are outside of all timing; the cyclic garbage collector is off while timing.

The `overhead` scene measures CPU time of the main thread (`time.thread_time`), which other processes hardly disturb. Ours is:
    bracket         `model.generate` less the class's own `generate` inside it
    hooks           the two forward hooks, `before_forward` and `after_forward`, whole
    update          all `PagedLayer.update` less all `DynamicLayer.update` of the `DynamicCache` call beside it
over the CPU time of the whole call; for a decode step hooks and update, over the time from one forward to the next.
These functions are wrapped from here while the scene runs. Not counted, being too small to wrap without changing them:
`get_seq_length` and `get_mask_sizes`, torch's dispatch of the hooks, and the work of threads other than the main one.

Exit status: 1 if a bar does not hold or tokens differ.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import tables
import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor
from transformers.cache_utils import DynamicLayer

from hf_paged_cache import PagedPrefixCache, hooks
from hf_paged_cache.demo_model import DEMO_MODEL, load_demo_model
from hf_paged_cache.layer import PagedLayer

QUESTION_TOKENS = 16
NEW_TOKENS = 8
WARMUPS = 2


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        value: ratio of medians, or share; compared with the bar.
        kind: "ratio" or "share", for how it is printed.
        spread: of the same, repetition by repetition.
        baseline, ours: in `unit`.
        hit_rate: share of the prompt tokens that our last call did not compute.
        details: further numbers, not in the table.
    """

    what: str
    value: float
    kind: str
    spread: harness.Timing
    unit: str
    baseline: harness.Timing
    ours: harness.Timing
    hit_rate: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    details: dict[str, Any] | None = None

    @property
    def holds(self) -> bool | None:
        """None without a bar."""
        if self.at_least is not None:
            return self.value >= self.at_least
        return None if self.at_most is None else self.value <= self.at_most


class Bench:
    """A model, a stream of random tokens that no two draws share, and `generate` with all that the scenes have in common."""

    def __init__(self, model: Any, num_shared: int) -> None:
        self.model = model
        self.num_shared = num_shared
        self._vocabulary = model.config.get_text_config().vocab_size
        self._random = torch.Generator().manual_seed(0)

    def tokens(self, num_rows: int, num_tokens: int) -> Tensor:
        """Random ids, [num_rows, num_tokens]; the first 100 of the vocabulary are often special and left out."""
        return torch.randint(100, self._vocabulary, (num_rows, num_tokens), generator=self._random)

    def behind(self, prefix: Tensor, num_rows: int) -> Tensor:
        """`prefix` (of one row, or of as many as asked for), and a fresh question behind it in each row."""
        return torch.cat((prefix.expand(num_rows, -1), self.tokens(num_rows, QUESTION_TOKENS)), dim=1)

    def generate(self, ids: Tensor, *, new_tokens: int = 1, do_sample: bool = False, **options: Any) -> Tensor:
        """Exactly `new_tokens` tokens; greedy, or sampled from the same seed each time."""
        torch.manual_seed(0)
        return self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=do_sample,
            **options,
        )


@dataclass(frozen=True)
class Pair:
    """The same call twice, ready to run: both return all tokens."""

    baseline: Callable[[], Tensor]
    ours: Callable[[], Tensor]
    cache: PagedPrefixCache


Preparation = Callable[[], Pair]  # draws the inputs of one repetition; what it does itself is not timed


def both(bench: Bench, cache: PagedPrefixCache, ids: Tensor, **options: Any) -> Pair:
    """`generate` with its default cache, and with ours."""
    return Pair(
        lambda: bench.generate(ids, **options), lambda: bench.generate(ids, past_key_values=cache, **options), cache
    )


def warm(bench: Bench) -> Preparation:
    """the shared tokens are known, 16 question tokens are new; 1 new token"""
    shared, cache = bench.tokens(1, bench.num_shared), PagedPrefixCache(bench.model)
    bench.generate(shared, past_key_values=cache)
    return lambda: both(bench, cache, bench.behind(shared, 1))


def recipe(bench: Bench) -> Preparation:
    """as warm, against copy.deepcopy of a DynamicCache that holds the shared tokens; the copy is timed"""
    shared, cache = bench.tokens(1, bench.num_shared), PagedPrefixCache(bench.model)
    bench.generate(shared, past_key_values=cache)
    prefilled = DynamicCache(config=bench.model.config)
    with torch.no_grad():
        bench.model(shared, past_key_values=prefilled, logits_to_keep=1)

    def prepare() -> Pair:
        ids = bench.behind(shared, 1)
        return Pair(
            lambda: bench.generate(ids, past_key_values=copy.deepcopy(prefilled)),
            lambda: bench.generate(ids, past_key_values=cache),
            cache,
        )

    return prepare


def nohit(bench: Bench) -> Preparation:
    """a prompt of fresh random tokens every time; 8 new tokens"""
    cache = PagedPrefixCache(bench.model)
    return lambda: both(bench, cache, bench.tokens(1, bench.num_shared), new_tokens=NEW_TOKENS)


def batch_warm(bench: Bench) -> Preparation:
    """4 rows, each the known shared tokens and 16 question tokens of its own; 1 new token"""
    shared, cache = bench.tokens(1, bench.num_shared), PagedPrefixCache(bench.model)
    bench.generate(shared, past_key_values=cache)
    return lambda: both(bench, cache, bench.behind(shared, 4))


def beam_warm(bench: Bench) -> Preparation:
    """3 beams of 2 rows whose prompts are known; 8 new tokens"""
    prefixes, cache = bench.tokens(2, bench.num_shared), PagedPrefixCache(bench.model)

    def prepare() -> Pair:
        ids = bench.behind(prefixes, 2)
        for row in ids.split(1):  # one by one, so that no rows of the call before can be taken over as they are
            bench.generate(row, past_key_values=cache)
        return both(bench, cache, ids, new_tokens=NEW_TOKENS, num_beams=3)

    return prepare


def beam_cold(bench: Bench) -> Preparation:
    """4 beams on an empty cache; 8 new tokens"""
    return _on_an_empty_cache(bench, new_tokens=NEW_TOKENS, num_beams=4)


def nsample_cold(bench: Bench) -> Preparation:
    """8 samples on an empty cache; 1 new token each"""
    return _on_an_empty_cache(bench, do_sample=True, num_return_sequences=8)


def _on_an_empty_cache(bench: Bench, **options: Any) -> Preparation:
    cache = PagedPrefixCache(bench.model)

    def prepare() -> Pair:
        cache.reset()
        cache.reset_prefix_cache()
        return both(bench, cache, bench.tokens(1, bench.num_shared), **options)

    return prepare


@dataclass(frozen=True)
class TimedScene:
    """A ratio of wall clock times that must be at least `at_least`."""

    make: Callable[[Bench], Preparation]
    at_least: float
    repeat: int

    def run(self, name: str, bench: Bench, repeat: int) -> dict[str, Result]:
        prepare = self.make(bench)
        baseline, ours, hit_rate = [], [], 0.0
        for number in range(WARMUPS + repeat):
            pair = prepare()
            seconds = run_pair(pair, number, harness.timed)
            hit_rate = pair.cache.last_call.hit_rate
            if number >= WARMUPS:
                baseline.append(seconds[0])
                ours.append(seconds[1])
        result = Result(
            what=self.make.__doc__ or "",
            value=statistics.median(baseline) / statistics.median(ours),
            kind="ratio",
            spread=harness.Timing.of([theirs / mine for theirs, mine in zip(baseline, ours, strict=True)]),
            unit="s",
            baseline=harness.Timing.of(baseline),
            ours=harness.Timing.of(ours),
            hit_rate=hit_rate,
            at_least=self.at_least,
        )
        return {name: result}


def run_pair(pair: Pair, number: int, measure: Callable[[Callable[[], None]], Any]) -> list[Any]:
    """What `measure` says of the baseline's call and of ours, run in an order that turns with `number`.

    Raises:
        AssertionError: the tokens differ.
    """
    tokens: list[Tensor | None] = [None, None]
    measured: list[Any] = [None, None]

    def call(which: int) -> None:
        tokens[which] = (pair.baseline, pair.ours)[which]()

    for which in (number % 2, 1 - number % 2):
        measured[which] = measure(functools.partial(call, which))
    assert_same_tokens(*tokens)
    return measured


def assert_same_tokens(expected: Tensor | None, got: Tensor | None) -> None:
    assert expected is not None
    assert got is not None
    assert torch.equal(expected, got), f"other tokens than with DynamicCache: {got.tolist()} for {expected.tolist()}"


class KeyValueBytes(LogitsProcessor):
    """Changes no score; counts after each forward what a DynamicCache's tensors take."""

    def __init__(self, cache: DynamicCache) -> None:
        self.cache = cache
        self.peak = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        layers = self.cache.layers
        self.peak = max(self.peak, sum(layer.keys.nbytes + layer.values.nbytes for layer in layers))
        return scores


@dataclass(frozen=True)
class MemoryScene:
    """8 beams, view=False, a prompt of twice --shared tokens, 64 new tokens: peak K/V bytes. Run once: it is no time."""

    at_most: float
    repeat: int = 1

    def run(self, name: str, bench: Bench, repeat: int) -> dict[str, Result]:
        ids, options = bench.tokens(1, 2 * bench.num_shared), {"new_tokens": 64, "num_beams": 8}
        theirs = DynamicCache(config=bench.model.config)
        counted = KeyValueBytes(theirs)
        started = time.perf_counter()
        expected = bench.generate(ids, past_key_values=theirs, logits_processor=[counted], **options)
        seconds = [time.perf_counter() - started]
        del theirs, counted.cache
        cache = PagedPrefixCache(bench.model, view=False)
        started = time.perf_counter()
        got = bench.generate(ids, past_key_values=cache, **options)
        seconds.append(time.perf_counter() - started)
        assert_same_tokens(expected, got)
        peak, num_copies = cache.last_call.peak_kv_bytes, cache.stats().num_copies_on_write
        assert num_copies > 0, "no block was copied on write, so nothing of what beams cost was counted"
        result = Result(
            what=(self.__doc__ or "").partition(":")[0],
            value=peak / counted.peak,
            kind="ratio",
            spread=harness.Timing.of([peak / counted.peak]),
            unit="bytes",
            baseline=harness.Timing.of([counted.peak]),
            ours=harness.Timing.of([peak]),
            hit_rate=cache.last_call.hit_rate,
            at_most=self.at_most,
            details={"copies_on_write": num_copies, "seconds_baseline": seconds[0], "seconds_ours": seconds[1]},
        )
        return {name: result}


class Meter:
    """CPU seconds of the calling thread by part, forward by forward; what comes before the first forward is number 0."""

    def __init__(self) -> None:
        self.forwards: list[Counter[str]] = [Counter()]

    def timing(self, part: str, function: Callable[..., Any], *, starts_forward: bool = False) -> Callable[..., Any]:
        """`function`, its time added to `part`. Keeps its name and module, by which our hooks know their own kind."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            if starts_forward:
                self.forwards.append(Counter(started=start))
            try:
                return function(*args, **kwargs)
            finally:
                self.forwards[-1][part] += time.thread_time() - start

        return timed

    def total(self, part: str) -> float:
        return sum(forward[part] for forward in self.forwards)

    def measure(self, call: Callable[[], None]) -> CallCost:
        """Run a call of `generate`, and say what its parts took."""
        self.forwards = [Counter()]
        with harness.garbage_collection(False):
            start = time.thread_time()
            call()
            whole = time.thread_time() - start
        steps = [
            StepCost(after["started"] - step["started"], step["hooks"], step["update"])
            for step, after in zip(self.forwards[2:-1], self.forwards[3:], strict=True)
        ]
        return CallCost(whole, whole - self.total("generate"), self.total("hooks"), self.total("update"), steps)


@dataclass(frozen=True)
class StepCost:
    """CPU seconds of one decode step."""

    whole: float
    hooks: float
    update: float


@dataclass(frozen=True)
class CallCost:
    """CPU seconds of one call; its decode steps but the last, whose end cannot be seen."""

    whole: float
    bracket: float
    hooks: float
    update: float
    steps: Sequence[StepCost]


@contextlib.contextmanager
def metered(model: Any) -> Iterator[Meter]:
    """Wrap what belongs to us, and `DynamicLayer.update`; caches made inside are measured. All is put back."""
    meter = Meter()
    hooks.detach(model)
    with contextlib.ExitStack() as stack:
        stack.callback(hooks.detach, model)
        for owner, name, part in (
            (hooks, "before_forward", "hooks"),
            (hooks, "after_forward", "hooks"),
            (PagedLayer, "update", "update"),
            (DynamicLayer, "update", "update"),
            (type(model), "generate", "generate"),
        ):
            wrapped = meter.timing(part, getattr(owner, name), starts_forward=name == "before_forward")
            stack.enter_context(mock.patch.object(owner, name, wrapped))
        yield meter


@dataclass(frozen=True)
class OverheadScene:
    """CPU time of our own lines over that of the main thread, where nothing can be reused."""

    at_most: float
    repeat: int

    def run(self, name: str, bench: Bench, repeat: int) -> dict[str, Result]:
        with metered(bench.model) as meter:
            prepare = nohit(bench)
            pairs = [run_pair(prepare(), number, meter.measure) for number in range(WARMUPS + repeat)][WARMUPS:]
            del prepare
        steps = [step for theirs, ours in pairs for step in zip(theirs.steps, ours.steps, strict=True)]
        return {
            f"{name}: {nohit.__name__}": _share_of_own(
                "the whole call: bracket, hooks, update less DynamicCache's",
                [(theirs.whole, ours.whole) for theirs, ours in pairs],
                [ours.bracket + ours.hooks + ours.update - theirs.update for theirs, ours in pairs],
                at_most=self.at_most,
                details={
                    "bracket": harness.Timing.of([ours.bracket for _, ours in pairs]),
                    "hooks": harness.Timing.of([ours.hooks for _, ours in pairs]),
                    "update": harness.Timing.of([ours.update for _, ours in pairs]),
                    "dynamic_cache_update": harness.Timing.of([theirs.update for theirs, _ in pairs]),
                },
            ),
            f"{name}: decode step": _share_of_own(
                "a decode step: hooks, update less DynamicCache's",
                [(theirs.whole, ours.whole) for theirs, ours in steps],
                [ours.hooks + ours.update - theirs.update for theirs, ours in steps],
                details={
                    "hooks": harness.Timing.of([ours.hooks for _, ours in steps]),
                    "update": harness.Timing.of([ours.update for _, ours in steps]),
                    "dynamic_cache_update": harness.Timing.of([theirs.update for theirs, _ in steps]),
                },
            ),
        }


def _share_of_own(
    what: str,
    whole: Sequence[tuple[float, float]],
    own: Sequence[float],
    *,
    details: dict[str, Any],
    at_most: float | None = None,
) -> Result:
    shares = [seconds / ours for seconds, (_, ours) in zip(own, whole, strict=True)]
    spread = harness.Timing.of(shares)
    return Result(
        what=what,
        value=spread.median,
        kind="share",
        spread=spread,
        unit="CPU s",
        baseline=harness.Timing.of([theirs for theirs, _ in whole]),
        ours=harness.Timing.of([ours for _, ours in whole]),
        hit_rate=None,
        at_most=at_most,
        details=details,
    )


SCENES: dict[str, TimedScene | MemoryScene | OverheadScene] = {
    "warm": TimedScene(warm, at_least=12, repeat=9),
    "recipe": TimedScene(recipe, at_least=0.97, repeat=31),
    "nohit": TimedScene(nohit, at_least=0.97, repeat=11),
    "batch_warm": TimedScene(batch_warm, at_least=14, repeat=5),
    "beam_warm": TimedScene(beam_warm, at_least=9, repeat=5),
    "beam_cold": TimedScene(beam_cold, at_least=2.5, repeat=5),
    "nsample_cold": TimedScene(nsample_cold, at_least=6, repeat=5),
    "memory": MemoryScene(at_most=0.25),
    "overhead": OverheadScene(at_most=0.02, repeat=9),
}


def run_scene(name: str, bench: Bench, repeat: int | None) -> dict[str, dict[str, Any]]:
    """The lines of one scene, as they go into the JSON. Tokens that differ are a result, too, and end only the scene."""
    scene = SCENES[name]
    try:
        results = scene.run(name, bench, scene.repeat if repeat is None else repeat)
    except AssertionError as error:
        bar = {"at_least": getattr(scene, "at_least", None), "at_most": getattr(scene, "at_most", None)}
        kind = "share" if isinstance(scene, OverheadScene) else "ratio"
        return {name: {"failure": str(error), "kind": kind, "holds": False, **bar}}
    return {line: {**asdict(result), "holds": result.holds} for line, result in results.items()}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scenes", default=",".join(SCENES), help="names with commas between; default: %(default)s")
    parser.add_argument("--repeat", type=int, help="repetitions of each scene; default: as many as it needs, 5 to 31")
    parser.add_argument("--shared", type=int, default=1024, help="tokens of a prompt's shared part; default: 1024")
    parser.add_argument("--model", help="a folder or a name on the hub; default: SmolLM2-135M-Instruct")
    parser.add_argument("--json", type=Path, help="where to write; default: results/generate.json, if all scenes ran")
    parser.add_argument("--no-json", action="store_true", help="write nothing")
    options = parser.parse_args()
    options.scenes = [name.strip() for name in options.scenes.split(",")]
    unknown = [name for name in options.scenes if name not in SCENES]
    if unknown:
        parser.error(f"no such scene: {', '.join(unknown)}; there are {', '.join(SCENES)}")
    if (options.repeat is not None and options.repeat < 1) or options.shared < 1:
        parser.error("--repeat and --shared must be at least 1")
    if options.json and options.no_json:
        parser.error("give --json or --no-json, not both")
    return options


def main() -> int:
    options = parse_options()
    model, _ = load_demo_model(options.model, dtype=torch.float32)
    bench = Bench(model, options.shared)
    load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    scenes: dict[str, dict[str, Any]] = {}
    for name in options.scenes:
        print(f"{name} ...", file=sys.stderr, flush=True)
        scenes |= run_scene(name, bench, options.repeat)
    results = {
        "conditions": {
            "model": Path(options.model or DEMO_MODEL).name,  # its last part: a folder's path is nobody's business
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": model.device.type,
            "threads": torch.get_num_threads(),
            "shared_tokens": options.shared,
            "load_average_before": None if load_before is None else round(load_before, 2),
        },
        "scenes": scenes,
    }
    stamped = {"date": time.strftime("%Y-%m-%d"), "commit": harness.commit(), "machine": harness.machine(), **results}
    print(tables.generate_table(stamped))
    if options.json or (set(options.scenes) == set(SCENES) and not options.no_json):
        harness.write_results("generate", results, options.json)
    return int(any(scene["holds"] is False for scene in scenes.values()))


if __name__ == "__main__":
    sys.exit(main())
