"""Results of many types: the JSON that is stored, the table that the docs show, and a summary for the terminal."""

import json
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from .examine import SAME, TypeResult
from .scenes import SCENES
from .windows import WINDOWS

STORED = Path(__file__).with_name("results.json")


def load(path: Path = STORED) -> dict[str, Any]:
    """What was stored: versions, and the outcome of each type."""
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def store(results: Sequence[TypeResult], path: Path, *, keep_others: bool = False) -> None:
    """Write results, sorted, with the versions they were made with.

    Args:
        keep_others: types that are stored already and not among the results stay, if the versions are the same.
    Raises:
        ValueError: they are not; nothing is written.
    """
    versions = {
        "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
    }
    types: dict[str, Any] = {}
    if keep_others and path.exists():
        before = load(path)
        if before["versions"] != versions:
            raise ValueError(f"{path} was made with {before['versions']}; run all types, or store elsewhere")
        types = before["types"]
    types |= {result.name: result.as_stored() for result in results}
    stored = {
        "versions": versions,
        "counts": counts({name: result["outcome"] for name, result in types.items()}),
        "types": dict(sorted(types.items())),
    }
    path.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def counts(outcomes: dict[str, str]) -> dict[str, int]:
    """Types by outcome. One that is a decoder only by its config counts as that decoder: without, it is refused."""
    types = [outcomes.get(f"{name}@decoder", outcome) for name, outcome in outcomes.items() if "@" not in name]
    return dict(sorted(Counter(types).items()))


def summary(results: Sequence[TypeResult]) -> str:
    """A line for each type that is not identical, and the counts."""
    lines = []
    for result in sorted(results, key=lambda result: (result.outcome, result.name)):
        if result.outcome == "identical" and not result.own_distance:
            continue
        reason = result.reason
        if result.own_distance:
            reason = f"distance {result.distance:.1e}, DynamicCache from itself {result.own_distance:.1e} {reason}"
        lines.append(f"{result.outcome:10} {result.name:28} {reason}")
        lines += [f"{'':12}{scene}: {cell}" for scene, cell in result.cells.items() if _is_news(cell)]
    lines += ["types and variants:", *_counted(Counter(result.outcome for result in results))]
    lines += ["types, of BERT's kind as decoders:", *_counted(counts({each.name: each.outcome for each in results}))]
    return "\n".join(lines)


def table(stored: dict[str, Any]) -> str:
    """The docs' page: which types are supported in which mode, which are not, and why."""
    types, versions, numbers = stored["types"], stored["versions"], stored["counts"]
    supported = {name: result for name, result in types.items() if result["outcome"] == "identical"}
    others = {name: result for name, result in types.items() if name not in supported}
    windowed = [name for name, result in supported.items() if result.get("num_windows")]
    modes = list(SCENES)
    lines = [
        "# Supported models",
        "",
        f"Written by `python -m tests.conformance` with transformers {versions['transformers']} and torch "
        f"{versions['torch']}; do not edit by hand.",
        "",
        f"transformers lists {sum(numbers.values())} model types for causal language models: "
        + ", ".join(f"{count} {outcome}" for outcome, count in numbers.items())
        + ". Each was built tiny and seeded, and played the scenes below with `DynamicCache` and with this cache. "
        "*Identical*: the same tokens, and logits within 1e-4 of their scale. A name with `@` is a variant and not "
        "counted, but for BERT's kind, of which `@decoder` counts.",
        "",
        "Every scene that reuses was also seen to fail with zeros in place of what is reused: all of it, the windows "
        f"alone, the states alone. {len(windowed)} types and variants were played with {len(WINDOWS)} more windows.",
        "",
        "## Identical",
        "",
        "Scenes, of which transformers itself refuses some: "
        + "; ".join(f"**{number}** {mode}" for number, mode in enumerate(modes, 1))
        + ".",
        "",
        "| type | identical in | largest distance |",
        "|---|---|---|",
    ]
    for name, result in supported.items():
        cells = result.get("cells", {})
        refused = [str(number) for number, mode in enumerate(modes, 1) if mode in cells]
        distance = f"{result.get('distance', 0.0):.0e}"
        if "own_distance" in result:
            distance += f" (`DynamicCache` from itself: {result['own_distance']:.0e})"
        lines.append(f"| {name} | {'all but ' + ', '.join(refused) if refused else 'all'} | {distance} |")
    notes = {name: result["notes"] for name, result in supported.items() if "notes" in result}
    if notes:
        lines += ["", "Nothing is reused in a call of these, the result is the same:", ""]
        reasons: dict[str, list[str]] = {}
        for name, found in notes.items():
            for reason in found:
                reasons.setdefault(reason.split("computed again: ")[-1], []).append(name)
        lines += [f"- {reason}: {', '.join(dict.fromkeys(names))}" for reason, names in reasons.items()]
    lines += [
        "",
        "## Refused when the cache is built, or not built",
        "",
        "| type | outcome | reason |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {result['outcome']} | {result.get('reason', '')} |" for name, result in others.items()]
    return "\n".join(lines) + "\n"


def _counted(numbers: dict[str, int]) -> list[str]:
    return [f"{number:4} {outcome}" for outcome, number in numbers.items()]


def _is_news(cell: str) -> bool:
    return cell != SAME
