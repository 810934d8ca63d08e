"""Slots: to which a forward writes, and from which a read takes."""

from __future__ import annotations

from array import array

import pytest
import torch

from hf_paged_cache import PoolArgumentError
from hf_paged_cache.kv.slot_mapping import ReadSource, RowLayout, SlotMapping, read_source, slot_matrix

BLOCK_SIZE = 4
RUN = [4, 5, 6, 7, 8, 9]
SCATTERED = [9, 4, 22, 5, 13, 30]
LOOKS_LIKE_A_RUN = [4, 6, 5, 7, 8, 9]  # as long as its ends are apart, and no run


@pytest.mark.parametrize(
    ("slots", "first"),
    [([], None), ([7], 7), (RUN, 4), (SCATTERED, None), (LOOKS_LIKE_A_RUN, None), ([5, 4], None), ([4, 4], None)],
)
def test_a_slot_mapping_knows_whether_its_slots_lie_side_by_side(slots: list[int], first: int | None) -> None:
    slot_mapping = SlotMapping(slots)
    assert (slot_mapping.first_slot, slot_mapping.num_slots) == (first, len(slots))


CPU = torch.device("cpu")


def vectors(num_blocks: int, num_heads: int) -> torch.Tensor:
    """[slots, H]: the place of each head of each slot, as a pool lays them out."""
    places = torch.arange(num_blocks * num_heads * BLOCK_SIZE).view(num_blocks, num_heads, BLOCK_SIZE)
    return places.transpose(1, 2).reshape(-1, num_heads)


def test_a_slot_mapping_makes_its_indices_once_for_each_device_and_number_of_heads() -> None:
    slot_mapping = SlotMapping(SCATTERED, [0, 1, 2, 3, 4, 5])
    for heads in (1, 3):
        index = slot_mapping.index_for(heads, BLOCK_SIZE, CPU)
        assert index.dtype == torch.int64
        assert index.view(-1, heads).equal(vectors(10, heads)[SCATTERED])
        assert slot_mapping.index_for(heads, BLOCK_SIZE, CPU) is index
        assert not slot_mapping.index_for(heads, 2 * BLOCK_SIZE, CPU).equal(index) or heads == 1
    sources = slot_mapping.sources_on(CPU)
    assert sources is not None
    assert sources.tolist() == [0, 1, 2, 3, 4, 5]
    assert slot_mapping.sources_on(CPU) is sources
    assert slot_mapping.index_for(3, BLOCK_SIZE, torch.device("meta")).device.type == "meta"
    assert SlotMapping(RUN).sources_on(CPU) is None


def test_the_index_of_a_read_finds_each_head_of_each_slot_whatever_the_number_of_heads() -> None:
    slots = torch.tensor([[4, 9, 0], [7, 7, 2]])
    source = ReadSource(slots)
    for heads in (1, 3, 2):
        expected = vectors(3, heads)[slots].transpose(1, 2)  # [R, H, C]
        found = source.index_for(heads, BLOCK_SIZE, CPU)
        assert torch.equal(found.view_as(expected), expected)
        assert source.index_for(heads, BLOCK_SIZE, CPU) is found


def columns_of(source: ReadSource, num_heads: int) -> torch.Tensor:
    """[R, H, C]: the places that a read takes."""
    index = source.index_for(num_heads, BLOCK_SIZE, CPU).view(source.num_rows, num_heads, -1)
    if not source.by_block:
        return index
    places = (index[..., None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(2)
    return places[:, :, source.skipped : source.skipped + source.num_columns]


@pytest.mark.parametrize(
    ("pads", "by_block"),
    [((0,), True), ((3,), True), ((0, 0), True), ((2, 6), True), ((0, 2), False), ((7, 7, 3), True), ((1, 4), False)],
)
def test_columns_are_read_by_block_where_all_rows_agree_and_as_slots_are_either_way(
    pads: tuple[int, ...], by_block: bool
) -> None:
    rows = [RowLayout(b"", pad, array("q"), [5 * n + 1, 5 * n + 4, 5 * n + 2, 5 * n]) for n, pad in enumerate(pads)]
    places, last = vectors(20, 2), min(pads) + 4 * BLOCK_SIZE
    for stop in range(max(pads) + 1, last + 1):
        slots = slot_matrix(rows, stop, BLOCK_SIZE)
        for start in range(stop):
            source = read_source(rows, start, stop, BLOCK_SIZE)
            assert (source.by_block, source.num_rows, source.num_columns) == (by_block, len(rows), stop - start)
            found = columns_of(source, 2)
            expected = places[slots[:, start:]].transpose(1, 2)
            for row, pad in enumerate(pads):  # of padding it is only said that it comes from the null block
                first = max(0, pad - start)
                assert found[row, :, first:].equal(expected[row, :, first:])
                assert found[row, :, :first].lt(2 * BLOCK_SIZE).all()


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
    assert "slots, or blocks, must be a 2-D int64 tensor" in str(caught.value)
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
    rows = [RowLayout(b"", 3, array("q"), []), RowLayout(b"", 4, array("q"), [])]  # a first chunk of padding alone
    assert slot_matrix(rows, 2, BLOCK_SIZE).tolist() == [[0, 0], [0, 0]]
