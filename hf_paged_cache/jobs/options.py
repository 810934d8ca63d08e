"""Owns what a job may be told: its own options, its cache's, those of `generate`, and which of these see padding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from os import PathLike
from typing import TYPE_CHECKING, Any

from ..blocks.arguments import int_of_at_least
from ..errors import CacheArgumentError
from ..store_options import StoreOptions, given_sizes, store_options
from ..wording import brief

if TYPE_CHECKING:
    from transformers import GenerationConfig

_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
# Settings that a model may have saved and that the job replaces, so that completions come as token ids from its own
# cache, on any machine the same.
REPLACED = {**dict.fromkeys(_OUTPUTS, False), "use_cache": True, "cache_implementation": None, "max_time": None}
_REFUSED = {  # option -> why a job does not take it
    "max_length": "it counts a row's padding, too; give max_new_tokens",
    "min_length": "it counts a row's padding, too; give min_new_tokens",
    "cache_salt": "give cache=PagedPrefixCache(model, cache_salt=...)",
    **dict.fromkeys((*REPLACED, "cache_config", "continuous_batching_config"), "the job sets it itself"),
}
FLAGS = ("do_sample", "renormalize_logits", "remove_invalid_values", "token_healing", "disable_compile")
# Options that read no tokens before the next one, or only which tokens there are, not where. With any other one only
# prompts of one length share a batch.
_SEE_NO_PADDING = {
    *("max_new_tokens", "min_new_tokens", "max_length", "do_sample", "num_beams", "num_return_sequences"),
    *("early_stopping", "length_penalty", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty"),
    *("renormalize_logits", "remove_invalid_values", "suppress_tokens", "begin_suppress_tokens"),
    *("exponential_decay_length_penalty", "bos_token_id", "eos_token_id", "pad_token_id", "disable_compile"),
    "stop_strings",  # unless a prompt is shorter
    *REPLACED,
}


@dataclass(frozen=True)
class How:
    """`How` holds the options of a job, and refuses bad ones as far as that shows without a model; see `generate_all`.

    `model` holds facts by which the model is known again, and `options` those of the job's store, and of `generate`.
    """

    model: dict[str, Any]
    out: str | PathLike[str] | None = None
    column: str = "prompt"
    batch_size: int | None = None
    max_new_tokens: int = 128
    seed: int = 0
    overwrite: bool = False
    progress: bool | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch_size is not None:
            int_of_at_least("batch_size", self.batch_size, 1, "prompts of a batch, or None")
        int_of_at_least("max_new_tokens", self.max_new_tokens, 1, "tokens")
        int_of_at_least("seed", self.seed, 0, "as a seed")
        for name, value in {"overwrite": self.overwrite, "progress": self.progress, **self.options}.items():
            if name in ("overwrite", "progress", *FLAGS) and not isinstance(value, bool | None):
                raise CacheArgumentError(f"{name} is {value!r}; give True or False")
            if name.endswith("_config") and isinstance(value, str | int | float | list):
                raise CacheArgumentError(f'{name} is {value!r}; give its settings by name, such as {{"bias": 2.5}}')
        store_options(**self.of_cache)

    @property
    def of_cache(self) -> Any:
        """Options of a new cache, as far as they are given."""
        sizes: Any = {name: size for name, size in self.options.items() if name in StoreOptions._fields}
        return given_sizes(sizes)

    @property
    def generation(self) -> dict[str, Any]:
        """Options of `generate`."""
        others = {name: value for name, value in self.options.items() if name not in StoreOptions._fields}
        return {"max_new_tokens": self.max_new_tokens, **others}


def require_names(options: Iterable[str]) -> None:
    """Refuse options of `generate` that do not exist, or that a batch job does not take, whatever the model."""
    known = _known_names()
    for name in options:
        if name in _REFUSED:
            raise CacheArgumentError(f"{name} is not an option here: {_REFUSED[name]}")
        if name not in known:
            names = {*known, *How.__dataclass_fields__, *StoreOptions._fields} - {name, *_REFUSED}
            close = get_close_matches(name, names, 1)
            meant = f"did you mean {close[0]}?" if close else "see transformers' GenerationConfig"
            raise CacheArgumentError(f"{name} is no option of generate that a job takes; {meant}")


def generation_config(model: Any, options: Mapping[str, Any]) -> GenerationConfig:
    """Return the generation config that `model.generate(**options)` uses; refuse names and values that do not fit."""
    from transformers import GenerationConfig

    require_names(options)
    for name in ("num_beams", "num_return_sequences"):
        if options.get(name) is not None:
            int_of_at_least(name, options[name], 1, "of each prompt")
    try:
        config = GenerationConfig.from_dict({**model.generation_config.to_dict(), **options, **REPLACED})
        config.validate()
    except (ValueError, TypeError, AttributeError) as error:
        raise refusal(options, error) from error
    return config


def refusal(options: Mapping[str, Any], error: Exception) -> CacheArgumentError:
    """Return the error to raise where `generate` refuses options by an error of its own."""
    given = ", ".join(f"{name}={value!r}" for name, value in options.items() if name != "max_new_tokens")
    return CacheArgumentError(f"generate cannot run with {given or 'its options'} ({brief(error)})")


def may_pad(config: GenerationConfig, shortest_prompt: int) -> bool:
    """Return whether no option would read padding; the shortest prompt has so many tokens.

    Examples:
        >>> from transformers import GenerationConfig
        >>> may_pad(GenerationConfig(top_k=5), 1), may_pad(GenerationConfig(no_repeat_ngram_size=2), 99)
        (True, False)
    """
    given = {name for name, value in config.to_diff_dict().items() if value}
    stop = config.stop_strings or ()
    longest_stop = max(map(len, [stop] if isinstance(stop, str) else stop), default=0)  # a token is at least a letter
    seeing = given & (_known_names() - _SEE_NO_PADDING)  # any other name is a model's own
    return not seeing and shortest_prompt >= longest_stop


def _known_names() -> set[str]:
    from transformers import GenerationConfig

    names = set(GenerationConfig().to_dict())  # type: ignore[no-untyped-call]
    return names - {"transformers_version", "_from_model_config"}
