"""Decides which models are supported, and says why others are not: by structure, never by a list of names."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from math import inf, lcm
from typing import Any, NamedTuple

import transformers
from torch import nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..wording import brief
from .layers import HELD_LAYERS, cache_layers, has_index, has_state, holds_nothing, own_cache_class, windows_of

# The version of transformers whose model types all ran in tests/conformance; results.json has the results.
TESTED_VERSION = "5.23.0"
_OWN_ATTENTION = frozenset(
    ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
)
_WHICH_ADAPTERS = "only adapters that change layers, such as LoRA, are supported"
EVERY_PAD = 1 << 62  # more columns of padding than there are


def unwrapped(model: Any) -> Any:
    """Return the module whose `__call__` `generate` runs: the one inside `torch.compile`, and inside a PEFT model.

    It refuses an adapter that does more than change layers.
    """
    while isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
        model = compiled  # calls and `generate` of the wrapper are those of the module inside
    if isinstance(model, PreTrainedModel) or not hasattr(model, "get_base_model"):
        return model
    for name, config in getattr(model, "peft_config", {}).items():
        _require_adapts_layers(name, config)
    inside = model.get_base_model()
    require_layer_adapters(inside)
    return inside


def require_layer_adapters(model: Any) -> None:
    """Refuse, by name, a PEFT adapter that does more than change layers, such as prompt learning."""
    for hook in model._forward_pre_hooks.values():
        if (getattr(hook, "__module__", None) or "").startswith("peft."):
            kind = type(getattr(hook, "__self__", hook)).__name__
            raise UnsupportedModelError(
                f"PEFT's {kind} runs something of its own before every forward of the model; {_WHICH_ADAPTERS}"
            )
    preparing = model.__dict__.get("prepare_inputs_for_generation")  # prompt learning puts its own function there
    wrapper = getattr(preparing, "__self__", None)
    if wrapper is not None and hasattr(wrapper, "active_peft_config"):
        _require_adapts_layers(wrapper.active_adapter, wrapper.active_peft_config)


def _require_adapts_layers(name: str, config: Any) -> None:
    if getattr(config, "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"adapter {name!r} is prompt learning ({type(config).__name__}), which puts keys and values of its own "
            f"before every prompt; {_WHICH_ADAPTERS}"
        )


def require_supported(model: object) -> None:
    """Refuse a model that needs another cache than keys, values and states of earlier tokens, and say why."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"expected a transformers model with generate(), got {_what_was_given(model)}")
    if why := _why_forwards_are_unfit(model):
        raise UnsupportedModelError(f"{type(model).__name__}{why}")
    try:
        layers = cache_layers(model)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__}: transformers cannot make a DynamicCache of its config ({brief(error)})"
        ) from error
    if why := _why_layers_are_unfit(model, layers):
        raise UnsupportedModelError(f"{type(model).__name__}{why}")


def _why_forwards_are_unfit(model: PreTrainedModel) -> str:
    """Say, behind the name of a model's class, why its forwards cannot resume from a prefix; "" if they may."""
    if getattr(model.config, "is_encoder_decoder", False):
        return " is an encoder-decoder model; only decoders that generate alone are supported"
    if not model.can_generate():
        return " cannot generate; pass the model with a language-modeling head"
    if not takes(model, cache_argument(type(model))):
        return ".forward takes no past_key_values, so it cannot use a cache of keys and values"
    takes_dynamic_cache = getattr(type(model), "_supports_default_dynamic_cache", None)
    if takes_dynamic_cache is not None and not takes_dynamic_cache() and own_cache_class(model) is None:
        return " brings a cache class of its own; transformers gives it no DynamicCache"
    if is_no_decoder(model) and any(getattr(module, "is_causal", None) is False for module in model.modules()):
        return (
            " attends in both directions (config.is_decoder is False), so the keys and values of a prefix "
            "depend on what follows it; load it with is_decoder=True if it is to generate"
        )
    return ""


