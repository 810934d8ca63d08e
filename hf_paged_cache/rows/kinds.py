"""Says which kinds of layers a model has: with all columns, a window of them, states, or states and columns."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ..blocks.sight import Sight
from ..model.support import has_index, has_keys, has_state, holds_nothing
from .indexed import IndexedLayer
from .layers import Owner, PlaceholderLayer, RowsLayer
from .states import StatePlaces, StatesAndColumnsLayer, StatesAndWindowLayer, states_alone
from .windows import WindowLayer


class LayerKinds(NamedTuple):
    """`LayerKinds` says of which kind each layer of a model is.

    Attributes:
        num_layers: number of layers of the model.
        sights: layer index -> window of the layer, for the layers that have one.
        margin: see `WindowLayer`.
        num_states: layer index -> number of states that the layer carries, for the layers that carry states.
        without_columns: indices of layers that carry states and have no columns.
        indexed: indices of layers that choose keys by an index.
        placeholders: indices of layers that hold nothing: they read what another layer holds, or read nothing.
        places: where states are kept.
    """

    num_layers: int
    sights: Mapping[int, Sight] = MappingProxyType({})
    margin: int = 0
    num_states: Mapping[int, int] = MappingProxyType({})
    without_columns: frozenset[int] = frozenset()
    indexed: frozenset[int] = frozenset()
    placeholders: frozenset[int] = frozenset()
    places: StatePlaces = StatePlaces(1)

    @property
    def see_all(self) -> bool:
        """True if each layer has keys and values of all columns and nothing else, or is a placeholder."""
        return not (self.sights or self.num_states or self.indexed)

    def make(self, owner: Callable[[], Owner | None]) -> list[Any]:
        """Make layers that hold nothing."""
        if self.see_all and not self.placeholders:
            return [RowsLayer(layer_idx, owner) for layer_idx in range(self.num_layers)]
        return [self._layer(layer_idx, owner) for layer_idx in range(self.num_layers)]

    def _layer(self, layer_idx: int, owner: Callable[[], Owner | None]) -> Any:
        if layer_idx in self.placeholders:
            return PlaceholderLayer()
        sight, num_states = self.sights.get(layer_idx), self.num_states.get(layer_idx)
        if layer_idx in self.indexed:
            return IndexedLayer(layer_idx, owner)
        if num_states is None:
            return RowsLayer(layer_idx, owner) if sight is None else WindowLayer(layer_idx, owner, sight, self.margin)
        if layer_idx in self.without_columns:
            return states_alone(num_states)
        if sight is None:
            return StatesAndColumnsLayer(layer_idx, owner, num_states)
        return StatesAndWindowLayer(layer_idx, owner, sight, self.margin, num_states)


def kinds_of(layers: Sequence[Any], places: StatePlaces) -> LayerKinds:
    """Return the kinds of the layers that a `DynamicCache` of the model has.

    Windows are left out: they follow the model's config.
    """
    carry = {layer_idx: layer for layer_idx, layer in enumerate(layers) if has_state(layer)}
    return LayerKinds(
        len(layers),
        num_states={layer_idx: layer.number_of_states for layer_idx, layer in carry.items()},
        without_columns=frozenset(layer_idx for layer_idx, layer in carry.items() if not has_keys(layer)),
        indexed=frozenset(layer_idx for layer_idx, layer in enumerate(layers) if has_index(layer)),
        placeholders=frozenset(layer_idx for layer_idx, layer in enumerate(layers) if holds_nothing(layer)),
        places=places,
    )
