"""Tries a model for a short time: are its logits with a cache those of one forward without?

The trial runs two rows of 24 tokens, one padded on the left; then the row without padding alone, for which most models
make no mask; then the tokens of that row continued by a single one. It shows what structure does not: attention to
later tokens, a cache that is ignored or filled with other columns than the tokens', masks and positions that are wrong
with a cache, what is kept on the cache beside its layers. Where layers carry a state, it also shows what the state
depends on. The model is left as it was.
"""

import copy
import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from .probing import (
    MIN_TOLERANCE,
    NUM_CACHED,
    NUM_COLUMNS,
    NUM_PADS,
    TiesByPosition,
    attempt,
    behind_padding,
    continue_behind,
    distance,
    distances,
    dynamic_cache,
    eps_computed_in,
    first_row,
    last_logits,
    logits_at_once,
    run_columns,
    tolerance,
    trial_inputs,
    types_of_logits,
    undisturbed,
)
from .state_traits import EVERY_PAD, StateTraits, read_state_traits
from .support import cache_layers, has_state, is_no_decoder, names_of, other_version, quoted, states_of, takes

Numbering = Literal["columns", "tokens"]
_STATE_TOLERANCE_IN_EPS = 4  # allowed difference of the first layer's state, which is rounded a few times
_FORGOTTEN = (
    "its {} of several tokens starts without {} before them, which only a single token continues, so no prompt can resume from "
    "a prefix"
)
_KEPT_IN_MODULES = (
    "its layers keep their state in modules and not in the cache, so the state of a prefix cannot be kept"
)


class Failure(NamedTuple):
    """`Failure` says why a trial failed."""

    reason: str  # "" if the trial did not fail
    was_tried: bool = True  # False: the model does not run on token ids alone, or no logit is finite


# Models that passed. Models that failed are tried again, since they may have been mended.
_continuable: WeakSet[nn.Module] = WeakSet()
_seen: WeakKeyDictionary[nn.Module, StateTraits] = WeakKeyDictionary()  # traits that a model's states were seen to have


def require_continuable(model: PreTrainedModel, *, if_it_runs: bool = False) -> None:
    """Refuse a model whose logits with a cache are not those without.

    Cost: nine short forwards, until the model has passed; eleven for a model with states.

    Args:
        if_it_runs: accept a model that cannot be tried, such as one whose adapters want an argument in each call.

    Raises:
        UnsupportedModelError: the model failed; the error names what was seen.
    """
    failure = why_it_fails(model)
    if failure.reason and (failure.was_tried or not if_it_runs):
        hint = " (config.is_decoder is False; load it with is_decoder=True if it is to generate)"
        hint = hint if is_no_decoder(model) else other_version()
        raise UnsupportedModelError(f"{type(model).__name__}: {failure.reason}{hint}")


def why_it_fails(model: PreTrainedModel) -> Failure:
    """Try the model with a `DynamicCache`; return why the trial failed. A model that has passed is not tried again."""
    if model in _continuable:
        return Failure("")
    was_run = False
    padded = trial_inputs(model)
    alone = first_row(padded)
    with undisturbed(model), types_of_logits(model) as seen, TiesByPosition():
        for inputs in (padded, alone):
            try:
                whole = logits_at_once(model, inputs)
                was_run = True
                cache = dynamic_cache(model)
                continued = continue_behind(model, inputs, cache)
                if not whole.isfinite().any():
                    return Failure("none of its logits is finite, so nothing can be compared", was_tried=False)
                reason = _why_they_differ(whole, continued, tolerance(model, seen))
                reason = reason or _why_states_differ(model, inputs, cache, eps_computed_in(model, seen))
                if reason or inputs is alone:
                    reason = _why_states_are_lost(model, alone, cache) or reason
                reason = reason or _why_layers_are_not_all(model, cache)
                if not reason and inputs is alone:
                    reason = _why_one_token_differs(model, alone, tolerance(model, seen))
                if reason:
                    return Failure(reason)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 (a model may raise anything)
                what = "continued after a cache" if was_run else "run on token ids alone"
                return Failure(f"it cannot be {what} ({quoted(error)})", was_run)
    _continuable.add(model)
    return Failure("")


