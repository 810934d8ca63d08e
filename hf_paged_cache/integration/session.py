"""Between the hooks and a call: what a forward's arguments and the model's state mean for the rows.

Owns who may use the cache now (one `generate` at a time), the roots of rows, and the request that a forward becomes.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import ref

import torch

from ..blocks.roots import RootFacts
from ..call.call import Call
from ..call.running import Bracket
from ..call.scheduled_forward import ForwardRequest, RequestRead, ScheduledForward
from ..errors import CacheArgumentError, CacheBusyError, ForwardMismatchError, OutOfBlocksError, PagedCacheError
from ..kv.transfers import to_device
from ..model.conditioning import Conditioning
from ..model.placeholders import Placeholders
from ..model.support import require_layer_adapters
from .chunked_prompt import IN_CHUNKS, ChunkedPrompt, chunked_prompt
from .forward_arguments import ArgumentReader, KnownInputs, for_scheduled
from .forwards_ahead import Ahead, ForwardsAhead
from .generate_arguments import GenerateArguments
from .image_inputs import ImageInputs, Seen
from .prompt_images import ENCODED, PromptImages
from .ranks import Ranks, of_all_ranks, tokens_as_bytes
from .running_generate import another_model, how_to_run, plant_bracket, running_elsewhere, running_generate
from .without_images import Look, PromptsWithoutImages
from .without_store import LayersWithoutStore, why_full

logger = logging.getLogger("hf_paged_cache")

_GRADIENTS = (
    "gradients are on and may flow through every token (run the forward in torch.no_grad() where none are needed)"
)
_OTHER_WINDOWS = "the config has other windows now, while other calls hold blocks of before"
_OTHER_DTYPE = "the model has a wider dtype now, while other calls hold blocks of before"
_POSITIONS_OF_PADDING = "positions of padding are the largest, and rotary frequencies follow the largest that runs"
_STATES_ON_RANKS = "layers carry states, and other processes share the model"
_NO_CACHE_WANTED = (
    "generate was passed this cache, and use_cache is False, given or by generation_config: it would run the whole prompt "
    "again in each step, after what the cache holds; pass use_cache=True, or no cache"
)
_ANOTHER_CACHE = "use another cache on the same store for this one: PagedPrefixCache(cache.store)"


class Session:
    """The forwards of one cache, as the hooks report them.

    Args:
        call: what the forwards are scheduled on.
        without_store: where the rows of a bypassed call are.
        conditioning: the model, and what its keys and values depend on.
        reader: of the forwards' arguments.
        placeholders: token ids of the model that are no text.
        image_inputs: reads what fills them.
        salt: part of every root.
        ahead: runs first what rows of a forward share, and what brings them together.
        ranks: other processes that run the same forwards.
        bypasses: a call that does not fit runs in layers of its own; otherwise it is refused.
    """

    def __init__(
        self,
        call: Call,
        without_store: LayersWithoutStore,
        conditioning: Conditioning,
        reader: ArgumentReader,
        placeholders: Placeholders,
        image_inputs: ImageInputs,
        salt: bytes,
        ahead: ForwardsAhead,
        ranks: Ranks,
        *,
        bypasses: bool = False,
    ) -> None:
        self.records_drafts = False  # drafts will be verified in this call
        self.reads_only = False  # the next forward is read, and does not run: see `RequestRead`
        self.without_store = without_store
        self.without_images = PromptsWithoutImages(call, conditioning, placeholders)
        self._bypasses = bypasses
        self._call = call
        self._store = call.store
        self._conditioning = conditioning
        self._reader = reader
        self._image_inputs = image_inputs
        self._images: PromptImages | None = None  # that `generate` was passed, for its first forward
        self._salt = salt
        self._ahead = ahead
        self._ranks = ranks
        self._synced_gpus = False  # with other processes, which run as many forwards
        self._digest = b""  # of the model; read once a `generate`, or at every forward without one
        self._was_alone = False  # when it was read here, nobody could change the model
        self._regime = b""  # of the scheduled forward's rotary frequencies
        self._inputs: KnownInputs | None = None  # of the next forward
        self._runs_only_forwards = False  # between two looks, in the running `generate`
        self._bypass: str | None = None
        self._adapters: list[str] | None = None
        self._may_step = False  # as of the last look at the model
        self._was_overtaken = False  # another generate has left rows where this one was to begin its own
        self._chunked: ChunkedPrompt | None = None  # of the running `generate`

    @property
    def is_open(self) -> bool:
        """Whether a `generate` runs on the cache."""
        return bool(self._call.brackets)

    @property
    def num_columns(self) -> int:
        """Columns of the rows, wherever they are: those before a running forward's, or all confirmed ones."""
        return self.without_store.num_columns if self.without_store.has_rows else self._call.num_columns

    @property
    def num_rows(self) -> int:
        """Rows of the batch, wherever they are."""
        return self.without_store.num_rows if self.without_store.has_rows else len(self._call.rows.alias)

    def rows(self) -> Call | LayersWithoutStore:
        """Who holds the rows, so that they can be cut or change places there.

        Raises:
            CacheBusyError: a `generate` or a forward of another thread is running on them.
        """
        self._call.require_no_generate_elsewhere()
        self.without_store.roll_back()
        return self.without_store if self.without_store.has_rows else self._call

    @contextmanager
    def generating(self, model: Any, given: GenerateArguments, bracket: ref[Bracket]) -> Iterator[None]:
        """The span of one `generate`.

        Args:
            bracket: the caller's own. When it is gone, so is that `generate`.

        Raises:
            CacheBusyError: another one runs on this cache.
            CacheArgumentError: another model's, or one that asks for a cache of its own.
            UnsupportedModelError: adapters that do more than change layers have been put round the model.
        """
        call, failed, no_memory = self._call, True, False
        try:
            look = self.without_images.look(given)
            with self._store.lock:
                self._open(model, given, bracket, look)
            if self._chunked is not None:
                self._begin_known_chunks(self._chunked, given)
            yield
            call.catch_up()
            failed = False
        except Exception as error:
            no_memory = isinstance(error, torch.OutOfMemoryError)
            self._ranks.tell_refusal(error, always=bracket not in call.brackets)
            raise
        finally:
            if bracket not in call.brackets:
                pass  # refused, or another has begun since
            elif bracket() is None:  # its end was skipped, and it is found only now, perhaps inside a line of ours
                call.leave_reservation()
            else:
                self._ranks.is_settled = False
                self.close(bracket, failed=failed, no_memory=no_memory)
                self._log()

    def close(self, bracket: ref[Bracket], *, failed: bool = True, no_memory: bool = False) -> None:
        """A `generate` has ended; one whose bracket is not open is ignored.

        Args:
            failed: an exception has ended it, or it is not known whether one has.
            no_memory: it was for want of memory: the rows make way.
        """
        call = self._call
        if bracket not in call.brackets:
            return
        held = call.rows.are_trusted
        if not held or self._conditioning.learns:
            held = self._conditions_hold(after_forward=self._runs_only_forwards) or held
        with self._store.lock:  # ended and closed in one: no other thread begins in between
            self._digest, self._synced_gpus = b"", False
            self._images = self._chunked = None
            call.end(failed=failed, conditions_held=held)
            if no_memory:
                call.drop_rows()
                self._store.make_way()
            call.brackets.close(bracket)  # last: where the end is interrupted, it was left open
            self._was_overtaken = (
                self.is_open and not call.brackets.innermost_is_round
            )  # by a generate inside of another

    def _open(self, model: Any, given: GenerateArguments, bracket: ref[Bracket], look: Look | None) -> None:
        """A `generate` begins; see `generating`. The store's lock is held."""
        self._require_may_begin(model, given)
        resumes = self.without_images.settle(given, look, self.num_rows)
        if not resumes:
            self.without_store.end()
        self._call.begin(bracket, given.limits, keep_rows=resumes, is_round=given.is_round)
        self.records_drafts, self._synced_gpus = False, given.synced_gpus
        self._digest, self._inputs, self._was_alone, self._may_step = given.digest, given.inputs, False, False
        self._images = given.images
        self._runs_only_forwards = not (given.calls_back or given.is_round)
        self._chunked = None if resumes else chunked_prompt(model, given)
        self._ranks.is_settled = False

    def open_unseen(self) -> None:
        """The length of the rows is asked for between forwards: if a `generate` without a bracket asks, it begins here.

        It would take the rows of the last call for the beginning of its prompt, whatever they are.
        """
        if self._may_begin_unseen() and (self.num_rows or self.is_open) and not self._call.runs_forward:
            given = self._open_found(self._conditioning.model)
            if given is not None and self._chunked is not None:
                self._begin_known_chunks(self._chunked, given)

    def _may_begin_unseen(self) -> bool:
        """Whether a `generate` without a bracket begins anew: none runs, and a function round it has run no forward."""
        call = self._call
        if not self.is_open:
            return True
        if not call.brackets.innermost_is_round:
            return False
        with self._store.lock:
            self._store.settle()  # one before it may have ended
        return call.has_ended or not call.num_scheduled

    def _open_found(self, model: Any) -> GenerateArguments | None:
        """No bracket is open, or one round it: if a `generate` runs that was passed the cache, it begins here.

        Returns:
            Its arguments; None: none runs.

        Raises:
            CacheArgumentError: it uses no cache, so that each of its steps is a whole prompt.
        """
        running = running_generate(model, self._call, only_transformers=self.is_open)
        if running is None:
            return None
        if running.given.use_cache is False:
            raise CacheArgumentError(_NO_CACHE_WANTED)
        look, records_drafts = self.without_images.look(running.given), self.records_drafts
        with self._store.lock:
            self._open(model, running.given, plant_bracket(running, self._store.left_behind, self), look)
            if records_drafts:  # which it has said before it came here
                self.records_drafts = True
                self._call.keep_past()
        return running.given

    def before_forward(self, model: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Schedule a forward; returns the arguments that it is to run with.

        Raises:
            OutOfBlocksError: it does not fit, and calls that do not fit are refused; running rows are as before.
        """
        call = self._call
        try:
            if self._may_step and model is self._conditioning.model and call.may_step:
                step = self._image_inputs.see_step(arguments, call.rows)
                passed = None if step is None else self._reader.read_step(step, call.rows)
                if passed is not None:
                    call.schedule_step(passed)
                    return arguments
            return self._before_forward(model, arguments)
        except Exception as error:
            self._ranks.tell_refusal(error)
            if not self._bypasses or not isinstance(error, OutOfBlocksError):
                raise
            # The one place where a refusal, which is all ranks', becomes a bypass.
            return self._run_without_store(arguments, why_full(error), str(error))

    def _run_without_store(self, arguments: Mapping[str, Any], why: str = "", said: str = "") -> Mapping[str, Any]:
        """The forward runs on layers of the rows' own, where the rows are already, or move now.

        Args:
            why, said: it does not run on the store; for `last_call`, and for the log.
        """
        if self._images is not None:
            num_rows = len(arguments["input_ids"])
            arguments = {**arguments, ENCODED: self._images.encode(range(num_rows), num_rows)}
        self.without_store.start_forward(arguments, why, records_past=self.records_drafts)
        self._ranks.is_settled = True
        if said:
            logger.info("this call runs without the store: %s", said)
        return arguments

    def _before_forward(self, model: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self._require_model(model)
        self._require_mine()
        call, is_open = self._call, self.is_open
        if not self.num_rows and self._may_begin_unseen():
            self._open_found(model)
            is_open = self.is_open
        call.roll_back()
        call.catch_up()
        self.without_images.check_forward(arguments, self.num_columns, in_generate=is_open)
        if self._was_overtaken and is_open:
            raise CacheBusyError(f"another generate ran on this cache inside of this one; {_ANOTHER_CACHE}")
        if self.without_store.has_rows:
            self._reader.require_outputs(arguments, lacks_padding=self.without_store.lacks_padding)
            return self._run_without_store(arguments)
        if not is_open:
            self._ranks.is_settled = False
        if not self._digest or not is_open:
            self._read_conditions()
        before, view, on_ranks = call.rows.num_columns, call.view, self._ranks.are_several
        followed = view.sight_of, view.attention
        if not before and (why := self._follow_model(on_ranks=on_ranks)):
            return self._run_without_store(arguments, why, why)
        known, self._inputs = self._inputs, None
        seen = self._image_inputs.see(arguments, call.rows, self._images)
        request = self._conditioned(
            self._reader.read(
                seen.plain,
                call.rows,
                in_generate=is_open,
                records_drafts=self.records_drafts,
                by_default=self._conditioning.outputs,
                known=known,
            ),
            seen,
            before,
            on_ranks=on_ranks,
        )
        if self.reads_only:
            raise RequestRead(request)
        if self._chunked is not None and before:
            self._chunked.require(request, before)
        elif self._store.tiers:
            call.load_known(request)
        if not on_ranks:  # several run as many forwards each, and settle their budgets after the first
            limits = call.limits
            num_columns = max(before + request.num_new_columns, limits.max_columns if limits.are_known else 0)
            self._store.measure_for(int(num_columns) * max(len(request.rows), limits.num_rows))
        try:
            if on_ranks and call.states is None:
                forward = self._schedule_on_all_ranks(request, arguments)
            else:
                forward = self._schedule(request, arguments, on_ranks=on_ranks)
        except BaseException:
            if call.forward is None:
                call.roll_back()
            view.follow(*followed)  # rows of before may resume
            raise
        # after a prompt, or where each rank has prompts of its own, no rank refuses the next forward or skips any of it
        self._ranks.is_settled = is_open and (
            forward.stop >= call.limits.num_prompt_columns or not self._ranks.start_together
        )
        is_whole = forward.start == before and forward.copies is None
        changed = arguments if is_whole else for_scheduled(arguments, forward, before, self._image_inputs.whole)
        if seen.images is None or (is_whole and self._images is None):
            return changed
        encoded = seen.images.encode(forward.sources, len(request.rows), forward.start - before)
        changed = {name: value for name, value in changed.items() if name not in (*seen.images.arguments, ENCODED)}
        return {**changed, ENCODED: encoded} if encoded else changed

    def _begin_known_chunks(self, chunked: ChunkedPrompt, given: GenerateArguments) -> None:
        """Let the rows begin with what is known of the prompt in whole chunks, so that `generate` passes the chunks after it."""
        call, ranks = self._call, self._ranks
        on_ranks = ranks.are_several
        arguments = chunked.arguments(self._conditioning.model, given, takes_positions=self._reader.takes_positions)
        if arguments is None or self._conditioning.rope.depends_on_length or (on_ranks and not ranks.start_together):
            return
        self._read_conditions()
        if self._follow_model(on_ranks=on_ranks):
            return
        outputs = self._conditioning.outputs
        read = self._reader.read(arguments, call.rows, in_generate=True, records_drafts=False, by_default=outputs)
        request = self._conditioned(read, Seen(arguments), 0, on_ranks=on_ranks)
        request = chunked.request_of_prompt(request)
        if request.bypass is not None or not request.num_new_columns > request.num_logits_needed:
            return
        if self._store.tiers:
            call.load_known(request)
        column, found = call.find_known(request, chunked.chunks)
        if on_ranks:
            same = {"the token ids": tokens_as_bytes([row.token_ids for row in request.rows])}
            (column,) = ranks.agree("a prompt in chunks", same, [column])
        chunked.known = column
        call.begin_known(chunked.request_of_columns(column), column, found)

    def _follow_model(self, *, on_ranks: bool) -> str:
        """Rows begin: layers may have other windows than before, and a wider dtype. Returns why they cannot run on the store, or ""."""
        sights, dtype = self._conditioning.sights(), self._conditioning.model.dtype
        with self._store.lock:
            self._call.view.follow(sights, self._conditioning.attention)
            # Ranks settle what each knows in tokens, without a look at windows.
            if not self._store.follow_windows({} if on_ranks else self._call.view.sight_of, self._call):
                return _OTHER_WINDOWS
            return "" if self._store.follow_dtype(dtype, self._call) else _OTHER_DTYPE

    def after_forward(self, output: Any) -> Any:
        """Confirm the forward; returns what its caller is to get, a row for each that it passed."""
        call, held, self._images = self._call, None, None
        if call.forward is not None and call.forward.is_step:
            call.confirm(conditions_held=None)
            return output
        if self.without_store.is_running:
            self.without_store.confirm()
            self.without_images.note()
            return output
        if self._regime and self._conditioning.rope.now() != self._regime:
            held = False
        elif call.rows.may_commit and (call.num_scheduled == 1 or not self.is_open):
            held = self._held_in_the_forward()
        self.without_images.note()
        try:
            copies = call.confirm(self._ranks.settled_budget(), conditions_held=held).copies
        except ForwardMismatchError as error:
            if not (gone := self._layers_taken_out()):
                raise
            raise ForwardMismatchError(
                f"layers {gone} have been taken out of the model since the cache was built; build another cache for the "
                "model as it is now, PagedPrefixCache(model), or put the layers back"
            ) from error
        if copies is not None:
            output.logits = output.logits.index_select(0, to_device(copies, output.logits.device))
        return output

    def root_of_prefix(self, num_tokens: int) -> bytes:
        """The root of a prompt of `num_tokens` tokens without padding, if it were run now. Disturbs no call.

        Raises:
            CacheBusyError: a call runs, and asking would change its rotary frequencies.
        """
        conditioning, regime = self._conditioning, b""
        digest = conditioning.digest()
        if conditioning.rope.depends_on_length:
            with self._store.lock:
                if self._store.running or any(call.is_running for call in self._store.holders()):
                    raise CacheBusyError(
                        "rotary frequencies of this model depend on length; wait until no call is running"
                    )
                regime = conditioning.rope.peek(max(0, num_tokens - 1))
        return self._conditioning.roots.of(RootFacts(digest, self._salt, regime))

    def why_bypassed(self) -> str | None:
        """Why nothing that is computed now may be reused or kept, as of the last look at the model; None if it may."""
        on_ranks = _STATES_ON_RANKS if self._call.states is not None and self._ranks.are_several else None
        return self._conditioning.bypass() or on_ranks

    def _schedule(self, request: ForwardRequest, arguments: Mapping[str, Any], *, on_ranks: bool) -> ScheduledForward:
        """Prepare the rows, compute what they share, and take their blocks. No lock is held while a model runs."""
        call, plan = self._call, None
        with self._store.lock:
            call.prepare(request)
            if not on_ranks and self._may_run_ahead(request):
                plan = self._ahead.plan(request, call)
            if plan is None or (plan.runs and not self._ahead.fits(plan, request, call)):
                return call.schedule(request)
            if not plan.runs:
                return call.schedule(request, column=plan.column, cold=plan.cold)
        if not self._judge():
            return call.schedule(request)
        ahead = self._ahead.run(plan, request, call, arguments, self._digest)
        return call.schedule(request, ahead.computed, column=ahead.column, cold=ahead.cold)

    def _may_run_ahead(self, request: ForwardRequest) -> bool:
        if self._adapters is not None or self._synced_gpus:
            return False
        by_length = self._conditioning.rope.depends_on_length  # then a shorter forward has other frequencies
        return not by_length and self._ahead.may_run(request, self._call)

    def _judge(self) -> bool:
        """Whether the model is still as it was for what the rows have computed: forwards ahead commit what they resume from."""
        if self._call.rows.are_trusted:
            return True
        held = self._conditions_hold()  # no lock is held meanwhile
        with self._store.lock:
            self._call.judge(conditions_held=held)
        return held

    def _schedule_on_all_ranks(self, request: ForwardRequest, arguments: Mapping[str, Any]) -> ScheduledForward:
        """The same where other processes run this forward, too: all start at one column, or all refuse it.

        Where each has prompts of its own, only the refusal is settled. The lock is free while they wait for each other.
        """
        call, ranks = self._call, self._ranks
        start_together = ranks.start_together
        call.prepare(request)
        if ranks.is_settled and self.is_open:
            return call.schedule(request, latest_start=0 if start_together else math.inf)
        refusal: OutOfBlocksError | None = None
        may_run_ahead = ranks.may_run_more and self._may_run_ahead(request)
        try:
            call.admit(request)
        except OutOfBlocksError as error:
            if not may_run_ahead:
                raise
            refusal = error
        known, fits, holds = self._agree(request, fits=refusal is None, holds=not may_run_ahead or self._judge())
        if not start_together:
            ranks.is_settled = True
            return call.schedule(request)
        ahead, plan = Ahead(), None
        if may_run_ahead and holds:  # else what one rank has computed is of another model
            with self._store.lock:
                plan = self._ahead.plan(request, call, known)
                refits = fits or plan is None or self._ahead.fits(plan, request, call)
        if plan is not None and not fits:
            _, fits, _ = self._agree(request, fits=refits)
        if not fits:
            why = "another rank has no blocks for this call, so no rank runs it; the reason stands there"
            raise of_all_ranks(refusal or OutOfBlocksError(why))
        if plan is not None:
            call.release()
            ahead = self._ahead.run(plan, request, call, arguments, self._digest, on_ranks=True)
            call.admit(request)
            known, *_ = self._agree(request)
        ranks.is_settled = True
        columns = [row.pad + num_known for row, num_known in zip(call.rows.distinct, known, strict=True)]
        return call.schedule(request, ahead.computed, latest_start=min(columns))

    def _agree(self, request: ForwardRequest, *, fits: bool = True, holds: bool = True) -> tuple[list[int], bool, bool]:
        """Settle with the other ranks what is known of each running row, in tokens; whether the call fits everywhere; and whether
        what the rows have computed is nowhere of another model.
        """
        call, rows, roots = self._call, request.rows, [row.root for row in request.rows]
        limits = call.limits
        how = [request.num_logits_needed, request.bypass is None, request.keep_columns is None, request.may_alias]
        same = {
            "the token ids": tokens_as_bytes([row.token_ids for row in rows]),
            "the columns, padding or positions": [
                (call.rows.num_columns, request.num_new_columns),
                [(row.pad, row.first_position, row.num_hidden) for row in rows],
            ],
            "the arguments of generate": [
                (self.is_open, self._synced_gpus, self._bypasses, sorted(limits.end_of_sequence)),
                (limits.num_prompt_columns, limits.max_columns, limits.num_rows),
            ],
            "what is asked of the forward": [how, [roots.index(root) for root in roots]],
        }
        known = [row.table.num_tokens for row in call.rows.distinct]
        least = self._ranks.agree("a forward", same, [int(fits), int(holds), *known])
        return least[2:], bool(least[0]), bool(least[1])

    def _read_conditions(self) -> None:
        conditioning = self._conditioning
        self._digest = conditioning.digest()
        self._was_alone = not conditioning.may_change_in_a_forward()
        self._bypass = conditioning.bypass()
        self._adapters = conditioning.adapter_names()
        self._may_step = self._adapters is None and not conditioning.rope.depends_on_length

    def _held_in_the_forward(self) -> bool | None:
        """Whether the model was as it is, for all that can be known without waiting for a forward on a device; None: `close` looks."""
        # with one thread before and after, nobody can have begun another that has ended since
        if self._was_alone and not self._conditioning.may_change_in_a_forward():
            return True
        may_wait = not (self.is_open and self._store.pool.accelerators)
        held = self._conditions_hold(after_forward=True, reads_devices=may_wait)
        if held and not may_wait:
            return None  # samples of weights on devices may still show otherwise
        return held

    def _conditions_hold(self, *, after_forward: bool = False, reads_devices: bool = True) -> bool:
        """Whether the model is still as it was when its conditions were read; False where they were not."""
        return self._conditioning.digest(after_forward=after_forward, reads_devices=reads_devices) == self._digest

    def _conditioned(self, request: ForwardRequest, seen: Seen, before: int, *, on_ranks: bool) -> ForwardRequest:
        """The request under the model's conditions: why it is computed without reuse, and each row with its root and its images.

        A root is what conditions the model, this cache, and where the row's positions start.
        """
        rope, regime, adapters = self._conditioning.rope, b"", self._adapters
        inputs, why_whole = seen.named(request, self._store.block_size)
        bypass, keep = why_whole or request.bypass or self._bypass, request.keep_columns
        if adapters is not None and len(adapters) != len(request.rows):
            many = f"{len(adapters)} adapter names were given for {len(request.rows)} rows; pass one for each row"
            bypass = bypass or many
        if on_ranks and self._call.states is not None:
            bypass = bypass or _STATES_ON_RANKS
        if keep is None and torch.is_grad_enabled():  # into whatever: a weight, an input, a hook's tensor
            keep = _GRADIENTS
        if rope.depends_on_length:
            last_column, last = before + request.num_new_columns - 1, request.max_position
            regime = rope.at(last_column if last is None else last)
        self._regime = regime
        chunked, chunks = self._chunked, None
        if chunked is not None:
            bypass, keep, chunks = (
                bypass or chunked.why_bypassed(request, self._store.block_size),
                keep or IN_CHUNKS,
                chunked.chunks,
            )
        rows, traits = [], self._conditioning.state_traits
        for number, row in enumerate(inputs):
            # without positions the model numbers its columns
            counted_from = traits.root_padding(row.pad) if self._reader.takes_positions else row.pad
            adapter = adapters[number] if adapters is not None and number < len(adapters) else ""
            of_row = regime if chunked is None else regime + chunked.shape_of(number, request)
            facts = RootFacts(self._digest, self._salt, of_row, adapter, counted_from, row.first_position)
            rows.append(row._replace(root=self._conditioning.roots.of(facts), salt=self._salt))
        if regime and keep is None and request.max_position is not None:
            largest = max(row.first_position + before + request.num_new_columns - 1 - row.pad for row in rows)
            keep = _POSITIONS_OF_PADDING if request.max_position > largest else None
        # rows without the names of their images may have equal ids and other images
        is_plain = self._bypass is None and why_whole is None
        may_alias = request.may_alias and adapters is None and is_plain and chunked is None
        return replace(
            request,
            rows=tuple(rows),
            bypass=bypass,
            keep_columns=keep,
            may_alias=may_alias,
            has_images=seen.images is not None and bypass is None,
            chunks=chunks,
        )

    def _require_may_begin(self, model: Any, given: GenerateArguments) -> None:
        self._require_model(model)
        require_layer_adapters(model)
        if given.cache_implementation is not None:
            raise CacheArgumentError(
                f"cache_implementation={given.cache_implementation!r} asks transformers for a cache of its own; "
                "leave it out, or leave past_key_values out"
            )
        self._require_mine()
        if self._call.num_scheduled and not self._may_begin_unseen():
            raise CacheBusyError(f"a generate call is running on this cache; {_ANOTHER_CACHE}")
        if given.only_new_tokens:
            self._require_fit(given)

    def why_unscheduled(self, layer_idx: int) -> PagedCacheError:
        """The error of a layer that writes although no forward is scheduled, by the modules that run now."""
        model = self._conditioning.model
        if (running := running_elsewhere(model)) is not None:
            return another_model(model, running)
        return ForwardMismatchError(
            f"{how_to_run(model)} (layer {layer_idx} writes, and no forward was announced to the cache)"
        )

    def _layers_taken_out(self) -> list[int]:
        """Layers that have written keys and values and are no longer in the model, by the numbers that its modules have."""
        modules = self._conditioning.model.modules()
        present = {number for module in modules if isinstance(number := getattr(module, "layer_idx", None), int)}
        return sorted({number for number, _ in self._store.writing_layers} - present) if present else []

    def _require_model(self, model: Any) -> None:
        if model is not self._conditioning.model:
            raise another_model(self._conditioning.model, model)

    def _require_mine(self) -> None:
        if self._call.brackets.are_of_another_thread():
            raise CacheBusyError(f"a generate call is running on this cache in another thread; {_ANOTHER_CACHE}")

    def _require_fit(self, given: GenerateArguments) -> None:
        """Only new tokens must resume exactly where the rows stopped; a mask of ones never reaches the forward."""
        self._call.check_not_busy()
        self._call.roll_back()
        self.without_store.roll_back()
        num_held = self.num_columns
        if given.num_masked != num_held + given.num_given:
            raise CacheArgumentError(
                f"the attention mask has {given.num_masked} columns, the cache {num_held} and the ids {given.num_given}: pass "
                "the whole prompt, or ids that continue exactly where the rows stopped (the last token generated is not "
                "among them)"
            )

    def _log(self) -> None:
        if logger.isEnabledFor(logging.INFO):
            call = self._call.stats()
            reasons = "; ".join(f"row {number}: {row.stopped}" for number, row in enumerate(call.rows))
            shared = f", shared {call.shared_tokens}" if call.shared_tokens else ""
            what = "reused %d of %d prompt tokens, computed %d%s: %s"
            logger.info(what, call.reused_tokens, call.prompt_tokens, call.computed_tokens, shared, reasons)
