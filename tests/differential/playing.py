"""Plays a case: each action on the reference first, then on ours, then both compared."""

import copy
import gc
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_paged_cache import ForwardMismatchError, OutOfBlocksError, PagedCacheError, PagedPrefixCache, PrefixStore
from tests.differential.cases import IMPORTS, Action, Case, Rows, Slot
from tests.differential.comparing import DifferenceError, TokenError, compare
from tests.internals import are_bypassed

ON_THE_STORE = ("score", "prefill", "pin", "elsewhere")  # the rows of the cache stay
# After these the rows of a cache are gone, or are what was passed.
ENDS = ("with", "reset", "collected", "without", "between", "fault", "beside")
GOES_ON = ("generate", "turn", "forward", "going_on", "gradients")


@dataclass
class Failure:
    """What went wrong at the last action of a case."""

    case: Case
    action: str
    category: str
    message: str


@dataclass
class Played:
    """What came of a case, or of many."""

    case: Case | None = None  # with what was played
    failure: Failure | None = None
    counts: Counter[str] = field(default_factory=Counter)  # of actions that were compared, by name
    refusals: Counter[str] = field(default_factory=Counter)  # ours, by message
    left_out: Counter[str] = field(default_factory=Counter)  # the reference's, by message
    reused: int = 0
    largest: float = 0.0

    def add(self, other: "Played") -> None:
        for name in ("counts", "refusals", "left_out"):
            getattr(self, name).update(getattr(other, name))
        self.reused += other.reused
        self.largest = max(self.largest, other.largest)


