"""What is remembered of a call while it runs, and for `last_call` after it."""

from ..blocks import HashChain
from ..kv.stopwatch import Stopwatch
from ..rows.shared import Seen
from ..stats import RowCount
from .admission import CallLimits


class CallState:
    """What is remembered of a call while it runs.

    Attributes:
        digest: of the model, as its rows began.
        resets: see `BlockStore.resets_of`, as its rows began.
        was_alone: nobody could change the model then.
        counts: a line for each row of the batch.
        counts_more: forwards after the first are of a prompt, too.
        stopwatch: of a long forward of a prompt, its tokens, and whether it is the store's first.
        peak_kv_bytes: the most that blocks in use and rows took.
        captured: how its forwards ran, as text.
        is_custom: a function of its caller's own runs the forwards.
    """

    def __init__(self, kind: str, limits: CallLimits, *, beams: bool, runs_only_forwards: bool) -> None:
        self.kind, self.limits, self.beams, self.runs_only_forwards = kind, limits, beams, runs_only_forwards
        self.digest = b""
        self.resets = (0, 0)
        self.was_alone = False
        self.counts: list[RowCount] = []
        self.pending: tuple[list[RowCount], bool] | None = (
            None  # of the running forward, and whether the call begins with it
        )
        self.chains: dict[bytes, HashChain] = {}
        self.counts_more = True
        self.peak_kv_bytes = 0
        self.seen = Seen()
        self.captured: object = ""
        self.is_custom = False
        self.stopwatch: tuple[Stopwatch, int, bool] | None = None

    def copy(self) -> "CallState":
        """Of rows that go on beside these."""
        copied = CallState(self.kind, self.limits, beams=self.beams, runs_only_forwards=self.runs_only_forwards)
        copied.digest, copied.resets = self.digest, self.resets
        return copied

    @property
    def read_once(self) -> tuple[int, int, str]:
        """Tokens that attention read once at a time, for how many rows, and why not all of the time."""
        return self.seen.tokens, self.seen.rows, self.seen.dense
