"""Random calls of many users on one store, each compared with a fresh `DynamicCache`, logits included.

Run it with `python -m tests.random_calls --calls 20000 --seed 0`. A failure names seed and call; the same numbers
play it again.
"""

from __future__ import annotations

import argparse
import copy
import gc
import inspect
import random
import time
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, PreTrainedModel

from hf_paged_cache import CacheArgumentError, CacheBusyError, OutOfBlocksError, PagedPrefixCache, PrefixStore

from .internals import make_forwards_cheap
from .reference import TOLERANCE, assert_same, is_tie, run
from .tiny_models import build

CALLS_A_STORE = 150  # then another model, block size and number of blocks
MODELS = ("llama", "gpt2", "gemma3", "bloom", "mixtral")
ALPHABET = (1, 2, 3)  # few tokens, so that prompts share prefixes by chance
MAX_PROMPT = 40

Conversation = list[list[int]]  # batch row -> the tokens a cache holds of it


class _FaultError(Exception):
    """What a faulty layer, processor or streamer raises."""


class _Fault:
    """Raises at the n-th time somebody passes by; unarmed it lets all through."""

    def __init__(self) -> None:
        self.num_passed = 0  # since `arm`
        self._countdown = 0
        self._error: type[BaseException] = _FaultError

    def arm(self, countdown: int, error: type[BaseException]) -> None:
        """0 disarms."""
        self._countdown, self._error, self.num_passed = countdown, error, 0

    def __call__(self, *args: Any) -> None:
        self.num_passed += 1
        if self._countdown and self.num_passed == self._countdown:
            raise self._error("on purpose")


class _Processor(LogitsProcessor):
    def __init__(self, fault: _Fault) -> None:
        self.fault = fault

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.fault()
        return scores


