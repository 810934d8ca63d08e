"""What a forward brings and the ticket it gets: both are read by many and changed by nobody."""

from __future__ import annotations

from array import array
from dataclasses import fields, replace
from typing import Any

import pytest

from hf_paged_cache.call.scheduled_forward import ForwardRequest, RowInput, ScheduledForward
from hf_paged_cache.kv.slot_mapping import SlotMapping

ROW = RowInput(array("q", [5, 6]), pad=1, first_position=0, root=b"root")
REQUEST = ForwardRequest(rows=(ROW,), num_new_columns=3)
TICKET = ScheduledForward(start=4, stop=9, sources=(0, 2), copies=(0, 0, 1), target=SlotMapping([16, 17]))


@pytest.mark.parametrize("thing", [ROW, REQUEST, TICKET], ids=lambda thing: type(thing).__name__)
def test_no_field_can_be_set_and_none_added(thing: Any) -> None:
    names = thing._fields if isinstance(thing, tuple) else [field.name for field in fields(thing)]
    for name in names:
        with pytest.raises(AttributeError):  # FrozenInstanceError is one
            setattr(thing, name, getattr(thing, name))
    assert not hasattr(thing, "__dict__")


def test_a_ticket_counts_the_rows_that_run_and_the_columns_that_are_computed() -> None:
    assert (TICKET.num_rows, TICKET.num_columns) == (2, 5)
    assert replace(TICKET, sources=(0,), stop=5).num_rows == 1
    assert replace(TICKET, sources=(0,), stop=5).num_columns == 1


def test_a_request_that_says_nothing_else_may_match_and_alias_and_needs_one_logit() -> None:
    assert (REQUEST.bypass, REQUEST.keep_columns, REQUEST.may_alias, REQUEST.num_logits_needed) == (None, None, True, 1)
