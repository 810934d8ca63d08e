"""Attaches a bracket round `generate` and two forward hooks to a model, once; `detach` takes them off.

The cache is found in `past_key_values`, or under the model's other name for it, or by `ambient`. Everything attached is
a module-level function or an object that is copied and pickled with the model.
"""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..errors import CacheArgumentError
from ..locks import new_lock
from ..model.support import cache_argument
from ..rows.captured import detach_forward
from ..rows.rows import Rows
from .ambient import ambient_cache
from .generate_arguments import has_own_generate, read_generate

CACHE_ARGUMENTS = ("past_key_values", "cache_params")  # names that forwards have for a cache
_attaching = new_lock()  # held while bracket and hooks come or go: two caches of a model may be built at once
# model that had no bracket -> number of open spans of `left_as_it_was`
_spans: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


class GenerateBracket:
    """`GenerateBracket` stands in a model's `__dict__` for `generate`, and runs each call on the cache that it brings.

    A `generate` that somebody else had put on the instance is wrapped, and put back by `detach`.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.replaced = model.__dict__.get("generate")  # None: the class's own `generate` was used
        model.register_forward_pre_hook(before_forward, with_kwargs=True)
        model.register_forward_hook(after_forward, with_kwargs=True)
        generate = type(model).generate
        self.__name__, self.__qualname__, self.__doc__ = generate.__name__, generate.__qualname__, generate.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        brought = cache = _paged(kwargs)
        is_replaced = self.replaced is not None
        generate = self.replaced if is_replaced else type(self.model).generate.__get__(self.model)
        if brought is None:
            takes_cache = not (is_replaced or has_own_generate(self.model)) or self._takes_cache()
            if takes_cache and all(kwargs.get(name) is None for name in CACHE_ARGUMENTS):
                cache = ambient_cache(self.model)
            if cache is None:
                return generate(*args, **kwargs)
        for name in CACHE_ARGUMENTS:
            kwargs.pop(name, None)
        given = read_generate(self.model, args, kwargs, is_replaced=is_replaced)
        if brought is not None and given.why_no_cache:
            warnings.warn(f"{given.why_no_cache} this call runs without the cache it was given", stacklevel=2)
        needs_none = given.cache_implementation is not None or given.is_assistant or given.only_new_tokens
        if given.why_no_cache or (brought is None and needs_none):
            return generate(*args, **kwargs)
        name = cache_argument(type(self.model))
        with cache.running(self.model, given) as rows:
            if rows.state.images is not None:  # a tower is to run for images that are not known alone
                kwargs = {key: value for key, value in kwargs.items() if key not in rows.state.images.pixels}
            output = generate(*args, **kwargs, **{name: rows})
            if not rows.is_open:
                rows.calls.note_elsewhere(rows, given)
            rows.escaped = rows.escaped or getattr(output, name, None) is rows
            return output

    @property
    def __wrapped__(self) -> Any:  # what `inspect.signature` asks
        return self.replaced if self.replaced is not None else type(self.model).generate.__get__(self.model)

    def _takes_cache(self) -> bool:
        """Return whether a `generate` of the model's own can be passed a cache."""
        name, parameters = cache_argument(type(self.model)), inspect.signature(self).parameters.values()
        return any(each.name == name or each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


def bracket_of(model: nn.Module) -> GenerateBracket | None:
    """Return the bracket that is attached to a model; None: there is none."""
    bracket = model.__dict__.get("generate")
    return bracket if isinstance(bracket, GenerateBracket) else None


def attach(model: Any) -> None:
    """Attach bracket and hooks to a model, unless it has them."""
    with _attaching:
        if bracket_of(model) is None:
            _remove_hooks(model)  # hooks of an `attach` or a `detach` that was interrupted
            model.generate = GenerateBracket(model)


def detach(model: Any) -> None:
    """Take bracket and hooks off a model, for all its caches, and put back what was there before."""
    with _attaching:
        detach_forward(model)
        bracket = bracket_of(model)
        if bracket is None:
            return
        if bracket.replaced is None:
            del model.generate
        else:
            model.generate = bracket.replaced
        _remove_hooks(model)


def _remove_hooks(model: nn.Module) -> None:
    """Take our hooks off. They are found by identity, since their handles may be lost."""
    for hooks, with_kwargs, ours in (
        (model._forward_pre_hooks, model._forward_pre_hooks_with_kwargs, before_forward),
        (model._forward_hooks, model._forward_hooks_with_kwargs, after_forward),
    ):
        for key in [key for key, hook in hooks.items() if hook is ours]:
            del hooks[key]
            with_kwargs.pop(key, None)


@contextmanager
def left_as_it_was(model: Any) -> Iterator[None]:
    """Take bracket and hooks off at the end, if the model had none; of overlapping spans, at the end of the last."""
    with _attaching:
        is_ours = model in _spans or bracket_of(model) is None
        if is_ours:
            _spans[model] = _spans.get(model, 0) + 1
    try:
        yield
    finally:
        if is_ours:
            with _attaching:
                _spans[model] -= 1
                is_last = not _spans[model]
                if is_last:
                    del _spans[model]
            if is_last:
                detach(model)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def before_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Announce a forward to the cache among its arguments; return the arguments to run with: a forward pre-hook."""
    arguments = _by_name(model, args, kwargs) if args else kwargs
    cache = arguments.get("past_key_values")
    if type(cache) is Rows and cache.is_open:  # nearly all forwards are steps
        return (), cache.before_forward(model, arguments)
    cache = cache if type(cache) is Rows else _paged(arguments)
    if cache is None:
        return None
    if arguments.get("past_key_values") is not None and (name := cache_argument(type(model))) != "past_key_values":
        raise CacheArgumentError(
            f"the cache was passed as past_key_values, which {type(model).__name__} does not read, so its layers would "
            f"run without it; pass it as {name}"
        )
    return (), cache.before_forward(model, arguments)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def after_forward(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Tell rows that their forward has returned, and give the caller a row for each row passed: a forward hook."""
    cache = kwargs.get("past_key_values")
    if type(cache) is not Rows:  # under another name, or rows that pose as another class
        cache = _paged(kwargs)
    return None if cache is None else cache.after_forward(output)


def _paged(arguments: Mapping[str, Any]) -> Any:
    """Return the cache of ours among the arguments; refuse its class, its store, and what is never a cache."""
    cache: Any = arguments.get("past_key_values")
    cache = arguments.get("cache_params") if cache is None else cache
    if isinstance(cache, str | bool | int | float | dict | Tensor | nn.Module):
        raise CacheArgumentError(
            f"past_key_values is of type {type(cache).__name__}, which is no cache; "
            "pass PagedPrefixCache(model), or leave it out"
        )
    if not getattr(cache, "is_paged_prefix_cache", False):
        return None
    if isinstance(cache, type) or not hasattr(cache, "before_forward"):
        what = "the class PagedPrefixCache" if isinstance(cache, type) else f"a {type(cache).__name__}"
        raise CacheArgumentError(
            f"past_key_values is {what}, which is no cache; build one, PagedPrefixCache(model) or "
            "PagedPrefixCache(store), and pass that"
        )
    return cache


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments by name; positional ones get the names that the forward gives them."""
    signature = inspect.signature(model.forward)
    bound = signature.bind_partial(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return dict(bound)
