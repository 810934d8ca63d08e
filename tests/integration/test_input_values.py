"""What is read of ids, mask and positions; `test_forward_arguments` says what follows from it."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from hf_paged_cache import CacheArgumentError, PrefixStore
from hf_paged_cache.call.scheduled_forward import RowInput
from hf_paged_cache.integration.input_values import InputValues, read_inputs
from hf_paged_cache.integration.side_forward import SideForwards

IDS = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4], [0, 0, 0, 9]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]])
POSITIONS = torch.tensor([[1, 1, 0, 1], [4, 5, 6, 7], [9, 9, 9, 3]])


def read(before: int = 0, *, takes_positions: bool = True, **arguments: Any) -> InputValues:
    return read_inputs(arguments, 0, before, takes_positions=takes_positions)


def test_all_rows_are_read_at_once() -> None:
    found = read(input_ids=IDS, attention_mask=MASK, position_ids=POSITIONS)
    assert [list(row) for row in found.token_ids] == IDS.tolist()
    assert (found.num_rows, found.num_new_columns, found.are_embeddings) == (3, 4, False)
    assert found.mask == ([2, 0, 3], [2, 0, 3], [2, 0, 3], None)
    assert found.positions == ([1, 7, 3], [2, 0, 3], None)
    assert found.max_position == 9  # of padding


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions_that_stop_counting_say_where_they_begin_to_again(dtype: torch.dtype) -> None:
    given = torch.tensor([[3, 2, 1, 0], [0, 1, 3, 4], [5, 6, 7, 8]], dtype=dtype)
    found = read(input_ids=IDS, position_ids=given)
    assert found.positions == ([0, 4, 8], [3, 2, 0], None)


def test_a_mask_covers_columns_before_the_ids() -> None:
    mask = torch.cat((torch.tensor([[0, 1], [0, 0], [1, 0]]), torch.tensor([[1] * 4, [0, 0, 1, 1], [1] * 4])), dim=1)
    found = read(2, input_ids=IDS, attention_mask=mask)
    assert (
        found.mask.why_unusual == "the attention mask of row 2 has zeros after its first one (right padding or holes)"
    )
    assert (found.mask.num_zeros, found.mask.first_shown) == ([0, 2, 0], [1, 4, 0])
    assert read(2, input_ids=IDS[:2], attention_mask=mask[:2]).mask == ([1, 4], [0, 2], [1, 4], None)


@pytest.mark.parametrize("positions", [torch.full((3, 2, 4), 7), torch.tensor([7, 3])])
def test_the_largest_position_is_read_of_positions_of_any_shape(positions: torch.Tensor) -> None:
    found = read(input_ids=IDS, position_ids=positions)
    assert found.max_position == 7
    assert found.positions == ([], [], "positions are not one number a token")
    found = read(input_ids=IDS, position_ids=positions, takes_positions=False)
    assert (found.positions, found.max_position) == (None, 7)


def test_what_has_no_columns_is_read_without_values() -> None:
    found = read(input_ids=IDS[:, :0], position_ids=POSITIONS[:, :0])
    assert (found.num_rows, found.num_new_columns, found.max_position) == (3, 0, None)
    assert found.positions == ([], [], None)
    assert read(input_ids=IDS[:0]).num_new_columns == 0


def test_ids_that_are_no_integers_are_refused() -> None:
    with pytest.raises(CacheArgumentError, match=r"^input_ids must be integers, got a tensor of torch\.float32$"):
        read(input_ids=IDS.float())


@pytest.mark.parametrize("takes_positions", [True, False])
@pytest.mark.parametrize(
    ("before", "pads", "first_position"),
    [(0, (0, 0), 0), (0, (0, 0), 3), (5, (0, 0), 3), (0, (2, 2), 0), (5, (2, 2), 0), (0, (0, 2), 3), (5, (1, 6), 3)],
)
def test_what_is_known_ahead_is_what_would_be_read(
    before: int, pads: tuple[int, int], first_position: int, takes_positions: bool, tiny_llama: Any
) -> None:
    """Of forwards that we run ourselves, whose arguments and their values are made together."""
    side = SideForwards(tiny_llama, PrefixStore(tiny_llama, num_blocks=4).argument_reader, pytest.fail)
    side.takes_positions = takes_positions
    stop = before + 3
    rows = [RowInput(array("q", [7, 8, 9])[: stop - max(before, pad)], pad, first_position) for pad in pads]
    given, known = side._passed(rows, before, before, stop)
    assert known.token_ids is given["input_ids"]
    assert known.values == read_inputs(given, 2 if before else 0, before, takes_positions=takes_positions)
