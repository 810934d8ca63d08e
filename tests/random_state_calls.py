"""The random calls of `random_calls`, for models whose layers carry states, and for those with windows beside them.

Run it with `python -m tests.random_state_calls --stores 100 --seed 0`. A failure names seed, store and call.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import warnings
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_paged_cache import CacheArgumentError, ForwardMismatchError, OutOfBlocksError, PagedPrefixCache, PrefixStore
from hf_paged_cache.model.cache_adapters import cache_argument

from . import random_calls
from .conformance import zoo
from .internals import make_forwards_cheap, make_snapshots_frequent
from .random_calls import ALPHABET, _Fault, _FaultError, _Users
from .reference import TOLERANCE, run

# MiniMax is not among them: transformers' own cache does not reorder its states with beams.
MODELS = (
    "qwen3_next",
    "olmo_hybrid",
    "lfm2",
    "falcon_h1",
    "mamba2",
    "nemotron_h",
    "bamba",
    "zamba2",
    "granitemoehybrid",
    "zaya",  # with windows from here on
    "inkling_text",
)
IN_CHUNKS = ("qwen3_next", "olmo_hybrid")  # snapshots at multiples of 64 tokens


class _StateUsers(_Users):
    """Users of a model whose layers carry states."""

    def __init__(self, rng: random.Random, names: tuple[str, ...] = MODELS) -> None:
        self.rng = rng
        self.name = rng.choice(names)
        self.model = zoo.build(self.name, seed=rng.randrange(1000))
        self.layer_fault, self.processor_fault = _Fault(), _Fault()
        for module in self.model.modules():
            if hasattr(module, "layer_idx"):
                module.register_forward_hook(self.layer_fault)
        is_in_chunks = self.name in IN_CHUNKS
        size = rng.choice([8, 16, 32] if is_in_chunks else [1, 2, 4, 8, 16])
        self.max_prompt = 220 if is_in_chunks else 70
        self.num_blocks = max(12, self.max_prompt * rng.choice([1, 2, 6, 40]) // (2 * size))
        self.budget = rng.choice([200_000, 1_000_000, 5_000_000]) if rng.random() < 0.25 else None
        if self.budget is None:
            self.store = PrefixStore(self.model, block_size=size, num_blocks=self.num_blocks)
        else:
            self.store = PrefixStore(self.model, block_size=size, max_bytes=self.budget)
        self.has_windows = any(DynamicCache(config=self.model.config).is_sliding)
        self.caches, self.held, self.seen = [], {}, [[]]
        self.num_calls, self.num_reused, self.num_bypassed = Counter(), 0, 0
        self.are_cut: set[int] = set()  # caches whose rows were cut back, or whose forward died
        self.description = f"{self.name}, blocks of {size}, {self.budget or self.num_blocks}"
        self.add_cache()

    def add_cache(self) -> PagedPrefixCache:
        rng = self.rng
        cache = PagedPrefixCache(
            self.store,
            attention="contiguous" if rng.random() < 0.6 else "gather",
            on_full="bypass" if rng.random() < 0.5 else "refuse",
            cache_salt=rng.choice([None, None, None, "a"]),
        )
        self.caches.append(cache)
        self.held[id(cache)] = None
        return cache

    def prompt(self) -> list[int]:
        rng = self.rng
        known = rng.choice(self.seen)
        known = known[: rng.randint(0, len(known))] if rng.random() < 0.5 else known
        lengths = [0, 1, 1, 2, 3, 5, 8, 17, 33] + ([64, 100] if self.name in IN_CHUNKS else [])
        tokens = (known + [rng.choice(ALPHABET) for _ in range(rng.choice(lengths))])[: self.max_prompt] or [1]
        self.remember(tokens)
        return tokens

    def step(self) -> str:
        rng = self.rng
        cache = rng.choice(self.caches)
        deeds = [self.generate] * 12 + [self.go_on] * 4 + [self.forwards] * 3 + [self.long] * 2
        deeds += [self.change_weights, self.reset, self.copy_cache, self.drop_cache, self.ambient, self.reorder]
        deeds += [self.pin, self.score, self.look]
        try:
            kind = rng.choice(deeds)(cache)
        except ForwardMismatchError:  # cannot be computed again: said so, and nothing else is touched
            if not (self.store.blocks.states.rules.clamps_one_token or self.are_cut):
                raise
            for each in self.caches:
                each.reset()
            self.held, self.are_cut = dict.fromkeys(self.held), set()
            kind = "lost"
        self.store.check()
        stats = self.store.stats()
        if self.budget is not None and stats.pool_bytes is not None:
            assert stats.pool_bytes + stats.snapshot_bytes <= self.budget
        self.num_calls[kind] += 1
        return kind

    def long(self, cache: PagedPrefixCache) -> str:
        """Tokens are generated over places of snapshots, and are somebody else's prompt."""
        output = self.compare(cache, {"max_new_tokens": self.rng.choice([20, 40, 80]), **self.padded([self.prompt()])})
        if output is None:
            return "refused or faulty"
        tokens = output.sequences[0].tolist()
        self.held[id(cache)] = [tokens[:-1]]
        if self.rng.random() < 0.5:
            self.go_on(cache)
        self.compare(self.rng.choice(self.caches), {"max_new_tokens": 3, **self.padded([[*tokens, 1, 2]])})
        return "long"

    def score(self, cache: PagedPrefixCache) -> str:
        rng, context = self.rng, self.prompt()
        answers = [[rng.choice(ALPHABET) for _ in range(rng.randint(1, 9))] for _ in range(rng.randint(1, 4))]
        try:
            scores = cache.score(context, answers)
        except OutOfBlocksError:
            return "refused or faulty"
        for answer, score in zip(answers, scores, strict=True):
            with torch.no_grad():
                logits = self.model(torch.tensor([context + answer])).logits[0, len(context) - 1 : -1]
            wanted = float(logits.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).sum())
            assert abs(score.total - wanted) <= 2 * TOLERANCE * float(logits.abs().max()) * len(answer)
        return "score"

    def look(self, cache: PagedPrefixCache) -> str:
        assert not cache.verify(self.rng.choice([None, 1, 5])).differing
        return "look"

    def go_on(self, cache: PagedPrefixCache) -> str:
        held = self.held[id(cache)]
        if not held or max(map(len, held)) > 2 * self.max_prompt:
            return self.generate(cache)
        if not cache._own_layers.has_rows and self.rng.random() < 0.4:
            num_taken = self.rng.choice([self.rng.randint(1, max(map(len, held))), 1, 2])
            try:
                cache.crop(-num_taken)
                self.are_cut.add(id(cache))
            except CacheArgumentError:
                assert self.has_windows
                num_taken = 0
            held = self.held[id(cache)] = [row[: max(0, len(row) - num_taken)] for row in held]
        num_columns, num_new = cache.get_seq_length(), self.rng.randint(1, 6)
        if not num_columns:
            return self.generate(cache)
        new = [[self.rng.choice(ALPHABET) for _ in range(num_new)] for _ in held]
        whole = self.padded([old + more for old, more in zip(held, new, strict=True)], num_columns + num_new)
        arguments = {"max_new_tokens": self.rng.choice([1, 2, 3, 5, 20, 70])}
        given = {"input_ids": torch.tensor(new), "attention_mask": whole["attention_mask"]}
        output = self.compare(cache, {**arguments, **given}, {**arguments, **whole})
        if output is None:
            return "refused or faulty"
        made = output.sequences[:, num_new:].tolist()
        self.held[id(cache)] = [old + more + last[:-1] for old, more, last in zip(held, new, made, strict=True)]
        return "go on"

    def forwards(self, cache: PagedPrefixCache) -> str:
        """Plain forwards by hand; none of one column in which a row is padding, where `DynamicCache` is wrong."""
        rng = self.rng
        inputs = self.padded([self.prompt() for _ in range(rng.choice([1, 1, 2]))])
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        takes_positions = self.store.argument_reader.takes_positions
        with torch.no_grad():
            wanted = self.model(**inputs, **({"position_ids": positions} if takes_positions else {})).logits
        cache.reset()
        self.held[id(cache)] = None
        num_pads, start = int((1 - mask).sum(1).max()), 0
        while start < ids.shape[1]:
            stop = min(ids.shape[1], start + rng.choice([1, 2, 5, 40]))
            if stop - start == 1 and stop <= num_pads:
                stop += 1
            given: dict[str, Any] = {"position_ids": positions[:, start:stop]} if takes_positions else {}
            kept = 0
            if self.store.argument_reader.takes_logits_to_keep:
                kept = given["logits_to_keep"] = rng.choice([0, 1, stop - start])
            self.arm(countdown=rng.randint(1, 6) if rng.random() < 0.1 else 0)
            given |= {cache_argument(self.model): cache, "use_cache": True}
            try:
                with torch.no_grad():
                    got = self.model(input_ids=ids[:, start:stop], attention_mask=mask[:, :stop], **given).logits
            except (_FaultError, KeyboardInterrupt):
                self.are_cut.add(id(cache))
                continue  # the same piece again
            except OutOfBlocksError:
                return "refused or faulty"
            finally:
                self.arm(0)
            first = stop - (kept or stop - start)
            shown = mask[:, first:stop].bool()
            assert got.shape[1] == stop - first
            distance = (got - wanted[:, first:stop])[shown].abs().max() if shown.any() else 0.0
            assert float(distance) <= TOLERANCE * float(wanted.abs().max()), f"columns {start} to {stop}"
            start = stop
        return "plain forwards"

    def change_weights(self, cache: PagedPrefixCache) -> str:
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        with torch.no_grad():
            self.rng.choice(matrices).mul_(self.rng.choice([0.98, 1.02]))
        self.held = dict.fromkeys(self.held)
        return self.generate(cache)

    def reset(self, cache: PagedPrefixCache) -> str:
        if self.rng.random() < 0.8:
            cache.reset()
            self.held[id(cache)] = None
        else:
            for each in self.caches:
                each.reset()
            self.store.reset_prefix_cache()
            self.held = dict.fromkeys(self.held)
        return self.generate(cache)

    def pin(self, cache: PagedPrefixCache) -> str:
        tokens = self.rng.choice(self.seen)
        if self.rng.random() < 0.6:
            cache.unpin(tokens if self.rng.random() < 0.5 else None)
        else:
            with suppress(CacheArgumentError):  # nothing of them is cached
                cache.pin(tokens)
        return self.generate(cache)

    def compare(
        self, cache: PagedPrefixCache, arguments: dict[str, Any], whole: dict[str, Any] | None = None
    ) -> Any | None:
        if arguments.get("prefill_chunk_size") == 1:  # as above
            arguments["prefill_chunk_size"] = 2
        try:
            return super().compare(cache, arguments, whole)
        except (ValueError, NotImplementedError, RuntimeError) as error:
            if isinstance(error, (ForwardMismatchError, OutOfBlocksError, CacheArgumentError)):
                raise
        with pytest.raises(
            (ValueError, NotImplementedError, RuntimeError)
        ):  # what transformers refuses without us, too
            run(self.model, **{**arguments, **(whole or {})})
        self.held[id(cache)] = None
        return None

    def close(self) -> None:
        for cache in self.caches:
            cache.reset()
        self.caches, self.held = [], {}
        gc.collect()
        for salt in (None, "a"):
            PagedPrefixCache(self.store, cache_salt=salt).unpin()
        self.store.check()
        self.stats = self.store.stats()
        assert self.stats.num_blocks_in_use == 0, f"{self.stats.num_blocks_in_use} blocks are lost"


