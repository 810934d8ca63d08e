"""How much memory blocks may take if nobody says: half of what is free, in a container too, and each store its part."""

from pathlib import Path
from types import SimpleNamespace
from weakref import WeakSet

import psutil
import pytest
import torch

from hf_paged_cache import PagedPrefixCache, PrefixStore
from hf_paged_cache.store import memory_budget

from ..reference import IDS, Forwards, assert_right, assert_same, row, run
from ..tiny_models import build, tiny

BYTES_OF_A_BLOCK = 2 * 2 * 2 * 16 * 4 * 16  # 2 layers of keys and values, 2 heads of 16 numbers of 4 bytes, 16 tokens


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One with memory for 1,000 blocks and no other store; its folder in which a container is told its limit."""
    available = SimpleNamespace(available=1000 * BYTES_OF_A_BLOCK)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: available)
    monkeypatch.setattr(memory_budget, "_budgets", WeakSet())
    monkeypatch.setattr(memory_budget, "_CONTROL_GROUP", tmp_path)
    return tmp_path


def num_blocks_after_a_call(store: PrefixStore) -> int:
    run(store.model, PagedPrefixCache(store), input_ids=IDS)
    num_blocks = store.stats().num_blocks
    assert num_blocks is not None
    return num_blocks


def test_on_a_host_it_is_half_of_what_is_available(machine: Path) -> None:
    assert num_blocks_after_a_call(PrefixStore(tiny("llama"))) == pytest.approx(500, abs=1)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (700, 150),  # less is left to the container than to the host
        (70_000, 500),  # more is: the host's is what there is
        (None, 500),  # no limit
    ],
)
def test_in_a_container_it_is_half_of_what_its_limit_leaves(limit: int | None, expected: int, machine: Path) -> None:
    """500 blocks' bytes are used, 100 of which can be reclaimed."""
    names = ("memory.max", "memory.current", "memory.stat")
    texts = (
        "max" if limit is None else str(limit * BYTES_OF_A_BLOCK),
        str(500 * BYTES_OF_A_BLOCK),
        f"cache 5\ninactive_file {100 * BYTES_OF_A_BLOCK}\nother 7",
    )
    for name, text in zip(names, texts, strict=True):
        (machine / name).write_text(text + "\n")
    assert num_blocks_after_a_call(PrefixStore(tiny("llama"))) == pytest.approx(expected, abs=1)


def test_what_another_store_was_promised_is_not_promised_again(machine: Path) -> None:
    first = PrefixStore(tiny("llama"), num_blocks=400)
    assert num_blocks_after_a_call(first) == 400
    second = PrefixStore(tiny("llama"))
    assert 300 <= num_blocks_after_a_call(second) < 350  # half of the 600 that are left, and of the few that were taken


def test_of_several_stores_each_gets_its_part_whatever_others_were_promised(machine: Path) -> None:
    greedy = PrefixStore(tiny("llama"), num_blocks=10**6)
    num_blocks_after_a_call(greedy)
    assert num_blocks_after_a_call(PrefixStore(tiny("llama"))) == pytest.approx(250, abs=1)


@pytest.mark.parametrize("num_blocks", [2, 4, 12])
def test_a_pool_of_any_size_keeps_what_it_has_room_for(num_blocks: int) -> None:
    cache = PagedPrefixCache(tiny("llama"), num_blocks=num_blocks)
    for _ in range(2):
        assert_right(tiny("llama"), cache, input_ids=IDS)
        cache.reset()
    assert cache.last_call.rows[0].matched_tokens == 16 * min(num_blocks - 1, 3)
    cache.check()


def test_a_first_call_of_a_few_tokens_measures_nothing() -> None:
    model = build("llama")
    cache = PagedPrefixCache(model)
    with Forwards(model) as forwards:
        run(model, cache, input_ids=torch.tensor([row((1, 20))]), max_new_tokens=3)
    assert forwards == [(1, 20), (1, 1), (1, 1)]


@pytest.mark.parametrize("how", ["max_bytes", "what is free"])
def test_a_budget_in_bytes_is_kept_when_the_model_takes_a_wider_dtype(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_budget, "free_bytes", lambda _: 2 * 400_000)
    model = build("llama").bfloat16()
    cache = PagedPrefixCache(model, **({"max_bytes": 400_000} if how == "max_bytes" else {}))
    other = PagedPrefixCache(cache.store)
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        model.to(dtype)
        for number in range(12):
            given = {"input_ids": torch.tensor([row((number, 60))]), "max_new_tokens": 2}
            output = run(model, (cache, other)[number % 2], **given)
            stats = cache.store.stats()
            assert stats.pool_bytes is not None
            assert stats.pool_bytes <= 400_000
            if dtype == torch.float32:
                assert_same(run(model, **given), output)
        cache.check()
        cache.reset()
        run(model, cache, **given)
        assert cache.last_call.reused_tokens == 48
        other.reset()
