"""Many types, spread over processes. Apart from `__main__`, whose names a spawned process does not find."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed

import pytest
from tqdm import tqdm

from ..internals import cost_everywhere, split_everywhere
from .examine import TypeResult, examine


def run_all(
    names: list[str], num_processes: int, *, splits: bool = False, device: str | None = None
) -> list[TypeResult]:
    """All types on a device, spread over processes. `splits`: see `start_worker`."""
    if num_processes == 1:
        start_worker(splits)
        return [examine(name, device=device) for name in tqdm(names)]
    results = []
    context = multiprocessing.get_context("spawn")
    each = None if device is None else 8  # an assertion of a kernel leaves a process without its device
    with ProcessPoolExecutor(
        num_processes, mp_context=context, initializer=start_worker, initargs=(splits,), max_tasks_per_child=each
    ) as pool:
        futures = [pool.submit(examine, name, device=device) for name in names]
        with tqdm(total=len(names)) as progress:
            for future in as_completed(futures):
                results.append(future.result())
                if results[-1].is_defect:
                    progress.write(f"{results[-1].outcome}: {results[-1].name}", file=sys.stderr)
                progress.set_postfix_str(results[-1].name)
                progress.update()
    return results


def start_worker(splits: bool) -> None:
    """One thread, costs as on a CPU, and nothing on the terminal but the progress. `splits`: rows that share a block read it once."""
    import torch
    import transformers

    if splits:
        split_everywhere(pytest.MonkeyPatch())  # for the rest of this process
    cost_everywhere(pytest.MonkeyPatch())
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
