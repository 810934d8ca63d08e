"""Decides whether a `generate` may begin or go on, by its arguments, before anything runs."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import CacheArgumentError
from ..model.placeholders import Placeholders
from ..model.support import require_layer_adapters
from ..rows.rows import Rows
from .chunked_prompt import require_slices
from .generate_arguments import GenerateArguments
from .hooks import is_attached

NO_CACHE_WANTED = (
    "generate was passed this cache, and use_cache is False, given or by generation_config: it would run the whole prompt "
    "again in each step, after what the cache holds; pass use_cache=True, or no cache"
)


def continues(arguments: Mapping[str, Any], rows: Rows) -> bool:
    """Return whether a first forward brings new tokens alone: its positions begin where the rows stop."""
    firsts = _first_positions(arguments)
    if firsts is None or not rows.prompts:
        return False
    expected = [rows.n - prompt.pad + prompt.first_position for prompt in rows.prompts]
    return bool(expected[0] and (firsts == expected or firsts == expected[:1] == [*{*expected}]))


def require_whole_prompt(arguments: Mapping[str, Any], num_held: int) -> None:
    """Refuse the first forward of a `generate` that brings new tokens alone, after rows that are not there.

    Args:
        num_held: number of columns of the rows that are there.

    Raises:
        CacheArgumentError: the forward has no mask, and its positions do not begin at 0.
    """
    firsts = _first_positions(arguments)
    if arguments.get("attention_mask") is None and firsts and min(firsts) > 0:
        raise CacheArgumentError(
            f"the attention mask has {min(firsts)} columns before the ids that are passed, and the cache holds rows of {num_held}: pass "
            "the whole prompt, or ids that continue exactly where the rows stopped"
        )


def _first_positions(arguments: Mapping[str, Any]) -> list[int] | None:
    """Return the first position of each row; None: none were passed, or not one for each token."""
    positions = arguments.get("position_ids")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or not positions.shape[1]:
        return None
    firsts: list[int] = positions[:, 0].tolist()
    return firsts


def require_may_begin(model: Any, running: Any, given: GenerateArguments) -> None:
    """Refuse a `generate` of another model, or one that asks for a cache of its own.

    Raises:
        CacheArgumentError: the call is of another model, or asks for a cache of its own.
        UnsupportedModelError: adapters that do more than change layers have been put round the model.
    """
    if running is not model:
        raise another_model(model, running)
    require_layer_adapters(running)
    if given.cache_implementation is not None:
        raise CacheArgumentError(
            f"cache_implementation={given.cache_implementation!r} asks transformers for a cache of its own; "
            "leave it out, or leave past_key_values out"
        )


def require_filled(placeholders: Placeholders, given: GenerateArguments) -> None:
    """Refuse a `generate` of a prompt that has placeholders which nothing fills: images must come with every prompt.

    Raises:
        CacheArgumentError: the prompt has such placeholders.
    """
    before = given.num_masked - given.num_given if given.only_new_tokens else 0
    unfilled = placeholders.unfilled(given.passed, before) if placeholders.kinds else None
    if unfilled is not None:
        raise CacheArgumentError(f"{unfilled.what}: pass {unfilled.fillers}")


def require_continues(given: GenerateArguments, num_held: int) -> None:
    """Refuse a `generate` of new tokens alone that does not resume exactly where the rows stopped.

    This is checked here because a mask of ones never reaches the forward.

    Raises:
        CacheArgumentError: the tokens resume elsewhere, or would run in chunks from the first column on.
    """
    require_slices(given)
    if given.num_masked != num_held + given.num_given:
        raise CacheArgumentError(
            f"the attention mask has {given.num_masked} columns, the cache {num_held} and the ids {given.num_given}: pass "
            "the whole prompt, or ids that continue exactly where the rows stopped (the last token generated is not "
            "among them)"
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
    if not is_attached(model):
        return "this cache is detached from its model; enter `with cache:`, or build another cache, to attach it again"
    return "run the model that the cache was built for through its own __call__, not model.model(...)"
