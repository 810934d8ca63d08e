"""Defines `Rows`, on which transformers runs one call: its keys and values are tensors of this call alone.

Owns what a forward and a caller may do with rows, and whatever moves rows. It does not decide what is known or kept,
but asks `calls`.
"""

import copy
import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NoReturn, Protocol
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ..blocks.image_tokens import end_of_image, hold_images
from ..blocks.tokens import TokenIds
from ..errors import CacheArgumentError, ForwardMismatchError
from ..kv.states import LiveStates
from ..model.layer_streams import cut_streams
from ..model.support import has_keys
from . import memory
from .columns import Prompt, RowsColumns
from .ids import Begins, IdsStream
from .kinds import LayerKinds
from .layers import SPARE, RowsLayer
from .shared import Looks, SharedColumns
from .states import RowStates

_VERSION = attrgetter("_version")
_IS_OWN = attrgetter("is_own")


class KeepsRows(Protocol):
    """`KeepsRows` keeps what rows have computed."""

    def keep_prompt(self, rows: "Rows") -> None: ...

    def keep_full(self, rows: "Rows") -> None: ...  # called when rows change places

    def keep(self, rows: "Rows") -> None: ...  # called before somebody may write to the rows


class RunsRows(Protocol):
    """`RunsRows` opens rows, confirms what they computed, and closes them."""

    @property
    def model(self) -> Any: ...

    @property
    def keeping(self) -> KeepsRows: ...

    def begin_from(self, rows: "Rows", model: Any, given: Any) -> "Rows": ...

    def images_of_generate(self, passed: Mapping[str, Any]) -> Any: ...

    def open(self, rows: "Rows", arguments: Mapping[str, Any]) -> Mapping[str, Any]: ...

    def go_on(self, rows: "Rows", arguments: Mapping[str, Any]) -> Mapping[str, Any]: ...

    def confirm(self, rows: "Rows", output: Any) -> Any: ...

    def close(self, rows: "Rows") -> None: ...

    def note_sharing(self, rows: "Rows") -> None: ...

    def refuse(self, model: Any) -> NoReturn: ...  # called when a forward is of another model

    def require_not_running(self, rows: "Rows") -> None: ...  # refuses rows in a forward of a living thread


class CutsColumns(Protocol):
    """`CutsColumns` knows how a prompt is cut into forwards."""

    def commit_end(self, before: int, num_new_columns: int) -> int: ...  # first column of those that are not kept


class BeginsUnder(Begins, Protocol):
    """`BeginsUnder` is a row that begins under a prefix key."""

    @property
    def root(self) -> bytes: ...

    @property
    def first_position(self) -> int: ...

    @property
    def shift(self) -> int | None: ...


