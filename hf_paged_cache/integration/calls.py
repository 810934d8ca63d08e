"""Opens, runs and closes the calls of one cache, each on rows of its own.

    open    the prompt is read, what is known of it is leased, rows are filled with it; the model runs the rest
    run     transformers alone
    keep    what is complete goes to the pool: the prompt once it is, the rest when the call closes

Refuses nothing for want of blocks. What is unusual about a call is a bypass: its rows reuse and keep nothing, and `last_call` says why.
"""

import logging
import math
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..attention.shared_reads import MODEL_LOOKS
from ..blocks import HashChain
from ..blocks.roots import RootFacts
from ..call.admission import UNLIMITED, CallLimits
from ..call.counters import PromptCounters
from ..call.keep import keep, lay_out
from ..call.match import Known, match, previous_rows
from ..call.record import count_bypassed, count_prompt
from ..call.rows import Rows as NoRows
from ..call.share import share_known, share_prompt
from ..call.scheduled_forward import ForwardRequest, RowInput
from ..errors import CacheArgumentError
from ..kv.transfers import to_device
from ..model.cache_adapters import cache_argument
from ..model.conditioning import Conditioning
from ..model.support import cache_layers, require_layer_adapters
from ..rows import memory
from ..rows.layers import SPARE
from ..rows.rows import Prompt, Rows
from ..rows.shared import Looks, Seen, SharedColumns
from ..stats import RowCount
from ..store.block_store import BlockStore
from .capturing import Capturing
from .forward_arguments import ArgumentReader, for_scheduled, shape_of
from .generate_arguments import GenerateArguments
from .image_inputs import ImageInputs
from .running_generate import another_model
from .shared_prefill import SharedPrefill
from .side_forward import SideForwards

logger = logging.getLogger("hf_paged_cache")

_GRADIENTS = (
    "gradients are on and may flow through every token (run the forward in torch.no_grad() where none are needed)"
)
_WITHOUT = "computed without the store"


class Cut(NamedTuple):
    """Which rows and columns of the first forward run: see `forward_arguments.Cut`."""

    start: int
    sources: Sequence[int]
    copies: Sequence[int] | None


class CallState:
    """What is remembered of a call while it runs.

    Attributes:
        digest: of the model, as its rows began.
        was_alone: nobody could change the model then.
        counts: a line for each row of the batch.
        peak_kv_bytes: the most that blocks in use and rows took.
    """

    def __init__(self, kind: str, limits: CallLimits, *, beams: bool, runs_only_forwards: bool) -> None:
        self.kind, self.limits, self.beams, self.runs_only_forwards = kind, limits, beams, runs_only_forwards
        self.digest = b""
        self.was_alone = False
        self.num_forwards = 0
        self.counts: list[RowCount] = []
        self.pending: tuple[list[RowCount], bool] | None = None  # of the running forward, and whether the call begins with it
        self.chains: dict[bytes, HashChain] = {}
        self.peak_kv_bytes = 0
        self.seen = Seen()
        self.captured: object = ""  # how its forwards ran, as text
        self.is_custom = False  # a function of one's own runs it

    @property
    def read_once(self) -> tuple[int, int, str]:
        """Tokens that attention read once at a time, for how many rows, and why not all of the time."""
        return self.seen.tokens, self.seen.rows, self.seen.dense


class Current:
    """The rows of a cache's last call, or of its running loop; and what was counted of it."""

    def __init__(self, calls: "Calls") -> None:
        self._calls = calls
        self._rows: Rows | None = None
        self._aside: Rows | None = None  # of the call before one that has not opened its rows yet
        self.last: CallState | None = None
        calls.store.currents.add(self)

    @property
    def salt(self) -> bytes:
        """Of the cache."""
        return self._calls.salt

    def end(self) -> None:
        """The rows end; what a loop has completed is kept."""
        rows = self.take()
        if rows is not None:
            self._calls.close(rows)

    @property
    def rows(self) -> Rows | None:
        """None before the first call, and after `reset()`."""
        return self._rows

    @rows.setter
    def rows(self, rows: Rows | None) -> None:
        self._rows = rows

    def set_aside(self) -> None:
        """Another call begins, of which nothing is known yet: its rows may go on where these stop."""
        self._aside = self.take()
        if self._aside is not None:
            self._calls.close(self._aside)

    def take(self) -> Rows | None:
        """The rows, which are somebody else's from here on."""
        rows, self._rows, self._aside = self._rows or self._aside, None, None
        return rows

    def leave(self, left: deque[Any]) -> None:
        """The cache was collected: what a loop has computed may be kept yet, by whoever calls next."""
        rows = self.take()
        if rows is not None and rows.is_source:
            size = rows.calls.store.block_size
            if any(rows.n - prompt.pad - prompt.kept >= size for prompt in rows.prompts):
                left.append(rows)


