"""One call of `generate` as a test makes it: why it runs as ever, and how it is run once more. Knows no mode."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import GenerationMixin

if TYPE_CHECKING:
    from collections.abc import Callable

    from hf_paged_cache import PagedPrefixCache

_DECODING = ("_sample", "_beam_search", "_assisted_decoding")
CACHE_ARGUMENTS = ("past_key_values", "cache_params")
_CROSS_ARGUMENTS = ("encoder_hidden_states", "encoder_outputs", "cross_attention_states")


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments of one call.

    Attributes:
        original: `generate` as it was, bound to the model.
    """

    model: Any
    original: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def option(self, name: str) -> Any:
        """An option's value where transformers looks for it: keyword, the config given, the model's own."""
        if self.kwargs.get(name) is not None:
            return self.kwargs[name]
        given = self.args[1] if len(self.args) > 1 else self.kwargs.get("generation_config")
        configs = (given, getattr(self.model, "generation_config", None))
        return next((value for config in configs if (value := getattr(config, name, None)) is not None), None)

    @property
    def cache(self) -> Any:
        """The cache that the call brings, if any."""
        return next((self.kwargs[name] for name in CACHE_ARGUMENTS if self.kwargs.get(name) is not None), None)

    def why_as_ever(self, *, is_run_twice: bool) -> str | None:
        """Why no cache of ours may take part; None if one may."""
        if self.cache is not None:
            return "it brings a cache"
        if self.option("cache_implementation") not in (None, "hybrid"):
            return "it asks for a cache_implementation"
        if self.option("use_cache") is False:
            return "use_cache is False"
        if self.option("is_assistant"):
            return "it drafts for another call"
        if self.kwargs.get("custom_generate") is not None:
            return "custom_generate is another function"
        if "generate" in vars(type(self.model)) or type(self.model).generate.__qualname__ != "GenerationMixin.generate":
            return "the model has a generate of its own"
        text_config = self.model.config.get_text_config(decoder=True)
        crosses = (
            *_CROSS_ARGUMENTS,
            *(("pixel_values",) if getattr(text_config, "cross_attention_layers", None) else ()),
        )
        if any(self.kwargs.get(name) is not None for name in crosses):
            return "keys and values of a cross attention are no tokens'"
        if is_run_twice and self.kwargs.get("streamer") is not None:
            return "a streamer would be fed twice"
        return None

    @property
    def has_usual_result(self) -> bool:
        """Whether a call that asks for no `ModelOutput` gets the sequences of the one that it would get."""
        own = (getattr(type(self.model), name, None) for name in _DECODING)
        return all(method is getattr(GenerationMixin, name, None) for method, name in zip(own, _DECODING, strict=True))

    def run(self, **more: Any) -> Any:
        """As ever, on the cache that it brings, or on transformers' own."""
        return self.original(*self.args, **{**self._without_cache(), **more})

    def run_on(self, cache: PagedPrefixCache, **more: Any) -> Any:
        """The same on a cache of ours, by the way that a user goes."""
        return self.model.generate(*self.args, **{**self._without_cache(), **more}, past_key_values=cache)

    def _without_cache(self) -> dict[str, Any]:
        return {name: value for name, value in self.kwargs.items() if name not in CACHE_ARGUMENTS}


class Repeatable:
    """What a call leaves changed besides its cache: random numbers, and how many tokens an assistant drafts.

    Args:
        call: not begun yet.
    """

    def __init__(self, call: Call) -> None:
        self._random = torch.get_rng_state(), random.getstate(), np.random.get_state()
        assistant = call.kwargs.get("assistant_model")
        self._assistant = assistant
        self._config = copy.deepcopy(getattr(assistant, "generation_config", None))

    def put_back(self) -> None:
        """As it was when this was made."""
        numbers, python, numpy = self._random
        torch.set_rng_state(numbers)
        random.setstate(python)
        np.random.set_state(numpy)
        if self._config is not None:
            self._assistant.generation_config = copy.deepcopy(self._config)
