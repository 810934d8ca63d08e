"""Owns what attention reads of the running rows: which rows run, which of their columns are kept, and what they share.

Layers with the same window are a group; those without one are a group, too (see `group_columns`). A view keeps a copy of the
columns that a group sees, and adds each forward's. Or it keeps none, and gathers each layer's columns from the pool: with
`attention="gather"`, where memory ran out, in a forward behind which rows are multiplied, and for beams with long tails. Either
way layers without a window have once what rows share (see `shared_reads`), and of each row what follows.

Copies may be dropped between any two forwards, and are made again; but for the columns of held steps, see
`call/held_steps.py`, which must have been written to the pool first.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..blocks.sight import Sight
from ..kv.block_pool import BlockPool, reorder_rows
from ..kv.recycled_memory import RecycledMemory
from ..kv.slot_mapping import RowLayout
from .buffers import LayerSteps
from .causal import CausalSquare
from .group_columns import Forward, GroupColumns
from .shared_reads import LazySteps, ReadOnce, SharedReads

# Tokens of tails, to one that their rows share, of which a view keeps copies where rows change places: 128 beams behind 528 tokens
# were 3 per cent quicker with their tails of 5 tokens kept.
_MOST_TAILS = 1.25


class View:
    """What attention reads of the rows that run.

    Columns that the next rows have in common with these are kept.

    Args:
        pool: what is gathered from.
        sight_of: layer index -> its window, for the layers that have one.
        keeps_copies: whether copies are kept beside the pool.

    Attributes:
        sight_of: as it is now; whoever asks how far a layer sees, asks here.
        attention: of transformers, that the rows run with.
        most_copies: 1 if a copy of the rows' columns may be kept, else 0; the store's budget counts it.
        keeps_columns: the running forward's columns are kept here, so the pool may get a step's later.
        steps: layer index -> what a step may be appended with, in place of `read`.
    """

    def __init__(self, pool: BlockPool, sight_of: Mapping[int, Sight], *, keeps_copies: bool = True) -> None:
        self.most_copies = int(keeps_copies)
        self.keeps_columns = keeps_copies
        self.attention: str | None = "sdpa"
        # columns are kept of forwards that stop after this one; infinite: of none
        self._kept_after = 0.0 if keeps_copies else math.inf
        self._change_places = False  # rows do, at each step
        self._pool = pool
        self._memory = RecycledMemory()  # for what is gathered
        self.steps: dict[int, LayerSteps | LazySteps] = {}
        self._shared = SharedReads(pool)
        self._square: CausalSquare | None = None  # the forward, if it is attended as one
        self._kept: list[RowLayout] = []  # row -> what the buffers hold of it, as of the last `keep`
        self._held_until: list[int] = []  # row -> end of the columns that the buffers hold of it
        self._max_rows, self._max_columns = 0, math.inf
        self._forward = Forward(list, 0, 0, 0)  # the running one, or the last
        self._may_change = bool(sight_of)
        self._group(sight_of)

    def _group(self, sight_of: Mapping[int, Sight]) -> None:
        # layers without a window, also those that no config names
        everything = GroupColumns(self._pool, None, self._memory)
        of_sight = {sight: GroupColumns(self._pool, sight, self._memory) for sight in dict.fromkeys(sight_of.values())}
        groups = [everything, *of_sight.values()]
        group_of = {index: of_sight[sight] for index, sight in sight_of.items()}
        # at once: interrupted above, the rows of before may resume
        self._all, self._groups, self._group_of, self.sight_of = everything, groups, group_of, sight_of

    def follow(self, sight_of: Mapping[int, Sight], attention: str | None) -> None:
        """Rows begin, with these windows, and this attention of transformers: all but "sdpa" are given dense tensors.

        A view whose layers had no window when it was made keeps reading all columns; the mask hides what a window does not show.
        """
        self.attention, self._shared.is_sdpa = attention, attention == "sdpa"
        if self._may_change and sight_of != self.sight_of:
            self.drop()
            self._group(sight_of)

    def first_column(self, layer_idx: int, start: int) -> int:
        """The first column that the layer reads in a forward from column `start` on.

        Examples:
            >>> from ..blocks import Window
            >>> view = View(BlockPool(4), {1: Window(8)})
            >>> view.first_column(0, 20), view.first_column(1, 20)
            (0, 13)
        """
        sight = self.sight_of.get(layer_idx)
        return 0 if sight is None else sight.handed_from(start)

    @property
    def num_bytes(self) -> int:
        """Bytes held besides the pool."""
        return sum(group.num_bytes for group in self._groups) + self._memory.num_bytes + self._shared.num_bytes

    @property
    def backend(self) -> str:
        """What computes attention over what rows share."""
        return self._shared.backend

    @property
    def read_once(self) -> ReadOnce:
        """Of the running call, or of the last one."""
        return self._shared.read_once

    def start_call(self) -> None:
        """Another call is counted from here on."""
        self._shared.read_once = ReadOnce()

    def read_once_whatever_it_costs(self) -> None:
        """Share reads, and attend causal squares, also where that does not pay: for trials of models."""
        self._shared.weighs_launches = False

    # A forward.

    def start_rows(
        self,
        rows: Sequence[RowLayout],
        num_columns: int,
        *,
        max_rows: int,
        max_columns: float,
        in_chunks: bool = False,
    ) -> None:
        """Other rows run from here on.

        Args:
            num_columns: where their first forward stops.
            max_rows, max_columns: the most there will be, as far as the call says; else infinite.
            in_chunks: their prompt is computed in chunks, for the same bits. So whatever they share, each is read by itself:
                parts that are merged round otherwise.
        """
        self._max_rows, self._max_columns = max(max_rows, len(rows)), max_columns
        self.keeps_columns, self._change_places = self.most_copies > 0, False
        self._shared.start_rows(in_chunks=in_chunks)
        are_multiplied = len(rows) < max_rows < math.inf and not in_chunks and self._shared.may_be_lazy
        self._kept_after = (num_columns if are_multiplied else 0) if self.keeps_columns else math.inf
        most = num_columns if math.isinf(max_columns) else max(num_columns, max_columns)
        for group in self._groups:
            if group.are_oversized(self._max_rows, most):
                self.drop()
        kept = [was.num_columns_in_common(row) for was, row in zip(self._kept, rows, strict=False)]
        self._held_until, self._kept = kept + [0] * (len(rows) - len(kept)), []

    def start_forward(self, forward: Forward) -> None:
        """A forward begins."""
        num_rows, start, stop = forward.num_rows, forward.start, forward.stop
        shared = self._shared
        if num_rows > 1 or shared.plan is not None:
            if not self.keeps_columns:
                shared.require_of(forward.layouts())
            if shared.must_plan(num_rows, start, stop):
                self._follow(forward)
            forward.first_own = shared.start_forward(start, stop)
        end_of_kept = self._end_of_kept(num_rows) if self._change_places else math.inf
        keeps_columns = self._kept_after < stop <= end_of_kept
        if self.keeps_columns != keeps_columns:
            forward.layouts()  # the pool has all of them from here on
            self._leave_buffers()
            self.keeps_columns = keeps_columns
        self._square = None
        if start and stop - start > 1 and shared.plan is None and shared.may_be_lazy:
            if CausalSquare.pays(start, stop) or not shared.weighs_launches:
                self._square = CausalSquare(start, stop, shared.look)
        held_until = self._held_until
        held_until += [0] * (num_rows - len(held_until))  # rows taken over from another cache, or multiplied
        self._forward = forward
        forward.keeps_columns = keeps_columns
        forward.is_all = not start and stop >= self._max_columns
        forward.most_columns = min(self._max_columns if stop <= self._max_columns else math.inf, end_of_kept)
        if shared.model_looks:  # else rows that are multiplied are made anew
            forward.most_rows = self._max_rows
        for group in self._groups:
            group.start_forward(forward, held_until)
        if keeps_columns:
            held_until[:num_rows] = [0 if forward.is_all else stop] * num_rows

    def _end_of_kept(self, num_rows: int) -> float:
        """The last column up to which tails of rows that change places are kept: all together have at most `_MOST_TAILS` times the
        tokens that the rows share.
        """
        plan = self._shared.plan
        return math.inf if plan is None else plan.first_own + (_MOST_TAILS * plan.first_own) // num_rows

    def change_places(self) -> None:
        """Rows fork and change places at each step. Long tails are then read from the pool: a copy would be reordered at each step."""
        self._change_places = True

    def _follow(self, forward: Forward) -> None:
        """Let the forward's rows read once what they share."""
        plan = self._shared.find(forward.layouts(), forward.start)
        if not self._shared.may_stay(plan, forward.start):
            self.drop()
            self._shared.follow(plan, forward.start, forward.transfer)

    def read(self, layer_idx: int, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What attention reads of a layer that writes `new`; where columns are kept, `new` is appended to them.

        Shapes: R rows, H heads, T columns of the forward, D head size.

        Args:
            new: name -> [R, H, T, D]. Where columns are not kept, it is in the pool already.

        Returns:
            name -> [R, H, stop - first, D]: the columns `[first, start)` of the rows, then `new`. The first one is 0, or that
            of the layer's window. Valid until the next forward, and read only: it may be the view's own memory. Without a
            graph: `GradientPath.join` puts `new` itself there.

        Raises:
            PoolArgumentError: the layer was made with other heads or head size.
            torch.OutOfMemoryError: `do_without_copies` may help.
        """
        group, shared = self._group_of.get(layer_idx, self._all), self._shared
        self.steps.pop(layer_idx, None)
        read = group.read(layer_idx, new)
        if self._square is not None:
            return self._square.read(read) if group is self._all else read
        steps = group.steps(layer_idx, new)
        if group is not self._all or shared.plan is None:
            if steps is not None:
                self.steps[layer_idx] = steps
            return read
        if steps is not None:
            self.steps[layer_idx] = LazySteps(layer_idx, shared, steps)
        return shared.read(layer_idx, new, read, None if self._kept_after < math.inf else self._memory)

    def do_without_copies(self) -> None:
        """Memory has run out: forget all copies, also in the middle of a forward, and keep none until other rows start."""
        again = self._forward.again()
        self._go_without()
        self.start_forward(again)

    def _go_without(self) -> None:
        self.drop()
        self.keeps_columns, self._kept_after = False, math.inf

    # Between two forwards.

    def columns(self, start: int, stop: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Of each layer name -> [R, H, stop - start, D], columns as they were written here, where they are kept."""
        for group in self._groups:
            yield from group.columns(self._forward.num_rows, start, stop)

    def would_keep(self, sources: Sequence[int]) -> bool:
        """Whether all that is held of the rows goes with them, if these are selected."""
        return self.keeps_columns and len(sources) == len(self._held_until) and self._shared.fits(sources)

    def select(self, sources: Sequence[int], shared_columns: int = 0, index: Tensor | None = None) -> None:
        """See `Follower`. Where there are fewer rows than before, or some change places and others are new, copies are dropped."""
        stop, num_rows = max(self._held_until, default=0), len(sources)
        is_growing = num_rows > len(self._held_until) and all(source <= row for row, source in enumerate(sources))
        if not stop:
            self._held_until = []
            return
        try:
            if is_growing and self._shared.model_looks:
                self.steps.clear()
                for group in self._groups:
                    group.grow(sources, stop)
                self._held_until = [self._held_until[source] for source in sources]
            elif num_rows != len(self._held_until) or not self._shared.fits(sources):
                self.drop()  # of more rows, too: they share more, so what they read is made anew
            elif list(sources) != list(range(num_rows)) and shared_columns < stop:
                held = (states for group in self._groups for states in group.from_column(shared_columns, stop))
                if not reorder_rows(held, sources, index):
                    self._kept_after = math.inf  # from the next forward on, which first writes them to the pool
        except torch.OutOfMemoryError:
            self._go_without()

    def crop(self, start: int, stop: int) -> None:
        """See `Follower`."""
        self._held_until = [min(held, start) for held in self._held_until]

    def keep(self, rows: Sequence[RowLayout]) -> None:
        """The rows end. Rows that start with the same tokens may use the columns of those named here, as far as they are held."""
        if self.keeps_columns and self._shared.plan is None:
            self._kept = [row.cut(held) for row, held in zip(rows, self._held_until, strict=False)]
        else:
            self.drop()

    def let_go(self) -> None:
        """The pool's memory is about to be replaced: hold none of it, or it would be there twice."""
        self._shared.let_go()

    def pause(self) -> None:
        """A call has ended; its rows may resume. Gives back memory that only a running forward needs."""
        self._square, self._forward = None, self._forward.again()
        self._shared.let_go()
        self._memory.drop()
        for group in self._groups:
            group.pause()

    def drop(self) -> None:
        """Forget all copies."""
        self._leave_buffers()
        self._shared.drop()

    def _leave_buffers(self) -> None:
        """Forget all copies but those of what rows share."""
        self.steps.clear()
        for group in self._groups:
            group.drop()
        self._kept, self._held_until, self._forward = [], [], Forward(list, 0, 0, 0)
        self._memory.drop()