class Player:
    """The caches of one case, ours and the reference's."""

    def __init__(self, case: Case) -> None:
        self.played = Played()
        self.case = case
        self.slots = case.slots()
        self.done: list[Action] = []
        self.names: dict[str, Any] = {}  # of the lines
        try:
            self._run(IMPORTS + case.setup())
        except BaseException:
            self.close()
            raise
        self.model = self.names["model"]

    def _run(self, lines: str) -> None:
        exec(lines, self.names)

    def play(self, action: Action) -> Failure | None:
        """Play one action; it is left out where the reference refuses it."""
        if action.slot >= len(self.slots):
            return None
        slot = self.slots[action.slot]
        names = set(re.findall(r"\b[cr]\d\b", f"{action.ours} {action.reference}"))
        is_unknown = names - self.names.keys() - {f"{side}{len(self.slots)}" for side in "cr"}
        if is_unknown or (action.held is not None and slot.mask != action.held):
            return None
        self.names.pop("ours", None)
        self.names.pop("reference", None)
        self._run(action.both)
        try:
            self._run(action.reference)
        except NameError:  # in the line itself
            raise
        except Exception as error:  # noqa: BLE001 -- whatever transformers does not do is left out
            slot.mask = None
            self.played.left_out[f"{action.name}: {_short(error)}"] += 1
            return None
        self.done.append(action)
        refused = False
        try:
            self._run(action.ours)
        except PagedCacheError as error:
            if not self._may_refuse(action, slot, error):
                return self._fail(action, type(error).__name__, f"refused, and nothing says so: {error}")
            self.played.refusals[f"{action.name}: {_short(error)}"] += 1
            refused = True
        except Exception as error:  # noqa: BLE001 -- any other error is what we look for
            return self._fail(action, type(error).__name__, str(error))
        if "ours" in self.names and not refused:
            try:
                distance = compare(self.names["ours"], self.names["reference"], action.mask, self.case.tolerance)
            except DifferenceError as error:
                if not isinstance(error, TokenError) or not self.case.tolerance or not self._is_tie(action):
                    return self._fail(action, "difference", str(error))
                self.played.counts["tie"] += 1
                distance = 0.0
            self.played.counts[action.name] += 1
            self.played.largest = max(self.played.largest, distance)
        self._follow(action, slot, refused)
        try:
            for store in self.stores():
                store.check()
                stats, most = store.stats(), re.search(r"max_bytes=([\d_]+)", self.case.store)
                if most and stats.pool_bytes is not None and stats.pool_bytes + stats.snapshot_bytes > int(most[1]):
                    return self._fail(action, "budget", f"more than {most[1]} bytes: {stats}")
        except Exception as error:  # noqa: BLE001 -- none may come of looking at a store
            return self._fail(action, "check", f"{type(error).__name__}: {error}")
        return None

    def _is_tie(self, action: Action) -> bool:
        """Whether the reference's own tokens change where its scores change by rounding errors."""
        names = dict(self.names)
        mine = re.sub(r"\b(r\d|apart)\b", "tie", action.reference)
        for seed in range(12):
            processor = f"logits_processor=[jitter({seed}), "
            lines = mine.replace("logits_processor=[", processor)
            if lines == mine:
                lines = mine.replace("max_new_tokens", f"{processor}], max_new_tokens")
            exec(lines, names)
            try:
                compare(names["reference"], self.names["reference"])
            except TokenError:
                return True
            except DifferenceError:
                continue
        return False

    def _may_refuse(self, action: Action, slot: Slot, error: PagedCacheError) -> bool:
        if type(error).__name__ in action.refusals:
            return True
        if isinstance(error, ForwardMismatchError) and "die=" in action.ours:
            return are_bypassed(self.names[f"c{action.slot}"])  # nobody knows which of their layers had got further
        if not isinstance(error, OutOfBlocksError) or action.name != "prefill":
            return False
        if self.case.num_blocks is None:
            return "max_bytes" in self.case.store
        store = self.names[f"c{action.slot}"].store
        free = self.case.num_blocks - 1 - (store.stats().num_pinned_blocks or 0)
        free -= sum(other.holds for other in self.slots if other.store == slot.store)
        return action.need > free

    def _follow(self, action: Action, slot: Slot, refused: bool) -> None:
        """What the rows of the caches are now."""
        name = action.name
        if action.other is not None:
            other = self.slots[action.other]
            other.mask, other.holds = None, 1_000_000  # what its call took
        if name in ("generate", "fault", "beside"):
            slot.holds = action.need
        elif name in ENDS:
            slot.holds = 0
        elif name in (*GOES_ON, "rows"):
            slot.holds = max(action.need, slot.holds)
        if refused:
            if name not in (*ON_THE_STORE, "forget", "forget_all", "verify"):
                slot.mask = None
        elif name in ENDS:
            slot.mask = None
            if name == "collected":
                slot.salt = None  # another cache, of the store alone
        elif name in GOES_ON and action.mask:
            before = action.held or [[]] * len(action.mask)
            mask = [old + new for old, new in zip(before, action.mask, strict=True)]
            slot.mask = self._grown([row for row in mask for _ in range(action.rows_each)], action.slot)
        elif name in ("rows", "crop"):
            slot.mask = action.mask
        elif name == "copied":
            self.slots.append(copy.copy(slot))
        elif name == "saved":
            self.slots.append(Slot(store=f"other{len(self.slots)}"))
        if "reset_prefix_cache" in action.ours:  # perhaps interrupted: what had ended before has ended
            for other in self.slots:
                if other.store == slot.store and (name == "forget_all" or other.salt == slot.salt):
                    other.mask = None

    def _grown(self, mask: Rows, slot: int) -> Rows | None:
        cache = self.names[f"r{slot}"]
        layers = [i for i, layer in enumerate(cache.layers) if isinstance(getattr(layer, "keys", None), torch.Tensor)]
        more = cache.get_seq_length(layers[0]) - len(mask[0]) if layers else -1
        return [row + [1] * more for row in mask] if more >= 0 else None

    def _caches(self) -> list[PagedPrefixCache]:
        return [self.names[f"c{i}"] for i in range(len(self.slots)) if f"c{i}" in self.names]

    def stores(self) -> list[PrefixStore]:
        return list({id(cache.store): cache.store for cache in self._caches()}.values())

    def finish(self) -> Failure | None:
        """Let go of everything: nothing may stay in use."""
        for name in ("ours", "reference", "other", "apart", "outer", "during"):
            self.names.pop(name, None)  # an output holds its cache
        gc.collect()
        try:
            for cache in self._caches():
                cache.reset()
                cache.unpin()
            for store in self.stores():
                for salt in {slot.salt for slot in self.case.slots()}:
                    PagedPrefixCache(store, cache_salt=salt).unpin()  # also what a cache pinned that is gone
                store.check()
                stats = store.stats()
                self.played.reused += stats.reused_tokens
                unused = None if stats.num_blocks is None else stats.num_free_blocks + stats.num_cached_blocks + 1
                if stats.num_blocks_in_use or unused != stats.num_blocks:
                    return self._fail(None, "leak", f"blocks are in use after all was reset, or lost: {stats}")
        except PagedCacheError as error:
            return self._fail(None, "end", str(error))
        return None

    def _fail(self, action: Action | None, category: str, message: str) -> Failure:
        case = replace(self.case, actions=tuple(self.done))
        return Failure(case, action.name if action else "end", category, message)

    def close(self) -> None:
        try:
            for cache in self._caches():
                cache.detach()
        finally:
            if (small := self.names.get("small")) is not None:
                small.undo()
            shutil.rmtree(self.names.get("folder", ""), ignore_errors=True)
            self.names.clear()


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {re.sub(r'[0-9]+', 'n', str(error))[:110]}"


def play(
    case: Case,
    actions: Callable[[Player], Iterator[Action]] | None = None,
    mutate: Callable[[Player], None] = lambda player: None,
) -> Played:
    """Play the actions of a case, or those that are drawn for it, until one fails."""
    player = Player(case)
    try:
        for action in actions(player) if actions else case.actions:
            mutate(player)
            player.played.failure = player.play(action)
            if player.played.failure:
                return player.played
        player.played.failure = player.finish()
        player.played.case = replace(case, actions=tuple(player.done))
        return player.played
    finally:
        player.close()


def shrink(failure: Failure, mutate: Callable[[Player], None] = lambda player: None) -> Failure:
    """Leave out actions while the same action fails in the same way."""
    at = len(failure.case.actions) - 1
    while at >= 0:
        actions = failure.case.actions[:at] + failure.case.actions[at + 1 :]
        again = play(replace(failure.case, actions=actions), mutate=mutate).failure
        if again and (again.action, again.category) == (failure.action, failure.category):
            failure = again
            at = min(at, len(failure.case.actions))
        at -= 1
    return failure
