"""Runs the command `doctor`: it says whether the cache works here and with a model, and what a token costs."""

from __future__ import annotations

import platform
import sys
from typing import Annotated

import typer

from . import command
from .command import Device, Dtype, Revision


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A folder, or a name on the hub; without one, only this machine is looked at.")
    ] = None,
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Say what is installed and what memory there is; of a model, whether it is supported, and why not, what a token
    costs, and how many tokens fit.

    Exits with 1 if the model is not supported.
    """
    command.require_model(model, revision, dtype)

    import psutil
    import torch
    import transformers

    import hf_paged_cache

    modules = ", ".join(f"{each.__name__} {each.__version__}" for each in (hf_paged_cache, transformers, torch))
    _tell("versions", f"{modules}, Python {platform.python_version()}")
    memory, accelerator = psutil.virtual_memory(), torch.accelerator
    free = {"cpu": (memory.available, memory.total)}
    for index in range(accelerator.device_count() if accelerator.is_available() else 0):
        free[f"{accelerator.current_accelerator()}:{index}"] = accelerator.get_memory_info(index)
    for name, (available, total) in free.items():
        _tell(name, f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    if not accelerator.is_available():
        _tell("accelerator", "none that torch can use")
    if model is None:
        return
    loaded, _ = command.load_model(model, revision, dtype, device)
    print("trying it with a few short forwards ...", file=sys.stderr, flush=True)
    report = hf_paged_cache.check_model(loaded)
    parameters = f"{loaded.num_parameters() / 1e6:,.1f} million parameters"
    kind = str(loaded.dtype).removeprefix("torch.")
    _tell("model", f"{type(loaded).__name__}, {parameters}, {kind} on {loaded.device}")
    _tell("attention", loaded.config._attn_implementation)
    for at, line in enumerate(str(report).splitlines()):
        _tell("" if at else "support", line)
    if not report.is_supported:
        raise typer.Exit(1)
    cache = hf_paged_cache.PagedPrefixCache(loaded)
    cache.prefill([0] * 32)  # shows what a block takes, and so how many blocks there can be
    if (num_blocks := cache.stats().num_blocks) is not None:
        usable, size = num_blocks - 1, cache.store.blocks.block_size  # one block is reserved
        _tell("room for", f"{usable * size:,} tokens, in {usable:,} blocks of {size}, with half of what is free")


def _tell(name: str, value: object) -> None:
    print(f"{name:13}{value}", flush=True)
