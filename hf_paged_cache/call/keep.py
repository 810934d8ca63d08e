"""Keeps what rows have computed: new full blocks are taken, written, and then published under their hashes.

Keeping never raises into a call for want of blocks or memory: what does not fit is not kept. A block is written once,
before anybody can find it.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..blocks import Allocation, BlockHash, Changing, HashChain, Window, WindowBlocks
from ..blocks.image_tokens import filled_up
from ..errors import OutOfBlocksError
from ..kv.block_pool import Slab
from ..kv.states import copied
from ..rows import memory
from ..rows.layers import Group
from ..rows.request import CallState
from ..rows.rows import Rows
from ..store.block_store import BlockStore
from .find import chain_of


def keep(store: BlockStore, rows: Rows, state: CallState, salt: bytes) -> None:
    """Keep the full blocks of rows, unless all was to be forgotten since their call began.

    Behind the prompt, nothing after the end of a sequence is kept.
    """
    if not rows.is_source:
        return
    stop, size, chains, todo = rows.num_true_columns, store.block_size, state.chains, list[int]()
    taken = rows.states.taken if rows.states is not None else [{}] * len(rows.prompts)
    for number, prompt in enumerate(rows.prompts):
        num_full = max(0, stop - prompt.pad) // size * size
        if num_full > prompt.kept or (num_full and taken[number]) or prompt.image_end is not None:
            todo.append(number)
    try:
        layout = lay_out(store, rows) if todo else None
    except torch.OutOfMemoryError:
        return
    if layout is None:
        return
    token_ids, ends = rows.ids.rows(rows.prompts, stop), state.limits.end_of_sequence
    for number in todo:
        prompt, tokens = rows.prompts[number], token_ids[number]
        if ends and state.limits.num_prompt_columns:
            first = max(0, state.limits.num_prompt_columns - prompt.pad)
            tokens = tokens[: 1 + next((at for at in range(first, len(tokens)) if tokens[at] in ends), len(tokens))]
        if prompt.most_kept is not None:
            tokens = tokens[: prompt.most_kept]
        num_blocks = len(tokens) // size
        if num_blocks * size > prompt.kept or (num_blocks and taken[number]):
            chains[prompt.root] = chain_of(prompt.root, size, tokens, chains)
            _keep_row(store, rows, number, chains[prompt.root], num_blocks, state, salt, layout)
            prompt.kept = max(prompt.kept, num_blocks * size)
        if prompt.image_end is not None and len(tokens) >= prompt.image_end:
            ended, prompt.image_end = filled_up(tokens, prompt.image_end, size), None
            filled = chain_of(prompt.root, size, ended, chains)
            _keep_row(store, rows, number, filled, len(ended) // size, state, salt, layout)


def _keep_row(
    store: BlockStore,
    rows: Rows,
    number: int,
    chain: HashChain,
    num_blocks: int,
    state: CallState,
    salt: bytes,
    layout: int,
) -> None:
    hashes, size, pad = chain.hashes_of(0, num_blocks), store.block_size, rows.prompts[number].pad
    held: Allocation | None = None
    try:
        with store.lock:
            if store.pool.num_layouts != layout or store.resets_of(salt) != state.resets:
                return
            held = store.leases.take(hashes, salt)
            first = held.num_prefix_blocks
            if first == num_blocks and not rows.is_exact:
                return
            fresh = _take(store, held, hashes[first:]) if first < num_blocks else []
            store.pool.join_streams()
            slabs = store.pool.all.slabs
        start = pad + (len(held.block_ids) - len(fresh)) * size
        _write(rows, number, start, fresh, slabs, size)
        with store.lock:
            if store.pool.all.slabs is not slabs:  # the slabs have grown meanwhile, and moved
                store.pool.join_streams()
                _write(rows, number, start, fresh, store.pool.all.slabs, size)
            store.allocator.mark_computed(fresh)
            if rows.states is not None:
                taken, num_tokens = rows.states.taken[number], len(held.block_ids) * size
                for place in sorted(each for each in taken if each <= num_tokens):
                    states, block_id = taken.pop(place), held.block_ids[place // size - 1]
                    if not store.snapshots.has(block_id):
                        store.snapshots.keep(block_id, copied(states))
            if rows.windows:
                _keep_windows(store, rows.windows, pad, rows.n, number, held)
    except (OutOfBlocksError, torch.OutOfMemoryError):
        pass
    finally:
        if held is not None:
            with store.lock:
                store.leases.give_back(held)


def _write(rows: Rows, number: int, start: int, block_ids: Sequence[int], slabs: Sequence[Slab], size: int) -> None:
    """Write the columns of a row from `start` on into blocks."""
    if block_ids:
        memory.write_blocks(rows.columns(number, start, start + len(block_ids) * size), slabs, block_ids)


def _keep_windows(
    store: BlockStore, windows: Mapping[Window, Group], pad: int, n: int, number: int, held: Allocation
) -> None:
    """Keep what layers with a window see at the end of the blocks held, and as far as there is room what is before.

    Without room for the end, OutOfBlocksError is raised. The store's lock is held: nobody finds what is not written.
    """
    size, num_tokens = store.block_size, len(held.block_ids) * store.block_size
    groups, block_ids = store.windows, held.block_ids
    wanted: list[tuple[WindowBlocks, list[int], list[int]]] = []  # (group, required logical indices, optional ones)
    for group in groups:
        base = windows[group.window].base
        seen = group.seen(num_tokens)
        first = max(0, -(-(base - pad) // size))  # first block that the rows have whole
        missing = [index for index in seen if not group.has(block_ids[index])]
        if not windows[group.window].memory or (missing and missing[0] < first):
            return
        before = [index for index in range(first, seen.start) if not group.has(block_ids[index])]
        wanted.append((group, missing, before[::-1]))
    store.budget.make_room(max(len(missing) for _, missing, _ in wanted))
    for group, _, _ in wanted:
        group.require(group.num_to_take(block_ids[index] for index in group.seen(num_tokens)))
    with Changing(groups):
        store.leases.resume(held, num_tokens)
        taken = []
        for group, missing, before in wanted:
            passed = before[: max(0, group.num_free - len(missing))]
            taken.append((group, missing, passed, group.take_places(len(missing) + len(passed))))
        store.contents.offload()
        for group, missing, passed, places in taken:
            tensors = store.pool.groups[group.name]
            tensors.use(1 + max(places, default=0))
            slabs = tensors.slabs
            memory_of_rows, base = windows[group.window].memory, windows[group.window].base
            for index, place in zip((*missing, *passed), places, strict=True):
                start, stop = pad + index * size - base, n - base
                columns = memory.Columns(memory_of_rows, number, start, start + size)
                if start + size > stop:  # a block that is filled up with anything
                    made = memory.make(memory.shapes_of_rows(memory_of_rows), 1, size)
                    memory.copy_columns(columns._replace(stop=stop), made, 0, 0)
                    columns = memory.Columns(made, 0, 0, size)
                memory.write_blocks(columns, slabs, [place])
            group.places.update(zip((block_ids[index] for index in (*missing, *passed)), places, strict=True))
            group.release([block_ids[index] for index in passed], num_own=1, is_end=False)


def _take(store: BlockStore, held: Allocation, hashes: Sequence[BlockHash]) -> list[int]:
    """Take blocks for as many of these hashes as fit, behind the blocks that are held, and return them.

    They end before a hash that is known: another call is writing its block, or has written it.
    """
    allocator, before = store.allocator, len(held.block_ids)
    known = (at for at, each in enumerate(hashes) if allocator.hash_of_digest(each.digest) is not None)
    num = next(known, len(hashes))
    store.budget.make_room(num)
    num = int(min(num, store.budget.num_obtainable_blocks(), allocator.num_available_blocks))
    if num <= 0:
        return []
    allocator.allocate_immutable(held, hashes[:num])
    fresh = held.block_ids[before:]
    store.pool.all.use(1 + max(fresh))
    store.contents.offload()
    for group in store.windows:  # window blocks of what these blocks held before are given up
        group.drop(fresh)
    return fresh


def lay_out(store: BlockStore, rows: Rows) -> int | None:
    """Let the pool have tensors for all streams of the rows; return the number of its layout, or None without room."""
    pool = store.pool
    with store.lock:
        if store.budget.is_settled and _lies_alike(store, rows):
            return pool.num_layouts
        streams = {
            (layer.layer_idx, name): states
            for layer in rows.layers
            if layer.held is not None
            for name, states in layer.named()
        }
        if streams.keys() - pool.named().keys():
            store.budget.make_room(1)  # tensors are made as large as the pool is
            if not pool.all.capacity:
                return None  # there was no memory for a block
            pool.lay_out_together(streams)
    if not store.budget.is_settled:
        store.budget.settle()
    with store.lock:
        held = pool.named()
        can_hold = all(_can_hold(held.get(stream), states) for stream, states in streams.items())
        if can_hold and store.budget.fits():
            return pool.num_layouts
        is_empty = store.begin_anew()
    return lay_out(store, rows) if is_empty else None


def _lies_alike(store: BlockStore, rows: Rows) -> bool:
    """Return whether streams that lie together in the rows do so in the pool, in the same dtype and on one device."""
    slabs, is_held = {}, False
    for tensors in store.pool.groups.values():
        for held, names in tensors.slabs:
            slabs[names] = held.dtype, held.device
    for group in (rows.all, *rows.windows.values()):
        for held, names in group.memory:
            if slabs.get(names) != (held.dtype, held.device):
                return False
            is_held = True
    return is_held


def _can_hold(held: Tensor | None, states: Tensor) -> bool:
    """Return whether a tensor of the pool can hold such numbers: there, of this shape, in this dtype or a wider one."""
    if held is None or held.device != states.device or held.shape[1::2] != states.shape[1::2]:
        return False
    return torch.promote_types(held.dtype, states.dtype) == held.dtype
