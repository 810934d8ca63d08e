"""Names the tokens of images, in rows and hashes, by parts of the image's digest.

A model's id of a placeholder is the same whatever image fills it. An *image token* stands in its place, as a negative
number, so that whatever compares or hashes tokens tells images apart by their content, in every process:

    ~(42 bits of the digest | kind, 2 bits | the model's id, 19 bits)

The first block with tokens of an image has at least four image tokens: 168 bits, in which nobody can make two digests
agree. If the image has too few tokens in that block, text tokens before the image become image tokens, too.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import shake_256

from .hashing import TokenIds, common_prefix_length

_NO_TOKEN = -1  # id of an embedding that was passed without ids
_FILLER = -2  # stands in place of the text after an image; every image token is below it
_MOST_IDS = 1 << 19
_NAMED = 4  # least number of image tokens in a block
_TOP_BYTE = 7 if sys.byteorder == "little" else 0  # index of the byte with the sign in a number of 64 bits
_OF_NO_NEGATIVE = bytes(range(128))
_BYTES, _MASK = 6, (1 << 42) - 1
_BEFORE, _BEGINS, _GOES_ON = 1, 2, 3  # kinds of tokens: text before an image, the image's first token, its others


def name_image(tokens: TokenIds, start: int, stop: int, digest: bytes, block_size: int) -> bool:
    """Put image tokens in the place of `tokens[start:stop]`, which an image fills; return whether that could be done.

    It cannot if too few tokens of the image's first block come before its end, or if ids are too large.

    Args:
        tokens: token ids of a whole row, from its first token on; images before this one have their names.
        digest: 32 bytes that cover all that shapes what the image fills, and where the text after it stands.
    """
    block = start - start % block_size
    first = min(start, min(stop, block + block_size) - _NAMED)
    if first < block or not all(0 <= shown_id(token) < _MOST_IDS for token in tokens[first:stop]):
        return False
    held = shake_256(digest + tokens[first:start].tobytes()).digest(_BYTES * (stop - first))
    for at in range(first, stop):
        kind = _BEGINS if at == start else _GOES_ON
        if at < start:
            kind = _kind(tokens[at]) or _BEFORE
        bits = int.from_bytes(held[_BYTES * (at - first) :][:_BYTES], "little") & _MASK
        tokens[at] = ~(bits << 21 | kind << 19 | shown_id(tokens[at]))
    return True


def whole_images(tokens: Sequence[int], num_tokens: int) -> int:
    """Return the most tokens, up to `num_tokens`, after which no image is cut.

    Examples:
        >>> tokens = array("q", range(20))
        >>> name_image(tokens, 4, 14, bytes(32), block_size=16)
        True
        >>> [whole_images(tokens, num_tokens) for num_tokens in (3, 4, 5, 13, 14)]
        [3, 4, 4, 4, 14]
    """
    while 0 < num_tokens < len(tokens) and _kind(tokens[num_tokens]) == _GOES_ON:
        num_tokens -= 1
    return num_tokens


def said_image(tokens: Sequence[int], start: int, stop: int) -> str:
    """Return which image is the first to begin in `tokens[start:stop]`, as "image 2 of 3, at token 70,"; "": none."""
    begins = [at for at, token in enumerate(tokens) if _kind(token) == _BEGINS]
    for number, at in enumerate(begins, 1):
        if start <= at < stop:
            return f"image {number} of {len(begins)}, at token {at}," if len(begins) > 1 else f"the image at token {at}"
    return ""


def num_common(tokens: TokenIds, others: TokenIds) -> int:
    """Return how many leading tokens two sequences have in common, text that names the image after it included."""
    texts = [array("q", [shown_id(t) if _kind(t) == _BEFORE else t for t in some]) for some in (tokens, others)]
    return common_prefix_length(*texts)


def end_of_image(tokens: Sequence[int], start: int, stop: int) -> int | None:
    """Return the last place in `(start, stop)` at which an image has just ended; None if there is no such place."""
    for at in range(min(stop, len(tokens)) - 1, start, -1):
        if _kind(tokens[at - 1]) >= _BEGINS and _kind(tokens[at]) != _GOES_ON:
            return at
    return None


def filled_up(tokens: TokenIds, end: int, block_size: int) -> TokenIds:
    """Return the first `end` tokens, with fillers up to the end of a block."""
    return tokens[:end] + array("q", [_FILLER]) * (-end % block_size)


def hold_images(tokens: Sequence[int]) -> bool:
    """Return whether `tokens` have image tokens among them: then ids alone do not say what ran there."""
    if isinstance(tokens, array) and not tokens.tobytes()[_TOP_BYTE::8].translate(None, _OF_NO_NEGATIVE):
        return False
    return bool(tokens) and min(tokens) < _NO_TOKEN


def shown_id(token: int) -> int:
    """Return the model's id of a token."""
    return ~token & (_MOST_IDS - 1) if token < _NO_TOKEN else token


def shown_ids(tokens: TokenIds) -> TokenIds:
    """Return the model's ids of tokens, without fillers."""
    return array("q", (shown_id(token) for token in tokens if token != _FILLER))


def _kind(token: int) -> int:
    return ~token >> 19 & 3 if token < _NO_TOKEN else 0
