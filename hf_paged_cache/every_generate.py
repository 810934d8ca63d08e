"""Gives each `generate` of this process a cache if it brings none: `cache_every_generate`.

Each call gets a cache of its own on its model's store. A store lives as long as its model; what was counted stays.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Unpack

from transformers import GenerationMixin

from .cache import PagedPrefixCache
from .errors import CacheArgumentError, PagedCacheError, UnsupportedModelError
from .integration.ambient import ambient_cache
from .integration.generate_arguments import has_own_generate
from .integration.hooks import CACHE_ARGUMENTS, bracket_of
from .locks import new_lock
from .model.support import unwrapped
from .stats import CallTotals
from .store_options import StoreSizes, given_sizes, store_options
from .wording import counted

_MOST_REASONS = 3
_ASKED_FOR_NONE = "asked for none (use_cache), for another kind (cache_implementation), or drafted for another model"
_HELD = "_held_by_every_generate"  # name of the attribute of a model with its `_Held`


def cache_every_generate(*, cache_salt: str | None = None, **sizes: Unpack[StoreSizes]) -> EveryGenerate:
    """Give each `generate` in this process a cache if it brings none, whichever model it is called on.

    `hf-paged-cache run` calls this, and so does the code of processes that a program starts, if they are to have
    caches. It replaces `GenerationMixin.generate`. Options are those of each model's `PagedPrefixCache`. Called again,
    it returns the same object; its options then count for models that have generated nothing yet.

    Raises:
        CacheArgumentError: an option is out of its range.

    Examples:
        >>> from hf_paged_cache import cache_every_generate
        >>> every = cache_every_generate(max_bytes="8GB")  # doctest: +SKIP
        >>> output = model.generate(**inputs, max_new_tokens=8)  # doctest: +SKIP
        >>> print(every)  # doctest: +SKIP
        LlamaForCausalLM: 1 call, 81 prompt tokens: 0 reused, 0 shared, 81 computed
    """
    global _every
    store_options(**sizes)
    if cache_salt == "":
        raise CacheArgumentError("cache_salt is empty; leave it out")
    if _every is None:
        _every = EveryGenerate()
        GenerationMixin.generate = _every.in_place_of(GenerationMixin.generate)  # type: ignore[method-assign]
    _every.options |= given_sizes(sizes) | ({} if cache_salt is None else {"cache_salt": cache_salt})
    return _every


def every_generate() -> EveryGenerate | None:
    """Return what `cache_every_generate` has returned in this process; None: nobody has called it."""
    return _every


class EveryGenerate:
    """`EveryGenerate` gives the models of a process caches, and counts what their calls did. `print` shows it."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}  # of the caches of models that come
        self._counts: list[_Counts] = []
        self._lock = new_lock()  # held to count, and while a model gets its store

    def cache_of(self, model: Any) -> PagedPrefixCache:
        """Return a new cache on the store that a model has here, or raise why it has none."""
        model = unwrapped(model)
        with self._lock:
            held = self._held_by(model)
            if held.first is None and not held.refused:
                try:
                    held.first = PagedPrefixCache(model, **self.options)
                    held.counts.totals = held.first.store.blocks.call_totals
                except Exception as error:  # noqa: BLE001  whatever it is, the program goes on without
                    held.refused = str(error)
        if held.first is None:
            raise UnsupportedModelError(held.refused)
        return held.first.sibling()

    def in_place_of(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return a class's `generate` that gets a cache if it would have none."""

        @wraps(plain)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            brought = next((kwargs[name] for name in CACHE_ARGUMENTS if kwargs.get(name) is not None), None)
            if getattr(brought, "is_paged_prefix_cache", False) or ambient_cache(model) is not None:
                return plain(model, *args, **kwargs)  # the model's bracket calls, or somebody has a cache of their own
            cache = None
            try:
                if brought is not None:
                    raise CacheArgumentError(f"brought a {type(brought).__name__}")
                cache = self.cache_of(model)
                with cache:
                    bracket = bracket_of(model)
                    if has_own_generate(model) or bracket is None or bracket.replaced is not None:
                        raise UnsupportedModelError(f"{type(model).__name__} has a generate of its own")
                    output = bracket(*args, **kwargs)
            except PagedCacheError as error:
                if cache is not None and cache.last_call.kind != "none":
                    raise
                self._count(model, str(error))  # nothing has run yet
                return plain(model, *args, **kwargs)
            if cache.last_call.kind == "none":
                self._count(model, _ASKED_FOR_NONE)
            return output

        return generate

    def counts(self) -> list[dict[str, Any]]:
        """Return for each model what its calls did, named as in `CacheStats`."""
        return [each.as_dict() for each in self._counts]

    def __str__(self) -> str:
        lines = [line for each in self.counts() for line in _lines(each)]
        if any(re.search(r" computed: .*\bN\b", line) for line in lines):
            lines.append("  N stands for numbers that differ")
        return "\n".join(lines) or "no generate was called"

    def _count(self, model: Any, why: str) -> None:
        with self._lock:
            self._held_by(model).counts.without[why] += 1

    def _held_by(self, model: Any) -> _Held:
        with self._lock:
            held: _Held | None = getattr(model, _HELD, None)
            if held is None:
                path = getattr(getattr(model, "config", None), "_name_or_path", "")
                held = _Held(_Counts(f"{type(model).__name__} ({path})" if path else type(model).__name__))
                setattr(model, _HELD, held)
                self._counts.append(held.counts)
            return held


_every: EveryGenerate | None = None


@dataclass
class _Counts:
    """`_Counts` counts what was done with one model, and outlives it."""

    name: str
    without: Counter[str] = field(default_factory=Counter)  # reason why calls ran without a cache -> number of them
    totals: CallTotals = field(default_factory=CallTotals)  # of its store

    def as_dict(self) -> dict[str, Any]:
        totals = self.totals
        return {
            "model": self.name,
            "num_calls": totals.num_calls,
            "num_bypassed_calls": totals.num_bypassed_calls,
            "prompt_tokens": totals.num_tokens,
            "reused_tokens": totals.num_reused,
            "shared_tokens": totals.num_shared,
            "computed_tokens": totals.num_tokens - totals.num_reused - totals.num_shared,
            "computed_because": dict(totals.computed_because),
            "calls_without_cache": dict(self.without),
        }


@dataclass
class _Held:
    """`_Held` is what a model holds: its counts, and a cache on its store. A copy of a model has none."""

    counts: _Counts
    first: PagedPrefixCache | None = None  # others are made beside it; no call runs on it
    refused: str = ""  # why the model has no store

    def __reduce__(self) -> Any:
        return type(None), ()


def _lines(counts: dict[str, Any]) -> list[str]:
    """Return a model's counts in words."""
    name, lines = counts["model"], []
    if counts["num_calls"]:
        tokens = ", ".join(f"{counts[f'{kind}_tokens']:,} {kind}" for kind in ("reused", "shared", "computed"))
        calls = counted(counts["num_calls"], "call")
        lines.append(f"{name}: {calls}, {counts['prompt_tokens']:,} prompt tokens: {tokens}")
        for why, number in Counter(counts["computed_because"]).most_common(_MOST_REASONS):
            lines.append(f"  {counted(number, 'token')} computed: {why}")
        if counts["num_bypassed_calls"]:
            lines.append(f"  {counted(counts['num_bypassed_calls'], 'call')} reused and kept nothing")
    for why, number in counts["calls_without_cache"].items():
        lines.append(f"{name}: {counted(number, 'call')} without a cache: {why}")
    return lines
