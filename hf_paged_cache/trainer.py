"""Writes what the prefix cache did into the logs of trainers that generate (TRL's GRPO, RLOO, online DPO)."""

import warnings
from contextlib import suppress
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .cache import PagedPrefixCache
from .errors import CacheArgumentError, UnsupportedModelError
from .every_generate import every_generate
from .prefix_store import PrefixStore


class PrefixCacheCallback(TrainerCallback):
    """`PrefixCacheCallback` adds to each entry of a trainer's log what was reused since the entry before.

    `prefix_cache/hit_rate` is the share of prompt tokens that were cached before their call. `prefix_cache/shared_rate`
    is the share that was computed once for several rows, such as the samples of a prompt.

    With `GRPOTrainer(..., callbacks=[PrefixCacheCallback()])` they are in `trainer.state.log_history` and in what is
    printed. Callbacks that report elsewhere, as to wandb, run before; if they are to report these numbers, put this one
    first: `trainer.callback_handler.callbacks.insert(0, PrefixCacheCallback())`.

    Args:
        cache: cache of the trainer's model, or its store; None: the cache of `hf-paged-cache run` and of
            `cache_every_generate`. Without either nothing is added, and a warning says so.
    """

    def __init__(self, cache: PagedPrefixCache | PrefixStore | None = None) -> None:
        if not isinstance(cache, PagedPrefixCache | PrefixStore | None):
            advice = "give a PagedPrefixCache or a PrefixStore, or nothing under hf-paged-cache run"
            raise CacheArgumentError(f"cache is a {type(cache).__name__}; {advice}")
        self._store = cache.store if isinstance(cache, PagedPrefixCache) else cache
        self._before = (0, 0, 0)  # tokens of prompts, reused and shared at the last entry
        self._has_warned = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add what was reused to `logs`, and to the last entry of `state.log_history`."""
        every, model = every_generate(), kwargs.get("model")
        store = self._store
        if store is None and every is not None and model is not None:
            with suppress(UnsupportedModelError):
                store = every.cache_of(getattr(model, "module", model)).store
        if store is None and not self._has_warned:
            self._has_warned = True
            advice = "start the program by hf-paged-cache run, or give the callback the cache"
            warnings.warn(f"PrefixCacheCallback: no cache, so nothing is logged of one; {advice}", stacklevel=2)
        if store is None or logs is None:
            return
        stats = store.stats()
        now = (stats.prompt_tokens, stats.reused_tokens, stats.shared_tokens)
        num_tokens, num_reused, num_shared = (after - before for after, before in zip(now, self._before, strict=True))
        self._before = now
        if num_tokens:
            rates = {"hit_rate": num_reused / num_tokens, "shared_rate": num_shared / num_tokens}
            for entry in (logs, *state.log_history[-1:]):
                entry.update({f"prefix_cache/{name}": rate for name, rate in rates.items()})
