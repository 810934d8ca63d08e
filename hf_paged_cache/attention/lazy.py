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
    """`LazyReads` provides what a layer reads, by name."""

    def dense(self, name: str) -> Tensor:
        """Return the tensor of a name, [R, H, columns, D], contiguous."""
        ...

    def refuse(self) -> None:
        """Note that this call is why dense tensors are asked for next, which says nothing of the model."""
        ...

    def attend(self, query: Tensor, mask: Tensor | None, scale: float | None) -> Tensor | None:
        """Return what attention gives of "key" and "value"; None where dense tensors must be asked."""
        ...


class LazyStates(Tensor):
    """`LazyStates` stands for what a layer reads under one name, [R, H, columns, D].

    Its heads may be repeated: the copies of a head lie next to one another. While heads are being repeated, the shape
    is [R, H, repeats, columns, D].
    """

    _reads: LazyReads
    _name: str
    _repeats: int

    @staticmethod
    def __new__(
        cls: type["LazyStates"],
        reads: LazyReads,
        name: str,
        shape: Iterable[int],
        dtype: torch.dtype,
        device: torch.device,
        repeats: int = 1,
    ) -> "LazyStates":
        lazy: LazyStates = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        lazy._reads, lazy._name, lazy._repeats = reads, name, repeats
        return lazy

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def dense(self) -> Tensor:
        """Return the dense tensor that this one stands for."""
        states = self._reads.dense(self._name)
        if self._repeats == 1 and self.dim() == 4:
            return states
        rows, heads, columns, size = states.shape
        return states[:, :, None].expand(rows, heads, self._repeats, columns, size).reshape(self.shape)

    def _reshaped(self, shape: Iterable[int], repeats: int) -> "LazyStates":
        return LazyStates(self._reads, self._name, shape, self.dtype, self.device, repeats)

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
            lazily = _LAZILY.get(func)
            given = None if lazily is None else lazily(*args, **kwargs)
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


def _densely(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    dense_args, dense_kwargs = tree_map_only(LazyStates, LazyStates.dense, (args, dict(kwargs)))
    return func(*dense_args, **dense_kwargs)


def as_dense(states: Tensor) -> Tensor:
    """Return `states`, or the tensor that it stands for if it is lazy, for a compiled forward.

    That the tensor is asked for dense then says nothing of the model.
    """
    if not isinstance(states, LazyStates):
        return states
    states._reads.refuse()
    return states.dense()


class KnownMasks:
    """`KnownMasks` remembers what is known of the masks of one forward: most layers are given the same mask."""

    def __init__(self) -> None:
        self._known: list[tuple[Tensor | None, int, Any, Any]] = []

    def of(self, mask: Tensor | None, key: Any, look: Callable[[], Any]) -> Any:
        """Return what `look` says of a mask; `look` is called once as long as nobody writes to the mask.

        Where torch counts no writes to a mask, `look` is called once.

        Args:
            key: all else that the answer depends on.
        """
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
    if not isinstance(key, LazyStates) or not isinstance(value, LazyStates):
        return None
    if isinstance(query, LazyStates) or isinstance(attn_mask, LazyStates) or query.dim() != 4:
        return None
    reads, heads = key._reads, key.shape[1]
    if reads is not value._reads or (key._name, value._name) != ("key", "value"):
        return None
    if key.dim() != 4 or value.dim() != 4 or value.shape[1] != heads:
        return None
    if not key.dtype == value.dtype == query.dtype:
        return None
    if query.shape[1] != heads and (not enable_gqa or query.shape[1] % heads):
        return None
    if dropout_p or is_causal:
        reads.refuse()
        return None
    return reads.attend(query, attn_mask, scale)


def _unsqueezed(states: Any, index: Any) -> Tensor | None:
    """Return `states[:, :, None]`, with which repeating heads begins."""
    if not isinstance(index, tuple) or not 3 <= len(index) <= 5 or index[2] is not None:
        return None
    if states.dim() != 4 or states._repeats != 1 or not all(map(_is_everything, (*index[:2], *index[3:]))):
        return None
    rows, heads, columns, size = states.shape
    return states._reshaped((rows, heads, 1, columns, size), 1)  # type: ignore[no-any-return]


def _is_everything(part: Any) -> bool:
    return isinstance(part, slice) and part == slice(None)


def _expanded(states: Any, *sizes: Any) -> Tensor | None:
    wanted = _sizes(sizes)
    if states.dim() != 5 or states._repeats != 1 or len(wanted) != 5:
        return None
    rows, heads, _, columns, size = states.shape
    repeats = wanted[2]
    if repeats < 1 or not _are(wanted, (rows, heads, repeats, columns, size)):
        return None
    return states._reshaped((rows, heads, repeats, columns, size), repeats)  # type: ignore[no-any-return]


def _joined(states: Any, *sizes: Any) -> Tensor | None:
    wanted = _sizes(sizes)
    if states.dim() != 5 or len(wanted) != 4:
        return None
    rows, heads, repeats, columns, size = states.shape
    if not _are(wanted, (rows, heads * repeats, columns, size)):
        return None
    return states._reshaped((rows, heads * repeats, columns, size), repeats)  # type: ignore[no-any-return]


def _contiguous(states: Any, **_: Any) -> Tensor | None:
    return states  # type: ignore[no-any-return]


def _sizes(given: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given


def _are(given: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Return whether the sizes `given` are `sizes`, where -1 stands for any one of them."""
    return given.count(-1) <= 1 and all(one in (-1, other) for one, other in zip(given, sizes, strict=True))


_LAZILY: Mapping[Any, Callable[..., Tensor | None]] = {
    scaled_dot_product_attention: _attention,
    Tensor.__getitem__: _unsqueezed,
    Tensor.expand: _expanded,
    Tensor.reshape: _joined,
    Tensor.contiguous: _contiguous,
}
_OF_SHAPE = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cpu", "is_cuda")
    ),
}