def _why_layers_are_unfit(model: PreTrainedModel, layers: Sequence[Any]) -> str:
    """Say, behind the name of a model's class, why its cache's layers cannot be held; "" if they may."""
    for index, layer in enumerate(layers):
        if type(layer) not in HELD_LAYERS and not holds_nothing(layer):
            return (
                f": layer {index} is a {type(layer).__name__}, which carries more than keys, values and states; use "
                "transformers' DynamicCache for this model"
            )
    kinds: set[Any] = {type(module) for module in model.modules()} if any(map(has_index, layers)) else set()
    # an index that takes its sizes from its layer, not from what `update_indexer` returns
    readers = [kind for kind in kinds if {"update_indexer", "layers", "keys"} <= _names_of(kind.forward)]
    if readers:
        return (
            f": {readers[0].__name__} looks at what its layer of the cache holds in the middle of a forward, where a "
            "layer here does not count the forward's own tokens yet; use transformers' DynamicCache for this model"
        )
    windows = [window.size for window in windows_of(layers).values()]
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    is_reached = windows and (not isinstance(longest, int) or min(windows) < longest)
    if is_reached and not _mask_knows_windows(model):
        return (
            " has layers with a sliding window in its cache, but a mask that knows none: past the window "
            "DynamicCache and the model's own forward without a cache disagree, so there is no result to keep"
        )
    return ""


def _what_was_given(thing: object) -> str:
    """Say what was passed in place of a model, and what to pass."""
    if isinstance(thing, type):
        return f"the class {thing.__name__}: pass a model, an instance of it"
    if isinstance(thing, str):
        return f"the string {thing!r}: load it first, with AutoModelForCausalLM.from_pretrained"
    if hasattr(thing, "store"):
        return f"a {type(thing).__name__}: pass its store, for a sibling cache on the same blocks"
    if hasattr(thing, "encode") and hasattr(thing, "decode"):
        return f"a tokenizer, {type(thing).__name__}: pass the model"
    return f"an object of type {type(thing).__name__}; for a wrapped model pass the PreTrainedModel inside"


def other_version() -> str:
    """Return what an error adds where the tested transformers may do what the installed one does not; else ""."""
    installed = transformers.__version__
    if installed == TESTED_VERSION:
        return ""
    return (
        f"; transformers {installed} is installed, and {TESTED_VERSION}, with which all types were tried, "
        "may do it right"
    )


def leaves_doubt(model: PreTrainedModel) -> bool:
    """Return whether only a trial can show that a model gives the same logits with a cache as without."""
    config = model.config.get_text_config(decoder=True)
    names = [*vars(model.config), *vars(config)]
    names_images = any("token" in name and ("image" in name or "img" in name or "vision" in name) for name in names)
    layers = [module for module in model.modules() if hasattr(module, "layer_idx")]
    return (
        not takes(model, "position_ids")
        or is_no_decoder(model)
        or (takes(model, "pixel_values") and not names_images)  # images may become columns that have no token
        or has_experts(model)  # a router may look at later tokens
        or is_foreign(attention_of(model))
        or any(getattr(layer, "is_causal", None) is False for layer in layers)
        or len({(type(layer), layer.layer_idx) for layer in layers}) < len(layers)  # stacks may share one cache
        or any(map(has_state, cache_layers(model)))  # a scan may start from zeros, whatever the state
    )


def attention_of(model: PreTrainedModel) -> str | None:
    """Return the name of the attention of transformers that the model's decoder is set to."""
    name: str | None = getattr(model.config.get_text_config(decoder=True), "_attn_implementation", None)
    return name


def is_foreign(attention: str | None) -> bool:
    """Return whether an attention is not transformers' own: without a mask it sees other tokens after known ones."""
    return attention is not None and attention not in _OWN_ATTENTION


def has_experts(model: PreTrainedModel) -> bool:
    """Return whether tokens are routed to experts: all tokens of a forward decide which are computed together."""
    settings = vars(model.config.get_text_config(decoder=True)).items()
    numbers = [value for name, value in settings if "num" in name and "experts" in name]
    return any(isinstance(number, int) and number > 1 for number in numbers)


def numbers_columns(model: PreTrainedModel) -> bool:
    """Return whether a forward without `position_ids` is seen to number columns, those in the cache included.

    It is where the code of a module that takes positions asks the cache for its length and numbers from there. Others
    may number their columns alone, tokens, or from an earlier end.
    """
    if any(hasattr(module, "rope_deltas") for module in model.modules()):
        return False
    kinds: set[Any] = {type(module) for module in model.modules()}
    return any(
        {"arange", "get_seq_length"} <= _names_of(kind.forward)
        and "position_ids" in inspect.signature(kind.forward).parameters
        for kind in kinds
    )


