"""A case: a model, a store, caches, and the actions that are played on them, each as Python lines.

What is played is what is printed: an action's lines are executed as they stand.
"""

import re
from dataclasses import dataclass

Rows = list[list[int]]

FRESH = "DynamicCache(config=model.config)"
IMPORTS = """import copy, gc, tempfile, torch
from torch import tensor
from transformers import DynamicCache
from hf_paged_cache import PagedPrefixCache, PrefixStore
from tests.differential.comparing import compare
from tests.differential.kinds import build
from tests.differential.tools import *
folder = tempfile.mkdtemp()
"""


@dataclass(frozen=True)
class Action:
    """Lines that run on our caches `c0, c1, ...`, and those of the reference on `r0, r1, ...`.

    The lines of ours may set `ours`, the other ones `reference`; both are compared then.
    """

    name: str
    slot: int
    ours: str
    reference: str = ""
    both: str = ""  # runs once, before the two
    other: int | None = None  # of another cache whose rows it replaces
    mask: Rows | None = None  # of the tokens passed: results at zeros do not count
    need: int = 0  # more blocks than the action can take, or its rows can hold
    held: Rows | None = None  # it resumes from rows with this mask
    rows_each: int = 1  # rows of the cache for each row passed
    refusals: tuple[str, ...] = ()  # errors that the documentation announces for it


@dataclass
class Slot:
    """What the reference's rows of one cache are: their mask, or None where nothing resumes from them."""

    store: str = "store"
    salt: str | None = None
    mask: Rows | None = None
    holds: int = 0  # at most so many blocks, which are not evicted


@dataclass(frozen=True)
class Case:
    """All that is needed to play: nothing is drawn any more."""

    kind: str
    model: str  # lines that build it
    store: str  # arguments of PrefixStore
    caches: tuple[str, ...]  # arguments of each PagedPrefixCache
    actions: tuple[Action, ...] = ()
    num_blocks: int | None = None
    block_size: int = 16
    tolerance: float = 1e-4  # of the results' scale; 0: the same bits

    def slots(self) -> list[Slot]:
        salts = [re.search(r"cache_salt='(\w+)'", options) for options in self.caches]
        return [Slot(salt=salt and salt[1]) for salt in salts]

    def setup(self) -> str:
        lines = [self.model, f"store = PrefixStore(model, {self.store})"]
        for i, options in enumerate(self.caches):
            lines += [f"c{i} = PagedPrefixCache(store, {options})", f"r{i} = {FRESH}"]
        return "\n".join(lines)

    def script(self) -> str:
        """A program that plays the case, and compares after each action."""
        lines = [IMPORTS, self.setup()]
        for action in self.actions:
            lines += ["", f"# {action.name}"]
            lines += [text for text in (action.both, action.reference, action.ours) if text]
            if "ours =" in action.ours:
                lines.append(f"compare(ours, reference, mask={action.mask}, tolerance={self.tolerance})")
        return "\n".join([*lines, "store.check()"])
