"""Owns captured graphs: for each shape, [rows, tokens] in a room, its static inputs, its graph, and what is known.

A graph is the model's own eager forward over static rows. Its mask is ours, and made inside the graph.
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

TOKENS = (1, 16, 64, 256)  # tokens that a shape may have; fewer are filled up on the right
NUM_CHECKS = 2  # number of replays of a shape that are compared with the eager forward
EXPERTS = "the setting of experts"  # name of one thing that `Model.look` returns
NOT_WORTH_IT = "a capture takes more time than it would save"
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)  # errors where a capture fails
_CAPTURE_SECONDS = 0.3  # time that a capture is taken to need, before one was measured
_SAVED_SECONDS = 0.015  # time that a replay is taken to save, before one was measured
_TIMES_AGAIN = 8  # a shape is expected to come this many times as often as it has come
_capturing = new_lock()  # one capture at a time
_sides: dict[torch.device, Any] = {}  # device -> the stream on which all its graphs are captured


class StaticCache(Cache):
    """`StaticCache` is the cache that the model is given inside a graph.

    Its layers write at columns which a tensor names, and read the whole room.

    Args:
        memory: memory of the rows.
        num_layers: number of layers of the model.
        length: number of valid columns, [1] int64.
        keeps_heads: attention is torch's, and may be given fewer heads of keys than of queries.

    Attributes:
        columns: columns at which the running forward writes, [T] int64.
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
    """`StaticLayer` holds the keys and values of one layer of static rows, [R, H, room, D]."""

    is_compileable = True
    is_sliding = False

    def __init__(self, cache: StaticCache, states: dict[str, Tensor]) -> None:
        self._cache = ref(cache)
        self.is_initialized = bool(states)
        if states:
            self.keys, self.values = states["key"], states["value"]
            self.dtype, self.device = self.keys.dtype, self.keys.device

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write new keys and values, [R, H, T, D], at the forward's columns; return those of the whole room."""
        cache = self._cache()
        assert cache is not None
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, cache.columns, key_states)
        self.values.index_copy_(2, cache.columns, value_states)
        return grouped(self.keys, self.values) if cache.keeps_heads else (self.keys, self.values)

    def get_seq_length(self) -> Any:
        """Return the number of valid columns, as a tensor: a number would be the same in all replays."""
        cache = self._cache()
        assert cache is not None
        return cache.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns attention reads, and the first of these columns."""
        assert self.keys is not None
        return self.keys.shape[2], 0


class Model(NamedTuple):
    """`Model` says what is captured of a model.

    Attributes:
        forward: forward of the model, without what is attached round it.
        num_layers: number of layers of the model's cache.
        attention: "sdpa" or "eager".
        takes_logits_to_keep: True if the model can leave out logits.
        fills_up: True if shorter prompts may be filled up with tokens; if not, only whole shapes are captured.
        look: returns what a replay would not see, as it is now, by name.
        experts: returns the setting of experts, as it is now; in what `look` returns it is named `EXPERTS`.
    """

    forward: Callable[..., Any]
    num_layers: int
    attention: str
    takes_logits_to_keep: bool
    fills_up: bool
    look: Callable[[], Mapping[str, object]]
    experts: Callable[[], object]


class Captured:
    """`Captured` runs the forward of one shape on static rows: by the shape's graph, once it has one.

    Args:
        model: what is captured.
        held: memory of the rows.
        num_tokens: number of tokens of each row.
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
        """Run the forward for ids [R, t] behind the first `length` columns; t is at most the shape's tokens.

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
        """Capture the graph. What a trial writes lies at the end of the room, where no column is valid.

        Args:
            pool: pool of the graphs' memory; None: a new one.

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
                torch.cuda.set_stream(current)  # a capture that fails leaves the side stream current
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
        seen = (shown | (self._columns[None] == at[:, None]))[:, None]  # padding sees itself: no row sees nothing
        # added to scores: of a boolean mask each layer would make this one
        mask = torch.full_like(seen, torch.finfo(self._dtype).min, dtype=self._dtype).masked_fill(seen, 0)
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
    """`Shape` keeps what is known of one shape.

    Attributes:
        captured: graph of the shape; None: not captured yet.
        why_not: why the shape is not captured any more; "": it may be.
        look: what `Model.look` returned when the shape was captured.
        checked: for each replay that was compared with the eager forward, the number of columns before it.
        num_wanted: number of forwards that would have been replays.
        saved_seconds: time that a replay saves against the eager forward; None: not measured.
    """

    def __init__(self) -> None:
        self.captured: Captured | None = None
        self.why_not = ""
        self.look: Mapping[str, object] = {}
        self.checked: list[int] = []
        self.num_wanted = 0
        self.saved_seconds: float | None = None

    def drop(self) -> None:
        """Give the graph up; what was counted stays."""
        self.captured = None
        self.checked.clear()

    def is_to_check(self, length: int) -> bool:
        """Return whether the next replay, at this length, is compared.

        The first replays are, and one more at another length, if all of these were at one length.
        """
        seen = {*self.checked}
        return len(self.checked) < NUM_CHECKS or (len(seen) == 1 and length not in seen)


class Shapes:
    """`Shapes` has the shapes over one arena, under one fingerprint of the model.

    Attributes:
        digest: the fingerprint.
        capture_seconds: time that a capture takes.
        saved_seconds: most time that a replay of any shape was measured to save.
    """

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.pool: Any = None
        self.capture_seconds = _CAPTURE_SECONDS
        self.saved_seconds = _SAVED_SECONDS
        self._is_measured = False
        self._shapes: dict[tuple[object, ...], Shape] = {}

    def of(self, *key: object) -> Shape:
        """Return the shape of these rows, tokens, room and settings."""
        return self._shapes.setdefault(key, Shape())

    def go_on(self, before: "Shapes") -> None:
        """Expect the times that were measured under another fingerprint."""
        self.capture_seconds, self.saved_seconds = before.capture_seconds, before.saved_seconds
        self._is_measured = before._is_measured

    def drop(self) -> None:
        """Give all graphs up; what was counted stays."""
        self.pool = None
        for shape in self._shapes.values():
            shape.drop()

    @property
    def num_graphs(self) -> int:
        """Number of shapes that are captured."""
        return sum(shape.captured is not None for shape in self._shapes.values())

    def pays(self, shape: Shape, num_coming: int) -> bool:
        """Return whether a replay of the shape pays, or where it is not captured, whether a capture is expected to."""
        if shape.captured is not None:
            return shape.saved_seconds is None or shape.saved_seconds > 0 or len(shape.checked) < NUM_CHECKS
        return (_TIMES_AGAIN * shape.num_wanted + num_coming) * self.saved_seconds > self.capture_seconds

    def note_saved(self, shape: Shape, seconds: float) -> None:
        """Note that a replay took so much less time than the eager forward."""
        shape.saved_seconds = seconds
        self.saved_seconds = max(self.saved_seconds, seconds) if self._is_measured else seconds
        self._is_measured = self._is_measured or seconds > 0


def shapes_over(arena: Arena, digest: bytes) -> Shapes:
    """Return the shapes that were captured over an arena; new ones where the model's fingerprint is another."""
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
    """Say why a model could not be captured."""
    return f"the captured forward failed: {' '.join(str(error).split())[:160] or type(error).__name__}"
