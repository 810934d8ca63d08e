"""Numbers that a caller gives: what is refused, and with which words."""

from __future__ import annotations

import pytest

from hf_paged_cache.blocks.arguments import check_not_negative, int_of_at_least
from hf_paged_cache.errors import CacheArgumentError


@pytest.mark.parametrize("value", [0, True, 2.0, "2", None])
def test_what_is_no_int_or_too_small_is_refused(value: object) -> None:
    with pytest.raises(CacheArgumentError) as refused:
        int_of_at_least("num_blocks", value, 1, "blocks")
    assert str(refused.value) == f"num_blocks is {value!r}; it must be an int, 1 or more (blocks)"


def test_an_int_of_the_least_is_given_back() -> None:
    assert int_of_at_least("num_blocks", 1, 1, "blocks") == 1


def test_a_number_below_0_is_refused() -> None:
    check_not_negative("num_tokens", 0)
    with pytest.raises(CacheArgumentError, match="num_tokens is -1; it must be 0 or more"):
        check_not_negative("num_tokens", -1)
