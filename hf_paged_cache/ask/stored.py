"""Reads what blocks hold of a sequence, layer by layer, so that it can be compared."""

from collections.abc import Sequence

from torch import Tensor

from ..kv.block_pool import Slab
from ..rows import memory
from ..rows.memory import Streams
from ..store.block_store import BlockStore


def read_blocks(store: BlockStore, block_ids: Sequence[int], start: int, stop: int) -> dict[int, dict[str, Tensor]]:
    """Copy what blocks hold of the tokens `[start, stop)` of a sequence.

    Of a layer with a window, only tokens that the next token sees are copied. The store's lock is held, and the window
    blocks of `stop` are there.

    Returns:
        layer -> name -> [1, H, tokens, D].
    """
    found = _read(store.slabs(), block_ids, store.block_size, start, stop)
    slabs = store.window_slabs()
    for group in store.windows.groups:
        first = max(start, group.window.handed_from(stop))
        places = {index: group.places[block_ids[index]] for index in group.seen(stop)}
        at = [places.get(index, 0) for index in range(-(-stop // store.block_size))]
        found |= _read(slabs[group.window], at, store.block_size, min(first, stop), stop)
    return found


def _read(
    slabs: Sequence[Slab], block_ids: Sequence[int], size: int, start: int, stop: int
) -> dict[int, dict[str, Tensor]]:
    made: list[Streams] = memory.make(memory.shapes_of_slabs(slabs), 1, max(0, stop - start))
    if stop > start:
        first, skipped = divmod(start, size)
        of_tokens = block_ids[first : -(-stop // size)]
        memory.load_blocks(made, slabs, 0, 0, of_tokens, stop - first * size, skipped)
    found: dict[int, dict[str, Tensor]] = {}
    for tensor, names in made:
        for (layer_idx, name), part in zip(names, tensor, strict=True):
            found.setdefault(layer_idx, {})[name] = part
    return found
