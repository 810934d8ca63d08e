"""What a forward brings and how it is scheduled: both are read by many and changed by nobody."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from hf_paged_cache.call.scheduled_forward import ForwardRequest, RowInput, ScheduledForward
from hf_paged_cache.kv.slot_mapping import SlotMapping

from .bench import new_row

ROW = new_row([5, 6], pad=1)
REQUEST = ForwardRequest(rows=(ROW,), num_new_columns=3)
FORWARD = ScheduledForward(start=4, stop=9, sources=(0, 2), copies=(0, 0, 1), slot_mapping=SlotMapping([16, 17]))


@pytest.mark.parametrize("thing", [ROW, REQUEST, FORWARD], ids=lambda thing: type(thing).__name__)
def test_no_field_can_be_set_and_none_added(thing: Any) -> None:
    names = thing._fields if isinstance(thing, tuple) else [field.name for field in fields(thing)]
    assert names
    for name in names:
        with pytest.raises(AttributeError):  # FrozenInstanceError is one
            setattr(thing, name, getattr(thing, name))
    with pytest.raises((AttributeError, TypeError)):  # TypeError: of a frozen class with slots
        thing.another_name = 1
    assert not hasattr(thing, "__dict__")


def test_a_scheduled_forward_counts_the_rows_that_run_and_the_columns_that_are_computed() -> None:
    assert (FORWARD.num_rows, FORWARD.num_columns) == (2, 5)
    one = FORWARD._replace(sources=(0,), stop=5)
    assert (one.num_rows, one.num_columns) == (1, 1)
    assert not FORWARD.is_step


def test_a_request_that_says_nothing_else_may_match_and_alias_and_needs_one_logit() -> None:
    assert (REQUEST.bypass, REQUEST.keep_columns, REQUEST.may_alias, REQUEST.num_logits_needed) == (None, None, True, 1)


def test_a_row_that_says_nothing_else_starts_under_no_root_and_hides_nothing() -> None:
    assert RowInput(ROW.token_ids, 0, 0) == (ROW.token_ids, 0, 0, b"", 0, b"")
