"""Which positions a model gives to tokens when it is passed none."""

import inspect
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .comparison import (
    NUM_CACHED,
    NUM_COLUMNS,
    continue_behind,
    distance,
    dynamic_cache,
    last_logits,
    tolerance,
    trial_inputs,
)
from .probing import types_of_logits, undisturbed

Numbering = Literal["columns", "tokens"]


def default_numbering(model: PreTrainedModel) -> Numbering | None:
    """What a forward without `position_ids` numbers behind a cache: columns, or the tokens that the mask shows.

    None is something else: the columns of that forward alone, what is behind the id of padding, or where a forward before came
    to, which the module keeps as `rope_deltas`.

    Cost: nothing runs where the code of a module that takes positions asks the cache for its length and numbers from there;
    three or four short forwards of a model where none does.
    """
    modules = [*model.modules()]
    if any(hasattr(module, "rope_deltas") for module in modules):
        return None
    return "columns" if any(map(_says_so, {type(module) for module in modules})) else _seen_numbering(model)


def _says_so(kind: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if code is None:
        return False
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return "position_ids" in arguments and {"arange", "get_seq_length"} <= {*code.co_names}


def _seen_numbering(model: PreTrainedModel) -> Numbering | None:
    """That with which a forward has the logits that come without positions, behind a cache."""
    inputs: dict[str, Tensor] = trial_inputs(model)
    of_tokens = inputs.pop("position_ids", None)
    if of_tokens is None:
        return "tokens"
    of_columns = torch.arange(NUM_COLUMNS, device=of_tokens.device).expand(2, -1)
    with undisturbed(model), types_of_logits(model) as seen:
        try:
            continued = continue_behind(model, inputs, dynamic_cache(model))
            numberings: dict[Numbering, Tensor] = {"columns": of_columns, "tokens": of_tokens}
            for numbering, positions in numberings.items():
                whole = last_logits(model(**inputs, position_ids=positions, use_cache=False), NUM_COLUMNS - NUM_CACHED)
                if distance(whole, continued) <= tolerance(model, seen):
                    return numbering
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001 (a model may raise anything)
            return None
    return None
