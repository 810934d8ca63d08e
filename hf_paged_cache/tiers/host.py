"""The host tier keeps contents of blocks in pinned host memory, for pools on an accelerator.

Copies to it and from it are in one order with what the device computes, and the host waits for none of them. Each
content has memory of its own that is written once; torch deals it out anew when all copies are done.
"""

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..kv.contents import Kind, Part, host_rows
from .base import Name, Tier

logger = logging.getLogger("hf_paged_cache")


class HostTier(Tier):
    """`HostTier` keeps contents in host memory, at most `max_bytes`.

    The least recently used content goes to the tier below, or is dropped. The place of a content is its rows, one of
    each part.
    """

    name = "host"

    def __init__(self, max_bytes: int, below: Tier | None = None) -> None:
        super().__init__(max_bytes)
        self._below = below
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def _derive(self) -> None:
        self._num_bytes = sum(_bytes_of(self.parts[kind]) for kind, _ in self.entries)

    def drop(self, keys: Iterable[tuple[Kind, bytes]]) -> None:
        super().drop(keys)
        self._derive()

    def touch(self, kind: Kind, names: Iterable[Name]) -> None:
        for name in names:
            if self.has(kind, name):
                self.entries.move_to_end((kind, name.block_hash.digest))

    def put(self, kind: Kind, parts: Sequence[Part], names: Sequence[Name], rows: Sequence[Tensor]) -> None:
        self.lay_out(kind, parts)
        self.touch(kind, names)
        try:
            new = [at for at, name in enumerate(names) if (kind, name.block_hash.digest) not in self.entries]
            refused = [at for at in new if not self._keep(kind, names[at], [of_part[at : at + 1] for of_part in rows])]
        except BaseException:  # such as an interrupt between a content and its count
            self._derive()
            raise
        self.num_down += len(new) - len(refused)
        self.num_refused += len(refused)
        if refused and self._below is not None:
            self._below.put(kind, parts, [names[at] for at in refused], [of_part[refused] for of_part in rows])

    def _keep(self, kind: Kind, name: Name, row: Sequence[Tensor]) -> bool:
        """Copy a content into memory of its own; return whether there is room for it."""
        parts = self.parts[kind]
        num_bytes = _bytes_of(parts)
        while self.entries and self._num_bytes + num_bytes > self.max_bytes:
            self._give_up_oldest()
        if self._num_bytes + num_bytes > self.max_bytes:
            return False
        try:
            copies = [host_rows(part, 1) for part in parts]
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self.max_bytes = self._num_bytes
            logger.warning(
                "PagedPrefixCache: no more host memory can be pinned, so the host tier keeps %.1f MiB: %s",
                self.max_bytes / 2**20,
                str(error).partition("\n")[0],
            )
            return False
        for to, of_part in zip(copies, row, strict=True):
            to.copy_(of_part, non_blocking=True)
        self.entries[kind, name.block_hash.digest] = name, copies
        self._num_bytes += num_bytes
        return True

    def _give_up_oldest(self) -> None:
        (kind, _), (name, row) = self.entries.popitem(last=False)
        self._num_bytes -= _bytes_of(self.parts[kind])
        self.num_dropped += 1
        if self._below is not None:
            self._below.put(kind, self.parts[kind], [name], row)

    def load(self, kind: Kind, places: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        self.num_up += len(places)
        return [[*of_part] for of_part in zip(*places, strict=True)]


def _bytes_of(parts: Sequence[Part]) -> int:
    """Return the bytes that a row takes of pinned memory, which is dealt out in powers of two."""
    return sum(1 << (part.num_bytes - 1).bit_length() for part in parts)
