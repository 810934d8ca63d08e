"""Opens, runs and closes the calls of one cache, each on rows of its own.

    open    the prompt is read, what is known of it is leased, rows are filled with it; the model runs the rest
    run     transformers alone
    keep    what is complete goes to the pool: the prompt once it is, the rest when the call closes

Refuses nothing for want of blocks. What is unusual about a call is a bypass: its rows reuse and keep nothing, and `last_call` says why.
"""

import contextlib
import logging
import math
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch

from ..attention.shared_reads import MODEL_LOOKS
from ..blocks.roots import RootFacts
from ..call.admission import UNLIMITED
from ..call.call_state import CallState
from ..call.counters import PromptCounters
from ..call.fill import fill
from ..call.keep import keep, lay_out
from ..call.match import Known, match, previous_rows
from ..call.record import count_bypassed, count_prompt
from ..call.rows import Rows as NoRows
from ..call.scheduled_forward import ForwardRequest, RowInput
from ..call.share import share_prompt
from ..errors import CacheArgumentError, CacheBusyError, ForwardMismatchError
from ..kv.stopwatch import Stopwatch
from ..kv.transfers import to_device
from ..model.cache_adapters import cache_argument
from ..model.conditioning import Conditioning
from ..model.support import cache_layers
from ..rows import memory
from ..rows.layers import SPARE
from ..rows.rows import Prompt, Rows
from ..rows.shared import Looks, SharedColumns
from ..store.block_store import BlockStore
from .begin import (
    NO_CACHE_WANTED,
    continues,
    prepares_otherwise,
    require_continues,
    require_may_begin,
    require_whole_prompt,
    running_rows,
)
from .capturing import Capturing
from .current import Current, drain
from .forward_arguments import ArgumentReader, for_scheduled, shape_of
from .generate_arguments import GenerateArguments
from .image_inputs import ImageInputs
from .running_generate import another_model
from .shared_prefill import SharedPrefill
from .side_forward import SideForwards

logger = logging.getLogger("hf_paged_cache")

_MOST_MAPPED_AHEAD = 4096  # columns, of prompts that are shorter
_GRADIENTS = (
    "gradients are on and may flow through every token (run the forward in torch.no_grad() where none are needed)"
)


class Cut(NamedTuple):
    """Which rows and columns of the first forward run: see `forward_arguments.Cut`."""

    start: int
    sources: Sequence[int]
    copies: Sequence[int] | None


