"""Owns what blocks keep for layers that need more than keys and values of all tokens: window blocks, and snapshots.

It decides how many there are and can be, and where snapshots may be taken. The caller holds the store's lock.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from ..blocks import PrefixCachingBlockAllocator, Snapshots, Window, WindowBlocks
from ..kv.states import States, copied

# Number of window blocks for each block, where a budget in bytes is divided. A sequence needs few window blocks,
# however long it is; the others keep prompts that may be resumed anywhere.
SHARE_OF_A_BUDGET = 0.5

_LEAST_BESIDE_BLOCKS = 8  # snapshots that there may be in any case, if a number of blocks was given
_LEAST_UNSETTLED, _BYTES_UNSETTLED = 4, 2**26  # limits before anybody knows how many blocks there can be
_BLOCKS_OF_A_SNAPSHOT = 8  # blocks for each snapshot, if blocks themselves take no memory
_MIN_GRID = 512  # least tokens of the grid


class WindowGroups:
    """`WindowGroups` has the window blocks of a store, in one group for each window.

    There are `share` window blocks for each block that there can be. If every layer has a window (`are_all`), a block
    costs nothing beside its window blocks, and the most blocks there can be are window blocks. `layers` are all that
    hold keys and values; `most` is None as long as nobody knows it.
    """

    def __init__(
        self,
        allocator: PrefixCachingBlockAllocator,
        window_of: Mapping[int, Window],
        layers: Collection[int],
        share: float,
        most: int | None,
    ) -> None:
        self._allocator, self.layers = allocator, layers
        self.window_of = {**window_of}
        self.are_all = bool(window_of) and all(layer_idx in window_of for layer_idx in layers)
        self.share = 1.0 if self.are_all else share
        windows = sorted(set(window_of.values()), key=lambda window: -window.size)
        first = self._beside(allocator.num_blocks)
        self.groups = [WindowBlocks(allocator, window, first) for window in windows]
        self.limit(most)

    def _beside(self, num_blocks: int) -> int:
        return max(2, int(num_blocks * self.share))

    def limit(self, num_blocks: int | None) -> None:
        """Note how many blocks there can be; None: nobody knows yet. What is managed can be had all the same."""
        for group in self.groups:
            group.most = math.inf if num_blocks is None else max(group.num_blocks, self._beside(num_blocks))

    def reset(self, num_blocks: int) -> None:
        """Forget all, and start anew with the window blocks that go with `num_blocks` blocks; no block is in use."""
        for group in self.groups:
            group.reset(self._beside(num_blocks))

    def num_needed(self, namespace: bytes | None = None) -> list[int]:
        """Return for each group the number of window blocks that somebody needs; given a namespace, of its blocks."""
        if namespace is None:
            return [group.num_needed for group in self.groups]
        own = [allocation for allocation in self._allocator.allocations() if allocation.namespace == namespace]
        return [len(group.needed_by(own)) for group in self.groups]


class StateRules(NamedTuple):
    """`StateRules` says what a store must know of a model's states.

    Attributes:
        num_bytes: bytes of a row's states.
        chunk: number of tokens that kernels compute at once; a split elsewhere rounds otherwise.
        width: columns of padding that a row must see, if it has so many, to be as if it had seen all of them.
        clamps_one_token: True if one token is computed otherwise than several.
    """

    num_bytes: int
    chunk: int = 1
    width: int = 0
    clamps_one_token: bool = False

    def bytes_beside(self, bytes_per_block: int) -> int:
        """Return the bytes of snapshots for each block that there can be."""
        return bytes_per_block or -(-self.num_bytes // _BLOCKS_OF_A_SNAPSHOT)


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
        bytes_per_block: int,
        *,
        has_least: bool,
    ) -> None:
        self.rules = rules or StateRules(0)
        self._is_needed = rules is not None
        self._allocator = allocator
        self._least = _LEAST_BESIDE_BLOCKS if has_least else 0
        self.align = math.lcm(allocator.block_size, self.rules.chunk)
        num_bytes, grid = max(1, self.rules.num_bytes), _MIN_GRID
        self.bytes_beside_a_block = 0 if rules is None else rules.bytes_beside(bytes_per_block)
        if self.bytes_beside_a_block:
            grid = max(grid, num_bytes * allocator.block_size // self.bytes_beside_a_block)
        self.grid = -(-grid // self.align) * self.align
        self.kept: Snapshots[States] = Snapshots(allocator, max(_LEAST_UNSETTLED, _BYTES_UNSETTLED // num_bytes))

    def __bool__(self) -> bool:
        """Return whether any layer carries states."""
        return self._is_needed

    def limit(self, num_blocks: int | None) -> None:
        """Note how many blocks there can be; None: nobody knows yet."""
        if self._is_needed and num_blocks is not None:
            most = num_blocks * self.bytes_beside_a_block // max(1, self.rules.num_bytes)
            self.kept.limit(max(self._least, most))

    def use(self, block_ids: Sequence[int], num_tokens: int) -> States:
        """Return the states after `num_tokens` tokens, uncopied: they are not to be written."""
        return self.kept.use(block_ids[num_tokens // self._allocator.block_size - 1])

    def keep(self, block_ids: Sequence[int], num_tokens: int, states: States) -> None:
        """Keep copies of states after `num_tokens` tokens, at the end of a block that can be hit, if memory is left."""
        index, rest = divmod(num_tokens, self._allocator.block_size)
        if rest or not 0 < index <= len(block_ids):
            return
        block_id = block_ids[index - 1]
        if not self.kept.has(block_id) and self._allocator.digest_of(block_id) is not None:
            with suppress(torch.OutOfMemoryError):
                self.kept.keep(block_id, copied(states))
