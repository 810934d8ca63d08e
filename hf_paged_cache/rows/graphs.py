"""Owns captured graphs: of each shape, [rows, tokens] in a room, its static inputs, its graph, and what is known of it.

A graph is the model's own eager forward over static rows, with a mask of ours that is made inside it.
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from ..attention.grouped import grouped
from ..locks import new_lock
from .memory import Streams
from .static import Arena

TOKENS = (1, 16, 64, 256)  # of a shape; fewer are filled up on the right
NUM_CHECKS = 2  # replays of a shape that are compared with the eager forward
EXPERTS = "the setting of experts"  # in what is looked at
NOT_WORTH_IT = "a capture takes more time than it would save"
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)  # of a model that cannot be captured
_CAPTURE_SECONDS = 0.3  # that a capture takes, before one was measured
_SAVED_SECONDS = 0.015  # by a replay, likewise
_TIMES_AGAIN = 4  # a shape that has come so often is expected that many times as often
_capturing = new_lock()  # one capture at a time
_sides: dict[torch.device, Any] = {}  # device -> the stream on which all its graphs are captured


class StaticCache(Cache):
    """What the model is given inside a graph: layers that write at columns which a tensor names, and read the whole room.

    Args:
        memory: of the rows.
        num_layers: of the model.
        length: [1] int64, columns that are valid.
        keeps_heads: attention is torch's, and may be given fewer heads of keys than of queries.

    Attributes:
        columns: [T] int64, where the running forward writes.
    """

    def __init__(
        self, memory: Sequence[Streams], num_layers: int, length: Tensor, *, keeps_heads: bool = False
    ) -> None:
        places: dict[int, dict[str, Tensor]] = {}
        for tensor, names in memory:
            for (layer_idx, name), part in zip(names, tensor, strict=True):
                places.setdefault(layer_idx, {})[name] = part
        self.columns, self.length, self.keeps_heads = length, length, keeps_heads
        num_layers = max(num_layers, 1 + max(places))
        super().__init__(layers=[StaticLayer(self, places.get(layer_idx, {})) for layer_idx in range(num_layers)])


class StaticLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer of static rows, [R, H, room, D]."""

    is_compileable = True
    is_sliding = False

    def __init__(self, cache: StaticCache, states: dict[str, Tensor]) -> None:
        self._cache = ref(cache)
        self.is_initialized = bool(states)
        if states:
            self.keys, self.values = states["key"], states["value"]
            self.dtype, self.device = self.keys.dtype, self.keys.device

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values, [R, H, T, D], at the forward's columns; returns those of the whole room."""
        cache = self._cache()
        assert cache is not None
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, cache.columns, key_states)
        self.values.index_copy_(2, cache.columns, value_states)
        return grouped(self.keys, self.values) if cache.keeps_heads else (self.keys, self.values)

    def get_seq_length(self) -> Any:
        """Columns that are valid, as a tensor: a number would be the same in all replays."""
        cache = self._cache()
        assert cache is not None
        return cache.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that attention reads, and the first of them."""
        assert self.keys is not None
        return self.keys.shape[2], 0


class Model(NamedTuple):
    """What is captured.

    Attributes:
        forward: of the model, without what is attached round it.
        num_layers: of its cache.
        attention: "sdpa" or "eager".
        takes_logits_to_keep: it can leave out logits.
        fills_up: shorter prompts may be filled up with tokens; else whole shapes alone are captured.
        look: what a replay would not see, as it is now, by name; `EXPERTS` among it.
    """

    forward: Callable[..., Any]
    num_layers: int
    attention: str
    takes_logits_to_keep: bool
    fills_up: bool
    look: Callable[[], Mapping[str, object]]


class Captured:
    """The forward of one shape on static rows: its static inputs, and its graph once there is one.

    Args:
        held: memory of the rows.
        num_tokens: of each row.
    """

    def __init__(self, model: Model, held: Sequence[Streams], num_tokens: int) -> None:
        tensor = held[0].tensor
        num_rows, room, device = tensor.shape[1], tensor.shape[3], tensor.device
        self._model, self._num_tokens, self._room = model, num_tokens, room
        self._dtype = tensor.dtype
        self._graph: Any = None
        self._output: Any = None
        self._pads: tuple[int, ...] = (0,) * num_rows
        with torch.inference_mode(False):

            def zeros(*sizes: int) -> Tensor:
                return torch.zeros(sizes, dtype=torch.int64, device=device)

            self._ids, self._positions = zeros(num_rows, num_tokens), zeros(num_rows, num_tokens)
            self._padding, self._length, self._kept = zeros(num_rows), zeros(1), zeros(1)
            self._tokens = torch.arange(num_tokens, dtype=torch.int64, device=device)
            self._columns = torch.arange(room, dtype=torch.int64, device=device)
            self._cache = StaticCache(held, model.num_layers, self._length, keeps_heads=model.attention == "sdpa")

    def run(self, ids: Tensor, positions: Tensor, pads: Sequence[int], length: int) -> Any:
        """The output for ids [R, t] behind the first `length` columns, t at most the shape's tokens.

        Returns:
            the model's output; logits [R, 1, vocabulary] of the last token, which are the caller's.
        """
        num = ids.shape[1]
        for static, given in ((self._ids, ids), (self._positions, positions)):
            static[:, :num].copy_(given)
            if num < self._num_tokens:
                static[:, num:].copy_(given[:, -1:])
        if self._pads != tuple(pads):
            self._pads = tuple(pads)
            self._padding.copy_(torch.tensor(self._pads, dtype=torch.int64, device="cpu"))
        self._length.fill_(length)
        self._kept.fill_(num - 1)
        if self._graph is not None:
            self._graph.replay()
        else:
            self._forward()
        return type(self._output)(logits=self._output.logits.clone())

    def capture(self, pool: Any) -> Any:
        """Capture the graph; what a trial writes lies at the end of the room, where no column is valid.

        Args:
            pool: of the graphs' memory; None: a new one.

        Returns:
            the pool.
        """
        device = self._ids.device
        self._length.fill_(self._room - self._num_tokens)
        if device.type != "cuda":
            self._forward()
            return None
        with _capturing, torch.cuda.device(device):
            current, graph = torch.cuda.current_stream(device), torch.cuda.CUDAGraph()
            side = _sides.get(device) or _sides.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            side.wait_stream(current)
            try:
                with torch.cuda.stream(side):
                    self._forward()
                current.wait_stream(side)
                with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                    self._forward()
            finally:
                torch.cuda.set_stream(current)  # a capture that fails leaves the side's
                current.wait_stream(side)
        self._graph = graph
        return graph.pool()

    def _forward(self) -> None:
        """Run the model on the static inputs. All that is made here lies in the graph's memory."""
        model = self._model
        at = self._length + self._tokens  # [T]
        self._cache.columns = at
        seen = self._columns[None] <= at[:, None]  # [T, room]
        shown = seen & (self._columns >= self._padding[:, None])[:, None]  # [R, T, room]
        mask = (shown | (self._columns[None] == at[:, None]))[:, None]  # padding sees itself: no row sees nothing
        if model.attention == "eager":
            hidden = torch.full_like(mask, torch.finfo(self._dtype).min, dtype=self._dtype)
            mask = hidden.masked_fill(mask, 0)
        options: dict[str, Any] = {}
        if model.takes_logits_to_keep and self._num_tokens > 1:
            options["logits_to_keep"] = self._kept
        with torch.no_grad():
            self._output = model.forward(
                input_ids=self._ids,
                attention_mask=mask,
                position_ids=self._positions,
                past_key_values=self._cache,
                use_cache=True,
                return_dict=True,
                **options,
            )


