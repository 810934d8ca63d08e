"""New memory is zeros that any forward may write, whatever the platform says of it."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from hf_paged_cache.kv import zeroed
from hf_paged_cache.kv.zeroed import zeros

CPU = torch.device("cpu")
LARGE = (2**20,)  # of float32: enough for a mapping of its own


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(2, 3, 1, 5), (2, 3, 0, 5), (2, 2**19)], ids=["small", "empty", "large"])
def test_new_memory_is_zero_and_no_inference_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    with torch.inference_mode():
        made = zeros(shape, dtype, device)
    assert (made.shape, made.dtype, made.device.type) == (shape, dtype, device.type)
    assert not made.any()
    assert not made.is_inference()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no forks")
def test_a_fork_writes_to_memory_of_its_own() -> None:
    tensor = zeros(LARGE, torch.float32, CPU)
    tensor[0] = 1
    child = os.fork()
    if not child:
        tensor[0] = 2
        os._exit(0)
    os.waitpid(child, 0)
    assert float(tensor[0]) == 1


def test_without_address_space_torch_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(_fileno: int, num_bytes: int, **_: object) -> mmap.mmap:
        asked.append(num_bytes)
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(zeroed.mmap, "mmap", refuse)
    assert not zeros(LARGE, torch.float32, CPU).any()
    assert asked == [4 * 2**20]


@pytest.mark.parametrize(
    "text", ["[...] DefaultCPUAllocator: can't allocate memory: you tried ...", "MPS backend out of memory"]
)
def test_memory_runs_out_with_one_kind_of_error_everywhere(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(torch.OutOfMemoryError, match="emory"):
        zeros((1, 1), torch.float32, CPU)
    text = "something else"
    with pytest.raises(RuntimeError, match="something else") as raised:
        zeros((1, 1), torch.float32, CPU)
    assert not isinstance(raised.value, torch.OutOfMemoryError)