class RunningRow(NamedTuple):
    """A row of a loop, as the reader of arguments asks of it."""

    pad: int
    first_position: int
    num_tokens: int
    commit_end: int | None


class RunningRows(NamedTuple):
    """The rows of a loop."""

    num_columns: int
    rows: list[RunningRow]

    def in_batch(self) -> list[RunningRow]:
        """All of them."""
        return self.rows


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
        self.looks = looks
        self.capturing: Capturing | None = None
        self._ahead = SharedPrefill(self, side)

    def new_rows(self) -> Rows:
        """Rows that no forward has run yet."""
        rows = Rows(self, len(cache_layers(self.conditioning.model)))
        rows.looks = self.looks
        return rows

    # A generate.

    def begin(self, given: GenerateArguments, previous: Rows | None) -> Rows:
        """A `generate` begins; returns the rows that it is to run on.

        Args:
            previous: of the call before.
        """
        rows = self.new_rows()
        rows.in_generate, rows.previous = True, previous
        rows.state = self._state_of(given)
        return rows

    def resume(self, given: GenerateArguments, rows: Rows) -> None:
        """A `generate` of new tokens alone goes on with rows."""
        rows.in_generate = rows.reads_next = True
        before, rows.state = rows.state, self._state_of(given)
        rows.state.digest = b"" if before is None else before.digest
        if rows.why_bypassed is None and self.conditioning.digest() != rows.state.digest:
            rows.is_whole = False  # it goes on as it is, and has no name
        rows.state.was_alone = not self.conditioning.may_change_in_a_forward()

    def _state_of(self, given: GenerateArguments) -> CallState:
        beams = (given.num_beams or 1) > 1
        state = CallState("generate", given.limits, beams=beams, runs_only_forwards=not given.calls_back)
        state.is_custom = given.passed.get("custom_generate") is not None
        return state

    def _begin_captured(self, rows: Rows, request: ForwardRequest, adapters: list[str] | None, start: int, stop: int) -> None:
        """The next forward runs the columns `[start, stop)`; it and those after it may be replays."""
        if self.capturing is None:
            return
        unusual = "adapters were given for each row" if adapters is not None else request.keep_columns
        if rows.state.is_custom:
            unusual = "custom_generate calls the model in its own way"
        most = rows.state.limits.max_columns
        said = self.capturing.begin(rows, len(request.rows), start, stop, max_columns=most, unusual=unusual)
        rows.state.captured = said if self.capturing.is_asked else ""

    def close(self, rows: Rows) -> None:
        """The call has ended, however: keep what is complete."""
        rows.roll_back()
        rows.previous, rows.in_generate = None, False
        try:
            if rows.is_open and rows.why_bypassed is None:
                self._keep(rows, rows.n, held=self._held_to_the_end(rows))
        finally:
            if rows.captured is not None:
                rows.captured.close()
        if logger.isEnabledFor(logging.INFO) and rows.state is not None:
            reasons = "; ".join(f"row {number}: {row.stopped}" for number, row in enumerate(rows.state.counts))
            prompt = sum(row.prompt_tokens for row in rows.state.counts)
            reused = sum(row.reused_tokens for row in rows.state.counts)
            logger.info("reused %d of %d prompt tokens: %s", reused, prompt, reasons)

    # What rows ask.

    def open(self, rows: Rows, model: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """The first forward of rows: let them begin with what is known, and cut it from the arguments.

        Raises:
            CacheArgumentError: the arguments contradict each other.
        """
        if model is not self.conditioning.model:
            raise another_model(self.conditioning.model, model)
        self.drain()
        if rows.state is None:
            rows.state = CallState("forward", UNLIMITED, beams=False, runs_only_forwards=True)
        state, conditioning = rows.state, self.conditioning
        state.seen = rows.seen
        state.digest = conditioning.digest()
        state.was_alone = not conditioning.may_change_in_a_forward()
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
            return self._bypass(rows, arguments, why)
        inputs = [self._with_root(state.digest, row, adapters, at) for at, row in enumerate(request.rows)]
        may_alias = request.may_alias and adapters is None
        members, copies = _distinct(inputs) if may_alias else ([*range(len(inputs))], [*range(len(inputs))])
        running = [inputs[member] for member in members]
        previous, rows.previous = rows.previous, None
        try:
            with self.store.lock:
                self.store.settle()
                known = match(self.store, running, previous_rows(previous))
            num_found = [row.num_tokens for row in known]
            latest = request.latest_start(0, request.num_logits_needed)
            start, ahead = self._ahead.run(running, known, request, latest, arguments, previous, may_share=may_alias)
            self._begin_captured(rows, request, adapters, start, request.num_new_columns)
            self._fill(rows, running, known, start, request.num_new_columns, previous)
        finally:
            for row in known:
                with self.store.lock:
                    if not row.lease.is_freed:
                        row.lease.free()
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
        rows.prompt_end = request.num_new_columns if rows.in_generate else 0
        rows.common_columns = request.num_new_columns if state.beams and are_aliased else 0
        if not start and not are_aliased:
            return arguments
        return for_scheduled(arguments, Cut(start, members, rows.copies), 0, self.image_inputs.whole)

    def go_on(self, rows: Rows, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """A forward of a loop, or the first one of a call that resumes: keep what is complete, and look whether it is a usual one."""
        reads, rows.reads_next, state = rows.reads_next or not rows.in_generate, False, rows.state
        rows.roll_back()
        if not reads:
            return arguments
        if rows.why_bypassed is None:
            if state.digest and not rows.in_generate:
                self._keep(rows, rows.n, held=self._held_to_the_end(rows))
            running = RunningRows(
                rows.n,
                [RunningRow(p.pad, p.first_position, max(0, rows.n - p.pad), None) for p in rows.prompts],
            )
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
                self._count_more(rows, [len(row.token_ids) - row.num_hidden for row in request.rows])
                if rows.in_generate and rows.captured is None:
                    adapters = self.conditioning.adapter_names()
                    self._begin_captured(rows, request, adapters, rows.n, rows.n + request.num_new_columns)
                return arguments
            return self._bypass(rows, arguments, why)
        num_rows, num_new = shape_of(arguments, rows.get_seq_length())
        self._count_more(rows, [num_new] * num_rows)
        return arguments

    def keep_prompt(self, rows: Rows) -> None:
        """The prompt is complete: others may need it while this call goes on."""
        stop, rows.prompt_end = rows.prompt_end, 0
        held = self._held_so_far(rows)
        if held is not False:
            self._keep(rows, stop, held=True)

    def keep_full(self, rows: Rows) -> None:
        """Rows change places, and some are given up: keep them where each has filled a block since."""
        size = self.store.block_size
        if rows.is_source and all(rows.n - row.pad >= row.kept + size for row in rows.prompts) and self._held_so_far(rows):
            rows.prompt_end = 0
            self._keep(rows, rows.n, held=True)

    def confirm(self, rows: Rows, output: Any) -> Any:
        """A forward has returned: rows that ran for several become these."""
        state = rows.state
        state.num_forwards += 1
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
                lay_out(self.store, rows)
            with self.store.lock:
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
        return output

    def _share_prompt(self, rows: Rows, shared: SharedColumns, copies: Sequence[int]) -> None:
        """Rows that ran for several become these: what they hold is theirs in common, and each goes on by itself."""
        n, limits = rows.n, rows.state.limits
        room = SPARE if math.isinf(limits.max_columns) else max(1, int(limits.max_columns) - n)
        own = memory.make(memory.shapes_of_rows(rows.all_memory()), len(copies), min(room, n + SPARE))
        rows.prompts = [rows.prompts[source].copy() for source in copies]
        rows.ids.select(memory.as_index(copies))
        rows.share(shared, own, n)

    def drain(self) -> None:
        """Keep what the rows of collected caches had computed."""
        left = self.store.left_rows
        while left:
            rows = left.popleft()
            rows.calls.close(rows)

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

    def _bypass(self, rows: Rows, arguments: Mapping[str, Any], why: str) -> Mapping[str, Any]:
        """From here on the rows run on transformers' own layers."""
        before, begins = rows.n, not rows.is_open
        rows.bypass(why, list(cache_layers(self.conditioning.model)))
        num_rows, num_new = shape_of(arguments, before)
        said = f"{why}; {_WITHOUT}" if begins else f"; then {why}; {_WITHOUT}"
        state = rows.state
        if begins:
            state.counts = count_bypassed([num_new] * num_rows, said)
            state.pending = state.counts, True
        else:
            for row in state.counts:
                row.stopped += said
            self._count_more(rows, [num_new] * num_rows)
        return arguments

    def _count_more(self, rows: Rows, num_tokens: Sequence[int]) -> None:
        """More of a prompt runs in rows that have begun."""
        state = rows.state
        new = count_bypassed(num_tokens, "")
        begins = len(state.counts) != len(new)
        if begins:
            state.counts = count_bypassed([0] * len(new), "the last call's rows resumed")
        for row, more in zip(state.counts, new, strict=False):
            row.prompt_tokens += more.prompt_tokens
            row.computed_tokens += more.computed_tokens
        state.pending = new, begins
        rows.must_confirm = True

    def fill(
        self,
        rows: Rows,
        inputs: Sequence[RowInput],
        known: Sequence[Known],
        start: int,
        wanted: int,
        previous: Rows | None,
        *,
        takes_over: bool = False,
    ) -> None:
        """Let rows begin with their columns before `start`, all of which are known.

        Args:
            wanted: columns that they will have, as far as that is known.
            previous: of the call before.
            takes_over: its memory becomes these rows' where they go on in it.
        """
        rows.prompts = [Prompt(row.root, row.pad, row.first_position) for row in inputs]
        rows.is_open = True
        rows.may_be_lazy = self.conditioning.attention == "sdpa" and not self.looks.model_looks
        for layer in rows.layers:
            layer.wanted = wanted
        make = memory.make if rows.captured is None else rows.captured.make
        with self.store.lock:
            slabs = self.store.slabs()
        if not start:
            if slabs:
                rows.take(make(memory.shapes_of_slabs(slabs), len(inputs), wanted), 0)
            return
        is_dense = rows.captured is not None
        may_share = rows.may_be_lazy and not is_dense
        shared = share_known(self.store, inputs, known, start, self.looks) if may_share else None
        done = self._take_over(rows, inputs, known, start, previous) if takes_over and shared is None and not is_dense else 0
        if shared is not None:
            shapes, first = memory.shapes_of_slabs(slabs), shared.plan.first_own
            rows.share(shared, memory.make(shapes, len(inputs), max(start, wanted) - first), start)
        elif not done:
            shapes = memory.shapes_of_slabs(slabs) or _shapes_elsewhere(known, previous)
            rows.take(make(shapes, len(inputs), max(start, wanted)), start)
        else:
            rows.make_room(max(start, wanted), wanted)
        for number, (row, of_row) in enumerate(zip(inputs, known, strict=True)):
            first = row.pad if shared is None else shared.plan.ends[number]
            self._load(rows, number, row.pad, of_row, max(done, first), start, previous)
        rows.n = start
        for layer in rows.layers:
            if layer.held is not None:
                layer.n = start
        device = self.conditioning.model.device
        rows.ids.start([row.token_ids for row in inputs], [row.pad for row in inputs], start, device)
        rows.note_writes()

    def _fill(
        self,
        rows: Rows,
        inputs: Sequence[RowInput],
        known: Sequence[Known],
        start: int,
        stop: int,
        previous: Rows | None,
    ) -> None:
        most = rows.state.limits.max_columns
        wanted = stop + 64 if math.isinf(most) else max(stop, int(most))
        if self.store.pool.accelerators:  # there every byte is taken when it is asked for
            wanted = min(wanted, stop + max(256, stop // 4))
        self.fill(rows, inputs, known, start, wanted, previous, takes_over=True)

    def _take_over(
        self, rows: Rows, inputs: Sequence[RowInput], known: Sequence[Known], start: int, previous: Rows | None
    ) -> int:
        """The memory of the call before becomes these rows', where each goes on with what is its own there. Returns up to which column."""
        if previous is None or previous.escaped or not previous.memory or len(inputs) != previous.num_rows:
            return 0
        if any(layer.is_own for layer in previous.layers) or previous.base:
            return 0
        done = start
        for number, (row, of_row) in enumerate(zip(inputs, known, strict=True)):
            if of_row.previous != number or previous.prompts[number].pad != row.pad:
                return 0
            done = min(done, row.pad + of_row.num_common)
        if 2 * done < start:
            return 0
        rows.take(previous.memory, done)
        return done

    def _load(
        self, rows: Rows, number: int, pad: int, known: Known, done: int, start: int, previous: Rows | None
    ) -> None:
        """Copy the columns `[done, start)` of one row to it."""
        size, base = self.store.block_size, rows.base
        first = max(0, done - pad) // size
        while pad + first * size < base:  # a block that begins in what rows share
            first += 1
        end = min(known.num_in_blocks, max(0, start - pad))
        if end > first * size:
            block_ids = known.lease.block_ids[first : -(-end // size)]
            with self.store.lock:
                slabs = self.store.slabs()
            memory.load_blocks(rows.memory, slabs, [number], pad + first * size - base, block_ids, end - first * size)
            done = max(done, pad + end)
        if known.ahead is not None and done < start:
            ahead, source, num_tokens = known.ahead
            self._copy(ahead, source, rows, number, done, min(start, pad + num_tokens), pad)
            done = max(done, min(start, pad + num_tokens))
        if known.previous is not None and previous is not None and done < start:
            self._copy(previous, known.previous, rows, number, done, min(start, pad + known.num_common), pad)

    def _copy(self, source: Rows, source_row: int, rows: Rows, row: int, start: int, stop: int, pad: int) -> None:
        if stop > start:
            shift = source.prompts[source_row].pad - pad
            source.copy_columns(source_row, start + shift, stop + shift, rows.memory, row, start - rows.base)

    def _keep(self, rows: Rows, stop: int, *, held: bool) -> None:
        """Keep the columns before `stop`, if the model was as it is."""
        if not held:
            rows.is_trusted = False
            return
        state = rows.state
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
        if state.was_alone and not self.conditioning.may_change_in_a_forward():
            return True
        reads_devices = not self.store.pool.accelerators
        return self.conditioning.digest(after_forward=state.runs_only_forwards, reads_devices=reads_devices) == state.digest

    def _held_to_the_end(self, rows: Rows) -> bool:
        """The same at the end of a call, which may have run code of others between its forwards."""
        state = rows.state
        if not rows.is_source:
            return False
        if state.num_forwards == 1 and state.was_alone and not self.conditioning.may_change_in_a_forward():
            return True
        return self.conditioning.digest(after_forward=state.runs_only_forwards) == state.digest


def require_may_begin(model: Any, running: Any, given: GenerateArguments) -> None:
    """Refuse a `generate` of another model, or one that asks for a cache of its own.

    Raises:
        CacheArgumentError: it is one.
        UnsupportedModelError: adapters that do more than change layers have been put round the model.
    """
    if running is not model:
        raise another_model(model, running)
    require_layer_adapters(running)
    if given.cache_implementation is not None:
        raise CacheArgumentError(
            f"cache_implementation={given.cache_implementation!r} asks transformers for a cache of its own; "
            "leave it out, or leave past_key_values out"
        )


def require_continues(given: GenerateArguments, num_held: int) -> None:
    """Only new tokens must resume exactly where the rows stopped; a mask of ones never reaches the forward.

    Raises:
        CacheArgumentError: they do not.
    """
    if given.num_masked != num_held + given.num_given:
        raise CacheArgumentError(
            f"the attention mask has {given.num_masked} columns, the cache {num_held} and the ids {given.num_given}: pass "
            "the whole prompt, or ids that continue exactly where the rows stopped (the last token generated is not "
            "among them)"
        )


def _shapes_elsewhere(known: Sequence[Known], previous: Rows | None) -> list[memory.Shape]:
    """Of the streams of rows in which something is known, where the pool holds nothing yet."""
    sources = [row.ahead[0] for row in known if row.ahead is not None] + ([] if previous is None else [previous])
    return memory.shapes_of_rows(sources[0].all_memory())


def _distinct(rows: Sequence[RowInput]) -> tuple[list[int], list[int]]:
    """Rows that differ, by their numbers; and for each row the place among these of the one that is equal to it."""
    places: dict[tuple[bytes, int, bytes], int] = {}
    members, copies = [], []
    for number, row in enumerate(rows):
        key = (row.root, row.pad, row.token_ids.tobytes())
        if key not in places:
            places[key] = len(members)
            members.append(number)
        copies.append(places[key])
    return members, copies
