"""Finds where the known part of a row ends, and says why.

It compares rows of the call before token by token, and has the words for `last_call`.
"""

from bisect import bisect_left
from collections.abc import Iterable
from operator import attrgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

from ..blocks.image_tokens import hold_images, said_image
from ..blocks.tokens import TokenIds, common_prefix_length
from .request import RowInput


class Found(NamedTuple):
    """`Found` says how many leading tokens of a row were known, and why no more were."""

    num_tokens: int
    stopped: str


class EndedRow(Protocol):
    """`EndedRow` is a row of the call before."""

    @property
    def root(self) -> bytes: ...

    @property
    def true_token_ids(self) -> TokenIds: ...


Ended = TypeVar("Ended", bound=EndedRow)


class PreviousRows(Generic[Ended]):
    """`PreviousRows` finds the row of the call before that has the longest prefix in common with a new row.

    The rows of each root are sorted by their tokens as bytes, so that this row lies next to the new one. They are
    sorted once for all rows of a call: comparing many rows in pairs would take long.
    """

    def __init__(self, rows: Iterable[Ended] = ()) -> None:
        self._of_root: dict[bytes, list[_Known[Ended]]] = {}
        for row in rows:
            tokens = row.true_token_ids
            self._of_root.setdefault(row.root, []).append(_Known(tokens.tobytes(), tokens, row))
        for known in self._of_root.values():
            known.sort(key=_as_bytes)

    def closest(self, new: RowInput) -> tuple[Ended | None, int]:
        """Return the row with the longest prefix in common with a new row, and the prefix's length.

        The row is None where no row has the new row's root.
        """
        known = self._of_root.get(new.root, [])
        at = bisect_left(known, new.token_ids.tobytes(), key=_as_bytes)
        closest: Ended | None = None
        num_common = -1
        for _, tokens, row in known[max(0, at - 1) : at + 1]:
            common = common_prefix_length(tokens, new.token_ids)
            if common > num_common:
                closest, num_common = row, common
        return closest, num_common


class _Known(NamedTuple, Generic[Ended]):
    as_bytes: bytes
    tokens: TokenIds
    row: Ended


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
