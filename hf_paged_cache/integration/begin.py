"""Decides whether a `generate` may begin or go on, by its arguments, before anything runs."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import CacheArgumentError
from ..model.support import require_layer_adapters
from .chunked_prompt import require_slices
from .generate_arguments import GenerateArguments
from .hooks import bracket_of

NO_CACHE_WANTED = (
    "generate was passed this cache, and use_cache is False, given or by generation_config: it would run the whole "
    "prompt again in each step, after what the cache holds; pass use_cache=True, or no cache"
)


def require_whole_prompt(arguments: Mapping[str, Any]) -> None:
    """Refuse a first forward that is to use no cache, or has no mask and positions that do not begin at 0."""
    if arguments.get("use_cache") is False:
        raise CacheArgumentError(NO_CACHE_WANTED)
    positions, first = arguments.get("position_ids"), 0
    if isinstance(positions, Tensor) and positions.dim() == 2 and positions.numel():
        first = int(positions[:, 0].min())
    if arguments.get("attention_mask") is None and first > 0:
        raise CacheArgumentError(
            f"the attention mask has {first} columns before the ids that are passed, and a generate that was looked up "
            "before the cache was built, or is called by another, does not go on with rows: pass the whole prompt"
        )


def require_may_begin(model: Any, running: Any, given: GenerateArguments) -> None:
    """Refuse a `generate` of another model, under adapters that do more than change layers, or on another cache."""
    if running is not model:
        raise another_model(model, running)
    require_layer_adapters(running)
    if given.cache_implementation is not None:
        raise CacheArgumentError(
            f"cache_implementation={given.cache_implementation!r} asks transformers for a cache of its own; "
            "leave it out, or leave past_key_values out"
        )


def require_continues(given: GenerateArguments, num_held: int) -> None:
    """Refuse a `generate` of new tokens alone that does not resume exactly where the rows stopped.

    This is checked here because a mask of ones never reaches the forward.
    """
    require_slices(given)
    if given.num_masked != num_held + given.num_given:
        raise CacheArgumentError(
            f"the attention mask has {given.num_masked} columns, the cache {num_held} and the ids {given.num_given}: "
            "pass the whole prompt, or ids that continue exactly where the rows stopped (the last token generated is "
            "not among them)"
        )


def prepares_otherwise(model: Any) -> bool:
    """Return whether a function that is not transformers' own decides what each step is passed."""
    for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation"):
        module = getattr(getattr(type(model), name, None), "__globals__", {}).get("__name__", "")
        if name in vars(model) or str(module).partition(".")[0] != "transformers":
            return True
    return False


def another_model(own: Any, other: Any) -> CacheArgumentError:
    """Return the error for a cache that was given to another model."""
    return CacheArgumentError(
        f"this cache was built for another model ({type(own).__name__} elsewhere in memory); build "
        f"one for this {type(other).__name__}: PagedPrefixCache(model)"
    )


def how_to_run(model: nn.Module) -> str:
    """Return advice on how to run a model so that its forwards are announced."""
    if bracket_of(model) is None:
        return "this cache is detached from its model; enter `with cache:`, or build another cache, to attach it again"
    return "run the model that the cache was built for through its own __call__, not model.model(...)"
