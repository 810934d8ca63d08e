"""What files of blocks show of a pool that nothing was written into yet, and whether what they hold can be written into it.

Files are of the same model, which was looked at before. The store's lock is held.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from ..kv.block_pool import BlockPool
from ..kv.contents import Part, lay_out_pool
from ..tiers.base import STATES
from ..tiers.saved_file import SavedContents, SavedFile
from .content_layout import ContentLayout


class Layouts(Protocol):
    """What must be known of a store."""

    pool: BlockPool
    first_device: Callable[[], torch.device]

    def make_room(self, num_blocks: int) -> None: ...


def lay_out(store: Layouts, file: SavedFile) -> bool:
    """Nothing was computed yet: what a file holds shows what the layers' tensors are; whether it was looked at."""
    if store.pool.layer_indices:
        return False
    store.make_room(0)
    lay_out_pool(store.pool, [part for content in file.contents if content.kind != STATES for part in content.parts])
    return bool(store.pool.layer_indices)


def parts_here(store: Layouts, layout: ContentLayout, content: SavedContents) -> tuple[Part, ...] | None:
    """The parts of what a file holds, on this model's devices; None where layers lie on other devices than they did there."""
    if content.kind == STATES:
        return tuple(part._replace(device=store.first_device()) for part in content.parts)
    here = layout.parts().get(content.kind, [])
    anywhere = [part._replace(device=torch.device("cpu")) for part in here]
    return tuple(here) if anywhere == [*content.parts] else None
