"""Owns what commands have in common: options, the model that one is given, and how a command ends that is refused."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ..errors import PagedCacheError, UnsupportedModelError
from .demo_model import DEMO_MODEL, ModelLoadError, load_demo_model, require_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MaxBytes = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="The most memory of a model's keys and values, such as 4GB, without a space; half of what is free, if not "
        "given. What a token takes: hf-paged-cache doctor MODEL.",
    ),
]
DiskFolder = Annotated[  # a text, since the empty path would be the current folder
    str | None, typer.Option(metavar="PATH", help="Where evicted blocks go, to be read back.")
]
Mode = Annotated[
    str | None, typer.Option(help="Permissions of the files of blocks, such as 660; their owner's alone, if not given.")
]
Revision = Annotated[str | None, typer.Option(help="Of a model on the hub: a branch, a tag or a commit.")]
Dtype = Annotated[
    str | None, typer.Option(help="Of the weights: fp32, bf16 or fp16; as they are on the disk, if not given.")
]
Device = Annotated[str | None, typer.Option(help="Where to run, such as cuda; an accelerator if there is one.")]

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


class Command(TyperCommand):
    """`Command` ends with a line on stderr and the exit code 2 if it is refused; a defect keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (PagedCacheError, OSError, UnicodeDecodeError) as error:
            is_of_model = isinstance(error, UnsupportedModelError)
            said = f"the model is not supported: {error}" if is_of_model else _as_typed(str(error), ctx)
            print(f"hf-paged-cache {ctx.info_name}: {said}", file=sys.stderr)
            raise typer.Exit(2) from error


def _as_typed(said: str, ctx: Any) -> str:
    """Return a message with options as they are typed: `--max-bytes` for `max_bytes`; words in quotes or paths stay.

    A name that is a word is an option at the message's beginning, and in backticks.
    """
    names = [each.name for each in ctx.command.params] + [given[2:].partition("=")[0] for given in ctx.args]
    options = {name.replace("-", "_") for name in names}
    plain = "|".join(re.escape(name) for name in options if "_" not in name and name) or "(?!)"
    said = re.sub(rf"^({plain})(?= is )|(?<=`)({plain})(?=`)", r"--\g<0>", said)
    words = "|".join(re.escape(name) for name in options if "_" in name) or "(?!)"
    unquoted = rf"(?<![\w'\"./-])({words})(?![\w'\"./-])|(?<=did you mean )\w+"
    return re.sub(unquoted, lambda name: f"--{name[0].replace('_', '-')}", said)


def require_model(name: str | None, revision: str | None, dtype: str | None) -> None:
    """Refuse what can be no model, as far as that shows without loading it."""
    if dtype is not None and dtype.removeprefix("torch.") not in {*_DTYPES, *_DTYPES.values()}:
        advice = "give fp32, bf16 or fp16, or leave it out: a quantized model is loaded as it was saved"
        raise ModelLoadError(f"there is no dtype {dtype}; {advice}")
    if name is not None:
        require_name(name, revision)


def load_model(
    name: str | None, revision: str | None = None, dtype: str | None = None, device: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model a command is asked for, or the demo's, and its tokenizer, on an accelerator if there is one."""
    import torch

    print(f"loading {name or DEMO_MODEL} ...", file=sys.stderr, flush=True)
    dtype = "auto" if dtype is None else _DTYPES.get(dtype, dtype.removeprefix("torch."))
    accelerator: Any = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return load_demo_model(name, revision=revision, dtype=dtype, device=device or accelerator)
