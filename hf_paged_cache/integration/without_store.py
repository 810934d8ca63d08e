"""Rows in transformers' own layers, as `DynamicCache` holds them: those of a bypassed call, and those that are recomputed to be compared.

Owns the layers of a bypassed call: its rows begin there or move there once, a forward that died is taken back there, and they are
let go of there. Whether a call is bypassed or refused, the session decides. Nothing here is ever found by another call.
"""

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ..call.call import Call
from ..errors import CacheArgumentError, OutOfBlocksError
from ..kv.states import States
from ..model.support import cache_layers, has_state
from .forward_arguments import lacks_padding, shape_of
from .layers import index_positions, live_states

_WITHOUT_STORE = "computed without the store"


class LayersWithRows(list[Any]):
    """Transformers' own layers, in the place of a cache's."""


class LayersWithoutStore:
    """Layers that hold one cache's rows while its call is bypassed.

    Args:
        cache: whose `layers` they are meanwhile.

    Attributes:
        num_columns: of the rows here, padding included; while a forward runs, or has died, those before it.
        lacks_padding: of rows that have moved here, keys and values of padding were not kept.
    """

    def __init__(self, model: Any, call: Call, cache: ref[Any]) -> None:
        self._of = cache
        self.num_columns = 0
        self.lacks_padding = False
        self._model = model
        self._call = call
        self._before: list[dict[str, Any]] | None = None  # while a forward runs, of each layer `_as_it_is`
        self._num_new = 0  # columns of the running forward

    @property
    def has_rows(self) -> bool:
        """Whether the cache's rows are here."""
        cache = self._of()
        return cache is not None and type(cache.layers) is LayersWithRows

    @property
    def layers(self) -> LayersWithRows | None:
        """None while the rows are the call's, in the pool."""
        cache: Any = self._of()
        return cache.layers if self.has_rows else None

    @layers.setter
    def layers(self, layers: list[Any] | None) -> None:
        cache: Any = self._of()
        cache.layers = cache.paged_layers if layers is None else LayersWithRows(layers)

    @property
    def is_running(self) -> bool:
        """Whether a forward runs, and may write."""
        return self._before is not None

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return max((len(states) for layer in self.layers or () for states in _held(layer).values()), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys, values and states held."""
        return sum(states.nbytes for layer in self.layers or () for states in _held(layer).values())

    def num_columns_of(self, layer_idx: int) -> int:
        """Columns of one layer: 0 where it holds none, unless it is the first."""
        layers = self.layers or ()
        return self.num_columns if not layer_idx or (layer_idx < len(layers) and _held(layers[layer_idx])) else 0

    def start_forward(self, arguments: Mapping[str, Any], why: str = "", *, records_past: bool = False) -> None:
        """A forward begins, with these arguments, by name; it runs as it is.

        Args:
            why: it could not run on the store, so the rows of the call move here before it, with their gradients, and give their
                blocks back; "": the rows are here.
            records_past: drafts will be verified, so windows keep all columns until `crop`.

        Raises:
            CacheBusyError: one runs in another thread.
        """
        self.roll_back()
        call, begins = self._call, bool(why) and not self._call.rows.alias
        if why:
            why = f"{'' if begins else 'then '}{why}; {_WITHOUT_STORE}"
            self._take_over(records_past=records_past)
        elif not call.counters.rows:
            why = _WITHOUT_STORE  # another call, in which these rows resume
        num_rows, self._num_new = shape_of(arguments, self.num_columns)
        num_counted = int(max(0, min(self._num_new, call.limits.num_prompt_columns - self.num_columns)))
        num_tokens = _num_tokens(arguments, num_rows, self._num_new, num_counted) if num_counted or why else []
        self._before = [_as_it_is(layer) for layer in self.layers or ()]
        with call.store.lock:
            call.counters.bypass(num_tokens, why, begins=begins)
            call.num_scheduled += 1

    def confirm(self) -> None:
        """The forward has returned."""
        call = self._call
        # In one step, so that an interrupt comes before or after both.
        self.num_columns, self._before = self.num_columns + self._num_new, None
        with call.store.lock:
            call.counters.confirm()
            call.peak_kv_bytes = max(call.peak_kv_bytes, call.store.kv_bytes_in_use(call.salt) + self.num_bytes)

    def roll_back(self) -> None:
        """Take back a forward that died: each layer gets what it held before. Without one: nothing.

        Raises:
            CacheBusyError: it runs in another thread.
        """
        if self._before is None or self.layers is None:
            return
        self.check_not_busy()
        del self.layers[len(self._before) :]
        for layer, held in zip(self.layers, self._before, strict=True):
            for name, value in held.items():
                grown = vars(layer)[name]
                is_length = isinstance(grown, Tensor) and isinstance(value, int)
                vars(layer)[name] = grown.narrow(-2, 0, value) if is_length else value
        self._before = None

    def reorder(self, sources: Sequence[int] | Tensor) -> None:
        """Row `i` continues as row `sources[i]`."""
        for layer in self.layers or ():
            layer.reorder_cache(torch.as_tensor(sources, device="cpu"))

    def crop(self, num_columns: int) -> None:
        """Take the last `num_columns` columns back, as transformers does."""
        for layer in self.layers or ():
            layer.crop(-num_columns)
        self.num_columns = max(0, self.num_columns - num_columns)

    def end(self) -> None:
        """Let go of the rows: the next ones begin in the pool, if they fit.

        Raises:
            CacheBusyError: a forward runs in another thread.
        """
        if self.has_rows:
            self.check_not_busy()
            self.layers = None
        self._before = None

    def copy_to(self, other: "LayersWithoutStore", memo: dict[int, Any]) -> None:
        """Give another cache a copy of the rows, as `copy.deepcopy` of a `DynamicCache` does.

        Raises:
            CacheArgumentError: gradients flow through the rows, and would not through their copies.
        """
        self.roll_back()
        if any(states.requires_grad for layer in self.layers or () for states in _held(layer).values()):
            raise CacheArgumentError(
                "gradients flow through the rows of this cache, and would not through a copy of them; copy it after "
                "forwards in torch.no_grad()"
            )
        other.layers, other.num_columns = copy.deepcopy(self.layers, memo), self.num_columns
        other.lacks_padding = self.lacks_padding

    def check_not_busy(self) -> None:
        """Raises CacheBusyError while a forward runs on the cache in another thread."""
        if self._before is not None:
            self._call.require_no_forward_elsewhere()

    def _take_over(self, *, records_past: bool) -> None:
        """As in every call, the rows of the call before are dropped; what is full of their blocks stays in the store."""
        call = self._call
        layers = list(cache_layers(self._model))
        for layer in layers if records_past else ():
            getattr(layer, "activate_past_recording", lambda: None)()
        with call.store.lock:
            written = call.store.pool.layer_indices if call.rows.alias else ()
        held = ((index, call.read_layer(index)) for index in written)  # one at a time
        carried = {} if call.states is None else call.states.of_batch(call.rows)
        put_rows(layers, held, carried, call.rows.num_columns)
        for layer in layers:
            if (keys := getattr(layer, "indexer_keys", None)) is not None:
                positions = index_positions(call.rows, call.rows.num_columns, keys.device)
                layer.indexer_position_ids = None if positions is None else positions[:, call.rows.alias]
        self.num_columns, self.lacks_padding = call.rows.num_columns, lacks_padding(call.rows.distinct)
        self.layers = (
            layers  # from here on the rows are here; what an interrupt leaves to the call, its next event ends
        )
        with call.store.lock:
            limits = call.limits
            call.drop_rows()
            call.limits = limits


def put_rows(
    layers: list[Any], held: Iterable[tuple[int, Mapping[str, Tensor]]], states: States, num_columns: int
) -> None:
    """Let empty layers of transformers hold rows.

    Args:
        layers: those that there are more of than a model's config names are appended.
        held: layer index, and name -> [R, H, columns, D]: all columns, or the last ones that a window shows.
        states: which nobody else has.
        num_columns: of the rows.
    """
    for index, of_layer in held:
        layers += [DynamicLayer() for _ in range(len(layers), index + 1)]  # type: ignore[no-untyped-call]
        layers[index].update(of_layer["key"], of_layer["value"])
        if _has_window(layers[index]):
            layers[index].cumulative_length = num_columns
        if "indexer_key" in of_layer:
            layers[index].update_indexer(of_layer["indexer_key"].squeeze(1))
    live_states(layers).put(states)


def why_full(refusal: OutOfBlocksError) -> str:
    """What `last_call` says of a call that did not fit."""
    return f"the pool is full: {re.split(': |[.] ', str(refusal))[0]}"  # without what is in use, and without the advice


def _has_window(layer: Any) -> bool:
    return getattr(layer, "is_sliding", False)


def _held(layer: Any) -> dict[str, Tensor]:
    """The tensors of a layer that have rows, by name."""
    held = {name: getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")}
    for name in ("conv_states", "recurrent_states"):
        held |= {f"{name} {index}": states for index, states in getattr(layer, name, {}).items()}
    return {name: states for name, states in held.items() if states is not None and states.numel()}


def _as_it_is(layer: Any) -> dict[str, Any]:
    """What a layer holds, by name; of a tensor that only grows its length, for a copy would be all of the rows' memory once more."""
    held = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(layer).items()}
    if has_state(layer):
        for name in ("conv_states", "recurrent_states"):
            held[name] = {index: None if states is None else states.clone() for index, states in held[name].items()}
    elif not _has_window(layer):
        held |= {name: states.shape[-2] for name, states in _held(layer).items()}
    return held


def _num_tokens(arguments: Mapping[str, Any], num_rows: int, num_new: int, num_counted: int) -> list[int]:
    """Row -> how many of the first `num_counted` columns of a forward are tokens: those that its mask shows."""
    mask = arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != num_rows or mask.shape[1] < num_new:
        return [num_counted] * num_rows
    counts: list[int] = (mask[:, mask.shape[1] - num_new :][:, :num_counted] != 0).sum(1).tolist()
    return counts
