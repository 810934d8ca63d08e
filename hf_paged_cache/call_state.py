"""Where a call stands, and the `generate` that it runs for. No logic: `call.py` moves from state to state."""

import threading
from enum import Enum


class CallState(Enum):
    """Where a call stands; the value completes "the call ..."."""

    IDLE = "has no rows"
    ANNOUNCED = "has announced a forward"
    WRITTEN = "is in the middle of a forward"
    CONFIRMED = "has rows and waits for a forward"
    ENDED = "has ended and keeps its rows"


class Bracket:
    """One running `generate`; held by its frame alone, so that it is gone however that is left."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()


def no_bracket() -> None:
    """What a weak reference to a bracket gives when there is none."""
