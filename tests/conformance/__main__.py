"""`python -m tests.conformance`: every model type in every scene; prints what is not identical, exits 1 on a defect."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: a second thread makes tiny models slower

import argparse
import logging
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from .examine import TypeResult, examine
from .report import STORED, load, store, summary, table
from .zoo import VARIANTS, model_types


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--types", help="names separated by commas; without it all types and variants")
    parser.add_argument("--json", type=Path, help=f"where to store the results, such as {STORED.name} beside this file")
    parser.add_argument("--table", type=Path, help="where to write the docs' table")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    names = arguments.types.split(",") if arguments.types else [*model_types(), *VARIANTS]
    results = run_all(names, arguments.processes)
    print(summary(results))  # noqa: T201
    if arguments.json:
        store(results, arguments.json)
    if arguments.table:
        arguments.table.write_text(table(load(arguments.json or STORED)), encoding="utf-8")
    return int(any(result.is_defect for result in results))


def run_all(names: list[str], num_processes: int) -> list[TypeResult]:
    """All types, spread over processes."""
    if num_processes == 1:
        _start_worker()
        return [examine(name) for name in tqdm(names)]
    results = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, mp_context=context, initializer=_start_worker) as pool:
        futures = [pool.submit(examine, name) for name in names]
        with tqdm(total=len(names)) as progress:
            for future in as_completed(futures):
                results.append(future.result())
                progress.set_postfix_str(results[-1].name)
                progress.update()
    return results


def _start_worker() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