class Shape:
    """What is known of one shape.

    Attributes:
        captured: None: not yet.
        why_not: it is not captured any more; "": it may be.
        look: of the model, as it was captured.
        checked: lengths at which it gave the eager forward's logits, one for each time.
        num_wanted: forwards that would have been replays.
        saved_seconds: by a replay in place of the eager forward; None: not measured.
    """

    def __init__(self) -> None:
        self.captured: Captured | None = None
        self.why_not = ""
        self.look: Mapping[str, object] = {}
        self.checked: list[int] = []
        self.num_wanted = 0
        self.saved_seconds: float | None = None

    def drop(self) -> None:
        """Give its graph up; what was counted stays."""
        self.captured = None
        self.checked.clear()

    def is_to_check(self, length: int) -> bool:
        """Whether the next replay, at this length, is compared: the first ones are, and one at another length than those."""
        seen = {*self.checked}
        return len(self.checked) < NUM_CHECKS or (len(seen) == 1 and length not in seen)


class Shapes:
    """The shapes over one arena, under one fingerprint of the model.

    Attributes:
        digest: the fingerprint.
        capture_seconds: that a capture takes.
        saved_seconds: by a replay, the most that was measured of any shape.
    """

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.pool: Any = None
        self.capture_seconds = _CAPTURE_SECONDS
        self.saved_seconds = _SAVED_SECONDS
        self._is_measured = False
        self._shapes: dict[tuple[object, ...], Shape] = {}

    def of(self, *key: object) -> Shape:
        """The shape of these rows, tokens, room, and settings."""
        return self._shapes.setdefault(key, Shape())

    def go_on(self, before: "Shapes") -> None:
        """Expect what was measured under another fingerprint."""
        self.capture_seconds, self.saved_seconds = before.capture_seconds, before.saved_seconds
        self._is_measured = before._is_measured

    def drop(self) -> None:
        """Give all graphs up; what was counted stays."""
        self.pool = None
        for shape in self._shapes.values():
            shape.drop()

    @property
    def num_graphs(self) -> int:
        """Shapes that are captured."""
        return sum(shape.captured is not None for shape in self._shapes.values())

    def pays(self, shape: Shape, num_coming: int) -> bool:
        """Whether it is captured, or a capture takes less time than it is expected to save."""
        if shape.captured is not None:
            return shape.saved_seconds is None or shape.saved_seconds > 0 or len(shape.checked) < NUM_CHECKS
        return (_TIMES_AGAIN * shape.num_wanted + num_coming) * self.saved_seconds > self.capture_seconds

    def note_saved(self, shape: Shape, seconds: float) -> None:
        """A replay took so much less time than the eager forward."""
        shape.saved_seconds = seconds
        self.saved_seconds = max(self.saved_seconds, seconds) if self._is_measured else seconds
        self._is_measured = self._is_measured or seconds > 0


def shapes_over(arena: Arena, digest: bytes) -> Shapes:
    """What was captured over an arena; nothing of another fingerprint."""
    before = arena.captured
    if isinstance(before, Shapes) and before.digest == digest:
        return before
    shapes = arena.captured = Shapes(digest)
    if isinstance(before, Shapes):
        shapes.go_on(before)
    return shapes


def make(
    shape: Shape, shapes: Shapes, model: Model, held: Sequence[Streams], tokens: int, facts: Mapping[str, object]
) -> None:
    """Capture a shape over this memory, or note why that failed."""
    began = perf_counter()
    try:
        captured = Captured(model, held, tokens)
        shapes.pool = captured.capture(shapes.pool)
    except FAILURES as error:
        shape.why_not, shapes.pool = failed(error), None
        return
    shape.captured, shape.look = captured, facts
    shape.checked.clear()
    shapes.capture_seconds = perf_counter() - began


def failed(error: Exception) -> str:
    """What is said of a model that could not be captured."""
    return f"the captured forward failed: {' '.join(str(error).split())[:160] or type(error).__name__}"
