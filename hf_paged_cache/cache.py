"""Defines `PagedPrefixCache`, which users pass to `generate`: a handle on a store, and on the rows of its last call."""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal, NoReturn, Unpack
from weakref import ref

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from .ask import explanation, prefixes, scoring, verification
from .call.counters import PromptCounters
from .errors import BlockStateError, CacheArgumentError, ForwardMismatchError, PagedCacheError
from .integration.ambient import AmbientScope, close_scope, open_scope, scope_to_close
from .integration.calls import Calls, Current, bytes_of_rows, forget
from .integration.generate_arguments import GenerateArguments
from .integration.hooks import attach, detach
from .integration.ranks import Ranks
from .integration.side_rows import SideRows
from .model.layers import cache_layers
from .model.support import cache_argument
from .prefix_store import PrefixStore, store_of
from .rows.captured import Capturing, require_capture
from .rows.request import CallState
from .rows.rows import Rows
from .stats import CacheStats, CallStats
from .store_options import StoreSizes


class PagedPrefixCache(Cache):
    """`PagedPrefixCache` is a cache for `model.generate` that reuses the keys and values of every prefix it has seen.

    Pass one cache to any number of calls as `past_key_values`, or build one for each call on a shared `PrefixStore`.
    After a call the rows stay, as a `DynamicCache`'s do, until the next call, `reset()` or collection. A `with` block
    resets the cache at its end.

    Args:
        model_or_store: a model, for which a store is made with the options of a `PrefixStore`; or a store.
        cache_salt: a tenant's name, not empty. Caches with different salts never share a block, so no tenant can probe
            another's prompts. A cache with a salt sees, counts and resets only the blocks of that salt
            (docs/security.md). A cache without a salt belongs to the store's owner: its `stats()` and its refusals
            tell of all blocks.
        capture: "auto": the steps of a `generate`, and short prompts, run as CUDA graphs of the model's own forward, if
            all layers of the model see all tokens, the model is on a CUDA device, and graphs pay; on a CUDA device
            `last_call.captured` says how many did, and why others did not. False: no graphs. "dry": all but the graphs,
            on any device, for tests.

    Raises:
        UnsupportedModelError, CacheArgumentError: see `PrefixStore`.

    Examples:
        >>> cache = PagedPrefixCache(model)
        >>> first = model.generate(**inputs, past_key_values=cache, max_new_tokens=4)
        >>> again = model.generate(**inputs, past_key_values=cache, max_new_tokens=4)
        >>> bool((first == again).all()), cache.last_call.reused_tokens > 0
        (True, True)
    """

    is_paged_prefix_cache = True

    def __init__(
        self,
        model_or_store: PreTrainedModel | PrefixStore,
        *,
        cache_salt: str | bytes | None = None,
        capture: Literal["auto", False, "dry"] = "auto",
        **sizes: Unpack[StoreSizes],
    ) -> None:
        require_capture(capture)
        self.store = store = store_of(model_or_store, sizes)
        if not isinstance(cache_salt, str | bytes | None):
            raise CacheArgumentError(f"cache_salt is of type {type(cache_salt).__name__}; give a str or bytes")
        if cache_salt is not None and not cache_salt:
            raise CacheArgumentError("cache_salt is empty, which is no tenant; leave it out for the store's owner")
        self.cache_salt = cache_salt.encode() if isinstance(cache_salt, str) else cache_salt or b""
        attach(store.model)
        self._counters = PromptCounters(store.blocks.call_totals)
        self._ranks = Ranks(store.fingerprint, store.blocks)
        takes_positions = store.argument_reader.takes_positions
        self._capturing = Capturing(store.fingerprint, capture, store.arena, takes_positions=takes_positions)
        self._calls = Calls(store, self.cache_salt, self._counters, self._ranks, self._capturing)
        self._side_rows = SideRows(
            store.argument_reader, partial(PagedPrefixCache, store, cache_salt=cache_salt, capture=False)
        )
        self._current = Current(store.blocks, self.cache_salt, self._calls.close)
        self._records_past = False  # whether rows record past columns from a loop's first forward on
        self._without_rows = list(cache_layers(store.model))  # layers that hold nothing
        super().__init__(layers=self._without_rows)

    # Methods that the hooks call.

    @contextlib.contextmanager
    def running(self, model: Any, given: GenerateArguments) -> Iterator[Rows]:
        """Enclose a `generate`, with the rows that it runs on: however it ends, complete columns are kept."""
        # no other call goes on with these rows
        previous = self._current.take(unless_elsewhere=not given.only_new_tokens)
        try:
            rows = self._calls.begin(model, given, previous)
        except PagedCacheError as error:
            if previous is not None:
                self._current.put(previous)
            self._ranks.tell_refusal(error, always=True)
            raise
        previous = None  # their memory goes as soon as the new rows give them up
        rows.handle, rows.is_behind_handle = ref(self), False
        running, lock = self.store.blocks.running, self.store.blocks.lock
        with lock:  # `stats` looks through them in any thread
            running.add(rows)
        try:
            yield rows
        except torch.OutOfMemoryError:
            rows.reset()
            self._calls.give_way(rows)
            raise
        except Exception as error:
            self._ranks.tell_refusal(error)
            raise
        finally:
            with lock:
                running.discard(rows)
            previous = rows.previous
            self._calls.close(rows)
            if rows.is_open and rows.state.counts:
                with self.store.blocks.lock:
                    self._counters.last = rows.state
            # where no forward has run, the rows of the call before are still there, or there are none
            kept = rows if rows.num_forwards else previous
            if kept is not None:
                self._current.put(kept)

    def before_forward(self, model: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Let a forward that was passed this cache itself run on the rows of the running loop, or begin a loop."""
        rows = self._current.rows
        if rows is None:
            is_unseen = self._current.is_unseen
            rows = self._calls.new_rows(CallState("generate" if is_unseen else "forward", is_unseen=is_unseen))
            self._current.rows, self._current.is_unseen = rows, False
        if self._records_past:
            rows.activate_past_recording()
        rows.handle, rows.is_behind_handle = ref(self), True
        return rows.before_forward(model, {**arguments, cache_argument(type(model)): rows})

    def after_forward(self, output: Any) -> Any:
        """Return the output: the forward has run on rows, and the rows are told."""
        return output

    def adopt(self, rows: Rows, before: Rows) -> None:
        """Take the rows that a `generate` ran on which was passed the rows `before`, if these are this cache's."""
        if self._current.rows is before:
            self._current.rows = rows

    # Methods that `generate` and the model call.

    @property
    def layers(self) -> list[Any]:
        """Layers of the rows; without rows, layers that hold nothing."""
        rows = self._current.rows
        return self._without_rows if rows is None else rows.layers

    @layers.setter
    def layers(self, layers: list[Any]) -> None:
        """Change nothing: the layers are always those of the rows."""

    @property
    def _is_user_defined(self) -> bool:
        """True; `generate` sets this as it begins, which shows a `generate` that was looked up before `attach`."""
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, is_so: bool) -> None:
        self._current.end()
        self._current.is_unseen = True

    def __bool__(self) -> bool:
        """Return True even without rows: some models ask `if past_key_values`."""
        return True

    def _held(self) -> Rows:
        """Return the rows; if there are none, new rows that hold nothing."""
        return self._current.rows or self._calls.new_rows(CallState("none"))

    def update(self, *states: Any, **kwargs: Any) -> NoReturn:
        """Raise ForwardMismatchError: only a forward that was not announced writes here; others write to rows."""
        raise ForwardMismatchError(
            f"this cache belongs to another model object (a {type(self.store.model).__name__}; a copy is another one, "
            "too): build a PagedPrefixCache for the model that runs. If it is the same object, run it through its own "
            "__call__, not model.model(...), and enter `with cache:` after detach()"
        )

    update_conv_state = update_recurrent_state = update_indexer = update

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        return iter(self._held())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns of the rows, padding included; 0 for layers that never write columns."""
        rows = self._current.rows
        return 0 if rows is None else rows.get_seq_length(layer_idx)

    @property
    def is_initialized(self) -> bool:
        return self.get_seq_length() > 0

    def activate_past_recording(self) -> None:
        """Expect drafts to be verified: a model that cannot say which logits it needs computes all of them."""
        if self._current.rows is None:
            self._records_past = True
            super().activate_past_recording()  # type: ignore[no-untyped-call]
        else:
            self._current.rows.activate_past_recording()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row `i` continue row `beam_idx[i]`."""
        self._held().reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens; 0 changes nothing.

        Raises:
            CacheArgumentError: the number is no integer, or positive, or more than there are tokens, or more than a
                layer with a window or a state can take back.
        """
        if not hasattr(tokens_to_remove, "__index__"):
            kind = type(tokens_to_remove).__name__
            raise CacheArgumentError(f"tokens_to_remove is of type {kind}; give a negative integer, or 0")
        self._held().crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Replace every row by `repeats` rows."""
        self._held().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices` (int64, or a mask of booleans)."""
        self._held().batch_select_indices(indices)

    def reset(self) -> None:
        """Drop the rows, as transformers means it; full blocks stay in the prefix cache."""
        self._current.end()
        self._records_past, self._without_rows = False, list(cache_layers(self.store.model))

    # Methods that users call.

    prefill, pin, unpin = prefixes.prefill, prefixes.pin, prefixes.unpin
    lookup, explain = explanation.lookup, explanation.explain
    score = scoring.score
    verify = verification.verify

    def stats(self) -> CacheStats:
        """Return counts of this cache's calls and of the blocks now; `print` shows them as a table.

        With a `cache_salt`, only blocks of that salt are counted, and what would tell of other salts is None. Without
        a salt, all blocks of the store are. `PrefixStore.stats()` counts the calls of all caches.
        """
        blocks, counters = self.store.blocks, self._counters
        with blocks.lock:
            blocks.settle()
            running = [each for each in [*blocks.running] if each.handle is not None and each.handle() is self]
            of_rows, static_bytes = bytes_of_rows([self._current.rows], running), self.store.arena.num_bytes
            return blocks.stats(counters, self.cache_salt, static_bytes, of_rows, counters.last.peak_kv_bytes)

    @property
    def last_call(self) -> CallStats:
        """Counts of the last `generate`, plain forward, `score` or `prefill`, and why each row matched no further."""
        with self.store.blocks.lock:
            return self._counters.last_call()

    def reset_prefix_cache(self) -> None:
        """Forget the cached blocks and pins of this cache's salt, and the ended rows of all caches of this salt.

        Blocks of other salts stay, and their calls may be running. Without a salt, what caches without a salt hold is
        forgotten. `PrefixStore.reset_prefix_cache` forgets everything.

        Raises:
            CacheBusyError: a call of this salt is running, or rows of plain forwards may resume; nothing has changed.
        """
        forget(self.store.blocks, self.cache_salt)

    def warm_up(self, rows: int, tokens: int) -> str:
        """Capture the graphs of so many rows of at most so many tokens, ahead of the calls that need them.

        The store's arena takes memory for such rows; nothing is cached.

        Args:
            rows: rows of a batch, beams and samples counted.
            tokens: most tokens of a row, prompt and answer together.

        Returns:
            why the graphs were not captured; "": they were.

        Raises:
            CacheArgumentError: a number is out of its range.
            CacheBusyError: a call runs on static rows.

        Examples:
            >>> PagedPrefixCache(model, capture="dry").warm_up(rows=1, tokens=100)
            ''
        """
        return self._capturing.warm_up(rows, tokens)

    def why_not_captured(self) -> str:
        """Return why steps of this model, as it is now, could not run as CUDA graphs; "": they could.

        The answer is for a model on a CUDA device; this machine is not looked at.

        Examples:
            >>> cache.why_not_captured()
            ''
        """
        return self._capturing.why_not_the_model()

    def release(self) -> None:
        """Give back the memory of static rows and all graphs, for all caches of the store.

        Later calls capture anew.

        Raises:
            CacheBusyError: a call runs on static rows.
        """
        self._capturing.release()

    def check(self) -> None:
        """Check the invariants of the store's blocks.

        Raises:
            BlockStateError: an invariant does not hold. Without a salt the error shows the whole state.
        """
        if not self.cache_salt:
            self.store.check()
            return
        with contextlib.suppress(BlockStateError):  # an error raised beside it would have it as its context
            self.store.check()
            return
        raise BlockStateError("the store's blocks are not as they must be; store.check() tells its owner how")

    def detach(self) -> None:
        """Take everything that was attached off the model, for all its caches."""
        detach(self.store.model)

    def __enter__(self) -> "PagedPrefixCache":
        """Let every `generate` of the model that is given no cache run on this one, until the block is left.

        The block counts in this thread or asyncio task, and in what starts with a copy of its context, but not in a
        `threading.Thread` or an executor's thread; see `in_all_threads`. While this cache is busy, a call runs on
        another cache of the same store. A call with a `cache_implementation` or `use_cache=False`, or one that drafts
        for another model, does not run on it. Blocks nest, and the innermost one counts.
        """
        attach(self.store.model)
        open_scope(AmbientScope(self))
        return self

    def __exit__(self, *raised: object) -> None:
        scope = scope_to_close(self)
        if scope is not None:
            close_scope(scope)
        self.reset()

    @contextlib.contextmanager
    def in_all_threads(self) -> "Iterator[PagedPrefixCache]":
        """Do what `with cache:` does in every thread, for trainers and servers with threads of their own.

        A thread's own `with` block comes first. Every thread gets the blocks and the `cache_salt` of this cache, so
        `in_all_threads` is not for a process that serves several tenants. A call that overlaps with another runs on
        another cache of the same store.

        Raises:
            CacheBusyError: another cache is in such a block for this model.

        Examples:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> with cache.in_all_threads(), ThreadPoolExecutor(2) as pool:
            ...     output = pool.submit(model.generate, **inputs, max_new_tokens=4).result()
            >>> cache.last_call.prompt_tokens == inputs["input_ids"].shape[1]
            True
        """
        attach(self.store.model)
        scope = AmbientScope(self, in_all_threads=True)
        try:
            open_scope(scope)
            yield self
        finally:
            close_scope(scope)
            self.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PagedPrefixCache":
        """Make a second cache on the same store, whose rows hold the same columns, and go on by themselves."""
        sibling = self.sibling()
        memo[id(self)] = sibling
        if self._current.rows is not None:
            sibling._current.rows = copy.deepcopy(self._current.rows, memo)
        return sibling

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a PagedPrefixCache cannot be pickled, nor copied by copy.copy: its blocks belong to a pool; "
            "build a new one on the model, or use copy.deepcopy, which copies rows and shares blocks"
        )

    def sibling(self) -> "PagedPrefixCache":
        """Make another cache on the same store, with the same salt and the same `capture`."""
        return PagedPrefixCache(self.store, cache_salt=self.cache_salt or None, capture=self._capturing.capture)