def state_traits(model: PreTrainedModel) -> StateTraits | None:
    """Return what a run shows of a model's states beyond what its modules say; None for a model without any.

    Each model is tried once: one token at a time after a cache, and one row after different padding.  Cost: a dozen
    short forwards.

    Raises:
        UnsupportedModelError: the model cannot be run so.
    """
    if not any(map(has_state, cache_layers(model))):
        return None
    if model not in _seen:

        def refuse(error: Exception) -> StateTraits:
            raise UnsupportedModelError(
                f"{type(model).__name__}: it cannot be run a token at a time, or after padding ({quoted(error)})"
            ) from error

        _seen[model] = attempt(lambda: _seen_traits(model), refuse)
    return _seen[model]


def _seen_traits(model: PreTrainedModel) -> StateTraits:
    num_shown = read_state_traits(model.modules()).num_pads_that_show
    row = first_row(trial_inputs(model))
    with undisturbed(model), types_of_logits(model) as seen:
        whole = logits_at_once(model, row)
        single = continue_behind(model, row, dynamic_cache(model), one_by_one=True)
        less, more = (
            logits_at_once(model, behind_padding(row, num_pads), NUM_COLUMNS)
            for num_pads in (num_shown, num_shown + NUM_PADS)
        )
        allowed = tolerance(model, seen)
    return StateTraits(
        clamps_one_token=bool(_why_they_differ(whole, single, allowed)),
        num_pads_that_show=EVERY_PAD if distance(less, more) > allowed else 0,
    )


def _why_states_differ(model: PreTrainedModel, inputs: dict[str, Tensor], continued: Any, eps: float) -> str:
    """Say how a state differs from that of one forward, though logits may hardly show it.

    "" where no state differs, or there is none. The first layer that has a state is compared: what reaches it has
    hardly been rounded, nor been sent to another expert.

    Args:
        continued: the cache in which the inputs were continued.
        eps: eps of the least exact dtype that the model computes in.
    """
    carriers = [index for index, layer in enumerate(continued.layers) if has_state(layer)]
    if not carriers:
        return ""
    at_once = dynamic_cache(model)
    run_columns(model, inputs, at_once, 0, NUM_COLUMNS)
    pairs = zip(*(states_of(cache.layers[carriers[0]]) for cache in (at_once, continued)), strict=True)
    most = max((distance(*(state.float().cpu().flatten() for state in pair)) for pair in pairs), default=0.0)
    if most <= max(MIN_TOLERANCE, _STATE_TOLERANCE_IN_EPS * eps):
        return ""
    return (
        f"continued after {NUM_CACHED} cached tokens a state differs by {most:.2g} of its scale from that of one forward: "
        "it does not follow from the state before it"
    )


def _why_states_are_lost(model: PreTrainedModel, row: dict[str, Tensor], continued: Any) -> str:
    """Say which states several tokens do not resume from: NaN in the place of such a state does not come out.

    "" if there are no such states. Whether a scan reads the state before it does not depend on weights. How much the
    state shows in logits does.

    Args:
        continued: a cache in which tokens were continued.
    """
    carriers = [layer for layer in continued.layers if has_state(layer)]
    if not carriers:
        return ""
    if not all(any(layer.has_previous_state.values()) for layer in carriers):
        return _KEPT_IN_MODULES
    begun = dynamic_cache(model)
    run_columns(model, row, begun, 0, NUM_CACHED)
    for name, said in (("recurrent_states", ("scan", "the state")), ("conv_states", ("convolution", "the inputs"))):
        index = next((index for index, layer in enumerate(begun.layers) if _numbers_of(layer, name)), None)
        if index is not None and not _comes_out(model, row, copy.deepcopy(begun), index, name):
            return _FORGOTTEN.format(*said)
    return ""


def _comes_out(model: PreTrainedModel, row: dict[str, Tensor], cache: Any, layer_idx: int, name: str) -> bool:
    """Return whether NaN in a layer's state shows in what two tokens compute after it, or in what they leave."""
    layer = cache.layers[layer_idx]
    for state in _numbers_of(layer, name):
        state.fill_(torch.nan)
    span = NUM_CACHED, NUM_CACHED + 2
    logits = attempt(lambda: last_logits(run_columns(model, row, cache, *span), 2), lambda _: None)
    if logits is None:  # NaN has come to something that may raise any error
        return True
    return any(bool(out.isnan().any()) for out in (logits, *_numbers_of(layer, "recurrent_states")))


