"""A look at cached blocks themselves: recompute one and compare, for changes of a model that its digest cannot show.

Owns the turn: each call looks at another block of its hit. A weight that every token passes through is noticed at
once, one row of an embedding when a block that holds its token has its turn.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..blocks import BlockTable
from ..call.rows import Row, Rows
from ..call.scheduled_forward import RowInput
from ..errors import OutOfBlocksError
from ..kv.slot_mapping import RowLayout, read_source
from ..model.distributed import ranks_must_match
from ..model.probing import eps_computed_in, input_device
from ..prefix_store import PrefixStore

# Differences that other lengths and batch sizes make, as a share of the largest value; eps is that of the coarsest type
# computed in. In fp32 an unchanged model gives 1e-6, one optimizer step at learning rate 1e-6 gives 4e-4.
_MIN_TOLERANCE = 1e-5
_TOLERANCE_IN_EPS = 8


class Verifier:
    """Recomputes one cached block of a call's hit, in turn.

    Args:
        make_cache: a further cache on the same store, for the forward that recomputes.
    """

    def __init__(self, make_cache: Callable[[], Any]) -> None:
        self._make_cache = make_cache
        self._turn = 0

    def verify(self, store: PrefixStore, rows: Sequence[RowInput]) -> bool:
        """Whether the block whose turn it is holds what the model computes now; True when there is none to look at.

        Nor is one looked at where several processes share the model's weights: they must run as many forwards as each
        other, whatever each has cached.
        Cost: a forward of one block's tokens, during which other calls on the store wait.
        """
        if ranks_must_match(store.model):
            return True
        with store.blocks.lock:
            return self._verify(store, rows)

    def _verify(self, store: PrefixStore, rows: Sequence[RowInput]) -> bool:
        if store.conditioning.rope.depends_on_length:
            return True  # a shorter forward has other frequencies
        for row in rows:
            if row.pad and not store.takes_positions:
                continue  # a forward without the padding numbers its tokens otherwise
            with BlockTable(store.blocks.allocator, row.root) as known:
                num_hit = known.hold_prefix(row.token_ids) // store.blocks.block_size
                if num_hit:
                    index = self._turn % num_hit
                    self._turn += 1
                    try:
                        return self._is_equal(store, row, known, index)
                    except OutOfBlocksError:
                        return True  # no block is free to compute into
        return True

    def _is_equal(self, store: PrefixStore, given: RowInput, known: BlockTable, index: int) -> bool:
        """Whether block `index` of a row is computed as it is stored."""
        blocks, model, device = store.blocks, store.model, input_device(store.model)
        start, stop = index * blocks.block_size, (index + 1) * blocks.block_size
        before = known.fork()
        before.truncate(start)
        row = Row(before, 0, given.root, given.first_position)
        row.num_confirmed = start
        row.stop_commits(start)  # and, with that, no hit: what is stored must not be found
        cache = self._make_cache()
        cache.call.take_over(Rows([row], [0], start))
        arguments: dict[str, Any] = {"input_ids": torch.tensor([given.token_ids[start:stop]], device=device)}
        if store.takes_positions:
            positions = torch.arange(start, stop, device=device) + given.first_position
            arguments["position_ids"] = positions[None]
        with torch.no_grad():
            model(**arguments, past_key_values=cache, use_cache=True)
        stored = RowLayout(given.root, 0, known.token_ids, known.block_ids)
        computed = cache.call.rows.distinct[0].layout()
        sources = [read_source([layout], start, stop, blocks.block_size) for layout in (stored, computed)]
        eps = eps_computed_in(model)
        try:
            return all(
                _agree(eps, *(blocks.pool.gather(layer, source) for source in sources))
                for layer in blocks.pool.layer_indices
            )
        finally:
            cache.reset()


def _agree(eps: float, stored: dict[str, torch.Tensor], computed: dict[str, torch.Tensor]) -> bool:
    """Whether K/V of a layer are equal but for rounding; some may be held in a finer type than they were computed in."""
    eps = max(eps, *(torch.finfo(new.dtype).eps for new in computed.values()))
    tolerance = max(_MIN_TOLERANCE, _TOLERANCE_IN_EPS * eps)
    for name, old in stored.items():
        new = computed[name]
        scale = float(new.abs().max())
        if not float((new - old).abs().max()) <= tolerance * scale:  # a NaN disagrees, too
            return False
    return True
