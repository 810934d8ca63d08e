"""Finds where the known part of a row ends, and says why.

It compares rows of the call before token by token, and has the words for `last_call`.
"""

from bisect import bisect_left
from operator import attrgetter, itemgetter
from typing import NamedTuple

from ..blocks.image_tokens import hold_images, said_image
from ..blocks.tokens import TokenIds, common_prefix_length
from ..rows.rows import Rows
from .request import RowInput


class Found(NamedTuple):
    """`Found` says how many leading tokens of a row are known, and why no more are."""

    num_tokens: int
    stopped: str
    tier: str | None = None  # furthest lower tier that some of them would come up from


class PreviousRow(NamedTuple):
    """`PreviousRow` is a row of the call before."""

    as_bytes: bytes  # its tokens
    token_ids: TokenIds
    number: int
    rows: Rows

    def can_go_on_at(self, num_tokens: int) -> bool:
        """Return whether another row may go on after the first `num_tokens` tokens of this row.

        It may not where layers with a window have given up what is seen there. Where layers carry states, it may go on
        only after the last token.
        """
        return not self.rows.is_exact or self.rows.can_go_on_at(self.rows.prompts[self.number].pad + num_tokens)


class PreviousRows:
    """`PreviousRows` finds the row of the call before that has the longest prefix in common with a new row.

    The rows of each root are sorted by their tokens as bytes, so that this row lies next to the new one: comparing many
    rows in pairs would take long. There are none where rows may hold something else than their tokens say.
    """

    def __init__(self, rows: Rows | None) -> None:
        self._of_root: dict[bytes, list[PreviousRow]] = {}
        if rows is None or not rows.is_source:
            return
        for number, (prompt, tokens) in enumerate(zip(rows.prompts, rows.token_ids(), strict=True)):
            row = PreviousRow(tokens.tobytes(), tokens, number, rows)
            self._of_root.setdefault(prompt.root, []).append(row)
        for of_root in self._of_root.values():
            of_root.sort(key=_as_bytes)

    def closest(self, new: RowInput) -> tuple[PreviousRow | None, int]:
        """Return the row with the longest prefix in common with a new row, and the prefix's length.

        The row is None where no row has the new row's root.
        """
        of_root = self._of_root.get(new.root, [])
        at = bisect_left(of_root, new.token_ids.tobytes(), key=_as_bytes)
        beside = [(row, common_prefix_length(row.token_ids, new.token_ids)) for row in of_root[max(0, at - 1) : at + 1]]
        return max(beside, key=itemgetter(1), default=(None, 0))


_as_bytes = attrgetter("as_bytes")


def why_stopped(num_known: int, token_ids: TokenIds, block_size: int, num_previous: int | None) -> str:
    """Say why no more of a row is known.

    Args:
        num_known: number of leading tokens that are known.
        num_previous: number of tokens of the previous row by which the row is known; None: it is known by blocks.
    """
    if num_known == len(token_ids):
        return "the whole prompt was known"
    if num_previous is not None:
        if num_known == num_previous:
            return f"the last call's row ends at token {num_known}, and the prompt continues"
        return f"the prompt differs from the last call's tokens at token {num_known}"
    end = (num_known // block_size + 1) * block_size
    if hold_images(token_ids) and (image := said_image(token_ids, num_known, end)):
        return f"no cached block has {image} after these tokens"
    if end > len(token_ids):
        num_left = len(token_ids) - num_known
        return f"from token {num_known} on there is no full block: {num_left} of {block_size} tokens"
    if num_known == 0:
        return f"no cached block has these first {block_size} tokens under the same conditions"
    return f"no cached block continues with tokens {num_known} to {end - 1}"


def why_no_state(num_cached: int, num_known: int) -> str:
    """Say why a row with a state resumes after `num_known` tokens, though blocks of more are cached."""
    return f"blocks are cached up to token {num_cached}, but no state after token {num_known}"


def why_no_window(num_cached: int) -> str:
    """Say why a row with a window does not resume after what is cached."""
    return f"a window no longer shows what is before token {num_cached}, up to which blocks are cached"
