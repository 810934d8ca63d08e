"""Which positions a model gives to tokens when it is passed none."""

import inspect
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .code import names_of
from .comparison import attempt, continue_behind, distance, dynamic_cache, logits_at_once, tolerance, trial_inputs
from .probing import types_of_logits, undisturbed

Numbering = Literal["columns", "tokens"]


def default_numbering(model: PreTrainedModel) -> Numbering | None:
    """What a forward without `position_ids` numbers after a cache: columns, or the tokens that the mask shows.

    None is something else: the columns of that forward alone, what is after the id of padding, or where a forward before came
    to, which the module keeps as `rope_deltas`.

    Cost: nothing runs where the code of a module that takes positions asks the cache for its length and numbers from there;
    three or four short forwards of a model where none does.
    """
    modules = [*model.modules()]
    if any(hasattr(module, "rope_deltas") for module in modules):
        return None
    if any(map(_says_so, {type(module) for module in modules})):
        return "columns"
    return attempt(lambda: _seen_numbering(model), lambda _: None)


def _says_so(kind: type[nn.Module]) -> bool:
    names: set[str] = names_of(kind.forward)
    return {"arange", "get_seq_length"} <= names and "position_ids" in inspect.signature(kind.forward).parameters


def _seen_numbering(model: PreTrainedModel) -> Numbering | None:
    """That with which a forward has the logits that come without positions, after a cache."""
    inputs: dict[str, Tensor] = trial_inputs(model)
    of_tokens = inputs.pop("position_ids", None)
    if of_tokens is None:
        return "tokens"
    of_columns = torch.arange(of_tokens.shape[1], device=of_tokens.device).expand(2, -1)
    numberings: dict[Numbering, Tensor] = {"columns": of_columns, "tokens": of_tokens}
    with undisturbed(model), types_of_logits(model) as seen:
        continued = continue_behind(model, inputs, dynamic_cache(model))
        for numbering, positions in numberings.items():
            whole = logits_at_once(model, {**inputs, "position_ids": positions})
            if distance(whole, continued) <= tolerance(model, seen):
                return numbering
    return None
