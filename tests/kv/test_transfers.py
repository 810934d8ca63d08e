"""What crosses between host and device arrives as it was, in its order. Waits and transfers are counted in tests/accelerator."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_paged_cache.kv.transfers import Transfer, read_arrays, read_bytes, read_together, to_device

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "given",
    [
        [],
        [[3]],
        [[[1, 2], [3, 4]], [], [5], [[[6]]]],
    ],
    ids=str,
)
def test_each_tensors_integers_are_read_in_order(given: list[object]) -> None:
    expected = [torch.tensor(values).flatten().tolist() for values in given]
    assert read_together([torch.tensor(values) for values in given]) == expected


def test_integers_of_every_type_and_layout_are_read() -> None:
    large = 2**62 + 1
    columns = torch.tensor([[1, 2, 3], [4, 5, 6]]).t()
    tensors = [torch.tensor([True, False]), torch.tensor([200], dtype=torch.uint8), torch.tensor(large), columns]
    assert read_together([*tensors, torch.tensor(-1, dtype=torch.int32)]) == [
        [1, 0],
        [200],
        [large],
        [1, 4, 2, 5, 3, 6],
        [-1],
    ]


def test_arrays_keep_their_shapes() -> None:
    given = [torch.tensor([[True, False]]), torch.arange(6).view(2, 3).t(), torch.zeros(2, 0, dtype=torch.int32)]
    for tensor, values in zip(given, read_arrays(given), strict=True):
        assert values.dtype == np.int64
        assert values.shape == tuple(tensor.shape)
        assert values.tolist() == tensor.to(torch.int64).tolist()


def test_the_bytes_of_tensors_are_those_of_each_kind_in_order() -> None:
    first, second, other = torch.tensor([1.5, -0.0]), torch.tensor([float("nan")]), torch.tensor([7], dtype=torch.int16)
    given = {(CPU, torch.float32): [first, second], (CPU, torch.int16): [other]}
    assert read_bytes(given) == b"".join(tensor.numpy().tobytes() for tensor in (first, second, other))
    assert read_bytes({}) == b""
    assert read_bytes({(CPU, torch.bfloat16): [torch.ones(1, dtype=torch.bfloat16)]}) == b"\x80\x3f"


def test_numbers_arrive_on_the_device_asked_for() -> None:
    found = to_device([3, -1], CPU)
    assert (found.tolist(), found.dtype) == ([3, -1], torch.int64)
    assert to_device((5,), torch.device("meta")).device.type == "meta"
    assert to_device([], CPU).shape == (0,)


def test_lists_that_go_together_are_told_apart() -> None:
    transfer = Transfer()
    numbers = [transfer.add([1, 2]), transfer.add(()), transfer.add([3])]
    assert [transfer.on(CPU, number).tolist() for number in numbers] == [[1, 2], [], [3]]
    assert transfer.on(CPU, numbers[0]) is transfer.on(CPU, numbers[0])
    assert transfer.on(torch.device("meta"), numbers[2]).shape == (1,)


def test_a_list_that_is_added_later_is_found_too() -> None:
    transfer = Transfer()
    first = transfer.add([1, 2])
    held = transfer.on(CPU, first)
    second, third = transfer.add([3]), transfer.add([4, 5])
    assert transfer.on(CPU, third).tolist() == [4, 5]
    assert transfer.on(CPU, second).tolist() == [3]
    assert transfer.on(CPU, first) is held
