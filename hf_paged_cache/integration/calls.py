"""Opens, runs and closes the calls of one cache, each on rows of its own.

    open    the prompt is read, what is known of it is leased, rows are filled with it; the model runs the rest
    run     transformers alone
    keep    complete columns go to the pool: the prompt once it is complete, the rest when the call closes

No call is refused for want of blocks. An unusual call is bypassed: its rows reuse and keep nothing, and `last_call`
says why.
"""

import contextlib
import copy
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..call.counters import count_bypassed
from ..call.keep import lay_out
from ..call.share import share_prompt
from ..errors import CacheArgumentError, CacheBusyError, ForwardMismatchError, PagedCacheError
from ..kv.tensors import to_device
from ..model.rope import RopeDeltas
from ..model.support import cache_argument, require_layer_adapters
from ..rows.layers import SPARE
from ..rows.request import CallState, ForwardRequest
from ..rows.rows import Prompt, Rows
from ..rows.shared import SharedColumns
from .asking import GRADIENTS, read, require_filled, with_roots
from .chunked_prompt import chunked_prompt, require_slices
from .forward_arguments import shape_of
from .generate_arguments import GenerateArguments
from .keeping import keep_full_rows, keep_rows, leave_blocks
from .opening import begin_captured, begin_chunks, bypass, open_rows
from .parts import CallParts

RAN_ELSEWHERE = (
    "generate ran no forward with the cache: some models leave it out at the length from which on their "
    "rotary frequencies are others"
)
NO_CACHE_WANTED = (
    "generate was passed this cache, and use_cache is False, given or by generation_config: it would run the whole "
    "prompt again in each step, after what the cache holds; pass use_cache=True, or no cache"
)


