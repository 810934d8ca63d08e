"""Many types, spread over processes. Apart from `__main__`, whose names a spawned process does not find."""

import functools
import logging
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import transformers
from tqdm import tqdm

from ..internals import capture_everywhere, cost_everywhere, split_everywhere
from .examine import TypeResult, examine
from .player import Setting, setting


def run_all(
    names: list[str], num_processes: int, *, splits: bool = False, device: str | None = None, how: Setting | None = None
) -> list[TypeResult]:
    """All types on a device, spread over processes. `splits`, `how`: see `start_worker`.

    An assertion of a kernel leaves a process without its device, so there all begin anew after some types.
    """
    context, examined = multiprocessing.get_context("spawn"), functools.partial(examine, device=device)
    at_a_time = len(names) if device is None else 8 * num_processes
    results: list[TypeResult] = []
    with tqdm(total=len(names)) as progress:
        for first in range(0, len(names), at_a_time):
            given = (splits, how or Setting())
            with ProcessPoolExecutor(num_processes, context, start_worker, given) as pool:
                for result in pool.map(examined, names[first : first + at_a_time]):
                    results.append(result)
                    if result.is_defect:
                        progress.write(f"{result.outcome}: {result.name}", file=sys.stderr)
                    progress.update()
    return results


def start_worker(splits: bool, how: Setting) -> None:
    """One thread, costs as on a CPU, and nothing on the terminal but the progress.

    Args:
        splits: rows that share a block read it once.
        how: caches are built.
    """
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
