"""The simulated device itself: where tensors lie, what waits, what it counts, and that mistakes of placement are seen."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.conftest import make_tiny_llama

from .log import recorded
from .memory import limited, memory
from .tensor import Event


@pytest.mark.parametrize(
    "mistake",
    [
        lambda device: torch.ones(3, device=device) + torch.ones(3),
        lambda device: torch.ones(3, device=device).index_select(0, torch.tensor([0])),
        lambda device: torch.cat([torch.ones(3, device=device), torch.ones(3)]),
        lambda device: torch.ones(4, 3, device=device)[torch.tensor([0], device="sim:1")],
    ],
    ids=["host operand", "host index of a kernel", "host part of cat", "index of another device"],
)
def test_tensors_of_two_devices_do_not_meet(mistake: object) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        mistake("sim:0")  # type: ignore[operator]


def test_a_number_of_the_host_meets_any_device() -> None:
    ones = torch.ones(3, device="sim:1")
    assert (ones * torch.tensor(2.0)).tolist() == [2, 2, 2]
    assert torch.where(ones > 0, ones, torch.tensor(0.0)).device == torch.device("sim:1")


@pytest.mark.parametrize(
    ("operation", "num_waits"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.to("cpu"), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 1], 1),
        (lambda x: torch.equal(x, x), 1),
        (lambda x: bool((x > 1).any()), 1),
        (lambda x: torch.empty(3).copy_(x), 1),
        (lambda x: x.masked_fill(x > 1, 0), 0),
        (lambda x: x.__setitem__(x > 1, 0.0), 0),
        (lambda x: x.to("cpu", non_blocking=True), 0),
        (lambda x: x.to("sim:1"), 0),
        (lambda x: x[1:].argmax(), 0),
    ],
)
def test_what_the_host_waits_for(operation: object, num_waits: int) -> None:
    x = torch.arange(3.0, device="sim")
    with recorded() as log:
        operation(x)  # type: ignore[operator]
    assert len(log.waits) == num_waits, log.lines("wait")


def test_a_transfer_blocks_unless_it_is_pinned_and_told_not_to() -> None:
    host = torch.arange(4)
    with recorded() as log:
        host.to("sim")
        host.to("sim", non_blocking=True)
        host.pin_memory().to("sim", non_blocking=True)
        torch.empty(4, dtype=torch.int64, pin_memory=True).to("sim:1", non_blocking=True)
        torch.tensor([1, 2], device="sim")
    assert [(entry.num_bytes, entry.is_blocking) for entry in log.transfers] == [
        (32, True),
        (32, True),
        (32, False),
        (32, False),
        (16, True),
    ]
    assert "tests/accelerator/test_device.py" in log.transfers[0].where


def test_indices_of_the_host_are_a_transfer() -> None:
    x = torch.zeros(4, 2, device="sim")
    with recorded() as log:
        x[torch.tensor([1, 2])] = 1.0
        x[torch.tensor([0, 3])].sum()
    assert [entry.num_bytes for entry in log.transfers] == [16, 16]
    assert x.tolist() == [[0, 0], [1, 1], [1, 1], [0, 0]]


def test_a_copy_to_the_host_arrives_when_the_host_has_waited() -> None:
    x = torch.arange(3, device="sim")
    late, event = x.to("cpu", non_blocking=True), Event("sim")
    event.record()
    assert late.tolist() != [0, 1, 2]
    with recorded() as log:
        x + 1
        event.synchronize()
    assert late.tolist() == [0, 1, 2]
    assert not log.waits  # the device had more to do
    with recorded() as log:
        event.record()
        event.synchronize()
    assert len(log.waits) == 1


def test_views_launch_nothing_and_share_bytes() -> None:
    gc.collect()  # what tests before left in cycles
    before = memory("sim").allocated
    x = torch.zeros(64, 4, device="sim")
    with recorded() as log:
        view = x[3:7].transpose(0, 1).unsqueeze(0)
    assert not log.launches
    assert memory("sim").allocated - before == 64 * 4 * 4
    del x
    assert memory("sim").allocated - before == 64 * 4 * 4
    view += 1
    del view
    gc.collect()
    assert memory("sim").allocated == before


def test_a_limit_refuses_what_is_beyond_it() -> None:
    gc.collect()
    with limited(memory("sim").allocated + 1000, "sim"):
        kept = torch.zeros(125, device="sim")
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(126, device="sim")
        torch.zeros(126, device="sim:1")
        kept.add_(1)
        with pytest.raises(torch.OutOfMemoryError):
            torch.cat([kept, kept])
        assert torch.accelerator.get_memory_info("sim")[0] == 500


def test_an_allocation_can_be_told_to_fail() -> None:
    memory("sim").failing = 1
    torch.zeros(1, device="sim")
    with pytest.raises(torch.OutOfMemoryError):
        torch.zeros(1, device="sim")
    torch.zeros(1, device="sim")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_gives_the_tokens_of_the_cpu(dtype: torch.dtype) -> None:
    model = make_tiny_llama().to(dtype)
    ids = torch.randint(1, 128, (2, 20), generator=torch.Generator().manual_seed(0))
    on_host = model.generate(ids, max_new_tokens=4, do_sample=False)
    on_device = model.to("sim:1").generate(ids.to("sim:1"), max_new_tokens=4, do_sample=False)
    assert on_device.device == torch.device("sim:1")
    if dtype == torch.float32:  # attention in bf16 is another kernel there
        assert on_device.tolist() == on_host.tolist()
