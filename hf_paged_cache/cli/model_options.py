"""The options that several commands have: by which each is told its model, and who may read what is written."""

from __future__ import annotations

import re
from typing import Annotated

import typer

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
Mode = Annotated[
    str | None,
    typer.Option(
        help="Permissions of the files of blocks, such as 660 for a group; their owner's alone, if not given.",
        show_default=False,
    ),
]


_DTYPES = ("float32", "bfloat16", "float16", "float64")


def require_dtype(name: str | None) -> None:
    """Refuse what weights are not loaded in.

    Raises:
        ModelLoadError: it names those that they are.
    """
    from .hub import ModelLoadError

    if name is not None and name.removeprefix("torch.") not in _DTYPES:
        raise ModelLoadError(
            f"there is no dtype {name}; give float32, bfloat16 or float16, or leave it out: a quantized model is loaded as it was saved"
        )


def permissions_of(option: str, text: str | None) -> int | None:
    """Permissions of files as `chmod` is given them: 660.

    Raises:
        CacheArgumentError: they are none, or not such that the owner can read and write.
    """
    from hf_paged_cache import CacheArgumentError

    if text is None:
        return None
    if not re.fullmatch("(0o?)?6[0246]{2}", text):
        raise CacheArgumentError(
            f"{option} is {text!r}; give permissions of files that their owner reads and writes, as chmod takes them: 600 (the "
            "owner's alone), 640 (a group reads), 660 (a group reads and writes)"
        )
    return int(text.removeprefix("0o"), 8)
