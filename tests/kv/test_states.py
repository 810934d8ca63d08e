"""What layers carry of the running rows is copied, selected and cut with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.cache_utils import LinearAttentionLayer

from hf_paged_cache.kv.states import ConvRecorder, LiveStates, StateKey, copied, row_of, select_rows, stacked

CONV, RECURRENT = StateKey(1, "conv", 0), StateKey(1, "recurrent", 0)


def layers(number_of_states: int = 1) -> dict[int, Any]:
    return {1: LinearAttentionLayer(number_of_states), 3: LinearAttentionLayer(number_of_states)}


def states(num_rows: int = 3) -> dict[StateKey, torch.Tensor]:
    rows = torch.arange(num_rows, dtype=torch.float32)[:, None, None]
    return {CONV: rows.expand(-1, 2, 4).clone(), RECURRENT: 10 + rows.expand(-1, 5, 6).clone()}


def test_what_is_put_is_what_a_layer_goes_on_from() -> None:
    given = layers()
    live = LiveStates(given)
    live.put(states())
    assert live.read().keys() == states().keys()
    assert given[1].has_previous_state == {0: True}
    assert given[3].has_previous_state == {0: False}
    given[1].update_conv_state(torch.ones(3, 2, 1), conv_kernel_size=4)
    assert live.read()[CONV][2].tolist() == [[2, 2, 2, 1]] * 2
    live.clear()
    assert not live.read()
    given[1].update_conv_state(torch.ones(5, 2, 3), conv_kernel_size=4)  # other rows
    assert live.read()[CONV].shape == (5, 2, 4)


@pytest.mark.parametrize("sources", [[1, 0, 2], [2, 2], [0, 0, 1, 1, 2]])
def test_rows_go_on_from_copies(sources: list[int]) -> None:
    live = LiveStates(layers())
    live.put(states())
    live.select(sources)
    for key, tensor in states().items():
        assert live.read()[key].equal(tensor[sources])
    assert select_rows(states(), sources)[CONV].equal(states()[CONV][sources])


def test_rows_are_stacked_in_memory_of_their_own_and_one_without_a_state_has_seen_nothing() -> None:
    held = states()
    made = stacked([row_of(held, 2), {}, row_of(held, 0)])
    assert made[RECURRENT][:, 0, 0].tolist() == [12, 0, 10]
    made[RECURRENT].zero_()
    one = stacked([row_of(held, 1)])
    one[RECURRENT].zero_()
    copied(held)[RECURRENT].zero_()
    assert held[RECURRENT][:, 0, 0].tolist() == [10, 11, 12]


def test_inputs_that_convolutions_keep_can_be_cut() -> None:
    given = layers()
    live = LiveStates(given)
    live.record_past(records=True)
    given[1].update_conv_state(torch.arange(10.0).expand(1, 2, -1), conv_kernel_size=4)
    assert live.read()[CONV][0, 0].tolist() == [6, 7, 8, 9]
    assert live.crop(2)
    assert live.read()[CONV][0, 0].tolist() == [4, 5, 6, 7]
    assert not live.crop(1), "no more is kept"
    given[1].update_conv_state(torch.arange(6.0).expand(1, 2, -1))
    given[1].update_recurrent_state(torch.ones(1, 5, 6))
    assert not live.crop(2), "a recurrent state keeps nothing"
    assert live.read()[CONV][0, 0].tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("past", [0, 2, 4, 6])
def test_states_of_convolutions_are_taken_out_of_a_running_forward(past: int) -> None:
    """The last inputs before a column, with those of the forward before, or zeros where there were none."""
    width, num_columns = 4, 9
    inputs = torch.randn(2, 3, past + num_columns)
    padded = torch.nn.functional.pad(inputs, (width, 0))
    recorder = ConvRecorder()
    places, columns = [(0, 3), (1, 1), (1, 9)], [3, 1, 9]
    recorder.start_forward(num_columns, places, columns)
    recorder.record(CONV, inputs, width)
    for at, ((number, _), column) in enumerate(zip(places, columns, strict=True)):
        end = width + past + column
        assert recorder.recorded[CONV][at].equal(padded[number, :, end - width : end])
    recorder.start_forward()
    assert not recorder.places
    assert not recorder.recorded
