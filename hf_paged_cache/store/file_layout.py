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
from .window_groups import WindowGroups


class Layouts(Protocol):
    """What must be known of a store."""

    pool: BlockPool
    windows: WindowGroups
    first_device: Callable[[], torch.device]

    def make_room(self, num_blocks: int) -> None: ...


def lay_out(store: Layouts, file: SavedFile) -> bool:
    """What a file holds shows what the tensors of layers are into which nothing was written yet.

    A file need not have all kinds of content.

    Returns:
        Whether, with this file, all layers are known.
    """
    pool, before = store.pool, store.pool.num_layouts
    if not pool.layer_indices:
        store.make_room(0)
    lay_out_pool(pool, [part for content in file.contents if content.kind != STATES for part in content.parts])
    return pool.num_layouts != before and set(store.windows.layers) <= set(pool.layer_indices)


def parts_here(store: Layouts, layout: ContentLayout, content: SavedContents) -> tuple[Part, ...] | None:
    """The parts of what a file holds, on this model's devices; None where layers lie on other devices than they did there."""
    if content.kind == STATES:
        return tuple(part._replace(device=store.first_device()) for part in content.parts)
    here = layout.parts().get(content.kind, [])
    anywhere = [part._replace(device=torch.device("cpu")) for part in here]
    return tuple(here) if anywhere == [*content.parts] else None
