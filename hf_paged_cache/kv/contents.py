"""Copies what blocks hold, as rows of bytes with all layers of a block, out of a pool's tensors and back into them.

Where a model lies on several devices, a block has a row in each *part*.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .block_pool import BlockPool
from .states import StateKey, States
from .tensors import UNPINNED
from .tensors import to_device as numbers_on

STATES = "states"
Kind = str | int
"""Kind of content: BLOCKS of layers that see all tokens, a window of those that see it, STATES at a block's end."""

_ALIGNMENT = 16  # bytes; a view of any dtype must begin at a multiple of its size


class Piece(NamedTuple):
    """`Piece` says where the bytes of one tensor lie in a row."""

    key: Any  # layer index and name of a tensor in the pool, or the `StateKey` of a state
    offset: int
    num_bytes: int
    shape: tuple[int, ...]  # shape of one block, or of one row's state
    dtype: torch.dtype


class Part(NamedTuple):
    """`Part` lists the tensors of one kind on one device, of which the part's rows are made."""

    kind: Kind
    device: torch.device
    num_bytes: int  # bytes of a row
    pieces: tuple[Piece, ...]


def parts_of_pool(pool: BlockPool) -> dict[Kind, list[Part]]:
    """Return kind -> parts of a pool's blocks and window blocks, as far as layers were written."""
    return {kind: parts_of(kind, group.named()) for kind, group in pool.groups.items() if group.slabs}


def parts_of(kind: Kind, tensors: Mapping[Any, Tensor]) -> list[Part]:
    """Return the parts of tensors of which each first index is a block, or a row."""
    return laid_out(kind, ((key, held.device, tuple(held.shape[1:]), held.dtype) for key, held in tensors.items()))


def laid_out(kind: Kind, shapes: Iterable[tuple[Any, torch.device, tuple[int, ...], torch.dtype]]) -> list[Part]:
    """Return the parts of tensors, one for each device, from key, device, shape of a row and dtype of each tensor."""
    pieces: dict[torch.device, list[Piece]] = {}
    ends: dict[torch.device, int] = {}
    for key, device, shape, dtype in shapes:
        offset, num_bytes = ends.get(device, 0), torch.Size(shape).numel() * dtype.itemsize
        pieces.setdefault(device, []).append(Piece(key, offset, num_bytes, shape, dtype))
        ends[device] = -(-(offset + num_bytes) // _ALIGNMENT) * _ALIGNMENT
    return [Part(kind, device, ends[device], tuple(made)) for device, made in pieces.items()]


def lay_out_pool(pool: BlockPool, parts: Iterable[Part]) -> None:
    """Make those tensors that the parts are of and the pool lacks, where its first keys and values will be."""
    streams = {}
    for piece in (piece for part in parts for piece in part.pieces):
        heads, _, head_dim = piece.shape
        streams[piece.key] = torch.empty((0, heads, 0, head_dim), dtype=piece.dtype, device=pool.first_device())
    pool.lay_out_together(streams)


def new_rows(part: Part, num_rows: int, *, on_host: bool = False) -> Tensor:
    """Return rows of any values, on the part's device or where it copies to and from a host without a wait."""
    device, is_pinned = "cpu" if on_host else part.device, on_host and part.device.type not in UNPINNED
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty((num_rows, part.num_bytes), dtype=torch.uint8, device=device, pin_memory=is_pinned)


def rows_of_blocks(pool: BlockPool, part: Part, ids: Sequence[int]) -> Tensor:
    """Return what these blocks, or window blocks, hold: [N, part.num_bytes] uint8 on the part's device."""
    held, rows = pool.groups[part.kind].named(), new_rows(part, len(ids))
    index = numbers_on(ids, part.device)
    for piece in part.pieces:
        _field(rows, piece).copy_(held[piece.key].index_select(0, index).flatten(1))
    return rows


def write_blocks(pool: BlockPool, part: Part, ids: Sequence[int], rows: Tensor) -> None:
    """Write `rows`, [N, part.num_bytes] on the part's device, into these blocks or window blocks. No id comes twice."""
    held = pool.groups[part.kind].named()
    pool.groups[part.kind].use(1 + max(ids, default=-1))
    index = numbers_on(ids, part.device)
    for piece in part.pieces:
        held[piece.key].index_copy_(0, index, _field(rows, piece).view(-1, *piece.shape))


def rows_of_states(part: Part, states: Sequence[States]) -> Tensor:
    """Return the states of single rows as rows of bytes, on the part's device."""
    rows = new_rows(part, len(states))
    for number, held in enumerate(states):
        for piece in part.pieces:
            _field(rows[number : number + 1], piece).copy_(held[piece.key].flatten(1))
    return rows


def states_of_row(parts: Iterable[tuple[Part, Tensor]]) -> dict[StateKey, Tensor]:
    """Return the states that rows of bytes hold, one row of each part, in memory of their own on the part's device."""
    states = {}
    for part, row in parts:
        on_device = row.to(part.device, non_blocking=True)[None]
        for piece in part.pieces:
            states[piece.key] = _field(on_device, piece).view(1, *piece.shape).clone()
    return states


def to_device(part: Part, fragments: Sequence[Tensor]) -> Tensor:
    """Copy rows of the host, in some number of tensors, to the part's device: one transfer for each tensor."""
    if part.device.type == "cpu":
        return fragments[0] if len(fragments) == 1 else torch.cat([*fragments])
    rows, start = new_rows(part, sum(map(len, fragments))), 0
    for fragment in fragments:
        rows[start : start + len(fragment)].copy_(fragment, non_blocking=True)
        start += len(fragment)
    return rows


def _field(rows: Tensor, piece: Piece) -> Tensor:
    """Return one tensor's part of each row, in the tensor's dtype: [N, numbers]."""
    return rows.narrow(1, piece.offset, piece.num_bytes).view(piece.dtype)
