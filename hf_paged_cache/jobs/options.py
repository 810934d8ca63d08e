"""What a batch job may be told: options of its own, those of its cache, and those of `generate`; and which of these see padding.

Owns no call of `generate`. Attention never sees padding; an option that reads tokens does, so rows that it would read padding of
are not padded: they run with rows of their own length.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from inspect import signature
from os import PathLike, fspath
from typing import Any, Literal

from transformers import GenerationConfig, GenerationMixin

from ..blocks.arguments import int_of_at_least
from ..cache import PagedPrefixCache
from ..errors import CacheArgumentError
from ..store_options import StoreOptions, given_sizes, require_not_gone, store_options
from .journal import ORDERS

ALL = sys.maxsize  # tokens before the next one that an option reads: every one

_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states")
# Options that would make a row's result depend on its batch or on the clock, or another thing than tokens; each with its reason.
REFUSED = {
    "max_length": "it counts a row's padding, too; give max_new_tokens",
    "min_length": "it counts a row's padding, too; give min_new_tokens",
    "max_time": "a completion would depend on how fast the machine is; give max_new_tokens",
    **dict.fromkeys(("use_cache", "cache_implementation", "cache_config"), "the job runs on a cache of its own"),
    "continuous_batching_config": "it is of another way to generate, generate_batch",
    **dict.fromkeys(_OUTPUTS, "the job keeps completions alone"),
}
# Settings that a model may have saved and that the job replaces, so that completions come as token ids from its own cache.
REPLACED = {**dict.fromkeys(_OUTPUTS, False), "use_cache": True, "cache_implementation": None, "max_time": None}
NO_OPTIONS = ("transformers_version", "_from_model_config")  # what a generation config holds besides
# Options that read no tokens before the next one, or only which ones there are.
_SEE_NO_PADDING = {
    *("max_new_tokens", "min_new_tokens", "max_length", "do_sample", "num_beams", "num_return_sequences"),
    *("early_stopping", "length_penalty", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff", "repetition_penalty", "encoder_repetition_penalty"),
    *("renormalize_logits", "remove_invalid_values"),
    *("suppress_tokens", "begin_suppress_tokens", "exponential_decay_length_penalty"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "disable_compile"),
    # of drafts, which another option turns on
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind"),
    *("stop_strings", "bad_words_ids", "sequence_bias"),  # these have a length
    *REPLACED,
}
_OFF = {"num_beam_groups": 1, "guidance_scale": 1.0}  # values that change nothing, besides those that are false
_WHOLE_NUMBERS = {  # name -> the least
    **dict.fromkeys(("num_beams", "num_return_sequences", "num_beam_groups", "prompt_lookup_num_tokens"), 1),
    **dict.fromkeys(("min_new_tokens", "top_k", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
}
_FLAGS = (
    *("do_sample", "renormalize_logits", "remove_invalid_values", "token_healing", "disable_compile", "is_assistant"),
    *("use_mtp", "low_memory"),
)
_NUMBERS = (
    *("temperature", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty"),
    *("encoder_repetition_penalty", "length_penalty", "diversity_penalty", "guidance_scale", "penalty_alpha"),
)
NEED_A_VALUE = {*_WHOLE_NUMBERS, *_NUMBERS}
_OF_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "forced_bos_token_id", "forced_eos_token_id")


@dataclass(frozen=True, kw_only=True)
class How:
    """The options of a job; see `generate_all`.

    Attributes:
        options: of the job's store, and of `generate`, by name.

    Raises:
        CacheArgumentError: naming the first that is of another type, or out of its range, as far as that goes without a model.
    """

    out: "str | PathLike[str] | None" = None
    column: str = "prompt"
    image_column: str | None = None
    order: Literal["given", "done"] = "given"
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
        for name, value in (("overwrite", self.overwrite), ("progress", self.progress)):
            if not isinstance(value, bool) and (value is not None or name == "overwrite"):
                raise CacheArgumentError(f"{name} is {value!r}; give True or False")
        if not isinstance(self.column, str):
            raise CacheArgumentError(f"column is {self.column!r}; give the name of a column")
        if not isinstance(self.image_column, str | None):
            raise CacheArgumentError(f"image_column is {self.image_column!r}; give the name of a column, or None")
        if not isinstance(self.out, str | PathLike | None) or "\0" in fspath(self.out or "") or self.out == "":
            raise CacheArgumentError(f"out is {self.out!r}; give a file's path")
        if self.order not in ORDERS:
            raise CacheArgumentError(f"order is {self.order!r}; give {' or '.join(map(repr, ORDERS))}")
        require_not_gone(self.options)
        store_options(**self._sizes)

    @property
    def _sizes(self) -> Any:
        return {name: size for name, size in self.options.items() if name in StoreOptions._fields}

    @property
    def of_cache(self) -> dict[str, Any]:
        """Of a new cache, those that are given."""
        return given_sizes(self._sizes)

    @property
    def generation(self) -> dict[str, Any]:
        """Of `generate`."""
        others = {name: value for name, value in self.options.items() if name not in StoreOptions._fields}
        return {"max_new_tokens": self.max_new_tokens, **others}


def require_names(options: Iterable[str]) -> None:
    """Refuse options that a batch job does not take, whatever the model.

    Raises:
        CacheArgumentError: a name that is no generation option, or one that a batch job refuses.
    """
    known = _known_names()
    for name in options:
        if name in REFUSED:
            raise CacheArgumentError(f"{name} is not an option here: {REFUSED[name]}")
        if name not in known:
            raise CacheArgumentError(f"{name} is no option of generate{_instead(name)}")


def _instead(name: str) -> str:
    if name in signature(PagedPrefixCache).parameters:
        return f"; give cache=PagedPrefixCache(model, {name}=...)"
    if name in signature(GenerationMixin.generate).parameters:
        return " that a batch job takes: it takes those by name that transformers' GenerationConfig has"
    close = get_close_matches(name, [*_known_names(), *How.__dataclass_fields__], 1)
    return f"; did you mean {close[0]}?" if close else "; see transformers' GenerationConfig for all of them"


def generation_config(model: Any, options: Mapping[str, Any]) -> GenerationConfig:
    """What `model.generate(**options)` would go by.

    Raises:
        CacheArgumentError: see `require_names`; or values that do not fit.
    """
    require_names(options)
    for name in options:
        _require_kind(name, options[name])
    try:
        config = GenerationConfig.from_dict({**model.generation_config.to_dict(), **options, **REPLACED})
        config.validate()
    except (ValueError, TypeError, AttributeError) as error:
        raise CacheArgumentError(f"generate cannot run so: {error}") from error
    stop = config.stop_strings
    texts = stop if isinstance(stop, list | tuple) else [stop]
    if stop is not None and not (texts and all(isinstance(each, str) and each for each in texts)):
        raise CacheArgumentError(f"stop_strings is {stop!r}; give a text, or a list of texts")
    num_tokens = model.config.get_text_config(decoder=True).vocab_size
    for name in _OF_TOKENS:
        _require_tokens(name, getattr(config, name, None), num_tokens)
    return config


def _require_kind(name: str, value: Any) -> None:
    if name in _FLAGS and not isinstance(value, bool | None):
        raise CacheArgumentError(f"{name} is {value!r}; give True or False")
    if name in _WHOLE_NUMBERS and value is not None:
        int_of_at_least(name, value, _WHOLE_NUMBERS[name], "of generate")
    if name in _NUMBERS and value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise CacheArgumentError(f"{name} is {value!r}; give a number")


def _require_tokens(name: str, value: Any, num_tokens: int) -> None:
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each < num_tokens for each in ids):
        raise CacheArgumentError(f"{name} is {value!r}; give a token id of 0 to {num_tokens - 1}, or a list of them")


def tokens_seen(config: GenerationConfig) -> int:
    """The most tokens before the next one that an option reads: a prompt of as many may be padded; `ALL`: none may.

    Examples:
        >>> from transformers import GenerationConfig, GenerationMixin
        >>> tokens_seen(GenerationConfig(top_k=5)), tokens_seen(GenerationConfig(stop_strings=["\\n\\n", "end"]))
        (0, 3)
        >>> tokens_seen(GenerationConfig.from_model_config(model.config))
        0
        >>> tokens_seen(GenerationConfig(no_repeat_ngram_size=2)) == ALL
        True
    """
    known = _known_names()
    given = {
        name: value
        for name, value in config.to_diff_dict().items()
        if value and name in known and value != _OFF.get(name)  # any other name is a model's own
    }
    if given.keys() - _SEE_NO_PADDING:
        return ALL
    stop, bias = given.get("stop_strings") or [], given.get("sequence_bias") or []
    sequences: list[Iterable[Any]] = [
        *([stop] if isinstance(stop, str) else stop),  # a token is at least a letter
        *(given.get("bad_words_ids") or []),
        *(bias if isinstance(bias, dict) else [tokens for tokens, _ in bias]),
    ]
    return max((len([*each]) for each in sequences), default=0)


def _known_names() -> set[str]:
    return set(GenerationConfig().to_dict()) - {*NO_OPTIONS}  # type: ignore[no-untyped-call]
