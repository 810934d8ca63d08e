"""What `hf-paged-cache run` tells the Python that it starts, and every Python that one starts: one environment variable, read here alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

_VARIABLE = "HF_PAGED_CACHE_RUN"
_SITE = str(Path(__file__).parent / "site")  # has the sitecustomize by which a Python begins


class RunOptions(NamedTuple):
    """How programs run.

    Attributes:
        cache: arguments of each model's `PagedPrefixCache`, by name.
        stats: a file of JSON, to which each process adds what it did; None: none.
        is_quiet: nothing is said on stderr.
        pid: of the process that the command has become.
    """

    cache: dict[str, Any]
    stats: str | None
    is_quiet: bool
    pid: int

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """An environment in which every Python begins with these options."""
        given = environ.get("PYTHONPATH")
        others = [folder for folder in given.split(os.pathsep) if folder != _SITE] if given else []
        return {**environ, "PYTHONPATH": os.pathsep.join([_SITE, *others]), _VARIABLE: json.dumps(self._asdict())}


def options_of(environ: Mapping[str, str]) -> RunOptions | None:
    """The options of this process; None: it was not started by the command.

    Examples:
        >>> options = RunOptions({"cache_salt": "a"}, None, False, 7)
        >>> options_of(options.environment({})) == options, options_of({})
        (True, None)
    """
    given = environ.get(_VARIABLE)
    return None if given is None else RunOptions(**json.loads(given))
