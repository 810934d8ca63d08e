"""`Rows`, what transformers runs one call on: its keys and values as tensors of this call alone.

Owns the rows' length, their memory and whatever moves rows; decides nothing about what is known or kept, which it asks of `calls`.
"""

import copy
import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, NoReturn, Protocol, cast
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ..attention.causal import CausalSquare
from ..blocks.tokens import TokenIds
from ..errors import CacheArgumentError
from . import memory
from .ids import Begins, IdsStream
from .layers import SPARE, Reads, RowsLayer, room_for
from .memory import Columns, Stream, Streams
from .shared import Looks, Seen, SharedColumns, SquareReads

_VERSION = attrgetter("_version")
_IS_OWN = attrgetter("is_own")
_TENSOR = attrgetter("tensor")


class RunsRows(Protocol):
    """Who opens rows and keeps what they computed."""

    def open(self, rows: "Rows", model: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]: ...

    def go_on(self, rows: "Rows", arguments: Mapping[str, Any]) -> Mapping[str, Any]: ...

    def keep_prompt(self, rows: "Rows") -> None: ...

    def begin_from(self, rows: "Rows", model: Any, given: Any) -> "Rows": ...

    def close(self, rows: "Rows") -> None: ...

    def keep_full(self, rows: "Rows") -> None: ...

    def confirm(self, rows: "Rows", output: Any) -> Any: ...

    def note_sharing(self, rows: "Rows") -> None: ...

    @property
    def model(self) -> Any: ...  # whose rows they are

    def refuse(self, model: Any) -> NoReturn: ...  # it is another one

    def require_not_running(self, rows: "Rows") -> None: ...  # in a thread that lives

    def keep_complete(self, rows: "Rows") -> None: ...  # somebody may write to them from here on


class BeginsUnder(Begins, Protocol):
    """The same, under a prefix key."""

    @property
    def root(self) -> bytes: ...

    @property
    def first_position(self) -> int: ...


class Prompt:
    """What one row began with.

    Attributes:
        root: its prefix key: all that shapes its keys and values besides tokens.
        pad: columns of left padding.
        first_position: of its first token.
        kept: tokens whose blocks need not be kept any more.
    """

    __slots__ = ("first_position", "kept", "pad", "root")

    def __init__(self, root: bytes = b"", pad: int = 0, first_position: int = 0) -> None:
        self.root, self.pad, self.first_position = root, pad, first_position
        self.kept = 0

    def copy(self) -> "Prompt":
        """The same for another row."""
        copied = Prompt(self.root, self.pad, self.first_position)
        copied.kept = self.kept
        return copied


