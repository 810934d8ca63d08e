"""Owns the ids that tokens of an image have in rows and hashes: each holds a part of the image's digest, and where the image begins.

A model's id of a placeholder is the same whatever image fills it. An *image token* stands in its place, as a negative number, so that
whatever compares or hashes tokens tells images apart by their content, in every process:

    ~(42 bits of the digest | kind, 2 bits | the model's id, 19 bits)

Seven of them hold 294 bits, more than the digest's 256; four, 168. So that the first block with tokens of an image has seven before its
end, or nothing else where a block has fewer tokens than that, tokens before the image in that block are named with it, if need be.
"""

import sys
from array import array
from collections.abc import Callable, Sequence
from hashlib import shake_256
from itertools import takewhile

from .tokens import TokenIds, common_prefix_length

NO_TOKEN = -1  # of an embedding that was passed without ids
_FILLER = -2  # after an image, in place of other text; no image token is as small a number
_MOST_IDS = 1 << 19
_NAMED = 7  # image tokens that hold a digest
_LEAST_NAMED = 4  # in blocks of fewer tokens: 168 bits of it, which nobody can make two images agree in
_TOP_BYTE = 7 if sys.byteorder == "little" else 0  # of a number of 64 bits
_OF_NO_NEGATIVE = bytes(range(128))
_BYTES, _MASK = 6, (1 << 42) - 1
_BEFORE, _BEGINS, _GOES_ON = 1, 2, 3  # kinds: of the text before an image, and of the image


def name_image(tokens: TokenIds, start: int, stop: int, digest: bytes, block_size: int) -> bool:
    """Put image tokens in the place of `tokens[start:stop]`, which an image fills.

    Args:
        tokens: of a whole row, from its first token on; images before this one have their names.
        digest: 32 bytes, of all that shapes what the image fills, and where the text after it stands.

    Returns:
        Whether it has a name; False, with nothing changed, where too few tokens of its first block come before its end, blocks have
        fewer than four, or ids are too large.
    """
    num_first = min(stop, (start // block_size + 1) * block_size) - start
    lead = max(0, min(_NAMED, block_size) - num_first)
    if (
        block_size < _LEAST_NAMED
        or start % block_size < lead
        or not all(_is_named(id_) or 0 <= id_ < _MOST_IDS for id_ in tokens[start - lead : stop])
    ):
        return False
    before = tokens[start - lead : start]
    for at, bits in enumerate(_bits(digest + before.tobytes(), lead), start - lead):
        kind = _kind(tokens[at]) or _BEFORE
        tokens[at] = ~(bits << 21 | kind << 19 | shown_id(tokens[at]))
    for at, bits in enumerate(_bits(digest, stop - start), start):
        kind = _BEGINS if at == start else _GOES_ON
        tokens[at] = ~(bits << 21 | kind << 19 | tokens[at])
    return True


def whole_images(tokens: Sequence[int], num_tokens: int) -> int:
    """The most tokens, up to `num_tokens`, after which no image is cut.

    Examples:
        >>> tokens = array("q", range(20))
        >>> name_image(tokens, 4, 14, bytes(32), block_size=16)
        True
        >>> [whole_images(tokens, num_tokens) for num_tokens in (3, 4, 5, 13, 14)]
        [3, 4, 4, 4, 14]
    """
    while 0 < num_tokens < len(tokens) and tokens[num_tokens] < 0 and _kind(tokens[num_tokens]) == _GOES_ON:
        num_tokens -= 1
    return num_tokens


def said_image(tokens: Sequence[int], start: int, stop: int) -> str:
    """Which image the first one is that begins in `tokens[start:stop]`; "" where none does.

    Examples:
        >>> tokens = array("q", range(40))
        >>> name_image(tokens, 4, 14, bytes(32), block_size=16), name_image(tokens, 20, 30, bytes(32), block_size=16)
        (True, True)
        >>> said_image(tokens, 0, 16), said_image(tokens, 16, 32), said_image(tokens, 5, 16)
        ('image 1 of 2, at token 4,', 'image 2 of 2, at token 20,', '')
    """
    begins = [at for at, token in enumerate(tokens) if _kind(token) == _BEGINS]
    found = next((number for number, at in enumerate(begins) if start <= at < stop), None)
    if found is None:
        return ""
    if len(begins) == 1:
        return f"the image at token {begins[0]}"
    return f"image {found + 1} of {len(begins)}, at token {begins[found]},"


def num_common(tokens: TokenIds, others: TokenIds) -> int:
    """How many tokens two sequences have in common, those included that name the image after them, where that alone differs."""
    common = common_prefix_length(tokens, others)
    both = zip(tokens[common:], others[common:], strict=False)
    return common + sum(1 for _ in takewhile(_differ_in_an_image_to_come, both))


def _differ_in_an_image_to_come(pair: tuple[int, int]) -> bool:
    one, other = pair
    return _BEFORE in (_kind(one), _kind(other)) and shown_id(one) == shown_id(other)


def end_of_image(tokens: Sequence[int], start: int, stop: int) -> int | None:
    """The last place in `(start, stop)` at which an image ends and text follows."""
    for at in range(min(stop, len(tokens)) - 1, start, -1):
        if _kind(tokens[at - 1]) >= _BEGINS and _kind(tokens[at]) != _GOES_ON:
            return at
    return None


def filled_up(tokens: TokenIds, end: int, block_size: int) -> TokenIds:
    """The first `end` tokens, with fillers up to the end of a block."""
    return tokens[:end] + array("q", [_FILLER]) * (-end % block_size)


class WholeImages:
    """A `Group` of no layers: a sequence resumes nowhere inside an image, whose tokens may see each other."""

    name: int | str = "images"

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens

    def seen(self, num_tokens: int) -> range:
        """None: it needs nothing of a block."""
        return range(0)

    def has(self, block_id: int) -> bool:
        """True: see `seen`."""
        return True

    def resumable(self, num_tokens: int, has: Callable[[int], bool]) -> int:
        """See `whole_images`."""
        return whole_images(self._tokens, num_tokens)


def hold_images(tokens: Sequence[int]) -> bool:
    """Whether there are image tokens among them: ids alone do not say what ran there."""
    if isinstance(tokens, array) and not tokens.tobytes()[_TOP_BYTE::8].translate(None, _OF_NO_NEGATIVE):
        return False
    return bool(tokens) and min(tokens) < NO_TOKEN


def shown_id(token: int) -> int:
    """The model's id of a token."""
    return ~token & (_MOST_IDS - 1) if _is_named(token) else token


def shown_ids(tokens: TokenIds) -> TokenIds:
    """The model's ids of tokens, without fillers; themselves where there is no image."""
    if not hold_images(tokens):
        return tokens
    return array("q", (shown_id(token) for token in tokens if token != _FILLER))


def _is_named(token: int) -> bool:
    return token < NO_TOKEN


def _kind(token: int) -> int:
    return ~token >> 19 & 3 if _is_named(token) else 0


def _bits(digest: bytes, num_tokens: int) -> list[int]:
    """As many times 42 bits that follow from a digest."""
    held = shake_256(digest).digest(_BYTES * num_tokens)
    return [int.from_bytes(held[at : at + _BYTES], "little") & _MASK for at in range(0, len(held), _BYTES)]
