"""Draws a cache, as HTML for notebooks and as a figure: tokens reused over the last calls, and a map of the pool.

Colours have a middle lightness, and text has the colour of its surroundings, so both read on light and on dark.
"""

from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from io import BytesIO
from textwrap import fill
from typing import Any, NamedTuple

from ..errors import CacheArgumentError
from ..wording import counted
from .asked import AskedCache

_REUSED, _SHARED, _COMPUTED, _IN_USE, _FREE = "#2a9d6f", "#8f6bb8", "#c07d2b", "#4a86d8", "#8a8a8a"
_KINDS = {2: ("in use", _IN_USE, 1.0), 1: ("cached", _REUSED, 1.0), 0: ("free", _FREE, 0.35)}
_MOST_CELLS = 480  # most cells of the map
_COLUMNS = 60
_FEWEST_BARS = 8  # least number of bars that the figure has room for
_CELL = 10  # width of a cell, in pixels
_WIDTH, _HEIGHT = _COLUMNS * _CELL, 80  # size of the bars' drawing, in pixels


class Picture(NamedTuple):
    """`Picture` says what is drawn.

    Attributes:
        title: what the picture shows.
        facts: line below the title.
        calls: for each of the last forwards of prompts, the oldest first: prompt tokens, reused tokens, and tokens
            shared by rows.
        kinds: state of each block: 0 free, 1 cached, 2 in use.
    """

    title: str
    facts: str
    calls: Sequence[tuple[int, int, int]]
    kinds: bytes


def plot(cache: AskedCache) -> Any:
    """Draw hits over the last prompts, and a map of the pool, as a `matplotlib` figure.

    With a salt, the map shows only the salt's own blocks.

    Raises:
        CacheArgumentError: matplotlib is not installed.

    Examples:
        >>> cache.plot().get_size_inches().tolist()
        [8.0, 4.0]
    """
    return as_figure(_picture_of(cache))


def html(cache: AskedCache) -> str:
    """Return the HTML by which a notebook shows a cache: hits over the last prompts, and a map of the pool."""
    return as_html(_picture_of(cache))


def _picture_of(cache: AskedCache) -> Picture:
    stats, blocks = cache.stats(), cache.store.blocks
    with blocks.lock:
        calls, kinds = (
            cache._counters.totals.metrics.recent,
            blocks.allocator.kinds_of_blocks(cache.cache_salt or None),
        )
    facts = f"{counted(stats.num_calls, 'call')}, {stats.reused_tokens:,} of {stats.prompt_tokens:,} prompt tokens reused ({stats.hit_rate:.0%})"
    if stats.shared_tokens:
        facts += f", {stats.shared_tokens:,} computed for another row"
    size = f"blocks of {blocks.block_size} tokens, {stats.kv_bytes / 2**20:,.1f} MiB of keys and values"
    return Picture(f"PagedPrefixCache of {type(cache.store.model).__name__}", f"{facts}; {size}", calls, kinds)


