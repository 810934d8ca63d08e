"""Reads and writes what a layer of transformers' own holds of rows: the one place that knows such a layer's names."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

INDEX = "indexer_key"


def streams_of(layer: Any) -> dict[str, Tensor]:
    """Return keys, values and index keys a layer holds, [R, H, columns, D] each, by name; an index has one head."""
    held = ((name, getattr(layer, f"{name}s", None)) for name in ("key", "value", INDEX))
    found = {name: tensor for name, tensor in held if isinstance(tensor, Tensor)}
    if INDEX in found:
        found[INDEX] = found[INDEX].unsqueeze(1)
    return found


def put_streams(layer: Any, held: Mapping[str, Tensor], num_columns: int) -> None:
    """Let a layer that holds nothing hold rows of so many columns: name -> [R, H, columns, D], the last of a window."""
    layer.update(held["key"], held["value"])
    if getattr(layer, "is_sliding", False):
        layer.cumulative_length = num_columns
    if INDEX in held:
        layer.update_indexer(held[INDEX].squeeze(1))


def hold_as(layer: Any, of_keys: torch.dtype, of_values: torch.dtype) -> None:
    """Convert the keys and values that a layer holds, if it holds any."""
    if getattr(layer, "keys", None) is not None:
        layer.keys, layer.values = layer.keys.to(of_keys), layer.values.to(of_values)
