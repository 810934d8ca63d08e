"""What the rows of a view share, read once: the plan, copies of segments, and attention over segments and tails.

A `View` asks it, for its layers without a window, where the rows' own columns begin; it keeps those, and hands them back with
what a layer reads. Copies of segments are kept while the plan lasts. Where a model, or a call, wants something that cannot be
served, what it reads becomes dense, and its rows are read each by itself from the next forward on: after a model for good,
after a call until other rows run.
"""

from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from ..kv.block_pool import BlockPool
from ..kv.block_tables import read_source
from ..kv.recycled_memory import RecycledMemory
from ..kv.slot_mapping import ReadSource, RowLayout
from ..kv.transfers import Transfer
from .backends import name_of
from .buffers import LayerSteps
from .lazy import LazyStates
from .segments import Plan, Segment, find_segments
from .shared import LayerReads as _LayerReads
from .shared import PlanOnDevices, SharedForward

# Bytes of keys and values of one layer that are read in the time that one more launch, and the merge after it, take. On a CPU
# 8 rows of SmolLM2's shape were as quick after 112 shared tokens, where 1.2 MB a layer are saved, as read each by itself; 1.06
# times as quick after 320 tokens (3.4 MB), and 1.55 times after 2,048.
# On an accelerator a step waits for Python, which asks for 0.35 ms more of a layer that is split (H200, Llama 3 8B's shape in bf16:
# 22 ms a step, 33 ms split). Reading each row by itself takes longer than that only where torch repeats heads first, as under a
# mask or in fp32: 1.4 ms for 16 rows of 4,096 tokens, which are 250 MB. Its fused kernel reads them in 0.07 ms.
LAUNCH_BYTES: Mapping[str, int] = MappingProxyType({"cpu": 3 * 2**19})
_OTHER_LAUNCH_BYTES, _OTHER_FUSED_BYTES = 2**28, 2**32
MODEL_LOOKS = "the model looks at keys and values itself, and does not leave all of attention to torch"
CALL_LOOKS = (
    "attention was asked for what cannot be read once: dropout, is_causal, a mask that hides more than padding, "
    "or all of it by a compiled forward"
)
GRADIENTS = "gradients were on"
IN_CHUNKS = "prefill_chunk_size was given, and what is read in parts rounds otherwise"


class ReadOnce(NamedTuple):
    """What attention read once for several rows of a call.

    Attributes:
        num_tokens, num_rows: the most at a time.
        dense: why what rows share was read for each of them, all the time or at the end; "": it was not.
    """

    num_tokens: int = 0
    num_rows: int = 0
    dense: str = ""


def tokens_of_a_launch(states: Tensor, bytes_per_token: float, *, are_padded: bool) -> float:
    """How many tokens of one row are read in the time that one more launch, and the merge after it, take.

    Args:
        states: keys of a layer.
        bytes_per_token: of keys and values of one layer.
        are_padded: rows have padding, so attention has a mask.
    """
    is_fused = states.dtype in (torch.bfloat16, torch.float16) and not are_padded
    other = _OTHER_FUSED_BYTES if is_fused else _OTHER_LAUNCH_BYTES
    return LAUNCH_BYTES.get(states.device.type, other) / bytes_per_token


