"""Defines `Rows`, on which transformers runs one call: its keys and values are tensors of this call alone.

Owns what a forward and a caller may do with rows, and whatever moves rows. It does not decide what is known or kept,
but asks `calls`. The columns lie in memory of these rows alone; before it may come segments that rows have in common.
"""

import copy
import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ..attention import causal
from ..blocks import TokenIds, Window
from ..blocks.image_tokens import end_of_image, hold_images
from ..errors import CacheArgumentError, ForwardMismatchError
from ..kv.states import put_states, read_states
from ..model.layers import cache_layers, has_keys, streams_of
from . import memory
from .groups import Group
from .ids import IdsStream
from .kinds import LayerKinds
from .layers import SPARE, RowsLayer, room_for
from .memory import Columns, Streams
from .shared import Looks, Seen, SharedColumns
from .states import RowStates

_VERSION = attrgetter("_version")


@dataclass(slots=True)
class Prompt:
    """`Prompt` says what one row began with."""

    root: bytes  # the row's prefix key: a digest of all that shapes its keys and values besides tokens
    pad: int  # columns of left padding
    first_position: int  # position of the first token
    shift: int | None  # how far images have moved the positions of the text after them; None: not known
    kept: int = 0  # leading tokens whose blocks need not be kept any more
    most_kept: int | None = None  # most leading tokens that may be kept, where those after them only fill the row up
    image_end: int | None = None  # tokens up to the end of the last image, if its block is to be kept up to there


