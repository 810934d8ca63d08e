"""Runs the command `hf-paged-cache`; `main` is its entry point.

torch and transformers are imported only once a model is asked for.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command with the process's arguments, and exit.

    Exit codes: 0, done; 1, what was to be shown is not so (tokens differ, a file is damaged, nothing was loaded); 2,
    the command could not be run, and stderr says why.
    """
    missing = [name for name in ("typer", "rich") if find_spec(name) is None]
    if missing:
        needed = f"hf-paged-cache needs {' and '.join(missing)}"
        print(f"{needed}: install it with its extra, from a clone: pip install '.[demo]'", file=sys.stderr)
        raise SystemExit(2)
    from .commands import app
    from .run import ProgramStart

    try:
        app(prog_name="hf-paged-cache")
    except ProgramStart as given:
        start = given.args[0]
    start()
