"""The block pool: what is written to blocks is what is read of them, wherever they lie and however the pool has grown since."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch

from hf_paged_cache import PoolArgumentError
from hf_paged_cache.kv import block_pool
from hf_paged_cache.kv.block_pool import BlockPool
from hf_paged_cache.rows import memory as row_memory

from .through_slabs import read, write, write_to_slabs

BLOCK_SIZE = 4
HEADS, KEY_DIM, VALUE_DIM = 2, 3, 5
HEADS_AND_SIZES = (("key", 1, 3), ("value", 5, 2))  # as latent attention has them

RUN = [1, 2, 3]
SCATTERED = [5, 1, 7]
LOOKS_LIKE_A_RUN = [1, 3, 2, 4]  # as long as its ends are apart, and no run


def states(rng: torch.Generator, num_tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {
        "key": torch.randn(1, HEADS, num_tokens, KEY_DIM, generator=rng).to(dtype),
        "value": torch.randn(1, HEADS, num_tokens, VALUE_DIM, generator=rng).to(dtype),
    }


def make_pool(num_blocks: int = 8) -> BlockPool:
    pool = BlockPool(BLOCK_SIZE)
    pool.all.ensure_capacity(num_blocks)
    return pool


def assert_holds(pool: BlockPool, layer_idx: int, block_ids: list[int], expected: dict[str, torch.Tensor]) -> None:
    """The first tokens of these blocks of a layer are, bit for bit, those of `expected`."""
    found = read(pool, layer_idx, block_ids, expected["key"].shape[2])
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].contiguous().view(torch.uint8).equal(tensor.contiguous().view(torch.uint8)), name


# Writing and reading


@pytest.mark.parametrize("block_ids", [RUN, SCATTERED, LOOKS_LIKE_A_RUN], ids=["run", "scattered", "no run"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_read_is_what_was_written_bit_for_bit(
    block_ids: list[int], dtype: torch.dtype, rng: torch.Generator
) -> None:
    pool = make_pool()
    new = states(rng, len(block_ids) * BLOCK_SIZE, dtype)
    write(pool, 0, new, block_ids)
    assert_holds(pool, 0, block_ids, new)
    others = [block_id for block_id in range(8) if block_id not in block_ids]
    assert not any(tensor.any() for tensor in read(pool, 0, others).values())


def test_layers_do_not_touch_each_other_and_may_differ_in_shape(rng: torch.Generator) -> None:
    pool = make_pool()
    first = states(rng, 6)
    second = {"key": torch.randn(1, 7, 6, 2, generator=rng), "index": torch.randn(1, 1, 6, 9, generator=rng)}
    third = {name: torch.randn(1, heads, 6, size, generator=rng) for name, heads, size in HEADS_AND_SIZES}
    for layer_idx, new in ((0, first), (5, second), (7, third)):
        write(pool, layer_idx, new, RUN)
    for layer_idx, new in ((0, first), (5, second), (7, third)):
        assert_holds(pool, layer_idx, RUN, new)
    assert pool.layer_indices == [0, 5, 7]
    assert pool.layer(1) == {}


def test_a_layer_that_is_laid_out_holds_zeros_and_is_made_once(rng: torch.Generator) -> None:
    pool = make_pool()
    pool.lay_out(0, "key", HEADS, KEY_DIM, torch.float32)
    assert pool.layer_indices == [0]
    assert pool.all.bytes_per_block == BLOCK_SIZE * HEADS * KEY_DIM * 4
    assert not read(pool, 0, [*range(8)])["key"].any()
    write(pool, 0, (new := {"key": states(rng, 6)["key"]}), RUN)
    layouts = pool.num_layouts
    pool.lay_out(0, "key", HEADS, KEY_DIM, torch.float32)
    assert pool.num_layouts == layouts
    assert_holds(pool, 0, RUN, new)


def test_what_is_read_is_a_copy(rng: torch.Generator) -> None:
    pool, new = make_pool(), states(rng, 12)
    write(pool, 0, new, RUN)
    for tensor in read(pool, 0, RUN).values():
        tensor.fill_(7)
    assert_holds(pool, 0, RUN, new)


@pytest.mark.parametrize("num_tokens", range(1, 13))
@pytest.mark.parametrize("skipped", [0, 1, 3])
@pytest.mark.parametrize("block_ids", [RUN, SCATTERED], ids=["run", "scattered"])
def test_what_is_read_may_begin_in_the_first_block_and_end_in_any(
    block_ids: list[int], skipped: int, num_tokens: int, rng: torch.Generator
) -> None:
    pool, new = make_pool(), states(rng, 12)
    write(pool, 0, new, block_ids)
    found = read(pool, 0, block_ids, max(skipped, num_tokens), skipped)
    for name, tensor in found.items():
        assert tensor.equal(new[name][:, :, skipped : max(skipped, num_tokens)])


def test_blocks_are_loaded_into_columns_of_some_rows_and_no_others(rng: torch.Generator) -> None:
    pool, new = make_pool(), states(rng, 12)
    write(pool, 0, new, SCATTERED)
    made = row_memory.make(row_memory.shapes_of_slabs(pool.all.slabs()), 3, 16)
    row_memory.load_blocks(made, pool.all.slabs(), [0, 2], 2, SCATTERED, 11, 1)
    for tensor, ((_, name),) in made:
        expected = torch.zeros(3, HEADS, 16, tensor.shape[-1])
        expected[[0, 2], :, 2:12] = new[name][:, :, 1:11]
        assert tensor[0].equal(expected)


@pytest.mark.parametrize("block_ids", [RUN, SCATTERED], ids=["run", "scattered"])
def test_states_that_are_views_of_other_memory_are_written_right(block_ids: list[int], rng: torch.Generator) -> None:
    pool = make_pool()
    expanded = torch.randn(1, 1, 12, KEY_DIM, generator=rng).expand(1, HEADS, 12, KEY_DIM)
    new = {"key": expanded, "value": torch.randn(1, 12, HEADS, VALUE_DIM, generator=rng).transpose(1, 2)}
    write(pool, 0, new, block_ids)
    assert_holds(pool, 0, block_ids, new)


def test_random_writes_copies_and_growth_match_a_plain_list(rng: torch.Generator) -> None:
    shuffler, pool = random.Random(0), make_pool(4)
    expected = [torch.zeros(HEADS, BLOCK_SIZE, KEY_DIM) for _ in range(4)]
    for _ in range(60):
        num_blocks = shuffler.randint(1, len(expected) // 2)
        first = shuffler.randint(0, len(expected) - num_blocks)
        run = list(range(first, first + num_blocks))
        block_ids = run if shuffler.random() < 0.5 else shuffler.sample(range(len(expected)), num_blocks)
        new = torch.randn(1, HEADS, num_blocks * BLOCK_SIZE, KEY_DIM, generator=rng)
        write(pool, 0, {"key": new}, block_ids)
        for block_id, of_block in zip(block_ids, new[0].split(BLOCK_SIZE, dim=1), strict=True):
            expected[block_id] = of_block
        copies = [(shuffler.randrange(len(expected)), shuffler.randrange(len(expected))) for _ in range(3)]
        pool.all.copy_blocks(copies)
        for source, destination in copies:
            expected[destination] = expected[source]
        if shuffler.random() < 0.1:
            pool.all.ensure_capacity(len(expected) + 1)
            expected.append(torch.zeros(HEADS, BLOCK_SIZE, KEY_DIM))
        assert read(pool, 0, [*range(len(expected))])["key"][0].equal(torch.cat(expected, dim=1))
    assert len(expected) > 6


# Layers whose tensors are made together


def together(pool: BlockPool, rng: torch.Generator, num_layers: int = 3) -> dict[tuple[int, str], torch.Tensor]:
    """Streams of some layers, which the pool has tensors for."""
    new = {(layer_idx, name): held for layer_idx in range(num_layers) for name, held in states(rng, 12).items()}
    pool.lay_out_together(new)
    return new


def assert_holds_streams(pool: BlockPool, block_ids: list[int], expected: dict[tuple[int, str], torch.Tensor]) -> None:
    for layer_idx in {layer_idx for layer_idx, _ in expected}:
        assert_holds(pool, layer_idx, block_ids, {name: expected[layer_idx, name] for name in ("key", "value")})


def test_layers_of_one_shape_lie_in_one_slab_and_are_written_and_copied_as_others(rng: torch.Generator) -> None:
    pool = make_pool()
    new = together(pool, rng)
    keys, values = pool.all.slabs()
    assert keys.tensor.shape == (3, HEADS, 8, BLOCK_SIZE, KEY_DIM)
    assert values.tensor.shape == (3, HEADS, 8, BLOCK_SIZE, VALUE_DIM)
    assert keys.streams == ((0, "key"), (1, "key"), (2, "key"))
    assert pool.all.bytes_per_block == 3 * BLOCK_SIZE * HEADS * (KEY_DIM + VALUE_DIM) * 4
    write_to_slabs(pool, new, SCATTERED)
    pool.all.copy_blocks([(5, 2), (1, 3), (7, 4)])
    assert_holds_streams(pool, SCATTERED, new)
    assert_holds_streams(pool, [2, 3, 4], new)
    for number, (layer_idx, name) in enumerate(keys.streams):
        assert pool.layer(layer_idx)[name].data_ptr() == keys.tensor[number].data_ptr()


def test_what_was_made_together_stays_so_as_the_pool_grows(rng: torch.Generator) -> None:
    pool = make_pool(4)
    new = together(pool, rng)
    write_to_slabs(pool, new, RUN)
    for num_blocks in (5, 11, 64):
        pool.all.ensure_capacity(num_blocks)
        assert [len(slab.streams) for slab in pool.all.slabs()] == [3, 3]
        assert_holds_streams(pool, RUN, new)
        assert not any(slab.tensor[:, :, 4:].any() for slab in pool.all.slabs())


def test_layers_that_are_there_are_not_made_anew_beside_others(rng: torch.Generator) -> None:
    pool, first = make_pool(), states(rng, 12)
    write(pool, 1, first, RUN)
    new = together(pool, rng)
    assert {slab.streams for slab in pool.all.slabs()} >= {((0, "key"), (2, "key")), ((1, "key"),)}
    assert_holds(pool, 1, RUN, first)
    write_to_slabs(pool, new, RUN)
    assert_holds_streams(pool, RUN, new)


def test_a_layer_that_widens_leaves_those_it_was_made_with_and_all_keep_their_content(rng: torch.Generator) -> None:
    pool = make_pool()
    new = together(pool, rng)
    write_to_slabs(pool, new, RUN)
    write(pool, 1, {"key": torch.zeros(1, HEADS, 4, KEY_DIM, dtype=torch.float64)}, [7])
    assert {slab.streams for slab in pool.all.slabs()} == {
        ((1, "key"),),
        ((0, "key"),),
        ((2, "key"),),
        ((0, "value"), (1, "value"), (2, "value")),
    }
    for _ in range(2):
        expected = new | {(1, "key"): new[1, "key"].double()}
        assert_holds_streams(pool, RUN, expected)
        pool.all.ensure_capacity(12)


# Copies


def test_blocks_are_copied_whole_in_all_layers_in_the_order_given(rng: torch.Generator) -> None:
    pool, new = make_pool(), [states(rng, 4), states(rng, 4)]
    for layer_idx in (0, 1):
        write(pool, layer_idx, new[layer_idx], [1])
        write(pool, layer_idx, states(rng, 4), [2])
    pool.all.copy_blocks([(1, 5), (5, 2)])
    pool.all.copy_blocks([(2, 3), (1, 4)])
    for layer_idx in (0, 1):
        for block_id in (1, 5, 2, 3, 4):  # the source, and all destinations
            assert_holds(pool, layer_idx, [block_id], new[layer_idx])


# Memory


def test_unwritten_blocks_are_zero_also_after_growth(rng: torch.Generator) -> None:
    pool = make_pool(4)
    write(pool, 0, states(rng, 12), RUN)
    pool.all.ensure_capacity(9)
    for block_id in range(9):
        assert read(pool, 0, [block_id])["key"].any() == (block_id in RUN)


def test_growth_keeps_what_was_written(rng: torch.Generator) -> None:
    pool = make_pool(4)
    new = states(rng, 12)
    write(pool, 0, new, RUN)
    for num_blocks in (5, 11, 64):
        pool.all.ensure_capacity(num_blocks)
        assert pool.all.capacity == num_blocks
        assert_holds(pool, 0, RUN, new)
    late = states(rng, 1)
    write(pool, 0, late, [63])
    assert_holds(pool, 0, [63], late)


@pytest.mark.parametrize("made_in", [True, False])
@pytest.mark.parametrize("grown_in", [True, False])
def test_a_pool_made_in_inference_mode_can_be_written_out_of_it_and_the_other_way_round(
    made_in: bool, grown_in: bool, rng: torch.Generator
) -> None:
    pool = make_pool()
    with torch.inference_mode(made_in):
        write(pool, 5, states(rng, 6), RUN)
        together(pool, rng)
    with torch.inference_mode(grown_in):
        pool.all.ensure_capacity(16)
    for inside in (False, True):
        with torch.inference_mode(inside):
            for block_ids in (RUN, SCATTERED):
                for layer_idx in (0, 5):
                    new = states(rng, 12)
                    write(pool, layer_idx, new, block_ids)
                    assert_holds(pool, layer_idx, block_ids, new)
            pool.all.copy_blocks([(1, 2)])


def test_bytes_are_counted_by_block_over_all_layers(rng: torch.Generator) -> None:
    pool = make_pool()
    assert pool.all.bytes_per_block == 0
    write(pool, 0, states(rng, 6), RUN)
    one_layer = BLOCK_SIZE * HEADS * (KEY_DIM + VALUE_DIM) * 4
    assert pool.all.bytes_per_block == one_layer
    write(pool, 1, states(rng, 6, torch.bfloat16), RUN)
    assert pool.all.bytes_per_block == one_layer + one_layer // 2
    write(pool, 1, states(rng, 6), RUN)  # widens
    assert pool.all.bytes_per_block == 2 * one_layer
    pool.all.ensure_capacity(100)
    assert pool.all.bytes_per_block == 2 * one_layer


def test_on_a_host_only_blocks_that_were_used_count_as_held() -> None:
    pool = BlockPool(BLOCK_SIZE)
    pool.all.ensure_capacity(100)
    write(pool, 0, {"key": torch.ones(1, 1, 4, 1)}, [1])
    assert pool.pool_bytes == 2 * pool.all.bytes_per_block


def test_clearing_gives_the_memory_back_and_forgets_the_shapes(rng: torch.Generator) -> None:
    pool = make_pool()
    write(pool, 0, states(rng, 6), RUN)
    write(pool, 0, states(rng, 1), [7])
    together(pool, rng)
    pool.clear()
    assert (pool.all.capacity, pool.pool_bytes, pool.all.bytes_per_block, pool.layer_indices) == (0, 0, 0, [])
    assert pool.all.slabs() == []
    pool.all.ensure_capacity(8)
    other = {"key": torch.randn(1, 9, 6, 1, generator=rng)}
    write(pool, 0, other, RUN[:2])
    assert_holds(pool, 0, RUN[:2], other)
    assert pool.pool_bytes == 3 * pool.all.bytes_per_block  # of the blocks written since, with the null block


def test_a_pool_is_where_its_tensors_are_and_an_empty_one_where_the_first_will_be() -> None:
    where = torch.device("cpu")
    pool = BlockPool(BLOCK_SIZE, lambda: where)
    pool.all.ensure_capacity(8)
    assert pool.is_on_host
    where = torch.device("meta")  # stands for an accelerator
    assert not pool.is_on_host
    write(pool, 0, {"key": torch.ones(1, 1, 4, 1)}, [1])
    assert pool.is_on_host
    write(pool, 1, {"key": torch.ones(1, 3, 4, 1, device="meta")}, [1])
    assert not pool.is_on_host
    one = BLOCK_SIZE * 4
    assert pool.all.bytes_per_block_on() == {torch.device("cpu"): one, torch.device("meta"): 3 * one}
    assert pool.bytes_on() == {torch.device("cpu"): 2 * one, torch.device("meta"): 8 * 3 * one}


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
        weakref.finalize(made.untyped_storage(), self.give_back, made.nbytes)
        return made

    def give_back(self, num_bytes: int) -> None:
        self.live -= num_bytes


def make_layers(num_layers: int, rng: torch.Generator) -> tuple[BlockPool, list[dict[str, torch.Tensor]]]:
    pool, new = make_pool(), [states(rng, 12) for _ in range(num_layers)]
    for layer_idx, of_layer in enumerate(new):
        write(pool, layer_idx, of_layer, RUN)
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


def test_of_layers_made_together_what_was_used_is_there_twice_while_they_grow(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, pool = Memory(monkeypatch), make_pool()
    new = together(pool, rng)
    write_to_slabs(pool, new, RUN)
    before, of_values = memory.live, 3 * BLOCK_SIZE * HEADS * VALUE_DIM * 4
    expected = pool.all.bytes_to_grow(12)
    pool.all.ensure_capacity(12)
    assert memory.live == before * 12 // 8
    assert memory.peak - memory.live <= 8 * of_values
    assert expected == {
        torch.device("cpu"): memory.live - before + 4 * of_values
    }  # of a host those used, with the null block
    assert_holds_streams(pool, RUN, new)


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
    late = states(rng, 4)
    write(pool, 1, late, [7])
    pool.all.copy_blocks([(7, 6)])
    pool.all.ensure_capacity(20)
    assert (pool.all.capacity, memory.live) == (20, before * 20 // 8)
    for layer_idx, of_layer in enumerate(new):
        assert_holds(pool, layer_idx, RUN, of_layer)
    assert_holds(pool, 1, [6], late)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("on purpose"), KeyboardInterrupt()], ids=["memory", "Ctrl-C"])
@pytest.mark.parametrize("at", [1, 2])
def test_layers_made_together_whose_growth_was_cut_short_are_as_before_and_grow_again(
    at: int, error: BaseException, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, pool = Memory(monkeypatch), make_pool()
    new = together(pool, rng)
    write_to_slabs(pool, new, RUN)
    before = memory.live
    memory.error, memory.fails_in = error, at
    with pytest.raises(type(error)):
        pool.all.ensure_capacity(12)
    error.__traceback__ = None
    assert pool.all.capacity == 8
    assert (memory.live == before) is (at == 1 or isinstance(error, torch.OutOfMemoryError))
    memory.error = None
    write_to_slabs(pool, new, [4, 6, 7])
    pool.all.ensure_capacity(20)
    assert (pool.all.capacity, memory.live) == (20, before * 20 // 8)
    for block_ids in (RUN, [4, 6, 7]):
        assert_holds_streams(pool, block_ids, new)


def test_blocks_are_copied_one_by_one_where_there_is_no_memory_for_all(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_rows(*args: Any) -> None:
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr(block_pool, "copy_rows", copy_rows)
    pool, (new,) = make_layers(1, rng)
    pool.all.copy_blocks([(1, 4), (2, 5), (3, 6)])
    assert_holds(pool, 0, [4, 5, 6], new)


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
@pytest.mark.parametrize("block_ids", [[4, 5], [7, 4]], ids=["run", "scattered"])
def test_no_write_loses_precision_and_none_that_came_before_it_does(
    first: torch.dtype, second: torch.dtype, held: torch.dtype, block_ids: list[int], rng: torch.Generator
) -> None:
    pool = make_pool()
    old, new = states(rng, 6, first), states(rng, 8, second)
    write(pool, 0, old, RUN)
    write(pool, 0, new, block_ids)
    assert_holds(pool, 0, RUN, {name: tensor.to(held) for name, tensor in old.items()})
    assert_holds(pool, 0, block_ids, {name: tensor.to(held) for name, tensor in new.items()})


def test_a_tensor_moves_to_where_its_layer_is_now(rng: torch.Generator) -> None:
    pool = make_pool()
    write(pool, 0, states(rng, 6), RUN)
    layouts = pool.num_layouts
    moved = pool.tensor_for(0, "key", torch.empty(1, HEADS, 1, KEY_DIM, device="meta"))
    assert (moved.device.type, moved.shape) == ("meta", (8, HEADS, BLOCK_SIZE, KEY_DIM))
    assert pool.layer(0)["key"] is moved
    assert pool.layer(0)["value"].device.type == "cpu"
    assert pool.num_layouts > layouts


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
    new = states(rng, 6)
    write(pool, 3, new, RUN)
    with pytest.raises(PoolArgumentError) as caught:
        pool.tensor_for(3, "key", torch.zeros(shape))
    assert "layer 3 key" in str(caught.value)
    assert said in str(caught.value)
    assert_holds(pool, 3, RUN, new)


def test_a_first_write_of_another_shape_leaves_no_layer_behind() -> None:
    pool = make_pool()
    with pytest.raises(PoolArgumentError, match="expected"):
        pool.tensor_for(0, "key", torch.zeros(2, 6, 3))
    assert pool.layer_indices == []
    assert pool.all.bytes_per_block == 0


@pytest.mark.parametrize("are_together", [False, True])
def test_a_pool_that_is_let_go_waits_for_no_collector(are_together: bool, rng: torch.Generator) -> None:
    pool = make_pool()
    if are_together:
        together(pool, rng)
    else:
        write(pool, 0, states(rng, 6), RUN)
    tensor = weakref.ref(pool.layer(0)["key"])
    gc.disable()
    try:
        del pool
        assert tensor() is None
    finally:
        gc.enable()
