"""Defines keys and values that are not there until somebody looks: tensors without storage.

Only attention may be asked of them: whoever made them computes `scaled_dot_product_attention`. What models do before
it, repeating heads, leaves them lazy. For anything else they become dense first: at `__torch_function__`, and at
`__torch_dispatch__` for what gets past that.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only


class LazyReads(Protocol):
    """`LazyReads` provides what a layer reads, by name: "key" and "value", [R, H, columns, D]."""

    def dense(self, name: str, *, is_call: bool) -> Tensor: ...  # `is_call`: attention asks, which is not the model's

    def attend(self, query: Tensor, mask: Tensor | None, scale: float | None) -> Tensor | None: ...  # None: ask `dense`


class LazyStates(Tensor):
    """`LazyStates` stands for what a layer reads under one name, [R, H, columns, D], with heads that may be repeated.

    The copies of a head lie next to one another. While heads are being repeated, it is [R, H, repeats, columns, D].
    """

    _reads: LazyReads
    _name: str
    _repeats: int

    @staticmethod
    def __new__(
        cls: type["LazyStates"], reads: LazyReads, name: str, shape: Iterable[int], like: Tensor, repeats: int = 1
    ) -> "LazyStates":
        lazy: LazyStates = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=like.dtype, device=like.device)
        lazy._reads, lazy._name, lazy._repeats = reads, name, repeats
        return lazy

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def dense(self, *, is_call: bool = False) -> Tensor:
        """Return the dense tensor that this one stands for."""
        states = self._reads.dense(self._name, is_call=is_call)
        if self._repeats == 1 and self.dim() == 4:
            return states
        rows, heads, columns, size = states.shape
        return states[:, :, None].expand(rows, heads, self._repeats, columns, size).reshape(self.shape)

    def _reshaped(self, shape: Iterable[int], repeats: int) -> "LazyStates":
        return LazyStates(self._reads, self._name, shape, self, repeats)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _OF_SHAPE:
                return func(*args, **kwargs)
            serve = _LAZILY.get(func)
            given = None if serve is None else serve(*args, **kwargs)
        return _densely(func, args, kwargs) if given is None else given

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _densely(func, args, kwargs or {})


def lazily(reads: LazyReads, keys: Tensor, values: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return lazy keys and values, [R, H, num_columns, D] each, that are else like these."""
    shapes = ((*states.shape[:2], num_columns, states.shape[3]) for states in (keys, values))
    return LazyStates(reads, "key", next(shapes), keys), LazyStates(reads, "value", next(shapes), values)


def _densely(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    def dense(states: LazyStates) -> Tensor:
        return states.dense(is_call=func is scaled_dot_product_attention)

    dense_args, dense_kwargs = tree_map_only(LazyStates, dense, (args, dict(kwargs)))
    return func(*dense_args, **dense_kwargs)


def as_dense(states: Tensor) -> Tensor:
    """Return `states`, or the tensor that it stands for if it is lazy, for a compiled forward."""
    return states.dense(is_call=True) if isinstance(states, LazyStates) else states


class KnownMasks:
    """`KnownMasks` remembers what is known of the masks of one forward: most layers are given the same mask."""

    def __init__(self) -> None:
        self._known: list[tuple[Tensor | None, int, Any, Any]] = []

    def of(self, mask: Tensor | None, key: Any, look: Callable[[], Any]) -> Any:
        """Return what `look` says of a mask and `key`; it is called once while torch counts no write to the mask."""
        version = 0 if mask is None or mask.is_inference() else mask._version
        for known, of_version, of_key, found in self._known:
            if known is mask and of_version == version and of_key == key:
                return found
        found = look()
        self._known.append((mask, version, key, found))
        return found


# Functions that leave tensors lazy; they return None if something else was asked for.


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if not isinstance(key, LazyStates) or not isinstance(value, LazyStates) or isinstance(query, LazyStates):
        return None
    are_pair = key._reads is value._reads and (key._name, value._name) == ("key", "value")
    if not are_pair or isinstance(attn_mask, LazyStates) or dropout_p or is_causal:
        return None
    if not query.dim() == key.dim() == value.dim() == 4 or not key.dtype == value.dtype == query.dtype:
        return None
    heads = key.shape[1]
    if value.shape[1] != heads or (query.shape[1] != heads and (not enable_gqa or query.shape[1] % heads)):
        return None
    return key._reads.attend(query, attn_mask, scale)


def _unsqueezed(states: Any, index: Any) -> Tensor | None:
    """Return `states[:, :, None, :, :]`, with which repeating heads begins."""
    is_new_axis = (
        isinstance(index, tuple) and not any(isinstance(part, Tensor) for part in index) and index == _NEW_AXIS
    )
    if not is_new_axis or states.dim() != 4 or states._repeats != 1:
        return None
    rows, heads, columns, size = states.shape
    return states._reshaped((rows, heads, 1, columns, size), 1)  # type: ignore[no-any-return]


def _expanded(states: Any, *sizes: Any) -> Tensor | None:
    wanted = _sizes(sizes)
    if states.dim() != 5 or len(wanted) != 5 or (*wanted[:2], 1, *wanted[3:]) != states.shape:
        return None
    return states._reshaped(wanted, wanted[2])  # type: ignore[no-any-return]


def _joined(states: Any, *sizes: Any) -> Tensor | None:
    wanted = _sizes(sizes)
    if states.dim() != 5 or wanted != (states.shape[0], states.shape[1] * states.shape[2], *states.shape[3:]):
        return None
    return states._reshaped(wanted, states.shape[2])  # type: ignore[no-any-return]


def _contiguous(states: Any, **_: Any) -> Tensor | None:
    return states  # type: ignore[no-any-return]


def _sizes(given: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


_NEW_AXIS = (slice(None), slice(None), None, slice(None), slice(None))
_LAZILY: Mapping[Any, Callable[..., Tensor | None]] = {
    scaled_dot_product_attention: _attention,
    Tensor.__getitem__: _unsqueezed,
    Tensor.expand: _expanded,
    Tensor.reshape: _joined,
    Tensor.contiguous: _contiguous,
}
_OF_SHAPE = {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_contiguous, Tensor.is_floating_point),
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cpu", "is_cuda")
    ),
}
