"""Reads and writes what a layer of transformers' own holds of rows, by the names that streams have here.

It is the one place that knows such a layer's attributes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

INDEX = "indexer_key"


def streams_of(layer: Any) -> dict[str, Tensor]:
    """Return keys, values and index keys of a layer, [R, H, columns, D] each, by name; index keys have one head.

    The result is empty for a layer that holds nothing.
    """
    held = ((name, getattr(layer, f"{name}s", None)) for name in ("key", "value", INDEX))
    found = {name: tensor for name, tensor in held if isinstance(tensor, Tensor)}
    if INDEX in found:
        found[INDEX] = found[INDEX].unsqueeze(1)
    return found


def put_streams(layer: Any, held: Mapping[str, Tensor], num_columns: int) -> None:
    """Let a layer that holds nothing hold columns.

    Args:
        held: name -> tensor, [R, H, columns, D]; for a layer with a window, the last columns.
        num_columns: number of columns of the rows.
    """
    layer.update(held["key"], held["value"])
    if getattr(layer, "is_sliding", False):
        layer.cumulative_length = num_columns
    if INDEX in held:
        layer.update_indexer(held[INDEX].squeeze(1))


def hold_as(layer: Any, of_keys: torch.dtype, of_values: torch.dtype) -> None:
    """Convert the keys and values that a layer holds, if it holds any."""
    if getattr(layer, "keys", None) is not None:
        layer.keys, layer.values = layer.keys.to(of_keys), layer.values.to(of_values)