class Calls:
    """The calls of one cache. Holds no rows, so that a cache that nobody holds is collected at once.

    Args:
        store: the blocks.
        conditioning: the model, and what its keys and values depend on.
        reader: of the forwards' arguments.
        image_inputs: says which arguments are types of text.
        salt: part of every root, and the namespace of the blocks.
        counters: of the cache.
        side: makes the arguments of forwards of our own.
        looks: whether the model looks at keys and values itself.
    """

    def __init__(
        self,
        store: BlockStore,
        conditioning: Conditioning,
        reader: ArgumentReader,
        image_inputs: ImageInputs,
        salt: bytes,
        counters: PromptCounters,
        side: SideForwards,
        looks: Looks,
    ) -> None:
        self.store, self.conditioning, self.reader, self.image_inputs = store, conditioning, reader, image_inputs
        self.salt, self.counters = salt, counters
        self.looks, self.model = looks, conditioning.model
        self._num_layers = len(cache_layers(conditioning.model))  # rows of a model that was changed since get more
        self.capturing: Capturing | None = None
        self._ahead = SharedPrefill(self, side)

    def new_rows(self) -> Rows:
        """Rows that no forward has run yet."""
        return Rows(self, self._num_layers, self.looks)

    # A generate.

    def begin(self, given: GenerateArguments, previous: Rows | None) -> Rows:
        """A `generate` begins; returns the rows that it is to run on.

        Args:
            previous: of the call before.
        """
        rows = self.new_rows()
        rows.in_generate, rows.previous = True, previous
        rows.state = self._state_of(given)
        rows.escaped = rows.state.is_custom  # it may give them to anybody
        rows.reads_all = rows.state.is_custom or prepares_otherwise(self.conditioning.model)
        return rows

    def begin_unseen(self, current: Current, arguments: Mapping[str, Any]) -> Rows:
        """A loop of forwards begins, or a `generate` that was looked up before the cache was attached: the rows that it runs on.

        Raises:
            CacheArgumentError: that `generate` uses no cache, so that each of its steps would be a whole prompt; or see
                `require_whole_prompt`.
        """
        aside, is_generate, current.is_in_unseen_generate = current.aside, current.is_in_unseen_generate, False
        if is_generate and arguments.get("use_cache") is False:
            raise CacheArgumentError(NO_CACHE_WANTED)
        if is_generate and aside is not None and continues(arguments, aside):
            current.rows = current.take()
            return aside
        if is_generate:
            require_whole_prompt(arguments, 0 if aside is None else aside.get_seq_length())
        rows = self.new_rows()
        rows.previous = current.take()
        if is_generate:
            rows.state = CallState("generate", UNLIMITED, beams=False, runs_only_forwards=False)
            rows.state.counts_more = False
        current.rows = rows
        return rows

    def resume(self, given: GenerateArguments, rows: Rows) -> None:
        """A `generate` of new tokens alone goes on with rows."""
        rows.in_generate = rows.reads_next = True
        before, rows.state = rows.state, self._state_of(given)
        if before is not None:
            rows.state.digest, rows.state.resets = before.digest, before.resets
        if rows.why_bypassed is None and self.conditioning.digest() != rows.state.digest:
            rows.judge(rows.n, held=False)  # what follows has no name
        rows.state.was_alone = not self.conditioning.may_change_in_a_forward()

    def begin_from(self, rows: Rows, model: Any, given: GenerateArguments) -> Rows:
        """A `generate` is passed rows that a call has returned.

        Raises:
            CacheArgumentError: see `require_may_begin` and `require_continues`.
        """
        require_may_begin(self.conditioning.model, model, given)
        if given.only_new_tokens:
            require_continues(given, rows.get_seq_length())
            self.resume(given, rows)
            return rows
        rows.escaped = True
        previous: Rows | None = rows
        if not rows.is_open:  # a function was given them that calls `generate` itself
            previous, rows.previous = rows.previous, None
        begun = self.begin(given, previous)
        begun.handle = rows.handle
        return begun

    def _state_of(self, given: GenerateArguments) -> CallState:
        beams = (given.num_beams or 1) > 1
        state = CallState("generate", given.limits, beams=beams, runs_only_forwards=not given.calls_back)
        state.is_custom = given.passed.get("custom_generate") is not None
        state.counts_more = not state.is_custom
        return state

    def _begin_captured(
        self, rows: Rows, request: ForwardRequest, adapters: list[str] | None, start: int, stop: int
    ) -> None:
        """The next forward runs the columns `[start, stop)`; it and those after it may be replays."""
        if self.capturing is None:
            return
        unusual = "adapters were given for each row" if adapters is not None else request.keep_columns
        if rows.state.is_custom:
            unusual = "custom_generate calls the model in its own way"
        elif rows.reads_all:
            unusual = "a function that is not transformers' says what each step is passed"
        most = rows.state.limits.max_columns
        said = self.capturing.begin(rows, len(request.rows), start, stop, max_columns=most, unusual=unusual)
        rows.state.captured = said if self.capturing.is_asked else ""

    def close(self, rows: Rows) -> None:
        """The call has ended, however: keep what is complete."""
        rows.roll_back()
        rows.previous, rows.in_generate, rows.common_columns = None, False, 0
        rows.must_confirm = True  # a forward that goes on
        try:
            if rows.is_open and rows.why_bypassed is None:
                self._keep(rows, rows.n, held=self._held_to_the_end(rows))
                if rows.shared is not None and self._is_crowded(rows.shared):
                    rows.make_dense()
        finally:
            if rows.captured is not None:
                rows.captured.close()
        if rows.is_open and rows.state is not None:
            with self.store.lock:
                in_use = self.store.kv_bytes_in_use(self.salt)
            rows.state.peak_kv_bytes = max(rows.state.peak_kv_bytes, in_use + rows.kv_bytes)
        if logger.isEnabledFor(logging.INFO) and rows.state is not None:
            reasons = "; ".join(f"row {number}: {row.stopped}" for number, row in enumerate(rows.state.counts))
            prompt = sum(row.prompt_tokens for row in rows.state.counts)
            reused = sum(row.reused_tokens for row in rows.state.counts)
            logger.info("reused %d of %d prompt tokens: %s", reused, prompt, reasons)

    def _is_crowded(self, shared: SharedColumns) -> bool:
        """Whether rows that are over had better hold no blocks: much of the pool is held, or it has grown, and they hold its old memory."""
        with self.store.lock:
            most, in_use = self.store.max_num_blocks, self.store.allocator.num_blocks_in_use
            lie_in = {tensor.untyped_storage().data_ptr() for tensor, _ in self.store.slabs()}
        return (most is not None and 2 * in_use > most) or not shared.lies_in(lie_in)

    # What rows ask.

    def open(
        self,
        rows: Rows,
        model: Any,
        arguments: Mapping[str, Any],
        *,
        may_run_ahead: bool = True,
        may_give_way: bool = True,
    ) -> Mapping[str, Any]:
        """The first forward of rows: let them begin with what is known, and cut it from the arguments.

        Where memory runs out, the rows of the call before are given up, then what the pool need not hold, and it is tried again.

        Raises:
            CacheArgumentError: the arguments contradict each other.
        """
        drain(self.store)
        if rows.state is None:
            rows.state = CallState("forward", UNLIMITED, beams=False, runs_only_forwards=True)
        state, conditioning = rows.state, self.conditioning
        state.seen = rows.seen
        state.digest, state.resets = conditioning.digest(), self._resets()
        state.was_alone = not conditioning.may_change_in_a_forward()
        rows.escaped = rows.escaped or conditioning.learns  # a hook of others may keep them
        seen = self.image_inputs.see(arguments, NoRows([], [], 0), None)
        request = self.reader.read(
            seen.plain,
            NoRows([], [], 0),
            in_generate=rows.in_generate,
            records_drafts=rows.records_drafts,
            by_default=conditioning.outputs,
        )
        adapters = conditioning.adapter_names()
        why = seen.why_whole or request.bypass or self._why_bypassed(adapters, len(request.rows))
        if why is not None:
            return self._bypass(rows, arguments, why, request)
        inputs = [self._with_root(state.digest, row, adapters, at) for at, row in enumerate(request.rows)]
        may_alias = request.may_alias and adapters is None
        members, copies = _distinct(inputs) if may_alias else ([*range(len(inputs))], [*range(len(inputs))])
        running = [inputs[member] for member in members]
        previous, rows.previous = rows.previous, None
        known: list[Known] = []
        has_changed = is_short = False
        try:
            with self.store.lock:
                self.store.settle()
                before = {} if previous is None or previous.state is None else previous.state.chains
                known = match(self.store, running, previous_rows(previous), before)
                self.store.pool.join_streams()
            num_found = [row.num_tokens for row in known]
            latest = request.latest_start(0, request.num_logits_needed)
            start, ahead = self._ahead.run(
                running, known, request, latest, arguments, previous, may_share=may_alias and may_run_ahead
            )
            has_changed = bool(ahead) and not self._held_so_far(rows)
            if not has_changed:
                self._ahead.keep(known)
                self._begin_captured(rows, request, adapters, start, request.num_new_columns)
                self._fill(rows, running, known, start, request.num_new_columns, previous, copies)
        except torch.OutOfMemoryError:
            if previous is None and not may_give_way:
                raise
            is_short = True
        finally:
            for row in known:
                if row.lease is not None:
                    with self.store.lock:
                        if not row.lease.is_freed:
                            row.lease.free()
        if is_short:
            rows.reset()
            if rows.captured is not None:
                rows.captured.close()  # it was for other columns
            if previous is None:
                may_give_way = False
                self.give_way(rows)
            previous, known = None, []  # nobody holds them any more
            return self.open(rows, model, arguments, may_run_ahead=False, may_give_way=may_give_way)
        if has_changed:  # what ran ahead is of another model
            rows.previous = previous
            return self.open(rows, model, arguments, may_run_ahead=False, may_give_way=may_give_way)
        are_aliased = len(members) < len(copies)
        rows.copies = copies if are_aliased else None
        if len(copies) > 1 and not rows.may_be_lazy:
            rows.seen.dense = MODEL_LOOKS
        elif len(copies) > 1 and rows.captured is not None:
            rows.seen.dense = "captured rows are read each by itself"
        state.counts = count_prompt(request, known, num_found, members, copies, start, ahead)
        state.pending = state.counts, True
        for row in known:
            held = state.chains.get(row.chain.root)
            if held is None or len(held) < len(row.chain):
                state.chains[row.chain.root] = row.chain
        with self.store.lock:
            is_warm, num_new = bool(self.store.writing_layers), request.num_new_columns - start
            if self.store.tiers.is_telling(num_new) and (is_warm or not self.store.pool.accelerators):
                # the first forward warms up, which takes long on an accelerator
                state.stopwatch = Stopwatch(self.store.pool.accelerators), num_new * len(running), not is_warm
        rows.prompt_end = request.num_new_columns if rows.in_generate else 0
        rows.common_columns = request.num_new_columns if state.beams and are_aliased else 0
        if not start and not are_aliased:
            return arguments
        return for_scheduled(arguments, Cut(start, members, rows.copies), 0, self.image_inputs.whole)

    def refuse(self, model: Any) -> NoReturn:
        """Raises CacheArgumentError: a forward of another model was passed these rows."""
        raise another_model(self.model, model)

    def require_not_running(self, rows: Rows) -> None:
        """Raises CacheBusyError while another thread runs a forward on the rows."""
        if any(thread.ident == rows.thread for thread in threading.enumerate()):
            raise CacheBusyError(
                "these rows are in a forward of another thread; call generate in each thread, which has rows of its own, or "
                "use one cache a thread: PagedPrefixCache(cache.store) shares all blocks"
            )

    def give_way(self, rows: Rows) -> None:
        """Memory is short, and these rows are given up: so is what the pool need not hold, and the arena."""
        if self.capturing is not None:
            self.capturing.give_way(rows)
        with self.store.lock:
            self.store.make_way()

    def go_on(self, rows: Rows, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """A forward of a loop, or the first one of a call that resumes: keep what is complete, and look whether it is a usual one."""
        rows.thread = threading.get_ident()
        is_prompt = rows.reads_next or not rows.in_generate
        reads = is_prompt or rows.reads_all or arguments.get("input_ids") is None
        rows.reads_next = False
        rows.roll_back()
        if not reads:
            return arguments
        if rows.why_bypassed is None:
            if not rows.in_generate:
                self._keep(rows, rows.n, held=True)  # as was looked when the last forward had returned
            running = running_rows(rows)
            seen = self.image_inputs.see(arguments, NoRows([], [], 0), None)
            request = self.reader.read(
                seen.plain,
                running,
                in_generate=rows.in_generate,
                records_drafts=rows.records_drafts,
                by_default=self.conditioning.outputs,
            )
            why = seen.why_whole or request.bypass or (_GRADIENTS if torch.is_grad_enabled() else None)
            if why is None:
                self._follow_padding(rows, request)
                if is_prompt:
                    self._count_more(rows, _num_shown(request))
                if is_prompt and rows.in_generate and rows.captured is None:
                    adapters = self.conditioning.adapter_names()
                    self._begin_captured(rows, request, adapters, rows.n, rows.n + request.num_new_columns)
                return arguments
            if rows.in_generate:
                self._keep(rows, rows.n, held=self._held_so_far(rows))
            return self._bypass(rows, arguments, why, request, is_prompt=is_prompt)
        if is_prompt:
            num_rows, num_new = shape_of(arguments, rows.get_seq_length())
            self._count_more(rows, [num_new] * num_rows)
        return arguments

    def _follow_padding(self, rows: Rows, request: ForwardRequest) -> None:
        """A row that has had nothing but padding may get more of it: it begins further right."""
        if any(prompt.pad != row.pad for prompt, row in zip(rows.prompts, request.rows, strict=True)):
            adapters = self.conditioning.adapter_names()
            inputs = [self._with_root(rows.state.digest, row, adapters, at) for at, row in enumerate(request.rows)]
            rows.prompts = [Prompt(row.root, row.pad, row.first_position) for row in inputs]

    def keep_prompt(self, rows: Rows) -> None:
        """The prompt is complete: others may need it while this call goes on."""
        stop, rows.prompt_end = rows.prompt_end, 0
        self._keep(rows, stop, held=self._held_so_far(rows))

    def keep_complete(self, rows: Rows) -> None:
        """Somebody gets keys and values of the rows, and may write to them: keep what is complete before that."""
        if rows.is_open and rows.state is not None:
            self._keep(rows, rows.n, held=self._held_to_the_end(rows))

    def keep_full(self, rows: Rows) -> None:
        """Rows change places, and some are given up: keep them where each has filled a block since."""
        size = self.store.block_size
        if rows.is_source and all(rows.n - row.pad >= row.kept + size for row in rows.prompts):
            rows.prompt_end = 0
            self._keep(rows, rows.n, held=self._held_so_far(rows))

    def confirm(self, rows: Rows, output: Any) -> Any:
        """A forward has returned: rows that ran for several become these."""
        state = rows.state
        if not any(layer.get_seq_length() for layer in rows.layers):
            rows.reset()
            raise ForwardMismatchError(
                "the forward did not write any layer: gradient "
                "checkpointing drops the cache; call model.gradient_checkpointing_disable() or model.eval()"
            )
        if rows.copies is not None:
            copies, rows.copies = rows.copies, None
            output.logits = output.logits.index_select(0, to_device(copies, output.logits.device))
            shared = share_prompt(rows, copies, self.looks) if rows.may_be_lazy and rows.captured is None else None
            if shared is not None:
                self._share_prompt(rows, shared, copies)
            else:
                rows.apply(copies)
        if state.pending is not None:
            (new, begins), state.pending = state.pending, None
            if not self.store.is_settled and rows.why_bypassed is None:
                with contextlib.suppress(torch.OutOfMemoryError):  # nothing is kept then
                    lay_out(self.store, rows)
            stopwatch, state.stopwatch = state.stopwatch, None
            if stopwatch is not None:
                stopwatch[0].stop()
            with self.store.lock:
                if stopwatch is not None:
                    self.store.tiers.record_computed(stopwatch[0], stopwatch[1], warms_up=stopwatch[2])
                if rows.why_bypassed is None and not self.store.writing_layers:
                    self.store.writing_layers = rows.written_streams()
                bypassed = rows.why_bypassed is not None
                self.counters.add_forward(state.kind, state.counts, new, begins=begins, bypassed=bypassed)
                in_use = self.store.kv_bytes_in_use(self.salt)
            state.peak_kv_bytes = max(state.peak_kv_bytes, in_use + rows.kv_bytes)
        if rows.handle is not None and (handle := rows.handle()) is not None:
            handle.note_call(state)
            name = cache_argument(self.conditioning.model)
            if rows.is_behind_handle and getattr(output, name, None) is rows:
                setattr(output, name, handle)
        rows.must_confirm = not rows.in_generate
        if not rows.in_generate and rows.why_bypassed is None:
            rows.judge(rows.n, held=self._held_so_far(rows))
        return output

    def _share_prompt(self, rows: Rows, shared: SharedColumns, copies: Sequence[int]) -> None:
        """Rows that ran for several become these: what they hold is theirs in common, and each goes on by itself."""
        n, limits, first = rows.n, rows.state.limits, shared.plan.first_own
        room = SPARE if math.isinf(limits.max_columns) else max(1, int(limits.max_columns) - n)
        index, held = memory.as_index(copies), rows.all_memory()
        room = n - first + min(room, n + SPARE)
        own = (
            memory.selected(held, index, n - first, room)
            if first < n
            else memory.make(memory.shapes_of_rows(held), len(copies), room)
        )
        rows.prompts = [rows.prompts[source].copy() for source in copies]
        rows.ids.select(index)
        rows.share(shared, own, n)

    def _resets(self) -> tuple[int, int]:
        with self.store.lock:
            return self.store.resets_of(self.salt)

    def note_sharing(self, rows: Rows) -> None:
        """Rows have columns in common from here on, some of which may lie in blocks."""
        with self.store.lock:
            self.store.sharing.add(rows)

    # Their parts.

    def _why_bypassed(self, adapters: list[str] | None, num_rows: int) -> str | None:
        if (why := self.conditioning.bypass()) is not None:
            return why
        if adapters is not None and len(adapters) != num_rows:
            return f"{len(adapters)} adapter names were given for {num_rows} rows; pass one for each row"
        return _GRADIENTS if torch.is_grad_enabled() else None

    def _with_root(self, digest: bytes, row: RowInput, adapters: list[str] | None, at: int) -> RowInput:
        counted_from = row.pad
        if self.reader.takes_positions:
            counted_from = self.conditioning.state_traits.root_padding(row.pad)
        adapter = "" if adapters is None else adapters[at]
        facts = RootFacts(digest, self.salt, b"", adapter, counted_from, row.first_position)
        return row._replace(root=self.conditioning.roots.of(facts), salt=self.salt)

    def _bypass(
        self, rows: Rows, arguments: Mapping[str, Any], why: str, request: ForwardRequest, *, is_prompt: bool = True
    ) -> Mapping[str, Any]:
        """From here on the rows run on transformers' own layers."""
        begins, rows.previous = not rows.is_open, None
        rows.bypass(why, list(cache_layers(self.conditioning.model)))
        said = why if begins else f"; then {why}"
        state = rows.state
        if begins:
            state.counts = count_bypassed(_num_shown(request), said)
            state.pending = state.counts, True
        else:
            for row in state.counts:
                row.stopped += said
            if is_prompt:
                self._count_more(rows, _num_shown(request))
        return arguments

    def _count_more(self, rows: Rows, num_tokens: Sequence[int]) -> None:
        """More of a prompt runs in rows that have begun."""
        state = rows.state
        if not state.counts_more:
            return
        new = count_bypassed(num_tokens, "")
        begins = len(state.counts) != len(new)
        if begins:
            state.counts = count_bypassed([0] * len(new), "the last call's rows resumed")
        for row, more in zip(state.counts, new, strict=False):
            row.prompt_tokens += more.prompt_tokens
            row.computed_tokens += more.computed_tokens
        state.pending = new, begins
        rows.must_confirm = True

    def fill_ahead(
        self,
        rows: Rows,
        inputs: Sequence[RowInput],
        known: Sequence[Known],
        start: int,
        stop: int,
        previous: Rows | None,
    ) -> None:
        """Let rows that run ahead begin with their columns before `start`; they run to column `stop`."""
        self._may_be_lazy(rows)
        fill(self.store, rows, inputs, known, start, stop, previous)

    def _fill(
        self,
        rows: Rows,
        inputs: Sequence[RowInput],
        known: Sequence[Known],
        start: int,
        stop: int,
        previous: Rows | None,
        copies: Sequence[int],
    ) -> None:
        most = rows.state.limits.max_columns
        # on an accelerator every byte is taken when it is asked for; a host may refuse to map what nobody would have written
        ahead = max(256, stop // 4) if self.store.pool.accelerators else max(_MOST_MAPPED_AHEAD, stop)
        wanted = stop + SPARE if math.isinf(most) else min(max(stop, int(most)), stop + ahead)
        self._may_be_lazy(rows)
        fill(self.store, rows, inputs, known, start, wanted, previous, copies=copies, takes_over=True)

    def _may_be_lazy(self, rows: Rows) -> None:
        rows.may_be_lazy = self.conditioning.attention == "sdpa" and not self.looks.model_looks

    def _keep(self, rows: Rows, stop: int, *, held: bool) -> None:
        """Keep the columns before `stop`, if the model was as it is."""
        rows.judge(stop, held=held)
        if rows.state is not None and rows.state.resets != self._resets():
            rows.is_whole = False  # what was computed before is to be forgotten
        state, stop = rows.state, min(stop, rows.num_true_columns)
        chains = {} if state is None else state.chains
        limits = UNLIMITED if state is None else state.limits
        prompt = 0 if math.isinf(limits.num_prompt_columns) else int(limits.num_prompt_columns)
        digest = b"" if state is None else state.digest

        def make_room(num_blocks: int) -> None:
            roots = partial(self.conditioning.roots_of_other_weights, digest)
            self.store.forget_other_weights(digest, num_blocks, roots)

        keep(self.store, rows, stop, self.salt, chains, limits.end_of_sequence, prompt, make_room)

    def keep_ahead(self, rows: Rows) -> None:
        """Keep what rows that run ahead have computed."""
        keep(self.store, rows, rows.n, self.salt, {})

    def _held_so_far(self, rows: Rows) -> bool:
        """Whether the model is what it was as the rows began."""
        state = rows.state
        # between forwards code of the caller runs
        if rows.num_forwards <= 1 and state.was_alone and not self.conditioning.may_change_in_a_forward():
            return True
        reads_devices = not self.store.pool.accelerators
        digest = self.conditioning.digest(after_forward=state.runs_only_forwards, reads_devices=reads_devices)
        return bool(digest == state.digest)

    def _held_to_the_end(self, rows: Rows) -> bool:
        """The same at the end of a call, which may have run code of others between its forwards."""
        state = rows.state
        if not rows.is_source or rows.judged == rows.n:
            return True
        if rows.num_forwards == 1 and state.was_alone and not self.conditioning.may_change_in_a_forward():
            return True
        return bool(self.conditioning.digest(after_forward=state.runs_only_forwards) == state.digest)


def _num_shown(request: ForwardRequest) -> list[int]:
    """Tokens of each row that its mask shows."""
    return [len(row.token_ids) - row.num_hidden for row in request.rows]


def _distinct(rows: Sequence[RowInput]) -> tuple[list[int], list[int]]:
    """Rows that differ, by their numbers; and for each row the place among these of the one that is equal to it."""
    places: dict[tuple[bytes, int, bytes], int] = {}
    members, copies = list[int](), list[int]()
    for number, row in enumerate(rows):
        key = (row.root, row.pad, row.token_ids.tobytes())
        if key not in places:
            places[key] = len(members)
            members.append(number)
        copies.append(places[key])
    return members, copies
