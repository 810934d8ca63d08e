"""Memory is used again exactly when nobody reads it any more; test_block_pool.py has what `zeros` promises."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from hf_paged_cache.kv import recycled_memory
from hf_paged_cache.kv.recycled_memory import RecycledMemory, zeros

SHAPE = (2, 3, 1000, 8)  # large enough for a mapping of its own
SIZE = 2 * 3 * 1000 * 8 * 4  # bytes, in float32
WITH_SPARE = SIZE + SIZE // recycled_memory.SPARE_PART  # of a mapping for so much


def test_memory_that_nobody_reads_any_more_is_handed_out_again() -> None:
    memory = RecycledMemory()
    memory.take(SHAPE, torch.float32).fill_(7)
    again = memory.take((2, 3, 1005, 8), torch.float32)  # a little longer, as the next decode step is
    assert again.flatten()[0] == 7
    assert memory.num_bytes < 2 * again.nbytes


def test_memory_of_a_tensor_or_a_view_that_is_kept_is_its_own() -> None:
    memory = RecycledMemory()
    kept = memory.take(SHAPE, torch.float32).fill_(1).transpose(1, 2)[0]
    for _ in range(3):
        memory.take(SHAPE, torch.float32).fill_(2)
    assert kept.eq(1).all()
    memory.drop()
    assert memory.num_bytes == 0
    memory.take(SHAPE, torch.float32).fill_(3)
    assert kept.eq(1).all()


def test_what_is_held_at_once_is_all_that_is_held() -> None:
    memory = RecycledMemory()
    pair: list[torch.Tensor] = []
    for _ in range(5):  # layers, one after the other
        pair.clear()
        pair += [memory.take(SHAPE, torch.float32), memory.take((2, 3, 1000, 6), torch.float32)]
        assert pair[0].data_ptr() != pair[1].data_ptr()
    assert memory.num_bytes <= 2 * sum(each.nbytes for each in pair)


def test_memory_that_is_too_small_by_now_is_not_held_beside_what_took_its_place() -> None:
    memory = RecycledMemory()
    for num_bytes in (SIZE, 2 * SIZE, 4 * SIZE):
        memory.take((num_bytes // 4,), torch.float32)
        assert memory.num_bytes < 1.5 * num_bytes


def test_of_a_few_mappings_the_one_that_nobody_reads_is_used() -> None:
    memory = RecycledMemory()
    held = [memory.take(SHAPE, torch.float32).fill_(number) for number in range(3)]
    address = held.pop(1).data_ptr()
    assert memory.take(SHAPE, torch.float32).data_ptr() == address
    assert [float(each.flatten()[0]) for each in held] == [0, 2]
    num_bytes = memory.num_bytes
    kept = [memory.take(SHAPE, torch.float32), memory.take(SHAPE, torch.float32)]
    assert len({each.data_ptr() for each in [*held, *kept]}) == 4
    assert memory.num_bytes == num_bytes + WITH_SPARE


def test_any_dtype_and_no_element_at_all() -> None:
    memory = RecycledMemory()
    assert memory.take((3, 5), torch.bfloat16).copy_(torch.ones(3, 5)).sum() == 15
    assert memory.take((3, 0, 5), torch.float32).shape == (3, 0, 5)


def test_of_what_was_kept_for_long_little_is_held_once_it_is_gone() -> None:
    memory = RecycledMemory()
    kept = [memory.take(SHAPE, torch.float32) for _ in range(100)]
    assert memory.num_bytes == recycled_memory._MAX_HELD * WITH_SPARE  # the rest belongs to the tensors alone
    kept.clear()
    memory.take(SHAPE, torch.float32)
    assert memory.num_bytes == WITH_SPARE


def test_a_small_tensor_is_not_laid_over_much_memory() -> None:
    memory = RecycledMemory()
    memory.take((64, 2**16), torch.float32)
    held = memory.num_bytes
    memory.take(SHAPE, torch.float32)
    assert memory.num_bytes - held == WITH_SPARE


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no forks")
def test_a_fork_writes_to_memory_of_its_own() -> None:
    tensors = [zeros((2**20,), torch.float32, torch.device("cpu")), RecycledMemory().take((2**20,), torch.float32)]
    for tensor in tensors:
        tensor[0] = 1
    child = os.fork()
    if not child:
        for tensor in tensors:
            tensor[0] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert [float(tensor[0]) for tensor in tensors] == [1, 1]


def test_without_address_space_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **given: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(recycled_memory.mmap, "mmap", refuse)
    memory = RecycledMemory()
    assert memory.take(SHAPE, torch.float32).fill_(1).sum() == 2 * 3 * 1000 * 8
    assert memory.num_bytes == 0
    assert not zeros((2**20,), torch.float32, torch.device("cpu")).any()


@pytest.mark.parametrize(
    "text", ["[...] DefaultCPUAllocator: can't allocate memory: you tried ...", "MPS backend out of memory"]
)
def test_memory_runs_out_with_one_kind_of_error_everywhere(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(torch.OutOfMemoryError, match="emory"):
        zeros((1, 1), torch.float32, torch.device("cpu"))
    text = "something else"
    with pytest.raises(RuntimeError, match="something else") as raised:
        zeros((1, 1), torch.float32, torch.device("cpu"))
    assert not isinstance(raised.value, torch.OutOfMemoryError)
