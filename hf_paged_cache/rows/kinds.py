"""Says which kinds of layers a model has: with all columns, a window of them, states, or states and columns."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ..blocks import Window
from ..model.layers import has_index, has_keys, has_state, holds_nothing
from .layers import IndexedLayer, PlaceholderLayer, RowsLayer, WindowLayer
from .states import StatePlaces, StatesAndColumnsLayer, StatesAndWindowLayer, states_alone


class LayerKinds(NamedTuple):
    """`LayerKinds` says of which kind each layer of a model is."""

    num_layers: int
    windows: Mapping[int, Window] = MappingProxyType({})  # layer index -> window, for the layers that have one
    margin: int = 0  # see `WindowLayer`
    num_states: Mapping[int, int] = MappingProxyType({})  # layer index -> number of states, where there are any
    without_columns: frozenset[int] = frozenset()  # layers that carry states alone
    indexed: frozenset[int] = frozenset()  # layers that choose keys by an index
    placeholders: frozenset[int] = frozenset()  # layers that hold nothing: they read what another holds, or nothing
    places: StatePlaces = StatePlaces(1)  # where states are kept

    @property
    def see_all(self) -> bool:
        """True if each layer has keys and values of all columns and nothing else, or is a placeholder."""
        return not (self.windows or self.num_states or self.indexed)

    def make(self, owner: Callable[[], Any]) -> list[Any]:
        """Make layers that hold nothing."""
        layers = list[Any]()
        are_plain = not (self.windows or self.num_states or self.indexed or self.placeholders)
        for layer_idx in range(self.num_layers):
            layers.append(RowsLayer(layer_idx, owner) if are_plain else self._layer(layer_idx, owner))
        return layers

    def _layer(self, layer_idx: int, owner: Callable[[], Any]) -> Any:
        if layer_idx in self.placeholders:
            return PlaceholderLayer()
        window, num_states = self.windows.get(layer_idx), self.num_states.get(layer_idx)
        if layer_idx in self.indexed:
            return IndexedLayer(layer_idx, owner)
        if num_states is None:
            return RowsLayer(layer_idx, owner) if window is None else WindowLayer(layer_idx, owner, window, self.margin)
        if layer_idx in self.without_columns:
            return states_alone(num_states)
        if window is None:
            return StatesAndColumnsLayer(layer_idx, owner, num_states)
        return StatesAndWindowLayer(layer_idx, owner, window, self.margin, num_states)


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
