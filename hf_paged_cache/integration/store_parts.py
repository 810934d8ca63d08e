"""What the calls of a cache share with all other calls of its store."""

from typing import Any, Protocol

from ..model.conditioning import Conditioning
from ..model.placeholders import Placeholders
from ..rows.shared import Looks
from ..store.block_store import BlockStore
from .forward_arguments import ArgumentReader
from .image_inputs import ImageInputs


class StoreParts(Protocol):
    """A `PrefixStore`, as its calls see it.

    Attributes:
        model: whose blocks they are.
        blocks: their allocator and pool.
        conditioning: what keys and values of the model depend on.
        argument_reader: of its forwards' arguments.
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
