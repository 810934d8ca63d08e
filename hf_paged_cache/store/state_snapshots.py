"""Decides where snapshots of layers' states may be taken, and how many there can be.

`Snapshots` knows which block has a snapshot. The caller holds the store's lock.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from ..blocks import PrefixCachingBlockAllocator, Snapshots
from ..kv.states import States, copied

_LEAST_BESIDE_BLOCKS = 8  # snapshots that there may be in any case, if a number of blocks was given
_LEAST_UNSETTLED, _BYTES_UNSETTLED = 4, 2**26  # limits before anybody knows how many blocks there can be
_BLOCKS_OF_A_SNAPSHOT = 8  # blocks for each snapshot, if blocks themselves take no memory
_MIN_GRID = 512  # least tokens of the grid


class StateRules(NamedTuple):
    """`StateRules` says what a store must know of a model's states.

    Attributes:
        num_bytes: bytes of a row's states.
        chunk: number of tokens that kernels compute at once; a split elsewhere rounds otherwise.
        width: columns of padding that a row must see, if it has so many, to be as if it had seen all of them.
        is_recorded: True if the states are of convolutions alone: a forward shows the states after each of its tokens.
        clamps_one_token: True if one token is computed otherwise than several.
    """

    num_bytes: int
    chunk: int = 1
    width: int = 0
    is_recorded: bool = False
    clamps_one_token: bool = False


class StateSnapshots:
    """`StateSnapshots` has the snapshots of a store's blocks. It is false if no layer carries states.

    Snapshots may take as many bytes as the most blocks. If a number of blocks was given (`has_least`), there may be 8
    in any case.

    Attributes:
        bytes_beside_a_block: bytes of snapshots for each block that there can be.
        kept: group of the layers with states.
        align: number of tokens; snapshots are kept at multiples of it.
        grid: number of tokens; prompts that are long enough keep snapshots at multiples of it, if there is room.
    """

    def __init__(
        self,
        allocator: PrefixCachingBlockAllocator,
        rules: StateRules | None,
        bytes_per_block: int = 0,
        *,
        has_least: bool = False,
    ) -> None:
        self.rules = rules or StateRules(0)
        self._is_needed = rules is not None
        self._allocator, self._block_size = allocator, allocator.block_size
        self._least = _LEAST_BESIDE_BLOCKS if has_least else 0
        self.align = math.lcm(self._block_size, self.rules.chunk)
        num_bytes = max(1, self.rules.num_bytes)
        self.bytes_beside_a_block = 0
        self.grid = _MIN_GRID
        if self._is_needed:
            self.bytes_beside_a_block = self.bytes_beside(self.rules, bytes_per_block)
            self.grid = max(_MIN_GRID, num_bytes * self._block_size // self.bytes_beside_a_block)
        self.grid = -(-self.grid // self.align) * self.align
        self.kept: Snapshots[States] = Snapshots(allocator, max(_LEAST_UNSETTLED, _BYTES_UNSETTLED // num_bytes))

    @staticmethod
    def bytes_beside(rules: StateRules, bytes_per_block: int) -> int:
        """Return the bytes of snapshots for each block that there can be."""
        return bytes_per_block or -(-rules.num_bytes // _BLOCKS_OF_A_SNAPSHOT)

    def __bool__(self) -> bool:
        """Return whether any layer carries states."""
        return self._is_needed

    def with_snapshots(
        self, bytes_on: Mapping[torch.device, float], device: torch.device | None
    ) -> dict[torch.device, float]:
        """Return the bytes that a block takes of each device, with its part of the snapshots.

        Args:
            device: device of the snapshots if no layer has keys and values; else None.
        """
        if device is not None:
            return {device: self.bytes_beside_a_block}
        return {each: 2 * num_bytes for each, num_bytes in bytes_on.items()}

    def limit(self, num_blocks: int | None) -> None:
        """Note how many blocks there can be; None: nobody knows yet."""
        if not self._is_needed or num_blocks is None:
            return
        most = num_blocks * self.bytes_beside_a_block // max(1, self.rules.num_bytes)
        self.kept.limit(max(self._least, most))

    def use(self, block_ids: Sequence[int], num_tokens: int) -> States:
        """Return the states after `num_tokens` tokens, uncopied: they are not to be written."""
        return self.kept.use(block_ids[num_tokens // self._block_size - 1])

    def keep(self, block_ids: Sequence[int], num_tokens: int, states: States) -> None:
        """Keep copies of states after `num_tokens` tokens, at the end of a block that can be hit, if memory is left."""
        index, rest = divmod(num_tokens, self._block_size)
        if rest or not 0 < index <= len(block_ids):
            return
        block_id = block_ids[index - 1]
        if not self.kept.has(block_id) and self._allocator.digest_of(block_id) is not None:
            with suppress(torch.OutOfMemoryError):
                self.kept.keep(block_id, copied(states))
