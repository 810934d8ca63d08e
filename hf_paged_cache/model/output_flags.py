"""Whether a model computes the same keys and values while it is asked for hidden states, attentions or router logits.

Most models only collect what they compute anyway. Falcon takes another path through attention, on which a token sees those
after it. Decided by the model's code, and where that reads a flag by a trial, never by a list of names.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .probing import NUM_CACHED, NUM_COLUMNS, attempt, dynamic_cache, first_row, run_columns, trial_inputs, undisturbed
from .support import keys_of, names_of, parents_of, sources_of, states_of, unwrapped_function

OUTPUT_FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")


class OutputFlags:
    """What the output flags mean to one model, learned when one is asked for."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._classes: set[type] = set()  # of the model's modules
        self._are_read: set[str] | None = None  # None: their code has yet to be read
        self._tried: dict[str, tuple[object, bool]] = {}  # flag -> settings, and whether it changes anything under them

    def follow(self, modules: Sequence[nn.Module]) -> None:
        """These are the model's modules now. What was tried holds as long as their classes are the same."""
        classes = set(map(type, modules))
        if classes != self._classes:
            self._classes, self._are_read = classes, None
            self._tried.clear()

    def is_read(self, name: str) -> bool:
        """Whether any code of the model reads the flag.  Cost: the first time, a pass over that code."""
        if self._are_read is None:
            self._are_read = {*OUTPUT_FLAGS} & _names_in_code(self._classes, self._model.config)
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
        self._tried[name] = (settings, not _is_same_with(self._model, name))
        return self._tried[name][1]


def outputs_of(configs: Iterable[Any]) -> list[str]:
    """The outputs that a model's configs ask for in all calls."""
    asked = {name for config in configs for name in OUTPUT_FLAGS if getattr(config, name, None)}
    return sorted(asked)


def _is_same_with(model: PreTrainedModel, name: str) -> bool:
    """Whether all that a cache holds is equal, bit by bit, with a flag and without: of two rows, one of them padded, and of the
    other alone, with a mask and without. False where it cannot be told.
    """
    padded = trial_inputs(model)
    alone = first_row(padded)
    unmasked = {key: value for key, value in alone.items() if key != "attention_mask"}
    was_run = False
    with undisturbed(model):
        for inputs, stops in (
            (padded, (NUM_CACHED, NUM_COLUMNS)),
            (alone, (NUM_CACHED, NUM_CACHED + 1, NUM_COLUMNS)),
            (unmasked, (NUM_CACHED, NUM_CACHED + 1, NUM_COLUMNS)),
        ):
            caches = {flag: dynamic_cache(model) for flag in (False, True)}
            for span in pairwise((0, *stops)):
                is_same = attempt(partial(_is_same_in, model, name, inputs, caches, span), lambda _: None)
                if is_same is None:  # with the flag, any call would raise the error
                    break
                if not is_same:
                    return False
                was_run = True
    return was_run


def _is_same_in(
    model: PreTrainedModel,
    name: str,
    inputs: dict[str, Tensor],
    caches: dict[bool, DynamicCache],
    span: tuple[int, int],
) -> bool:
    held = []
    for flag, cache in caches.items():
        run_columns(model, inputs, cache, *span, **{name: flag})
        held.append([tensor for layer in cache.layers for tensor in (*keys_of(layer), *states_of(layer))])
    return len(held[0]) == len(held[1]) and all(
        one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        for one, other in zip(*held, strict=True)
    )


def _names_in_code(classes: Iterable[type], config: Any) -> set[str]:
    """All names and strings in the code of the classes, of the source files that define them, and of the attention function in use."""
    functions: list[Any] = []
    attention = ALL_ATTENTION_FUNCTIONS.get(getattr(config, "_attn_implementation", None))
    if attention is not None and _is_of_models(unwrapped_function(attention).__module__):
        functions.append(attention)
    parents = {parent for parent in parents_of(classes) if _is_of_models(parent.__module__)}
    for source in sources_of(parents):
        own = [thing for thing in vars(source).values() if getattr(thing, "__module__", None) == source.__name__]
        parents |= {thing for thing in own if isinstance(thing, type)}
        functions += own
    for parent in parents:
        functions += vars(parent).values()
    return set().union(*map(names_of, functions))


def _is_of_models(source: str) -> bool:
    """Whether a source file is a model's. What transformers has for all of them hands flags on, or warns that a kernel gives no attentions."""
    return source.startswith("transformers.models.") or not source.startswith(("torch.", "transformers."))
