"""The options by which every command is told its model."""

from __future__ import annotations

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
