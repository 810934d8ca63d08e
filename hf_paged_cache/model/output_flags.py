"""Whether a model computes the same keys and values while it is asked for hidden states, attentions or router logits.

Most models only collect what they compute anyway. Falcon takes another path through attention, on which a token sees those
behind it. Decided by the model's code, and where that reads a flag by a trial, never by a list of names.
"""

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .comparison import NUM_CACHED, NUM_COLUMNS, dynamic_cache, run_columns, trial_inputs
from .probing import undisturbed

OUTPUT_FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")


class OutputFlags:
    """What the output flags mean to one model, learned when one is asked for."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._modules: Sequence[nn.Module] | None = None  # whose code has yet to be read
        self._classes: set[type] = set()
        self._are_read: frozenset[str] = frozenset()
        self._tried: dict[str, tuple[object, bool]] = {}  # flag -> settings, and whether it changes anything under them

    def follow(self, modules: Sequence[nn.Module]) -> None:
        """These are the model's modules now. What was tried holds as long as their classes are the same."""
        self._modules = modules

    def is_read(self, name: str) -> bool:
        """Whether any code of the model reads the flag.  Cost: the first time, a pass over that code."""
        if self._modules is not None:
            classes = {type(module) for module in self._modules}
            if classes != self._classes:
                self._tried.clear()
                self._are_read = frozenset(OUTPUT_FLAGS) & _names_in_code(classes, self._model.config)
                self._classes = classes
            self._modules = None
        return name in self._are_read

    def changes(self, name: str, settings: object, *, may_try: bool) -> bool:
        """Whether keys, values or states are others with a flag that is read, or may be.  Cost: sixteen short forwards,
        once under these settings.

        Args:
            settings: of the model's config as they are now; what was tried under others says nothing.
            may_try: forwards of our own change nothing for anybody.
        """
        known = self._tried.get(name)
        if known is not None and known[0] == settings:
            return known[1]
        if not may_try:
            return True
        found = not _is_same_with(self._model, name)
        self._tried[name] = (settings, found)
        return found


def outputs_of(config: Any) -> list[str]:
    """The outputs that a model's config, or the text config inside it, asks for in all calls."""
    parts = (config, config.get_text_config(decoder=True))
    return [name for name in OUTPUT_FLAGS if any(getattr(part, name, None) for part in parts)]


def _is_same_with(model: PreTrainedModel, name: str) -> bool:
    """Whether all that a cache holds is equal, bit by bit, with a flag and without: of two rows, one of them padded, and of the
    other alone, with a mask and without. False where it cannot be told.
    """
    padded = trial_inputs(model)
    alone = {key: value[:1] for key, value in padded.items()}
    unmasked = {key: value for key, value in alone.items() if key != "attention_mask"}
    was_run = False
    with undisturbed(model):
        for inputs, stops in (
            (padded, (NUM_CACHED, NUM_COLUMNS)),
            (alone, (NUM_CACHED, NUM_CACHED + 1, NUM_COLUMNS)),
            (unmasked, (NUM_CACHED, NUM_CACHED + 1, NUM_COLUMNS)),
        ):
            caches = {flag: dynamic_cache(model) for flag in (False, True)}
            try:
                for start, stop in pairwise((0, *stops)):
                    for flag, cache in caches.items():
                        run_columns(model, inputs, cache, start, stop, **{name: flag})
                    was_run = True
                    if not _are_equal(*map(_held, caches.values())):
                        return False
            except torch.OutOfMemoryError:
                raise
            except Exception:  # noqa: BLE001 (a model may raise anything; with the flag, any call would raise it)
                continue
    return was_run


def _held(cache: DynamicCache) -> list[Tensor]:
    """What a cache holds."""
    held: list[Any] = []
    for layer in cache.layers:
        held += [getattr(layer, name, None) for name in ("keys", "values", "indexer_keys")]
        for name in ("conv_states", "recurrent_states"):
            held += getattr(layer, name, {}).values()
    return [tensor for tensor in held if isinstance(tensor, Tensor)]


def _are_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(
        one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        for one, other in zip(first, second, strict=True)
    )


def _names_in_code(classes: Iterable[type], config: Any) -> set[str]:
    """All names and strings in the code of the classes, of the source files that define them, and of the attention function in use."""
    parents = {parent for kind in classes for parent in kind.__mro__ if _is_of_models(parent.__module__)}
    sources = [sys.modules.get(source) for source in {parent.__module__ for parent in parents}]
    functions = [*chain.from_iterable(vars(parent).values() for parent in parents)]
    functions += chain.from_iterable(_functions_of(source) for source in sources if source is not None)
    attention = ALL_ATTENTION_FUNCTIONS.get(getattr(config, "_attn_implementation", None))
    if attention is not None and _is_of_models(_unwrapped(attention).__module__):
        functions.append(attention)
    return {*chain.from_iterable(_names_of(function) for function in functions)}


def _is_of_models(source: str) -> bool:
    """Whether a source file is a model's. What transformers has for all of them hands flags on, or warns that a kernel gives no attentions."""
    return source.startswith("transformers.models.") or not source.startswith(("torch.", "transformers."))


def _functions_of(source: ModuleType) -> Iterator[Any]:
    """Functions of a source file, and those of its classes."""
    for thing in vars(source).values():
        if getattr(thing, "__module__", None) == source.__name__:
            yield from vars(thing).values() if isinstance(thing, type) else (thing,)


def _names_of(function: Any) -> set[str]:
    """Names and strings in a function's code, and in that of functions inside of it; none of what is no function."""
    names: set[str] = set()
    codes = [getattr(_unwrapped(function), "__code__", None)]
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType):
            names |= {*code.co_names, *code.co_varnames, *code.co_cellvars, *code.co_freevars}
            parts = [part for each in code.co_consts for part in (each if isinstance(each, tuple) else (each,))]
            names |= {part for part in parts if isinstance(part, str)}
            codes += parts
    return names


def _unwrapped(function: Any) -> Any:
    """The function behind decorators, properties and methods."""
    for name in ("__func__", "fget", "func"):
        function = getattr(function, name, None) or function
    return inspect.unwrap(function)
