"""Which positions a model gives to tokens when it is passed none."""

import inspect

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .probing import types_of_logits, undisturbed
from .trial import (
    NUM_CACHED,
    NUM_COLUMNS,
    continue_behind,
    distance,
    dynamic_cache,
    last_logits,
    tolerance,
    trial_inputs,
)


def numbers_columns(model: PreTrainedModel) -> bool:
    """Whether a forward without `position_ids` counts on from the columns in its cache, padding among them.

    Others start at 0 again in each forward, count from the id of padding, follow the mask, or go on from where a forward before
    came to, which the module keeps as `rope_deltas`.

    Cost: nothing runs where the code of a module that takes positions asks the cache for its length and numbers from there;
    three short forwards of a model where none does.
    """
    modules = [*model.modules()]
    if any(hasattr(module, "rope_deltas") for module in modules):
        return False
    return any(map(_says_so, {type(module) for module in modules})) or _is_seen_to(model)


def _says_so(kind: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if code is None:
        return False
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return "position_ids" in arguments and {"arange", "get_seq_length"} <= {*code.co_names}


def _is_seen_to(model: PreTrainedModel) -> bool:
    """Whether logits without positions, behind a cache, are those of one forward with the columns' numbers."""
    inputs: dict[str, Tensor] = trial_inputs(model)
    if inputs.pop("position_ids", None) is None:
        return True
    numbered = torch.arange(NUM_COLUMNS, device=inputs["input_ids"].device).expand(2, -1)
    with undisturbed(model), types_of_logits(model) as seen:
        try:
            whole = last_logits(model(**inputs, position_ids=numbered, use_cache=False), NUM_COLUMNS - NUM_CACHED)
            continued = continue_behind(model, inputs, dynamic_cache(model))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001 (a model may raise anything)
            return False
        return distance(whole, continued) <= tolerance(model, seen)
