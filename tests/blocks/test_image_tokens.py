"""Image tokens: what a row's ids say of an image, and where a row may be cut."""

from array import array
from hashlib import sha256

import pytest

from hf_paged_cache.blocks import HashChain, TokenIds, root_hash
from hf_paged_cache.blocks.image_tokens import (
    end_of_image,
    filled_up,
    hold_images,
    name_image,
    shown_ids,
    whole_images,
)

PLACEHOLDER = 500_000
ONE, OTHER = sha256(b"one").digest(), sha256(b"other").digest()


def row(before: int, image: int = 20, after: int = 10) -> TokenIds:
    return array("q", [*range(1, before + 1), *[PLACEHOLDER] * image, *range(100, 100 + after)])


def named(digest: bytes, before: int, image: int = 20, block_size: int = 16) -> TokenIds:
    tokens = row(before, image)
    assert name_image(tokens, before, before + image, digest, block_size)
    return tokens


@pytest.mark.parametrize("before", range(35))
def test_every_block_with_a_token_of_an_image_has_four_of_it_before_its_end(before: int) -> None:
    one, other = named(ONE, before), named(OTHER, before)
    first_end = (before // 16 + 1) * 16
    assert sum(a != b for a, b in zip(one[:first_end], other[:first_end], strict=True)) >= 4
    assert one[: before // 16 * 16] == other[: before // 16 * 16], "blocks before the image are those of text"
    assert shown_ids(one) == shown_ids(other) == row(before)
    assert hold_images(one)
    assert not hold_images(row(before))


@pytest.mark.parametrize("before", range(13))
def test_a_small_block_with_the_first_tokens_of_an_image_has_no_others(before: int) -> None:
    one, other = (named(digest, before, block_size=4) for digest in (ONE, OTHER))
    start = before // 4 * 4
    assert one[:start] == other[:start] == row(before)[:start]
    block = slice(start, start + 4)
    assert all(a != b for a, b in zip(one[block], other[block], strict=True))
    assert shown_ids(one) == row(before)


def test_the_same_image_has_the_same_name_in_any_row_and_tokens_of_it_differ() -> None:
    assert named(ONE, 4)[4:24] == named(ONE, 7)[7:27]
    assert len({*named(ONE, 4)[4:24]}) == 20


def test_two_images_side_by_side_are_told_apart_whichever_is_another() -> None:
    def pair(first: bytes, second: bytes) -> TokenIds:
        tokens = row(13, 40)
        assert name_image(tokens, 13, 31, first, 16)
        assert name_image(tokens, 31, 53, second, 16)
        return tokens

    rows = [pair(first, second) for first in (ONE, OTHER) for second in (ONE, OTHER)]
    chains = []
    for tokens in rows:
        chain = HashChain(root_hash(b"model"), 16, tokens)
        chains.append([block.digest for block in chain.hashes_of()])
    assert len({digests[1] for digests in chains}) == 4
    assert [whole_images(rows[0], number) for number in (13, 14, 30, 31, 32, 52, 53)] == [13, 13, 13, 31, 31, 31, 53]


def test_an_image_that_a_block_cannot_name_is_left_as_it_is() -> None:
    for tokens, start, stop, block_size in (
        (row(0, 3), 0, 3, 16),  # too few tokens at the beginning of a block
        (row(3, 20), 3, 23, 3),  # blocks of too few tokens
        (array("q", [1] * 8 + [1 << 19] * 8), 8, 16, 16),  # an id that is too large
    ):
        before = tokens[:]
        assert not name_image(tokens, start, stop, ONE, block_size)
        assert tokens == before


def test_nothing_resumes_inside_an_image() -> None:
    tokens = named(ONE, 12)
    assert [whole_images(tokens, number) for number in (11, 12, 13, 31, 32)] == [11, 12, 12, 12, 32]


def test_an_image_that_ends_within_a_block_is_filled_up_with_ids_of_no_text() -> None:
    tokens = named(ONE, 12)
    assert end_of_image(tokens, 0, len(tokens)) == 32
    assert end_of_image(tokens, 16, 32) is None, "the end of a block needs no filling"
    tokens = named(ONE, 9)
    assert end_of_image(tokens, 16, 32) == 29
    filled = filled_up(tokens, 29, 16)
    assert len(filled) == 32
    assert filled[:29] == tokens[:29]
    assert min(filled[29:]) == max(filled[29:]) == -2
