"""Where a call stands, and the `generate` that it runs for. No logic: `call.py` moves from state to state."""

import threading
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class CallLimits:
    """What `generate` knows of the call that it begins.

    Attributes:
        num_prompt_columns: columns of the prompt, padding included; those behind it are generated.
        max_columns: the most columns a row can get; None if that is not known.
        num_rows: rows of the batch once beams and samples are expanded.
        end_of_sequence: token ids that end a row.
    """

    num_prompt_columns: int
    max_columns: int | None
    num_rows: int
    end_of_sequence: frozenset[int]
