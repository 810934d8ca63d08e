"""Owns what several rows of a call have in common: segments, held once, that attention reads once for all of them.

A segment lies where it was: in a run of the pool's blocks, which a lease keeps, in rows that ran ahead, or in the row
that ran for several.
The rows' own memory begins where the first of their segments ends.
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
    """`Looks` remembers whether a model looks at keys and values otherwise than by torch's attention.

    Attributes:
        model_looks: True for good, once the model was seen to look.
        weighs_launches: True if what rows share is held once only where that pays; False for trials of models.
    """

    def __init__(self) -> None:
        self.model_looks = False
        self.weighs_launches = True


class Seen:
    """`Seen` remembers how attention has read the rows of one call.

    Attributes:
        tokens, rows: most tokens that were read once at a time, and the number of rows that they were read for.
        dense: why what rows share was read for each row by itself; "": it was not.
    """

    def __init__(self) -> None:
        self.tokens = self.rows = 0
        self.dense = ""


class SharedColumns:
    """`SharedColumns` has the segments of the rows of one call.

    Args:
        plan: which rows have which segment; its block ids mean nothing here.
        segments: for each segment, memory of one row whose columns are the segment's tokens.
        leases: leases of the blocks in which segments lie.
        looks: whether the model looks at keys and values itself.
        num_pool_blocks: number of blocks that the pool had room for when the segments were made. Once the pool has
            grown, the segments lie in its old memory.

    Attributes:
        seen: how attention has read the segments; the rows' own `seen`, once they hold these segments.
        must_leave: True if each row must be read by itself from the next forward on.
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
        """Give each row all of its columns, because somebody looks at a layer."""
        rows = self.rows()
        if rows is not None:
            rows.make_dense()

    def copy(self) -> "SharedColumns":
        """Return the same segments for other rows."""
        return SharedColumns(self.plan, self.segments, self.leases, self._looks, self.num_pool_blocks)

    @property
    def num_bytes(self) -> int:
        """Bytes of all segments, those in the pool as well."""
        return sum(tensor.nbytes for held in self.segments for tensor, _ in held)

    def start_forward(self, start: int, stop: int) -> None:
        """Begin a forward of the columns `[start, stop)`."""
        self._forward = SharedForward(self.plan, self._devices, start, stop)

    def read(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a layer reads, lazily, [R, H, columns, D]: segments, and each row's own columns."""
        forward = self._forward
        assert forward is not None
        held = self._of_layer[layer_idx]
        if keys.shape[2] + self.plan.first_own != forward.stop or held["key"][0].dtype != keys.dtype:
            return self._read_dense(layer_idx)  # a forward that told nobody, or segments in another dtype
        reads = LayerReads(self, forward, held, {"key": keys, "value": values})
        rows, heads, _, size = keys.shape
        lazy_keys = LazyStates(reads, "key", (rows, heads, forward.stop, size), keys.dtype, keys.device)
        rows, heads, _, size = values.shape
        return lazy_keys, LazyStates(reads, "value", (rows, heads, forward.stop, size), values.dtype, values.device)

    def _read_dense(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all columns of a layer, in the rows' own memory."""
        self.make_dense()
        rows = self.rows()
        assert rows is not None  # the rows run
        keys, values = rows.layers[layer_idx].columns()
        return keys, values

    def look(self, *, is_call: bool = False) -> None:
        """Note that what layers read was asked for dense.

        Args:
            is_call: the call's attention asked; else the model did, and is taken to look for good.
        """
        if not is_call:
            self._looks.model_looks = True
        self.must_leave = True
        self.seen.dense = CALL_LOOKS if is_call else MODEL_LOOKS

    def count(self, plan: Plan) -> None:
        """Note that attention has read the segments once."""
        lengths = [(n, len(s.rows)) for n, s in zip(self.lengths, plan.segments, strict=True) if len(s.rows) > 1]
        if lengths:
            self.seen.tokens = max(self.seen.tokens, sum(length for length, _ in lengths))
            self.seen.rows = max(self.seen.rows, *(num_rows for _, num_rows in lengths))

    def fits(self, sources: Sequence[int]) -> bool:
        """Return whether the plan stays right if row `i` continues as row `sources[i]`."""
        kinds = self.plan.kinds()
        return len(sources) == len(kinds) and [kinds[source] for source in sources] == kinds

    def copy_columns(self, row: int, start: int, stop: int, to: Sequence[Streams], to_row: int, column: int) -> int:
        """Copy those of the columns `[start, stop)` of a row that lie in segments; return the first that does not.

        Args:
            to_row: row of the other memory that is written.
            column: column of the other memory that column `start` becomes.
        """
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
    """`SquareReads` lets a forward of many new columns after few known ones attend as one causal square.

    See `attention.causal`.

    Args:
        looks: told where the model does something else with what it reads.
    """

    def __init__(self, start: int, stop: int, looks: Looks) -> None:
        self._looks, self._stop = looks, stop
        self._square = CausalSquare(start, stop, self._look)

    def _look(self) -> None:
        self._looks.model_looks = True

    def read(self, layer_idx: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a layer reads, lazily, [R, H, columns, D]."""
        if keys.shape[2] != self._stop:  # a forward that told nobody
            return keys, values
        read = self._square.read({"key": keys, "value": values})
        return read["key"], read["value"]

    def make_dense(self) -> None:
        """Do nothing: the columns lie in the rows."""
