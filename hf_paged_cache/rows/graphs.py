"""Captures a model's own eager forward over static rows, of a shape [rows, tokens] in a room, and replays it.

Static rows have a fixed room at fixed addresses, in one `Arena` a device. One call has the arena at a time; meanwhile
other calls run on memory of their own. The mask is ours, and made inside the graph.

columns of a static row: [0, pad) padding | [pad, n) valid | [n, room) finite, hidden by the mask
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from time import perf_counter
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.modules import module as everywhere
from transformers.cache_utils import Cache, DynamicLayer

from ..attention.lazy import lazily
from ..kv.tensors import zeros
from ..locks import new_lock
from ..model.layers import cache_layers
from ..model.support import attention_of, has_experts, takes
from ..model.weights import plain_tensors
from .memory import Shape, Stream, Streams

TOKENS = (1, 16, 64, 256)  # tokens that a shape may have; fewer are filled up on the right
NUM_CHECKS = 2  # number of replays of a graph that are compared with the eager forward
_SMALLEST_ROOM = 512
_CAPTURE_SECONDS = 0.3  # time that a capture is taken to need, before one was measured
_SAVED_SECONDS = 0.015  # time that a replay is taken to save, before one was measured
_TIMES_AGAIN = 8  # a graph is expected to be wanted this many times as often as it was
EXPERTS = "the setting of experts"  # name of one thing that `Model.look` returns
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError)  # errors where a capture fails
_TRAINING = attrgetter("training")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_HOOKS_OF_ALL = (everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks)
_ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")
_capturing = new_lock()  # one capture at a time
_sides: dict[torch.device, Any] = {}  # device -> the stream on which all its graphs are captured


class StaticCache(Cache):
    """`StaticCache` is the cache that the model is given inside a graph.

    Its layers write at `columns`, [T] int64, behind `length` valid ones, [1] int64, and read the whole room. Where it
    `keeps_heads`, attention is torch's, and may be given fewer heads of keys than of queries.
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
        if not cache.keeps_heads:
            return self.keys, self.values
        return lazily(_Grouped(self.keys, self.values), self.keys, self.values, self.keys.shape[2])

    def get_seq_length(self) -> Any:
        """Return the number of valid columns, as a tensor: a number would be the same in all replays."""
        cache = self._cache()
        assert cache is not None
        return cache.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns attention reads, and the first of these columns."""
        assert self.keys is not None
        return self.keys.shape[2], 0


class _Grouped:
    """`_Grouped` attends several heads of queries to each head of keys, as a kernel takes them; see `LazyReads`.

    Wherever there is a mask, transformers repeats heads, or lays the heads of one token as several tokens; the kernel
    for those reads a long row with few threads. On an H100 one row of 18,432 columns takes 432 or 390 microseconds a
    layer so, and 42 here (bf16, 32 heads of queries to 8).
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._states = {"key": keys, "value": values}

    def dense(self, name: str, *, is_call: bool) -> Tensor:
        return self._states[name]

    def attend(self, query: Tensor, mask: Tensor | None, scale: float | None) -> Tensor | None:
        keys, values = self._states["key"], self._states["value"]
        sees_one = mask is not None and mask.shape[1:3] == (1, 1)
        if sees_one and query.shape[2] > 1:  # heads of one token, laid as several tokens of fewer heads
            unfolded = query.reshape(query.shape[0], -1, 1, query.shape[3])
        else:
            unfolded = query
        if unfolded.shape[1] == keys.shape[1] or not _takes_groups(unfolded, keys, values, mask):
            return None
        out = scaled_dot_product_attention(unfolded, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
        return out.reshape(*query.shape[:3], values.shape[3])


def _takes_groups(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> bool:
    """Return whether a fused kernel takes fewer heads of keys than of queries; torch's unfused one is slower."""
    if query.device.type != "cuda":
        return True
    settings: Any = torch.backends.cuda
    return bool(settings.can_use_cudnn_attention(settings.SDPAParams(query, keys, values, mask, 0.0, False, True)))


class Model:
    """`Model` says what is captured of a model: its own forward, and what is to be the same in each replay."""

    def __init__(self, model: Any, forward: Callable[..., Any]) -> None:
        self.forward, self.num_layers = forward, len(cache_layers(model))
        self.attention, self.takes_logits_to_keep = attention_of(model), takes(model, "logits_to_keep")
        self.fills_up = not has_experts(model)  # shorter prompts may be filled up with tokens
        self._config = model.config.get_text_config(decoder=True)
        self._modules = modules = [*model.modules()]
        self._attributes = [module.__dict__ for module in modules]
        self._hooks = [module.__dict__[name] for module in modules for name in _HOOKS]
        owners = (held for module in modules for held in (module._parameters, module._buffers))
        self._tensors = [held for held in owners if held]
        self._parts = [module._modules for module in modules if module._modules]
        self._adapters = [module for module in modules if hasattr(module, "_active_adapter")]

    def look(self) -> Mapping[str, object]:
        """Return what a replay would not see, as it is now, by name.

        Cost: some 0.2 ms for 500 modules; it reads little, because it is asked before each replay.
        """
        tensors = [each for each in chain.from_iterable(map(dict.values, self._tensors)) if each is not None]
        return {
            "the attention": getattr(self._config, "_attn_implementation", None),
            EXPERTS: self.experts(),
            "the training flag": sum(map(_TRAINING, self._modules)),
            "hooks": [*map(tuple, filter(None, self._hooks)), *map(len, _HOOKS_OF_ALL)],
            "a module's forward": [each["forward"] for each in self._attributes if "forward" in each],
            "weights": [*map(id, tensors)],
            "where weights lie": _addresses(tensors),
            "modules": [*map(id, chain.from_iterable(map(dict.values, self._parts)))],
            "adapters": repr([[getattr(module, name, None) for name in _ADAPTERS] for module in self._adapters]),
            "autocast": torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"),
        }

    def experts(self) -> object:
        """Return the setting of experts, as it is now."""
        return getattr(self._config, "_experts_implementation", None)


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Return the addresses of tensors: a graph reads what lies there."""
    try:
        return [*map(Tensor.data_ptr, tensors)]
    except RuntimeError:  # wrappers have no memory of their own
        return [part.data_ptr() for tensor in tensors for part in plain_tensors(tensor)]


class Captured:
    """`Captured` runs the forward of one shape on static rows, `num_tokens` of each: by its graph, once it has one."""

    def __init__(self, model: Model, held: Sequence[Streams], num_tokens: int) -> None:
        tensor = held[0].tensor
        num_rows, room, device = tensor.shape[1], tensor.shape[3], tensor.device
        self._model, self._num_tokens, self._room = model, num_tokens, room
        self._dtype = tensor.dtype
        self._graph: Any = None
        self._output: Any = None
        self._pads: tuple[int, ...] = (0,) * num_rows
        with torch.inference_mode(False):

            def integers(*sizes: int) -> Tensor:
                return torch.zeros(sizes, dtype=torch.int64, device=device)

            self._ids, self._positions = integers(num_rows, num_tokens), integers(num_rows, num_tokens)
            self._padding, self._length, self._kept = integers(num_rows), integers(1), integers(1)
            self._tokens = torch.arange(num_tokens, dtype=torch.int64, device=device)
            self._columns = torch.arange(room, dtype=torch.int64, device=device)
            self._cache = StaticCache(held, model.num_layers, self._length, keeps_heads=model.attention == "sdpa")

    def run(self, ids: Tensor, positions: Tensor, pads: Sequence[int], length: int) -> Any:
        """Run the forward for ids [R, t] behind the first `length` columns; t is at most the shape's tokens.

        Return the model's output, with logits [R, 1, vocabulary] of the last token, which are the caller's.
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
        """Capture the graph in a pool of graphs' memory, or a new one; return the pool.

        What a trial writes lies at the end of the room, where no column is valid.
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


def failed(error: Exception) -> str:
    """Say why a model could not be captured."""
    return f"the captured forward failed: {' '.join(str(error).split())[:160] or type(error).__name__}"


def room_of(num_columns: int) -> int:
    """Return the smallest room that holds so many columns: a power of two, or half as many columns more.

    Examples:
        >>> [room_of(number) for number in (1, 513, 1025, 1600, 2049, 5000)]
        [512, 1024, 1536, 2048, 3072, 6144]
    """
    room = _SMALLEST_ROOM
    while room < num_columns:
        if room >= 2 * _SMALLEST_ROOM and room + room // 2 >= num_columns:
            return room + room // 2
        room *= 2
    return room


@dataclass
class Graph:
    """`Graph` keeps what is known of the forwards of one shape, and their graph once it is captured."""

    captured: Captured | None = None
    why_not: str = ""  # why they are not captured any more
    look: Mapping[str, object] = field(default_factory=dict)  # what `Model.look` returned when they were captured
    checked: list[int] = field(default_factory=list)  # columns before each replay that was compared
    num_wanted: int = 0  # number of forwards that would have been replays
    saved_seconds: float = 0.0  # time that the last replay that was compared has saved against the eager forward

    def drop(self) -> None:
        """Give the graph up; what was counted stays."""
        self.captured = None
        self.checked.clear()

    def is_to_check(self, length: int) -> bool:
        """Return whether the next replay, at this length, is compared.

        The first replays are, and one more at another length, if all of these were at one length.
        """
        return len(self.checked) < NUM_CHECKS or (len({*self.checked}) == 1 and length not in self.checked)


class Arena:
    """`Arena` holds memory for the static rows of one call at a time. Rows of every number and room begin at its start.

    Graphs are dropped with the memory, and where another model is captured.
    """

    def __init__(self) -> None:
        # Returns how many bytes the arena may take now. None: half of an accelerator's free memory; all of a host's.
        self.most_bytes: Callable[[], int] | None = None
        self._capture_seconds, self._saved_seconds, self._is_measured = _CAPTURE_SECONDS, _SAVED_SECONDS, False
        self.shapes: tuple[Shape, ...] = ()  # of the rows that lay here last
        self._lock = new_lock()
        self._holder: ref[Any] | None = None
        self._digest = b""  # fingerprint of the model that is captured
        self._graphs: dict[tuple[object, ...], Graph] = {}
        self._pool: Any = None  # memory of the graphs themselves
        self._flat: list[Tensor] = []  # for each shape, the memory of all its streams
        self._rows: dict[tuple[int, int], list[Streams]] = {}  # (rows, room) -> their memory
        self._written: Any = None  # event behind what the last holder wrote

    def check_out(self, holder: object, digest: bytes) -> bool:
        """Give the arena to a holder, until it is given back or the holder is collected; return whether it was free.

        Graphs of a model with another fingerprint than `digest` are forgotten.
        """
        with self._lock:
            if self._holder is not None and self._holder() is not None:
                return False
            self._holder = ref(holder)
        if self._written is not None:
            self._written.wait(torch.cuda.current_stream(self._flat[0].device))
        if digest != self._digest:
            self._digest, self._graphs, self._pool = digest, {}, None
        return True

    def check_in(self, holder: object) -> None:
        """Take the arena back from its holder."""
        if self._flat and self._flat[0].device.type == "cuda":
            self._written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._written.record(torch.cuda.current_stream(self._flat[0].device))
        with self._lock:
            if self._holder is not None and self._holder() is holder:
                self._holder = None

    @property
    def num_bytes(self) -> int:
        """Bytes that the arena takes."""
        return sum(flat.nbytes for flat in self._flat)

    def holds(self, memory: Sequence[Streams]) -> bool:
        """Return whether any of this memory is the arena's."""
        ours = {flat.data_ptr() for flat in self._flat}
        return any(tensor.untyped_storage().data_ptr() in ours for tensor, _ in memory)

    def drop(self) -> None:
        """Give all memory back, and what was captured over it; rows that still lie in the memory keep it."""
        if self._flat and self._flat[0].device.type == "cuda":
            torch.cuda.synchronize(self._flat[0].device)  # a graph may run yet
        self._pool = None
        for graph in self._graphs.values():
            graph.drop()
        self._rows, self._flat, self.shapes, self._written = {}, [], (), None

    def fits(self, shapes: Sequence[Shape], num_rows: int, room: int) -> bool:
        """Return whether the arena has, or may take, memory for such rows."""
        needed = sum(_num_elements(shape, num_rows, room) * shape.dtype.itemsize for shape in shapes)
        has_it = tuple(shapes) == self.shapes and needed <= self.num_bytes
        return has_it or needed <= self._most(shapes)

    def room(self, num_rows: int, num_columns: int) -> int:
        """Return the room for so many columns: one that was used before, if it is at most twice what is needed."""
        least = room_of(num_columns)
        used = [room for rows, room in self._rows if rows == num_rows and least <= room <= 2 * least]
        return min(used, default=least)

    def memory(self, shapes: Sequence[Shape], num_rows: int, room: int) -> list[Streams] | None:
        """Return the memory of so many rows, zeroed: what others left may not be finite. None: it does not fit.

        The memory stays the same until the arena is dropped.
        """
        needed = [_num_elements(shape, num_rows, room) for shape in shapes]
        has_it = tuple(shapes) == self.shapes and all(
            flat.numel() >= number for flat, number in zip(self._flat, needed, strict=True)
        )
        if not has_it:
            if not self.fits(shapes, num_rows, room):
                return None
            self.drop()
            try:
                self._flat = [zeros((num,), like.dtype, like.device) for like, num in zip(shapes, needed, strict=True)]
            except torch.OutOfMemoryError:
                return None
            self.shapes = tuple(shapes)
        if (num_rows, room) not in self._rows:
            self._rows[num_rows, room] = [
                Streams(flat[:number].view(len(like.names), num_rows, like.heads, room, like.head_dim), like.names)
                for flat, like, number in zip(self._flat, shapes, needed, strict=True)
            ]
        for tensor, _ in self._rows[num_rows, room]:
            tensor.zero_()
        return self._rows[num_rows, room]

    def graph(self, *key: object) -> Graph:
        """Return what is known of forwards of these rows, tokens, room and settings."""
        return self._graphs.setdefault(key, Graph())

    def capture(
        self, graph: Graph, model: Model, held: Sequence[Streams], tokens: int, facts: Mapping[str, object]
    ) -> None:
        """Capture a graph over this memory, or note why that failed."""
        began = perf_counter()
        try:
            captured = Captured(model, held, tokens)
            self._pool = captured.capture(self._pool)
        except FAILURES as error:
            graph.why_not, self._pool = failed(error), None
            return
        graph.captured, graph.look = captured, facts
        graph.checked.clear()
        self._capture_seconds = perf_counter() - began

    def pays(self, graph: Graph, num_coming: int) -> bool:
        """Return whether a graph is captured, or its capture expected to take less time than its replays save."""
        if graph.captured is not None:
            return True
        return (_TIMES_AGAIN * graph.num_wanted + num_coming) * self._saved_seconds > self._capture_seconds

    def note_saved(self, graph: Graph, seconds: float) -> None:
        """Note that a replay took so much less time than the eager forward."""
        graph.saved_seconds = seconds
        self._saved_seconds = max(self._saved_seconds, seconds) if self._is_measured else seconds
        self._is_measured = self._is_measured or seconds > 0

    def _most(self, shapes: Sequence[Shape]) -> float:
        if self.most_bytes is not None:
            return self.most_bytes()
        if not shapes or shapes[0].device.type != "cuda":
            return float("inf")
        device = shapes[0].device
        free = (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
        return (free + self.num_bytes) // 2


def _num_elements(shape: Shape, num_rows: int, room: int) -> int:
    return len(shape.names) * num_rows * shape.heads * room * shape.head_dim


def together(shapes: Sequence[Shape]) -> tuple[Shape, ...]:
    """Put streams that are alike into one shape; names are in the order of layers."""
    names: dict[tuple[Any, ...], list[Stream]] = {}
    for of_shape, *kind in shapes:
        names.setdefault(tuple(kind), []).extend(of_shape)
    return tuple(Shape(tuple(sorted(of_kind)), *kind) for kind, of_kind in names.items())
