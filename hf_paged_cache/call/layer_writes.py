"""What the layers of one scheduled forward write: checked against it, put into the pool, and read back.

Owns the list of what was written. The store's lock is held by whoever calls `write`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..attention.gradients import GradientPath
from ..attention.view import View
from ..errors import ForwardMismatchError, OutOfBlocksError
from ..store.block_store import BlockStore
from .held_steps import HeldSteps
from .scheduled_forward import ScheduledForward


class LayerWrites:
    """What the layers of the running forward have written, and where it goes.

    Attributes:
        written: (layer, name), of the running forward.
        gradients: what a gradient flows through.
    """

    def __init__(self, store: BlockStore, view: View, held: HeldSteps) -> None:
        self._store = store
        self._view = view
        self._held = held
        self.written: set[tuple[int, str]] = set()
        self.gradients = GradientPath()

    def start(self) -> None:
        """A forward is scheduled: forget what the one before wrote."""
        self.written = set()
        self.gradients.start_forward()

    def append(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
        """The fast path of `write`: append one token a row to the view alone. None, with nothing written: `write` is to be asked.

        Shapes: [R, H, 1, D]; returns [R, H, columns, D]. Touches nothing but the view's own memory, so it needs no lock.
        """
        steps = self._view.steps.get(layer_idx)
        if steps is None or self._held.view_from is None:
            return None
        if torch.is_grad_enabled() or not self.written.isdisjoint(steps.writes):
            return None
        try:
            read = steps.append(key, value)
        except torch.OutOfMemoryError:  # `write` gives up memory for it
            return None
        if read is not None:
            self.written.update(steps.writes)
        return read

    def write(self, layer_idx: int, states: Mapping[str, Tensor], forward: ScheduledForward) -> dict[str, Tensor]:
        """`Call.write`; where it raises ForwardMismatchError, the pool is unchanged. It runs for each layer of each token.

        Raises:
            OutOfBlocksError: there is no memory for the layer, nor any that could be given up for it.
        """
        written, num_rows, num_columns = self.written, len(forward.sources), forward.stop - forward.start
        for name, new in states.items():
            shape = new.shape
            if len(shape) == 4 and (shape[0] != num_rows or shape[2] != num_columns):  # others the pool refuses
                raise ForwardMismatchError(
                    f"layer {layer_idx} writes {name} of {shape[0]} rows and {shape[2]} tokens; scheduled are "
                    f"{num_rows} rows and {num_columns} tokens; run one forward at a time through the "
                    "model's __call__, and none that splits its rows"
                )
            if (layer_idx, name) in written:
                raise ForwardMismatchError(
                    f"layer {layer_idx} writes twice in one forward; switch gradient checkpointing off"
                )
        read, view = None, self._view
        try:
            if not forward.is_step or self._held.view_from is None or not view.keeps_columns:
                self._store.pool.write(layer_idx, states, forward.slot_mapping)
            read = view.read(layer_idx, states)
        except torch.OutOfMemoryError:  # while it is handled, it holds what the frames hold that it came through
            pass
        if read is None:
            read = self._write_without_copies(layer_idx, states, forward)
        for name in states:
            written.add((layer_idx, name))
        return self.gradients.join(layer_idx, states, read, forward.start) if torch.is_grad_enabled() else read

    def _write_without_copies(
        self, layer_idx: int, states: Mapping[str, Tensor], forward: ScheduledForward
    ) -> dict[str, Tensor]:
        """Memory has run out: the pool grows no more, and this call's rows are gathered from it.

        Raises:
            OutOfBlocksError: that is not enough.
        """
        store = self._store
        store.stop_growing()
        try:
            if forward.is_step:  # layers above may have written into the view alone
                self._held.flush_scheduled()
                for above, in_view in self._view.columns(forward.start, forward.stop):
                    written = {name: new for name, new in in_view.items() if (above, name) in self.written}
                    store.pool.write(above, written, forward.slot_mapping)
            self._view.do_without_copies()
            store.pool.write(layer_idx, states, forward.slot_mapping)
            return self._view.read(layer_idx, states)
        except torch.OutOfMemoryError as error:
            store.give_back_later()
            raise OutOfBlocksError(
                f"out of memory in layer {layer_idx} of a forward of {len(forward.sources)} rows up to column {forward.stop}, on "
                f"{next(iter(states.values())).device}: the pool has {store.allocator.num_blocks} blocks of "
                f"{store.block_size} tokens and takes {store.pool.pool_bytes} bytes, and there is no copy beside it. Ask for "
                "fewer rows or tokens, build the cache with a smaller num_blocks or max_bytes, or free memory"
            ) from error

    def require_all(self) -> None:
        """Refuse a forward in which a layer that always writes did not.

        Raises:
            ForwardMismatchError: such a layer, or every layer, did not write.
        """
        store = self._store
        missing = store.writing_layers - self.written
        # who carries states alone writes nothing here
        wrote = self.written or (store.states and not store.windows.layers)
        if missing or not wrote:
            layers = f"layers {sorted({layer for layer, _ in missing})}" if missing else "any layer"
            raise ForwardMismatchError(
                f"the forward did not write {layers}: gradient "
                "checkpointing drops the cache; call model.gradient_checkpointing_disable() or model.eval()"
            )
