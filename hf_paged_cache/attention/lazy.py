"""Keys and values that are not there until somebody looks: tensors without storage, of which only attention may be asked.

`scaled_dot_product_attention` is computed by whoever made them. What models do before it, repeating heads, leaves them
lazy. For anything else they become dense first: at `__torch_function__`, and at `__torch_dispatch__` for what gets past that.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only


class LazyReads(Protocol):
    """What a layer reads, by name."""

    def dense(self, name: str) -> Tensor:
        """[R, H, columns, D], contiguous."""
        ...

    def refuse(self) -> None:
        """What comes next asks for dense tensors because of this call: it says nothing of the model."""
        ...

    def attend(self, query: Tensor, mask: Tensor | None, scale: float | None) -> Tensor | None:
        """What attention gives of "key" and "value"; None where it must be asked of dense ones."""
        ...


class LazyStates(Tensor):
    """What a layer reads under one name, [R, H, columns, D], or with each head repeated, next to itself.

    While heads are being repeated it is [R, H, repeats, columns, D].
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
        """The tensor that this stands for."""
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
    """The tensor itself, or the one that it stands for, for a compiled forward: that says nothing of the model."""
    if not isinstance(states, LazyStates):
        return states
    states._reads.refuse()
    return states.dense()


class KnownMasks:
    """What is known of the masks of one forward: most layers are given the same one."""

    def __init__(self) -> None:
        self._known: list[tuple[Tensor | None, int, Any, Any]] = []

    def of(self, mask: Tensor | None, key: Any, look: Callable[[], Any]) -> Any:
        """What `look` says of a mask, which is asked once as long as nobody writes to it; where torch counts no writes, once.

        Args:
            key: what else the answer depends on.
        """
        version = 0 if mask is None or mask.is_inference() else mask._version
        for known, of_version, of_key, found in self._known:
            if known is mask and of_version == version and of_key == key:
                return found
        found = look()
        self._known.append((mask, version, key, found))
        return found


# What leaves them lazy; None: it was asked for something else.


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
    """`states[:, :, None]`, as heads are begun to be repeated."""
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
    """Whether sizes are these, where -1 stands for any one of them."""
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
