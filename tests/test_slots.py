"""Slots: to which a forward writes, and from which a read takes."""

from __future__ import annotations

from array import array

import pytest
import torch

from hf_paged_cache import PoolArgumentError
from hf_paged_cache.slots import ReadSource, RowLayout, WriteTarget, slot_matrix

BLOCK_SIZE = 4
RUN = [4, 5, 6, 7, 8, 9]
SCATTERED = [9, 4, 22, 5, 13, 30]
LOOKS_LIKE_A_RUN = [4, 6, 5, 7, 8, 9]  # as long as its ends are apart, and no run


@pytest.mark.parametrize(
    ("slots", "first"),
    [([], None), ([7], 7), (RUN, 4), (SCATTERED, None), (LOOKS_LIKE_A_RUN, None), ([5, 4], None), ([4, 4], None)],
)
def test_a_target_knows_whether_its_slots_lie_side_by_side(slots: list[int], first: int | None) -> None:
    target = WriteTarget(slots)
    assert (target.first_slot, target.num_slots) == (first, len(slots))


def test_a_target_makes_its_indices_once_for_each_device() -> None:
    target = WriteTarget(SCATTERED, [0, 1, 2, 3, 4, 5])
    slots, sources = target.on(torch.device("cpu"))
    assert sources is not None
    assert (slots.tolist(), sources.tolist()) == (SCATTERED, [0, 1, 2, 3, 4, 5])
    assert slots.dtype == sources.dtype == torch.int64
    assert target.on(torch.device("cpu"))[0] is slots
    assert target.on(torch.device("meta"))[0].device.type == "meta"
    assert WriteTarget(RUN).on(torch.device("cpu"))[1] is None


def test_the_index_of_a_read_finds_each_head_of_each_slot_whatever_the_number_of_heads() -> None:
    slots = torch.tensor([[4, 9, 0], [7, 7, 2]])
    source = ReadSource(slots)
    for heads in (1, 3, 2):
        pool = torch.arange(10 * heads).view(10, heads)  # the place of each head among those of all slots
        expected = pool[slots].transpose(1, 2)  # [R, H, C]
        found = source.index_for(heads, torch.device("cpu"))
        assert torch.equal(found.view_as(expected), expected)
        assert source.index_for(heads, torch.device("cpu")) is found


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        (torch.tensor([4, 5]), "got 1-D torch.int64"),
        (torch.tensor([[4, 5]], dtype=torch.int32), "got 2-D torch.int32"),
    ],
)
def test_slots_of_another_shape_or_type_are_refused(slots: torch.Tensor, said: str) -> None:
    with pytest.raises(PoolArgumentError) as caught:
        ReadSource(slots)
    assert "2-D int64 tensor" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize("stop", [1, 4, 5, 9])
def test_the_slot_of_each_column_is_that_of_its_token_and_padding_reads_the_null_block(stop: int) -> None:
    rows = [RowLayout(b"", 0, array("q"), [7, 3, 9]), RowLayout(b"", 2, array("q"), [5, 1])]
    expected = [
        [[7, 3, 9][i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(stop)],
        [0 if i < 2 else [5, 1][(i - 2) // BLOCK_SIZE] * BLOCK_SIZE + (i - 2) % BLOCK_SIZE for i in range(stop)],
    ]
    assert slot_matrix(rows, stop, BLOCK_SIZE).tolist() == expected


def test_a_row_of_padding_alone_has_only_null_slots() -> None:
    rows = [RowLayout(b"", 0, array("q"), [7]), RowLayout(b"", 3, array("q"), [])]
    assert slot_matrix(rows, 3, BLOCK_SIZE).tolist() == [[28, 29, 30], [0, 0, 0]]
