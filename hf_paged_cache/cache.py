"""`PagedPrefixCache`, what `generate` runs on: one caller's rows on a `PrefixStore`.

Owns the translation between transformers' `Cache` and a `Call`; decides nothing about blocks.
"""

import contextlib
import copy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, Literal, NoReturn, Unpack
from weakref import WeakMethod, finalize, ref

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from .ask import explanation, picture, prefixes, scoring, verification
from .attention.view import View
from .call.call import Call
from .call.call_state import CallState
from .call.running import Bracket
from .errors import BlockStateError, CacheArgumentError, CacheBusyError, PagedCacheError
from .integration.ambient import AmbientScope, close_scope, open_scope, scope_to_close
from .integration.begin import require_continues, require_filled, require_may_begin
from .integration.calls import Calls
from .integration.capturing import Capturing, require_capture
from .integration.current import Current, begin_to_forget, drain
from .integration.forwards_ahead import ForwardsAhead
from .integration.generate_arguments import GenerateArguments
from .integration.hooks import attach, detach
from .integration.layers import PagedLayer, live_states, make_layer
from .integration.ranks import Ranks
from .integration.roads import takes_rows
from .integration.session import Session
from .integration.side_forward import SideForwards
from .integration.side_rows import SideRows
from .integration.without_store import LayersWithoutStore, LayersWithRows
from .model.cache_adapters import cache_argument
from .model.probing import hold_as
from .model.support import cache_layers
from .prefix_store import PrefixStore, store_of
from .rows.rows import Rows
from .stacks import locals_of
from .stats import CacheStats, CallStats
from .store.store_stats import stats_of
from .store_options import StoreSizes, require_attention, shows_store_options

_ON_FULL = ("refuse", "bypass")


