"""The block pool: what is written is what is read, wherever the slots lie and however the pool has grown since."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from hf_paged_cache.kv.recycled_memory import RecycledMemory, zeros
from hf_paged_cache.kv.slot_mapping import ReadSource, SlotMapping

from hf_paged_cache import PoolArgumentError
from hf_paged_cache.kv import block_pool, recycled_memory
from hf_paged_cache.kv.block_pool import BlockPool

from .reading import of_slots

BLOCK_SIZE = 4
HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5
HEADS_AND_SIZES = (("key", 1, 3), ("value", 5, 2))  # as latent attention has them

RUN = [4, 5, 6, 7, 8, 9]
SCATTERED = [9, 4, 22, 5, 13, 30]
LOOKS_LIKE_A_RUN = [4, 6, 5, 7, 8, 9]  # as long as its ends are apart, and no run


def states(
    rng: torch.Generator, num_rows: int, num_tokens: int, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    return {
        "key": torch.randn(num_rows, HEADS, num_tokens, KEY_DIM, generator=rng).to(dtype),
        "value": torch.randn(num_rows, HEADS, num_tokens, VALUE_DIM, generator=rng).to(dtype),
    }


def make_pool(num_blocks: int = 8) -> BlockPool:
    pool = BlockPool(BLOCK_SIZE)
    pool.all.ensure_capacity(num_blocks)
    return pool


def all_slots(pool: BlockPool) -> torch.Tensor:
    return torch.arange(pool.all.capacity * BLOCK_SIZE)[None]


def assert_holds(pool: BlockPool, layer_idx: int, slots: list[int], expected: dict[str, torch.Tensor]) -> None:
    """The slots of a layer hold, bit for bit, the tokens of `expected`, row after row."""
    gathered = pool.gather(layer_idx, of_slots(torch.tensor([slots])))
    assert gathered.keys() == expected.keys()
    for name, tensor in expected.items():
        in_order = tensor.transpose(1, 2).flatten(0, 1)  # [tokens, H, D]
        found = gathered[name][0].transpose(0, 1)
        assert found.dtype == tensor.dtype
        assert found.contiguous().view(torch.uint8).equal(in_order.contiguous().view(torch.uint8)), name


# Writing and reading


@pytest.mark.parametrize("slots", [RUN, SCATTERED, LOOKS_LIKE_A_RUN], ids=["run", "scattered", "no run"])
@pytest.mark.parametrize("num_rows", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_gathered_is_what_was_written_bit_for_bit(
    slots: list[int], num_rows: int, dtype: torch.dtype, rng: torch.Generator
) -> None:
    pool = make_pool()
    new = states(rng, num_rows, len(slots) // num_rows, dtype)
    pool.write(0, new, SlotMapping(slots))
    assert_holds(pool, 0, slots, new)


def test_layers_do_not_touch_each_other_and_may_differ_in_shape(rng: torch.Generator) -> None:
    pool = make_pool()
    first = states(rng, 1, 6)
    second = {"key": torch.randn(1, 7, 6, 2, generator=rng), "index": torch.randn(1, 1, 6, 9, generator=rng)}
    pool.write(0, first, SlotMapping(RUN))
    pool.write(5, second, SlotMapping(RUN))
    assert_holds(pool, 0, RUN, first)
    assert_holds(pool, 5, RUN, second)
    assert pool.layer_indices == [0, 5]


def test_a_slot_mapping_of_no_slots_writes_nothing_and_still_makes_the_layer(rng: torch.Generator) -> None:
    pool = make_pool()
    pool.write(0, states(rng, 1, 1), SlotMapping([], []))
    assert pool.layer_indices == [0]
    assert not pool.gather(0, of_slots(all_slots(pool)))["key"].any()


def test_many_rows_are_gathered_each_with_its_own_slots(rng: torch.Generator) -> None:
    pool = make_pool()
    new = states(rng, 1, 6)
    pool.write(0, new, SlotMapping(RUN))
    gathered = pool.gather(0, of_slots(torch.tensor([[4, 5, 6], [9, 9, 4]])))
    assert gathered["key"].shape == (2, HEADS, 3, KEY_DIM)
    assert gathered["key"][0].equal(new["key"][0, :, [0, 1, 2]])
    assert gathered["key"][1].equal(new["key"][0, :, [5, 5, 0]])


@pytest.mark.parametrize("recycled", [False, True], ids=["own memory", "recycled memory"])
@pytest.mark.parametrize(
    ("source", "first"),
    [
        (of_slots(torch.tensor([RUN[1:]])), 1),
        (ReadSource(torch.tensor([[1, 2]]).to, 1, 5, num_blocks=2, skipped=1), 1),
        (ReadSource(torch.tensor([[1, 2]]).to, 1, 6, num_blocks=2), 0),
    ],
    ids=["by slot", "by block", "from the first slot of a block"],
)
def test_what_is_gathered_is_a_copy_that_models_may_view_by_row_and_head(
    source: ReadSource, first: int, recycled: bool, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recycled_memory, "_MIN_RECYCLED_BYTES", 1)
    pool, memory = make_pool(), RecycledMemory() if recycled else None
    new = states(rng, 1, 6)
    pool.write(0, new, SlotMapping(RUN))
    gathered = pool.gather(0, source, memory=memory)
    assert memory is None or memory.num_bytes > 0
    for name, tensor in gathered.items():
        assert tensor.equal(new[name][:, :, first:])
        assert tensor.view(HEADS, *tensor.shape[2:]).equal(tensor[0])
        tensor.fill_(7)
    assert_holds(pool, 0, RUN, new)


@pytest.mark.parametrize("num_tokens", range(1, 14))
@pytest.mark.parametrize("first", [4, 5, 7])
def test_a_run_may_begin_and_end_anywhere_in_a_block(first: int, num_tokens: int, rng: torch.Generator) -> None:
    pool = make_pool()
    everything = states(rng, 1, pool.all.capacity * BLOCK_SIZE)
    pool.write(0, everything, SlotMapping(range(pool.all.capacity * BLOCK_SIZE)))
    new, run = states(rng, 1, num_tokens), list(range(first, first + num_tokens))
    pool.write(0, new, SlotMapping(run))
    assert_holds(pool, 0, run, new)
    others = [slot for slot in range(pool.all.capacity * BLOCK_SIZE) if slot not in run]
    assert_holds(pool, 0, others, {name: tensor[:, :, others] for name, tensor in everything.items()})


@pytest.mark.parametrize("block_ids", [[5], [5, 1, 7]], ids=["1 row", "3 rows"])
@pytest.mark.parametrize(("offset", "num_columns"), [(0, BLOCK_SIZE), (0, 1), (1, 2), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_columns_in_a_block_of_each_row_are_written_there(
    block_ids: list[int], offset: int, num_columns: int, dtype: torch.dtype, rng: torch.Generator
) -> None:
    pool, plain = make_pool(), make_pool()
    for each in (pool, plain):
        for layer_idx in (0, 3):
            each.write(layer_idx, states(torch.Generator().manual_seed(0), 1, 16, dtype), SlotMapping(range(16)))
    new = {layer_idx: states(rng, len(block_ids), num_columns) for layer_idx in (0, 3)}
    pool.write_blocks(new.items(), block_ids, offset)
    slots = [block_id * BLOCK_SIZE + offset + i for block_id in block_ids for i in range(num_columns)]
    for layer_idx, of_layer in new.items():
        plain.write(layer_idx, of_layer, SlotMapping(slots))
        everything = of_slots(all_slots(pool))
        for name, tensor in pool.gather(layer_idx, everything).items():
            assert tensor.dtype == torch.float32
            assert tensor.equal(plain.gather(layer_idx, everything)[name])
    assert pool.all.num_blocks_used == plain.all.num_blocks_used


@pytest.mark.parametrize("slots", [[9], [9, 4, 22], [29]], ids=["1 row", "3 rows", "a further block"])
def test_a_step_is_written_as_any_other_tokens_are(slots: list[int], rng: torch.Generator) -> None:
    pool, plain = make_pool(), make_pool()
    for each in (pool, plain):
        each.write(0, states(torch.Generator().manual_seed(0), 1, 24), SlotMapping(range(24)))
    new = states(rng, len(slots), 1)
    pool.write(0, new, SlotMapping(slots))
    for number, slot in enumerate(slots):  # as each would be by itself
        plain.write(0, {name: tensor[number : number + 1] for name, tensor in new.items()}, SlotMapping([slot]))
    everything = of_slots(all_slots(pool))
    for name, tensor in pool.gather(0, everything).items():
        assert tensor.equal(plain.gather(0, everything)[name])
    assert pool.all.num_blocks_used == plain.all.num_blocks_used


@pytest.mark.parametrize("slots", [[9], [9, 4, 22]], ids=["1 row", "3 rows"])
def test_a_step_is_written_where_keys_and_values_have_other_numbers_of_heads(
    slots: list[int], rng: torch.Generator
) -> None:
    pool = make_pool()
    pool.write(0, {"key": torch.zeros(1, 1, 1, 3), "value": torch.zeros(1, 5, 1, 2)}, SlotMapping([4]))
    new = {name: torch.randn(len(slots), heads, 1, size, generator=rng) for name, heads, size in HEADS_AND_SIZES}
    pool.write(0, new, SlotMapping(slots))
    assert_holds(pool, 0, slots, new)


def test_states_that_require_grad_are_written_without_their_history(rng: torch.Generator) -> None:
    pool = make_pool()
    new = {name: tensor.requires_grad_() for name, tensor in states(rng, 1, 6).items()}
    pool.write(0, new, SlotMapping(RUN))
    assert not pool.gather(0, of_slots(torch.tensor([RUN])))["key"].requires_grad


@pytest.mark.parametrize("slots", [RUN, SCATTERED], ids=["run", "scattered"])
def test_states_that_are_views_of_other_memory_are_written_right(slots: list[int], rng: torch.Generator) -> None:
    pool = make_pool()
    expanded = torch.randn(1, 1, 6, KEY_DIM, generator=rng).expand(1, HEADS, 6, KEY_DIM)
    new = {"key": expanded, "value": torch.randn(1, 6, HEADS, VALUE_DIM, generator=rng).transpose(1, 2)}
    pool.write(0, new, SlotMapping(slots))
    assert_holds(pool, 0, slots, new)


def test_random_writes_of_runs_and_scattered_slots_match_a_plain_list(rng: torch.Generator) -> None:
    shuffler, pool = random.Random(0), make_pool(4)
    expected = [torch.zeros(HEADS, KEY_DIM) for _ in range(4 * BLOCK_SIZE)]
    for _ in range(60):
        num_rows, num_tokens = shuffler.randint(1, 3), shuffler.randint(1, 4)
        new = torch.randn(num_rows, HEADS, num_tokens, KEY_DIM, generator=rng)
        sources = sorted(shuffler.sample(range(num_rows * num_tokens), shuffler.randint(1, num_rows * num_tokens)))
        first = shuffler.randint(0, len(expected) - len(sources))
        run = list(range(first, first + len(sources)))
        slots = run if shuffler.random() < 0.5 else shuffler.sample(range(len(expected)), len(sources))
        all_of_them = len(sources) == num_rows * num_tokens and shuffler.random() < 0.5
        pool.write(0, {"key": new}, SlotMapping(slots, None if all_of_them else sources))
        for slot, source in zip(slots, sources, strict=True):
            expected[slot] = new[source // num_tokens, :, source % num_tokens]
        assert pool.gather(0, of_slots(all_slots(pool)))["key"][0].equal(torch.stack(expected, dim=1))


# Copies


def test_blocks_are_copied_whole_in_all_layers_in_the_order_given(rng: torch.Generator) -> None:
    pool = make_pool()
    for layer_idx in (0, 1):
        pool.write(layer_idx, states(rng, 1, 8), SlotMapping(range(4, 12)))
    before = {layer_idx: pool.gather(layer_idx, of_slots(torch.arange(4, 8)[None])) for layer_idx in (0, 1)}
    pool.all.copy_blocks([(1, 5), (5, 2)])
    pool.all.copy_blocks([(2, 3), (1, 3)])
    for layer_idx in (0, 1):
        for start in (4, 20, 8, 12):  # the source, and all destinations
            found = pool.gather(layer_idx, of_slots(torch.arange(start, start + BLOCK_SIZE)[None]))
            assert all(found[name].equal(before[layer_idx][name]) for name in ("key", "value"))


# Memory


def test_unwritten_slots_are_zero_also_after_growth(rng: torch.Generator) -> None:
    pool = make_pool(3)
    pool.write(0, states(rng, 1, 6), SlotMapping(RUN))
    pool.all.ensure_capacity(9)
    found = pool.gather(0, of_slots(all_slots(pool)))["key"][0]
    for slot in range(9 * BLOCK_SIZE):
        assert found[:, slot].any() == (slot in RUN)


def test_growth_keeps_what_was_written(rng: torch.Generator) -> None:
    pool = make_pool(4)
    new = states(rng, 2, 3)
    pool.write(0, new, SlotMapping(RUN))
    for num_blocks in (5, 11, 64):
        pool.all.ensure_capacity(num_blocks)
        assert pool.all.capacity == num_blocks
        assert_holds(pool, 0, RUN, new)
    late = states(rng, 1, 1)
    pool.write(0, late, SlotMapping([63 * BLOCK_SIZE]))
    assert_holds(pool, 0, [63 * BLOCK_SIZE], late)


@pytest.mark.parametrize("made_in", [True, False])
@pytest.mark.parametrize("grown_in", [True, False])
def test_a_pool_made_in_inference_mode_can_be_written_out_of_it_and_the_other_way_round(
    made_in: bool, grown_in: bool, rng: torch.Generator
) -> None:
    pool = make_pool()
    with torch.inference_mode(made_in):
        pool.write(0, states(rng, 1, 6), SlotMapping(RUN))
    with torch.inference_mode(grown_in):
        pool.all.ensure_capacity(16)
    for inside in (False, True):
        with torch.inference_mode(inside):
            new = states(rng, 1, 6)
            for slots in (RUN, SCATTERED):
                pool.write(0, new, SlotMapping(slots))
                assert_holds(pool, 0, slots, new)
            pool.all.copy_blocks([(1, 2)])


def test_a_slot_mapping_made_in_inference_mode_works_out_of_it(rng: torch.Generator) -> None:
    pool, slot_mapping, new = make_pool(), SlotMapping(SCATTERED, [0, 1, 2, 3, 4, 5]), states(rng, 1, 6)
    with torch.inference_mode():
        pool.write(0, new, slot_mapping)
    pool.write(1, new, slot_mapping)
    assert_holds(pool, 1, SCATTERED, new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_new_memory_is_zero_and_no_inference_tensor(dtype: torch.dtype, device: torch.device) -> None:
    with torch.inference_mode():
        made = zeros((2, 3, 1, 5), dtype, device)
    assert (made.shape, made.dtype, made.device.type) == ((2, 3, 1, 5), dtype, device.type)
    assert not made.any()
    assert not made.is_inference()


def test_bytes_are_counted_by_block_over_all_layers(rng: torch.Generator) -> None:
    pool = make_pool()
    assert pool.all.bytes_per_block == 0
    pool.write(0, states(rng, 1, 6), SlotMapping(RUN))
    one_layer = BLOCK_SIZE * HEADS * (KEY_DIM + VALUE_DIM) * 4
    assert pool.all.bytes_per_block == one_layer
    pool.write(1, states(rng, 1, 6, torch.bfloat16), SlotMapping(RUN))
    assert pool.all.bytes_per_block == one_layer + one_layer // 2
    pool.write(1, states(rng, 1, 6), SlotMapping(RUN))  # widens
    assert pool.all.bytes_per_block == 2 * one_layer
    pool.all.ensure_capacity(100)
    assert pool.all.bytes_per_block == 2 * one_layer


def test_on_a_host_only_blocks_that_were_used_count_as_held() -> None:
    pool = BlockPool(BLOCK_SIZE)
    pool.all.ensure_capacity(100)
    pool.write(0, {"key": torch.ones(1, 1, 4, 1)}, SlotMapping([4, 5, 6, 7]))
    assert pool.pool_bytes == 2 * pool.all.bytes_per_block


def test_clearing_gives_the_memory_back_and_forgets_the_shapes(rng: torch.Generator) -> None:
    pool = make_pool()
    pool.write(0, states(rng, 1, 6), SlotMapping(RUN))
    pool.write(0, states(rng, 1, 1), SlotMapping([7 * BLOCK_SIZE]))
    pool.clear()
    assert (pool.all.capacity, pool.pool_bytes, pool.all.bytes_per_block, pool.layer_indices) == (0, 0, 0, [])
    pool.all.ensure_capacity(8)
    other = {"key": torch.randn(1, 9, 6, 1, generator=rng)}
    pool.write(0, other, SlotMapping(RUN))
    assert_holds(pool, 0, RUN, other)
    assert pool.pool_bytes == 3 * pool.all.bytes_per_block  # of the blocks written since, with the null block


def test_a_pool_is_where_its_tensors_are_and_an_empty_one_where_the_first_will_be() -> None:
    where = torch.device("cpu")
    pool = BlockPool(BLOCK_SIZE, lambda: where)
    pool.all.ensure_capacity(8)
    assert pool.is_on_host
    where = torch.device("meta")  # stands for an accelerator
    assert not pool.is_on_host
    pool.write(0, {"key": torch.ones(1, 1, 4, 1)}, SlotMapping([4, 5, 6, 7]))
    assert pool.is_on_host
    pool.write(1, {"key": torch.ones(1, 3, 4, 1, device="meta")}, SlotMapping([4, 5, 6, 7]))
    assert not pool.is_on_host
    one = BLOCK_SIZE * 4
    assert pool.all.bytes_per_block_on() == {torch.device("cpu"): one, torch.device("meta"): 3 * one}
    assert pool.bytes_on() == {torch.device("cpu"): 2 * one, torch.device("meta"): 8 * 3 * one}
    memory = RecycledMemory()  # of the host
    assert pool.gather(1, of_slots(torch.tensor([[4]])), memory=memory)["key"].device.type == "meta"


# Growing where memory is short


class Memory:
    """In place of `zeros`: counts the bytes that live, and fails where it is told to."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.live = self.peak = 0
        self.error: BaseException | None = None
        self.fails_in = 0  # allocations from now
        patch.setattr(block_pool, "zeros", self.zeros)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.fails_in -= 1
        if self.error is not None and self.fails_in == 0:
            raise self.error
        made = torch.zeros(shape, dtype=dtype, device=device)
        self.live += made.nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(made, self.give_back, made.nbytes)
        return made

    def give_back(self, num_bytes: int) -> None:
        self.live -= num_bytes


