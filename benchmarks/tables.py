"""Owns how results are shown: Markdown tables, made from the JSON alone. `python benchmarks/tables.py` refreshes
README.md.

A table stands between `<!-- NAME: begin -->` and `<!-- NAME: end -->`, NAME being that of a file in results/; that of
peers.json is in docs/performance.md. Refuses to invent: where there is no file, the page is left as it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
import plots

README = Path(__file__).parent / "README.md"
OTHER_PAGES = {"peers": Path(__file__).parents[1] / "docs" / "performance.md"}  # table -> where it is, if not in README
UNITS = {  # in the JSON -> factor, shown as
    "s": (1.0, "s"),
    "bytes": (2.0**-20, "MiB"),
    "CPU s": (1e3, "ms of CPU"),
    "CPU us": (1.0, "us of CPU"),
}
SCENE_HEAD = ("scene", "bar", "measured", "least to greatest", "against", "ours", "reused", "")


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
    return f"{'; '.join(parts)}; {_when(results)}."


def generate_table(results: Mapping[str, Any]) -> str:
    """The scenes of bench_generate.py: a table a group, a line a comparison."""
    groups: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, line in results["scenes"].items():
        groups.setdefault(line["group"], {})[name] = line
    parts = []
    for group, lines in groups.items():
        scenes = ",".join(dict.fromkeys(line["scene"] for line in lines.values()))
        command = f"python benchmarks/bench_generate.py --scenes {scenes}"
        table = markdown(SCENE_HEAD, [_scene_row(name, line) for name, line in lines.items()])
        parts.append(f"**{group}**: `{command}`\n\n{table}")
    return "\n\n".join([*parts, conditions(results)])


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


def eviction_table(results: Mapping[str, Any]) -> str:
    """Hit rates by trace and policy, a column for each size of the pool of bench_eviction.py."""
    rows = []
    for trace, of in results["traces"].items():
        for policy, cells in of["rates"].items():
            rows.append((trace, policy, *(f"{cell['mean']:.1%}" for cell in cells)))
        behind = [row["behind"][trace] for row in results["gaps"]]
        rows.append((trace, "lru behind clairvoyant", *(f"{100 * gap:.1f} points" for gap in behind)))
        rows.append((trace, "unbounded", *[f"{of['unbounded']:.1%}"] * len(results["shares"])))
    head = ("trace", "policy", *(f"{share:g} x working set" for share in results["shares"]))
    traces = [
        (
            name,
            f"{of['requests']:,}",
            f"{of['prompt_tokens']:,}",
            f"{of['working_set_blocks']:,}",
            f"{of['largest_request_blocks']:,}",
        )
        for name, of in results["traces"].items()
    ]
    trace_head = ("trace", "requests", "prompt tokens", "working set, blocks", "largest request, blocks")
    return f"{markdown(head, rows)}\n\n{markdown(trace_head, traces)}\n\n{conditions(results)}"


def peers_table(results: Mapping[str, Any]) -> str:
    """Seconds of each way of bench_peers.py, a row a case; the fastest is in bold."""
    ways = [*results["cases"][0]["seconds"]]
    rows = []
    for case in results["cases"]:
        medians = {name: case["seconds"][name]["median"] for name in ways}
        cells = [_quantity(case["seconds"][name], "s") for name in ways]
        if case["plain_prompts"]:
            cells[0] = f"about {cells[0]}"
        fastest = ways.index(min(medians, key=lambda name: medians[name]))
        cells[fastest] = f"**{cells[fastest]}**"
        rows.append((case["title"], *cells))
    machine, given = results["machine"], results["conditions"]
    said = [
        f"{given['model']}, {given['dtype']}, {given['threads']} threads",
        f"{machine['cpu']}, {machine['cores']} cores",
    ]
    said.append(f"torch {machine['torch']}, transformers {machine['transformers']}")
    if about := given.get("vLLM"):
        said.append(f"{about['version']} (transformers {about['transformers']}, blocks of {about['block_size']})")
    started = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in given["start_seconds"].items())
    said += [f"to start: {started}", f"medians of {given['rounds']} rounds", _when(results)]
    head = ["", *({"ours": "this", "packed": "this, packed"}.get(name, name) for name in ways)]
    return f"{markdown(head, rows)}\n\n{'; '.join(said)}."


TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "generate": generate_table,
    "blocks": blocks_table,
    "precision": precision_table,
    "eviction": eviction_table,
    "peers": peers_table,
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


def _when(results: Mapping[str, Any]) -> str:
    """Commit and day, scene by scene where they are not the same; how busy the machine was."""
    runs = results.get("runs")
    if not runs:
        return f"commit {results['commit']}, {results['date']}"
    made: dict[tuple[str, str], list[str]] = {}
    for name, of in runs.items():
        made.setdefault((of["commit"], of["date"]), []).append(name)
    of_all = [
        f"commit {commit}, {date}" + (f" ({', '.join(names)})" if len(made) > 1 else "")
        for (commit, date), names in made.items()
    ]
    loads = [of["load_average_before"] for of in runs.values() if of["load_average_before"] is not None]
    busy = f"; load average before the scenes {min(loads):g} to {max(loads):g}" if loads else ""
    return f"{'; '.join(of_all)}{busy}"


def _scene_row(name: str, line: Mapping[str, Any]) -> tuple[str, ...]:
    if line.get("failure"):
        return name, "", "", "", "", "", "", f"FAILED: {line['failure'].partition(':')[0]}"
    kind, unit = line["kind"], line["unit"]
    against = line["ways"][line["against"]] if line["against"] else None
    return (
        name,
        _bar(line),
        _number(line["value"], kind),
        _spread(line["spread"], kind),
        f"{line['against']} {_quantity(against, unit)}" if against else "",
        _quantity(line["ways"][line["subject"]], unit) if line["subject"] else "",
        "" if line["hit_rate"] is None else f"{line['hit_rate']:.0%}",
        "" if line["holds"] is None else _verdict(line["holds"]),
    )


def _spread(spread: Mapping[str, Any], kind: str) -> str:
    if spread["rounds"] == 1:
        return ""
    return f"{_number(spread['minimum'], kind)} to {_number(spread['maximum'], kind)}, {spread['rounds']} times"


def _bar(line: Mapping[str, Any]) -> str:
    """The bar; where the floor says that it cannot be had, what is asked instead."""
    kind = line["kind"]
    for words in ("at_least", "at_most"):
        if line[words] is not None:
            bar = f"{words.replace('_', ' ')} {_number(line[words], kind)}"
            if line["bar"] != line[words]:
                bar += f"; {_number(line['floor_ratio'], kind)} can be had, 95 % is {_number(line['bar'], kind)}"
            return bar
    return ""


def _number(value: float, kind: str) -> str:
    return {
        "share": f"{value:.1%}",
        "ratio": f"{value:.2f}x",
        "microseconds": f"{value:.1f} us",
        "tokens": f"{value:.0f} tokens",
    }[kind]


def _quantity(timing: Mapping[str, Any], unit: str) -> str:
    factor, shown = UNITS[unit]
    value = timing["median"] * factor
    if unit == "s" and value < 0.1:
        value, shown = 1e3 * value, "ms"
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 3}f} {shown}"


def _verdict(holds: bool) -> str:
    return "holds" if holds else "SHORT"


def main() -> int:
    for name, table in TABLES.items():
        path = harness.RESULTS / f"{name}.json"
        if not path.exists():
            print(f"no results/{name}.json: run the benchmark that writes it", file=sys.stderr)
            continue
        results = json.loads(path.read_text(encoding="utf-8"))
        if name == "generate":
            if "runs" not in results:
                print("results/generate.json is of another form: run benchmarks/bench_generate.py", file=sys.stderr)
                continue
            plots.draw_all(results)
        page = OTHER_PAGES.get(name, README)
        page.write_text(refresh(page.read_text(encoding="utf-8"), name, table(results)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