class _Users:
    """Some caches on one store, and what each holds: `None` where nobody can say."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        name = rng.choice(MODELS)
        self.model: PreTrainedModel = build(name, seed=rng.randrange(1000))
        # Hooks that are there from the start: a hook added in between would, rightly, lose the hits.
        self.layer_fault, self.processor_fault = _Fault(), _Fault()
        layers = [module for module in self.model.modules() if "Attention" in type(module).__name__]
        for layer in layers:
            layer.register_forward_hook(self.layer_fault)
        size = rng.choice([1, 2, 3, 4, 8, 16])
        self.num_blocks = rng.choice([5, 10, 30, 60, 400]) * max(1, 8 // size)
        self.store = PrefixStore(self.model, block_size=size, num_blocks=self.num_blocks)
        self.has_windows = any(DynamicCache(config=self.model.config).is_sliding)
        self.caches: list[PagedPrefixCache] = []
        self.held: dict[int, Conversation | None] = {}
        self.seen: list[list[int]] = [[]]
        self.num_calls: Counter[str] = Counter()
        self.num_reused = 0
        self.num_bypassed = 0
        self.description = f"{name}, blocks of {size}, {self.num_blocks} of them"
        self.add_cache()

    def add_cache(self) -> PagedPrefixCache:
        attention = self.rng.choice(["contiguous", "contiguous", "paged", "paged", "gather"])
        on_full = "bypass" if self.rng.random() < 0.5 else "refuse"
        cache = PagedPrefixCache(self.store, attention=attention, on_full=on_full)
        self.caches.append(cache)
        self.held[id(cache)] = None
        return cache

    def prompt(self) -> list[int]:
        """Something like what was asked before."""
        known = self.rng.choice(self.seen)
        known = known[: self.rng.randint(0, len(known))] if self.rng.random() < 0.7 else known
        tail = [self.rng.choice(ALPHABET) for _ in range(self.rng.choice([0, 1, 1, 2, 3, 5, 8, 17]))]
        tokens = (known + tail)[:MAX_PROMPT] or [1]
        self.remember(tokens)
        return tokens

    def remember(self, tokens: list[int]) -> None:
        if len(self.seen) >= 30:
            self.seen[self.rng.randrange(len(self.seen))] = tokens
        else:
            self.seen.append(tokens)

    # What a user does. Each returns the word under which it is counted.

    def step(self) -> str:
        rng = self.rng
        cache = rng.choice(self.caches)
        deeds = [self.generate] * 10 + [self.go_on] * 3 + [self.forwards] * 3
        deeds += [self.change_weights, self.reset, self.copy_cache, self.drop_cache, self.ambient, self.reorder]
        deeds += [self.pin]
        kind = rng.choice(deeds)(cache)
        self.caches[0].check()
        self.num_calls[kind] += 1
        return kind

    def generate(self, cache: PagedPrefixCache, prompts: list[list[int]] | None = None) -> str:
        rng = self.rng
        same = rng.random() < 0.2
        prompts = prompts or [self.prompt() for _ in range(rng.choice([1, 1, 1, 2, 3]))]
        if same:
            prompts = [prompts[0]] * len(prompts)
        arguments: dict[str, Any] = {"max_new_tokens": rng.randint(1, 7)}
        how = rng.choice(["greedy", "greedy", "sample", "beams", "beam samples", "lookup", "chunks", "states"])
        if how == "sample":
            arguments |= {"do_sample": True, "num_return_sequences": rng.randint(1, 3), "top_k": 20}
        elif how == "beams":
            beams = rng.randint(2, 3)
            arguments |= {"num_beams": beams, "num_return_sequences": rng.randint(1, beams)}
        elif how == "beam samples":
            arguments |= {"num_beams": 2, "do_sample": True}
        elif how == "lookup":
            prompts = prompts[:1]
            arguments |= {"prompt_lookup_num_tokens": rng.randint(1, 3), "max_new_tokens": rng.randint(2, 7)}
        elif how == "chunks":
            arguments["prefill_chunk_size"] = rng.randint(1, 12)
        elif how == "states":
            arguments["output_hidden_states"] = True
        if rng.random() < 0.3:
            arguments["eos_token_id"] = rng.sample(range(1, 128), 12)
        if how != "lookup" and rng.random() < 0.2:
            arguments["use_cache"] = True
        arguments |= self.padded(prompts)
        output = self.compare(cache, arguments)
        if output is None:
            return "refused or faulty"
        plain = "num_beams" not in arguments and "eos_token_id" not in arguments and how != "lookup"
        if plain:  # rows in the order of the batch, all as long as each other
            pads = [len(row) - sum(row) for row in arguments["attention_mask"].tolist()]
            each = arguments.get("num_return_sequences", 1)
            rows = output.sequences.tolist()
            self.held[id(cache)] = [row[pads[number // each] : -1] for number, row in enumerate(rows)]
        for sequence in output.sequences.tolist():
            self.remember([token for token in sequence if token][:MAX_PROMPT])
        return how

    def go_on(self, cache: PagedPrefixCache) -> str:
        """Only new tokens, under a mask of all columns; perhaps after taking some back."""
        held = self.held[id(cache)]
        if not held or max(map(len, held)) > 2 * MAX_PROMPT:
            return self.generate(cache)
        can_crop = not (
            self.has_windows and cache.on_full == "bypass"
        )  # a bypassed call can as far as a `DynamicCache`
        if can_crop and self.rng.random() < 0.4:
            num_taken = self.rng.randint(1, max(map(len, held)))
            cache.crop(-num_taken)
            held = [row[: max(0, len(row) - num_taken)] for row in held]
            self.held[id(cache)] = held
        num_new = self.rng.randint(1, 6)
        new = [[self.rng.choice(ALPHABET) for _ in range(num_new)] for _ in held]
        num_columns = cache.get_seq_length()
        if not num_columns:  # all was taken back
            return self.generate(cache)
        whole = self.padded([old + more for old, more in zip(held, new, strict=True)], num_columns + num_new)
        arguments = {"max_new_tokens": self.rng.randint(1, 5)}
        given = {"input_ids": torch.tensor(new), "attention_mask": whole["attention_mask"]}
        output = self.compare(cache, {**arguments, **given}, {**arguments, **whole})
        if output is None:
            return "refused or faulty"
        generated = output.sequences[:, num_new:].tolist()
        self.held[id(cache)] = [old + more + last[:-1] for old, more, last in zip(held, new, generated, strict=True)]
        return "go on"

    def forwards(self, cache: PagedPrefixCache) -> str:
        """Plain forwards by hand: the prompt in pieces, with or without the logits of all tokens."""
        rng = self.rng
        prompts = [self.prompt() for _ in range(rng.choice([1, 1, 2]))]
        inputs = self.padded(prompts)
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        takes_positions = self.store.argument_reader.takes_positions
        with torch.no_grad():
            given = {"position_ids": positions} if takes_positions else {}
            wanted = self.model(**inputs, **given).logits
        cache.reset()
        self.held[id(cache)] = None
        start = 0
        while start < ids.shape[1]:
            stop = min(ids.shape[1], start + rng.choice([1, 2, 5, 40]))
            kept = rng.choice([0, 1, stop - start])
            given = {"position_ids": positions[:, start:stop]} if takes_positions else {}
            if rng.random() < 0.8 and "logits_to_keep" in inspect.signature(self.model.forward).parameters:
                given["logits_to_keep"] = kept
            else:
                kept = 0
            self.arm(countdown=rng.randint(1, 6) if rng.random() < 0.1 else 0)
            try:
                with torch.no_grad():
                    got = self.model(
                        input_ids=ids[:, start:stop],
                        attention_mask=mask[:, :stop],
                        past_key_values=cache,
                        use_cache=True,
                        **given,
                    ).logits
            except (_FaultError, KeyboardInterrupt):
                continue  # the same piece again
            except OutOfBlocksError:
                assert self.layer_fault.num_passed == 0, "out of blocks after something was computed"
                return "refused or faulty"
            finally:
                self.arm(0)
            start_of_logits = stop - (kept or stop - start)
            real = mask[:, start_of_logits:stop].bool()
            distance = (got - wanted[:, start_of_logits:stop])[real].abs().max() if real.any() else 0.0
            scale = float(wanted.abs().max())
            assert float(distance) <= TOLERANCE * scale, f"plain forward: {float(distance) / scale:.1e} of the scale"
            start = stop
        self.held[id(cache)] = prompts
        return "plain forwards"

    def change_weights(self, cache: PagedPrefixCache) -> str:
        with torch.no_grad():
            parameter = self.rng.choice(list(self.model.parameters()))
            if self.rng.random() < 0.5:
                parameter.mul_(1.05).add_(0.01)
            else:
                parameter.data = parameter.data * 0.95 - 0.01
        self.held = dict.fromkeys(self.held)  # to go on over changed weights is not what a fresh cache does
        return self.generate(cache)

    def reset(self, cache: PagedPrefixCache) -> str:
        if self.rng.random() < 0.8:
            cache.reset()
            self.held[id(cache)] = None
        else:
            try:
                self.store.reset_prefix_cache()
            except CacheBusyError:  # rows of plain forwards go on until they are reset
                for each in self.caches:
                    each.reset()
                self.store.reset_prefix_cache()
            self.held = dict.fromkeys(self.held)
            assert cache.stats().num_free_blocks == self.num_blocks - 1, cache.stats()
        return self.generate(cache)

    def pin(self, cache: PagedPrefixCache) -> str:
        """Pin something that was asked before, or give pins back; then make calls that want its room."""
        tokens = self.rng.choice(self.seen)
        if self.rng.random() < 0.4:
            cache.unpin(tokens if self.rng.random() < 0.5 else None)
            return self.generate(cache)
        try:
            num_pinned = cache.pin(tokens)  # no call is running, so nothing is promised
        except CacheArgumentError:  # nothing of it is cached
            num_pinned = 0
        self.generate(self.rng.choice(self.caches))
        self.held[id(cache)] = None
        cache.reset()
        if self.rng.random() < 0.5:
            output = self.compare(cache, {"max_new_tokens": 1, **self.padded([[*tokens, 1]])})
            assert output is None or is_bypassed(cache) or cache.last_call.rows[0].matched_tokens >= num_pinned
        return "pin"

    def copy_cache(self, cache: PagedPrefixCache) -> str:
        if len(self.caches) > 4:
            return self.drop_cache(cache)
        twin = copy.deepcopy(cache)
        self.caches.append(twin)
        self.held[id(twin)] = copy.deepcopy(self.held[id(cache)])
        first, second = self.rng.sample([cache, twin], 2)
        self.go_on(first)
        return self.go_on(second)

    def drop_cache(self, cache: PagedPrefixCache) -> str:
        self.caches = [other for other in self.caches if other is not cache]
        del self.held[id(cache)]
        del cache
        if self.rng.random() < 0.1:
            gc.collect()
        if not self.caches or self.rng.random() < 0.5:
            self.add_cache()
        return self.generate(self.caches[-1])

    def ambient(self, cache: PagedPrefixCache) -> str:
        arguments = {"max_new_tokens": 3, **self.padded([self.prompt()])}
        reference = run(self.model, **arguments)
        self.held[id(cache)] = None
        try:
            with cache:
                assert_same(reference, run(self.model, **arguments))
        except OutOfBlocksError:
            return "refused or faulty"
        return "with block"

    def reorder(self, cache: PagedPrefixCache) -> str:
        """Rows moved by hand, then asked to go on."""
        held = self.held[id(cache)]
        if not held:
            return self.generate(cache)
        how = self.rng.choice(["reorder", "repeat", "select"])
        if how == "reorder":
            sources = [self.rng.randrange(len(held)) for _ in held]
            cache.reorder_cache(torch.tensor(sources))
        elif how == "repeat" and len(held) < 4:
            sources = [row for row in range(len(held)) for _ in range(2)]
            cache.batch_repeat_interleave(2)
        else:
            sources = sorted(self.rng.sample(range(len(held)), self.rng.randint(1, len(held))))
            cache.batch_select_indices(torch.tensor(sources))
        self.held[id(cache)] = [list(held[source]) for source in sources]
        return self.go_on(cache)

    # How it is compared.

    @staticmethod
    def padded(rows: list[list[int]], columns: int = 0) -> dict[str, torch.Tensor]:
        columns = max(columns, *map(len, rows))
        return {
            "input_ids": torch.tensor([[0] * (columns - len(row)) + row for row in rows]),
            "attention_mask": torch.tensor([[0] * (columns - len(row)) + [1] * len(row) for row in rows]),
        }

    def arm(self, countdown: int) -> None:
        """Let a layer or the processor fail once."""
        error = self.rng.choice([_FaultError, KeyboardInterrupt])
        in_layer = self.rng.random() < 0.6
        self.layer_fault.arm(countdown if in_layer else 0, error)
        self.processor_fault.arm(0 if in_layer else countdown, error)

    def compare(
        self, cache: PagedPrefixCache, arguments: dict[str, Any], whole: dict[str, Any] | None = None
    ) -> Any | None:
        """The same call with both; None where ours was refused for want of blocks, or failed on purpose."""
        arguments = {**arguments, "logits_processor": [_Processor(self.processor_fault)]}
        seed = self.rng.randrange(1 << 30)
        faulty = self.rng.random() < 0.12
        self.held[id(cache)] = None
        self.arm(self.rng.randint(1, 12) if faulty else 0)
        try:
            output = run(self.model, cache, seed=seed, **arguments)
        except (_FaultError, KeyboardInterrupt):
            assert faulty
            return None
        except OutOfBlocksError:
            assert self.layer_fault.num_passed == 0, "out of blocks after something was computed"
            return None
        finally:
            self.arm(0)
        self.num_reused += cache.last_call.reused_tokens
        self.num_bypassed += is_bypassed(cache)
        given = {**arguments, **(whole or {})}
        reference = run(self.model, seed=seed, **given)
        try:
            assert_same(reference, output)
        except AssertionError:
            if not is_tie(self.model, reference, seed, given):
                raise
            self.num_calls["ties of the reference"] += 1
            cache.reset()
            return None
        return output

    def close(self) -> None:
        """All blocks must be accounted for."""
        for cache in self.caches:
            cache.reset()
            cache.unpin()
        self.caches, self.held = [], {}
        gc.collect()
        cache = PagedPrefixCache(self.store)
        cache.check()
        self.stats = cache.stats()
        assert self.stats.num_blocks_in_use == 0, f"{self.stats.num_blocks_in_use} blocks are lost"
        assert self.stats.num_cached_blocks + self.stats.num_free_blocks == self.num_blocks - 1


def is_bypassed(cache: PagedPrefixCache) -> bool:
    """Whether the last call ran without the store."""
    return any("without the store" in of_row.stopped for of_row in cache.last_call.rows)


def random_calls(num_calls: int, seed: int = 0) -> Counter[str]:
    """Make that many random calls.

    Returns:
        how many there were of each kind, and "reused tokens", "bypassed calls", "evictions".
    Raises:
        AssertionError: a call gave something else than a fresh cache, or a block is lost; says which call of which seed.
    """
    counts: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        make_forwards_cheap(patch)
        for first in range(0, num_calls, CALLS_A_STORE):
            users = _Users(random.Random(f"{seed} {first}"))
            num_made = 0
            try:
                while first + num_made < min(num_calls, first + CALLS_A_STORE):
                    users.step()
                    num_made += 1
                users.close()
            except BaseException as error:
                error.add_note(f"call {first + num_made} of seed {seed} ({users.description})")
                raise
            counts += users.num_calls
            counts["reused tokens"] += users.num_reused
            counts["bypassed calls"] += users.num_bypassed
            counts["evictions"] += users.stats.num_evictions
            counts["copies on write"] += users.stats.num_copies_on_write
    assert counts["ties of the reference"] <= 1 + num_calls // 500, "so many ties are none"
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    start = time.perf_counter()
    counts = random_calls(given.calls, given.seed)
    seconds = time.perf_counter() - start
    for kind, number in counts.most_common():
        print(f"{number:8}  {kind}")  # noqa: T201  # a command prints
    print(f"{given.calls} calls, 0 mismatches, {given.calls / seconds:.0f} a second")  # noqa: T201


if __name__ == "__main__":
    main()
