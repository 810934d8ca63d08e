"""Reads from the arguments of `generate` what a cache must know of the call before it starts. Changes nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from ..model.fingerprint import OUTPUT_FLAGS
from ..rows.request import UNLIMITED, CallLimits
from .forward_arguments import CROSS_INPUTS, cross_inputs

_UNSET_IMPLEMENTATION = "hybrid"  # a value of older generation configs; transformers reads it as none
_OPTIONS = (
    *("cache_implementation", "use_cache", "is_assistant"),
    *("max_new_tokens", "max_length", "num_beams", "num_return_sequences", "eos_token_id", "prompt_lookup_num_tokens"),
    *("prefill_chunk_size", "pad_token_id", "assistant_early_exit", "use_mtp", *OUTPUT_FLAGS),
)
_OF_DRAFTS = ("prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp")
_PLAIN = {type(None), bool, int, float, str, Tensor, GenerationConfig}  # an argument of another type may bring code
_DEFAULT_NEW_TOKENS = 20  # transformers' own, where neither max_length nor max_new_tokens is set


@dataclass(frozen=True, slots=True)
class GenerateArguments:
    """`GenerateArguments` says what is known of one call of `generate` before it starts."""

    limits: CallLimits = UNLIMITED
    num_masked: int = 0  # columns of the mask
    num_given: int = 0  # columns of the prompt
    only_new_tokens: bool = False  # the mask has more columns than the prompt, so the rows resume with these tokens
    cache_implementation: str | None = None
    why_no_cache: str = ""  # what was given under which the call can use no cache of ours, in words; "": nothing
    is_assistant: bool = False  # the call drafts for another model's `generate`
    is_own: bool = False  # the function that is called is not transformers' own `generate`
    is_custom: bool = False  # that function, or a `custom_generate`, runs the forwards
    synced_gpus: bool = False  # the call was told that several processes run equally many forwards
    chunk_size: int | None = None  # columns of each forward in which the prompt is computed; None: all in one forward
    has_beams: bool = False
    num_logits: int = 1  # last columns of the prompt whose logits are asked for
    pad_token_id: Any = None  # where no mask is passed, a prompt without this id has no padding
    calls_back: bool = True  # code of the caller's may run between forwards
    verifies_drafts: bool = False  # then transformers runs the whole prompt in one forward, whatever `chunk_size` is
    outputs: Mapping[str, bool] = field(default_factory=dict)  # outputs that are asked for beside logits, by flag
    passed: Mapping[str, Any] = field(default_factory=dict)  # all arguments by name, the ids among them as "input_ids"


def read_generate(
    model: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_replaced: bool = False
) -> GenerateArguments:
    """Read the arguments of `generate(inputs=None, generation_config=None, ..., **kwargs)`.

    `is_replaced` says that another function stands in its place.
    """
    is_own = is_replaced or type(model).generate is not GenerationMixin.generate
    config, own = args[1] if len(args) > 1 else kwargs.get("generation_config"), model.generation_config
    options = {}
    for name in _OPTIONS:  # looked up as transformers does: keyword, given generation config, model's own
        options[name] = getattr(config, name, None)
        if options[name] is None:
            options[name] = getattr(own, name, None)
        if name in kwargs and (kwargs[name] is not None or name != "use_cache"):
            options[name] = kwargs[name]  # None, too, takes the place of what a config has
    implementation, why_no_cache = options["cache_implementation"], ""
    if options["use_cache"] is False:
        why_no_cache = "use_cache=False:"
    for name in CROSS_INPUTS:
        if not why_no_cache and kwargs.get(name) is not None and name in cross_inputs(model):
            why_no_cache = f"{name}: cross attention keeps keys and values that are no tokens';"
    ids = args[0] if args else kwargs.get("inputs")
    ids = kwargs.get("input_ids") if ids is None else ids
    mask, limits, num_masked, num_given = kwargs.get("attention_mask"), UNLIMITED, 0, 0
    for prompt, num_dims in ((kwargs.get("inputs_embeds"), 3), (ids, 2)):
        if isinstance(prompt, Tensor) and prompt.dim() == num_dims:
            num_given = prompt.shape[1]
            num_masked = mask.shape[1] if isinstance(mask, Tensor) and mask.dim() == 2 else 0
            limits = _limits(options, prompt.shape[0], num_given, max(num_given, num_masked))
            break
    return GenerateArguments(
        limits=limits,
        num_masked=num_masked,
        num_given=num_given,
        only_new_tokens=num_masked > num_given,
        cache_implementation=None if implementation == _UNSET_IMPLEMENTATION else implementation,
        why_no_cache=why_no_cache,
        is_assistant=bool(options["is_assistant"]),
        is_own=is_own,
        is_custom=is_own or kwargs.get("custom_generate") is not None,
        synced_gpus=bool(args[5] if len(args) > 5 else kwargs.get("synced_gpus")),
        chunk_size=options["prefill_chunk_size"],
        has_beams=(options["num_beams"] or 1) > 1,
        pad_token_id=options["pad_token_id"],
        calls_back=not {*map(type, (*args, *kwargs.values(), own))} <= _PLAIN,
        verifies_drafts=kwargs.get("assistant_model") is not None or any(map(options.get, _OF_DRAFTS)),
        outputs=dict.fromkeys(filter(options.get, OUTPUT_FLAGS), True),
        passed={**kwargs, "input_ids": ids},
    )


def has_own_generate(model: Any) -> bool:
    """Return whether the `generate` of a model's class is another than transformers' own."""
    return type(model).generate is not GenerationMixin.generate


def _limits(options: Mapping[str, Any], num_rows: int, num_passed: int, num_columns: int) -> CallLimits:
    """Return how far a call can go whose prompt has `num_columns` columns, of which `num_passed` are passed."""
    max_new_tokens, max_length = options["max_new_tokens"], options["max_length"]
    if max_new_tokens is not None:
        max_length = num_columns + max_new_tokens
    elif max_length is None:
        max_length = num_columns + _DEFAULT_NEW_TOKENS
    else:
        max_length += num_columns - num_passed  # transformers counts what is passed
    ends = options["eos_token_id"]
    if isinstance(ends, Tensor):
        ends = ends.flatten().tolist()
    elif not isinstance(ends, list | tuple | set | frozenset):
        ends = [] if ends is None else [int(ends)]
    # The model never runs the last token. A draft looked up in the prompt may start up to two tokens before it.
    num_looked_up = options["prompt_lookup_num_tokens"] or 0
    return CallLimits(
        num_prompt_columns=num_columns,
        max_columns=max(num_columns, max_length - 1, max_length - 2 + num_looked_up),
        num_rows=num_rows * max(options["num_beams"] or 1, options["num_return_sequences"] or 1),
        end_of_sequence=frozenset(ends),
    )
