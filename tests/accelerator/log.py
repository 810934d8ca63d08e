"""Owns what a device had to do, as entries: each wait of the host, each transfer, each launch, with the line that caused it."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

WAIT, TRANSFER, LAUNCH, EVENT = "wait", "transfer", "launch", "event"


@dataclass(frozen=True)
class Entry:
    """One thing that a device or its host did."""

    kind: str  # WAIT: the host waits for the device; TRANSFER: bytes from the host; EVENT: a wait for work of long ago
    operation: str
    device: str
    where: str  # file:line of the innermost frame of hf_paged_cache or transformers; outside of both, of the innermost not torch's
    num_bytes: int = 0
    is_blocking: bool = False

    def __str__(self) -> str:
        size = f" {self.num_bytes} bytes{', blocking' if self.is_blocking else ''}" if self.kind == TRANSFER else ""
        return f"{self.kind} {self.operation} on {self.device}{size} at {self.where}"


@dataclass
class Log:
    """The entries of a span."""

    entries: list[Entry] = field(default_factory=list)

    def of(self, kind: str) -> list[Entry]:
        return [entry for entry in self.entries if entry.kind == kind]

    @property
    def waits(self) -> list[Entry]:
        return self.of(WAIT)

    @property
    def transfers(self) -> list[Entry]:
        return self.of(TRANSFER)

    @property
    def launches(self) -> list[Entry]:
        return self.of(LAUNCH)

    def lines(self, kind: str) -> str:
        """The entries of a kind, equal ones once with their number: what a failing test shows."""
        return "\n".join(f"{number} x {line}" for line, number in Counter(map(str, self.of(kind))).items())


_open: list[Log] = []


@contextmanager
def recorded() -> Iterator[Log]:
    """A log of what devices do within the block."""
    log = Log()
    _open.append(log)
    try:
        yield log
    finally:
        _open[:] = [other for other in _open if other is not log]


def note(
    kind: str,
    operation: str,
    device: object,
    num_bytes: int = 0,
    *,
    is_blocking: bool = False,
    where: str | None = None,
) -> None:
    """Add an entry to every open log."""
    if _open:
        entry = Entry(kind, operation, str(device), where or _caused_by(sys._getframe(1)), num_bytes, is_blocking)
        for log in _open:
            log.entries.append(entry)


_OF_INTEREST = ("/hf_paged_cache/", "/transformers/")
_UNINTERESTING = ("/torch/", "/tests/accelerator/tensor.py", "/tests/accelerator/backend.py", "/contextlib.py")
_names: dict[str, tuple[bool, bool, str]] = {}  # file name -> is it of interest, is it torch's or ours, its short name


def _caused_by(frame: FrameType | None) -> str:
    nearest = ""
    while frame is not None:
        file = frame.f_code.co_filename
        of_interest, uninteresting, name = _names.get(file) or _classified(file)
        if of_interest:
            return f"{name}:{frame.f_lineno}"
        if not nearest and not uninteresting:
            nearest = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return nearest


def _classified(file: str) -> tuple[bool, bool, str]:
    folder = next((part for part in _OF_INTEREST if part in file and "/tests/" not in file), None)
    name = folder[1:] + file.rpartition(folder)[2] if folder else "/".join(file.split("/")[-3:])
    _names[file] = (folder is not None, any(part in file for part in _UNINTERESTING), name)
    return _names[file]
