"""`doctor`: does it work here, and for this model, and what does a token cost?"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import loading
from .loading import Device, Dtype, Revision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAMES = 13  # columns of the names of what is told


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A folder, or a name on the hub; without one, only this machine is looked at.")
    ] = None,
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Say what is installed and what memory there is; of a model, whether it is supported, and why not, what a token costs, and
    how many tokens fit.

    Exits with 1 if the model is not supported.
    """
    loading.require_model(model, revision, dtype)

    from hf_paged_cache import check_model

    _print(of_machine())
    if model is None:
        return
    print(f"loading {model} ...", file=sys.stderr, flush=True)
    loaded, _ = loading.load_model(model, revision, dtype, device)
    report = check_model(loaded)
    _print(of_model(loaded))
    print("\n".join(f"{'' if at else 'support':{_NAMES}}{line}" for at, line in enumerate(str(report).splitlines())))
    if report.is_supported:
        _print(of_memory(loaded))
    raise typer.Exit(0 if report.is_supported else 1)


def of_machine() -> Iterator[tuple[str, str]]:
    """Names and values: versions, and the memory of each device."""
    import psutil
    import torch
    import transformers

    import hf_paged_cache

    yield (
        "versions",
        f"hf_paged_cache {hf_paged_cache.__version__}, transformers {transformers.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}",
    )
    memory = psutil.virtual_memory()
    yield "cpu", f"{_gib(memory.available)} of {_gib(memory.total)} GiB free, {torch.get_num_threads()} threads"
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        yield "accelerator", "none that torch can use"
        return
    for index in range(torch.accelerator.device_count()):
        free, total = torch.accelerator.get_memory_info(index)
        yield f"{kind.type}:{index}", f"{_gib(free)} of {_gib(total)} GiB free"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f}"


def of_model(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """What was loaded, and which attention it runs."""
    parameters: Any = sum(parameter.numel() for parameter in model.parameters())
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    dtype = str(model.dtype).removeprefix("torch.")
    yield (
        "model",
        f"{type(model).__name__}, {parameters / 1e6:,.1f} million parameters, {dtype} on {', '.join(devices)}",
    )
    yield "attention", str(model.config._attn_implementation)


def of_memory(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """How many tokens a `PagedPrefixCache` without options has room for."""
    from hf_paged_cache import PagedPrefixCache

    cache = PagedPrefixCache(model)
    block_size = cache.store.blocks.block_size
    cache.prefill([0] * (2 * block_size))  # shows what a block takes, and so how many there can be
    num_blocks = cache.stats().num_blocks
    if num_blocks is not None:
        tokens = (num_blocks - 1) * block_size  # one is reserved
        yield (
            "room for",
            f"{tokens:,} tokens, in {num_blocks - 1:,} blocks of {block_size}, with the default num_blocks",
        )


def _print(told: Iterator[tuple[str, str]]) -> None:
    for name, value in told:
        print(f"{name:{_NAMES}}{value}", flush=True)
