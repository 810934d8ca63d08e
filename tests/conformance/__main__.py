"""`python -m tests.conformance`: every model type in every scene; prints what is not identical, exits 1 on a defect."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: a second thread makes tiny models slower

import argparse
import sys
from pathlib import Path

from .player import Setting
from .report import STORED, load, store, summary, table
from .workers import run_all
from .zoo import VARIANTS, model_types


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument(
        "--types",
        help="names separated by commas; without it all types and variants. What --json holds of others stays",
    )
    parser.add_argument("--json", type=Path, help=f"where to store the results, such as {STORED.name} beside this file")
    parser.add_argument("--table", type=Path, help="where to write the docs' table")
    parser.add_argument(
        "--split", action="store_true", help="read once what rows share from one block on. Its results are not stored"
    )
    parser.add_argument("--blocks", type=int, help="of each store, such as 2: nothing need be reused, and all is right")
    parser.add_argument("--dry", action="store_true", help="on static rows, with capture='dry'")
    parser.add_argument(
        "--captured", action="store_true", help="with capture='auto' on a CUDA device, whatever a capture takes"
    )
    parser.add_argument("--device", help="where the models are, such as cuda. Its results are not stored")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    captures = arguments.dry or arguments.captured
    is_other = arguments.split or arguments.device or arguments.blocks or captures
    if is_other and (arguments.json or arguments.table):
        parser.error(
            "what is played with --split, --blocks, --dry, --captured or --device is not stored; "
            "leave out --json and --table"
        )
    names = arguments.types.split(",") if arguments.types else [*model_types(), *VARIANTS]
    how = Setting(arguments.blocks, "auto" if arguments.captured else "dry" if arguments.dry else False)
    results = run_all(names, arguments.processes, splits=arguments.split, device=arguments.device, how=how)
    print(summary(results))  # noqa: T201
    if arguments.json:
        store(results, arguments.json, keep_others=arguments.types is not None)
    if arguments.table:
        arguments.table.write_text(table(load(arguments.json or STORED)), encoding="utf-8")
    return int(any(result.is_defect for result in results))


if __name__ == "__main__":
    sys.exit(main())
