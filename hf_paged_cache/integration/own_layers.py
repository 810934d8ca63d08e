"""The rows of a bypassed call: they have layers of their own, as `DynamicCache` holds them, and no block of the store.

Owns those layers: when rows begin there or move there, what a forward that died leaves in them, and when they are let go.
Whether a call is bypassed or refused, the session decides. Nothing here is ever found by another call.
"""

import copy
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ..call.call import Call
from ..errors import CacheArgumentError, OutOfBlocksError
from ..kv.states import LiveStates
from ..model.support import cache_layers, has_keys, has_state
from .input_values import shape_of

logger = logging.getLogger("hf_paged_cache")

_WITHOUT_STORE = "computed without the store"


class OwnLayers:
    """Layers that hold one cache's rows while its call is bypassed.

    Args:
        model: says which layers `DynamicCache` has.
        call: that of the cache; its rows move here, and its counters count.

    Attributes:
        layers: None while the rows are the call's, in the pool.
    """

    def __init__(self, model: Any, call: Call) -> None:
        self.layers: list[Any] | None = None
        self._model = model
        self._call = call
        self._why = ""  # appended to what `stopped` says, by the next forward
        self._begins = False  # the next forward is the rows' first
        # While a forward runs, for each layer: its columns before, and all that it held where a window drops columns.
        self._before: list[tuple[int, dict[str, Any]]] | None = None
        self._num_new = 0  # columns of the running forward
        self._num_columns = 0  # of rows all of whose layers carry states, and no columns

    @property
    def has_rows(self) -> bool:
        """Whether the cache's rows are here."""
        return self.layers is not None

    @property
    def is_running(self) -> bool:
        """Whether a forward runs, and may write."""
        return self._before is not None

    @property
    def num_columns(self) -> int:
        """Columns of the rows, padding included; while a forward runs, or has died, those before it."""
        if not any(map(has_keys, self.layers or ())):
            return self._num_columns
        if self._before is not None:
            return max((num_columns for num_columns, _ in self._before), default=0)
        return next((num_columns for layer in self.layers or () if (num_columns := _num_columns(layer))), 0)

    def num_columns_of(self, layer_idx: int) -> int:
        """Those of one layer: 0 where it holds none, unless it is the first."""
        layers = self.layers or ()
        if layer_idx and (layer_idx >= len(layers) or not _num_columns(layers[layer_idx])):
            return 0
        return self.num_columns

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return max((len(states) for layer in self.layers or () for states in _held(layer).values()), default=0)

    @property
    def num_bytes(self) -> int:
        """Bytes of the keys and values held."""
        return sum(states.nbytes for layer in self.layers or () for states in _held(layer).values())

    def take_over(self, reason: str, *, records_past: bool) -> None:
        """The call's next forward does not run on the store: its rows move here, with their gradients, and give their blocks back.

        As in every call, the rows of the call before are dropped; what is full of their blocks stays in the store.

        Args:
            reason: why, for `last_call`.
            records_past: drafts will be verified, so windows keep all columns until `crop`.
        """
        call = self._call
        carried = call.states.of_batch(call.rows)
        layers = list(cache_layers(self._model))
        if records_past:
            for layer in layers:
                getattr(layer, "activate_past_recording", lambda: None)()
        self._begins = not call.rows.alias
        if not self._begins:
            with call.store.lock:
                held = call.store.pool.layer_indices
            for index in held:
                states = call.read_layer(index)
                layers += [self.make_layer() for _ in range(len(layers), index + 1)]
                layers[index].update(states["key"], states["value"])
                if _has_window(layers[index]):
                    layers[index].cumulative_length = call.rows.num_columns
                if "indexer_key" in states:
                    layers[index].update_indexer(states["indexer_key"].squeeze(1))
        LiveStates({i: layer for i, layer in enumerate(layers) if has_state(layer)}).put(carried)
        self._num_columns = call.rows.num_columns
        why = f"{reason}; {_WITHOUT_STORE}"
        self._why = why if self._begins else f"then {why}"
        self._before = None
        # From here on the rows are here; what an interrupt leaves to the call, its next event ends.
        self.layers = layers
        with call.store.lock:
            limits = call.limits
            call.drop_rows()
            call.limits = limits

    def start_forward(self, arguments: Mapping[str, Any]) -> None:
        """A forward begins, with these arguments, by name; it runs as it is.

        Raises:
            CacheBusyError: one runs in another thread.
        """
        self.roll_back()
        call, before = self._call, self.num_columns
        counters, end = call.counters, call.limits.num_prompt_columns
        why, begins, self._why, self._begins = self._why, self._begins, "", False
        if not why and not counters.rows:
            why = _WITHOUT_STORE  # another call, in which these rows go on
        num_tokens = _num_tokens(arguments, before, end - before) if before < end or why else []
        layers = self.layers or ()
        self._before = [(_num_columns(layer), _as_it_is(layer)) for layer in layers]
        self._num_new = shape_of(arguments, before)[1]
        with call.store.lock:
            counters.bypass(num_tokens, why, begins=begins)
            call.num_scheduled += 1

    def confirm(self) -> None:
        """The forward has returned."""
        call, self._before = self._call, None
        self._num_columns += self._num_new
        with call.store.lock:
            call.counters.confirm()
            call.peak_kv_bytes = max(call.peak_kv_bytes, call.store.kv_bytes_in_use(call.salt) + self.num_bytes)

    def roll_back(self) -> None:
        """Take back a forward that died: each layer gets what it held before. Without one: nothing.

        Raises:
            CacheBusyError: it runs in another thread.
        """
        before, layers = self._before, self.layers
        if before is None or layers is None:
            return
        self.check_not_busy()
        del layers[len(before) :]
        for layer, (num_columns, held) in zip(layers, before, strict=True):
            if held:
                vars(layer).update(held)
            elif not num_columns:
                layer.reset()
            else:
                for name, states in _held(layer).items():  # one with states is put back whole
                    setattr(layer, name, states.narrow(1 if name == "indexer_keys" else 2, 0, num_columns))
        self._before = None

    def settle(self) -> bool:
        """Take back a forward that died; says whether the rows are here, so that what is done to them is done to layers."""
        self._call.require_no_generate_elsewhere()
        self.roll_back()
        return self.has_rows

    def end(self) -> None:
        """Let go of the rows: the next ones begin in the pool, if they fit.

        Raises:
            CacheBusyError: a forward runs in another thread.
        """
        self.check_not_busy()
        self.layers = self._before = None
        self._why, self._begins = "", False

    def select(self, indices: Tensor) -> None:
        """Row `i` goes on as row `indices[i]`; or those rows go on that a mask of booleans shows."""
        chosen = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        chosen = torch.where(chosen < 0, chosen + self.num_rows, chosen)
        for layer in self.layers or ():
            for states in _held(layer).values():
                chosen = chosen.to(states.device)
            layer.reorder_cache(chosen)

    def copy_to(self, other: "OwnLayers", memo: dict[int, Any]) -> None:
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
        other.layers, other._num_columns = copy.deepcopy(self.layers, memo), self._num_columns

    def make_layer(self) -> Any:
        """A layer more than the model's config names."""
        return DynamicLayer()  # type: ignore[no-untyped-call]

    def check_not_busy(self) -> None:
        """Raises CacheBusyError while a forward runs on the cache in another thread."""
        if self._before is not None:
            self._call.require_no_forward_elsewhere()


