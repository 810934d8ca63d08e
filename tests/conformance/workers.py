"""Many types, spread over processes. Apart from `__main__`, whose names a spawned process does not find."""

from __future__ import annotations

import logging
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed

import pytest
from tqdm import tqdm

from ..internals import capture_everywhere, cost_everywhere, split_everywhere
from .examine import TypeResult, examine
from .player import Setting, setting


def run_all(
    names: list[str],
    num_processes: int,
    *,
    splits: bool = False,
    device: str | None = None,
    how: Setting | None = None,
) -> list[TypeResult]:
    """All types on a device, spread over processes. `splits`, `how`: see `start_worker`."""
    how = Setting() if how is None else how
    if num_processes == 1:
        start_worker(splits, how)
        return [examine(name, device=device) for name in tqdm(names)]
    results: list[TypeResult] = []
    context = multiprocessing.get_context("spawn")
    # an assertion of a kernel leaves a process without its device: there all begin anew after some types
    at_a_time = len(names) if device is None else 8 * num_processes
    with tqdm(total=len(names)) as progress:
        for first in range(0, len(names), at_a_time):
            with ProcessPoolExecutor(
                num_processes, mp_context=context, initializer=start_worker, initargs=(splits, how)
            ) as pool:
                some = names[first : first + at_a_time]
                for future in as_completed([pool.submit(examine, name, device=device) for name in some]):
                    results.append(future.result())
                    if results[-1].is_defect:
                        progress.write(f"{results[-1].outcome}: {results[-1].name}", file=sys.stderr)
                    progress.set_postfix_str(results[-1].name)
                    progress.update()
    return results


def start_worker(splits: bool, how: Setting) -> None:
    """One thread, costs as on a CPU, and nothing on the terminal but the progress.

    Args:
        splits: rows that share a block read it once.
        how: caches are built.
    """
    import torch
    import transformers

    setting.most_blocks, setting.capture = how.most_blocks, how.capture
    if splits:
        split_everywhere(pytest.MonkeyPatch())  # for the rest of this process
    cost_everywhere(pytest.MonkeyPatch())
    if how.capture:
        capture_everywhere(pytest.MonkeyPatch())
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
