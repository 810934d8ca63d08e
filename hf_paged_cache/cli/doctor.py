"""`doctor`: does it work here, and for this model, and what does a token cost?"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GIB = 2**30
_NAMES = 13  # columns of the names of what is told


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A folder, or a name on the hub; without one, only this machine is looked at.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights, such as bfloat16; as they are on the disk, if not given.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to run, such as cuda; an accelerator if there is one.", show_default=False)
    ] = None,
) -> None:
    """Say what is installed and what memory there is; of a model, whether it is supported, and why not, what a token costs, and
    how many tokens fit.

    Exits with 1 if the model is not supported.
    """
    from ..errors import PagedCacheError
    from ..model_check import check_model
    from .loading import load_model

    _print(of_machine())
    if model is None:
        return
    try:
        print(f"loading {model} ...", file=sys.stderr, flush=True)
        loaded, _ = load_model(model, dtype=dtype, device=device)
        report = check_model(loaded)
        _print(of_model(loaded))
        print(
            "\n".join(f"{'' if at else 'support':{_NAMES}}{line}" for at, line in enumerate(str(report).splitlines()))
        )
        if report.is_supported:
            _print(of_memory(loaded))
    except (PagedCacheError, OSError) as error:
        print(f"hf-paged-cache doctor: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    raise typer.Exit(0 if report.is_supported else 1)


def of_machine() -> Iterator[tuple[str, str]]:
    """Names and values: versions, and the memory of each device."""
    import psutil
    import torch
    import transformers

    import hf_paged_cache

    from ..model.support import TESTED_VERSION, is_tested_version
    from ..store.memory_budget import free_bytes

    tested = "" if is_tested_version() else f" (all model types were tried with {TESTED_VERSION})"
    yield (
        "versions",
        f"hf_paged_cache {hf_paged_cache.__version__}, transformers {transformers.__version__}{tested}, "
        f"torch {torch.__version__}, Python {platform.python_version()}",
    )
    of = f"{free_bytes(torch.device('cpu')) / _GIB:.1f} of {psutil.virtual_memory().total / _GIB:.1f} GiB free"
    yield "cpu", f"{of}, {torch.get_num_threads()} threads"
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        for index in range(torch.accelerator.device_count()):
            found = torch.device(kind.type if kind else "cuda", index)
            yield str(found), f"{free_bytes(found) / _GIB:.1f} GiB free"
    else:
        yield "accelerator", "none that torch can use"


def of_model(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """What was loaded, and which attention it runs."""
    parameters: Any = sum(parameter.numel() for parameter in model.parameters())
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    dtype = str(model.dtype).removeprefix("torch.")
    yield (
        "model",
        f"{type(model).__name__}, {parameters / 1e6:,.1f} million parameters, {dtype} on {', '.join(devices)}",
    )
    yield (
        "attention",
        f"{model.config._attn_implementation}, over the copy that attention='contiguous' keeps of a running row",
    )


def of_memory(model: PreTrainedModel) -> Iterator[tuple[str, str]]:
    """What a token costs, and how many fit, as a `PagedPrefixCache` without options has it."""
    from ..cache import PagedPrefixCache
    from ..model.probing import measure_bytes_per_token

    cache = PagedPrefixCache(model)
    cache.prefill([0] * (2 * cache.store.blocks.block_size))  # shows what a block takes, and so what the budget holds
    stats, size = cache.stats(), cache.store.blocks.block_size
    yield "a token", f"{measure_bytes_per_token(model) / 2**10:,.1f} KiB of keys and values"
    if snapshot := cache.store.blocks.states.rules.num_bytes if cache.store.blocks.states else 0:
        yield "a snapshot", f"{snapshot / 2**20:,.2f} MiB of states, at places to go on from"
    if stats.num_blocks is not None:
        num_blocks = stats.num_blocks - 1  # one is reserved
        yield (
            "room for",
            f"{num_blocks * size:,} tokens, in {num_blocks:,} blocks of {size}, if nothing is said of num_blocks",
        )


def _print(told: Iterator[tuple[str, str]]) -> None:
    for name, value in told:
        print(f"{name:{_NAMES}}{value}", flush=True)