class Rows(Cache):
    """The rows of one call, or of one loop of forwards.

    columns: [0, pad) padding | [pad, n) valid in all layers, between two forwards

    Args:
        calls: opens them at their first forward, and keeps what they compute.
        num_layers: of the model.
        looks: whether the model looks at keys and values itself.

    Attributes:
        n: columns of all rows.
        base: the first column that lies in the rows' own memory; those before it are shared.
        prompts: what each row began with; empty before the first forward.
        ids: what ran.
        memory: of streams that lie together.
        has_own: some layers have memory of their own.
        why_bypassed: these rows reuse and keep nothing, and run on transformers' own layers; None: they do not.
        in_generate: `generate` runs them, which passes what it must.
        num_forwards: that have returned.
        judged: the model was the same for the columns before this one, as somebody has looked.
        trust_end: it was not for those from this one on.
        must_confirm: `calls` is told of the next forward that returns.
        reads_next, reads_all: the arguments of the next forward, or of all, are looked at.
        is_whole: every stream has all columns; else nothing more is kept.
        escaped: somebody else may hold them, so their memory is never another call's.
        copies: batch row -> row that runs for it, in the first forward alone; None: each runs.
        prompt_end: columns of the prompt, which is kept once they are complete; 0: it was.
        common_columns: of rows that change places; 0: unknown.
        shared: what several rows have in common, held once; None: each row has all of its columns.
        may_be_lazy: whether attention may be left to read keys and values.
        seen: how attention has read them.
        handle: the cache of the call.
        is_behind_handle: forwards are passed that in place of the rows, and return it.
        state: what `calls` remembers of them.
        thread: ident of the one that ran them last.
        captured: runs their forwards by graphs, and has them lie in the arena; None: nothing does.
        why_not_captured: why not; "": they may be.
    """

    is_paged_prefix_cache = True
    layers: list[Any]

    def __init__(self, calls: RunsRows, num_layers: int, looks: Looks) -> None:
        self._itself = itself = ref(self)
        super().__init__(layers=[*map(RowsLayer, range(num_layers), repeat(itself))])
        self._given: list[RowsLayer] = []  # layers into which somebody has put keys or values
        self.layer_class_to_replicate = partial(_another_layer, self.layers, itself)  # type: ignore[assignment]
        self.calls = calls
        self.n = self.base = 0
        self.prompts: list[Prompt] = []
        self.ids = IdsStream()
        self.memory: list[Streams] = []
        self.is_open = self.in_generate = self.is_running = False
        self.why_bypassed: str | None = None
        self.is_whole = self.must_confirm = True
        self.judged = self.num_forwards = 0
        self.trust_end = math.inf
        self.reads_next = self.reads_all = False
        self.escaped = False
        self.records_drafts = False
        self.copies: list[int] | None = None
        self.prompt_end = self.common_columns = 0
        self.previous: Rows | None = None  # of the call before; given up when these open
        self.state: Any = None
        self.shared: SharedColumns | None = None
        self.looks = looks
        self.may_be_lazy = False
        self.seen = Seen()
        self._reads: Any = None
        self.handle: ref[Any] | None = None
        self.is_behind_handle = False
        self.captured: Any = None
        self.why_not_captured = ""
        self.thread = threading.get_ident()
        self._tensors: list[Tensor] = []  # that the rows lie in
        self._versions: tuple[int, ...] = ()  # how often these were written, by us
        self.has_own = False
        self._room_end = math.inf  # the column at which memory that lies together ends
        self._num_new = 0
        self._lengths: list[int] | None = None  # columns of layers before a bypassed forward that has not returned

    # What `generate` tells that is passed rows which a call has returned.

    def begin_rows(self, model: Any, given: Any) -> "Rows":
        """The rows on which that `generate` runs: these, or others that go on where these stop."""
        return self.calls.begin_from(self, model, given)

    @contextmanager
    def running(self, rows: "Rows") -> Iterator[None]:
        """The span of that `generate`."""
        try:
            yield
        finally:
            previous = rows.previous
            self.calls.close(rows)
            if not self.is_open:
                self.previous = rows if rows.is_open else previous
            if rows.is_open and self.handle is not None and (handle := self.handle()) is not None:
                handle.adopt(rows, self)

    # What the hooks of the model's forward tell.

    def before_forward(self, model: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """A forward begins; returns what it is to run with."""
        if model is not self.calls.model:
            self.calls.refuse(model)
        if self.why_bypassed is None and (self._given or (self.layers and self.layers[0].n != self.n)):
            self._heed()
        if self.is_running and self.thread != threading.get_ident():
            self.calls.require_not_running(self)
        if self.is_running and not self.num_forwards:
            self.roll_back()
        if not self.is_open:
            arguments = self.calls.open(self, model, arguments)
        elif (
            self.reads_next
            or self.is_running
            or self.reads_all
            or not self.in_generate
            or arguments.get("input_ids") is None
        ):
            arguments = self.calls.go_on(self, arguments)
        if self.why_bypassed is not None:
            self.roll_back()
            self._lengths = [layer.get_seq_length() for layer in self.layers]
            return arguments
        if self.prompt_end and self.n >= self.prompt_end:
            self.calls.keep_prompt(self)
        ids = arguments["input_ids"]
        if tuple(map(_VERSION, self._tensors)) != self._versions:
            self.is_whole = False
        num_new = self._num_new = ids.shape[1]
        self.is_running = True
        self.ids.note(ids, self.n)
        if self.n + num_new > self._room_end:
            self.make_room(self.n + num_new, 0)
        if num_new > 1 or self._reads is not None:
            self._start_reads(self.n, self.n + num_new)
        return arguments

    def after_forward(self, output: Any) -> Any:
        """It has returned."""
        if self.why_bypassed is None:
            n = self.n + self._num_new
            for layer in self.layers:
                if layer.n != n and layer.held is not None:
                    self.is_whole = False
                if layer.is_own and not self.has_own:
                    self.has_own = True
            self.n, self.is_running = n, False
            self.num_forwards += 1
            if self.has_own:
                self.note_writes()
            else:
                self._versions = tuple(map(_VERSION, self._tensors))
        self._lengths = None
        if self.must_confirm and self.state is not None:
            output = self.calls.confirm(self, output)
        return output

    def note_given(self, layer: RowsLayer) -> None:
        """Somebody has put keys or values into a layer."""
        self._given.append(layer)

    def note_shown(self) -> None:
        """Somebody gets keys or values, and may write to them unseen: what is complete is kept, and nothing more."""
        if self.is_whole and not self.is_running and self.why_bypassed is None:
            self.calls.keep_complete(self)
            self.is_whole = False

    def _heed(self) -> None:
        """Go on with what is in the layers: keys and values that somebody has put there, or forwards that told no hook, as of the model
        inside. Nothing more is kept then.
        """
        if self._given:
            first, self.has_own = self._given[0], True
            self._given.clear()
        elif self.is_running or not self.layers or self.why_bypassed is not None or self.layers[0].n == self.n:
            return
        else:
            first = self.layers[0]
        if first.held is not None:
            self.n, self.is_whole = first.n, False
            self.has_own = any(map(_IS_OWN, self.layers))
            self.note_writes()

    def is_lost(self, idents: Collection[int]) -> bool:
        """Whether one of these threads, which ended with a fork, was in a call on the rows, or in a loop."""
        is_loop = self.state is not None and self.state.kind == "forward"
        return self.thread in idents and (self.in_generate or self.is_running or is_loop)

    def roll_back(self) -> None:
        """Take back a forward that died; after the first one the rows begin again."""
        if self._lengths is not None:
            lengths, self._lengths = self._lengths, None
            for layer, num in zip(self.layers, lengths, strict=False):
                if layer.get_seq_length() > num:
                    layer.keys, layer.values = layer.keys[..., :num, :], layer.values[..., :num, :]
        elif self.is_running and not self.num_forwards:
            self.reset()
        elif self.is_running:
            self.is_running = False
            for layer in self.layers:
                layer.n = min(layer.n, self.n)
            self.has_own = any(map(_IS_OWN, self.layers))
            self.note_writes()

    # Their memory.

    def begin(self, inputs: Sequence[BeginsUnder], wanted: int) -> None:
        """Rows of these tokens begin, which will have so many columns as far as that is known."""
        self.prompts = [Prompt(row.root, row.pad, row.first_position) for row in inputs]
        self.is_open = True
        for layer in self.layers:
            layer.wanted = wanted

    def start_at(self, n: int, inputs: Sequence[BeginsUnder]) -> None:
        """The columns before `n` are there; of these tokens."""
        self.n = n
        for layer in self.layers:
            if layer.held is not None:
                layer.n = layer.filled = n
        self.ids.start(inputs, n)
        self.note_writes()

    def _start_reads(self, start: int, stop: int) -> None:
        """Say what the layers read in a forward of the columns `[start, stop)`."""
        shared, reads = self.shared, cast(Reads | None, None)
        if shared is not None and shared.must_leave:
            self.make_dense()
        elif shared is not None:
            shared.start_forward(start, stop)
            reads = shared
        elif start and stop - start > 1 and self.may_be_lazy and CausalSquare.pays(start, stop):
            reads = SquareReads(start, stop, self.looks)
        if reads is not self._reads:
            self._reads = reads
            for layer in self.layers:
                layer.reads = reads

    def share(self, shared: SharedColumns, held: list[Streams], n: int) -> None:
        """From here on the rows have these segments in common, and their own columns, from the first behind one on, lie in this memory."""
        shared.rows, shared.seen = ref(self), self.seen
        self.calls.note_sharing(self)
        self.take(held, n, shared.plan.first_own)
        self.shared = self._reads = shared
        for layer in self.layers:
            layer.reads = shared

    def make_dense(self) -> None:
        """Each row gets all of its columns."""
        shared, n = self.shared, self.n
        if shared is None:
            return
        if not self.is_running and self.is_edited:
            self.is_whole = False
        stop = max(n, *(layer.n for layer in self.layers))  # in the middle of a forward some are further
        self.has_own = any(map(_IS_OWN, self.layers))  # or have got memory of their own
        room = room_for(stop, self.layers[0].wanted)
        own = self.all_memory()
        whole = memory.make(memory.shapes_of_rows(own), self.num_rows, room)
        for row in range(self.num_rows):
            self.copy_columns(row, shared.plan.pads[row], stop, whole, row, shared.plan.pads[row])
        self.shared = self._reads = None
        for layer in self.layers:
            layer.reads = None
        self.take(whole, n)

    def copy_columns(self, row: int, start: int, stop: int, to: list[Streams], to_row: int, column: int) -> None:
        """Copy columns of a row, wherever they lie, to those from `column` on of a row of other memory."""
        at = start
        if self.shared is not None:
            at = self.shared.copy_columns(row, start, stop, to, to_row, column)
        if at < stop:
            memory.copy_columns(self.columns(row, at, stop), to, to_row, column + at - start)

    def take(self, held: list[Streams], n: int, base: int = 0) -> None:
        """From here on the columns `[base, n)` are the first ones of this memory."""
        self.memory, self.n, self.base = held, n, base
        lengths = [n if layer.held is None else layer.n for layer in self.layers]  # a forward may have skipped layers
        places, room_end = dict[int, dict[str, Tensor]](), math.inf
        for tensor, names in held:
            room_end = min(room_end, base + tensor.shape[3])
            for (layer_idx, name), part in zip(names, tensor, strict=True):
                places.setdefault(layer_idx, {})[name] = part
        missing = range(len(self.layers), 1 + max(places, default=-1))
        self.layers += map(RowsLayer, missing, repeat(self._itself))
        lengths += [n] * len(missing)
        for layer_idx, of_layer in places.items():
            self.layers[layer_idx].lie_in(of_layer["key"], of_layer["value"], lengths[layer_idx], base)
        self.has_own, self._room_end = any(map(_IS_OWN, self.layers)), room_end
        self.note_writes()

    def all_memory(self) -> list[Streams]:
        """Of all layers, also of those that have their own."""
        if not self.has_own or self.why_bypassed is not None:
            return self.memory
        found = []
        for tensor, names in self.memory:
            for number, name in enumerate(names):
                if not self.layers[name[0]].is_own:
                    found.append(Streams(tensor[number : number + 1], (name,)))
        return found + [streams for layer in self.layers if layer.is_own for streams in layer.streams()]

    def written_streams(self) -> frozenset[Stream]:
        """The streams that the last forward has written."""
        written = [layer.layer_idx for layer in self.layers if layer.held is not None and layer.n == self.n]
        return frozenset((layer_idx, name) for layer_idx in written for name in ("key", "value"))

    def make_room(self, num_columns: int, wanted: int) -> None:
        """Let memory that lies together hold so many columns."""
        for layer in self.layers:
            layer.wanted = wanted
        if num_columns > self._room_end:
            self.has_own = any(map(_IS_OWN, self.layers))
            held, room = self.all_memory(), room_for(num_columns, wanted) - self.base
            index = torch.arange(held[0].tensor.shape[1], device="cpu")
            self.take(memory.selected(held, index, self.n - self.base, room), self.n, self.base)

    def bypass(self, why: str, layers: list[Any]) -> None:
        """From here on the rows run on these layers of transformers, which hold nothing yet; nothing of them is kept."""
        self.make_dense()
        if self.records_drafts:
            for layer in layers:
                getattr(layer, "activate_past_recording", lambda: None)()
        for number, layer in enumerate(self.layers):
            if layer.is_initialized:
                layers += [DynamicLayer() for _ in range(len(layers), number + 1)]  # type: ignore[no-untyped-call]
                layers[number].update(*layer.columns())
        self.why_bypassed, self.memory, self.is_open = why, [], True
        self._tensors, self._versions = [], ()
        self.layers[:] = layers  # the same list: who has it sees these
        self.layer_class_to_replicate = DynamicLayer

    def note_writes(self) -> None:
        """What was written until here, we have written."""
        self._tensors = [*map(_TENSOR, self.all_memory() if self.has_own else self.memory)]
        self._versions = tuple(map(_VERSION, self._tensors))

    def judge(self, stop: int, *, held: bool) -> None:
        """Somebody has looked whether the model was the same up to a column."""
        if held:
            self.judged = max(self.judged, stop)
        else:
            self.trust_end = min(self.trust_end, self.judged)

    @property
    def num_true_columns(self) -> int:
        """Columns that are what their tokens say, under their prefix keys, as far as anybody has looked."""
        return int(min(self.n, self.trust_end))

    @property
    def is_source(self) -> bool:
        """Whether there are such columns."""
        is_ours = self.is_open and self.is_whole and self.why_bypassed is None and not self.is_edited
        return is_ours and self.num_true_columns > 0

    @property
    def is_edited(self) -> bool:
        """Whether somebody else has written to the rows."""
        return bool(self._given) or self._versions != tuple(map(_VERSION, self._tensors))

    @property
    def num_rows(self) -> int:
        """Rows that run."""
        return len(self.prompts)

    @property
    def kv_bytes(self) -> int:
        """Bytes of their columns."""
        if self.why_bypassed is not None:
            return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers if layer.is_initialized)
        segments = 0 if self.shared is None else self.shared.num_bytes
        return segments + memory.num_bytes(self.all_memory(), self.n - self.base)

    def columns(self, row: int, start: int, stop: int) -> Columns:
        """Columns of a row, side by side: where they lie, or copies where they lie in what rows share."""
        own = self.all_memory()
        if start >= (self.base if self.shared is None else self.shared.plan.ends[row]):
            return Columns(own, row, start - self.base, stop - self.base)
        made = memory.make(memory.shapes_of_rows(own), 1, stop - start)
        self.copy_columns(row, start, stop, made, 0, 0)
        return Columns(made, 0, 0, stop - start)

    def token_ids(self) -> list[TokenIds]:
        """What ran in each row, without padding, as far as it is true."""
        return self.ids.rows([prompt.pad for prompt in self.prompts], self.num_true_columns)

    # What moves rows.

    def apply(self, index: Sequence[int] | Tensor, start: int = 0) -> None:
        """Row `i` continues as row `index[i]`, in all streams.

        Args:
            start: rows that change places have the columns before it in common.
        """
        self.roll_back()
        self._heed()
        at = memory.as_index(index)
        if not self.in_generate:
            self._require_rows(at)
        if self.why_bypassed is not None:
            for layer in self.layers:
                layer.reorder_cache(at)
            return
        if self.is_edited:
            self.is_whole = False
        num_rows = at.shape[0]
        if self.shared is not None and not start and not self.shared.fits(at.tolist()):
            self.make_dense()
        held = self.all_memory()
        start = max(start, self.base)
        if num_rows == self.num_rows and start:
            memory.change_places(held, at, start - self.base, self.n - self.base)
        elif held:
            room = max(self.n - self.base, *(tensor.shape[3] for tensor, _ in held))
            self.take(memory.selected(held, at, self.n - self.base, room), self.n, self.base)
        self.ids.select(at)
        if num_rows != self.num_rows:
            self.common_columns = 0
        if not self.common_columns:
            self.prompts = [self.prompts[number].copy() for number in at.tolist()]
        self.note_writes()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` continues as row `beam_idx[i]`; full blocks of rows that are given up are kept first."""
        if self.in_generate and self.state is not None:
            self.calls.keep_full(self)
        self.apply(beam_idx, self.common_columns if beam_idx.shape[0] == self.num_rows else 0)

    def _require_rows(self, index: Tensor) -> None:
        """Raises CacheArgumentError where the index names no rows, or rows that are not there."""
        numbers, num_rows = index.tolist(), self._batch()
        if not numbers or not all(0 <= number < num_rows for number in numbers):
            raise CacheArgumentError(f"rows {numbers} were asked for; there are {num_rows} rows, counted from 0")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes `repeats` rows."""
        self.apply([row for row in range(self._batch()) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (int64, or a mask of booleans)."""
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self.apply(torch.where(chosen < 0, chosen + self._batch(), chosen))

    def _batch(self) -> int:
        if self.why_bypassed is None:
            return self.num_rows
        return max((layer.keys.shape[0] for layer in self.layers if layer.is_initialized), default=0)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` tokens; 0 changes nothing.

        Raises:
            CacheArgumentError: a positive number.
        """
        if tokens_to_remove > 0:
            raise CacheArgumentError(
                f"crop takes the number of tokens to remove as a negative number, got {tokens_to_remove}"
            )
        self.roll_back()
        self._heed()
        if self.is_edited:
            self.is_whole = False
        if -tokens_to_remove > self.get_seq_length():
            raise CacheArgumentError(f"cannot take back {-tokens_to_remove} tokens; there are {self.get_seq_length()}")
        if self.shared is not None and self.n + tokens_to_remove < max(self.shared.plan.ends):
            self.make_dense()
        for layer in self.layers:
            layer.crop(int(tokens_to_remove))
        self.n = max(0, self.n + int(tokens_to_remove))
        if not self.n and not self.in_generate:
            self.reset()  # other rows may begin
        self.judged = min(self.judged, self.n)
        for prompt in self.prompts:
            prompt.kept = min(prompt.kept, max(0, self.n - prompt.pad))

    def reset(self) -> None:
        """Drop the rows."""
        if self.why_bypassed is not None:
            self.layers[:] = [RowsLayer(index, self._itself) for index in range(len(self.layers))]
            self.layer_class_to_replicate = partial(_another_layer, self.layers, self._itself)  # type: ignore[assignment]
            self.why_bypassed = None
        for layer in self.layers:
            layer.reset()
        self.is_whole = self.must_confirm = True
        self.num_forwards, self.copies = 0, None
        self.prompt_end = self.common_columns = 0
        self.memory, self.prompts, self.ids, self.n, self.base = [], [], IdsStream(), 0, 0
        self.shared = self._reads = None
        self.is_open = self.is_running = self.has_own = False
        self._given.clear()
        self._tensors, self._versions, self._room_end, self._lengths = [], (), math.inf, None
        self.judged, self.trust_end = 0, math.inf

    def activate_past_recording(self) -> None:
        """Drafts will be verified: a model that cannot say which logits it needs computes them all."""
        self.records_drafts = True
        if self.why_bypassed is not None:
            super().activate_past_recording()  # type: ignore[no-untyped-call]

    # What transformers and users ask.

    def __bool__(self) -> bool:
        """True even without rows: some models ask `if past_key_values`."""
        return True

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, None]]:
        """Each layer's keys and values, as of a `DynamicCache`."""
        return ((layer.keys, layer.values, None) for layer in self.layers)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "rows of a PagedPrefixCache cannot be pickled, nor copied by copy.copy: blocks of a pool may lie in them; "
            "use copy.deepcopy, or keep the token ids and pass them to generate again"
        )

    def __repr__(self) -> str:
        return f"Rows({self._batch()} rows of {self.get_seq_length()} tokens)"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the rows, padding included."""
        if self.why_bypassed is not None:
            return int(super().get_seq_length(layer_idx))
        if self._given or (self.layers and self.layers[0].n != self.n):
            self._heed()
        if layer_idx < 0:
            layer_idx += len(self.layers)
        if 0 < layer_idx < len(self.layers) and self.layers[layer_idx].held is None:
            return 0
        return self.n

    @property
    def is_initialized(self) -> bool:
        """Whether there are columns."""
        return self.get_seq_length() > 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Rows":
        """Other rows with the same columns, which go on by themselves.

        Raises:
            CacheArgumentError: gradients flow through the rows, and would not through their copies.
        """
        if self.why_bypassed is not None:
            self.roll_back()
            if any(layer.keys.requires_grad for layer in self.layers if layer.is_initialized):
                raise CacheArgumentError(
                    "gradients flow through the rows of this cache, and would not through a copy of them; copy it after "
                    "forwards in torch.no_grad()"
                )
        copied = type(self)(self.calls, 0, self.looks)
        memo[id(self)] = copied
        for name in (
            "n",
            "judged",
            "trust_end",
            "is_open",
            "in_generate",
            "why_bypassed",
            "num_forwards",
            "records_drafts",
        ):
            setattr(copied, name, getattr(self, name))
        copied.state = None if self.state is None else self.state.copy()
        copied.is_whole = self.is_whole and not self.is_edited
        copied.may_be_lazy = self.may_be_lazy
        copied.prompts, copied.ids = [prompt.copy() for prompt in self.prompts], self.ids.copy()
        if self.why_bypassed is not None:
            copied.layers[:] = copy.deepcopy(self.layers, memo)
            return copied
        copied.layers[:] = [RowsLayer(index, copied._itself) for index in range(len(self.layers))]
        index = torch.arange(self.num_rows, device="cpu")
        held = self.all_memory()
        if self.shared is not None:
            made = memory.selected(held, index, self.n - self.base, self.n - self.base + SPARE)
            copied.share(self.shared.copy(), made, self.n)
        elif held and self.n:
            copied.take(memory.selected(held, index, self.n - self.base, self.n - self.base + SPARE), self.n, self.base)
        for layer, of in zip(copied.layers, self.layers, strict=True):
            layer.n, layer.filled = layer.n if layer.held is None else of.n, of.filled  # a forward may have skipped it
        return copied


def _another_layer(layers: list[Any], owner: "ref[Rows]") -> RowsLayer:
    """A layer more than the model's config names."""
    return RowsLayer(len(layers), owner)
