"""Owns how far back each layer's attention sees: in which layers it has a window, and from which column on they read.

Layers of one window read the same columns; a layer without one reads all.
"""

from collections.abc import Mapping


class Windows:
    """Layer index -> its window, in tokens: a query sees itself and the `window - 1` columns before it.

    Shared by a cache's layers and its reader; they change only before rows begin.

    Examples:
        >>> windows = Windows({1: 8})
        >>> windows.first_column(0, 20), windows.first_column(1, 20)
        (0, 13)
    """

    def __init__(self, of_layer: Mapping[int, int]) -> None:
        self.of_layer = of_layer
        self._may_change = bool(of_layer)

    def follow(self, of_layer: Mapping[int, int]) -> None:
        """Rows begin, with these windows.

        A cache whose model had none when it was built goes on reading all columns; the mask hides what a window does not show.
        """
        if self._may_change and of_layer != self.of_layer:
            self.of_layer = of_layer

    def first_column(self, layer_idx: int, start: int) -> int:
        """The first column that the layer reads in a forward from column `start` on."""
        return first_column(self.of_layer.get(layer_idx), start)


def first_column(window: int | None, start: int) -> int:
    """The first column that is read with this window, or with none, in a forward from column `start` on."""
    return 0 if window is None else max(0, start - window + 1)
