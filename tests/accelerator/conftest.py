"""Each test of this folder runs in a process of its own kind, where the simulated device is registered: it cannot be taken back.

What pytest runs sends the test there, fixtures and parameters included, and tells its outcome. One such process serves all tests of a
pytest process.
"""

from __future__ import annotations

import pytest

from . import backend
from .process import Process

_process = Process()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if backend.is_started():
        return None  # this is the process: run it
    if (reason := backend.why_not()) is not None:
        pytest.skip(reason)
    root = str(pyfuncitem.config.rootpath)
    options = (
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-p",
        "no:unraisableexception",
        f"--rootdir={root}",
    )
    status, printed = _process.run(*options, pyfuncitem.nodeid)
    if status:
        pytest.fail(f"on the simulated device, exit status {status}:\n{printed}", pytrace=False)
    return True
