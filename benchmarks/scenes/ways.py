"""Ways to make the same tokens, run in turn round after round, and what is made of their times.

A round draws its inputs, runs every way on them in an order that turns, and asserts that all gave the same tokens.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import Timing
from torch import Tensor
from transformers import Cache, DynamicCache

from hf_paged_cache import CacheStats, CallStats, PagedPrefixCache

from .clock import StepMarks
from .line import BASELINE, OURS, Line
from .workbench import Bench


@dataclass
class Way:
    """One way to make tokens.

    Attributes:
        run: what is timed; takes further arguments of `generate`, and returns all tokens.
        cache: what it ran on, for its peak bytes; asked after `run`.
        afterwards: not timed.
    """

    run: Callable[..., Tensor]
    cache: Callable[[], Cache]
    afterwards: Callable[[], None] = lambda: None


def from_scratch(bench: Bench, ids: Tensor, **given: Any) -> Way:
    """`generate` on a new DynamicCache, which is what it uses by itself."""
    made: list[DynamicCache] = []

    def run(**options: Any) -> Tensor:
        made.append(DynamicCache(config=bench.model.config))
        return bench.generate(ids, past_key_values=made[-1], **given, **options)

    return Way(run, lambda: made[-1], made.clear)


def on_ours(bench: Bench, cache: PagedPrefixCache, ids: Tensor, **given: Any) -> Way:
    """`generate` on our cache."""
    return Way(lambda **options: bench.generate(ids, past_key_values=cache, **given, **options), lambda: cache)


def on_ready(bench: Bench, ready: DynamicCache, ids: Tensor, **given: Any) -> Way:
    """`generate` on a cache that holds the prefix already, not copied; what was added is cropped off afterwards."""
    held = ready.get_seq_length()

    def crop() -> None:
        ready.crop(held - ready.get_seq_length())

    return Way(lambda **options: bench.generate(ids, past_key_values=ready, **given, **options), lambda: ready, crop)


def on_a_copy(bench: Bench, ready: DynamicCache, ids: Tensor, **given: Any) -> Way:
    """The recipe of transformers' documentation: `generate` on a deep copy; the copy is timed."""
    made: list[DynamicCache] = []

    def run(**options: Any) -> Tensor:
        made.append(copy.deepcopy(ready))
        return bench.generate(ids, past_key_values=made[-1], **given, **options)

    return Way(run, lambda: made[-1], made.clear)


def by_hand(bench: Bench, prefix: Tensor, num_rows: int, ids: Tensor, **given: Any) -> Way:
    """Prefill `prefix`, [1, T], once, repeat it for all rows and call `generate` on it: the floor of what shares it."""
    made: list[DynamicCache] = []

    def run(**options: Any) -> Tensor:
        made.append(DynamicCache(config=bench.model.config))
        bench.prefill(prefix, made[-1])
        made[-1].batch_repeat_interleave(num_rows)
        return bench.generate(ids, past_key_values=made[-1], **given, **options)

    return Way(run, lambda: made[-1], made.clear)


def kv_bytes(cache: Cache) -> int:
    """Peak bytes of keys and values of the call that just ran; a DynamicCache only grows. States are not counted."""
    if isinstance(cache, PagedPrefixCache):
        return cache.last_call.peak_kv_bytes
    held = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in held if tensor is not None)


def share_not_computed(stats: CacheStats | CallStats) -> float:
    """Of the prompt tokens: what was reused, and what other rows of the same calls have computed."""
    return 1 - stats.computed_tokens / max(1, stats.prompt_tokens)


