"""Looks at a model's name before anything is loaded. transformers asks the hub itself."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import PagedCacheError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class ModelLoadError(PagedCacheError):
    """Raised when a model cannot be had; it says why, in one line."""


def require_name(name: str, revision: str | None = None) -> None:
    """Refuse what can be no model's name, as far as that shows without the hub.

    Raises:
        ModelLoadError: the name is a file, a folder without a model, or a path of nothing.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ModelLoadError(f"{name} is a folder, which has no revisions; leave revision {revision} out")
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"{folder} holds no config.json, so no model; write one there: model.save_pretrained")
    elif folder.exists():
        raise ModelLoadError(f"{name} is a file; give the folder that it is in")
    elif not _HUB_NAME.fullmatch(name):
        raise ModelLoadError(f"there is no folder {name}")
