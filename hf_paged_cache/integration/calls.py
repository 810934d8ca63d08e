"""Runs the calls of one cache, each on rows of its own, from the call's beginning to its end.

An unusual call is bypassed: its rows reuse and keep nothing, and `last_call` says why.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..call.counters import count_bypassed
from ..call.keep import keep as keep_blocks
from ..call.keep import lay_out
from ..call.share import share_prompt
from ..errors import CacheArgumentError, CacheBusyError, ForwardMismatchError, PagedCacheError
from ..kv.tensors import to_device
from ..model.rope import RopeDeltas
from ..model.support import cache_argument, require_layer_adapters
from ..rows import moves
from ..rows.ids import Prompt
from ..rows.request import CallState
from ..rows.rows import Rows
from ..store.block_store import BlockStore
from ..wording import where_of
from .chunked_prompt import chunked_prompt, require_slices
from .forward_arguments import shape_of
from .generate_arguments import GenerateArguments
from .opening import GRADIENTS, Opening

_RAN_ELSEWHERE = (
    "generate ran no forward with the cache: some models leave it out at the length from which on their "
    "rotary frequencies are others"
)
# functions that decide what each step is passed
_PREPARING = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
_RESUMED = "the last call's rows resumed"
_NO_CACHE_WANTED = (
    "generate was passed this cache, and use_cache is False, given or by generation_config: it would run the whole "
    "prompt again in each step, after what the cache holds; pass use_cache=True, or no cache"
)


class Calls(Opening):
    """`Calls` opens, runs and closes the calls of one cache."""

    # Calls of `generate`.

    def begin(self, model: Any, given: GenerateArguments, previous: Rows | None) -> Rows:
        """Begin a `generate` after the rows of the call before, and return the rows that it is to run on.

        It is refused for another model, under adapters that do more than change layers, and on another cache.
        """
        if model is not self.model:
            self.refuse(model)
        if "peft" in sys.modules:
            require_layer_adapters(model)
        if given.cache_implementation is not None:
            raise CacheArgumentError(
                f"cache_implementation={given.cache_implementation!r} asks transformers for a cache of its own; "
                "leave it out, or leave past_key_values out"
            )
        if given.only_new_tokens:
            rows = previous or self.new_rows(CallState("none"))  # which has nothing to continue: this is refused
            self._resume(given, rows)
            return rows
        if not self.image_inputs.is_plain:
            self.image_inputs.require_filled(given.passed, 0)
        if previous is not None and previous.is_exact:  # of others, the new rows keep what they take over
            self.close(previous)
        self.ranks.is_settled = False
        self.captures = self.capturing.attach()
        rows = self.new_rows(self._state_of(given))
        rows.in_generate, rows.previous = True, previous
        rows.escaped = given.is_custom  # custom code may give the rows to anybody
        rows.reads_all = given.is_custom
        for name in _PREPARING:
            module = getattr(getattr(type(model), name, None), "__globals__", {}).get("__name__", "")
            if name in vars(model) or str(module).partition(".")[0] != "transformers":
                rows.reads_all = True
        if given.chunk_size is not None and not given.is_own:
            chunked = chunked_prompt(model, given)
            if chunked is not None:
                self.begin_chunks(rows, chunked, given)
                self._count(rows)
        return rows

    def _resume(self, given: GenerateArguments, rows: Rows) -> None:
        """Let a `generate` of new tokens alone go on with rows, exactly where they stopped.

        This is checked here because a mask of ones never reaches the forward.
        """
        require_slices(given)
        num_held = rows.get_seq_length()
        if given.num_masked != num_held + given.num_given:
            raise CacheArgumentError(
                f"the attention mask has {given.num_masked} columns, the cache {num_held} and the ids "
                f"{given.num_given}: pass the whole prompt, or ids that continue exactly where the rows stopped (the "
                "last token generated is not among them)"
            )
        if not self.image_inputs.is_plain:
            self.image_inputs.require_filled(given.passed, num_held)
        self.ranks.settle_resumption(num_held, given.num_given)
        rows.in_generate = rows.reads_next = True
        rows.is_passed = False
        before, rows.state = rows.state, self._state_of(given)
        state = rows.state
        for name in ("digest", "resets", "regime", "deltas", "adapters"):
            setattr(state, name, getattr(before, name))
        if rows.why_bypassed is None and not self.looks_same(state):
            rows.note_look(is_same=False)  # what follows under a changed model is not kept
        state.was_alone = not self.fingerprint.may_change_in_a_forward()
        state.calls_back = state.calls_back or self.fingerprint.own_forward is not None
        if state.deltas is not None:  # modules hold the deltas of whichever call ran last
            state.deltas.put_back(len(rows.prompts))

    def _state_of(self, given: GenerateArguments) -> CallState:
        """Return the state of a `generate` that begins."""
        images = None
        if self.image_inputs.takes_images and given.chunk_size is None and not given.is_own:
            images = self.image_inputs.read(given.passed)
        return CallState(
            "generate",
            given.limits,
            beams=given.has_beams,
            is_custom=given.is_custom,
            is_unseen=given.is_own,
            calls_back=given.calls_back or given.is_custom,
            is_in_step=given.synced_gpus,
            images=None if isinstance(images, str) else images,
        )

    def fork(self, rows: Rows, sources: Sequence[int]) -> Rows:
        """Make rows that go on beside `rows`, row `i` from row `sources[i]`; where that pays, they read in place."""
        index = torch.tensor(sources, dtype=torch.int64, device="cpu")
        is_lazy = rows.may_be_lazy and rows.why_bypassed is None and len(sources) > 1
        forked: Rows = moves.forked(rows, index, share_prompt(rows, sources, self.looks) if is_lazy else None)
        forked.in_generate, forked.calls = True, self
        return forked

    def close(self, rows: Rows) -> None:
        """End a call, however it ended, and keep what is complete."""
        rows.roll_back()
        rows.previous = None
        rows.in_generate, rows.common_columns = False, 0
        rows.must_confirm = True  # a forward may go on with the rows
        try:
            if rows.is_open and rows.why_bypassed is None:
                self.keep(rows)
                self._leave_blocks(rows)
        finally:
            if rows.captured is not None:
                rows.captured.close()
        if rows.is_open:
            self._note_bytes(rows)

    def note_elsewhere(self, rows: Rows, given: GenerateArguments) -> None:
        """Count a `generate` that ran no forward on the rows it was passed, and give up the rows of the call before."""
        if rows.state.is_custom:  # custom code may have called `generate` itself, on other rows
            return
        rows.previous = None
        counts = count_bypassed([given.num_given] * max(1, given.limits.num_rows), _RAN_ELSEWHERE)
        with self.store.lock:
            self.counters.add_call("generate", counts, 0, bypassed=True)

    def note_bypass(self) -> None:
        """Count a running call as bypassed from here on."""
        with self.store.lock:
            self.counters.note_bypass()

    # Methods that rows call before a forward.

    def refuse(self, model: Any) -> NoReturn:
        """Raise CacheArgumentError: the cache, or rows of it, were given to another model."""
        raise CacheArgumentError(
            f"this cache was built for another model ({type(self.model).__name__} elsewhere in memory); build "
            f"one for this {type(model).__name__}: PagedPrefixCache(model)"
        )

    def require_not_running(self, rows: Rows) -> None:
        """Raise CacheBusyError if another thread runs a forward on the rows."""
        if any(thread.ident == rows.thread for thread in threading.enumerate()):
            raise CacheBusyError(
                "these rows are in a forward of another thread; call generate in each thread, which has rows of its "
                "own, or use one cache a thread: PagedPrefixCache(cache.store) shares all blocks"
            )

    def open(self, rows: Rows, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Open rows before their first forward; return the arguments that it is to run with.

        Where memory runs out, the rows of the call before are given up, and what the pool need not hold, and opening is
        tried once more.
        """
        self.ranks.is_settled = False
        try:
            if rows.state.is_unseen:
                _require_whole_prompt(arguments)
            try:
                return self._open(rows, arguments)
            except torch.OutOfMemoryError:
                if self.fingerprint.rank_groups:
                    raise
            # here nobody holds the rows of the call before any more
            rows.reset()
            self.give_way(rows)
            return self._open(rows, arguments, may_run_ahead=False)
        except Exception as error:
            self.ranks.tell_refusal(error)
            raise

    def give_way(self, rows: Rows) -> None:
        """Give up the arena, and what the pool need not hold, when memory is short and these rows are given up."""
        if rows.captured is not None:
            rows.captured.close()
        self.capturing.give_way()
        with self.store.lock:
            self.store.make_way()

    def go_on(self, rows: Rows, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Get ready for a forward of a loop, or the first forward of a call that resumes; return its arguments.

        From an unusual forward on, rows are bypassed.
        """
        rows.thread = threading.get_ident()
        rows.roll_back()
        state, is_prompt = rows.state, rows.reads_next or not rows.in_generate
        if not rows.in_generate:
            self.ranks.is_settled = False
        before = rows.get_seq_length()
        try:
            if rows.why_bypassed is None:
                arguments, num_new, num_tokens = self._read_on(rows, arguments, is_prompt=is_prompt)
            elif is_prompt:
                if not (rows.in_generate or self.image_inputs.is_plain):
                    self.image_inputs.require_filled(arguments, before)
                num_rows, num_new = shape_of(arguments, before)
                num_tokens = [num_new] * num_rows
        except PagedCacheError as error:
            if not rows.in_generate:
                self.ranks.tell_refusal(error)
            raise
        rows.reads_next = False
        if is_prompt:
            if not (state.is_custom or state.is_unseen):
                state.pending, rows.must_confirm = count_bypassed(num_tokens, _RESUMED), True
            if rows.chunks is not None:  # another chunk of the prompt may follow
                rows.reads_next = before + num_new < state.limits.num_prompt_columns
        return arguments

    def _read_on(
        self, rows: Rows, arguments: Mapping[str, Any], *, is_prompt: bool
    ) -> tuple[Mapping[str, Any], int, list[int]]:
        """Read a forward of rows that go on; return what it is to run with, and its numbers of columns and tokens."""
        request, why, _ = self.read(rows, arguments)
        state, num_new = rows.state, request.num_new_columns
        if rows.chunks is not None and not rows.num_forwards:
            inputs = self.with_roots(state, request)
            state.chunked.require(replace(request, rows=tuple(inputs), bypass=why), rows.n)
        if not rows.in_generate:
            self.ranks.settle(rows, request)
        why = why or (GRADIENTS if torch.is_grad_enabled() else None)
        if why is not None:
            self.keep(rows)
            arguments = self.bypass(rows, arguments, why)
        elif any(prompt.pad != row.pad for prompt, row in zip(rows.prompts, request.rows, strict=True)):
            inputs = self.with_roots(state, request)  # rows of padding alone get more of it
            rows.prompts = [Prompt(row.root, row.pad, row.first_position, row.shift) for row in inputs]
        may_capture = is_prompt and rows.in_generate and rows.captured is None and rows.chunks is None
        if why is None and may_capture and self.captures:
            self.begin_captured(rows, request, rows.n, rows.n + num_new)
        return arguments, num_new, [len(row.token_ids) for row in request.rows]

    # Methods that rows call after a forward, and as they change.

    def confirm(self, rows: Rows, output: Any) -> Any:
        """Confirm a forward that has returned: rows that ran for several rows of the batch become these rows."""
        state = rows.state
        if not rows.is_written:
            rows.reset()
            raise ForwardMismatchError(
                "the forward did not write any layer: gradient "
                "checkpointing drops the cache; call model.gradient_checkpointing_disable() or model.eval()"
            )
        if rows.why_bypassed is None:
            if state.regime and self.fingerprint.rope.now() != state.regime:
                rows.keep_less(rows.n - rows.num_new)  # the new columns have other frequencies than those before
            if self.has_deltas and rows.num_forwards == 1:
                state.deltas = RopeDeltas(self.model)
        if rows.copies is not None:
            self._spread(rows, rows.copies, output)
        self._count(rows)
        if rows.is_behind_handle and rows.handle is not None and (handle := rows.handle()) is not None:
            name = cache_argument(type(self.model))
            if getattr(output, name, None) is rows:
                setattr(output, name, handle)
        rows.must_confirm = not rows.in_generate or bool(state.regime)
        if not rows.in_generate and rows.why_bypassed is None:
            self.keep(rows)
        return output

    def _spread(self, rows: Rows, copies: Sequence[int], output: Any) -> None:
        """Let rows that ran for several rows of the batch become these rows, and the forward's logits theirs."""
        state, rows.copies = rows.state, None
        output.logits = output.logits.index_select(0, to_device(copies, output.logits.device))
        shared = share_prompt(rows, copies, self.looks) if rows.may_be_lazy and rows.captured is None else None
        moves.apply(rows, copies, shared=shared)
        if state.beams and not state.is_custom:
            rows.common_columns = rows.n  # beams of a prompt change place only among themselves

    def _count(self, rows: Rows) -> None:
        """Count a forward of a prompt that has returned; after the first one of all it is known what a block takes."""
        state = rows.state
        new, state.pending = state.pending, None
        if new is None:
            return
        begins = not state.counts
        # a loop may have more rows now, and a `generate` of the model's own call another one
        if len(state.counts) != len(new) or any(row.stopped != _RESUMED for row in new):
            state.counts = new
        else:
            for row, more in zip(state.counts, new, strict=True):
                row.prompt_tokens += more.prompt_tokens
                row.computed_tokens += more.computed_tokens
        if not self.store.budget.is_settled and rows.why_bypassed is None:
            with contextlib.suppress(torch.OutOfMemoryError):  # without memory nothing is kept
                lay_out(self.store, rows)
        with self.store.lock:
            self.counters.add_forward(state, new, begins=begins, bypassed=rows.why_bypassed is not None)
        self._note_bytes(rows)

    def _note_bytes(self, rows: Rows) -> None:
        """Note how many bytes blocks in use and the rows take now."""
        with self.store.lock:
            in_use = self.store.kv_bytes_in_use(self.salt)
        rows.state.kv_bytes = rows.kv_bytes
        rows.state.peak_kv_bytes = max(rows.state.peak_kv_bytes, in_use + rows.state.kv_bytes)

    def keep(self, rows: Rows) -> None:
        """Keep the rows' complete columns, as far as they may be kept.

        A prompt is kept once it is complete: other calls may need it while this call goes on.
        """
        state, store = rows.state, self.store
        rows.prompt_end = 0
        if not rows.is_open:
            return
        has_new = rows.is_source and rows.seen_same != rows.n
        rows.note_look(is_same=not has_new or self.is_same(rows))
        with store.lock:
            if store.resets_of(self.salt) != state.resets:
                rows.is_whole = False  # what was computed before the reset is to be forgotten
            elif has_new and rows.seen_same == rows.n:  # rows of earlier calls may be of earlier weights
                store.forget_other_weights(state.digest)
        keep_blocks(store, rows, state, self.salt)

    def keep_full(self, rows: Rows) -> None:
        """Keep rows before they change places and some are given up, if each has filled a block since last time."""
        size = self.store.block_size
        if rows.is_source and all(rows.n - row.pad >= row.kept + size for row in rows.prompts):
            self.keep(rows)

    def _leave_blocks(self, rows: Rows) -> None:
        """Let rows of a call that is over hold no blocks of a pool that has moved, or of which half is in use.

        Where memory is short they hold them, until the next call begins.
        """
        store, shared = self.store, rows.shared
        if shared is None or not shared.leases:
            return
        with store.lock:
            most, in_use = store.budget.num_blocks, store.allocator.num_blocks_in_use
            has_grown = store.pool.all.capacity != shared.num_pool_blocks
        if has_grown or (most is not None and 2 * in_use > most):
            with contextlib.suppress(torch.OutOfMemoryError):
                rows.make_dense()


def _require_whole_prompt(arguments: Mapping[str, Any]) -> None:
    """Refuse a first forward that is to use no cache, or has no mask and positions that do not begin at 0."""
    if arguments.get("use_cache") is False:
        raise CacheArgumentError(_NO_CACHE_WANTED)
    positions, first = arguments.get("position_ids"), 0
    if isinstance(positions, Tensor) and positions.dim() == 2 and positions.numel():
        first = int(positions[:, 0].min())
    if arguments.get("attention_mask") is None and first > 0:
        raise CacheArgumentError(
            f"the attention mask has {first} columns before the ids that are passed, and a generate that was looked up "
            "before the cache was built, or is called by another, does not go on with rows: pass the whole prompt"
        )


class Current:
    """`Current` holds the rows of a cache's last call, or of its running loop; `close` keeps and closes rows."""

    def __init__(self, store: BlockStore, salt: bytes, close: Callable[[Rows], None]) -> None:
        self._store, self.salt, self._close = store, salt, close
        self.rows: Rows | None = None  # None: before the first call, and after `reset()`
        self.is_unseen = False  # the next forward is the first of a `generate` that no bracket has seen
        with store.lock:
            store.currents.add(self)

    def take(self, *, unless_elsewhere: bool = False) -> Rows | None:
        """Return the rows, and hold them no longer.

        With `unless_elsewhere`, rows of a loop stay in which another thread goes on; None is returned.
        """
        with self._store.lock:  # of two calls that begin at once, only one gets the rows
            rows = self.rows
            is_elsewhere = rows is not None and rows.thread != threading.get_ident()
            if unless_elsewhere and is_elsewhere and self._is_loop_elsewhere():
                return None
            self.rows, self.is_unseen = None, False
        return rows

    def put(self, rows: Rows) -> None:
        """Take the rows of a `generate` that has ended, unless a loop in another thread has begun meanwhile."""
        with self._store.lock:
            held = self.rows
            if held is None or held.thread == threading.get_ident() or not self._is_loop_elsewhere():
                self.rows, self.is_unseen, rows.is_lent = rows, False, False  # lent also if an interrupt left it so

    def end(self) -> None:
        """End the rows; what a loop has completed is kept."""
        rows = self.take()
        if rows is not None:
            self._close(rows)

    @property
    def is_loop(self) -> bool:
        """True if the rows are those of a loop of forwards, which may go on."""
        rows = self.rows
        return rows is not None and rows.is_open and rows.state.kind == "forward"

    def _is_loop_elsewhere(self) -> bool:
        """Return whether the thread that ran the rows last runs, and has a loop on them."""
        rows, threads = self.rows, threading.enumerate()
        return rows is not None and self.is_loop and any(thread.ident == rows.thread for thread in threads)

    def lose_threads(self, idents: Collection[int]) -> None:
        """Forget threads that ended with a fork, and drop rows that one of them ran: these may be half written."""
        if self.rows is not None and self.rows.is_lost(idents):
            self.take()


def bytes_of_rows(held: Sequence[Rows | None], running: Sequence[Rows]) -> int:
    """Return the bytes of the last rows of caches, and of running rows as of their last forward of a prompt."""
    of_running: int = sum(rows.state.kv_bytes for rows in running)
    return of_running + sum(rows.kv_bytes for rows in held if rows is not None and rows not in running)


def forget(store: BlockStore, salt: bytes | None) -> None:
    """Forget the blocks and pins of a salt, or of all if it is None, and end the rows of its calls that are over.

    Where rows of a loop may resume, CacheBusyError is raised, and nothing has changed.
    """
    with store.lock:
        currents = [each for each in store.currents if salt in (None, each.salt)]
        if any(current.is_loop for current in currents):
            raise CacheBusyError(
                f"rows of plain forwards may resume {where_of(salt)}; reset the prefix cache when they have ended "
                "(rows of plain forwards end with their cache's reset())"
            )
        for rows in [*store.sharing]:  # also rows that a call has returned
            is_busy = rows.in_generate or rows.is_running or rows.is_lent
            if salt in (None, rows.calls.salt) and not is_busy:
                rows.make_dense()
        store.settle()
        store.forget(salt)
    for each in currents:
        each.end()