def _cache_argument(kind: Any) -> str:
    """Return the name under which a class's forward takes a cache: "cache_params", or as most "past_key_values"."""
    names = inspect.signature(kind.forward).parameters
    return "cache_params" if "cache_params" in names and "past_key_values" not in names else "past_key_values"


cache_argument: Callable[[Any], str] = lru_cache(maxsize=256)(_cache_argument)


def takes(model: PreTrainedModel, argument: str) -> bool:
    """Return whether the model's forward has an argument of that name."""
    return argument in inspect.signature(model.forward).parameters


def is_no_decoder(model: PreTrainedModel) -> bool:
    """Return whether the config says that the model is no decoder, as models of BERT's kind are loaded."""
    return getattr(model.config.get_text_config(decoder=True), "is_decoder", None) is False


def _mask_knows_windows(model: PreTrainedModel) -> bool:
    """Return whether a source file of the model imports or defines a function that makes masks with windows."""
    kinds = {
        parent for kind in {*map(type, model.modules())} for parent in kind.__mro__ if issubclass(parent, nn.Module)
    }
    sources = {kind.__module__ for kind in kinds if not kind.__module__.startswith("torch.")} & sys.modules.keys()
    names = [name for source in sources for name in vars(sys.modules[source])]
    return any("mask" in name and ("sliding" in name or "chunked" in name or "for_generate" in name) for name in names)


def _names_of(function: Any) -> set[str]:
    """Return the names that the code of a function has of what it calls and reads."""
    return {*getattr(getattr(inspect.unwrap(function), "__code__", None), "co_names", ())}


class StateTraits(NamedTuple):
    """`StateTraits` says what is to be heeded where the states of a model are kept."""

    # tokens that kernels compute at once: split at a multiple of it, a forward rounds as if it were not split
    chunk: int = 1
    # one token is computed otherwise than several: a prompt never ends in a forward of one token, and a state that was
    # made token by token is not that of a prompt
    clamps_one_token: bool = False
    num_pads_that_show: int = 0  # `EVERY_PAD` if states, keys and values depend on padding before a row; else 0


def read_state_traits(modules: Iterable[nn.Module], tried: StateTraits) -> StateTraits:
    """Return the traits that the modules of a model with states show, or that a trial has shown."""
    modules = [module for module in modules if hasattr(module, "layer_idx")]  # the modules that use a cache
    chunk, clamps_one_token, num_pads = tried
    for module in modules:
        limit = getattr(module, "time_step_limit", None)  # of which the step of one token is never told
        if isinstance(limit, tuple | list) and len(limit) == 2 and (limit[0] > 0 or limit[1] < inf):
            clamps_one_token = True
        if _shows_padding(module):
            num_pads = EVERY_PAD
    return StateTraits(lcm(chunk, *_chunks({type(module) for module in modules})), clamps_one_token, num_pads)


def _chunks(kinds: Iterable[Any]) -> Iterator[int]:
    """Yield the defaults of `chunk_size` in functions that forwards call: gated delta rules solve for a chunk at once.

    A kernel that is told a size by the config (Mamba 2) sums up, and rounds alike wherever it is split.
    """
    for kind in kinds:
        forward: Any = inspect.unwrap(kind.forward)
        for name in _names_of(forward):
            with suppress(TypeError, ValueError):  # what has no signature, such as a builtin
                parameter = inspect.signature(forward.__globals__.get(name)).parameters.get("chunk_size")
                if parameter is not None and isinstance(parameter.default, int):
                    yield parameter.default


def _shows_padding(module: nn.Module) -> bool:
    """Return whether convolutions of a module see padding: it is zeroed before a projection, whose bias is left."""
    children = [*module.children()]
    projections = [child for child in children if not isinstance(child, nn.Conv1d) and hasattr(child, "in_features")]
    parts = [part for child in projections for part in child.modules()]  # an adapter may have a bias, too
    has_bias = any(getattr(part, "bias", None) is not None for part in parts)
    return has_bias and any(isinstance(child, nn.Conv1d) for child in children)
