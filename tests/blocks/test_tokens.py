"""Common prefixes of token sequences, against a count one by one."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged_cache.blocks.tokens import TokenIds, common_prefix_length

# Few values, so that prefixes are long; the largest and smallest, so that every byte of a token takes part.
TOKENS = st.lists(st.sampled_from([0, 1, 256, -1, 2**63 - 1, -(2**63)]), max_size=300)


def counted(left: TokenIds, right: TokenIds) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count


@given(TOKENS, TOKENS, TOKENS)
def test_the_length_is_what_counting_finds_in_either_order(
    prefix: list[int], left: list[int], right: list[int]
) -> None:
    a, b = array("q", prefix + left), array("q", prefix + right)
    assert common_prefix_length(a, b) == common_prefix_length(b, a) == counted(a, b)


@pytest.mark.parametrize("at", [0, 1, 62, 63, 64, 65, 127, 128, 191, 192, 193, 447, 448, 449, 998, 999])
@pytest.mark.parametrize("bit", [0, 7, 8, 62])
def test_one_changed_bit_is_found_wherever_it_lies(at: int, bit: int) -> None:
    left = array("q", range(1000))
    right = left[:]
    right[at] ^= 1 << bit
    assert common_prefix_length(left, right) == at


@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65, 191, 192, 193, 1000])
def test_a_sequence_has_all_of_itself_in_common_and_all_that_a_longer_one_goes_on_from(num_tokens: int) -> None:
    tokens = array("q", range(num_tokens))
    assert common_prefix_length(tokens, tokens) == num_tokens
    assert common_prefix_length(tokens, tokens + array("q", [7])) == num_tokens


def test_comparing_leaves_both_free_to_grow() -> None:  # a memoryview still held would forbid it
    left, right = array("q", [1, 2]), array("q", [1, 3])
    common_prefix_length(left, right)
    left.append(4)
    right.append(5)
    assert (list(left), list(right)) == ([1, 2, 4], [1, 3, 5])
