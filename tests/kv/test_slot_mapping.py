"""Slots: to which a forward writes, and from which a read takes."""

from __future__ import annotations

import pytest
import torch

from hf_paged_cache.kv.slot_mapping import SlotMapping
from hf_paged_cache.kv.transfers import Transfer

from .reading import of_slots

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


def vectors(num_slots: int, num_heads: int) -> torch.Tensor:
    """[slots, H]: the place of each head of each slot, as a pool lays them out."""
    return torch.arange(num_heads * num_slots).view(num_heads, num_slots).T


def test_a_slot_mapping_makes_its_indices_once_for_each_device_and_number_of_heads() -> None:
    slot_mapping = SlotMapping(SCATTERED, [0, 1, 2, 3, 4, 5])
    for heads in (1, 3):
        index = slot_mapping.index_for(heads, 40, CPU)
        assert index.dtype == torch.int64
        assert index.view(-1, heads).equal(vectors(40, heads)[SCATTERED])
        assert slot_mapping.index_for(heads, 40, CPU) is index
        assert not slot_mapping.index_for(heads, 80, CPU).equal(index) or heads == 1
    sources = slot_mapping.sources_on(CPU)
    assert sources is not None
    assert sources.tolist() == [0, 1, 2, 3, 4, 5]
    assert slot_mapping.sources_on(CPU) is sources
    assert slot_mapping.index_for(3, 40, torch.device("meta")).device.type == "meta"
    assert SlotMapping(RUN).sources_on(CPU) is None


@pytest.mark.parametrize(
    ("slots", "sources", "num_lists"), [(SCATTERED, None, 1), (SCATTERED, [5, 4, 3, 2, 1, 0], 2), (RUN, None, 0)]
)
def test_slots_go_with_a_transfer_but_for_a_run_that_may_need_no_index(
    slots: list[int], sources: list[int] | None, num_lists: int
) -> None:
    transfer = Transfer()
    slot_mapping = SlotMapping(slots, sources, transfer)
    assert transfer.add([]) == num_lists
    assert slot_mapping.index_for(1, 40, CPU).tolist() == slots
    found = slot_mapping.sources_on(CPU)
    assert (None if found is None else found.tolist()) == sources


def test_the_index_of_a_read_finds_each_head_of_each_slot_whatever_the_number_of_heads() -> None:
    slots = torch.tensor([[4, 9, 0], [7, 7, 2]])
    source = of_slots(slots)
    for heads in (1, 3, 2):
        expected = vectors(12, heads)[slots].transpose(1, 2)  # [R, H, C]
        found = source.index_for(heads, 12, CPU)
        assert torch.equal(found.view_as(expected), expected)
        assert source.index_for(heads, 12, CPU) is found