def why_full(refusal: OutOfBlocksError) -> str:
    """What `last_call` says of a call that did not fit."""
    return f"the pool is full: {re.split(': |[.] ', str(refusal))[0]}"  # without what is in use, and without the advice


def _num_columns(layer: Any) -> int:
    return int(layer.get_seq_length()) if has_keys(layer) else 0


def _as_it_is(layer: Any) -> dict[str, Any]:
    """All that a layer holds which a forward drops or overwrites; of one that only grows, nothing."""
    if not has_state(layer):
        return dict(vars(layer)) if _has_window(layer) else {}
    copies = {name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)}
    for name in ("conv_states", "recurrent_states"):
        copies[name] = {index: None if held is None else held.clone() for index, held in copies[name].items()}
    return {**vars(layer), **copies}


def _has_window(layer: Any) -> bool:
    return getattr(layer, "is_sliding", False)


def _held(layer: Any) -> dict[str, Tensor]:
    """The tensors of a layer that have columns, by name."""
    held = {name: getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")}
    for name in ("conv_states", "recurrent_states"):
        held |= {f"{name} {index}": states for index, states in getattr(layer, name, {}).items()}
    return {name: states for name, states in held.items() if states is not None and states.numel()}


def _num_tokens(arguments: Mapping[str, Any], before: int, num_columns: float) -> Sequence[int]:
    """Row -> how many of the first `num_columns` columns of a forward are tokens: those that its mask shows."""
    num_rows, num_new = shape_of(arguments, before)
    num_counted = max(0, int(min(num_new, num_columns)))
    mask = arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != num_rows or mask.shape[1] < num_new:
        return [num_counted] * num_rows
    shown = mask[:, mask.shape[1] - num_new :][:, :num_counted]
    counts: list[int] = (shown != 0).sum(1).tolist()
    return counts