class Rows(Cache):
    """`Rows` runs one call, or one loop of forwards.

    columns: [0, pad) padding | [pad, n) valid in all layers, between two forwards

    Args:
        calls: `Calls` of the cache, which open the rows at their first forward, and keep what they compute.
        kinds: kinds of the model's layers.
        looks: whether the model looks at keys and values itself.
    """

    is_paged_prefix_cache = True
    layers: list[Any]

    def __init__(self, calls: Any, kinds: LayerKinds, looks: Looks) -> None:
        super().__init__(layers=[])
        self.calls, self.kinds, self.looks, self._itself = calls, kinds, looks, ref(self)
        self.state: Any = None  # what `calls` remember of the rows
        self.thread = threading.get_ident()  # that ran the rows last
        self.is_passed = False  # a `generate` of transformers was passed the rows since the call began
        self.in_generate = False  # `generate` runs the rows; it passes what it must
        self.reads_next = self.reads_all = False  # the arguments of the next forward, or of all, are looked at
        self.records_drafts = False  # drafts may be taken back
        self.escaped = False  # somebody else may hold the rows: their memory never becomes that of another call
        self.is_lent = False  # a call that begins may read the rows
        self.previous: Rows | None = None  # rows of the call before; given up when these open
        self.handle: ref[Any] | None = None  # the cache of the call
        self.is_behind_handle = False  # forwards are passed the handle in place of the rows, and return the handle
        self.captured: Any = None  # runs the forwards by graphs, and has the rows lie in the arena
        self.chunks: Any = None  # sizes of the forwards that the prompt must come in; what comes in others is not kept
        self.may_be_lazy = False  # attention may be given keys and values that it reads lazily
        self.reset()

    def reset(self) -> None:
        """Drop all that the rows hold, also in the layers that were; others may begin."""
        kinds, itself = self.kinds, self._itself
        for layer in self.layers:
            layer.reset()
        self.layers[:] = layers = kinds.make(itself)  # the same list: whoever holds it sees these layers
        self.all, self.windows = Group(itself), dict[Window, Group]()  # columns of layers without, and with a window
        self.first: Any = None  # first layer with columns; None: no layer has any, or the rows are bypassed
        for layer_idx, layer in enumerate(layers):
            if isinstance(layer, RowsLayer):
                self.first = self.first or layer
                group = self.all
                if layer.window is not None:
                    group = self.windows.setdefault(layer.window, Group(itself, layer.window))
                group.layers[layer_idx] = layer
        self.states = RowStates({at: layers[at] for at in kinds.num_states}, kinds.places) if kinds.num_states else None
        # rows can go on only after certain columns, because layers have windows or carry states
        self.is_exact = bool(kinds.windows) or self.states is not None
        self.layer_class_to_replicate = partial(_another_layer, itself)  # type: ignore[assignment]
        self.ids = IdsStream()  # token ids that ran
        self.prompts: list[Prompt] = []  # what each row began with; empty before the first forward
        self.n = 0  # columns
        self.wanted = 0  # columns that the rows will have; 0: not known
        self.why_bypassed: str | None = None  # why the rows run on transformers' own layers, and nothing is kept
        self.is_open = False
        self.is_running = False  # a forward has begun and not returned
        self.is_whole = True  # every stream has all columns; if not, nothing more is kept
        self.is_broken = False  # what the next token needs is lost: a forward, or a change of rows, has died half way
        self.must_confirm = True  # `calls` are told of the next forward that returns
        self.num_forwards = self.num_new = 0  # forwards that have returned; columns of the last one
        self.copies: list[int] | None = None  # batch row -> row that runs for it, in the first forward alone
        self.prompt_end = 0  # columns of the prompt, which is kept once these are complete; 0: it was kept
        self.common_columns = 0  # number of leading columns that rows which change places have in common; 0: not known
        self.seen_same = 0  # columns that were there when somebody last saw that the model is the same
        # First column that is never kept, nor read by other rows: from it on columns are not what their tokens and
        # prefix keys say.
        self.keep_end = math.inf
        self.seen = Seen()  # how attention has read the rows
        self.shared: SharedColumns | None = None  # segments that several rows have in common, held once
        self.reads: Any = None  # `SharedColumns` or `CausalSquare` that layers read in place of their columns
        self._tensors: list[Tensor] = []  # all tensors in which the rows lie
        self._versions: tuple[int, ...] = ()  # versions of these tensors after our own last write
        if self.records_drafts:
            self.activate_past_recording()

    def add_layers(self, num_layers: int) -> None:
        """Have so many layers, of which the model's config names fewer."""
        while len(self.layers) < num_layers:
            self.layers.append(_another_layer(self._itself))

    # Called by a `generate` that is passed rows which an earlier call has returned.

    @property
    def _is_user_defined(self) -> bool:
        """True; `generate` sets this as it begins."""
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, is_so: bool) -> None:
        if self.is_passed and self.in_generate:
            self.calls.begin_again(self)
        self.is_passed = True

    def begin_rows(self, model: Any, given: Any) -> "Rows":
        """Return the rows on which a `generate` runs that was passed these: these, or others that go on from them."""
        begun: Rows = self.calls.begin_from(self, model, given)
        return begun

    @contextmanager
    def running(self, rows: "Rows") -> Iterator[None]:
        """Span the `generate` that runs on `rows` and was passed these rows."""
        try:
            yield
        finally:
            previous = rows.previous
            self.calls.close(rows)
            if not self.is_open:
                self.previous = rows if rows.is_open else previous
            if rows.is_open and self.handle is not None and (handle := self.handle()) is not None:
                handle.adopt(rows, self)

    # Called by the hooks of the model's forward.

    def before_forward(self, model: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begin a forward; return the arguments that it is to run with."""
        if model is not self.calls.model:
            self.calls.refuse(model)
        first = self.first
        if first is not None and first.n != self.n:
            self._heed()
        if self.is_running and self.thread != threading.get_ident():
            self.calls.require_not_running(self)
        if self.is_running and not self.num_forwards:
            self.roll_back()
        if not self.is_open:
            arguments = self.calls.open(self, arguments)
        elif (
            self.reads_next
            or self.is_running
            or self.reads_all
            or not self.in_generate
            or arguments.get("input_ids") is None
        ):
            arguments = self.calls.go_on(self, arguments)
        if self.is_broken:
            raise ForwardMismatchError(
                "what the next token needs of these rows is lost, because a forward died in the middle of it, and it "
                "cannot be computed again here; reset() the cache, or pass the whole prompt to generate again"
            )
        ids: Any = arguments.get("input_ids")
        num_new = 0 if ids is None else ids.shape[1]
        if self.why_bypassed is not None:
            self.num_new, self.is_running = num_new, True
            return arguments
        if self.prompt_end and self.n >= self.prompt_end:
            self.calls.keep(self)
        if self._versions != tuple(map(_VERSION, self._tensors)):
            self.is_whole = False
        self.num_new, self.is_running = num_new, True
        if self.chunks is not None:
            self.keep_less(self.chunks.commit_end(self.n, num_new))
        if self.states is not None:
            if self.kinds.places.clamps_one_token and num_new == 1 and self.n:
                self.keep_less(self.n)  # what is computed so differs from what a prompt computes
            self.states.start_forward([prompt.pad for prompt in self.prompts], self.n, self.n + num_new)
        self.ids.note(ids, self.n)
        if self.n + num_new > self.all.room_end:
            self.all.make_room(self.n + num_new, self.n, 0)
            self.wanted = 0
            self.note_writes()
        if num_new > 1 or self.reads is not None:
            self._start_reads(self.n, self.n + num_new)
        return arguments

    def after_forward(self, output: Any) -> Any:
        """End a forward that has returned; return its output, as the caller is to get it."""
        n, have_own = self.n + self.num_new, False
        for layer in self.layers if self.why_bypassed is None else ():
            if layer.n != n and layer.held is not None:
                self.is_whole = False
            have_own = have_own or layer.is_own
        self.n, self.is_running = n, False
        if self.states is not None:
            self.states.end_forward([prompt.pad for prompt in self.prompts], n)
        if have_own:
            self._gather()
        else:
            self._versions = tuple(map(_VERSION, self._tensors))
        self.num_forwards += 1
        if self.must_confirm and self.state is not None:
            output = self.calls.confirm(self, output)
        return output

    def _start_reads(self, start: int, stop: int) -> None:
        """Choose what the layers read in a forward of the columns `[start, stop)`."""
        if self.shared is not None and self.seen.dense:
            self.make_dense()
        self.reads = self.shared
        if self.shared is not None:
            self.shared.start_forward(start, stop)
        elif self.may_be_lazy and causal.pays(start, stop):
            self.reads = causal.CausalSquare(start, stop, self.looks)

    @property
    def is_written(self) -> bool:
        """True if a forward has written any layer."""
        if any(has_keys(layer) and layer.get_seq_length() for layer in self.layers):
            return True
        return any(any(self.layers[at].has_previous_state.values()) for at in self.kinds.num_states)

    def note_shown(self) -> None:
        """Note that somebody gets keys or values, and may write to them unseen: nothing is kept after that."""
        if self.is_whole and not self.is_running and self.why_bypassed is None:
            self.calls.keep(self)
            self.is_whole = False

    def give(self, layer_idx: int, name: str, states: Tensor | None) -> None:
        """Put what somebody gives a layer into a layer of transformers', on which the rows run from here on."""
        self.note_shown()
        if self.why_bypassed is None:
            self.bypass("keys or values were put into its layers by hand", list(cache_layers(self.calls.model)))
        setattr(self.layers[layer_idx], name, states)

    def _heed(self) -> None:
        """Go on with what is in the layers, and keep nothing more, if the first layer has other columns than the rows.

        Somebody has written them there, or a model inside this one has run forwards that told no hook.
        """
        first = self.first
        if first is not None and first.n != self.n and first.held is not None and not self.is_running:
            self.n, self.is_whole = first.n, False
            self._gather()

    def is_lost(self, idents: Collection[int]) -> bool:
        """Return whether a call or a loop on the rows ran in one of these threads, which ended with a fork."""
        is_loop = self.state is not None and self.state.kind == "forward"
        return self.thread in idents and (self.in_generate or self.is_running or is_loop)

    def roll_back(self) -> None:
        """Take back a forward that died; if it was the first one, the rows begin again."""
        if not self.is_running:
            return
        if not self.num_forwards:
            self.reset()
            return
        self.is_running = False
        if self.why_bypassed is not None:
            self.is_broken = True  # nobody knows which layers had got further
            return
        for layer in self.layers:
            if isinstance(layer, RowsLayer):
                layer.crop(self.n - layer.n)
        self._gather()
        # of states, and of windows, what the next token needs may have been written over
        if not self._windows_go_on_at(self.n):
            self.is_whole, self.is_broken = False, True
        self.is_broken = bool(self.n) and (self.is_broken or self.states is not None)

    # Memory of the rows.

    def begin(self, inputs: Sequence[Any], wanted: int) -> None:
        """Begin rows of these tokens, a `RowInput` each; they will have `wanted` columns, if that is not 0."""
        prompts = list[Prompt]()
        for row in inputs:
            prompt = Prompt(row.root, row.pad, row.first_position, row.shift)
            if hold_images(row.token_ids):
                prompt.image_end = end_of_image(row.token_ids, 0, len(row.token_ids))
                self.ids.named = {**self.ids.named, len(prompts): row.token_ids}
            prompts.append(prompt)
        self.prompts, self.wanted, self.is_open = prompts, wanted, True  # open last: an interrupt comes before or after
        if self.states is not None:
            self.states.begin(len(inputs))

    def start_at(self, n: int, inputs: Sequence[Any]) -> None:
        """Note that the columns before `n` are there, and hold these tokens."""
        self.n = n
        for layer in self.layers:
            if layer.held is not None:
                layer.n = layer.filled = n
        self.ids.start(inputs, n)
        self.note_writes()

    def take(self, held: list[Streams], n: int, base: int = 0) -> None:
        """Let the layers without a window lie in this memory: its first columns are the columns `[base, n)`."""
        self.n = n
        self.all.take(held, n, base)
        self.note_writes()

    def _gather(self) -> None:
        """Let layers that got memory of their own lie in the memory of the rows, without a copy."""
        for group in (self.all, *self.windows.values()):
            group.gather()
        self.note_writes()

    def note_writes(self) -> None:
        """Note that everything written to the rows until here was written by us."""
        tensors = []
        for group in (self.all, *self.windows.values()):
            for tensor, _ in group.memory:
                tensors.append(tensor)
        self._tensors, self._versions = tensors, tuple(map(_VERSION, tensors))

    @property
    def is_edited(self) -> bool:
        """True if somebody else has written to the rows."""
        return self._versions != tuple(map(_VERSION, self._tensors))

    def can_go_on_at(self, n: int) -> bool:
        """Return whether the rows hold all that the token after the first `n` columns needs."""
        if self.states is not None and (n != self.n or self.is_broken or self.is_running):
            return False
        return self._windows_go_on_at(n)

    def _windows_go_on_at(self, n: int) -> bool:
        return all(group.can_go_on_at(n) for group in self.windows.values())

    def copy_columns(self, row: int, start: int, stop: int, to: list[Streams], to_row: int, column: int) -> None:
        """Copy the columns `[start, stop)` of a row, wherever they lie, to row `to_row` of other memory, from `column`
        on.
        """
        for at, part in self._parts(row, start, stop):
            memory.copy_columns(part, to, to_row, column + at - start)

    def _parts(self, row: int, start: int, stop: int) -> Iterator[tuple[int, Columns]]:
        """Yield the columns `[start, stop)` of a row part by part, each with the column at which it begins."""
        for first, part in () if self.shared is None else self.shared.parts(row, start, stop):
            yield first, part
            start = first + part.stop - part.start
        if start < stop:
            base = self.all.base
            yield start, Columns(self.all.memory, row, start - base, stop - base)

    def columns(self, row: int, start: int, stop: int) -> Columns:
        """Return the columns `[start, stop)` of a row side by side: where they lie, or as copies.

        The last ones may not be there; a copy has anything in their place.
        """
        parts = [*self._parts(row, start, min(stop, self.n))]
        if len(parts) == 1 and stop <= self.n:
            return parts[0][1]
        made = memory.make(memory.shapes_of_rows(self.all.memory), 1, stop - start)
        for at, part in parts:
            memory.copy_columns(part, made, 0, at - start)
        return Columns(made, 0, 0, stop - start)

    def make_dense(self) -> None:
        """Give each row all of its columns, in memory of its own."""
        if self.shared is None:
            return
        if not self.is_running and self.is_edited:
            self.is_whole = False
        self._gather()
        stop = max(self.n, *(layer.n for layer in self.layers))  # in a forward some layers have more columns
        whole = self._dense(range(self.num_rows), stop, room_for(stop, self.wanted))
        self.shared = self.reads = None
        self.take(whole, self.n)

    def _dense(self, sources: Sequence[int], stop: int, room: int) -> list[Streams]:
        """Make memory in which row `i` has all columns of row `sources[i]` before column `stop`."""
        made = memory.make(memory.shapes_of_rows(self.all.memory), len(sources), room)
        for row, source in enumerate(sources):
            pad = self.prompts[source].pad
            self.copy_columns(source, pad, stop, made, row, pad)
        return made

    @property
    def kv_bytes(self) -> int:
        """Bytes of all that the rows hold: segments, columns and states."""
        if self.why_bypassed is not None:
            return sum(states.nbytes for states in self._held_in_layers())
        num_bytes = 0 if self.shared is None else self.shared.num_bytes
        for group in (self.all, *self.windows.values()):
            num_bytes += memory.num_bytes(group.memory, self.n - group.base)
        return num_bytes + (0 if self.states is None else self.states.num_bytes)

    def _held_in_layers(self) -> Iterator[Tensor]:
        """Yield the tensors that the layers of a bypassed call hold."""
        for layer in self.layers:
            if has_keys(layer) and layer.is_initialized:
                yield from streams_of(layer).values()
        yield from read_states({at: self.layers[at] for at in self.kinds.num_states}).values()

    def bypass(self, why: str, layers: list[Any]) -> None:
        """Run the rows on these empty transformers layers from here on, and keep nothing more; `last_call` says why."""
        self.make_dense()
        if self.records_drafts:
            for layer in layers:
                getattr(layer, "activate_past_recording", lambda: None)()
        for number, layer in enumerate(self.layers):
            if has_keys(layer) and layer.is_initialized:
                layers += [DynamicLayer() for _ in range(len(layers), number + 1)]  # type: ignore[no-untyped-call]
                layer.put_into(layers[number])
        if self.states is not None:
            put_states({at: layers[at] for at in self.kinds.num_states}, self.states.read())
        self.why_bypassed, self.is_open = why, True
        self._run_on(layers)

    def _run_on(self, layers: list[Any]) -> None:
        """Have these layers of transformers, which hold what the rows hold, and nothing besides."""
        self.all, self.windows, self.states, self.first = Group(self._itself), {}, None, None
        self.is_exact, self._tensors, self._versions = False, [], ()
        self.layers[:] = layers  # the same list: whoever holds it sees these layers
        self.layer_class_to_replicate = DynamicLayer

    def note_look(self, *, is_same: bool) -> None:
        """Note whether the model was seen to be the same now; if not, nothing is kept that came since the last look."""
        if is_same:
            self.seen_same = self.n
        else:
            self.keep_less(self.seen_same)

    def keep_less(self, stop: float) -> None:
        """Never keep the columns from `stop` on: they are not what their tokens and prefix keys say."""
        self.keep_end = min(self.keep_end, stop)

    @property
    def num_true_columns(self) -> int:
        """Number of columns that are what their tokens say, under their prefix keys, as far as anybody has looked."""
        return int(min(self.n, self.keep_end))

    @property
    def is_source(self) -> bool:
        """True if other rows may begin with columns of these rows."""
        return (
            self.is_open
            and self.is_whole
            and self.why_bypassed is None
            and min(self.n, self.keep_end) > 0
            and self._versions == tuple(map(_VERSION, self._tensors))
        )

    def token_ids(self) -> list[TokenIds]:
        """Return the token ids that ran in each row, without padding, as far as the columns are what these say."""
        return self.ids.rows(self.prompts, int(min(self.n, self.keep_end)))

    @property
    def num_rows(self) -> int:
        return len(self.prompts)

    # Ways to move rows.

    def apply(self, index: Sequence[int] | Tensor, start: int = 0) -> None:
        """Let row `i` continue as row `index[i]`, in all streams.

        Args:
            start: number of leading columns that rows which change places have in common.
        """
        self.roll_back()
        self._heed()
        at = index if isinstance(index, Tensor) else torch.tensor(index, dtype=torch.int64, device="cpu")
        if not self.in_generate:
            self._require_rows(at)
        if self.why_bypassed is not None:
            for layer in self.layers:
                layer.reorder_cache(at)
            return
        is_whole, is_broken = self.is_whole and not self.is_edited, self.is_broken
        self.is_whole, self.is_broken = False, True  # interrupted: some streams have changed
        if not start:
            self.make_dense()
        for group in (self.all, *self.windows.values()):
            group.select(at, self.n, start)
        if self.states is not None:
            self.states.select(at)
        self.ids.select(at)
        if at.shape[0] != self.num_rows:
            self.common_columns = 0
        if not start:
            self.prompts = [copy.copy(self.prompts[number]) for number in at.tolist()]
        self.note_writes()
        self.is_whole, self.is_broken = is_whole, is_broken

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row `i` continue as row `beam_idx[i]`; full blocks of rows that are given up are kept first."""
        if self.in_generate and self.state is not None:
            self.calls.keep_full(self)
        self.apply(beam_idx, self.common_columns if beam_idx.shape[0] == self.num_rows else 0)

    def _require_rows(self, index: Tensor) -> None:
        numbers, num_rows = index.tolist(), self.batch()
        if not numbers or not all(0 <= number < num_rows for number in numbers):
            raise CacheArgumentError(f"rows {numbers} were asked for; there are {num_rows} rows, counted from 0")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.apply([row for row in range(self.batch()) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (int64, or a mask of booleans) alone."""
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self.apply(torch.where(chosen < 0, chosen + self.batch(), chosen))

    def batch(self) -> int:
        if self.why_bypassed is None:
            return self.num_rows
        return next((states.shape[0] for states in self._held_in_layers()), 0)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens; 0 changes nothing.

        Raises:
            CacheArgumentError: the number is positive or too large, or the tokens that are left need what layers have
                given up.
        """
        if tokens_to_remove > 0:
            raise CacheArgumentError(
                f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}"
            )
        self.roll_back()
        self._heed()
        if self.is_edited:
            self.is_whole = False
        num, length = -int(tokens_to_remove), self.get_seq_length()
        n = max(0, self.n - num)
        if num > length:
            raise CacheArgumentError(f"cannot take back {num} tokens; there are {length}")
        if not n and not self.in_generate and self.why_bypassed is None:
            self.reset()  # after that, other rows may begin
            return
        if num and not self._can_crop(num):
            raise CacheArgumentError(
                f"cannot take back {num} tokens: layers with a window or a state have given up what the token after "
                "those that are left needs; reset() the rows, or pass the whole prompt to generate again"
            )
        if self.shared is not None and n < max(self.shared.plan.ends):
            self.make_dense()
        if self.states is not None:
            self.states.crop(num, n, [prompt.pad for prompt in self.prompts])
        for layer in self.layers:
            if self.why_bypassed is not None or isinstance(layer, RowsLayer):
                layer.crop(-num)
        self.n = n
        self.seen_same, self.common_columns = min(self.seen_same, n), min(self.common_columns, n)
        for prompt in self.prompts:
            prompt.kept = min(prompt.kept, max(0, n - prompt.pad))

    def _can_crop(self, num: int) -> bool:
        """Return whether layers with windows and states can go on without the last `num` columns."""
        if self.states is not None and (self.is_broken or (num < self.n and not self.states.can_crop(num))):
            return False
        return self._windows_go_on_at(self.n - num)

    def activate_past_recording(self) -> None:
        """Get ready to take drafts back: a model that cannot say which logits it needs computes all of them."""
        self.records_drafts = True
        if self.why_bypassed is not None:
            super().activate_past_recording()  # type: ignore[no-untyped-call]
        elif self.states is not None:
            self.states.record_past()

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Update a convolution's state as transformers does, and record what is wanted of the convolution's inputs."""
        inputs: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        if self.states is not None:
            self.states.record(layer_idx, state_idx, inputs)
        return inputs

    # Called by transformers and by users.

    def __bool__(self) -> bool:
        return True  # even without rows: some models ask `if past_key_values`

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Yield each layer's keys and values, and its window, if any, as a `DynamicCache` does."""
        for layer in self.layers:
            window = torch.tensor(layer.sliding_window, device="cpu") if getattr(layer, "is_sliding", False) else None
            yield getattr(layer, "keys", None), getattr(layer, "values", None), window

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "rows of a PagedPrefixCache cannot be pickled, nor copied by copy.copy: blocks of a pool may lie in them; "
            "use copy.deepcopy, or keep the token ids and pass them to generate again"
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns of the rows, padding included."""
        if self.why_bypassed is not None:
            # transformers tells no length of layers that carry states alone
            return int(super().get_seq_length(layer_idx)) if any(map(has_keys, self.layers)) else self.n
        if self.first is not None and self.first.n != self.n:
            self._heed()
        return self.n if layer_idx in (0, -len(self.layers)) or self.layers[layer_idx].held is not None else 0

    @property
    def is_initialized(self) -> bool:
        return self.get_seq_length() > 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Rows":
        """Make other rows with the same columns, which go on by themselves."""
        if self.why_bypassed is not None:
            copied = self._begun_alike()
            copied._run_on(copy.deepcopy(self.layers, memo))
        else:
            copied = self.forked(torch.arange(self.num_rows, device="cpu"), None)
        memo[id(self)] = copied
        return copied

    def _begun_alike(self) -> "Rows":
        """Make other rows of the same call, without columns."""
        self.roll_back()
        copied = type(self)(self.calls, self.kinds, self.looks)
        for name in _COPIED:
            setattr(copied, name, getattr(self, name))
        copied.state = None if self.state is None else self.state.copy()
        copied.is_whole = self.is_whole and not self.is_edited
        copied.prompts, copied.ids = [*map(copy.copy, self.prompts)], self.ids.copy()
        return copied

    def forked(self, index: Tensor, shared: SharedColumns | None) -> "Rows":
        """Make other rows that go on by themselves: row `i` begins where row `index[i]` of these stands.

        These rows must not be bypassed. The others may have segments in common.
        """
        copied, n = self._begun_alike(), self.n
        copied.ids.select(index)
        copied.prompts = [copy.copy(self.prompts[number]) for number in index.tolist()]
        if shared is not None:
            copied.share(shared, self.selected(index, shared.plan.first_own, SPARE), n)
        elif self.shared is not None:
            copied.take(self._dense(index.tolist(), n, n + SPARE), n)
        elif n:
            copied.take(self.selected(index, self.all.base, SPARE), n, self.all.base)
        for window, group in self.windows.items():
            copied.windows[window].take(group.selected(index, n), n, group.base)
        copied.note_writes()
        if self.states is not None and copied.states is not None:
            self.states.copy_to(copied.states, index)
        for layer, of in zip(copied.layers, self.layers, strict=True):
            layer.n, layer.filled = layer.n if layer.held is None else of.n, of.filled  # a forward may have skipped it
        return copied

    def selected(self, index: Tensor, first: int, spare: int) -> list[Streams]:
        """Make memory in which row `i` has the columns from `first`, which is the first one that lies in the memory or
        `n`, on of row `index[i]`.
        """
        num = self.n - first
        return memory.selected(self.all.memory, index, num, num + spare)

    def share(self, shared: SharedColumns, held: list[Streams], n: int) -> None:
        """Let the rows, of `n` columns, have these segments in common; in `held` their own columns follow."""
        shared.rows = ref(self)
        self.calls.note_sharing(self)
        self.take(held, n, shared.plan.first_own)
        self.shared = self.reads = shared


_COPIED = (
    *("n", "seen_same", "keep_end", "is_open", "in_generate", "is_broken", "why_bypassed", "num_forwards"),
    *("records_drafts", "may_be_lazy", "chunks"),
)


def _another_layer(owner: "ref[Rows]") -> RowsLayer:
    """Make one layer more than the model's config names."""
    rows = owner()
    assert rows is not None
    layer = RowsLayer(len(rows.layers), owner)
    rows.all.layers[layer.layer_idx] = layer
    rows.first = rows.first or layer
    return layer
