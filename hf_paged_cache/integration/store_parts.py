"""Defines what the calls of a cache share with all other calls of its store."""

from typing import Any, Protocol

from ..model.conditioning import Conditioning
from ..model.placeholders import Placeholders
from ..rows.shared import Looks
from ..store.block_store import BlockStore
from .forward_arguments import ArgumentReader
from .image_inputs import ImageInputs


class StoreParts(Protocol):
    """`StoreParts` is a `PrefixStore`, as the calls of its caches see it.

    Attributes:
        model: model of the store.
        blocks: blocks of the model, with their allocator and pool.
        conditioning: what the model's keys and values depend on.
        argument_reader: reads the arguments of the model's forwards.
        image_inputs: says which arguments are types of text, and which fill placeholders.
        placeholders: token ids that are no text.
        looks: whether the model looks at keys and values itself.
    """

    model: Any
    blocks: BlockStore
    conditioning: Conditioning
    argument_reader: ArgumentReader
    image_inputs: ImageInputs
    placeholders: Placeholders
    looks: Looks