class Rows(RowsColumns):
    """`Rows` runs one call, or one loop of forwards; `RowsColumns` has where its columns lie.

    Args:
        calls: opens the rows at their first forward, and keeps what they compute.
        kinds: kinds of the model's layers.
        looks: whether the model looks at keys and values itself.

    Attributes:
        ids: token ids that ran.
        in_generate: True if `generate` runs the rows; it passes what it must.
        num_forwards: number of forwards that have returned.
        num_new: columns of the last forward.
        seen_same: number of columns that were there when somebody last saw that the model is the same.
        keep_end: first column that is never kept, nor read by other rows: from it on columns are not what their tokens
            and prefix keys say.
        must_confirm: True if `calls` is told of the next forward that returns.
        reads_next, reads_all: True if the arguments of the next forward, or of all forwards, are looked at.
        escaped: True if somebody else may hold the rows, so that their memory never becomes that of another call.
        is_lent: True if a call that begins may read the rows.
        copies: batch row -> row that runs for it, in the first forward alone; None: each row runs.
        prompt_end: columns of the prompt, which is kept once these are complete; 0: it was kept.
        common_columns: number of leading columns that rows which change places have in common; 0: not known.
        handle: the cache of the call.
        is_behind_handle: True if forwards are passed the handle in place of the rows, and return the handle.
        state: what `calls` remembers of the rows.
        chunks: sizes of the forwards that the prompt comes in. What comes in other forwards is not kept. None: the
            prompt may come in any forwards.
        lacks_windows: True if a forward died and what the next token needs is lost: what layers with a window held of
            it, and in a bypassed call also what layers carry.
        must_present: True if the model takes only a cache of a class of its own.
        thread: ident of the thread that ran the rows last.
        captured: runs the rows' forwards by graphs, and has the rows lie in the arena; None: nothing does.
        why_not_captured: why forwards are not captured; "": they may be.
    """

    is_paged_prefix_cache = True

    def __init__(
        self,
        calls: RunsRows,
        kinds: LayerKinds,
        looks: Looks,
    ) -> None:
        super().__init__(kinds, looks)
        self.calls = calls
        self.ids = IdsStream()
        self.is_open = self.in_generate = False
        self.must_confirm = True
        self.seen_same = self.num_forwards = 0
        self.keep_end = math.inf
        self.reads_next = self.reads_all = False
        self.escaped = False
        self.records_drafts = False
        self.copies: list[int] | None = None
        self.prompt_end = self.common_columns = 0
        self.previous: Rows | None = None  # rows of the call before; given up when these open
        self.is_lent = False
        self.state: Any = None
        self.handle: ref[Any] | None = None
        self.is_behind_handle = self.must_present = self.lacks_windows = False
        self.captured: Any = None
        self.chunks: CutsColumns | None = None
        self.why_not_captured = ""
        self.thread = threading.get_ident()
        self.num_new = 0
        self._num_bypassed = 0
        self._lengths: list[int] | None = None  # columns of each layer before a bypassed forward that has not returned

    # Called by a `generate` that is passed rows which an earlier call has returned.

    def begin_rows(self, model: Any, given: Any) -> "Rows":
        """Return the rows on which a `generate` runs that was passed these rows.

        They are these rows, or others that go on where these stop.
        """
        return self.calls.begin_from(self, model, given)

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
        if self.why_bypassed is None and (self._given or (first is not None and first.n != self.n)):
            self._heed()
        if self.is_running and self.thread != threading.get_ident():
            self.calls.require_not_running(self)
        if not self.num_forwards:
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
        if self.why_bypassed is not None:
            self.roll_back()
            if self.lacks_windows:
                self._require_not_lost()
            self._lengths = [layer.get_seq_length() if has_keys(layer) else 0 for layer in self.layers]
            ids = arguments.get("input_ids")
            self.num_new = 0 if ids is None else ids.shape[1]
            return arguments
        if self.prompt_end and self.n >= self.prompt_end:
            self.calls.keeping.keep_prompt(self)
        ids = arguments["input_ids"]
        if tuple(map(_VERSION, self._tensors)) != self._versions:
            self.is_whole = False
        num_new = self.num_new = ids.shape[1]
        self.is_running = True
        if self.lacks_windows or (self.states is not None and not self.states.are_whole):
            self._require_not_lost()
        if self.chunks is not None:
            self.keep_less(self.chunks.commit_end(self.n, num_new))
        if self.states is not None:
            self._start_states(self.states, num_new)
        self.ids.note(ids, self.n)
        if self.n + num_new > self._room_end:
            self.make_room(self.n + num_new, 0)
        if num_new > 1 or self._reads is not None:
            self._start_reads(self.n, self.n + num_new)
        return arguments

    def after_forward(self, output: Any) -> Any:
        """End a forward that has returned; return its output, as the caller is to get it."""
        if self.why_bypassed is None:
            n = self.n + self.num_new
            for layer in self.layers:
                if layer.n != n and layer.held is not None:
                    self.is_whole = False
                if layer.is_own and not self.has_own:
                    self.has_own = True
            self.n, self.is_running = n, False
            if self.states is not None:
                self.states.end_forward([prompt.pad for prompt in self.prompts], n)
            if self.has_own or self.windows is not None:
                self.note_writes()
            else:
                self._versions = tuple(map(_VERSION, self._tensors))
        else:
            self._num_bypassed += self.num_new
        self._lengths = None
        self.num_forwards += 1
        if self.must_confirm and self.state is not None:
            output = self.calls.confirm(self, output)
        return output

    def note_sharing(self) -> None:
        """Note that rows have columns in common from here on; see `RowsColumns`."""
        self.calls.note_sharing(self)

    def note_shown(self) -> None:
        """Note that somebody gets keys or values, and may write to them unseen.

        What is complete is kept before that, and nothing more after it.
        """
        if self.is_whole and not self.is_running and self.why_bypassed is None:
            self.calls.keeping.keep(self)
            super().note_shown()

    def _heed(self) -> None:
        """Go on with what is in the layers, and keep nothing more.

        Somebody has put keys and values there, or a model inside this one has run forwards that told no hook.
        """
        if self._given:
            first, self.has_own = self._given[0], True
            self._given.clear()
        elif self.is_running or self.why_bypassed is not None or not self.is_edited_or_ahead:
            return
        else:
            first = self.first
        if first.held is not None:
            self.n, self.is_whole = first.n, False
            self.has_own = any(map(_IS_OWN, self.layers))
            self.note_writes()

    def is_lost(self, idents: Collection[int]) -> bool:
        """Return whether a call or a loop on the rows ran in one of these threads, which ended with a fork."""
        is_loop = self.state is not None and self.state.kind == "forward"
        return self.thread in idents and (self.in_generate or self.is_running or is_loop)

    def give_up_previous(self) -> None:
        """Stop reading the rows of the call before."""
        self.previous = None

    def roll_back(self) -> None:
        """Take back a forward that died; if it was the first one, the rows begin again."""
        if not self.num_forwards and (self.is_running or self._lengths is not None):
            self.reset()
        elif self._lengths is not None:
            self.lacks_windows = bool(self.kinds.num_states or self.kinds.sights)
            lengths, self._lengths = self._lengths, None
            for layer, num in zip(self.layers, lengths, strict=False):
                if has_keys(layer):
                    cut_streams(layer, num)
        elif self.is_running:
            self.is_running = False
            for layer in self.layers:
                if isinstance(layer, RowsLayer):
                    layer.crop(self.n - layer.n)
            self.has_own = any(map(_IS_OWN, self.layers))
            self.note_writes()
            # what the next token sees has been written over
            self.lacks_windows = self.lacks_windows or (
                self.windows is not None and not self.windows.can_go_on_at(self.n)
            )

    # Memory of the rows.

    def begin(self, inputs: Sequence[BeginsUnder], wanted: int) -> None:
        """Begin rows of these tokens.

        Args:
            wanted: columns that the rows will have; 0 where that is not known.
        """
        self.prompts = [Prompt(row.root, row.pad, row.first_position, row.shift) for row in inputs]
        self.ids.begin(inputs)
        for prompt, row in zip(self.prompts, inputs, strict=True):
            if hold_images(row.token_ids):
                prompt.image_end = end_of_image(row.token_ids, 0, len(row.token_ids))
        self.is_open = True
        if self.states is not None:
            self.states.begin(len(inputs))
        for layer in self.layers:
            layer.wanted = wanted

    def start_at(self, n: int, inputs: Sequence[BeginsUnder]) -> None:
        """Note that the columns before `n` are there, and hold these tokens."""
        self.n = n
        for layer in self.layers:
            if layer.held is not None:
                layer.n = layer.filled = n
        self.ids.start(inputs, n)
        self.note_writes()

    def bypass(self, why: str, layers: list[Any]) -> None:
        """Run the rows on these layers of transformers from here on; nothing more of the rows is kept.

        Args:
            why: reason of the bypass, for `last_call`.
            layers: layers that hold nothing yet.
        """
        self.make_dense()
        if self.records_drafts:
            for layer in layers:
                getattr(layer, "activate_past_recording", lambda: None)()
        for number, layer in enumerate(self.layers):
            if has_keys(layer) and layer.is_initialized:
                layers += [DynamicLayer() for _ in range(len(layers), number + 1)]  # type: ignore[no-untyped-call]
                layer.put_into(layers[number])
        self.why_bypassed, self.memory, self.is_open, self._num_bypassed = why, [], True, self.n
        if self.states is not None:
            carry = {at: layers[at] for at in self.kinds.num_states}
            LiveStates(carry).put(self.states.live.read())
        self._tensors, self._versions, self.windows, self.states, self.is_exact = [], (), None, None, False
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
    def num_columns(self) -> int:
        """Number of columns whose tokens have run, also in a bypassed call, whose layers may carry states alone."""
        return self.n if self.why_bypassed is None else self._num_bypassed

    @property
    def num_true_columns(self) -> int:
        """Number of columns that are what their tokens say, under their prefix keys, as far as anybody has looked."""
        return int(min(self.n, self.keep_end))

    @property
    def is_source(self) -> bool:
        """True if other rows may begin with columns of these rows."""
        is_ours = self.is_open and self.is_whole and self.why_bypassed is None and not self.is_edited
        return is_ours and self.num_true_columns > 0

    def token_ids(self) -> list[TokenIds]:
        """Return the token ids that ran in each row, without padding, as far as the columns are what these say."""
        return self.ids.rows([prompt.pad for prompt in self.prompts], self.num_true_columns)

    # States that layers carry.

    def _require_not_lost(self) -> None:
        """Refuse to go on with rows of which layers with a window or a state have lost something.

        Raises:
            ForwardMismatchError: always, but for rows without columns.
        """
        if not self.n and self.why_bypassed is None:
            return
        self.is_running = False
        raise ForwardMismatchError(
            "what layers with a window see of these rows, or what layers carry of them, is lost, because a forward died in the middle of it, and it cannot be computed "
            "again here; reset() the cache, or pass the whole prompt to generate again"
        )

    def _start_states(self, states: RowStates, num_new: int) -> None:
        """Begin a forward of `num_new` columns in the layers that carry states."""
        if self.kinds.places.clamps_one_token and num_new == 1 and self.n:
            self.keep_less(self.n)  # what is computed so differs from what a prompt computes
        states.start_forward([prompt.pad for prompt in self.prompts], self.n, self.n + num_new)

    def _crop_states(self, states: RowStates, num_columns: int) -> None:
        """Take columns back from the states.

        Raises:
            CacheArgumentError: what layers carried after the columns that are left is gone; nothing has changed.
        """
        if not self.n or num_columns == self.n:
            states.clear()
        elif num_columns and not states.can_crop(num_columns):
            raise CacheArgumentError(
                f"cannot take back {num_columns} tokens: layers with a state carry what is after all tokens; reset() the rows, or pass the "
                "whole prompt to generate again"
            )
        else:
            states.crop(num_columns, self.n - num_columns, [prompt.pad for prompt in self.prompts])

    # Ways to move rows.

    def apply(self, index: Sequence[int] | Tensor, start: int = 0) -> None:
        """Let row `i` continue as row `index[i]`, in all streams.

        Args:
            start: number of leading columns that rows which change places have in common.
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
        have_common = bool(start)
        is_whole, self.is_whole = self.is_whole and not self.is_edited, False  # interrupted: some streams have changed
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
        if self.windows is not None:
            self.windows.select(at, self.n, start)
        if self.states is not None:
            self.states.select(at)
        self.ids.select(at)
        if num_rows != self.num_rows:
            self.common_columns = 0
        if not have_common:
            self.prompts = [self.prompts[number].copy() for number in at.tolist()]
        self.note_writes()
        self.is_whole = is_whole

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row `i` continue as row `beam_idx[i]`; full blocks of rows that are given up are kept first."""
        if self.in_generate and self.state is not None:
            self.calls.keeping.keep_full(self)
        self.apply(beam_idx, self.common_columns if beam_idx.shape[0] == self.num_rows else 0)

    def _require_rows(self, index: Tensor) -> None:
        """Refuse an index of rows.

        Raises:
            CacheArgumentError: the index names no rows, or rows that are not there.
        """
        numbers, num_rows = index.tolist(), self.batch()
        if not numbers or not all(0 <= number < num_rows for number in numbers):
            raise CacheArgumentError(f"rows {numbers} were asked for; there are {num_rows} rows, counted from 0")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Turn every row into `repeats` rows."""
        self.apply([row for row in range(self.batch()) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (int64, or a mask of booleans) alone."""
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self.apply(torch.where(chosen < 0, chosen + self.batch(), chosen))

    def batch(self) -> int:
        """Return the number of rows, also of a bypassed call."""
        if self.why_bypassed is None:
            return self.num_rows
        return next((states.shape[0] for states in self.held_in_layers()), 0)

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
        if -tokens_to_remove > self.get_seq_length():
            raise CacheArgumentError(f"cannot take back {-tokens_to_remove} tokens; there are {self.get_seq_length()}")
        windows = self.windows
        if tokens_to_remove and windows is not None and not windows.can_go_on_at(self.n + tokens_to_remove):
            raise CacheArgumentError(
                f"cannot take back {-tokens_to_remove} tokens: layers with a window have given up what the tokens before them saw; "
                "reset() the rows, or pass the whole prompt to generate again"
            )
        if self.shared is not None and self.n + tokens_to_remove < max(self.shared.plan.ends):
            self.make_dense()
        if self.states is not None:
            self._crop_states(self.states, -int(tokens_to_remove))
        for layer in self.layers:
            if self.why_bypassed is not None or isinstance(layer, RowsLayer):
                layer.crop(int(tokens_to_remove))
        self.n = max(0, self.n + int(tokens_to_remove))
        self._num_bypassed = max(0, self._num_bypassed + int(tokens_to_remove))
        if not self.n and not self.in_generate and self.why_bypassed is None:
            self.reset()  # after that, other rows may begin
        self.seen_same, self.common_columns = min(self.seen_same, self.n), min(self.common_columns, self.n)
        for prompt in self.prompts:
            prompt.kept = min(prompt.kept, max(0, self.n - prompt.pad))

    def images_of_generate(self, model: Any, passed: Mapping[str, Any]) -> Any:
        """Return the images that a `generate` on these rows is not to be passed."""
        return self.calls.images_of_generate(passed)

    def reset(self) -> None:
        """Drop the rows."""
        if self.why_bypassed is not None:
            self.make_layers()
            self.why_bypassed = None
        for layer in self.layers:
            layer.reset()
        if self.states is not None:
            self.states.clear()
        if self.windows is not None:
            self.windows.forget()
        self.is_whole = self.must_confirm = True
        self.num_forwards, self.copies = 0, None
        self.prompt_end = self.common_columns = 0
        self.memory, self.prompts, self.ids, self.n, self.base = [], [], IdsStream(), 0, 0
        self.shared = self._reads = None
        self.is_open = self.is_running = self.has_own = self.lacks_windows = False
        self._given.clear()
        self._tensors, self._versions, self._room_end, self._lengths = [], (), math.inf, None
        self.seen_same, self.keep_end = 0, math.inf

    def activate_past_recording(self) -> None:
        """Get ready to take drafts back: a model that cannot say which logits it needs computes all of them."""
        self.records_drafts = True
        if self.why_bypassed is not None:
            super().activate_past_recording()  # type: ignore[no-untyped-call]
        elif self.states is not None:
            self.states.live.record_past(records=True)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Update a convolution's state as transformers does, and record what is wanted of the convolution's inputs."""
        inputs: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        if self.states is not None:
            self.states.live.record(layer_idx, state_idx, inputs)
        return inputs

    # Called by transformers and by users.

    def __bool__(self) -> bool:
        """Return True even without rows: some models ask `if past_key_values`."""
        return True

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

    def __repr__(self) -> str:
        return f"Rows({self.batch()} rows of {self.get_seq_length()} tokens)"

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of columns of the rows, padding included."""
        if self.why_bypassed is not None:
            has_columns = any(
                map(has_keys, self.layers)
            )  # transformers tells no length of layers that carry states alone
            return int(super().get_seq_length(layer_idx)) if has_columns else self.num_columns
        first = self.first
        if self._given or (first is not None and first.n != self.n):  # `is_edited_or_ahead`, quicker: each step asks
            self._heed()
        if layer_idx < 0:
            layer_idx += len(self.layers)
        if 0 < layer_idx < len(self.layers) and self.layers[layer_idx].held is None:
            return 0
        return self.n

    @property
    def is_initialized(self) -> bool:
        """True if there are columns."""
        return self.get_seq_length() > 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "Rows":
        """Make other rows with the same columns, which go on by themselves.

        Raises:
            CacheArgumentError: gradients flow through the rows, and would not through their copies.
        """
        if self.why_bypassed is not None:
            self.roll_back()
            if any(states.requires_grad for states in self.held_in_layers()):
                raise CacheArgumentError(
                    "gradients flow through the rows of this cache, and would not through a copy of them; copy it after "
                    "forwards in torch.no_grad()"
                )
        if self.why_bypassed is None:
            copied = self.forked(
                torch.arange(self.num_rows, device="cpu"), None if self.shared is None else self.shared.copy()
            )
        else:
            copied = self._begun_alike()
            copied.layers[:] = copy.deepcopy(self.layers, memo)
        memo[id(self)] = copied
        return copied

    def _begun_alike(self) -> "Rows":
        """Make other rows of the same call, without columns."""
        copied = type(self)(self.calls, self.kinds, self.looks)
        for name in _COPIED:
            setattr(copied, name, getattr(self, name))
        copied.state = None if self.state is None else self.state.copy()
        copied.is_whole = self.is_whole and not self.is_edited
        copied.prompts, copied.ids = [prompt.copy() for prompt in self.prompts], self.ids.copy()
        return copied

    def forked(self, index: Tensor, shared: SharedColumns | None) -> "Rows":
        """Make other rows that go on by themselves: row `i` begins where row `index[i]` of these stands.

        These rows must not be bypassed.

        Args:
            shared: segments that the other rows have in common; None: each row has all of its columns.
        """
        self.roll_back()
        copied, n = self._begun_alike(), self.n
        copied.ids.select(index)
        copied.prompts = [copied.prompts[number].copy() for number in index.tolist()]
        held = self.all_memory()
        if shared is not None:
            first = shared.plan.first_own
            made = (
                memory.selected(held, index, n - first, n - first + SPARE)
                if first < n
                else memory.make(memory.shapes_of_rows(held), len(index), SPARE)
            )
            copied.share(shared, made, n)
        elif self.shared is not None:
            made = memory.make(memory.shapes_of_rows(held), len(index), n + SPARE)
            for row, source in enumerate(index.tolist()):
                pad = self.prompts[source].pad
                self.copy_columns(source, pad, n, made, row, pad)
            copied.take(made, n)
        elif held and n:
            copied.take(memory.selected(held, index, n - self.base, n - self.base + SPARE), n, self.base)
        if self.windows is not None and copied.windows is not None:
            self.windows.copy_to(copied.windows, index, n)
            copied.note_writes()
        if self.states is not None and copied.states is not None:
            self.states.copy_to(copied.states, index)
        for layer, of in zip(copied.layers, self.layers, strict=True):
            layer.n, layer.filled = layer.n if layer.held is None else of.n, of.filled  # a forward may have skipped it
        return copied


_COPIED = (
    *(
        "n",
        "seen_same",
        "keep_end",
        "is_open",
        "in_generate",
        "why_bypassed",
        "_num_bypassed",
        "num_forwards",
        "records_drafts",
        "may_be_lazy",
    ),
    *("chunks", "must_present", "lacks_windows"),
)
