"""Memory of a device runs out: at any allocation of a call, and for good. The call continues or fails, and the next one is right."""

from __future__ import annotations

import contextlib
import gc
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import hf_paged_cache
from hf_paged_cache import PagedPrefixCache, PrefixStore
from tests.conftest import make_tiny_llama
from tests.internals import make_pools_grow

from .counts import PLACES
from .memory import Memory, limited, memory

OURS, HOST = f"{Path(hf_paged_cache.__file__).parent}/", "/transformers/"
SURVIVING = tuple(f"{OURS}{path}" for path in ("attention/", "kv/block_pool", "kv/zeroed", "store/"))
NUMBERS = tuple(f"{OURS}{path}" for path in ("kv/transfers", "rows/"))

CALLS: dict[str, dict[str, Any]] = {"3 rows": {"num_rows": 3}, "beams": {"num_rows": 1, "num_beams": 3}}
PLAYED = [  # a call, its place in the cache's life, and the allocation at which it begins
    ("3 rows", "first call", 1),
    ("3 rows", "later call", 2),
    ("beams", "later call", 3),
    ("beams", "first call", 2),
]
STRIDES = {True: 3, False: 97}  # from one allocation of ours, and of transformers, to the next that is refused


def call(
    model: Any, cache: Any, *, seed: int, num_rows: int = 1, num_tokens: int = 22, num_new: int = 4, **arguments: Any
) -> Any:
    """Tokens and logits of rows that begin alike, the later ones padded. The third decode step begins a block of 4."""
    ids = torch.randint(1, 128, (num_rows, num_tokens), generator=torch.Generator().manual_seed(seed))
    ids[1:, 4:12] = ids[0, 4:12]
    mask = torch.ones_like(ids)
    for row in range(1, num_rows):
        mask[row, : 2 * row] = 0
    output = model.generate(
        input_ids=(ids * mask).to("sim"),
        attention_mask=mask.to("sim"),
        past_key_values=cache,
        max_new_tokens=num_new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **arguments,
    )
    return output.sequences.cpu(), torch.stack([logits.cpu() for logits in output.logits])


def assert_same(expected: Any, found: Any) -> None:
    """As far as the call went, which may have been asked for fewer tokens; beams that were are not asked which is best."""
    num_new, num_left_out = len(found[1]), len(expected[1]) - len(found[1])
    if num_left_out == 0 or len(expected[0]) == len(expected[1][0]):
        assert expected[0][:, : expected[0].shape[1] - num_left_out].equal(found[0])
    torch.testing.assert_close(found[1], expected[1][:num_new], rtol=1e-4, atol=1e-4)


def is_ours() -> bool:
    """Whether what allocates is this package, rather than transformers."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(OURS):
            return True
        if HOST in path:
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return False


class FailingAllocation:
    """Refuses one allocation of this package, or of transformers, the n-th from now on."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, *, ours: bool) -> None:
        self.num_seen = 0
        take = Memory.take

        def failing(of_device: Memory, num_bytes: int) -> None:
            if is_ours() is ours:
                self.num_seen += 1
                if self.num_seen == at:
                    raise torch.OutOfMemoryError(f"sim: allocation {at} refused")
            take(of_device, num_bytes)

        patch.setattr(Memory, "take", failing)

    def has_struck(self, at: int) -> bool:
        return self.num_seen >= at


@pytest.mark.parametrize(("name", "place", "first"), PLAYED)
def test_memory_may_run_out_at_any_allocation_of_a_call(
    name: str, place: str, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pools_grow(monkeypatch)
    model = PLACES["fp32 on a device"]()
    expected = [call(model, DynamicCache(), seed=seed, **CALLS[name]) for seed in range(2)]
    before = call(model, DynamicCache(), seed=5)
    outcomes: Counter[str] = Counter()  # where an allocation of ours was refused
    for ours, stride in STRIDES.items():
        at = first
        while True:
            cache = PagedPrefixCache(PrefixStore(model, block_size=4, num_blocks=200))
            if place == "later call":
                assert_same(before, call(model, cache, seed=5, num_new=1))
            with monkeypatch.context() as patch:
                failing = FailingAllocation(patch, at, ours=ours)
                try:
                    assert_same(expected[0], call(model, cache, seed=0, **CALLS[name]))
                    outcome = "same"
                except torch.OutOfMemoryError as error:
                    outcome = "out of memory"
                    lines = [f"{line.filename}:{line.lineno}" for line in traceback.extract_tb(error.__traceback__)]
                    # token ids; and rows of a call, which take what those of DynamicCache take
                    may_fail = any(line.startswith(NUMBERS) for line in lines)
                    assert may_fail or not any(line.startswith(SURVIVING) for line in lines), "\n".join(lines)
            outcomes[outcome] += ours and failing.has_struck(at)
            cache.check()
            for seed in (1, 0):
                assert_same(expected[seed], call(model, cache, seed=seed, num_new=2, **CALLS[name]))
            cache.check()
            if not failing.has_struck(at):
                break
            at += stride
    assert outcomes["same"], outcomes


def test_where_memory_is_short_cached_blocks_make_way_and_each_call_is_right() -> None:
    model = make_tiny_llama().to("sim")
    expected = [call(model, DynamicCache(), seed=seed, num_tokens=150) for seed in range(16)]
    cache = PagedPrefixCache(model, block_size=4, num_blocks=5000)
    assert_same(expected[0], call(model, cache, seed=0, num_tokens=150))
    gc.collect()
    num_failed = 0
    with limited(memory("sim").allocated + 1_300_000):
        for seed in (*range(1, 16), 15, 0):
            found = None
            with contextlib.suppress(torch.OutOfMemoryError):  # of the model: the pool had taken what it needs
                found = call(model, cache, seed=seed, num_tokens=150)
            if found is None:
                num_failed += 1
                found = call(model, cache, seed=seed, num_tokens=150)
            assert_same(expected[seed], found)
        assert num_failed <= 2
        stats = cache.stats()
        assert stats.num_evictions > 0
        assert stats.num_cached_blocks > 50
        assert stats.num_blocks < 5000
        cache.check()
    cache.reset_prefix_cache()
    assert cache.stats().num_blocks == 5000
