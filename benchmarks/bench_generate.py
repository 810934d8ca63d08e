"""What `generate` costs with PagedPrefixCache, against DynamicCache in the same run: `python
benchmarks/bench_generate.py`.

SmolLM2-135M in fp32 on a CPU; on a CUDA device bf16, and the time is that of its events. Greedy unless a scene says
otherwise. Every scene is a function in scenes/; all ways to make the same tokens run in turn, round after round, and in
fp32 must give the same ones. A line of the table is median over median, and beside it least and greatest of the ratios
round by round. The number of new tokens is exact. Filling and emptying caches and warm-up rounds are outside of all
timing; the cyclic garbage collector is off while timing.

Exit status: 1 if a bar does not hold or tokens differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import models
import tables
import torch
from scenes import SCENES, Repeat, Scene
from scenes.workbench import Bench, Sizes
from transformers.utils import logging

from hf_paged_cache.cli.demo_model import DEMO_MODEL

SHARED = 1024
QUICK = Sizes(shared=64, num_questions=6, num_turns=3)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--scenes", default=",".join(SCENES), help="names with commas between; default: all of them")
    parser.add_argument("--list", action="store_true", help="say what there is, and how long it takes on two cores")
    parser.add_argument(
        "--repeat", type=int, help="rounds of everything; default: as many as each scene needs, 2 to 31"
    )
    parser.add_argument(
        "--shared",
        type=int,
        default=SHARED,
        help="tokens of the usual shared prefix, a multiple of 8; all other lengths follow from it; default: 1024",
    )
    parser.add_argument("--model", help="a folder or a name on the hub; default: SmolLM2-135M-Instruct")
    parser.add_argument("--random-model", choices=models.SHAPES, help="random weights in this shape, enough for times")
    parser.add_argument("--quick", action="store_true", help="a tiny model, short prompts, one round: does it run?")
    parser.add_argument("--json", type=Path, help="where to write; default: results/generate.json, if all scenes ran")
    parser.add_argument(
        "--update", action="store_true", help="put what ran into results/generate.json, which keeps the rest"
    )
    parser.add_argument("--no-json", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    options.scenes = [name.strip() for name in options.scenes.split(",")]
    unknown = [name for name in options.scenes if name not in SCENES]
    if unknown:
        parser.error(f"no such scene: {', '.join(unknown)}; there are {', '.join(SCENES)}")
    if (options.repeat is not None and options.repeat < 1) or options.shared < 32 or options.shared % 8:
        parser.error("--repeat must be at least 1, --shared at least 32 and a multiple of 8")
    if sum(map(bool, (options.json, options.update, options.no_json))) > 1:
        parser.error("give one of --json, --update and --no-json")
    if options.model and options.random_model:
        parser.error("give --model or --random-model, not both")
    return options


def make_bench(options: argparse.Namespace) -> tuple[Bench, dict[str, Any]]:
    """The model and the sizes asked for, and what to write down of them."""
    device = models.default_device()
    shape = "tiny" if options.quick else options.random_model
    tokenizer = None
    if shape:
        dtype = torch.float32 if shape == "tiny" else models.default_dtype(device)
        model, name = models.random_model(shape, device, dtype), f"{shape}, random weights"
    else:
        model, tokenizer = models.load(options.model, device, models.default_dtype(device))
        name = Path(options.model or DEMO_MODEL).name  # its last part: a folder's path is nobody's business
    sizes = QUICK if options.quick else Sizes(options.shared)
    has_bars = device.type == "cpu" and not shape and not options.model and options.shared == SHARED
    conditions = {
        "model": name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "shared_tokens": sizes.shared,
    }
    return Bench(model, sizes, tokenizer=tokenizer, has_bars=has_bars, is_quick=options.quick), conditions


def run_scene(scene: Scene, bench: Bench, repeat: Repeat) -> dict[str, dict[str, Any]]:
    """The lines of one scene, as they go into the JSON.

    Tokens that differ are a result, too, and end only the scene.
    """
    lines: dict[str, dict[str, Any]] = {}
    place = {"scene": scene.name, "group": scene.group}
    try:
        for name, line in scene.run(bench, repeat):
            lines[name] = {**place, **line.as_json()}
    except AssertionError as error:
        lines[f"{scene.name}: failed"] = {**place, "failure": str(error), "holds": False}
    return lines


def run(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the scenes; say on stderr what runs and how long it takes. After each, all results so far."""
    logging.set_verbosity_error()  # prompts may be longer than what a model was trained on
    bench, conditions = make_bench(options)
    bench.generate(bench.tokens(1, 32), new_tokens=4)  # whatever the first call of all does once
    chosen = [SCENES[name] for name in options.scenes]
    if options.repeat is None and not options.quick:
        print(f"about {sum(scene.minutes for scene in chosen):.0f} minutes on two cores", file=sys.stderr)
    runs: dict[str, Any] = {}
    lines: dict[str, dict[str, Any]] = {}
    for scene in chosen:
        load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
        print(f"{scene.name}: {scene.what} About {scene.minutes:g} minutes.", file=sys.stderr, flush=True)
        started = time.perf_counter()
        lines |= run_scene(scene, bench, Repeat(1 if options.quick else options.repeat))
        minutes = (time.perf_counter() - started) / 60
        runs[scene.name] = {
            "what": scene.what,
            "commit": harness.commit(),
            "date": time.strftime("%Y-%m-%d"),
            "load_average_before": load,
            "minutes": round(minutes, 2),
        }
        print(f"{scene.name}: {minutes:.1f} minutes", file=sys.stderr, flush=True)
        yield {"conditions": conditions, "runs": runs, "scenes": lines}


def updated(before: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """`before` with the scenes of `results` in place of the same there, in the order of all scenes.

    Raises:
        SystemExit: they were not made under the same conditions.
    """
    if before.get("conditions") != results["conditions"]:
        raise SystemExit(f"not the same conditions: {before.get('conditions')} there, {results['conditions']} here")
    runs = {**before["runs"], **results["runs"]}
    lines = {name: line for name, line in before["scenes"].items() if line["scene"] not in results["runs"]}
    lines |= results["scenes"]
    return {
        "conditions": results["conditions"],
        "runs": {name: runs[name] for name in SCENES if name in runs},
        "scenes": {name: line for of in SCENES for name, line in lines.items() if line["scene"] == of},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_options(arguments)
    if options.list:
        for scene in SCENES.values():
            print(f"{scene.name:14}{scene.minutes:4g} min  {scene.what}")
        return 0
    path, before = options.json, None
    everything = set(options.scenes) == set(SCENES)
    if options.update:
        path = harness.RESULTS / "generate.json"
        before = json.loads(path.read_text(encoding="utf-8"))
    elif path is None and everything and not (options.no_json or options.quick):
        path = harness.RESULTS / "generate.json"
    results: dict[str, Any] = {}
    for results in run(options):
        if path is not None:  # after each scene, so that what ran is not lost
            written = results if before is None else updated(before, results)
            harness.write_results("generate", written, path)
    print(tables.generate_table(json.loads(harness.as_text(results))))
    return int(any(line["holds"] is False for line in results["scenes"].values()))


if __name__ == "__main__":
    sys.exit(main())
