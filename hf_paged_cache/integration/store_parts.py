"""Defines what the calls of a cache share with all other calls of its store."""

from typing import Any, Protocol

from ..model.fingerprint import Fingerprint
from ..model.placeholders import Placeholders
from ..rows.shared import Looks
from ..store.block_store import BlockStore
from .forward_arguments import ArgumentReader
from .images import ImageInputs


class StoreParts(Protocol):
    """`StoreParts` is a `PrefixStore`, as the calls of its caches see it."""

    model: Any
    blocks: BlockStore
    fingerprint: Fingerprint
    argument_reader: ArgumentReader
    image_inputs: ImageInputs
    placeholders: Placeholders
    looks: Looks
