"""Layers of a `PagedPrefixCache` that carry states, as transformers sees them: its own layers, but for what concerns all rows.

The states lie here, written by the model; which rows they belong to, `kv.states.LiveStates` decides.
"""

from collections.abc import Sequence
from typing import Any, NoReturn
from weakref import ref

from torch import Tensor
from transformers.cache_utils import (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from ..errors import CacheArgumentError
from ..kv.states import ConvRecorder, LiveStates, StateKey
from ..model.support import has_index, has_state, holds_nothing
from .layers import LayeredCache, PagedIndexedLayer, PagedLayer


class PagedStateLayer(LinearAttentionLayer):
    """A layer that carries states and has no keys and values."""

    recorder: ConvRecorder

    def __init__(self, cache: LayeredCache, layer_idx: int, number_of_states: int) -> None:
        LinearAttentionLayer.__init__(self, number_of_states)
        self._of = ref(cache)  # weak, as in `PagedLayer`
        self._layer_idx = layer_idx

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Tensor:
        """As transformers does; and what is wanted of the forward's inputs is kept."""
        inputs: Tensor = super().update_conv_state(conv_states, state_idx, conv_kernel_size, **kwargs)
        if self.recorder.places:
            width: Any = self.conv_kernel_size[state_idx]
            self.recorder.record(StateKey(self._layer_idx, "conv", state_idx), inputs, width)
        return inputs

    def reset(self) -> None:
        """Drop the rows of the whole cache."""
        cache = self._of()
        if cache is not None:
            cache.reset()

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Refused: rows are reordered in all layers at once."""
        raise CacheArgumentError("reorder the cache, not a layer: rows are the same in all layers")

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Refused: rows are cut in all layers at once."""
        raise CacheArgumentError("crop the cache, not a layer: rows are the same in all layers")

    def offload(self) -> None:
        """Nothing: states stay where they are."""

    def prefetch(self) -> None:
        """Nothing: states stay where they are."""


class _PagedStateAndAttentionLayer(PagedStateLayer, PagedLayer):  # type: ignore[no-untyped-call]
    """A layer that carries states, and has keys and values in the pool."""

    is_compileable = False
    is_croppable = LinearAttentionLayer.is_croppable

    def __init__(self, cache: LayeredCache, layer_idx: int, number_of_states: int) -> None:
        PagedStateLayer.__init__(self, cache, layer_idx, number_of_states)
        PagedLayer.__init__(self, cache, layer_idx)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of states; the pool takes its shapes from the first write."""
        if kwargs:
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def get_max_length(self) -> int:
        return PagedLayer.get_max_length(self)


class PagedStateAndFullAttentionLayer(_PagedStateAndAttentionLayer, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc, no-untyped-call, override]
    """A layer that carries states, and whose attention sees all columns."""


class PagedStateAndWindowLayer(_PagedStateAndAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer):  # type: ignore[misc, no-untyped-call, override]
    """A layer that carries states, and whose attention sees a window."""


def live_states(layers: Sequence[Any]) -> LiveStates:
    """What those of a cache's layers carry that carry states."""
    return LiveStates({index: layer for index, layer in enumerate(layers) if isinstance(layer, PagedStateLayer)})


def make_layer(cache: LayeredCache, layer_idx: int, like: Any) -> Any:
    """A layer of ours in place of one of `DynamicCache`; that itself where it holds nothing."""
    if holds_nothing(like):
        return like
    if not has_state(like):
        return (PagedIndexedLayer if has_index(like) else PagedLayer)(cache, layer_idx)
    kinds: dict[type, type[PagedStateLayer]] = {
        LinearAttentionAndFullAttentionLayer: PagedStateAndFullAttentionLayer,
        LinearAttentionAndSlidingWindowAttentionLayer: PagedStateAndWindowLayer,
    }
    return kinds.get(type(like), PagedStateLayer)(cache, layer_idx, like.number_of_states)
