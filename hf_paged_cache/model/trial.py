"""A short trial of a model: are its logits with a cache those of one forward without?

Two rows of 24 tokens, one padded on the left; then the other row alone, for which most models make no mask. It shows
what structure does not: attention to later tokens, a cache that is ignored or filled with other columns than the
tokens', masks that are wrong with a cache. The model is left as it was.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..errors import UnsupportedModelError
from .probing import eps_computed_in, input_device, types_of_logits, undisturbed
from .support import is_no_decoder, quoted, takes

NUM_COLUMNS = 24
NUM_CACHED = 16
_NUM_PADS = 5  # of the second row
_MIN_TOLERANCE = 1e-3  # of the logits' scale; attention to later tokens makes 0.04 and more
_TOLERANCE_IN_EPS = 16  # a bfloat16 forward of another length differs by some per cent


class Failure(NamedTuple):
    """Why a trial failed."""

    reason: str  # "" if it did not fail
    was_tried: bool = True  # False: it does not run on token ids alone, or no logit is finite


_passed: WeakSet[nn.Module] = WeakSet()  # models that failed are tried again: they may have been mended


def require_continuable(model: PreTrainedModel, *, if_it_runs: bool = False) -> None:
    """Refuse a model whose logits with a cache are not those without.  Cost: six short forwards, until it has passed.

    Args:
        if_it_runs: accept a model that cannot be tried, such as one whose adapters want an argument in each call.
    Raises:
        UnsupportedModelError: naming what was seen.
    """
    failure = why_it_fails(model)
    if failure.reason and (failure.was_tried or not if_it_runs):
        hint = " (config.is_decoder is False; load it with is_decoder=True if it is to generate)"
        raise UnsupportedModelError(f"{type(model).__name__}: {failure.reason}{hint if is_no_decoder(model) else ''}")


def why_it_fails(model: PreTrainedModel) -> Failure:
    """The trial with a `DynamicCache`. A model that has passed is not tried again."""
    if model in _passed:
        return Failure("")
    was_run = False
    padded = trial_inputs(model)
    alone = {name: value[:1] for name, value in padded.items()}
    with undisturbed(model), types_of_logits(model) as seen:
        for inputs in (padded, alone):
            try:
                whole = last_logits(model(**inputs, use_cache=False), NUM_COLUMNS - NUM_CACHED)
                was_run = True
                continued = continue_behind(model, inputs, dynamic_cache(model))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 (a model may raise anything)
                what = "continued behind a cache" if was_run else "run on token ids alone"
                return Failure(f"it cannot be {what} ({quoted(error)})", was_run)
            if not whole.isfinite().any():
                return Failure("none of its logits is finite, so nothing can be compared", was_tried=False)
            reason = _why_they_differ(whole, continued, tolerance(model, seen))
            if reason:
                return Failure(reason)
    _passed.add(model)
    return Failure("")


def continue_behind(model: PreTrainedModel, inputs: dict[str, Tensor], cache: Any) -> Tensor:
    """The logits of the last 8 columns with the first `NUM_CACHED` in the cache: [R, 8, vocabulary].

    Raises:
        ValueError: the cache holds another number of columns than were passed.
    """
    first = {name: value[:, :NUM_CACHED] for name, value in inputs.items()}
    model(**first, past_key_values=cache, use_cache=True)
    if cache.get_seq_length() != NUM_CACHED:
        raise ValueError(f"after {NUM_CACHED} tokens its cache holds {cache.get_seq_length()}")
    rest = {name: value if name == "attention_mask" else value[:, NUM_CACHED:] for name, value in inputs.items()}
    return last_logits(model(**rest, past_key_values=cache, use_cache=True), NUM_COLUMNS - NUM_CACHED)


def dynamic_cache(model: PreTrainedModel) -> DynamicCache:
    """The cache that transformers makes; it grows where the model has more layers than its config names."""
    cache = DynamicCache(config=model.config)
    cache.layer_class_to_replicate = DynamicLayer
    return cache


def _why_they_differ(whole: Tensor, continued: Tensor, allowed: float) -> str:
    """Names the rows whose logits differ by more than rounding; "" if there are none."""
    # the median over columns: rounding may send one token to another expert, but not most of them
    rows = [float(_distances(*pair).sort().values[whole.shape[1] // 2]) for pair in zip(whole, continued, strict=True)]
    if max(rows) <= allowed:
        return ""
    where = "" if rows[0] > allowed else " in a row with padding"
    return (
        f"continued behind {NUM_CACHED} cached tokens its logits differ{where} by {max(rows):.2g} of their scale: its "
        "keys and values depend on more than the tokens before them, or it does not use its cache"
    )


def distance(reference: Tensor, logits: Tensor) -> float:
    """The largest difference where the reference is finite, as a share of its scale; infinite if one is NaN."""
    return float(_distances(reference, logits).max())


def _distances(reference: Tensor, logits: Tensor) -> Tensor:
    """The same of each column; the scale is the largest finite number of all, or 1 if that is 0."""
    finite = reference.isfinite()
    known = reference.where(finite, 0).double()
    differences = (logits - known).where(finite, 0).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return differences.amax(-1) / (float(known.abs().max()) or 1.0)


def tolerance(model: PreTrainedModel, seen: Iterable[torch.dtype]) -> float:
    """How far rounding may move logits of dtypes `seen` between forwards of other lengths, as a share of their scale."""
    return max(_MIN_TOLERANCE, _TOLERANCE_IN_EPS * eps_computed_in(model, seen))


def trial_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Ids of no special tokens, their mask and, where the model takes them, positions: [2, 24] each."""
    config = model.config.get_text_config(decoder=True)
    named = [value for part in (model.config, config) for name, value in vars(part).items() if "token" in name]
    special = [token for value in named for token in (value if isinstance(value, list) else [value])]
    known = range(min(int(config.vocab_size), 512))
    plain = [token for token in known[3:] if token not in special] or list(known)
    ids = torch.tensor([plain[(7 * i * i + 3 * i) % len(plain)] for i in range(2 * NUM_COLUMNS)]).view(2, NUM_COLUMNS)
    mask = torch.ones_like(ids)
    pad = getattr(config, "pad_token_id", None)
    ids[1, :_NUM_PADS] = pad if isinstance(pad, int) and pad >= 0 else 0
    mask[1, :_NUM_PADS] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if takes(model, "position_ids"):
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp_(min=0)
    return {name: value.to(input_device(model)) for name, value in inputs.items()}


def last_logits(output: Any, num_columns: int) -> Tensor:
    """The logits of the last columns, in float32 on the CPU: [R, columns, vocabulary]."""
    logits: Tensor = output.logits[:, -num_columns:]
    return logits.float().cpu()
