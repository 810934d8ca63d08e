"""The plots of results/generate.json, a file a group, made from the JSON alone: `python benchmarks/tables.py` draws
them, too.

Transparent, with middling colours, so that they can be read on a white page and on a black one. What did not run is
left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import harness

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#808080"
COLOURS = {
    "DynamicCache": "#9a9a9a",
    "deepcopy": "#c98a1b",
    "kept by hand": "#c98a1b",
    "limit": "#2da44e",
    "in place": "#2da44e",
    "floor": "#2da44e",
    "ours": "#2f81f7",
    "continuous batching": "#db5fa0",
}
LEGENDS = {
    "limit": "limit: a ready DynamicCache",
    "in place": "in place: no copies, no bookkeeping",
    "deepcopy": "deepcopy of a DynamicCache",
    "kept by hand": "DynamicCache kept by hand",
    "floor": "floor: the best written by hand",
    "most": "the most that can be had",
}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hf-paged-cache",
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "savefig.transparent": True,
}
Lines = Mapping[str, Mapping[str, Any]]


def first_token(lines: Lines) -> Figure | None:
    """Seconds to the first token against the length of the known prefix."""
    shown = of_scene(lines, "first_token")
    if not shown:
        return None
    figure, (axes,) = canvas(1, height=3.6)
    draw_ways(axes, shown, "tokens", ("DynamicCache", "deepcopy", "limit", "ours"))
    axes.set(xscale="log", yscale="log", xlabel="tokens of the known prefix", ylabel="seconds to the first token")
    tick_at(axes, [line["point"]["tokens"] for line in shown])
    axes.legend()
    return figure


def ratios(lines: Lines) -> Figure | None:
    """How many times as fast, for every comparison that has a bar, with the bar and the most that can be had."""
    names = ("One row", "Several rows", "Beams and samples", "Decode steps", "Conversations and evaluation")
    shown = [(name, line) for name, line in lines.items() if line.get("value") and line["group"] in names]
    shown = [(name, line) for name, line in shown if line["kind"] == "ratio" and line["bar"] is not None][::-1]
    if not shown:
        return None
    figure, (axes,) = canvas(1, height=1.2 + 0.24 * len(shown))
    places = range(len(shown))
    values = [line["value"] for _, line in shown]
    spreads = [(of["value"] - of["spread"]["minimum"], of["spread"]["maximum"] - of["value"]) for _, of in shown]
    errors = [[max(0.0, side[which]) for side in spreads] for which in (0, 1)]
    axes.barh(places, values, color=COLOURS["ours"], height=0.6, xerr=errors, error_kw={"ecolor": INK, "elinewidth": 1})
    for key, colour, label in (
        ("floor_ratio", COLOURS["floor"], LEGENDS["most"]),
        ("bar", COLOURS["deepcopy"], "the bar"),
    ):
        marked = [(line[key], place) for place, (_, line) in enumerate(shown) if line[key] is not None]
        x, y = [value for value, _ in marked], [place for _, place in marked]
        axes.plot(x, y, "|", color=colour, markersize=11, markeredgewidth=2, label=label)
    axes.set_yticks(places, [name for name, _ in shown])
    axes.set(xscale="log", xlabel="times as fast as DynamicCache, or as what the table names")
    axes.margins(y=0.02)
    axes.axvline(1, color=INK, linewidth=1)
    tick_at(axes, [1, 2, 5, 10, 20, 50])
    axes.grid(visible=False, axis="y")
    axes.legend(loc="lower right")
    return figure


def steps(lines: Lines) -> Figure | None:
    """Milliseconds of a decode step, against length and against rows."""
    shown = [line for line in of_scene(lines, "decode") if line["point"]]
    if not shown:
        return None
    by_length = [line for line in shown if line["point"]["rows"] == 1]
    common = next(iter(line["point"]["tokens"] for line in shown if line["point"]["rows"] > 1), None)
    by_rows = [line for line in shown if line["point"]["tokens"] == common]
    figure, (left, right) = canvas(2, height=3.4)
    ways = ("DynamicCache", "in place", "ours")
    draw_ways(left, by_length, "tokens", ways, factor=1e3)
    left.set(xscale="log", xlabel="tokens before the step, 1 row", ylabel="ms a decode step", ylim=(0, None))
    tick_at(left, [line["point"]["tokens"] for line in by_length])
    draw_ways(right, by_rows, "rows", ways, factor=1e3)
    right.set(xlabel=f"rows, at {common or 0:,} tokens", ylim=(0, None))
    tick_at(right, [line["point"]["rows"] for line in by_rows])
    left.legend()
    return figure


def conversations(lines: Lines) -> Figure | None:
    """A chat turn by turn, and the whole few-shot evaluation."""
    turns = [line for line in of_scene(lines, "chat") if line["point"]]
    whole = of_scene(lines, "few_shot")[:1]
    if not turns or not whole:
        return None
    figure, (left, right) = canvas(2, height=3.2)
    draw_ways(left, turns, "turn", ("DynamicCache", "kept by hand", "ours"))
    left.set(xlabel="turn of the chat", ylabel="seconds", ylim=(0, None))
    tick_at(left, [line["point"]["turn"] for line in turns])
    left.legend()
    draw_bars(right, {name: timing["median"] for name, timing in whole[0]["ways"].items()}, "seconds, all questions")
    return figure


def memory(lines: Lines) -> Figure | None:
    """Peak bytes of keys and values, of each way in some scenes."""
    chosen = ("batch_cold", "batch_warm", "beam_cold", "nsample_cold", "memory")
    shown = {name: of for name, of in lines.items() if of["scene"] in chosen and of.get("kv_bytes")}
    cells = [(name, line["subject"], line["kv_bytes"]) for name, line in shown.items()]
    if not cells:
        return None
    figure, (axes,) = canvas(1, height=1.2 + 0.42 * len(cells))
    for place, (_, subject, by_way) in enumerate(reversed(cells)):
        for shift, way in ((0.18, "DynamicCache"), (-0.18, subject)):
            axes.barh(place + shift, by_way[way] / 2**20, height=0.34, color=COLOURS[way])
    axes.set_yticks(range(len(cells)), [name for name, *_ in reversed(cells)])
    axes.set(xlabel="MiB of keys and values, at the peak")
    axes.grid(visible=False, axis="y")
    axes.margins(y=0.02)
    ways = dict.fromkeys(way for _, subject, _ in cells for way in ("DynamicCache", subject))
    axes.legend(handles=[patch(way) for way in ways], loc="lower right")
    return figure


PLOTS: dict[str, Callable[[Lines], Any]] = {
    "first_token": first_token,
    "ratios": ratios,
    "decode_steps": steps,
    "conversations": conversations,
    "memory": memory,
}


def draw_all(results: Mapping[str, Any], folder: Path = harness.RESULTS) -> list[Path]:
    """Write every plot there are results for as `<name>.svg`; returns what was written."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    lines = {name: line for name, line in results["scenes"].items() if not line.get("failure")}
    written = []
    with mpl.rc_context(STYLE):
        for name, draw in PLOTS.items():
            figure = draw(lines)
            if figure is not None:
                written.append(folder / f"{name}.svg")
                figure.savefig(written[-1], metadata={"Date": None, "Creator": None})
                plt.close(figure)
    return written


