"""What `kv.transfers` puts together on devices arrives as it was, in as few waits and transfers as it says."""

from __future__ import annotations

import torch

from hf_paged_cache.kv.transfers import Transfer, read_arrays, read_bytes, read_together, to_device

from .log import recorded


def devices() -> tuple[torch.device, torch.device]:
    """Known in the process of these tests alone."""
    return torch.device("sim:0"), torch.device("sim:1")


def test_tensors_of_a_device_are_read_in_one_wait() -> None:
    first, second = devices()
    tensors = [
        torch.tensor([[1, 2], [3, 4]], device=first),
        torch.tensor([5]),
        torch.tensor([True, False], device=second),
        torch.tensor(6, dtype=torch.int32, device=first),
        torch.zeros(0, dtype=torch.int64, device=first),
    ]
    with recorded() as log:
        assert read_together(tensors) == [[1, 2, 3, 4], [5], [1, 0], [6], []]
        arrays = read_arrays(tensors)
    assert [values.shape for values in arrays] == [(2, 2), (1,), (2,), (), (0,)]
    assert sorted(entry.device for entry in log.waits) == ["sim:0", "sim:0", "sim:1", "sim:1"], log.lines("wait")


def test_the_bytes_of_all_types_on_a_device_are_read_in_one_wait() -> None:
    first, _ = devices()
    floats, shorts = torch.tensor([1.5, -2.0]), torch.tensor([7], dtype=torch.int16)
    given = {(first, torch.float32): [floats.to(first)], (first, torch.int16): [shorts.to(first), shorts.to(first)]}
    with recorded() as log:
        found = read_bytes(given)
    assert found == floats.numpy().tobytes() + 2 * shorts.numpy().tobytes()
    assert len(log.waits) == 1, log.lines("wait")


def test_each_device_gets_all_lists_in_one_transfer_that_nobody_waits_for() -> None:
    first, second = devices()
    transfer = Transfer()
    numbers = [transfer.add([1, 2]), transfer.add([3]), transfer.add([])]
    with recorded() as log:
        found = [transfer.on(device, number) for device in (first, second) for number in numbers]
    assert [(entry.device, entry.num_bytes, entry.is_blocking) for entry in log.transfers] == [
        ("sim:0", 24, False),
        ("sim:1", 24, False),
    ]
    assert not log.waits
    assert [tensor.tolist() for tensor in found] == 2 * [[1, 2], [3], []]
    with recorded() as log:
        assert to_device([], first).shape == (0,)
    assert not log.waits
