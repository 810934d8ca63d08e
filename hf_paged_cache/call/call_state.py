"""Defines what is remembered of a call while it runs, and for `last_call` after it."""

from dataclasses import dataclass, field
from typing import Any

from ..blocks import HashChain
from ..rows.shared import Seen
from ..stats import RowStats
from .request import UNLIMITED, CallLimits


@dataclass(slots=True)
class CallState:
    """`CallState` remembers what is known of a call while it runs."""

    kind: str
    limits: CallLimits = UNLIMITED
    beams: bool = False
    digest: bytes = b""  # of the model, as the call's rows began
    regime: bytes = b""  # rotary frequencies of the prompt, where they depend on length
    adapters: list[str] | None = None  # adapter of each row, if PEFT was given any
    is_in_step: bool = False  # other processes run as many forwards
    resets: tuple[int, int] = (0, 0)  # what `BlockStore.resets_of` gave as the call's rows began
    was_alone: bool = False  # nobody could change the model as the call's rows began
    counts: list[RowStats] = field(default_factory=list)  # of each row of the batch
    pending: tuple[list[RowStats], bool] | None = None  # counts of the running forward; whether the call begins with it
    counts_more: bool = True  # forwards after the first may be of a prompt, too
    chains: dict[bytes, HashChain] = field(default_factory=dict)  # root -> a row's tokens and their hashes
    kv_bytes: int = 0  # of the call's rows, as of its last forward of a prompt
    peak_kv_bytes: int = 0  # most bytes that blocks in use and rows took
    seen: Seen | None = None  # how attention read the call's rows, from its first forward on
    captured: object = ""  # how the call's forwards ran, as text
    is_custom: bool = False  # a function of the caller's own runs the forwards
    is_unseen: bool = False  # transformers' `generate` may begin that no bracket has seen
    calls_back: bool = True  # code of the caller, or a forward of the model's own, may change the model in between
    chunked: Any = None  # the call's prompt, where it comes in chunks
    images: Any = None  # images that the first forward is to run, taken from its arguments
    deltas: Any = None  # how far images have moved positions, as modules keep it; None: no module does

    def copy(self) -> "CallState":
        """Return the state of rows that go on beside these."""
        return CallState(
            *(self.kind, self.limits, self.beams, self.digest, self.regime, self.adapters),
            resets=self.resets,
            deltas=self.deltas,
        )
