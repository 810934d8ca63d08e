"""One thread's operations: random calls on its caches, each compared with transformers' own cache, and what users do
between.
"""

from __future__ import annotations

import copy
import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessor

from hf_paged_cache import CacheArgumentError, CacheBusyError, PagedPrefixCache, PrefixStore
from tests.conformance.image_zoo import prompt, tiny, tokens
from tests.reference import TOLERANCE, assert_same, batch, is_same, is_tie, run

from .faults import FAULTS, IN_GENERATE, IN_MODEL, Criteria, FaultError, Interruptible, Processor, Streamer
from .world import PICTURES, SALTS, Operation, SoakError, World

SHARE_OF_FAULTS = 0.6  # of the calls that may fail on purpose
LONGEST_CALL = 0.03  # seconds within which most interrupts are sent
ADAPTER_NAMES = "adapter names"  # a mode that PEFT's wrapper runs
NUM_CACHES = 3  # of a worker at most

# How often each operation is drawn.
OPERATIONS = {
    "call": 50,
    "call_and_drop": 4,
    "call_on_a_common_cache": 6,
    "call_about_an_image": 3,
    "go_on": 6,
    "forwards": 6,
    "score": 4,
    "ambient": 3,
    "short_lived_store": 2,
    "pin": 3,
    "copy_cache": 2,
    "drop_cache": 3,
    "reset": 2,
    "reset_store": 2,
    "change_weights": 1,
    "change_adapter": 1,
    "change_in_between": 1,
    "call_with_adapter_names": 1,
}
ALONE = {"change_weights", "change_adapter", "change_in_between", "call_with_adapter_names"}


@dataclass
class Held:
    """A cache, and the tokens of its rows where they can be gone on from."""

    cache: PagedPrefixCache
    rows: list[list[int]] | None = None
    is_common: bool = False  # other threads may be running on it