class Calls(CallParts):
    """`Calls` opens, runs and closes the calls of one cache."""

    # Calls of `generate`.

    def begin(self, given: GenerateArguments, previous: Rows | None) -> Rows:
        """Begin a `generate` after the rows of the call before, and return the rows that it is to run on."""
        rows = self.new_rows()
        rows.in_generate, rows.previous, rows.state = True, previous, self._state_of(given)
        rows.escaped = rows.state.is_custom  # custom code may give the rows to anybody
        rows.reads_all = rows.state.is_custom or prepares_otherwise(self.model)
        if (
            given.chunk_size is not None
            and not given.is_own
            and (chunked := chunked_prompt(self.model, given)) is not None
        ):
            begin_chunks(self, rows, chunked, given)
            if rows.state.pending is not None:
                self._count_pending(rows)
        return rows

    def begin_from(self, rows: Rows, model: Any, given: GenerateArguments) -> Rows:
        """Begin a `generate` that is passed rows which a call has returned; return the rows that it is to run on."""
        require_may_begin(self.model, model, given)
        if given.only_new_tokens:
            require_continues(given, rows.get_seq_length())
            self.resume(given, rows)
            return rows
        rows.escaped = True
        previous: Rows | None = rows
        if not rows.is_open:  # the rows were given to a function that calls `generate` itself
            previous, rows.previous = rows.previous, None
        begun = self.begin(given, previous)
        begun.handle = rows.handle
        return begun

    def begin_side(self, kind: str) -> Rows:
        """Begin a call of ours, and return the rows that its forwards are to run on."""
        rows = self.new_rows()
        rows.in_generate, rows.state = True, CallState(kind, counts_more=False)
        return rows

    def begin_loop(self, *, is_unseen: bool) -> Rows:
        """Begin a loop of forwards, or a `generate` that no bracket has seen; return its rows."""
        rows = self.new_rows()
        rows.state = CallState("generate" if is_unseen else "forward", counts_more=not is_unseen, is_unseen=is_unseen)
        return rows

    def begin_again(self, rows: Rows) -> None:
        """Let rows begin anew: a function in the place of `generate` calls transformers' once more on them."""
        self.close(rows)
        rows.reset()
        rows.in_generate = True

    def resume(self, given: GenerateArguments, rows: Rows) -> None:
        """Let a `generate` of new tokens alone go on with rows."""
        self.ranks.settle_resumption(rows.get_seq_length(), given.num_given)
        rows.in_generate = rows.reads_next = True
        rows.is_passed = False
        before, rows.state = rows.state, self._state_of(given)
        state = rows.state
        for name in ("digest", "resets", "regime", "deltas", "adapters"):
            setattr(state, name, getattr(before, name))
        if rows.why_bypassed is None and self.fingerprint.digest() != state.digest:
            rows.note_look(is_same=False)  # what follows under a changed model is not kept
        state.was_alone = not self.fingerprint.may_change_in_a_forward()
        state.calls_back = state.calls_back or self.fingerprint.own_forward is not None
        if state.deltas is not None:  # modules hold the deltas of whichever call ran last
            state.deltas.put_back([*range(len(rows.prompts))], len(rows.prompts))

    def fork(self, rows: Rows, sources: Sequence[int]) -> Rows:
        """Make rows that go on beside `rows`, row `i` from row `sources[i]`; where that pays, they read in place."""
        index = torch.tensor(sources, dtype=torch.int64, device="cpu")
        if rows.why_bypassed is None:
            shared = share_prompt(rows, sources, self.looks) if rows.may_be_lazy and len(sources) > 1 else None
            forked = rows.forked(index, shared)
        else:
            forked = copy.deepcopy(rows)
            forked.apply(index)
        forked.in_generate, forked.calls = True, self
        if forked.state is not None:
            forked.state.counts_more = False
        return forked

    def _state_of(self, given: GenerateArguments) -> CallState:
        """Return the state of a `generate` that begins."""
        images = None
        if self.image_inputs.takes_images and given.chunk_size is None and not given.is_own:
            images = self.image_inputs.read(given.passed)
        return CallState(
            "generate",
            given.limits,
            beams=(given.num_beams or 1) > 1,
            is_custom=given.is_custom,
            is_unseen=given.is_own,
            calls_back=given.calls_back or given.is_custom,
            counts_more=not given.is_custom,
            is_in_step=given.synced_gpus,
            images=None if isinstance(images, str) else images,
        )

    def close(self, rows: Rows) -> None:
        """End a call, however it ended, and keep what is complete."""
        rows.roll_back()
        rows.previous = None
        rows.in_generate, rows.common_columns = False, 0
        rows.must_confirm = True  # a forward may go on with the rows
        try:
            if rows.is_open and rows.why_bypassed is None:
                self.keep(rows)
                leave_blocks(self, rows)
        finally:
            if rows.captured is not None:
                rows.captured.close()
        if rows.is_open and rows.state is not None:
            self._note_bytes(rows)

    def note_elsewhere(self, rows: Rows, given: GenerateArguments) -> None:
        """Count a `generate` that ran no forward on the rows it was passed, and give up the rows of the call before."""
        if rows.state.is_custom:  # custom code may have called `generate` itself, on other rows
            return
        rows.previous = None
        counts = count_bypassed([given.num_given] * max(1, given.limits.num_rows), RAN_ELSEWHERE)
        with self.store.lock:
            self.counters.add_call("generate", counts, 0, bypassed=True)

    # Methods that rows call.

    keep, keep_full = keep_rows, keep_full_rows

    def refuse(self, model: Any) -> NoReturn:
        """Raise CacheArgumentError: a forward of another model was passed these rows."""
        raise another_model(self.model, model)

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
                require_whole_prompt(arguments)
            try:
                return open_rows(self, rows, arguments)
            except torch.OutOfMemoryError:
                if self.fingerprint.rank_groups:
                    raise
            # here nobody holds the rows of the call before any more
            rows.reset()
            self.give_way(rows)
            return open_rows(self, rows, arguments, may_run_ahead=False)
        except Exception as error:
            self.ranks.tell_refusal(error)
            raise

    def give_way(self, rows: Rows) -> None:
        """Give up the arena, and what the pool need not hold, when memory is short and these rows are given up."""
        if rows.captured is not None:
            rows.captured.close()
        self.capturing.give_way(rows)
        with self.store.lock:
            self.store.make_way()

    def go_on(self, rows: Rows, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Get ready for a forward of a loop, or the first forward of a call that resumes; return its arguments."""
        rows.thread = threading.get_ident()
        is_prompt = rows.reads_next or not rows.in_generate
        reads = is_prompt or rows.reads_all or arguments.get("input_ids") is None
        rows.reads_next = False
        rows.roll_back()
        if not rows.in_generate:
            self.ranks.is_settled = False
        try:
            if reads and rows.why_bypassed is None:
                return self._read_on(rows, arguments, is_prompt=is_prompt)
            if is_prompt:
                self._count_on_a_bypass(rows, arguments)
        except PagedCacheError as error:
            if not rows.in_generate:
                self.ranks.tell_refusal(error)
            raise
        return arguments

    def _read_on(self, rows: Rows, arguments: Mapping[str, Any], *, is_prompt: bool) -> Mapping[str, Any]:
        """Read a forward of rows that go on; return what it is to run with.

        From an unusual forward on, rows are bypassed.
        """
        request, why, _ = read(self, rows, arguments)
        if rows.chunks is not None:
            self._go_on_in_chunks(rows, request, why)
        if not rows.in_generate:
            self.ranks.settle(rows, request)
        why = why or (GRADIENTS if torch.is_grad_enabled() else None)
        if why is not None:
            self.keep(rows)
            arguments = bypass(self, rows, arguments, why)
            for row in rows.state.counts:
                row.stopped += f"; then {why}"
            with self.store.lock:
                self.counters.note_bypass()
        elif any(prompt.pad != row.pad for prompt, row in zip(rows.prompts, request.rows, strict=True)):
            inputs = with_roots(self, rows.state, request)  # rows of padding alone get more of it
            rows.prompts = [Prompt(row.root, row.pad, row.first_position, row.shift) for row in inputs]
        if is_prompt:
            self._count_more(rows, [len(row.token_ids) for row in request.rows])
            may_capture = rows.in_generate and rows.captured is None and rows.chunks is None
            if why is None and may_capture and self.capturing.is_asked:
                begin_captured(self, rows, request, rows.n, rows.n + request.num_new_columns)
        return arguments

    def _count_on_a_bypass(self, rows: Rows, arguments: Mapping[str, Any]) -> None:
        """Count more of a prompt, which runs in bypassed rows."""
        before = rows.get_seq_length()
        if not rows.in_generate:
            require_filled(self, arguments, before)
        num_rows, num_new = shape_of(arguments, before)
        self._count_more(rows, [num_new] * num_rows)
        if rows.chunks is not None:  # another chunk of the prompt may follow
            rows.reads_next = before + num_new < rows.state.limits.num_prompt_columns

    def _go_on_in_chunks(self, rows: Rows, request: ForwardRequest, why_bypassed: str | None) -> None:
        """Check that the next chunk of a prompt continues the rows, and note whether more chunks follow."""
        state, stop = rows.state, rows.n + request.num_new_columns
        if not rows.num_forwards:
            inputs = with_roots(self, state, request)
            state.chunked.require(replace(request, rows=tuple(inputs), bypass=why_bypassed), rows.n)
        rows.reads_next = stop < state.limits.num_prompt_columns and not math.isinf(state.limits.num_prompt_columns)

    def _count_more(self, rows: Rows, num_tokens: Sequence[int]) -> None:
        """Count more tokens of a prompt, which run in rows that have begun."""
        state = rows.state
        if not state.counts_more:
            return
        new = count_bypassed(num_tokens, "")
        begins = not state.counts
        if len(state.counts) != len(new):
            state.counts = count_bypassed([0] * len(new), "the last call's rows resumed")
        for row, more in zip(state.counts, new, strict=True):
            row.prompt_tokens += more.prompt_tokens
            row.computed_tokens += more.computed_tokens
        state.pending = new, begins
        rows.must_confirm = True

    def confirm(self, rows: Rows, output: Any) -> Any:
        """Confirm a forward that has returned: rows that ran for several rows of the batch become these rows."""
        state = rows.state
        if not rows.is_written:
            rows.reset()
            raise ForwardMismatchError(
                "the forward did not write any layer: gradient "
                "checkpointing drops the cache; call model.gradient_checkpointing_disable() or model.eval()"
            )
        if rows.why_bypassed is None and state.regime and self.fingerprint.rope.now() != state.regime:
            rows.keep_less(rows.n - rows.num_new)  # the new columns have other frequencies than those before
        if rows.why_bypassed is None and self.has_deltas and rows.num_forwards == 1:
            state.deltas = RopeDeltas(self.model)
        if rows.copies is not None:
            self._spread(rows, rows.copies, output)
        if state.pending is not None:
            self._count_pending(rows)
        if rows.is_behind_handle and rows.handle is not None and (handle := rows.handle()) is not None:
            name = cache_argument(self.model)
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
        if shared is not None:
            _share(rows, shared, copies)
        else:
            rows.apply(copies)
        if state.beams and not state.is_custom:
            rows.common_columns = rows.n  # beams of a prompt change place only among themselves

    def _count_pending(self, rows: Rows) -> None:
        """Count a forward of a prompt that has returned; after the first one of all it is known what a block takes."""
        state = rows.state
        (new, begins), state.pending = state.pending, None
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

    def note_sharing(self, rows: Rows) -> None:
        """Note that rows share columns from here on; some of these may lie in blocks."""
        with self.store.lock:
            self.store.sharing.add(rows)


def _share(rows: Rows, shared: SharedColumns, copies: Sequence[int]) -> None:
    """Turn rows that ran for several rows of the batch into these; they share what was computed and go on apart."""
    n, index, most = rows.n, torch.tensor(copies, device="cpu"), rows.state.limits.max_columns
    spare = SPARE if math.isinf(most) else min(max(1, int(most) - n), n + SPARE)
    own = rows.selected(index, shared.plan.first_own, spare)
    rows.prompts = [copy.copy(rows.prompts[source]) for source in copies]
    for group in rows.windows.values():
        group.select(index, n, 0)
    if rows.states is not None:
        rows.states.select(index)
    rows.ids.select(index)
    rows.share(shared, own, n)


def require_whole_prompt(arguments: Mapping[str, Any]) -> None:
    """Refuse a first forward that is to use no cache, or has no mask and positions that do not begin at 0."""
    if arguments.get("use_cache") is False:
        raise CacheArgumentError(NO_CACHE_WANTED)
    positions, first = arguments.get("position_ids"), 0
    if isinstance(positions, Tensor) and positions.dim() == 2 and positions.numel():
        first = int(positions[:, 0].min())
    if arguments.get("attention_mask") is None and first > 0:
        raise CacheArgumentError(
            f"the attention mask has {first} columns before the ids that are passed, and a generate that was looked up "
            "before the cache was built, or is called by another, does not go on with rows: pass the whole prompt"
        )


def require_may_begin(model: Any, running: Any, given: GenerateArguments) -> None:
    """Refuse a `generate` of another model, under adapters that do more than change layers, or on another cache."""
    if running is not model:
        raise another_model(model, running)
    require_layer_adapters(running)
    if given.cache_implementation is not None:
        raise CacheArgumentError(
            f"cache_implementation={given.cache_implementation!r} asks transformers for a cache of its own; "
            "leave it out, or leave past_key_values out"
        )


def require_continues(given: GenerateArguments, num_held: int) -> None:
    """Refuse a `generate` of new tokens alone that does not resume exactly where the rows stopped.

    This is checked here because a mask of ones never reaches the forward.
    """
    require_slices(given)
    if given.num_masked != num_held + given.num_given:
        raise CacheArgumentError(
            f"the attention mask has {given.num_masked} columns, the cache {num_held} and the ids {given.num_given}: "
            "pass the whole prompt, or ids that continue exactly where the rows stopped (the last token generated is "
            "not among them)"
        )


def prepares_otherwise(model: Any) -> bool:
    """Return whether a function that is not transformers' own decides what each step is passed."""
    for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation"):
        module = getattr(getattr(type(model), name, None), "__globals__", {}).get("__name__", "")
        if name in vars(model) or str(module).partition(".")[0] != "transformers":
            return True
    return False


def another_model(own: Any, other: Any) -> CacheArgumentError:
    """Return the error for a cache that was given to another model."""
    return CacheArgumentError(
        f"this cache was built for another model ({type(own).__name__} elsewhere in memory); build "
        f"one for this {type(other).__name__}: PagedPrefixCache(model)"
    )
