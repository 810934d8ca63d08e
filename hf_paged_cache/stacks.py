"""What the threads of the process run, read off their stacks with the collector off.

Before Python 3.12 the collector may run wherever memory is taken, and with it other threads, which end the frame that is being
read: a crash. Here it is switched off, the frame read and it is switched on again in C, so nobody runs between them.
"""

import gc
import operator
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any


def idents() -> set[int]:
    """Of the threads that run Python."""
    frames: dict[int, FrameType] = _undisturbed(sys._current_frames)
    running = set(frames)
    frames.clear()  # one of them is of this function: a cycle, which would keep its callers' variables
    return running


def current_frames() -> dict[int, FrameType]:
    """Ident of a thread -> the frame that it runs. Whoever asks clears it, or it is a cycle that keeps their variables."""
    frames: dict[int, FrameType] = _undisturbed(sys._current_frames)
    return frames


def caller_of(frame: FrameType) -> FrameType | None:
    """The frame that called this one."""
    caller: FrameType | None = _undisturbed(partial(getattr, frame, "f_back"))
    return caller


def locals_of(frame: FrameType) -> Mapping[str, Any]:
    """The variables of a frame."""
    variables: Mapping[str, Any] = _undisturbed(partial(getattr, frame, "f_locals"))
    return variables


def _undisturbed(read: Callable[[], Any]) -> Any:
    """What a function in C reads, with the collector off."""
    if sys.version_info >= (3, 12) or not gc.isenabled():
        return read()
    try:
        _, found, _ = map(operator.call, (gc.disable, read, gc.enable))
    except BaseException:
        gc.enable()
        raise
    return found