@dataclass
class Measured:
    """What the rounds of one comparison gave.

    Attributes:
        rounds: of each round, name -> seconds of the call, or of each of its steps.
        kv_bytes: name -> the most bytes.
        num_same: rounds in which all ways gave the same tokens; all of them in fp32.
        hit_rate: share of the prompt tokens that our last call did not compute.
    """

    rounds: list[dict[str, list[float]]] = field(default_factory=list)
    kv_bytes: dict[str, int] = field(default_factory=dict)
    num_same: int = 0
    hit_rate: float | None = None

    def seconds(self, name: str) -> list[float]:
        """Of one way, over all rounds that ran it."""
        return [second for of in self.rounds for second in of.get(name, ())]

    def timings(self) -> dict[str, Timing]:
        """name -> Timing."""
        names = dict.fromkeys(name for of in self.rounds for name in of)
        return {name: Timing.of(self.seconds(name)) for name in names}

    def line(self, what: str, *, subject: str = OURS, against: str = BASELINE, **given: Any) -> Line:
        """How many times as fast `subject` is as `against`: their medians over the rounds that ran both."""
        timings = self.timings()
        both = Measured([of for of in self.rounds if subject in of and against in of])
        mine, theirs = both.seconds(subject), both.seconds(against)
        details = {} if self.num_same == len(self.rounds) else {"rounds_with_the_same_tokens": self.num_same}
        return Line(
            what=what,
            value=statistics.median(theirs) / statistics.median(mine),
            kind="ratio",
            spread=Timing.of([one / other for one, other in zip(theirs, mine, strict=True)]),
            ways=timings,
            subject=subject,
            against=against,
            hit_rate=self.hit_rate,
            kv_bytes=self.kv_bytes,
            **{**given, "details": {**details, **given.get("details", {})}},
        )


def run_round(
    bench: Bench, ways: Mapping[str, Way], order: Sequence[str], into: Measured, measure: Callable[[Way], Any]
) -> tuple[dict[str, Any], Tensor]:
    """What `measure` says of each way in `order`, and their tokens.

    Raises:
        AssertionError: the tokens differ, in fp32.
    """
    tokens: dict[str, Tensor] = {}
    measured: dict[str, Any] = {}
    for name in order:
        way = ways[name]
        measured[name], tokens[name] = measure(way)
        cache = way.cache()
        into.kv_bytes[name] = max(into.kv_bytes.get(name, 0), kv_bytes(cache))
        if isinstance(cache, PagedPrefixCache):
            into.hit_rate = share_not_computed(cache.last_call)
        del cache
        way.afterwards()
    first = order[0] if BASELINE not in order else BASELINE
    same = all(torch.equal(tokens[first], got) for got in tokens.values())
    into.num_same += same
    if bench.is_exact and not same:
        lists = {name: got.tolist() for name, got in tokens.items() if not torch.equal(tokens[first], got)}
        raise AssertionError(f"other tokens than {first}: {lists} for {tokens[first].tolist()}")
    return measured, tokens[first]


def measure_rounds(
    bench: Bench,
    prepare: Callable[[], Mapping[str, Way]],
    *,
    rounds: int,
    warmups: int | None = None,
    baseline_every: int = 1,
    baseline_warms_up: bool = False,
    measure: Callable[[Way], Any] | None = None,
) -> Measured:
    """Run the ways in turn; what `prepare` does is not timed.

    Args:
        warmups: rounds that do not count; as many as the bench has, if None.
        baseline_every: DynamicCache's way, where it is much slower than the others, runs in every so many rounds only.
        baseline_warms_up: it runs in the warm-up rounds, too.
        measure: a way -> (a list of seconds, tokens); one call, if None.
    """
    measure = measure or (lambda way: timed_call(bench, way))
    result, scratch = Measured(), Measured()
    warmups = bench.warmups if warmups is None else warmups
    turns: dict[int, int] = {}  # number of ways -> rounds of so many
    for number in range(-warmups, rounds):
        ways = prepare()
        with_baseline = baseline_warms_up if number < 0 else number % baseline_every == 0
        names = [name for name in ways if name != BASELINE or with_baseline]
        turn = turns[len(names)] = turns.get(len(names), -1) + 1
        measured, _ = run_round(bench, ways, turned(names, turn), result if number >= 0 else scratch, measure)
        if number >= 0:
            result.rounds.append(measured)
    return result


def turned(names: Sequence[str], turn: int) -> list[str]:
    """The names in the order of round `turn`: each comes first, and behind each other one, equally often."""
    shift = turn // 2 % len(names)
    order = [*names[shift:], *names[:shift]]
    return order[::-1] if turn % 2 else order


def measure_steps(bench: Bench, way: Way) -> tuple[list[float], Tensor]:
    """Seconds of each decode step of a call, and its tokens."""
    marks = StepMarks(bench.clock)
    _, tokens = bench.clock.time(lambda: way.run(logits_processor=[marks]))
    return marks.seconds(), tokens


def timed_call(bench: Bench, way: Way) -> tuple[list[float], Tensor]:
    """Seconds of a call, and its tokens."""
    seconds, tokens = bench.clock.time(way.run)
    return [seconds], tokens
