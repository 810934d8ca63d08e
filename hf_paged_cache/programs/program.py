"""A program's models: each gets a store when its `generate` is first called without a cache, and a cache on it for each such call.

Owns which models have one, which were refused, and why a call ran without. The cache of a call is its own, as a `DynamicCache`
would be: what `generate` returns of it stays as it is. A store lives as long as its model; its counts live until the end.
"""

from __future__ import annotations

import atexit
import os
from contextvars import ContextVar
from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from ..locks import new_lock
from .options import RunOptions
from .summary import ModelRun, report, say

if TYPE_CHECKING:
    from ..cache import PagedPrefixCache


class Program:
    """The program that runs in this process, and its models.

    Args:
        options: how it runs.
    """

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        self._pid = os.getpid()
        self._models: list[ModelRun] = []
        self._advice: dict[str, None] = {}
        self._run_of: WeakKeyDictionary[Any, ModelRun] = WeakKeyDictionary()
        self._making = new_lock()  # held while a model gets its store: two threads may ask at once

    def with_caches(self, plain: Any) -> Any:
        """A class's `generate`, so that the first call of a model attaches to it, and this and all later ones get a cache."""

        @wraps(plain)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            own = getattr(type(model), "generate", None) is not generate
            if _attached.get() is model or not self._gives(model, args, kwargs, has_own_generate=own):
                return plain(model, *args, **kwargs)
            before = _attached.set(model)
            try:
                return model.generate(*args, **kwargs)  # through its bracket, which has a cache now
            finally:
                _attached.reset(before)

        return generate

    def cache_of(self, model: Any) -> PagedPrefixCache | None:
        """A cache on the store that this program has for a model; None: it is refused.

        Raises:
            UnsupportedModelError: an adapter that does more than change layers.
        """
        from ..integration.hooks import bracket_of
        from ..model.support import unwrapped

        model = unwrapped(model)
        self._run(model)
        bracket = bracket_of(model)
        return None if bracket is None or bracket.new_cache is None else bracket.new_cache()

    def advise(self, what: str) -> None:
        """Say at the end what the program's tools could do so that more is reused."""
        self._advice[what] = None

    def end(self) -> None:
        """Say what was done, unless this is a fork, which has the counts of its parent."""
        if os.getpid() == self._pid:
            report(self._options, self._models, [*self._advice])

    def _gives(self, model: Any, args: Any, kwargs: dict[str, Any], *, has_own_generate: bool) -> bool:
        """Whether a call is to get a cache; counts it where not."""
        from ..integration.generate_arguments import read_generate
        from ..integration.hooks import CACHE_ARGUMENTS
        from ..model.conditioning import code_of_others

        brought = [kwargs[name] for name in CACHE_ARGUMENTS if kwargs.get(name) is not None]
        if brought:
            if getattr(brought[0], "is_paged_prefix_cache", False):
                return False
            why = f"it brought a {type(brought[0]).__name__}"
        elif has_own_generate:
            why = f"{type(model).__name__} has a generate of its own"
        elif others := code_of_others(model):
            why = others
        elif self._run(model).refused:
            why = "the model was refused"
        elif (asked := read_generate(model, args, kwargs)).use_cache is False:
            why = "use_cache is False"
        elif asked.cache_implementation is not None:
            why = f"cache_implementation is {asked.cache_implementation!r}"
        elif asked.is_assistant:
            why = "it drafts for another model"
        else:
            return True
        run = self._noted(model)
        with self._making:
            run.without[why] += 1
        return False

    def _count_refusal(self, run: ModelRun, why: str) -> None:
        """Count a call that its cache refuses: once, though the model's own `generate` asks, and then that of the class."""
        model = _attached.get()
        if model is not None and self._run_of.get(model) is run:
            with self._making:
                run.without[why] += 1

    def _noted(self, model: Any) -> ModelRun:
        """What is noted of a model; from here on the summary names it."""
        with self._making:
            run = self._run_of.get(model)
            if run is None:
                run = self._run_of[model] = ModelRun(_name(model))
                self._models.append(run)
            return run

    def _run(self, model: Any) -> ModelRun:
        """What is noted of a model, which has a store from here on, or is refused."""
        from ..cache import PagedPrefixCache
        from ..integration.hooks import attach, bracket_of
        from ..prefix_store import PrefixStore

        with self._making:
            run, bracket = self._noted(model), bracket_of(model)
            if run.refused or (bracket is not None and bracket.new_cache is not None):
                return run
            given = dict(self._options.cache)
            of_caches = {name: given.pop(name) for name in ("cache_salt",) if name in given}
            try:
                store = PrefixStore(model, **given)
            except Exception as error:  # noqa: BLE001  whatever it is, the program goes on without
                run.refused = str(error)
                if not self._options.is_quiet:
                    say(f"{run.name} runs without a cache: {error}")
                return run
            attach(model)
            bracket = bracket_of(model)
            if bracket is not None:
                bracket.new_cache = partial(PagedPrefixCache, store, **of_caches)
                bracket.on_refusal = partial(self._count_refusal, run)
            run.accounts.append(store.blocks.call_totals)
            return run


_attached: ContextVar[Any] = ContextVar("hf_paged_cache_attached", default=None)  # whose bracket was just called
_running: Program | None = None


def begin(options: RunOptions, mixin: Any) -> None:
    """From here on models of this process get caches.

    Args:
        mixin: the class from which they have `generate`.
    """
    global _running
    _running = Program(options)
    mixin.generate = _running.with_caches(mixin.generate)
    atexit.register(_running.end)


def running_program() -> Program | None:
    """The program that `hf-paged-cache run` runs here; None: it was started otherwise."""
    return _running


def _name(model: Any) -> str:
    path = getattr(getattr(model, "config", None), "_name_or_path", "")
    return f"{type(model).__name__} ({path})" if path else type(model).__name__
