"""What several rows of a call have in common, held once: segments that attention reads in one piece for all of them.

A segment lies where it was: in a run of the pool's blocks, which a lease keeps, in rows that ran ahead, or in the row that ran for several.
The rows' own memory begins behind the first of their segments that ends.
"""

from collections.abc import Sequence
from typing import Any
from weakref import ref

from torch import Tensor

from ..attention.causal import CausalSquare
from ..attention.lazy import LazyStates
from ..attention.segments import Plan
from ..attention.shared import LayerReads, PlanOnDevices, SharedForward
from ..blocks import Allocation
from ..kv.transfers import Transfer
from . import memory
from .memory import Streams

MODEL_LOOKS = "the model looks at keys and values itself, and does not leave all of attention to torch"
CALL_LOOKS = (
    "attention was asked for what cannot be read once: dropout, is_causal, a mask that hides more than padding, "
    "or all of it by a compiled forward"
)
IN_CHUNKS = "prefill_chunk_size was given, and what is read in parts rounds otherwise"


class Looks:
    """Whether a model looks at keys and values otherwise than by torch's attention, for good once it was seen to.

    Attributes:
        weighs_launches: what rows share is held once only where that pays; False for trials of models.
    """

    def __init__(self) -> None:
        self.model_looks = False
        self.weighs_launches = True


class Seen:
    """How attention has read the rows of one call.

    Attributes:
        tokens, rows: the most that it read once at a time, and for how many rows.
        dense: why what rows share was read for each of them; "": it was not.
    """

    def __init__(self) -> None:
        self.tokens = self.rows = 0
        self.dense = ""


class SharedColumns:
    """The segments of the rows of one call.

    Args:
        plan: which rows have which segment; its block ids mean nothing here.
        segments: of each the memory of one row, whose columns are the segment's tokens.
        leases: of the blocks in which segments lie.
        num_pool_blocks: that the pool had room for then; once it has grown, they lie in its old memory.
        looks: of the model.

    Attributes:
        seen: how attention has read them; the rows' own, once they hold these segments.
        must_leave: rows must be read each by itself from the next forward on.
    """

    def __init__(
        self,
        plan: Plan,
        segments: Sequence[Sequence[Streams]],
        leases: Sequence[Allocation],
        looks: Looks,
        num_pool_blocks: int = 0,
    ) -> None:
        self.plan, self.segments, self.leases, self._looks = plan, segments, leases, looks
        self.num_pool_blocks = num_pool_blocks
        self.lengths = [held[0].tensor.shape[3] for held in segments]
        self.seen = Seen()
        self.must_leave = False
        self._devices = PlanOnDevices(plan, Transfer())
        self._forward: SharedForward | None = None
        self._of_layer: dict[int, dict[str, list[Tensor]]] = {}
        for held in segments:
            for tensor, names in held:
                for (layer_idx, name), part in zip(names, tensor, strict=True):
                    self._of_layer.setdefault(layer_idx, {}).setdefault(name, []).append(part)

    rows: ref[Any]

    def make_dense(self) -> None:
        """Somebody looks at a layer: each row gets all of its columns."""
        rows = self.rows()
        if rows is not None:
            rows.make_dense()

    def copy(self) -> "SharedColumns":
        """The same segments for other rows."""
        return SharedColumns(self.plan, self.segments, self.leases, self._looks, self.num_pool_blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments, those in the pool as well."""
        return sum(tensor.nbytes for held in self.segments for tensor, _ in held)

    def start_forward(self, start: int, stop: int) -> None:
        """A forward of the columns `[start, stop)` begins."""
        self._forward = SharedForward(self.plan, self._devices, start, stop)

    def read(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer reads, lazily: segments, and of each row its own columns, [R, H, columns, D]."""
        forward = self._forward
        assert forward is not None
        held = self._of_layer[layer_idx]
        if keys.shape[2] + self.plan.first_own != forward.stop or held["key"][0].dtype != keys.dtype:
            return self._read_dense(layer_idx)  # of a forward that told nobody, or of segments in another dtype
        reads = LayerReads(self, forward, held, {"key": keys, "value": values})
        rows, heads, _, size = keys.shape
        lazy_keys = LazyStates(reads, "key", (rows, heads, forward.stop, size), keys.dtype, keys.device)
        rows, heads, _, size = values.shape
        return lazy_keys, LazyStates(reads, "value", (rows, heads, forward.stop, size), values.dtype, values.device)

    def _read_dense(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """All columns of a layer, in the rows' own memory."""
        self.make_dense()
        rows = self.rows()
        assert rows is not None  # they run
        keys, values = rows.layers[layer_idx].columns()
        return keys, values

    def look(self, *, is_call: bool = False) -> None:
        """What layers read was asked for dense: by the call's attention, or else by the model, for good."""
        if not is_call:
            self._looks.model_looks = True
        self.must_leave = True
        self.seen.dense = CALL_LOOKS if is_call else MODEL_LOOKS

    def count(self, plan: Plan) -> None:
        """Attention has read the segments once."""
        lengths = [(n, len(s.rows)) for n, s in zip(self.lengths, plan.segments, strict=True) if len(s.rows) > 1]
        if lengths:
            self.seen.tokens = max(self.seen.tokens, sum(length for length, _ in lengths))
            self.seen.rows = max(self.seen.rows, *(num_rows for _, num_rows in lengths))

    def fits(self, sources: Sequence[int]) -> bool:
        """Whether the plan stays right if row `i` continues as row `sources[i]`."""
        kinds = self.plan.kinds()
        return len(sources) == len(kinds) and [kinds[source] for source in sources] == kinds

    def copy_columns(self, row: int, start: int, stop: int, to: Sequence[Streams], to_row: int, column: int) -> int:
        """Copy those of the columns `[start, stop)` of a row that lie in segments; returns the first that does not."""
        plan, at = self.plan, start
        for number, segment in enumerate(plan.segments):
            if row in segment.rows:
                first = plan.pads[row] + segment.start
                end = min(stop, first + self.lengths[number])
                if first <= at < end:
                    columns = memory.Columns(self.segments[number], 0, at - first, end - first)
                    memory.copy_columns(columns, to, to_row, column + at - start)
                    at = end
        return at


class SquareReads:
    """A forward of many new columns after few known ones, attended as one causal square: see `attention.causal`.

    Args:
        looks: told where the model does something else with what it reads.
    """

    def __init__(self, start: int, stop: int, looks: Looks) -> None:
        self._looks, self._stop = looks, stop
        self._square = CausalSquare(start, stop, self._look)

    def _look(self) -> None:
        self._looks.model_looks = True

    def read(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """What a layer reads, lazily, [R, H, columns, D]."""
        if keys.shape[2] != self._stop:  # of a forward that told nobody
            return keys, values
        read = self._square.read({"key": keys, "value": values})
        return read["key"], read["value"]

    def make_dense(self) -> None:
        """Nothing: the columns lie in the rows."""