class SharedReads:
    """What rows share, for the layers of a view that see all columns.

    Args:
        pool: whose blocks it is in.

    Attributes:
        plan: of the running rows; None: each row is read by itself.
        is_sdpa: the model is set to torch's own attention; any other reads dense tensors.
        read_once: of the running call, or of the last one.
        num_bytes: of the copies of segments.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.model_looks = False  # at what it reads, otherwise than by attention
        self.is_sdpa = True
        self.read_once = ReadOnce()
        self.weighs_launches = True  # else whatever is shared is read once, whether it pays or not
        self._each_because = ""  # why each of the running rows is read by itself; "": it need not be
        self._copies: dict[tuple[int, str], dict[int, Tensor]] = {}  # layer index, name -> segment -> [1, H, tokens, D]
        self.drop()

    def drop(self) -> None:
        """Forget plan and copies."""
        self._pool.release(copy for copies in self._copies.values() for copy in copies.values())
        self.plan: Plan | None = None
        self._kinds: list[tuple[int, ...]] = []  # of the plan's rows
        self.num_bytes = 0
        self._is_planned = False  # for the rows as they are
        self._planned_at = 0  # the column before which they were looked at
        self._rows: PlanOnDevices | None = None  # the plan's, on devices
        # segment -> its first block, where they follow one another; or its blocks
        self._sources: list[int | ReadSource] = []
        self._copies = {}
        self._found: dict[int, dict[str, list[Tensor]]] = {}  # layer index -> name -> what it reads of each segment
        self._found_in = (0, 0)  # the pool as it was then
        self._forward: SharedForward | None = None

    @property
    def backend(self) -> str:
        """What computes attention on the device of the pool's first layer."""
        layers = (self._pool.layer(index) for index in self._pool.layer_indices)
        return next((name_of(each.device.type) for layer in layers for each in layer.values()), "not known yet")

    def start_rows(self, *, in_chunks: bool = False) -> None:
        """Other rows run from here on; `in_chunks` as in `View.start_rows`."""
        self._each_because, self._is_planned = IN_CHUNKS if in_chunks else "", False

    @property
    def may_be_lazy(self) -> bool:
        """Whether what attention reads may be left to it."""
        return not self._why_each()

    def look(self, *, is_call: bool = False) -> None:
        """What layers read was asked for dense: by the call's attention, or else by the model, for good."""
        if is_call:
            self._each_because = CALL_LOOKS
        else:
            self.model_looks = True
        if self.plan is not None:
            self.read_once = self.read_once._replace(dense=CALL_LOOKS if is_call else MODEL_LOOKS)

    def fits(self, sources: Sequence[int]) -> bool:
        """Whether plan and copies stay right if row `i` continues as row `sources[i]`. Changes nothing."""
        return self.plan is None or [self._kinds[source] for source in sources] == self._kinds

    def require_of(self, rows: Sequence[RowLayout]) -> None:
        """Drop the plan if it is not of these rows, as they are now: where nothing is kept, nobody says that they changed."""
        plan, size = self.plan, self._pool.block_size
        if plan is None:
            return
        is_of = plan.pads == tuple(row.pad for row in rows) and all(
            rows[row].block_ids[segment.start // size :][: len(segment.block_ids)] == [*segment.block_ids]
            for segment in plan.segments
            for row in segment.rows
        )
        if not is_of:
            self.drop()

    def must_plan(self, num_rows: int, start: int, stop: int) -> bool:
        """Whether the rows of a forward of the columns `[start, stop)` must be looked at; steps only resume."""
        why_each = self._why_each()
        if num_rows == 1 or why_each:
            if num_rows > 1:
                self.read_once = self.read_once._replace(dense=why_each)
            return self.plan is not None
        plan = self.plan
        is_other = plan is not None and (num_rows != len(plan.pads) or start < max(plan.ends))
        is_later = stop - start > 1 and start > self._planned_at  # of a prompt in chunks, more is known by now
        return start > 0 and (is_other or not self._is_planned or is_later)

    def find(self, rows: Sequence[RowLayout], start: int) -> Plan | None:
        """What these rows share before a column."""
        pool = self._pool
        layers = [layer for layer in (pool.layer(index) for index in pool.layer_indices) if layer]
        num_bytes = [sum(held[:1].nbytes for held in layer.values()) for layer in layers]
        if len(rows) == 1 or self._why_each() or not num_bytes or not sum(num_bytes):
            return None
        one, per_token = next(iter(layers[0].values())), sum(num_bytes) / len(num_bytes) / pool.block_size
        launch_tokens = tokens_of_a_launch(one, per_token, are_padded=any(row.pad for row in rows))
        if not self.weighs_launches:
            launch_tokens = 0.0
        return find_segments(rows, start, pool.block_size, launch_tokens)

    def may_stay(self, plan: Plan | None, start: int) -> bool:
        """Whether what is held serves as well: another plan copies all anew, which pays where it shares twice as much."""
        old = self.plan
        if old is None or plan is None:
            stays = old is plan
        else:
            is_of_them = self._is_planned and old.pads == plan.pads and start >= max(old.ends)
            stays = is_of_them and plan.first_own < 2 * old.first_own
        if stays:
            self._is_planned, self._planned_at = True, start
        return stays

    def follow(self, plan: Plan | None, start: int, transfer: Transfer) -> None:
        """The rows share this before a column; nothing is held."""
        self.plan, self._is_planned, self._planned_at = plan, True, start
        self._kinds = [] if plan is None else plan.kinds()
        self._rows = None if plan is None else PlanOnDevices(plan, transfer)
        self._sources = [] if plan is None else [self._source(segment, transfer) for segment in plan.segments]

    def start_forward(self, start: int, stop: int) -> int:
        """A forward of the columns `[start, stop)` begins. Returns the first column of the tails."""
        if self.plan is None or self._rows is None:
            return 0
        pool = self._pool.all.capacity, self._pool.num_layouts
        if pool != self._found_in:  # one that grows lets go of its old memory
            self._found, self._found_in = {}, pool
        self._forward = SharedForward(self.plan, self._rows, start, stop)
        return self.plan.first_own

    def read(
        self,
        layer_idx: int,
        new: Mapping[str, Tensor],
        tails: Mapping[str, Tensor],
        memory: RecycledMemory | None = None,
    ) -> dict[str, Tensor]:
        """What a layer reads that writes `new`, lazily; dense where a gradient may flow through it.

        Args:
            tails: name -> [R, H, stop - first_own, D], of all rows.
            memory: for copies of segments that only this layer reads; None: they are kept for the next forward.
        """
        forward = self._forward
        assert forward is not None
        segments = self.found(layer_idx, new)
        if segments is None:
            segments = {name: self._held(layer_idx, name, states, memory) for name, states in new.items()}
            if memory is None:
                self._found[layer_idx] = segments
        reads = _LayerReads(self, forward, segments, tails)
        if torch.is_grad_enabled():
            return {name: reads.gather(name) for name in new}
        return {
            name: LazyStates(
                reads,
                name,
                (states.shape[0], states.shape[1], forward.stop, states.shape[3]),
                states.dtype,
                states.device,
            )
            for name, states in tails.items()
        }

    def found(self, layer_idx: int, new: Mapping[str, Tensor]) -> dict[str, list[Tensor]] | None:
        """The segments that the layer read in an earlier forward, name -> [1, H, tokens, D] each; None: the pool must be asked."""
        found = self._found.get(layer_idx)
        if found is None:
            return None
        for name, states in new.items():
            if name not in found or found[name][0].dtype != states.dtype:
                return None
        return found

    def let_go(self) -> None:
        """Hold nothing of the pool: its memory is about to be replaced, or no forward comes for a while."""
        self._found = {}

    def count(self, plan: Plan) -> None:
        """Attention has read the plan's segments once."""
        shared = [segment for segment in plan.segments if len(segment.rows) > 1]
        num_tokens = sum(len(segment.block_ids) for segment in shared) * self._pool.block_size
        num_rows, dense = max(len(segment.rows) for segment in shared), self.read_once.dense
        self.read_once = max(self.read_once, ReadOnce(num_tokens, num_rows, dense))

    def _why_each(self) -> str:
        """Why each row is read by itself, though there are several; "": what they share may be read once."""
        if self.model_looks:
            return MODEL_LOOKS
        own = "" if self.is_sdpa else MODEL_LOOKS
        return self._each_because or own or (GRADIENTS if torch.is_grad_enabled() else "")

    def _source(self, segment: Segment, transfer: Transfer) -> int | ReadSource:
        first, num = segment.block_ids[0], len(segment.block_ids)
        # With more groups a block may give way to an equal one later than before the next forward.
        if len(self._pool.groups) == 1 and segment.block_ids == (*range(first, first + num),):
            return first
        size, layout = self._pool.block_size, RowLayout(b"", 0, array("q"), segment.block_ids)
        return read_source([layout], 0, len(segment.block_ids) * size, size, transfer)

    def _held(self, layer_idx: int, name: str, new: Tensor, memory: RecycledMemory | None) -> list[Tensor]:
        """Of each segment [1, H, tokens, D], in the dtype of `new`: where it lies in the pool, or else a copy."""
        assert self.plan is not None
        copies = self._copies.setdefault((layer_idx, name), {})
        held = []
        for number, (segment, source) in enumerate(zip(self.plan.segments, self._sources, strict=True)):
            states = copy = copies.get(number)
            if states is None or states.dtype != new.dtype:
                if isinstance(source, int):
                    states = self._pool.run_of(layer_idx, name, source, len(segment.block_ids))
                else:
                    states = self._pool.gather(layer_idx, source, [name], memory)[name]
                if not isinstance(source, int) or states.dtype != new.dtype:
                    states = states.to(new.dtype)
                    if memory is None:
                        copies[number] = states
                        self.num_bytes += states.nbytes - (0 if copy is None else copy.nbytes)
            held.append(states)
        return held


class LazySteps:
    """The steps of a layer whose rows share a plan: each is appended to the tails, and read with the segments.

    Args:
        tails: appends to the rows' own columns.

    Attributes:
        writes: (layer index, name) of what it writes.
    """

    __slots__ = ("_layer_idx", "_shared", "_tails", "writes")

    def __init__(self, layer_idx: int, shared: SharedReads, tails: LayerSteps) -> None:
        self._layer_idx, self._shared, self._tails = layer_idx, shared, tails
        self.writes = tails.writes

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """`LayerSteps.append`; returns [R, H, columns, D], lazily. The pool is not asked."""
        new = {"key": key, "value": value}
        tails = None if self._shared.found(self._layer_idx, new) is None else self._tails.append(key, value)
        if tails is None:
            return None
        read = self._shared.read(self._layer_idx, new, {"key": tails[0], "value": tails[1]})
        return read["key"], read["value"]
