"""What is remembered of a call while it runs, and for `last_call` after it."""

from typing import Any

from ..blocks import HashChain
from ..rows.shared import Seen
from ..stats import RowCount
from .limits import CallLimits


class CallState:
    """What is remembered of a call while it runs.

    Attributes:
        digest: of the model, as its rows began.
        regime: the rotary frequencies of its prompt, where they depend on length.
        is_in_step: other processes run as many forwards.
        resets: see `BlockStore.resets_of`, as its rows began.
        was_alone: nobody could change the model then.
        counts: a line for each row of the batch.
        counts_more: forwards after the first are of a prompt, too.
        kv_bytes: of its rows, as of its last forward of a prompt.
        peak_kv_bytes: the most that blocks in use and rows took.
        captured: how its forwards ran, as text.
        chunked: its prompt, where that comes in chunks.
        deltas: how far images have moved positions, as modules keep it; None: none does.
        images: that its first forward is to run, taken from its arguments.
        is_custom: a function of its caller's own runs the forwards.
        calls_back: code of its caller's may run between its forwards.
    """

    def __init__(self, kind: str, limits: CallLimits, *, beams: bool) -> None:
        self.kind, self.limits, self.beams = kind, limits, beams
        self.digest = self.regime = b""
        self.is_in_step = False
        self.resets = (0, 0)
        self.was_alone = False
        self.counts: list[RowCount] = []
        self.pending: tuple[list[RowCount], bool] | None = (
            None  # of the running forward, and whether the call begins with it
        )
        self.chains: dict[bytes, HashChain] = {}
        self.counts_more = True
        self.kv_bytes = self.peak_kv_bytes = 0
        self.seen: Seen | None = None  # how attention read its rows, from its first forward on
        self.captured: object = ""
        self.is_custom = False
        self.calls_back = True
        self.chunked: Any = None
        self.images: Any = None
        self.deltas: Any = None

    def copy(self) -> "CallState":
        """Of rows that go on beside these."""
        copied = CallState(self.kind, self.limits, beams=self.beams)
        copied.digest, copied.resets, copied.regime = self.digest, self.resets, self.regime
        copied.deltas = self.deltas
        return copied

    def note_bytes(self, in_use: int, of_rows: int) -> None:
        """So much do blocks in use and the rows take now."""
        self.kv_bytes = of_rows
        self.peak_kv_bytes = max(self.peak_kv_bytes, in_use + of_rows)

    @property
    def read_once(self) -> tuple[int, int, str]:
        """Tokens that attention read once at a time, for how many rows, and why not all of the time."""
        return (0, 0, "") if self.seen is None else (self.seen.tokens, self.seen.rows, self.seen.dense)
