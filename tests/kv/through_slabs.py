"""What tests write to a pool and read of it: through its slabs, as rows do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_paged_cache.kv.block_pool import BlockPool
from hf_paged_cache.rows import memory
from hf_paged_cache.rows.memory import Columns, Streams


def write(pool: BlockPool, layer_idx: int, new: Mapping[str, Tensor], block_ids: Sequence[int]) -> None:
    """Let blocks of a layer hold the tokens of one row, [1, H, T, D] each. The last block is filled up with zeros.

    Its tensors are made, widened or moved first.
    """
    for name, states in new.items():
        pool.tensor_for(layer_idx, name, states)
    write_to_slabs(pool, {(layer_idx, name): states for name, states in new.items()}, block_ids)


def write_to_slabs(pool: BlockPool, new: Mapping[tuple[int, str], Tensor], block_ids: Sequence[int]) -> None:
    """The same of streams whose tensors are there."""
    num_columns = len(block_ids) * pool.block_size
    row = [
        Streams(torch.nn.functional.pad(states, (0, 0, 0, num_columns - states.shape[2]))[None], (stream,))
        for stream, states in new.items()
    ]
    pool.all.use(1 + max(block_ids))
    memory.write_blocks(Columns(row, 0, 0, num_columns), pool.all.slabs(), block_ids)


def read(
    pool: BlockPool, layer_idx: int, block_ids: Sequence[int], num_tokens: int | None = None, skipped: int = 0
) -> dict[str, Tensor]:
    """Name -> [1, H, tokens, D]: copies of what blocks of a layer hold, but for the first `skipped` tokens."""
    num_tokens = len(block_ids) * pool.block_size if num_tokens is None else num_tokens
    slabs = [slab for slab in pool.all.slabs() if any(stream[0] == layer_idx for stream in slab.streams)]
    made = memory.make(memory.shapes_of_slabs(slabs), 1, num_tokens - skipped)
    memory.load_blocks(made, slabs, [0], 0, block_ids, num_tokens, skipped)
    return {
        name: part
        for tensor, names in made
        for (of_layer, name), part in zip(names, tensor, strict=True)
        if of_layer == layer_idx
    }
