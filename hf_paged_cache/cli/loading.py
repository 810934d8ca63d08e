"""The model that a command is given by name, on the device and in the dtype asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .demo_model import load_demo_model
from .hub import ModelLoadError
from .model_options import require_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_model(
    name: str | None, *, revision: str | None = None, dtype: str | None = None, device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, from a folder or from the hub; without a name, the demo's.

    Args:
        revision: of a model on the hub: a branch, a tag or a commit; None: its main branch.
        dtype: of the weights, by torch's name for it; None: as they are on the disk.
        device: None: an accelerator if there is one.

    Raises:
        ModelLoadError: it cannot be had, or there is no such dtype or device; in one line.
    """
    require_dtype(dtype)

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