def of_scene(lines: Lines, scene: str) -> list[Mapping[str, Any]]:
    return [line for line in lines.values() if line["scene"] == scene]


def canvas(columns: int, height: float) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(7.2, height), squeeze=False, layout="constrained")
    return figure, list(axes[0])


def draw_ways(
    axes: Axes, lines: Sequence[Mapping[str, Any]], coordinate: str, ways: Sequence[str], factor: float = 1.0
) -> None:
    """A curve a way, with the spread round it."""
    for way in ways:
        points = [(line["point"][coordinate], line["ways"][way]) for line in lines if way in line["ways"]]
        x = [place for place, _ in points]
        axes.plot(
            x,
            [of["median"] * factor for _, of in points],
            "o-",
            color=COLOURS[way],
            markersize=4,
            label=LEGENDS.get(way, way),
        )
        low, high = ([of[end] * factor for _, of in points] for end in ("minimum", "maximum"))
        if coordinate == "tokens" and factor == 1.0:
            axes.fill_between(x, low, high, color=COLOURS[way], alpha=0.15, linewidth=0)


def draw_bars(axes: Axes, values: Mapping[str, float], label: str) -> None:
    names = list(values)[::-1]
    bars = axes.barh(range(len(names)), [values[name] for name in names], color=[COLOURS[name] for name in names])
    axes.bar_label(bars, fmt="%.1f", padding=3, color=INK)
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel=label)
    axes.margins(x=0.15)
    axes.grid(visible=False, axis="y")


def tick_at(axes: Axes, places: Sequence[float]) -> None:
    axes.set_xticks(list(places), [f"{place:,g}" for place in places])
    axes.minorticks_off()


def patch(way: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=COLOURS[way], label=LEGENDS.get(way, way))


def main() -> int:
    path = harness.RESULTS / "generate.json"
    for written in draw_all(json.loads(path.read_text(encoding="utf-8"))):
        print(written.relative_to(harness.ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
