"""`doctor`: does it work here, and for this model, and what does a token cost?"""

from __future__ import annotations

import platform
import sys
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from . import loading
from .loading import Device, Dtype, Revision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .comparing import Model

_NAMES = 13  # columns of the names of what is told
_PROMPT, _CHUNKS = 512, (64, 128, 256, 512)  # tokens
_PATIENCE = 5.0  # seconds that the prompt may take


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A folder, or a name on the hub; without one, only this machine is looked at.")
    ] = None,
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Say what is installed and what memory there is; of a model, whether it is supported, and why not, what a token costs,
    how many tokens fit, and what a new prompt takes whole and in chunks (`prefill_chunk_size`).

    Exits with 1 if the model is not supported.
    """
    loading.require_model(model, revision, dtype)

    from hf_paged_cache import check_model

    _tell_of_machine()
    if model is None:
        return
    print(f"loading {model} ...", file=sys.stderr, flush=True)
    loaded, _ = loading.load_model(model, revision, dtype, device)
    report = check_model(loaded)
    parameters = [*loaded.parameters()]
    devices = ", ".join(sorted({str(each.device) for each in parameters}))
    millions = sum(each.numel() for each in parameters) / 1e6
    kind = str(loaded.dtype).removeprefix("torch.")
    _tell("model", f"{type(loaded).__name__}, {millions:,.1f} million parameters, {kind} on {devices}")
    _tell("attention", loaded.config._attn_implementation)
    for at, line in enumerate(str(report).splitlines()):
        _tell("" if at else "support", line)
    if report.is_supported:
        _tell_of_memory(loaded)
        _tell_of_chunks(loaded)
    raise typer.Exit(0 if report.is_supported else 1)


def _tell(name: str, value: object) -> None:
    print(f"{name:{_NAMES}}{value}", flush=True)


def _tell_of_machine() -> None:
    """Versions, and the memory of each device."""
    import psutil
    import torch
    import transformers

    import hf_paged_cache

    modules = ", ".join(f"{each.__name__} {each.__version__}" for each in (hf_paged_cache, transformers, torch))
    _tell("versions", f"{modules}, Python {platform.python_version()}")
    memory = psutil.virtual_memory()
    _tell("cpu", f"{_free(memory.available, memory.total)}, {torch.get_num_threads()} threads")
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        _tell("accelerator", "none that torch can use")
        return
    for index in range(torch.accelerator.device_count()):
        _tell(f"{kind.type}:{index}", _free(*torch.accelerator.get_memory_info(index)))


def _free(free: int, total: int) -> str:
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def _tell_of_memory(model: PreTrainedModel) -> None:
    """How many tokens a `PagedPrefixCache` without options has room for."""
    from hf_paged_cache import PagedPrefixCache

    cache = PagedPrefixCache(model)
    size = cache.store.blocks.block_size
    cache.prefill([0] * (2 * size))  # shows what a block takes, and so how many there can be
    num_blocks = cache.stats().num_blocks
    if num_blocks is not None:
        num_blocks -= 1  # one is reserved
        room = f"{num_blocks * size:,} tokens, in {num_blocks:,} blocks of {size}"
        _tell("room for", f"{room}, with the default num_blocks")


def _tell_of_chunks(model: Model) -> None:
    """What a new prompt takes, whole and in chunks, which give the same bits whatever is cached."""
    import torch

    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or _PROMPT + 1
    ids = torch.ones((1, min(_PROMPT, most - 1)), dtype=torch.int64, device=model.device)
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 1, "do_sample": False}

    def seconds(**chunk: int) -> float:
        start = perf_counter()
        model.generate(ids, **given, **chunk)
        return perf_counter() - start

    seconds()  # the first one is slower
    whole, name = seconds(), f"{ids.shape[1]} new"
    if whole > _PATIENCE:
        _tell(name, f"{whole:.1f} s; too long to try chunks")
        return
    try:
        parts = [f"{size}: {seconds(prefill_chunk_size=size):.2f} s" for size in _CHUNKS if size <= ids.shape[1]]
    except (NotImplementedError, ValueError) as error:  # transformers' own refusal
        parts = [f"not with this model ({str(error).splitlines()[0]})"]
    _tell(name, f"whole {whole:.2f} s; in chunks of {', '.join(parts)}")
