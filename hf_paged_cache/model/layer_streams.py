"""Reads and writes what a layer of transformers' own holds of rows: the one place that knows such a layer's names."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

INDEX = "indexer_key"


def streams_of(layer: Any) -> dict[str, Tensor]:
    """Return keys, values and index keys that a layer holds, [R, H, columns, D] each, by name; an index has one head."""
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


def cut_streams(layer: Any, num_columns: int) -> None:
    """Cut off what a forward that died has appended to the streams of a layer, or to some of them."""
    if layer.get_seq_length() > num_columns:
        layer.keys, layer.values = layer.keys[..., :num_columns, :], layer.values[..., :num_columns, :]
    if (keys := getattr(layer, "indexer_keys", None)) is not None:
        layer.indexer_keys = keys[:, :num_columns]
    if (positions := getattr(layer, "indexer_position_ids", None)) is not None:
        layer.indexer_position_ids = positions[..., :num_columns]


def hold_as(layer: Any, of_keys: torch.dtype, of_values: torch.dtype) -> None:
    """Convert the keys and values that a layer holds, if it holds any."""
    if getattr(layer, "keys", None) is not None:
        layer.keys, layer.values = layer.keys.to(of_keys), layer.values.to(of_values)
