"""Defines `Rows`, on which transformers runs one call: its keys and values are tensors of this call alone.

Owns what a forward and a caller may do with rows, and whatever moves rows. It does not decide what is known or kept,
but asks `calls`. The columns lie in memory of these rows alone; before it may come segments that rows have in common.
"""

import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ..attention import causal
from ..blocks import TokenIds, Window
from ..errors import ForwardMismatchError
from ..kv.states import StateKey, put_states, read_states
from ..model.layers import cache_layers, has_keys, streams_of
from . import memory, moves
from .ids import IdsStream, Prompt
from .layers import Group, LayerKinds, RowsLayer, room_for
from .memory import Columns, Streams
from .request import CallState, Chunks, RowInput, RowsCalls, RunsForwards
from .shared import Looks, Seen, SharedColumns
from .states import RowStates

_TENSOR, _VERSION = attrgetter("tensor"), attrgetter("_version")


class Rows(Cache):
    """`Rows` runs one call, or one loop of forwards.

    columns: [0, pad) padding | [pad, n) valid in all layers, between two forwards
    """

    is_paged_prefix_cache = True
    layers: list[Any]

    def __init__(self, calls: RowsCalls, kinds: LayerKinds, looks: Looks, state: CallState) -> None:
        super().__init__(layers=[])
        self.calls, self.kinds, self.looks, self.state, self._itself = calls, kinds, looks, state, ref(self)
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
        self.captured: RunsForwards | None = None  # runs the forwards by graphs, and has the rows lie in the arena
        self.chunks: Chunks | None = None  # forwards that the prompt must come in; others are not kept
        self.may_be_lazy = False  # attention may be given keys and values that it reads lazily
        self.reset()

    def reset(self) -> None:
        """Drop all that the rows hold, also in the layers that were; others may begin."""
        kinds, itself = self.kinds, self._itself
        for layer in self.layers:
            layer.reset()
        self.layers[:] = layers = kinds.make(itself)  # the same list: whoever holds it sees these layers
        self.all, self.windows = Group(itself), dict[Window, Group]()  # columns of layers without, and with a window
        self.apart = set[Window | None]()  # windows of layers that lie by themselves until the forward has ended
        self.first: Any = None  # first layer with columns; None: no layer has any, or the rows are bypassed
        for layer_idx, layer in enumerate(layers):
            if isinstance(layer, RowsLayer):
                self.first = self.first or layer
                group = self.all
                if layer.window is not None:
                    group = self.windows.setdefault(layer.window, Group(itself, layer.window))
                group.layers[layer_idx] = layer
        self.states: RowStates | None = None
        if kinds.num_states:
            self.states = RowStates({at: layers[at] for at in kinds.num_states}, kinds)
        # rows can go on only after certain columns, because layers have windows or carry states
        self.is_exact = bool(kinds.windows) or self.states is not None
        self.groups = (self.all, *self.windows.values())
        self.layer_class_to_replicate = partial(_another_layer, itself)  # type: ignore[assignment]
        self.ids = IdsStream()  # token ids that ran
        self.prompts: list[Prompt] = []  # what each row began with; empty before the first forward
        self.n = 0  # columns
        self.filled = 0  # columns that were known before the first forward
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

    # Called by a `generate` that is passed rows which an earlier call has returned.

    @property
    def _is_user_defined(self) -> bool:
        """True; `generate` sets this as it begins."""
        return True

    @_is_user_defined.setter
    def _is_user_defined(self, is_so: bool) -> None:
        if self.is_passed and self.in_generate:
            self.calls.close(self)  # a function in the place of `generate` calls transformers' once more on these rows
            self.reset()
            self.in_generate = True
        self.is_passed = True

    @contextmanager
    def running(self, model: Any, given: Any) -> Iterator["Rows"]:
        """Enclose a `generate` that was passed these rows, with the rows that it runs on: these, or others that go on
        from them.
        """
        previous: Rows | None = self
        if not given.only_new_tokens:
            self.escaped = True
            if not self.is_open:  # the rows were given to a function that calls `generate` itself
                previous, self.previous = self.previous, None
        rows: Rows = self.calls.begin(model, given, previous)
        rows.handle, previous = self.handle, None
        store = self.calls.store
        with store.lock:
            store.running.add(rows)
        try:
            yield rows
        finally:
            with store.lock:
                store.running.discard(rows)
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
            self.heed()
        if self.is_running and self.thread != threading.get_ident():
            self.calls.require_not_running(self)
        if self.is_running and not self.num_forwards:
            self.roll_back()
        if not self.is_open:
            if self.all.memory:  # an interrupt has left it
                self.reset()
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
        if self.kinds.clamps_one_token and num_new == 1 and self.n:
            self.keep_less(self.n)  # what is computed so differs from what a prompt computes
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
        n = self.n + self.num_new
        for layer in self.layers if self.why_bypassed is None else ():
            if layer.n != n and layer.held is not None:
                self.is_whole = False
        if self.apart:
            self._gather()
        else:
            self._versions = tuple(map(_VERSION, self._tensors))
        self.n, self.is_running = n, False  # after an interrupt before this, the forward is taken back
        if self.states is not None and n >= self.states.next_place:
            self.states.take([prompt.pad for prompt in self.prompts], n, is_step=self.num_new == 1 and n > 1)
        self.num_forwards += 1
        if self.must_confirm:
            output = self.calls.confirm(self, output)
        return output

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Update a convolution's state as transformers does; return the inputs that the convolution runs over."""
        inputs: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        states, num_new = self.states, self.num_new
        if states is not None and states.most_inside and self.is_running and 1 < num_new <= inputs.shape[-1]:
            pads = [prompt.pad for prompt in self.prompts]
            states.record(StateKey(layer_idx, "conv", state_idx), inputs, pads, self.n, self.n + num_new)
        return inputs

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
        for layer in self.layers:
            if (has_keys(layer) and layer.get_seq_length()) or any(getattr(layer, "has_previous_state", {}).values()):
                return True
        return False

    def note_shown(self) -> None:
        """Note that somebody gets keys or values, and may write to them unseen: nothing is kept after that."""
        if self.is_whole and not self.is_running and self.why_bypassed is None:
            self.calls.keep(self)
            self.is_whole = False

    def give(self, layer_idx: int, name: str, states: Tensor | None) -> None:
        """Put what somebody gives a layer into a layer of transformers', on which the rows run from here on."""
        self.note_shown()
        if self.why_bypassed is None:
            self.bypass("keys or values were put into its layers by hand")
        setattr(self.layers[layer_idx], name, states)

    def heed(self) -> None:
        """Go on with what is in the layers, and keep nothing more, if the first layer has other columns than the rows.

        Somebody has written them there, or a model inside this one has run forwards that told no hook.
        """
        first = self.first
        if first is not None and first.n != self.n and first.held is not None and not self.is_running:
            self.is_whole, self.n = False, first.n
            self._gather()

    def is_lost(self, idents: Collection[int]) -> bool:
        """Return whether a call or a loop on the rows ran in one of these threads, which ended with a fork."""
        return self.thread in idents and (self.in_generate or self.is_running or self.state.kind == "forward")

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
        # of states, and of windows, what the next token needs may have been written over
        if not self.windows_go_on_at(self.n):
            self.is_whole, self.is_broken = False, True
        self._gather()  # this lets layers of one window begin at one column, also where they did not
        self.is_broken = bool(self.n) and (self.is_broken or self.states is not None)

    # Memory of the rows.

    def begin(self, inputs: Sequence[RowInput], n: int, wanted: int) -> None:
        """Begin rows of these tokens, whose first `n` columns are there; they will have `wanted`, if that is not 0."""
        self.n, self.filled, self.wanted = n, n, wanted
        for layer in self.layers:
            if layer.held is not None:
                layer.n = n
        self.prompts = self.ids.start(inputs, n)
        if self.states is not None:
            self.states.begin(len(inputs))
        self.note_writes()
        self.is_open = True  # last: an interrupt comes before or after

    def take(self, held: list[Streams], n: int, base: int = 0) -> None:
        """Let the layers without a window lie in this memory: its first columns are the columns `[base, n)`."""
        self.n = n
        self.all.take(held, n, base)
        self.note_writes()

    def _gather(self) -> None:
        """Let the rows lie where layers made memory of their own in a forward, without a copy."""
        for group in self.groups:
            if group.window in self.apart:
                group.gather()
        self.apart.clear()
        self.note_writes()

    def note_writes(self) -> None:
        """Note that everything written to the rows until here was written by us."""
        tensors = list[Tensor]()
        for group in self.groups:
            tensors += map(_TENSOR, group.memory)
        self._tensors, self._versions = tensors, tuple(map(_VERSION, tensors))

    @property
    def is_edited(self) -> bool:
        """True if somebody else has written to the rows."""
        return self._versions != tuple(map(_VERSION, self._tensors))

    def can_go_on_at(self, n: int) -> bool:
        """Return whether the rows hold all that the token after the first `n` columns needs."""
        if self.states is not None and (n != self.n or self.is_broken or self.is_running):
            return False
        return self.windows_go_on_at(n)

    def windows_go_on_at(self, n: int) -> bool:
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

    def make_dense(self, index: Sequence[int] | None = None) -> None:
        """Give each row all of its columns, in memory of its own; with `index`, those of row `index[i]` to row `i`."""
        if self.shared is None:
            return
        if not self.is_running and self.is_edited:
            self.is_whole = False
        self._gather()
        stop = max(self.n, *(layer.n for layer in self.layers))  # in a forward some layers have more columns
        room, shapes = room_for(stop, self.wanted), memory.shapes_of_rows(self.all.memory)
        sources = range(self.num_rows) if index is None else index
        made = memory.make(shapes, len(sources), room)
        for row, source in enumerate(sources):
            pad = self.prompts[source].pad
            self.copy_columns(source, pad, stop, made, row, pad)
        self.shared = self.reads = None
        self.take(made, self.n)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all that the rows hold: segments, columns and states."""
        if self.why_bypassed is not None:
            return sum(states.nbytes for states in self._held_in_layers())
        num_bytes = 0 if self.shared is None else self.shared.num_bytes
        for group in self.groups:
            num_bytes += memory.num_bytes(group.memory, self.n - group.base)
        return num_bytes + (0 if self.states is None else self.states.num_bytes)

    def _held_in_layers(self) -> Iterator[Tensor]:
        """Yield the tensors that the layers of a bypassed call hold."""
        for layer in self.layers:
            if has_keys(layer) and layer.is_initialized:
                yield from streams_of(layer).values()
        yield from read_states({at: self.layers[at] for at in self.kinds.num_states}).values()

    def bypass(self, why: str) -> None:
        """Run the rows on transformers' own layers from here on, and keep nothing more; `last_call` says why."""
        self.make_dense()
        layers = list(cache_layers(self.calls.model))
        if self.records_drafts:
            for layer in layers:
                getattr(layer, "activate_past_recording", lambda: None)()
        for number, layer in enumerate(self.layers):
            if has_keys(layer) and layer.is_initialized:
                layers += [DynamicLayer() for _ in range(len(layers), number + 1)]  # type: ignore[no-untyped-call]
                layer.put_into(layers[number])
        if self.states is not None:
            put_states({at: layers[at] for at in self.kinds.num_states}, self.states.read())
        for row in self.state.counts:
            row.stopped += f"; then {why}"
        if self.state.counts:  # if not, the call begins with this forward, and is counted when that has returned
            self.calls.note_bypass()
        self.why_bypassed, self.is_open = why, True
        self.run_on(layers)

    def run_on(self, layers: list[Any]) -> None:
        """Have these layers of transformers, which hold what the rows hold, and nothing besides."""
        self.all, self.windows, self.groups, self.states, self.first = Group(self._itself), {}, (), None, None
        self.is_exact, self._tensors, self._versions = False, [], ()
        self.apart.clear()
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
            and not self.apart  # an interrupt came before layers lay together
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

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row `i` continue as row `beam_idx[i]`; full blocks of rows that are given up are kept first."""
        if self.in_generate:
            self.calls.keep_full(self)
        moves.apply(self, beam_idx, self.common_columns if beam_idx.shape[0] == self.num_rows else 0)

    def batch_repeat_interleave(self, repeats: int) -> None:
        moves.apply(self, [row for row in range(self.batch()) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (int64, or a mask of booleans) alone."""
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        moves.apply(self, torch.where(chosen < 0, chosen + self.batch(), chosen))

    def batch(self) -> int:
        if self.why_bypassed is None:
            return self.num_rows
        return next((states.shape[0] for states in self._held_in_layers()), 0)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens; 0 changes nothing."""
        moves.crop(self, tokens_to_remove)

    def activate_past_recording(self) -> None:
        """Get ready to take drafts back: a model that cannot say which logits it needs computes all of them."""
        self.records_drafts = True
        if self.why_bypassed is not None:
            super().activate_past_recording()  # type: ignore[no-untyped-call]
        elif self.states is not None:
            self.states.record_past()

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
            self.heed()
        return self.n if layer_idx in (0, -len(self.layers)) or self.layers[layer_idx].held is not None else 0

    @property
    def is_initialized(self) -> bool:
        return self.get_seq_length() > 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Rows":
        """Make other rows with the same columns, which go on by themselves."""
        copied: Rows = moves.forked(self, torch.arange(self.batch(), device="cpu"))
        memo[id(self)] = copied
        return copied

    def share(self, shared: SharedColumns, held: list[Streams], n: int) -> None:
        """Let the rows, of `n` columns, have these segments in common; in `held` their own columns follow."""
        shared.rows = ref(self)
        with self.calls.store.lock:
            self.calls.store.sharing.add(self)  # some of these columns may lie in blocks
        self.take(held, n, shared.plan.first_own)
        self.shared = self.reads = shared


def _another_layer(owner: "ref[Rows]") -> RowsLayer:
    """Make one layer more than the model's config names."""
    rows = owner()
    assert rows is not None
    layer = RowsLayer(len(rows.layers), owner)
    rows.all.layers[layer.layer_idx] = layer
    rows.first = rows.first or layer
    return layer
