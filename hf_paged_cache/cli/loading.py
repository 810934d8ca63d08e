"""The model that a command is given by name: its options, what is refused of them before torch is imported, and loading it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from .demo_model import load_demo_model
from .hub import ModelLoadError, require_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Revision = Annotated[
    str | None,
    typer.Option("--revision", help="Of a model on the hub: a branch, a tag or a commit.", show_default=False),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="Of the weights, such as bfloat16; as they are on the disk, if not given."),
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="Where to run, such as cuda; an accelerator if there is one.", show_default=False),
]

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def require_model(name: str | None, revision: str | None, dtype: str | None) -> None:
    """Refuse what can be no model, as far as that is seen without loading it.

    Raises:
        ModelLoadError: no model has this name, or weights are not loaded in such a dtype.
    """
    if dtype is not None and dtype.removeprefix("torch.") not in _DTYPES:
        raise ModelLoadError(
            f"there is no dtype {dtype}; give float32, bfloat16 or float16, or leave it out: a quantized model is loaded as it was saved"
        )
    if name is not None:
        require_name(name, revision)


def load_model(
    name: str | None, revision: str | None = None, dtype: str | None = None, device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, from a folder or from the hub; without a name, the demo's.

    Args:
        revision: of a model on the hub: a branch, a tag or a commit; None: its main branch.
        dtype: of the weights, by torch's name for it; None: as they are on the disk.
        device: None: an accelerator if there is one.

    Raises:
        ModelLoadError: it cannot be had, or there is no such dtype or device; in one line.
    """
    require_model(name, revision, dtype)

    import torch

    kind: Any = "auto" if dtype is None else getattr(torch, dtype.removeprefix("torch."))
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    try:
        where = (accelerator or torch.device("cpu")) if device is None else torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        said = str(error).partition("\n")[0]
        raise ModelLoadError(f"device {device} cannot be used: {said}") from error
    if where.type == "meta":
        raise ModelLoadError("device meta cannot be used: it holds shapes, and no numbers")
    return load_demo_model(name, revision=revision, dtype=kind, device=where)
