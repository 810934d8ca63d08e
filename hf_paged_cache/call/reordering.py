"""Rows go on as others, as beams do: their tables are forked, and what a reader holds of them moves likewise."""

from collections.abc import Sequence

from ..attention.base import Reader
from ..errors import CacheArgumentError
from .rows import Rows


def reorder_rows(rows: Rows, reader: Reader, sources: Sequence[int]) -> None:
    """Batch row `i` goes on as batch row `sources[i]`; there may be more or fewer rows than before. Interrupted, the reader is empty.

    Raises:
        CacheArgumentError: a source that is no row; nothing has changed.
    """
    if not sources or min(sources) < 0 or max(sources) >= len(rows):
        raise CacheArgumentError(f"rows {list(sources)} asked for; the cache has rows 0 to {len(rows) - 1}")
    try:
        if rows.is_aliased:
            reader.expand_rows(rows.separate())
        rows.commit()
        same_number = len(sources) == len(rows)
        shared_columns = rows.select(sources)
        if same_number:
            reader.reorder_rows(sources, shared_columns)
        else:
            reader.drop()
    except BaseException:
        reader.drop()  # tables and view may have moved by different amounts
        raise