def _numbers_of(layer: Any, name: str) -> list[Tensor]:
    """Return the states of one kind that a layer holds.

    Token ids, which some layers keep as inputs of a convolution, are left out.
    """
    return [state for state in states_of(layer, name) if state.is_floating_point()]


def _why_layers_are_not_all(model: PreTrainedModel, continued: Any) -> str:
    """Name what a model has put on the cache itself, such as positions.

    That belongs to the rows, and no block holds it.
    """
    names = sorted(vars(continued).keys() - vars(dynamic_cache(model)).keys())
    if not names:
        return ""
    return f"it keeps {', '.join(names)} on the cache, beside the layers, so it is not kept of a prefix"


def _why_one_token_differs(model: PreTrainedModel, row: dict[str, Tensor], allowed: float) -> str:
    """Say how far logits differ where a prompt continues by a single token; "" where they do not.

    A model whose layers carry a state is not looked at: see `state_traits`. Eight rows are run, [8, 9], of which each
    begins two tokens further on: rounding may send one token to another expert, but not most of them.
    """
    if any(map(has_state, cache_layers(model))):
        return ""
    num_cached = NUM_CACHED // 2
    places = row["input_ids"][0].unfold(0, num_cached + 1, 2)
    inputs = {name: value[:, : num_cached + 1].expand_as(places) for name, value in row.items()} | {"input_ids": places}
    cache = dynamic_cache(model)
    run_columns(model, inputs, cache, 0, num_cached)
    single = last_logits(run_columns(model, inputs, cache, num_cached, num_cached + 1), 1)
    whole = logits_at_once(model, inputs, 1)
    if not _why_they_differ(whole.transpose(0, 1), single.transpose(0, 1), allowed):
        return ""
    return (
        f"continued after {num_cached} cached tokens by a single one its logits differ by {distance(whole, single):.2g} "
        "of their scale: it computes one token otherwise than several, so no prompt can resume at its last token"
    )


def _why_they_differ(whole: Tensor, continued: Tensor, allowed: float) -> str:
    """Say by how much logits differ, if they differ by more than rounding; "" if they do not."""
    # the median over columns: rounding may send one token to another expert, but not most of them
    rows = [float(distances(*pair).sort().values[whole.shape[1] // 2]) for pair in zip(whole, continued, strict=True)]
    if max(rows) <= allowed:
        return ""
    where = "" if rows[0] > allowed else " in a row with padding"
    return (
        f"continued after {NUM_CACHED} cached tokens its logits differ{where} by {max(rows):.2g} of their scale: its "
        "keys and values depend on more than the tokens before them, or it does not use its cache"
    )


def default_numbering(model: PreTrainedModel) -> Numbering | None:
    """Return what a forward without `position_ids` numbers after a cache: columns, or the tokens that the mask shows.

    None: it numbers something else. That may be the columns of that forward alone, what is after the id of padding, or
    where an earlier forward came to, which the module keeps as `rope_deltas`.

    Cost: nothing runs where the code of a module that takes positions asks the cache for its length and numbers from
    there; three or four short forwards for a model without such a module.
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
    """Return the numbering with which a forward has the logits that come without positions, after a cache."""
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


def text_types(model: PreTrainedModel, names: Iterable[str]) -> frozenset[str]:
    """Return the token-type arguments that the forward takes, and that condition nothing where they are 0.

    Cost: nothing for a model that takes none; else a short forward, and one more for each.

    Args:
        names: names of arguments that give each token a type.
    """
    taken = [name for name in names if takes(model, name)]
    if not taken:
        return frozenset()
    inputs = trial_inputs(model)

    def is_none(name: str) -> bool:
        typed = logits_at_once(model, {**inputs, name: torch.zeros_like(inputs["input_ids"])})
        return distance(logits_at_once(model, inputs), typed) <= MIN_TOLERANCE / 10

    with undisturbed(model), TiesByPosition():
        return frozenset(name for name in taken if attempt(partial(is_none, name), lambda _: False))