def random_state_calls(
    stores: range, calls_a_store: int, seed: int = 0, names: tuple[str, ...] = MODELS
) -> Counter[str]:
    """Make that many random calls on each of some stores; returns how many there were of each kind.

    Raises:
        AssertionError: a call gave something else than a fresh cache, or a block is lost; says which call of which seed.
    """
    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_forwards_cheap(patch)
        make_snapshots_frequent(patch)
        for number in stores:
            users = _StateUsers(random.Random(f"{seed} {number}"), names)
            patch.setattr(random_calls, "MAX_PROMPT", users.max_prompt)
            num_made = 0
            try:
                for _ in range(calls_a_store):
                    users.step()
                    num_made += 1
                users.close()
            except BaseException as error:
                error.add_note(f"call {num_made} of store {number} of seed {seed} ({users.description})")
                raise
            counts += users.num_calls
            counts["reused tokens"] += users.num_reused
            counts["bypassed calls"] += users.num_bypassed
            counts["evictions"] += users.stats.num_evictions or 0
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--calls", type=int, default=40, help="on each store")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--models", nargs="+", default=MODELS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    stores = range(given.first, given.first + given.stores)
    counts = random_state_calls(stores, given.calls, given.seed, tuple(given.models))
    for kind, number in counts.most_common():
        print(f"{number:8}  {kind}")  # noqa: T201  # a command prints
    print(f"{len(stores) * given.calls} calls, 0 mismatches, {time.perf_counter() - start:.0f} s")  # noqa: T201


if __name__ == "__main__":
    main()