class PagedPrefixCache(Cache):
    """A cache for `model.generate` that reuses the keys and values of every prefix it has seen.

    Pass one object to any number of calls as `past_key_values`, or build one in each call on a shared `PrefixStore`.
    After a call the rows stay, as a `DynamicCache`'s do, until the next call, `reset()` or collection; a `with` block
    resets it at its end.

    Args:
        model_or_store: a model, for which a store is made with `block_size`, `num_blocks`, `max_bytes`, `host_bytes`,
            `disk_folder`, `disk_bytes`, `disk_mode` and `eviction`, see `PrefixStore`; or a store.
        cache_salt: a tenant's name, not empty. Caches with another salt never share a block, so that no tenant can probe
            another's prompts, and see, count and reset their own blocks alone (docs/security.md). A cache without one
            is the store's owner's: its `stats()` and refusals tell of all blocks.
        attention: how attention reads keys and values. "paged" keeps a copy of the running rows beside the blocks, and
            what several rows share only once, which attention then reads once; where a model, or a call, does not leave
            attention to torch, a copy of each row. Later forwards overwrite it (not while gradients are on), so clone
            what you keep. "gather" copies each layer's rows for the moment of its attention: memory is the blocks and
            one layer's rows.
        on_full: with attention="gather", what becomes of a call that does not fit into the pool. "refuse" raises OutOfBlocksError.
            "bypass" runs it as `DynamicCache` would, without the store; its rows stay so until the next `generate`, or `reset()`. All
            other calls fit: they keep what there is room for.
        capture: "auto": the steps of a `generate`, and short prompts, run as CUDA graphs of the model's own forward, where all layers of
            the model see all tokens, it is on a CUDA device and that pays; `last_call.captured` says why they did not. It is an
            early form, and not the default until it has been measured. "dry": all but the graphs, on any device, for tests.

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
    layers: list[Any]

    @shows_store_options
    def __init__(
        self,
        model_or_store: PreTrainedModel | PrefixStore,
        *,
        cache_salt: str | bytes | None = None,
        attention: Literal["paged", "gather"] = "paged",
        on_full: Literal["refuse", "bypass"] = "refuse",
        capture: Literal["auto", False, "dry"] = False,
        **sizes: Unpack[StoreSizes],
    ) -> None:
        require_attention(attention)
        require_capture(capture)
        if "verify" in sizes:
            raise CacheArgumentError("verify is a method: leave it out here, and call cache.verify() to look at blocks")
        self.store = store_of(model_or_store, sizes)
        if not isinstance(cache_salt, str | bytes | None):
            raise CacheArgumentError(f"cache_salt is of type {type(cache_salt).__name__}; give a str or bytes")
        if cache_salt is not None and not cache_salt:
            raise CacheArgumentError("cache_salt is empty, which is no tenant; leave it out for the store's owner")
        if on_full not in [*_ON_FULL]:
            raise CacheArgumentError(f"on_full is {on_full!r}; give {' or '.join(map(repr, _ON_FULL))}")
        self.cache_salt = cache_salt.encode() if isinstance(cache_salt, str) else cache_salt or b""
        self.attention = attention
        self.on_full = on_full
        attach(self.store.model)
        blocks, conditioning, reader = self.store.blocks, self.store.conditioning, self.store.argument_reader
        self.view = View(
            blocks.pool,
            conditioning.sights(),
            keeps_copies=attention == "paged",
        )
        layers = [make_layer(self, index, layer) for index, layer in enumerate(cache_layers(self.store.model))]
        self.call = Call(blocks, self.view, partial(_runs_on, ref(self)), self.cache_salt, live_states(layers))
        sibling = partial(PagedPrefixCache, self.store, cache_salt=cache_salt, attention="gather")
        self._side = side = SideForwards(self.store.model, reader, sibling)
        self._ranks = ranks = Ranks(conditioning, blocks)
        self._calls = Calls(
            blocks,
            conditioning,
            reader,
            self.store.image_inputs,
            self.cache_salt,
            self.call.counters,
            side,
            self.store.looks,
            self.store.placeholders,
            ranks,
        )
        self._side_rows = SideRows(side, partial(PagedPrefixCache, self.store, cache_salt=cache_salt))
        takes_positions = reader.takes_positions
        self._capturing = Capturing(conditioning, capture, self.store.arena, takes_positions=takes_positions)
        self._calls.capture(self._capturing)
        self._rows: Rows | None = None  # those of `_current`
        self._current = Current(
            self._calls, WeakMethod(self._show)
        )  # the rows of the last call, or of the running loop
        finalize(self, blocks.left.append, self._current).atexit = False
        self._may_take_rows = attention == "paged"
        self._capture = capture
        self._records_past = False  # from the first forward of a loop on
        if self._may_take_rows and capture:
            self._capturing.attach()
        self._num_looks = 0  # see `AskedCache`
        self._without_store = LayersWithoutStore(self.store.model, self.call, ref(self))
        self._session = session = Session(
            self.call,
            self._without_store,
            conditioning,
            reader,
            self.store.placeholders,
            self.store.image_inputs,
            self.cache_salt,
            ForwardsAhead(blocks, side),
            ranks,
            bypasses=on_full == "bypass",
        )
        self.images_of_generate = self.store.image_inputs.of_generate
        self.after_forward, self.why_unscheduled = session.after_forward, session.why_unscheduled
        self.paged_layers = layers
        super().__init__(layers=layers)  # `self.layers`: these, or those that hold a bypassed call's rows
        held: Any = ref(self)  # called like a class, where a model writes more layers than its config names:
        self.layer_class_to_replicate = lambda: held()._make_layer()  # type: ignore[assignment]

    # What the hooks ask.

    def begin_rows(self, model: Any, given: GenerateArguments) -> Rows | None:
        """A `generate` begins: the rows that it runs on; None: it runs in the pool.

        Raises:
            CacheArgumentError: another model's, or one that asks for a cache of its own, or tokens that do not continue the rows.
        """
        try:
            return self._begin_rows(model, given)
        except PagedCacheError as error:
            self._ranks.tell_refusal(error, always=True)
            raise

    def _begin_rows(self, model: Any, given: GenerateArguments) -> Rows | None:
        current = self._rows
        if not self._may_take_rows or self._session.is_open:
            return None
        if not given.only_new_tokens and not takes_rows(asked=bool(self._capture)):
            self._end_rows()
            self._stay_in_pool()
            return None
        if given.only_new_tokens and current is None and self._session.num_rows:
            self._stay_in_pool()
            return None
        require_may_begin(self.store.model, model, given)
        require_filled(self.store.placeholders, given)
        if given.only_new_tokens:
            require_continues(given, 0 if current is None else current.get_seq_length())
        if given.only_new_tokens and current is not None:
            resumed = self._current.take()  # nobody else goes on with them meanwhile
            if resumed is None:
                require_continues(given, 0)
                return None
            self._calls.resume(given, resumed)
            resumed.handle, resumed.is_behind_handle = ref(self), False
            return resumed
        with self.store.blocks.lock:
            if self._session.is_open:  # a call in the pool has begun meanwhile, in another thread
                return None
            self._leave_pool()
        self._follow_model()
        self._capturing.attach()
        previous = self._current.take_previous()
        if previous is not None and previous.is_exact:  # else these rows keep what they have of those
            self._calls.close(previous)
        self._ranks.is_settled = False
        rows = self._calls.begin(given, previous)
        rows.handle = ref(self)
        return rows

    @contextlib.contextmanager
    def running(self, rows: Rows) -> Iterator[None]:
        """The span of a `generate` on rows: whatever ends it, what is complete is kept, and the rows stay."""
        self.store.blocks.running.add(rows)
        try:
            yield
        except torch.OutOfMemoryError:
            rows.reset()
            self._calls.give_way(rows)
            raise
        except Exception as error:
            self._ranks.tell_refusal(error)
            raise
        finally:
            self.store.blocks.running.discard(rows)
            previous = rows.previous
            self._calls.close(rows)
            if rows.is_open and rows.state is not None and rows.state.counts:
                with self.store.blocks.lock:
                    self.call.counters.end_call(rows.state.kind, rows.state.counts)
                self.note_call(rows.state)
            with self.store.blocks.lock:
                if not self._session.is_open and not self._session.num_rows:  # no call has begun in the pool meanwhile
                    # where no forward has run, the rows of the call before are there yet
                    self._current.put(rows if rows.is_open or previous is None else previous)

    @contextlib.contextmanager
    def generating(self, model: Any, given: GenerateArguments, bracket: "ref[Bracket]") -> Iterator[None]:
        """The span of a `generate` in the pool; see `Session.generating`."""
        with self._session.generating(model, given, bracket):
            self._end_rows()  # of a call in another thread that has ended since this one began
            yield

    def before_forward(self, model: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """A forward was passed this cache itself: it runs on the rows of the running loop, or begins one."""
        current, rows = self._current, self._rows
        if rows is None:
            if not self._may_take_rows or self._session.num_rows or self._session.is_open or not self._takes_loop():
                self._stay_in_pool()
                return self._session.before_forward(model, arguments)
            self._follow_model()
            rows = self._calls.begin_unseen(current, arguments)
        if self._records_past:
            rows.activate_past_recording()
        rows.handle, rows.is_behind_handle = ref(self), True
        return rows.before_forward(model, {**arguments, cache_argument(model): rows})

    def _show(self, rows: Rows | None) -> None:
        """These are the rows from here on; None: those in the pool, if any. While a call runs in the pool, no others are shown."""
        with self.store.blocks.lock:
            if rows is self._rows:  # none are shown: the layers may be those of a call in the pool
                return
            if rows is None or not self._session.is_open:
                self._rows = rows
                self.layers = self.paged_layers if rows is None else rows.layers

    def _stay_in_pool(self) -> None:
        """Steps in the pool ask nobody else, until the rows end."""
        vars(self)["before_forward"] = self._session.before_forward

    def _follow_model(self) -> None:
        """Rows begin: in a wider dtype than the budget has counted with there can be fewer blocks, and layers may have other windows."""
        blocks = self.store.blocks
        with blocks.lock:
            blocks.follow_dtype(self.store.model.dtype, self.call)
            if blocks.windows.may_change and not self._ranks.are_several:
                blocks.follow_windows(self.store.conditioning.sights_now(), self.call)

    def _takes_loop(self) -> bool:
        return takes_rows(asked=bool(self._capture))

    def adopt(self, rows: Rows, before: Rows) -> None:
        """A `generate` went on with the rows that a call had returned: where these were the cache's, so are those it ran on."""
        if self._rows is before:
            self._current.rows = rows

    def note_call(self, state: CallState) -> None:
        """This call is the last one."""
        self._current.last = state

    def _leave_pool(self) -> None:
        """Rows of a call that ran in the pool end."""
        vars(self).pop("before_forward", None)
        if self._session.num_rows:
            self.call.check_not_busy()
            self._without_store.end()
            with self.store.blocks.lock:
                self.call.drop_rows()

    def _end_rows(self) -> None:
        """The rows of the last call end; what a loop has completed is kept."""
        self._current.end()

    # What `generate` and the model ask.

    @property
    def _is_user_defined(self) -> bool:
        """`generate` sets this as it begins: one that was looked up before the cache was attached begins here."""
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, is_so: bool) -> None:
        if self._may_take_rows:
            vars(self).pop("before_forward", None)
            self._current.set_aside()

    def __bool__(self) -> bool:
        """True even without rows: some models ask `if past_key_values`."""
        return True

    def __repr__(self) -> str:
        if self._rows is not None:
            rows = f"{self._rows.num_rows} rows of {self.get_seq_length()} tokens"
            where = f"{type(self.store.model).__name__}, with a salt" if self.cache_salt else repr(self.store)
            without = " without the store" if self._rows.why_bypassed is not None else ""
            return f"PagedPrefixCache({rows}{without}, {where})"
        rows = f"{self._session.num_rows} rows of {self.get_seq_length()} tokens"
        where = f"{type(self.store.model).__name__}, with a salt" if self.cache_salt else repr(self.store)
        return f"PagedPrefixCache({rows}{' without the store' if self._without_store.has_rows else ''}, {where})"

    @property
    def is_sliding(self) -> list[bool]:
        """Of each layer, whether attention sees a window there."""
        if self._rows is not None:
            return list(super().is_sliding)
        if type(self.layers) is LayersWithRows:
            return list(super().is_sliding)
        return [*map(self.view.sight_of.__contains__, range(len(self.layers)))]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values, [R, H, T, D], and return those that its attention reads.

        What the base class does by way of its layers, in fewer steps: it is done for each layer of each token.
        """
        if torch.compiler.is_compiling():
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layers, call = self.layers, self.call
        forward = call.forward
        if forward is not None and forward.is_step:
            read = call.writes.append(layer_idx, key_states, value_states)
            if read is not None:
                return read
        is_scheduled = forward is not None
        if is_scheduled and 0 <= layer_idx < len(layers) and isinstance(layers[layer_idx], PagedLayer):
            states = call.write(layer_idx, {"key": key_states, "value": value_states})
            return states["key"], states["value"]
        if not is_scheduled and not self._without_store.is_running:
            raise self.why_unscheduled(layer_idx)
        if self._without_store.is_running and layer_idx < len(self.layers):
            hold_as(self.layers[layer_idx], key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Each layer's keys and values, copies of those that the next token sees, and its window, if any; of states alone, None."""
        for layer in self.layers:
            window = torch.tensor(layer.sliding_window, device="cpu") if getattr(layer, "is_sliding", False) else None
            yield getattr(layer, "keys", None), getattr(layer, "values", None), window

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """As transformers does; and what is wanted of the convolution's inputs is kept."""
        inputs: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        if self.call.states is not None:
            self.call.states.live.record(layer_idx, state_idx, inputs)
        return inputs

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether a layer keeps what its window or its state has passed until `crop`, for drafts are verified."""
        if self._rows is not None:
            return bool(getattr(self.layers[layer_idx], "record_past", False))
        layer = self.layers[layer_idx]
        if hasattr(layer, "record_past"):
            return bool(layer.record_past)
        return self.call.keeps_past and getattr(layer, "is_sliding", False)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the running rows, padding included; the same in all layers but those that never write any: 0.

        Of layer 0, by which models ask for the length of the rows, it is always the rows'. Before the first forward of a store
        has returned, all count as writing but those that a trial saw write nothing: columns of padding that it skips are there in each.
        """
        if self._rows is not None:
            return self._rows.get_seq_length(layer_idx)
        if self.call.forward is None and not self._without_store.is_running:
            self._session.open_unseen()
        if layer_idx < 0:
            layer_idx += len(self.layers)
        if type(self.layers) is LayersWithRows:
            return self._without_store.num_columns_of(layer_idx)
        if layer_idx and not self.store.blocks.may_write(layer_idx):
            return 0
        return self.call.num_columns

    @property
    def is_initialized(self) -> bool:
        """Whether there are rows."""
        if self._rows is not None:
            return self._rows.is_initialized
        return self._session.num_columns > 0

    def activate_past_recording(self) -> None:
        """Drafts will be verified: a model that cannot say which logits it needs computes them all."""
        if self._rows is not None:
            self._rows.activate_past_recording()
            return
        self._records_past = True
        self._session.records_drafts = True
        self.call.keep_past()
        if self._without_store.has_rows:
            super().activate_past_recording()  # type: ignore[no-untyped-call]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` continues as row `beam_idx[i]`."""
        if self._rows is not None:
            self._rows.reorder_cache(beam_idx)
            return
        self._session.rows().reorder(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens; 0 changes nothing.

        Raises:
            CacheArgumentError: a positive number, more than there are tokens, or more than a window lets take back.
        """
        if self._rows is not None:
            self._rows.crop(tokens_to_remove)
            return
        if tokens_to_remove > 0:
            raise CacheArgumentError(
                f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}"
            )
        self._session.rows().crop(-int(tokens_to_remove))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes `repeats` rows."""
        if self._rows is not None:
            self._rows.batch_repeat_interleave(repeats)
            return
        self._session.rows().reorder([row for row in range(self._session.num_rows) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (int64, or a mask of booleans)."""
        if self._rows is not None:
            self._rows.batch_select_indices(indices)
            return
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._session.rows().reorder(torch.where(chosen < 0, chosen + self._session.num_rows, chosen))

    def reset(self) -> None:
        """Drop the running rows and their copy, as transformers means it; full blocks stay in the prefix cache."""
        self._end_rows()
        self._records_past = False
        vars(self).pop("before_forward", None)
        self._without_store.check_not_busy()
        self.call.drop_rows()
        self._without_store.end()

    # What a user asks.

    prefill, pin, unpin = prefixes.prefill, prefixes.pin, prefixes.unpin
    lookup, explain = explanation.lookup, explanation.explain
    score = scoring.score
    verify = verification.verify
    plot, _repr_html_ = picture.plot, picture.html

    def stats(self) -> CacheStats:
        """Tokens of this cache's calls, and the blocks now; prints as a table.

        With a `cache_salt`, the blocks of that salt; what would tell of others is None. Without, all blocks of the store.
        `PrefixStore.stats()` counts the calls of all caches.
        """
        call, blocks = self.call, self.store.blocks
        drain(blocks)
        with blocks.lock:
            blocks.settle()
            rows = self._current.rows
            copied_bytes = self.view.num_bytes + self._without_store.num_bytes + (0 if rows is None else rows.kv_bytes)
            peak = call.peak_kv_bytes if self._current.last is None else self._current.last.peak_kv_bytes
            arena, backend = self.store.arena, self.view.backend
            return stats_of(blocks, call.counters.totals, self.cache_salt, arena, copied_bytes, peak, backend)

    @property
    def last_call(self) -> CallStats:
        """The same for the last call alone, with a line a row: how far it matched, and why no further.

        The last `generate`, plain forward, `score` or `prefill` that computed something: `last_call.kind` says which.
        """
        last = self._current.last
        with self.store.blocks.lock:
            if last is not None and self.call.counters.ran_last(last.counts):
                tokens, rows, dense = last.read_once
                seen: dict[str, Any] = {
                    "read_once_tokens": tokens,
                    "read_once_rows": rows,
                    "dense": dense,
                    "captured": str(last.captured),
                }
                return replace(self.call.counters.of_call(last.peak_kv_bytes), **seen)
            return replace(self.call.stats(), captured="" if self._capture is False else self._why_in_pool())

    def reset_prefix_cache(self) -> None:
        """Forget the cached blocks and pins of this cache's salt, and the ended rows of all caches of this salt.

        What other salts hold stays, and their calls may be running; without a salt, what caches without one hold is
        forgotten. `PrefixStore.reset_prefix_cache` forgets everything.

        Raises:
            CacheBusyError: a call of this salt is running, or rows of plain forwards may resume; nothing has changed.
        """
        blocks = self.store.blocks
        currents = begin_to_forget(blocks, self.cache_salt)
        with blocks.lock:
            blocks.settle()
            blocks.drop_rows(self.cache_salt)
            blocks.forget(self.cache_salt)
        for each in currents:
            each.end()

    def warm_up(self, rows: int, tokens: int) -> str:
        """Capture the graphs of so many rows of at most so many tokens, ahead of the calls that need them.

        Effects: the store's arena takes memory for such rows; nothing is cached.

        Args:
            rows: of a batch, beams and samples counted.
            tokens: of prompt and answer.

        Returns:
            why they were not captured; "" where they were.

        Raises:
            CacheArgumentError: a number is out of its range.
            CacheBusyError: a call runs on static rows.

        Examples:
            >>> PagedPrefixCache(model, capture="dry").warm_up(rows=1, tokens=100)
            ''
        """
        if not self._may_take_rows and self._capture is not False:
            return self._why_in_pool()
        return self._capturing.warm_up(rows, tokens)

    def why_not_captured(self) -> str:
        """Why steps of this model, as it is now, would not run as CUDA graphs, were it on a CUDA device and `capture="auto"`; "": they would,
        where that pays. It does not look at this machine.

        Examples:
            >>> cache.why_not_captured()
            ''
        """
        return self._capturing.why_not_the_model() if self._may_take_rows else self._why_in_pool()

    def _why_in_pool(self) -> str:
        """Why calls of this cache run in the pool, or why one did."""
        if self.attention == "gather":
            return 'with attention="gather" calls run in the pool'
        return "it ran in the pool"

    def release(self) -> None:
        """Give back the memory of static rows, and all graphs; the next call that pays captures anew. For all caches of the store.

        Raises:
            CacheBusyError: a call runs on static rows.
        """
        self._capturing.release()

    def check(self) -> None:
        """Prove the invariants of the store's blocks, or raise BlockStateError; without a salt, with the whole state."""
        if not self.cache_salt:
            self.store.check()
            return
        with contextlib.suppress(BlockStateError):
            self.store.check()
            return
        raise BlockStateError("the store's blocks are not as they must be; store.check() tells its owner how")

    def detach(self) -> None:
        """Take everything off the model, for all caches of it."""
        detach(self.store.model)

    def __enter__(self) -> "PagedPrefixCache":
        """Until the block is left, every `generate` of the model that is given no cache runs on this one.

        In this thread or asyncio task, and in what it starts with a copy of its context: tasks, and threads by
        `asyncio.to_thread`. Not in a `threading.Thread` or an executor's; see `in_all_threads`. On another cache of the
        same store while this one is busy. Not where the call has a `cache_implementation`, sets `use_cache=False`, or
        drafts for another model. Blocks nest, the innermost counts, and they may end in any order and any thread. A block
        that a generator holds open across `yield` is open for its caller, too, as with `decimal.localcontext`.
        """
        attach(self.store.model)
        open_scope(AmbientScope(self.store.model, self, opener=id(sys._getframe(1))))
        return self

    def __exit__(self, *raised: object) -> None:
        scope = scope_to_close(self, id(sys._getframe(1)))
        if scope is not None:
            close_scope(scope)
        self._reset_if_free()

    @contextlib.contextmanager
    def in_all_threads(self) -> "Iterator[PagedPrefixCache]":
        """`with cache.in_all_threads():` is `with cache:` for every thread: for trainers and servers with threads of their own.

        A thread's own `with` block comes first. Every thread gets the blocks of this cache and its `cache_salt`, so it is
        not for a process that serves several tenants. Where calls overlap, each further one runs on another cache of the
        same store.

        Raises:
            CacheBusyError: another cache is this model's in all threads.

        Examples:
            >>> from concurrent.futures import ThreadPoolExecutor
            >>> with cache.in_all_threads(), ThreadPoolExecutor(2) as pool:
            ...     output = pool.submit(model.generate, **inputs, max_new_tokens=4).result()
            >>> cache.last_call.prompt_tokens == inputs["input_ids"].shape[1]
            True
        """
        attach(self.store.model)
        scope = AmbientScope(self.store.model, self, in_all_threads=True)
        try:
            open_scope(scope)
            try:
                yield self
            finally:
                close_scope(scope)
                self._reset_if_free()
        finally:
            close_scope(scope)  # also where opening it was interrupted

    def __deepcopy__(self, memo: dict[int, Any]) -> "PagedPrefixCache":
        """A second cache on the same store, whose rows hold the same blocks; K/V are copied only of a bypassed call."""
        sibling = self.sibling()
        memo[id(self)] = sibling
        self._without_store.copy_to(sibling._without_store, memo)
        sibling._session.without_images.take_over(self._session.without_images)
        sibling.call.take_over(self.call.fork_rows(), ended=self.call.has_ended)
        if self._rows is not None:
            sibling._current.rows = copy.deepcopy(self._rows, memo)
        return sibling

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a PagedPrefixCache cannot be pickled, nor copied by copy.copy: its blocks belong to a pool; "
            "build a new one on the model, or use copy.deepcopy, which copies rows and shares blocks"
        )

    def __del__(self) -> None:
        """Leave the rows to the store: this may run inside any line of ours, so nothing more happens here."""
        if "call" in self.__dict__:  # else it was never built
            self.call.leave_behind()

    @property
    def is_generating(self) -> bool:
        """Whether a `generate` runs on this cache."""
        return self._session.is_open

    def _reset_if_free(self) -> None:
        """At the end of a block, unless a call runs on the cache, also of this thread: then that keeps its rows."""
        if not self.call.is_in_use:
            with contextlib.suppress(CacheBusyError):  # one has begun since
                self.reset()

    def sibling(self) -> "PagedPrefixCache":
        """Another cache on the same store, under the same conditions."""
        same: dict[str, Any] = {name: getattr(self, name) for name in ("attention", "on_full")}
        same["capture"] = self._capture
        return PagedPrefixCache(self.store, cache_salt=self.cache_salt or None, **same)

    def _make_layer(self) -> Any:
        """A layer more than the model's config names."""
        has_own = self._without_store.has_rows
        return DynamicLayer() if has_own else PagedLayer(self, len(self.layers))  # type: ignore[no-untyped-call]


def _runs_on(cache: ref[PagedPrefixCache], frame: FrameType) -> bool:
    """Whether a frame is the call of a module that was given this cache."""
    if frame.f_code is not _CALL_OF_A_MODULE:
        return False
    given, wanted = locals_of(frame), cache()
    return wanted is not None and any(value is wanted for value in (*given["args"], *given["kwargs"].values()))


_CALL_OF_A_MODULE = torch.nn.Module.__call__.__code__
