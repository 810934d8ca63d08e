"""Owns how results are shown: Markdown tables, made from the JSON alone. `python benchmarks/tables.py` refreshes README.md.

A table stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`, NAME being that of a file in results/. Refuses
to invent: where there is no file, the README is left as it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness

README = Path(__file__).parent / "README.md"
UNITS = {"s": (1.0, "s"), "bytes": (2.0**-20, "MiB"), "CPU s": (1e3, "ms of CPU")}  # in the JSON -> factor, shown as


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned, so that it can be read in a terminal, too."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in [head, rule, *rows]
    )


def conditions(results: Mapping[str, Any]) -> str:
    """A sentence: on what, with what, of which commit and day."""
    machine, given = results["machine"], results.get("conditions", {})
    parts = [f"{name.replace('_', ' ')} {value}" for name, value in given.items()]
    parts += [f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}", f"Python {machine['python']}"]
    parts += [f"{name} {machine[name]}" for name in ("torch", "transformers") if machine[name]]
    return f"{'; '.join(parts)}; commit {results['commit']}, {results['date']}."


def generate_table(results: Mapping[str, Any]) -> str:
    """The scenes of bench_generate.py, a line each."""
    head = ("scene", "bar", "measured", "least to greatest", "DynamicCache", "ours", "reused", "")
    rows = [_scene_row(name, result) for name, result in results["scenes"].items()]
    return f"{markdown(head, rows)}\n\n{conditions(results)}"


def blocks_table(results: Mapping[str, Any]) -> str:
    """Nanoseconds per block by operation and number of blocks, and the bars of bench_blocks.py."""
    sizes = results["nanoseconds_per_block"]
    rows = []
    for whose in ("ours", "transformers"):
        names = dict.fromkeys(name for of in sizes.values() for name in of[whose])
        for name in names:
            cells = [of[whose].get(name) for of in sizes.values()]
            rows.append(
                (
                    name,
                    "" if name == "dict probe" else whose,
                    *(f"{cell['median']:,.0f}" if cell else "" for cell in cells),
                )
            )
    bars = [
        (bar["what"], f"at most {bar['at_most']:g}", f"{bar['ratio']:.2f}", _verdict(bar["ratio"] <= bar["at_most"]))
        for bar in results["bars"]
    ]
    size_names = [f"{int(size):,} blocks" for size in sizes]
    tokens = [(name, f"{timing['median']:,.1f}") for name, timing in results["nanoseconds_per_token"].items()]
    return (
        f"Nanoseconds per block, medians:\n\n{markdown(('operation', 'whose', *size_names), rows)}\n\n"
        f"{markdown(('of 100,000 tokens', 'nanoseconds per token'), tokens)}\n\n"
        f"{markdown(('ratio', 'bar', 'measured', ''), bars)}\n\n{conditions(results)}"
    )


def precision_table(results: Mapping[str, Any]) -> str:
    """What precision.py counted: a line for each precision and way, and what was noticed of zeros."""
    head = ("precision", "way", "prompts with another token", "gap there", "error, median", "error, largest", "")
    rows, notes, commits = [], [], []
    for name, measured in results["precisions"].items():
        for way, found in measured["ways"].items():
            verdicts = [holds for what, holds in measured["holds"].items() if what.startswith(way)]
            gaps = [gap for gap in found["largest_gap"] if gap is not None]
            rows.append(
                (
                    name,
                    way,
                    ", ".join(map(str, found["differ"])),
                    f"at most {max(gaps):.2g}" if gaps else "",
                    f"{found['median_error']:.2g}",
                    f"{max(found['largest_error']):.2g}",
                    _verdict(all(verdicts)) if verdicts else "",
                )
            )
        control, noticed = measured["control"], measured["holds"]["control: zeros are noticed"]
        notes.append(f"{name} {control['differ']} of {control['of']}{'' if noticed else ' (NOT NOTICED)'}")
        least, most = measured["lengths"]
        commits.append(f"{name} at commit {measured['commit']} with prompts of {least} to {most} tokens")
    sizes = {measured["num_prompts"] for measured in results["precisions"].values()}
    return (
        f"Sets of {' or '.join(map(str, sorted(sizes)))} prompts:\n\n{markdown(head, rows)}\n\n"
        f"With zeros in place of what is reused: {', '.join(notes)} prompts.\n\n"
        f"{'; '.join(commits)}; {conditions(results)}"
    )


TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "generate": generate_table,
    "blocks": blocks_table,
    "precision": precision_table,
}


def refresh(text: str, name: str, table: str) -> str:
    """`text` with what stands between the markers of `name` replaced.

    Raises:
        ValueError: a marker is missing.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found_begin, rest = text.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{begin} and {end} are not both there, in this order")
    return f"{before}{begin}\n{table}\n{end}{after}"


def _scene_row(name: str, result: Mapping[str, Any]) -> tuple[str, ...]:
    if result.get("failure"):
        return name, _bar(result), "", "", "", "", "", f"FAILED: {result['failure'].partition(':')[0]}"
    share = result["kind"] == "share"
    spread = result["spread"]
    return (
        name,
        _bar(result),
        _number(result["value"], share),
        f"{_number(spread['minimum'], share)} to {_number(spread['maximum'], share)}, {spread['rounds']} times",
        _quantity(result["baseline"], result["unit"]),
        _quantity(result["ours"], result["unit"]),
        "" if result["hit_rate"] is None else f"{result['hit_rate']:.0%}",
        "" if result["holds"] is None else _verdict(result["holds"]),
    )


def _bar(result: Mapping[str, Any]) -> str:
    share = result["kind"] == "share"
    for words in ("at_least", "at_most"):
        if result[words] is not None:
            return f"{words.replace('_', ' ')} {_number(result[words], share)}"
    return ""


def _number(value: float, share: bool) -> str:
    return f"{value:.1%}" if share else f"{value:.2f}x"


def _quantity(timing: Mapping[str, Any], unit: str) -> str:
    factor, shown = UNITS[unit]
    value = timing["median"] * factor
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 3}f} {shown}"


def _verdict(holds: bool) -> str:
    return "holds" if holds else "SHORT"


def main() -> int:
    text = README.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        path = harness.RESULTS / f"{name}.json"
        if not path.exists():
            print(f"no results/{name}.json: run the benchmark that writes it", file=sys.stderr)
            continue
        text = refresh(text, name, table(json.loads(path.read_text(encoding="utf-8"))))
    README.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
