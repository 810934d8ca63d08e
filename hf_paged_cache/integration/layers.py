"""One layer of a `PagedPrefixCache`, as transformers sees it. Owns nothing; knows the cache by protocol."""

from collections.abc import Mapping
from typing import Any, NoReturn, Protocol
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..attention.windows import Windows
from ..call.call import Call
from ..errors import CacheArgumentError
from ..model.probing import input_device


class LayeredCache(Protocol):
    """What a layer asks of its cache; `PagedPrefixCache` says what each does."""

    windows: Windows
    call: Call

    @property
    def store(self) -> Any: ...
    def get_seq_length(self, layer_idx: int = 0) -> int: ...
    def holds_layer(self, layer_idx: int) -> bool: ...
    def write_layer(self, layer_idx: int, states: Mapping[str, Tensor]) -> dict[str, Tensor]: ...
    def read_layer(self, layer_idx: int) -> dict[str, Tensor]: ...
    def reset(self) -> None: ...


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers' __init_subclass__
    """One layer of a `PagedPrefixCache`, as transformers sees it. Holds nothing: the pool does."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: LayeredCache, layer_idx: int) -> None:
        self._of = ref(cache)  # weak: a cache that nobody holds is collected at once, without a cycle to be found first
        self._layer_idx = layer_idx
        self._windows = cache.windows

    @property
    def _cache(self) -> LayeredCache:
        cache = self._of()
        if cache is None:
            raise ReferenceError("the cache of this layer was collected; hold the cache, not its layers")
        return cache

    # Attributes of the base class, here read from the cache: a layer has no state that could disagree with it.
    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether the rows have keys and values in this layer; models read False as "the first forward"."""
        return self._cache.holds_layer(self._layer_idx)

    @property
    def is_sliding(self) -> bool:
        """Whether attention sees a window here, as the model's config said when the rows began."""
        return self._layer_idx in self._windows.of_layer

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """The rows' keys, [R, H, columns, D], as far back as the next token sees: a copy. None without rows."""
        return self._seen("key")

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """The rows' values, [R, H, columns, D], as far back as the next token sees: a copy. None without rows."""
        return self._seen("value")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the pool takes its shapes from the first write."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store new keys and values, [R, H, T, D], and return those that attention reads; for compiled forwards and direct callers.

        `PagedPrefixCache.update` does without it.
        """
        states = self._write({"key": key_states, "value": value_states})
        return states["key"], states["value"]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that attention reads, and the first of them."""
        num_columns = self._cache.get_seq_length()
        first = self._windows.first_column(self._layer_idx, num_columns)
        return num_columns - first + query_length, first

    def get_seq_length(self) -> int:
        """Columns of the rows, padding included; 0 where the layer holds none, unless it is the first."""
        return self._cache.get_seq_length(self._layer_idx)

    def get_max_length(self) -> int:
        """The window, as `DynamicSlidingWindowLayer` says; else -1: there is no maximum but the pool's."""
        return self._windows.of_layer.get(self._layer_idx, -1)

    def offload(self) -> None:
        """Nothing: the pool stays where it is."""

    def prefetch(self) -> None:
        """Nothing: the pool stays where it is."""

    def reset(self) -> None:
        """Drop the rows of the whole cache."""
        self._cache.reset()

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Refused: rows are reordered in all layers at once."""
        raise CacheArgumentError("reorder the cache, not a layer: rows are the same in all layers")

    def _seen(self, name: str) -> Tensor | None:
        """The columns of a tensor that the next token sees; as for `DynamicSlidingWindowLayer`, all others are left out."""
        states = self._cache.read_layer(self._layer_idx).get(name)
        if states is None:
            return None
        num_columns = self._cache.get_seq_length()
        num_seen = num_columns - self._windows.first_column(self._layer_idx, num_columns)
        return states[:, :, states.shape[2] - num_seen :]

    def _write(self, states: dict[str, Tensor]) -> dict[str, Tensor]:
        """Store new states and return those that attention reads."""
        if torch.compiler.is_compiling():
            written: dict[str, Tensor] = _write_outside_graphs(self._cache, self._layer_idx, states)
            return written
        return self._cache.write_layer(self._layer_idx, states)


class PagedIndexedLayer(PagedLayer):  # type: ignore[no-untyped-call]
    """A layer of sparse attention that chooses its keys by an index: it writes a third tensor, or another layer's is used."""

    _set_positions: Tensor | None = None

    @property
    def indexer_keys(self) -> Tensor | None:
        """The rows' index keys, [R, columns, D]: a copy. None without rows, or where the layer has no index."""
        held = self._cache.read_layer(self._layer_idx).get("indexer_key")
        return None if held is None else held.squeeze(1)

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions of all columns so far, [3, R, columns], by which one model weighs index keys. None without rows.

        Derived from the rows, which may have begun with what was known; where theirs are not those of plain tokens, what was set.
        """
        num_columns, rows = self._cache.get_seq_length(), self._cache.call.rows.distinct
        if not num_columns:
            return None
        if not rows or any(row.commit_end == 0 for row in rows):
            return None if self._set_positions is None else self._set_positions[..., :num_columns]
        columns = torch.arange(num_columns, device=input_device(self._cache.store.model))
        positions = [(columns - row.pad).clamp_(min=0) + row.first_position for row in rows]
        return torch.stack(positions).expand(3, -1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        self._set_positions = positions

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Store new index keys, [R, T, D], and return those of all columns."""
        return self._write({"indexer_key": indexer_key_states.unsqueeze(1)})["indexer_key"].squeeze(1)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _write_outside_graphs(cache: LayeredCache, layer_idx: int, states: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a compiled forward calls: blocks and locks are nothing to trace. Decorated, it would cost every other one."""
    return cache.write_layer(layer_idx, states)
