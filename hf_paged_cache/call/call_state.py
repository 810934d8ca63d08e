"""Defines what is remembered of a call while it runs, and for `last_call` after it."""

from typing import Any

from ..blocks import HashChain
from ..rows.shared import Seen
from ..stats import RowCount
from .limits import CallLimits


class CallState:
    """`CallState` remembers what is known of a call while it runs.

    Attributes:
        digest: digest of the model, as the call's rows began.
        regime: rotary frequencies of the prompt, where they depend on length.
        is_in_step: True if other processes run as many forwards.
        resets: what `BlockStore.resets_of` gave as the call's rows began.
        was_alone: True if nobody could change the model as the call's rows began.
        counts: counts of each row of the batch.
        counts_more: True if forwards after the first may be of a prompt, too.
        kv_bytes: bytes of the call's rows, as of its last forward of a prompt.
        peak_kv_bytes: most bytes that blocks in use and rows took.
        captured: how the call's forwards ran, as text.
        chunked: the call's prompt, where it comes in chunks.
        deltas: how far images have moved positions, as modules keep it; None: no module does.
        images: images that the first forward is to run, taken from its arguments.
        is_custom: True if a function of the caller's own runs the forwards.
        calls_back: True if code of the caller, or a forward of the model's own, may change the model between forwards.
    """

    def __init__(self, kind: str, limits: CallLimits, *, beams: bool) -> None:
        self.kind, self.limits, self.beams = kind, limits, beams
        self.digest = self.regime = b""
        self.is_in_step = False
        self.resets = (0, 0)
        self.was_alone = False
        self.counts: list[RowCount] = []
        self.pending: tuple[list[RowCount], bool] | None = (
            None  # counts of the running forward, and whether the call begins with it
        )
        self.chains: dict[bytes, HashChain] = {}
        self.counts_more = True
        self.kv_bytes = self.peak_kv_bytes = 0
        self.seen: Seen | None = None  # how attention read the call's rows, from its first forward on
        self.captured: object = ""
        self.is_custom = False
        self.calls_back = True
        self.chunked: Any = None
        self.images: Any = None
        self.deltas: Any = None

    def copy(self) -> "CallState":
        """Return the state of rows that go on beside these."""
        copied = CallState(self.kind, self.limits, beams=self.beams)
        copied.digest, copied.resets, copied.regime = self.digest, self.resets, self.regime
        copied.deltas = self.deltas
        return copied

    def note_bytes(self, in_use: int, of_rows: int) -> None:
        """Note how many bytes blocks in use and the rows take now."""
        self.kv_bytes = of_rows
        self.peak_kv_bytes = max(self.peak_kv_bytes, in_use + of_rows)

    @property
    def read_once(self) -> tuple[int, int, str]:
        """Tokens that attention read once at a time, for how many rows, and why not all of the time."""
        return (0, 0, "") if self.seen is None else (self.seen.tokens, self.seen.rows, self.seen.dense)
