"""Moves the rows of a call: they change places, repeat, give their last columns back, and go on apart.

Whatever moves, all streams move alike: columns, states, token ids, and what the rows began with. `rows` are `Rows`.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import CacheArgumentError
from . import memory
from .layers import SPARE, RowsLayer
from .shared import SharedColumns

_COPIED = (
    *("n", "filled", "seen_same", "keep_end", "is_open", "in_generate", "is_broken", "why_bypassed", "num_forwards"),
    *("records_drafts", "may_be_lazy", "chunks", "shared"),
)


def apply(rows: Any, index: Sequence[int] | Tensor, start: int = 0, shared: SharedColumns | None = None) -> None:
    """Let row `i` continue as row `index[i]`, in all streams.

    Args:
        start: number of leading columns that rows which change places have in common.
        shared: segments that the rows have in common from here on; None: they have none.
    """
    rows.roll_back()
    rows.heed()
    at = index if isinstance(index, Tensor) else torch.tensor(index, dtype=torch.int64, device="cpu")
    if not rows.in_generate and not (at.numel() and 0 <= int(at.min()) <= int(at.max()) < rows.batch()):
        raise CacheArgumentError(f"rows {at.tolist()} were asked for; there are {rows.batch()} rows, counted from 0")
    if rows.why_bypassed is not None:
        for layer in rows.layers:
            layer.reorder_cache(at)
        return
    is_whole, is_broken, groups = rows.is_whole and not rows.is_edited, rows.is_broken, rows.groups
    rows.is_whole, rows.is_broken = False, True  # interrupted: some streams have changed
    if shared is not None:
        num = rows.n - shared.plan.first_own
        tails = memory.selected(rows.all.memory, at, num, num + max(SPARE, rows.wanted - rows.n))
        rows.share(shared, tails, rows.n)
        groups = rows.windows.values()
    elif not start and rows.shared is not None:
        rows.make_dense(at.tolist())
        groups = rows.windows.values()
    for group in groups:
        group.select(at, rows.n, start)
    if rows.states is not None:
        rows.states.select(at)
    rows.ids.select(at)
    if rows.state.adapters is not None:
        rows.state.adapters = [rows.state.adapters[number] for number in at.tolist()]
    if at.shape[0] != rows.num_rows:
        rows.common_columns = 0
    if not start:
        rows.prompts = [copy.copy(rows.prompts[number]) for number in at.tolist()]
    rows.note_writes()
    rows.is_whole, rows.is_broken = is_whole, is_broken


def crop(rows: Any, tokens_to_remove: int) -> None:
    """Take back the last `-tokens_to_remove` tokens; 0 changes nothing.

    Raises:
        CacheArgumentError: the number is positive or too large, or the tokens that are left need what layers have
            given up.
    """
    if tokens_to_remove > 0:
        raise CacheArgumentError(
            f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}"
        )
    rows.roll_back()
    rows.heed()
    if rows.is_edited:
        rows.is_whole = False
    num, length = -int(tokens_to_remove), rows.get_seq_length()
    n = max(0, rows.n - num)
    if num > length:
        raise CacheArgumentError(f"cannot take back {num} tokens; there are {length}")
    if not n and not rows.in_generate and rows.why_bypassed is None:
        rows.reset()  # after that, other rows may begin
        return
    states_allow = rows.states is None or (not rows.is_broken and (not n or rows.states.can_crop(num)))
    if num and not (states_allow and rows.windows_go_on_at(rows.n - num)):
        raise CacheArgumentError(
            f"cannot take back {num} tokens: layers with a window or a state have given up what the token after "
            "those that are left needs; reset() the rows, or pass the whole prompt to generate again"
        )
    if rows.shared is not None and n < max(rows.shared.plan.ends):
        rows.make_dense()
    if rows.states is not None:
        rows.states.crop(num, n, [prompt.pad for prompt in rows.prompts])
    for layer in rows.layers:
        if rows.why_bypassed is not None or isinstance(layer, RowsLayer):
            layer.crop(-num)
    rows.ids.crop(n, rows.prompts)
    rows.n = n
    rows.seen_same, rows.common_columns = min(rows.seen_same, n), min(rows.common_columns, n)
    for prompt in rows.prompts:
        prompt.kept = min(prompt.kept, max(0, n - prompt.pad))


def forked(rows: Any, index: Tensor, shared: SharedColumns | None = None) -> Any:
    """Make other rows that go on by themselves, with segments in common: row `i` begins where row `index[i]` stands."""
    rows.roll_back()
    copied = type(rows)(rows.calls, rows.kinds, rows.looks, rows.state.copy())
    for name in _COPIED:
        setattr(copied, name, getattr(rows, name))
    copied.is_whole = rows.is_whole and not rows.is_edited
    copied.prompts, copied.ids = rows.prompts, rows.ids.copy()
    if rows.why_bypassed is not None:
        copied.run_on(copy.deepcopy(rows.layers))
    for group, of_group in zip(copied.groups, rows.groups, strict=True):
        group.take(of_group.memory, rows.n, of_group.base)
    for layer, of_layer in zip(copied.layers, rows.layers, strict=True) if rows.why_bypassed is None else ():
        layer.n = of_layer.n  # a forward may have skipped it
    if rows.states is not None and copied.states is not None:
        rows.states.copy_to(copied.states)
    copied.note_writes()
    if index.numel():
        apply(copied, index, shared=shared)
    return copied