class Draw(LogitsProcessor):
    """Draws each row's token from a generator of its own: torch's is shared by all threads."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + input_ids.shape[1])
        noise = -torch.rand(scores.shape, generator=generator).clamp(min=1e-9).log().log1p()
        chosen = (scores + 3 * noise).argmax(-1, keepdim=True)
        return torch.full_like(scores, float("-inf")).scatter(-1, chosen, 0.0)


class Worker:
    """A user of the store.

    Args:
        world: what it shares with the others.
        number: among them.
    """

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.report = world.report
        self.caches: list[Held] = []
        self.interruptible = Interruptible(world.alarm)
        self.doing = ""  # for a failure's message

    def draw(self, rng: random.Random) -> Operation:
        """What it does next."""
        (name,) = rng.choices([*OPERATIONS], [*OPERATIONS.values()])
        return Operation(self.number, name, rng.getrandbits(40))

    def perform(self, operation: Operation) -> None:
        """Do it.

        Raises:
            SoakError: a result is wrong, or what is raised nobody has asked for.
        """
        rng, gate = random.Random(operation.seed), self.world.gate
        self.doing = operation.name
        with gate.alone() if operation.name in ALONE else gate.together():
            self.world.done.append(operation)
            try:
                getattr(self, operation.name)(rng)
            except SoakError:
                raise
            except Exception as error:
                raise SoakError(f"{type(error).__name__}: {self.doing}: {error}") from error
            finally:
                torch.set_grad_enabled(True)  # an interrupt may have come while torch put it back

    # Operations.

    def call(self, rng: random.Random) -> None:
        self._generate(rng, self._cache(rng))

    def call_and_drop(self, rng: random.Random) -> None:
        """A cache that is built in the call, and gone with it; or is part of a cycle that only the collector finds."""
        held = Held(self._build(rng))
        if rng.random() < 0.3:
            held.cache.itself = held.cache  # type: ignore[attr-defined]
        self._generate(rng, held)

    def call_on_a_common_cache(self, rng: random.Random) -> None:
        self._generate(rng, Held(rng.choice(self.world.common), is_common=True))

    def call_about_an_image(self, rng: random.Random) -> None:
        """Of a model of its own, on a store that all workers share."""
        model, layout = tiny(PICTURES)
        texts = [tokens(rng.randint(1, 3), rng.randint(1, 20)) for _ in range(2)]
        given, how = prompt(layout, [texts[0], rng.randint(1, 3), texts[1]]), rng.choice(({}, {}, {"num_beams": 2}))
        reference = run(model, **given, **how)
        cache = PagedPrefixCache(self.world.pictures, cache_salt=rng.choice(SALTS))
        output = run(model, cache, **given, **how)
        if not is_same(reference, output) and not is_tie(model, reference, 0, {**given, **how}):
            assert_same(reference, output)

    def go_on(self, rng: random.Random) -> None:
        """Only new tokens, under a mask of all; perhaps after taking some back, or moving rows."""
        held, num_resets = self._cache(rng), len(self.world.resets_ended)
        if held.rows is None or not held.cache.get_seq_length() or max(map(len, held.rows)) > 60:
            self._generate(rng, held, may_fail=False)
        if held.rows is None:  # refused
            return
        try:
            if rng.random() < 0.4:
                self._take_back(held, rng.randrange(min(map(len, held.rows))))
            if rng.random() < 0.3:
                order = rng.sample(range(len(held.rows)), len(held.rows))
                held.cache.reorder_cache(torch.tensor(order))
                held.rows = [held.rows[source] for source in order]
            new = [[rng.randrange(1, 128) for _ in range(2)] for _ in held.rows]
            new = [row[: 1 + held.cache.get_seq_length() % 2] for row in new]
            whole = batch(*[old + more for old, more in zip(held.rows, new, strict=True)])
            given = {"input_ids": torch.tensor(new), "attention_mask": whole["attention_mask"]}
            self._compare(rng, held, "go on", {"max_new_tokens": rng.randint(1, 3)}, given, whole)
        except CacheArgumentError:
            if num_resets == len(self.world.resets_begun) or held.cache.get_seq_length():
                raise
            self.report.refusals["rows dropped by a reset of the store"] += 1

    def _take_back(self, held: Held, num_taken: int) -> None:
        """The last tokens of all rows.

        Where layers have windows, what these have passed may have gone to other threads' calls.
        """
        before = held.cache.get_seq_length()
        try:
            held.cache.crop(-num_taken)
        except CacheArgumentError:
            if not self.world.has_windows or held.cache.get_seq_length() != before:
                raise
            self.report.refusals["tokens taken back behind a window"] += 1
            return
        held.rows = [row[: len(row) - num_taken] for row in held.rows or ()]

    def forwards(self, rng: random.Random) -> None:
        """A prompt in pieces by hand; a piece that fails is repeated from where the cache says."""
        held, rows = self._cache(rng), self._prompts(rng, rng.choice([1, 1, 2]))
        self.doing = f"plain forwards of {rows}"
        inputs = batch(*rows)
        ids, mask, positions = inputs["input_ids"], inputs["attention_mask"], self.world.positions(inputs)
        wanted = self.world.logits(rows)
        held.rows = None
        held.cache.reset()
        while (start := held.cache.get_seq_length()) < ids.shape[1]:
            stop = min(ids.shape[1], start + rng.choice([1, 2, 5, 40]))

            def forward(start: int = start, stop: int = stop) -> torch.Tensor:
                given = {name: tensor[:, start:stop] for name, tensor in positions.items()}
                with torch.no_grad():
                    logits: torch.Tensor = self.world.model(
                        ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=held.cache, **given
                    ).logits
                return logits

            got = self._attempt(rng, held, "plain forward", forward, IN_MODEL if rng.random() < 0.3 else ())
            if got is None:
                if held.cache.get_seq_length() not in (start, stop):
                    raise SoakError(
                        f"{held.cache.get_seq_length()} columns after a failed forward from {start} to {stop}"
                    )
                if self.was_refused:
                    return
                continue
            real = mask[:, start:stop].bool()
            self._assert_close((got - wanted[:, start:stop])[real], wanted)
        if rng.random() < 0.5:
            held.cache.reset()
        else:
            held.rows = rows if len({len(row) for row in rows}) == 1 else None

    def score(self, rng: random.Random) -> None:
        held = self._cache(rng)
        (context,) = self._prompts(rng, 1)
        continuations = [[rng.randrange(1, 128) for _ in range(rng.randint(1, 5))] for _ in range(rng.randint(1, 4))]
        continuations += [continuations[0][:1]]
        self.doing = f"score of {continuations} behind {context}"
        places = IN_MODEL if rng.random() < SHARE_OF_FAULTS else ()
        scores = self._attempt(rng, held, "score", lambda: held.cache.score(context, continuations), places)
        if scores is None:
            return
        for continuation, score in zip(continuations, scores, strict=True):
            logits = self.world.logits([context + continuation])[0]
            behind = logits.log_softmax(-1)[len(context) - 1 : -1]
            wanted = behind.gather(-1, torch.tensor(continuation)[:, None]).flatten()
            self._assert_close(torch.tensor(score.log_probs) - wanted, logits)

    def ambient(self, rng: random.Random) -> None:
        """`with cache:`, and a `generate` that brings none."""
        held = self._cache(rng)
        with held.cache:
            self._generate(rng, held, brings_cache=False)

    def short_lived_store(self, rng: random.Random) -> None:
        """Another store of the same model, with other sizes, for a few calls; without trust in the hooks of faults they
        are bypassed.
        """
        sizes = {"block_size": rng.choice([1, 2, 3, 8, 16]), "num_blocks": rng.choice([60, 200])}
        store = PrefixStore(self.world.model, **sizes, trust_hooks=rng.random() < 0.7)
        held = Held(self._build(rng, store))
        for _ in range(3):
            self._generate(rng, held)
        held.cache.check()

    def pin(self, rng: random.Random) -> None:
        held, (tokens,) = self._cache(rng), self._prompts(rng, 1)
        self.doing = f"pin or unpin {tokens}"
        if rng.random() < 0.5:
            held.cache.unpin(tokens if rng.random() < 0.6 else None)
            return

        def pin() -> int:
            try:
                return held.cache.pin(tokens)
            except CacheArgumentError:  # nothing of it is cached
                return 0

        self._attempt(rng, held, "pin", pin, ("interrupt",) if rng.random() < 0.5 else ())

    def copy_cache(self, rng: random.Random) -> None:
        held = self._cache(rng)
        twin = Held(copy.deepcopy(held.cache), copy.deepcopy(held.rows))
        self.caches = [held, twin]
        for _ in range(2):
            self.go_on(rng)

    def drop_cache(self, rng: random.Random) -> None:
        """With its rows, and perhaps in a cycle."""
        held = self._cache(rng)
        if rng.random() < 0.5:
            held.cache.itself = held.cache  # type: ignore[attr-defined]
        self.caches = [other for other in self.caches if other is not held]
        del held
        if rng.random() < 0.2:
            gc.collect()

    def reset(self, rng: random.Random) -> None:
        held = self._cache(rng)
        self._attempt(rng, held, "reset", held.cache.reset, ("interrupt",) if rng.random() < 0.5 else ())
        held.rows = None

    def reset_store(self, rng: random.Random) -> None:
        """Refused while anybody runs; of a cache it may reset this cache's part of the store alone."""
        held = self._cache(rng)
        held.rows = None
        reset = held.cache.reset_prefix_cache if rng.random() < 0.5 else self.world.store.reset_prefix_cache
        try:
            self.world.resets_begun.append(self.number)
            reset()
            self.report.counts["resets of the store"] += 1
        except CacheBusyError:
            self.report.refusals["reset while a call runs"] += 1
        finally:
            self.world.resets_ended.append(self.number)

    def change_weights(self, rng: random.Random) -> None:
        how = rng.choice(["in place", "through .data", "by an optimizer"])
        self.doing = f"change of the weights {how}"
        number = rng.randrange(len(self.world.weights))
        if rng.random() < 0.2:  # and undone, with nothing in between
            self.world.set_weights((number + 1) % len(self.world.weights), "in place")
        self.world.set_weights(number, how)
        self._model_has_changed()

    def change_adapter(self, rng: random.Random) -> None:
        self.world.set_adapter(rng.choice(self.world.adapters))
        self._model_has_changed()

    def change_in_between(self, rng: random.Random) -> None:
        """Weights or the adapter change while a call runs, and are put back before it ends, or after."""
        world, held = self.world, self._cache(rng)
        rows = self._prompts(rng, 1)
        self.doing = f"change of the model during a call on {rows}"
        world.set_weights(0, "in place")
        world.set_adapter(world.adapters[-1])
        self._model_has_changed()
        how = rng.choice(["in place", "through .data", "adapter" if len(world.adapters) > 1 else "in place"])
        if how == "adapter":
            change, undo = lambda: world.set_adapter(None), lambda: world.set_adapter(world.adapters[-1])
        else:
            change, undo = lambda: world.set_weights(1, how), lambda: world.set_weights(0, how)
        undone_inside = how == "in place" and rng.random() < 0.7  # only what torch counts is seen when it is over

        def act() -> None:
            change()
            if undone_inside:
                world.plan.set("after a layer", rng.randint(1, 2), undo)

        world.plan.set(rng.choice([*IN_MODEL, "logits processor"]), 1, act)
        try:
            run(world.model, held.cache, **batch(*rows), max_new_tokens=3, logits_processor=[Processor(world.plan)])
        finally:
            world.plan.clear()
            undo()
        self.report.faults["model changed and put back in a call"] += 1
        for cache in (held.cache, PagedPrefixCache(world.store, cache_salt=held.cache.cache_salt or None)):
            cache.reset()
            self._compare(rng, Held(cache), "after a change", {"max_new_tokens": 2}, batch(*rows), may_fail=False)

    def call_with_adapter_names(self, rng: random.Random) -> None:
        """An adapter a row. PEFT puts the names on the model's layers, so no other call may run.

        After an exception PEFT leaves them there, so the call must not fail.
        """
        if len(self.world.adapters) == 1:
            return self.call(rng)
        rows = self._prompts(rng, 2)
        options = {"adapter_names": [rng.choice(["default", "other", "__base__"]) for _ in rows], "max_new_tokens": 2}
        held = Held(self._build(rng))
        self._compare(rng, held, ADAPTER_NAMES, options, batch(*rows), may_fail=False)
        return None

    # Calls.

    def _generate(self, rng: random.Random, held: Held, *, may_fail: bool = True, brings_cache: bool = True) -> None:
        mode = rng.choice(
            ["greedy", "greedy", "samples", "beams", "batch", "equal rows", "lookup", "assistant", "chunks"]
        )
        if mode == "assistant" and not brings_cache:
            mode = "greedy"
        rows = self._prompts(rng, rng.choice([2, 3]) if mode in ("batch", "chunks") else 1)
        options: dict[str, Any] = {"max_new_tokens": rng.choice([1, 2, 4])}
        if mode == "samples":
            options |= {"do_sample": True, "num_return_sequences": rng.randint(1, 3)}
            options["logits_processor"] = [Draw(rng.randrange(5))]
        elif mode == "beams":
            options |= {"num_beams": 3, "num_return_sequences": rng.randint(1, 3)}
        elif mode == "equal rows":
            rows *= rng.randint(2, 3)
        elif mode == "lookup":
            rows = [(rows[0] + rows[0])[:40]]
            options["prompt_lookup_num_tokens"] = rng.randint(1, 3)
        elif mode == "assistant":
            options["assistant_model"] = copy.deepcopy(self.world.assistant)  # generate writes to its configuration
        elif mode == "chunks":
            options["prefill_chunk_size"] = rng.randint(1, 9)
        self._compare(rng, held, mode, options, batch(*rows), may_fail=may_fail, brings_cache=brings_cache)

    def _compare(
        self,
        rng: random.Random,
        held: Held,
        mode: str,
        options: dict[str, Any],
        given: dict[str, torch.Tensor],
        whole: dict[str, torch.Tensor] | None = None,
        *,
        may_fail: bool = True,
        brings_cache: bool = True,
    ) -> None:
        """One `generate`; and where it failed on purpose, the same once more on the same cache.

        Args:
            whole: what the reference is given, where ours gets only new tokens.
        """
        plain = {name: value for name, value in options.items() if isinstance(value, int | list)}
        self.doing = f"{mode}, {plain}, of {given['input_ids'].tolist()} on {held.cache!r}"
        world = self.world
        model = world.wrapper if mode == ADAPTER_NAMES else world.model
        watched = {
            **options,
            "logits_processor": [Processor(world.plan), *options.get("logits_processor", ())],
            "stopping_criteria": [Criteria(world.plan)],
        }
        can_stream = "num_beams" not in options
        if can_stream:
            watched["streamer"] = Streamer(world.plan)
        places: tuple[str, ...] = ()
        if may_fail and rng.random() < SHARE_OF_FAULTS:
            places = (*IN_MODEL, *IN_GENERATE[: 3 if can_stream else 2], *["interrupt"] * 8)
        held.rows, rows = None, held.rows
        used = held.cache if brings_cache else None
        output = self._attempt(rng, held, mode, lambda: run(model, used, **given, **watched), places)
        if output is None:
            if not self.was_refused:
                again = whole or given
                self._compare(rng, held, mode, options, again, may_fail=False, brings_cache=brings_cache)
            return
        asked = {**(whole or given), **options}
        self.report.counts["reused tokens"] += held.cache.last_call.reused_tokens
        reference = world.reference(model, **asked)
        try:
            assert_same(reference, output)
        except AssertionError as error:
            if not is_tie(model, reference, 0, asked):
                reused = held.cache.last_call
                raise SoakError(f"mismatch: {self.doing}: {error}; {reused}") from None
            self.report.counts["ties of the reference"] += 1
            return
        if brings_cache and not held.is_common and mode not in ("beams", "lookup", "assistant", ADAPTER_NAMES):
            pads = [len(row) - sum(row) for row in asked["attention_mask"].tolist()]
            each = options.get("num_return_sequences", 1)
            num_old = asked["input_ids"].shape[1] - given["input_ids"].shape[1]
            before = rows if whole is not None else None
            new = output.sequences.tolist()
            if before is not None and num_old:
                held.rows = [old + row[:-1] for old, row in zip(before, new, strict=True)]
            else:
                held.rows = [row[pads[number // each] : -1] for number, row in enumerate(new)]

    def _attempt(
        self, rng: random.Random, held: Held, mode: str, act: Callable[[], Any], places: tuple[str, ...]
    ) -> Any | None:
        """Run `act`, which may fail at one of `places`; None where it has failed on purpose or was refused."""
        world, report = self.world, self.report
        place = rng.choice(places) if places else ""
        error = rng.choice([FaultError, KeyboardInterrupt, torch.OutOfMemoryError])

        def fail() -> None:
            raise error("on purpose")

        world.plan.set(place, rng.choice([1, 1, 2, 3, 5]), fail)
        delay = LONGEST_CALL * rng.random() ** 2
        self.was_refused = False
        started = time.perf_counter()
        result = None
        try:
            result = self.interruptible.call(act, delay) if place == "interrupt" else act()
            report.latencies[mode].append(time.perf_counter() - started)
        except FAULTS as raised:
            if not place:
                raise SoakError(f"{type(raised).__name__} that nobody asked for: {self.doing}") from raised
            report.faults[f"{place}: {error.__name__}" if place != "interrupt" else "interrupt"] += 1
        except CacheBusyError as raised:
            if not held.is_common:
                raise SoakError(f"busy, and no call runs: {self.doing}: {raised}") from raised
            report.refusals["CacheBusyError of a common cache"] += 1
            self.was_refused = True
        finally:
            world.plan.clear()
            report.counts["calls"] += 1
        return result

    # What it has, and what it asks.

    def _cache(self, rng: random.Random) -> Held:
        if not self.caches or (len(self.caches) < NUM_CACHES and rng.random() < 0.1):
            self.caches = [*self.caches, Held(self._build(rng))]
        return rng.choice(self.caches)

    def _build(self, rng: random.Random, store: PrefixStore | None = None) -> PagedPrefixCache:
        return PagedPrefixCache(store or self.world.store, cache_salt=rng.choice(SALTS))

    def _prompts(self, rng: random.Random, number: int) -> list[list[int]]:
        return [list(rng.choice(self.world.prompts)) for _ in range(number)]

    def _model_has_changed(self) -> None:
        """To go on over a changed model is not what a fresh cache does."""
        for worker in self.world.workers:
            for held in worker.caches:
                held.rows = None

    def _assert_close(self, difference: torch.Tensor, wanted: torch.Tensor) -> None:
        distance = float(difference.abs().max()) / float(wanted.abs().max())
        if not distance <= TOLERANCE:
            raise SoakError(f"mismatch: {self.doing}: {distance:.1e} of the logits' scale")
