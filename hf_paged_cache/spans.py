"""Where the blocks of a row lie side by side in the pool, so that it is read by slices instead of slot by slot. Pure."""

from collections.abc import Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Slots that lie side by side and hold successive tokens of a row."""

    row: int
    column: int  # of the first token, the row's padding included
    slot: int  # of the first token
    num_tokens: int


def runs_of(block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """Blocks that count up by one, as (first block id, number of blocks).

    Example:
        >>> runs_of([4, 5, 6, 2, 3])
        [(4, 3), (2, 2)]
    """
    if block_ids and list(block_ids) == list(range(block_ids[0], block_ids[0] + len(block_ids))):  # the common case
        return [(block_ids[0], len(block_ids))]
    runs: list[tuple[int, int]] = []
    for block_id in block_ids:
        if runs and block_id == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block_id, 1))
    return runs


def spans_of(
    rows: Sequence[tuple[int, Sequence[int]]], stop: int, block_size: int, max_spans: int
) -> list[Span] | None:
    """The spans of rows, each given by its padding and block ids, up to column `stop`.

    Returns:
        None where there are more than `max_spans`.
    """
    spans: list[Span] = []
    for number, (pad, block_ids) in enumerate(rows):
        column = pad
        for first, num_blocks in runs_of(block_ids):
            num_tokens = min(num_blocks * block_size, stop - column)
            if num_tokens > 0:
                spans.append(Span(number, column, first * block_size, num_tokens))
            column += num_tokens
            if len(spans) > max_spans:
                return None
    return spans