def make_layers(num_layers: int, rng: torch.Generator) -> tuple[BlockPool, list[dict[str, torch.Tensor]]]:
    pool, new = make_pool(), [states(rng, 1, 6) for _ in range(num_layers)]
    for layer_idx, of_layer in enumerate(new):
        pool.write(layer_idx, of_layer, SlotMapping(RUN))
    return pool, new


def test_a_pool_grows_one_tensor_after_the_other(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(monkeypatch)
    pool, new = make_layers(8, rng)
    largest = 8 * BLOCK_SIZE * HEADS * VALUE_DIM * 4
    before = memory.live
    expected = pool.all.bytes_to_grow(12)
    pool.all.ensure_capacity(12)
    assert memory.live == before * 12 // 8
    assert memory.peak - memory.live <= largest < 0.1 * before
    assert expected == {torch.device("cpu"): memory.live - before + largest}
    for layer_idx, of_layer in enumerate(new):
        assert_holds(pool, layer_idx, RUN, of_layer)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("on purpose"), KeyboardInterrupt()], ids=["memory", "Ctrl-C"])
@pytest.mark.parametrize("at", [1, 2, 5, 6])
def test_a_pool_whose_growth_was_cut_short_is_as_before_and_grows_again(
    at: int, error: BaseException, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(monkeypatch)
    pool, new = make_layers(3, rng)
    before = memory.live
    memory.error, memory.fails_in = error, at
    with pytest.raises(type(error)):
        pool.all.ensure_capacity(12)
    error.__traceback__ = None
    assert pool.all.capacity == 8
    assert (memory.live == before) is (at == 1 or isinstance(error, torch.OutOfMemoryError))  # those grown shrank again
    memory.error = None
    late = states(rng, 1, 4)
    pool.write(1, late, SlotMapping([28, 29, 30, 31]))
    pool.all.copy_blocks([(7, 6)])
    pool.all.ensure_capacity(20)
    assert (pool.all.capacity, memory.live) == (20, before * 20 // 8)
    for layer_idx, of_layer in enumerate(new):
        assert_holds(pool, layer_idx, RUN, of_layer)
    assert_holds(pool, 1, [24, 25, 26, 27], late)


def test_blocks_are_copied_one_by_one_where_there_is_no_memory_for_all(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_rows(*args: Any) -> None:
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr(block_pool, "copy_rows", copy_rows)
    pool, (new,) = make_layers(1, rng)
    pool.all.copy_blocks([(1, 4), (2, 5)])
    assert_holds(pool, 0, [slot + 12 for slot in RUN], new)


# Types


@pytest.mark.parametrize(
    ("first", "second", "held"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
    ],
)
@pytest.mark.parametrize("slots", [[16, 17], [17, 30]], ids=["run", "scattered"])
def test_no_write_loses_precision_and_none_that_came_before_it_does(
    first: torch.dtype, second: torch.dtype, held: torch.dtype, slots: list[int], rng: torch.Generator
) -> None:
    pool = make_pool()
    old, new = states(rng, 1, 6, first), states(rng, 1, 2, second)
    pool.write(0, old, SlotMapping(RUN))
    pool.write(0, new, SlotMapping(slots))
    assert_holds(pool, 0, RUN, {name: tensor.to(held) for name, tensor in old.items()})
    assert_holds(pool, 0, slots, {name: tensor.to(held) for name, tensor in new.items()})


# Refusals


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((HEADS, 6, KEY_DIM), "expected [rows, heads, tokens, head_dim], got (2, 6, 3)"),
        ((1, HEADS + 1, 6, KEY_DIM), "holds 2 heads of 3, got 3 of 3"),
        ((1, HEADS, 6, KEY_DIM + 1), "holds 2 heads of 3, got 2 of 4"),
    ],
)
def test_states_of_another_shape_are_refused_by_layer_and_name(
    shape: tuple[int, ...], said: str, rng: torch.Generator
) -> None:
    pool = make_pool()
    new = states(rng, 1, 6)
    pool.write(3, new, SlotMapping(RUN))
    with pytest.raises(PoolArgumentError) as caught:
        pool.write(3, {"key": torch.zeros(shape), "value": new["value"]}, SlotMapping(RUN))
    assert "layer 3 key" in str(caught.value)
    assert said in str(caught.value)
    assert_holds(pool, 3, RUN, new)


def test_a_first_write_of_another_shape_leaves_no_layer_behind() -> None:
    pool = make_pool()
    with pytest.raises(PoolArgumentError):
        pool.write(0, {"key": torch.zeros(2, 6, 3)}, SlotMapping(RUN))
    assert pool.layer_indices == []
    assert pool.all.bytes_per_block == 0
    pool.write(0, {"key": torch.zeros(1, 2, 6, 3)}, SlotMapping(RUN))
    with pytest.raises(PoolArgumentError, match="expected"):
        pool.write(0, {"key": torch.zeros(2, 6, 3)}, SlotMapping(RUN))


def test_only_the_tensors_that_are_asked_for_are_gathered(rng: torch.Generator) -> None:
    pool, written = make_pool(), states(rng, 1, 6)
    pool.write(0, written, SlotMapping(RUN))
    gathered = pool.gather(0, of_slots(torch.tensor([RUN])), ["value"])
    assert gathered.keys() == {"value"}
    assert gathered["value"].equal(written["value"])


def test_a_layer_that_was_never_written_cannot_be_gathered(rng: torch.Generator) -> None:
    pool = make_pool()
    pool.write(2, states(rng, 1, 6), SlotMapping(RUN))
    with pytest.raises(PoolArgumentError, match=r"layer 1 was never written; layers written are \[2\]"):
        pool.gather(1, of_slots(torch.tensor([[4]])))


def test_a_pool_that_is_let_go_waits_for_no_collector(rng: torch.Generator) -> None:
    pool = make_pool()
    pool.write(0, states(rng, 1, 6), SlotMapping(RUN))
    tensor = weakref.ref(pool.layer(0)["key"])
    gc.disable()
    try:
        del pool
        assert tensor() is None
    finally:
        gc.enable()
