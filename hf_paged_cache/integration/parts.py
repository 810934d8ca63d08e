"""Defines what the calls of one cache share, and makes the rows that they run on."""

import math
from typing import Any, Protocol

from ..call.counters import PromptCounters
from ..model.fingerprint import Fingerprint
from ..model.layers import cache_layers
from ..model.placeholders import Placeholders
from ..rows.kinds import kinds_of
from ..rows.layers import SPARE
from ..rows.rows import Rows
from ..rows.shared import Looks
from ..rows.states import StatePlaces
from ..store.block_store import BlockStore
from .capturing import Capturing
from .forward_arguments import ArgumentReader
from .images import ImageInputs
from .ranks import Ranks

_MOST_MAPPED_AHEAD = 4096  # columns made ahead for shorter prompts, on a host
_MOST_TAKEN_BACK = 32  # most tokens of drafts that layers with a window can take back


class StoreParts(Protocol):
    """`StoreParts` is a `PrefixStore`, as the calls of its caches see it."""

    model: Any
    blocks: BlockStore
    fingerprint: Fingerprint
    argument_reader: ArgumentReader
    image_inputs: ImageInputs
    placeholders: Placeholders
    looks: Looks


class CallParts:
    """`CallParts` has what the calls of one cache share. It holds no rows.

    The salt is part of every root, and the namespace of the blocks. Where `reads_only` is true, a first forward does
    not run, and what it asks for is raised as RequestRead.
    """

    def __init__(
        self, parts: StoreParts, salt: bytes, counters: PromptCounters, ranks: Ranks, capturing: Capturing
    ) -> None:
        self.model, self.store, self.fingerprint = parts.model, parts.blocks, parts.fingerprint
        self.reader, self.image_inputs = parts.argument_reader, parts.image_inputs
        self.placeholders, self.looks = parts.placeholders, parts.looks
        self.salt, self.counters, self.ranks, self.capturing = salt, counters, ranks, capturing
        self.reads_only = False
        self.has_deltas = any(hasattr(module, "rope_deltas") for module in self.model.modules())
        states, rules = self.store.states, self.store.states.rules
        places = StatePlaces(states.align, rules.is_recorded, rules.clamps_one_token, states.kept.most)
        kinds = kinds_of(cache_layers(self.model), places)  # rows of a model that has changed get more layers
        self._kinds = kinds._replace(margin=self.store.block_size + _MOST_TAKEN_BACK)

    def new_rows(self) -> Rows:
        """Make rows that no forward has run yet. Several ranks settle what they know in tokens alone: no windows."""
        kinds = self._kinds._replace(windows={} if self.fingerprint.rank_groups else self.fingerprint.windows)
        if self.store.states:
            kinds = kinds._replace(places=kinds.places._replace(most=self.store.states.kept.most))
        return Rows(self, kinds, self.looks)

    def may_be_lazy(self, rows: Rows) -> bool:
        """Return whether attention may be given keys and values that it reads lazily; chunks promise bits."""
        model_looks = self.looks.model_looks or rows.kinds.indexed or rows.chunks is not None
        return self.fingerprint.attention == "sdpa" and not model_looks

    def columns_to_make(self, rows: Rows, stop: int) -> int:
        """Return for how many columns rows get room that have `stop` columns after their first forward."""
        most = rows.state.limits.max_columns
        # an accelerator takes every byte when it is asked for; a host may refuse to map what nobody would have written
        ahead = max(256, stop // 4) if self.store.pool.accelerators else max(_MOST_MAPPED_AHEAD, stop)
        return stop + SPARE if math.isinf(most) else min(max(stop, int(most)), stop + ahead)