def cells_of(kinds: bytes) -> tuple[list[int], int]:
    """Return the map of a pool, in at most 480 cells, and how many blocks a cell stands for.

    A cell has the kind that most of its blocks have.

    Examples:
        >>> cells_of(bytes([2, 2, 1, 0]))
        ([2, 2, 1, 0], 1)
    """
    each = max(1, -(-len(kinds) // _MOST_CELLS))
    parts = [kinds[start : start + each] for start in range(0, len(kinds), each)]
    return [max(counts := Counter(part), key=lambda kind: (counts[kind], kind)) for part in parts], each


def as_html(picture: Picture) -> str:
    """Draw a picture as a self-contained piece of HTML: two drawings and legends, without script or outer style."""
    cells, num_each = cells_of(picture.kinds)
    counts = Counter(picture.kinds)
    blocks = "".join(f"{_swatch(color)} {counts[kind]:,} {name} " for kind, (name, color, _) in _KINDS.items())
    each = f"({num_each} a square)" if num_each > 1 else ""
    calls = (
        f"{_swatch(_REUSED)} reused {_swatch(_SHARED)} shared by rows {_swatch(_COMPUTED)} computed, tokens of the last "
        f"{counted(len(picture.calls), 'prompt')}"
    )
    return (
        f'<div style="font: 13px sans-serif; max-width: {_WIDTH}px"><div><b>{escape(picture.title)}</b></div>'
        f"<div>{escape(picture.facts)}</div>"
        f'<div style="margin-top: 8px">{calls}</div>{_bars(picture.calls)}'
        f'<div style="margin-top: 8px">blocks: {blocks}{each}</div>{_map(cells)}</div>'
    )


def _swatch(color: str) -> str:
    return f'<span style="color: {color}">&#9632;</span>'


def _bars(calls: Sequence[tuple[int, int, int]]) -> str:
    most = max((num_tokens for num_tokens, _, _ in calls), default=0) or 1
    width = min(24.0, _WIDTH / max(1, len(calls)))
    drawn = []
    for number, (num_tokens, num_reused, num_shared) in enumerate(calls):
        whole, reused, saved = (_HEIGHT * count / most for count in (num_tokens, num_reused, num_reused + num_shared))
        parts = (_COMPUTED, whole - saved, saved), (_SHARED, saved - reused, reused), (_REUSED, reused, 0.0)
        for color, height, bottom in parts:
            if height:
                drawn.append(
                    f'<rect x="{number * width:.1f}" y="{_HEIGHT - bottom - height:.1f}" width="{0.85 * width:.1f}" '
                    f'height="{height:.1f}" fill="{color}"/>'
                )
    return _svg(_HEIGHT, "tokens of each prompt", drawn)


def _map(cells: Sequence[int]) -> str:
    drawn = []
    for number, kind in enumerate(cells):
        _, color, opacity = _KINDS[kind]
        drawn.append(
            f'<rect x="{number % _COLUMNS * _CELL}" y="{number // _COLUMNS * _CELL}" width="{_CELL - 1}" '
            f'height="{_CELL - 1}" fill="{color}" opacity="{opacity}"/>'
        )
    return _svg(-(-len(cells) // _COLUMNS) * _CELL, "map of the pool", drawn)


def _svg(height: int, label: str, drawn: Sequence[str]) -> str:
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {_WIDTH} {max(1, height)}" width="100%" '
        f'style="display: block">{"".join(drawn)}</svg>'
    )


def as_figure(picture: Picture) -> Any:
    """Draw a picture as a `matplotlib` figure, in the style in use.

    Raises:
        CacheArgumentError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise CacheArgumentError("plot needs matplotlib: pip install matplotlib, or '.[plot]'")
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    class ShownFigure(Figure):
        """`ShownFigure` shows itself in a notebook, also where pyplot is not imported."""

        def _repr_png_(self) -> bytes:
            drawn = BytesIO()
            self.savefig(drawn, format="png")
            return drawn.getvalue()

    figure = ShownFigure(figsize=(8, 4), layout="constrained")
    bars, blocks = figure.subplots(2, 1)
    numbers = range(1, len(picture.calls) + 1)
    reused, saved = [r for _, r, _ in picture.calls], [r + s for _, r, s in picture.calls]
    bars.bar(numbers, reused, color=_REUSED, label="reused")
    bars.bar(numbers, [n - r - s for n, r, s in picture.calls], bottom=saved, color=_COMPUTED, label="computed")
    bars.bar(numbers, [s for _, _, s in picture.calls], bottom=reused, color=_SHARED, label="shared by rows")
    figure.suptitle(fill(f"{picture.title}: {picture.facts}", 100), fontsize="medium")
    bars.set(xlabel="the last prompts", ylabel="tokens", xlim=(0.4, max(_FEWEST_BARS, len(picture.calls)) + 0.6))
    bars.xaxis.set_major_locator(MaxNLocator(integer=True))
    beside: Any = {"loc": "upper left", "bbox_to_anchor": (1, 1), "frameon": False}
    bars.legend(**beside)
    cells, num_each = cells_of(picture.kinds)
    rows = [cells[start : start + _COLUMNS] for start in range(0, len(cells), _COLUMNS)]
    filled = [[*row, *[float("nan")] * (_COLUMNS - len(row))] for row in rows] or [[float("nan")]]
    blocks.imshow(filled, cmap=ListedColormap([_FREE, _REUSED, _IN_USE]), vmin=0, vmax=2, aspect="auto")
    blocks.set(xticks=[], yticks=[], xlabel="blocks" if num_each == 1 else f"blocks, {num_each} a square")
    blocks.legend(handles=[Patch(color=color, label=name) for name, color, _ in _KINDS.values()], **beside)
    return figure
