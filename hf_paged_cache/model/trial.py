"""Runs short forwards of our own, and tries by them whether a model's logits with a cache are those of one without.

The trial runs a row of 24 tokens, for which most models make no mask; then that row beside one with padding; then the
row with its last tokens each in a forward of its own. It shows what structure does not: attention to later tokens, a
cache that is ignored or filled with other columns than the tokens', masks and positions that are wrong with a cache,
what is kept on the cache beside its layers, and what a state depends on. The model is left as it was.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from ..errors import UnsupportedModelError
from ..wording import brief
from .layers import cache_layers, has_keys, has_state, presented, states_of, streams_of
from .support import EVERY_PAD, StateTraits, cache_argument, is_no_decoder, other_version, takes

NUM_COLUMNS = 24
NUM_CACHED = 16
_NUM_SINGLE = 4  # columns that run each in a forward of its own
_NUM_PADS = 5  # columns of padding of the second row
_MIN_TOLERANCE = 1e-3  # a share of the logits' scale; attention to later tokens makes 0.04 and more
_TOLERANCE_IN_EPS = 16  # a bfloat16 forward of another length differs by some per cent
# states of a layer, and in words what reads them, and what they are
_READ = (("recurrent_states", "scan", "the state"), ("conv_states", "convolution", "the inputs"))
_Inputs = dict[str, Tensor]

# Models that passed, and the traits that their states were seen to have; None for a model without any. Models that
# failed are tried again, since they may have been mended.
_passed: WeakKeyDictionary[nn.Module, StateTraits | None] = WeakKeyDictionary()


def input_device(model: Any) -> torch.device:
    """Return where to put token ids: on the weights' device, or on the CPU where weights are offloaded."""
    device: torch.device = model.device
    return torch.device("cpu") if device.type == "meta" else device


def eps_computed_in(model: Any, seen: Iterable[torch.dtype] = ()) -> float:
    """Return the largest `eps` of the dtypes a forward computes in: the weights', autocast's, and those seen."""
    device_type = input_device(model).type
    dtypes = [model.dtype, *seen]
    if torch.is_autocast_enabled(device_type):
        dtypes.append(torch.get_autocast_dtype(device_type))
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def tolerance(model: PreTrainedModel, seen: Iterable[torch.dtype]) -> float:
    """Return how far rounding may move logits between forwards of other lengths, as a share of their scale."""
    return max(_MIN_TOLERANCE, _TOLERANCE_IN_EPS * eps_computed_in(model, seen))


def distance(reference: Tensor, logits: Tensor) -> float:
    """Return the largest difference of any column, as `_distances` does; infinite if one is NaN."""
    return float(_distances(reference, logits).max())


def _distances(reference: Tensor, logits: Tensor) -> Tensor:
    """Return the largest difference of each column, as a share of the reference's largest finite number, or of 1."""
    finite = reference.isfinite()
    known = reference.where(finite, 0).double()
    differences = (logits - known).where(finite, 0).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return differences.amax(-1) / (float(known.abs().max()) or 1.0)


@contextmanager
def undisturbed(model: Any) -> Iterator[set[torch.dtype]]:
    """Run in eval mode, without gradients and with nothing compiled; each module's training flag is put back.

    It yields the dtypes of logits as the head shows them: accelerate's mixed precision converts outputs to float32.
    """
    seen, head = set[torch.dtype](), model.get_output_embeddings()
    training = [module for module in model.modules() if module.training]
    hook = nullcontext() if head is None else head.register_forward_hook(lambda module, args, out: seen.add(out.dtype))
    try:
        model.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), hook:
            yield seen
    finally:
        for module in training:
            module.training = True


def trial_inputs(model: PreTrainedModel) -> _Inputs:
    """Make ids of no special tokens, their mask and, where the model takes them, positions: [2, 24] each."""
    config = model.config.get_text_config(decoder=True)
    named = [value for part in (model.config, config) for name, value in vars(part).items() if "token" in name]
    special = [token for value in named for token in (value if isinstance(value, list) else [value])]
    known = range(min(int(config.vocab_size), 512))
    plain = [token for token in known[3:] if token not in special] or list(known)
    numbers = [plain[(7 * i * i + 3 * i) % len(plain)] for i in range(2 * NUM_COLUMNS)]
    ids = torch.tensor(numbers, device="cpu").view(2, NUM_COLUMNS)
    mask = torch.ones_like(ids)
    padding = getattr(config, "pad_token_id", None)
    ids[1, :_NUM_PADS] = padding if isinstance(padding, int) and padding >= 0 else 0
    mask[1, :_NUM_PADS] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if takes(model, "position_ids"):
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp_(min=0)
    return {name: value.to(input_device(model)) for name, value in inputs.items()}


def dynamic_cache(model: PreTrainedModel) -> DynamicCache:
    """Make the cache that transformers makes. It grows where the model has more layers than its config names."""
    cache = DynamicCache(config=model.config)
    cache.layer_class_to_replicate = DynamicLayer
    return cache


def run_columns(model: PreTrainedModel, inputs: _Inputs, cache: Any, start: int, stop: int, **options: Any) -> Any:
    """Run a forward of the columns `[start, stop)`, after those that the cache holds; return its output."""
    argument = cache_argument(type(model))
    wants_new_columns = argument == "cache_params" and isinstance(cache, DynamicCache)  # a cache of ours cuts the mask
    mask_begins = start if wants_new_columns else 0
    columns = {
        name: value[:, mask_begins if name == "attention_mask" else start : stop] for name, value in inputs.items()
    }
    return model(**columns, **options, **{argument: presented(model, cache), "use_cache": True})


def last_logits(output: Any, num_columns: int = NUM_COLUMNS - NUM_CACHED) -> Tensor:
    """Return the logits of the last columns, in float32 on the CPU: [R, columns, vocabulary]."""
    logits: Tensor = output.logits[:, -num_columns:]
    return logits.float().cpu()


def continue_behind(
    model: PreTrainedModel,
    inputs: _Inputs,
    cache: Any,
    num_cached: int = NUM_CACHED,
    step: int = NUM_COLUMNS - NUM_CACHED,
) -> Tensor:
    """Return the logits of the other columns with the first `num_cached` in the cache: [R, columns, vocabulary].

    Each forward after the first is of `step` columns. ValueError: the cache holds another number than were passed.
    """
    run_columns(model, inputs, cache, 0, num_cached)
    if any(map(has_keys, cache.layers)) and cache.get_seq_length() != num_cached:
        raise ValueError(f"after {num_cached} tokens its cache holds {cache.get_seq_length()}")
    spans = pairwise(range(num_cached, NUM_COLUMNS + 1, step))
    return torch.cat([last_logits(run_columns(model, inputs, cache, *span), step) for span in spans], 1)


def layers_after_a_token(model: PreTrainedModel) -> Sequence[Any]:
    """Return the layers of a `DynamicCache` after a forward of one token."""
    cache, ids = dynamic_cache(model), torch.zeros((1, 1), dtype=torch.int64, device=input_device(model))
    with undisturbed(model):
        run_columns(model, {"input_ids": ids}, cache, 0, 1)
    return cache.layers


def measure_bytes_per_token(model: PreTrainedModel, shares: Mapping[int, float] = MappingProxyType({})) -> float:
    """Return the bytes of keys and values of one token in all layers; of a layer in `shares`, this part counts."""
    held = [[*streams_of(layer).values()] for layer in layers_after_a_token(model)]
    return sum(shares.get(index, 1) * sum(tensor.nbytes for tensor in keys) for index, keys in enumerate(held))


def require_continuable(model: PreTrainedModel, *, if_it_runs: bool = False) -> StateTraits | None:
    """Refuse a model whose logits with a cache are not those without, and say what was seen.

    Cost: about ten short forwards, until the model has passed.

    With `if_it_runs`, a model is accepted that cannot be tried, such as one whose adapters want an argument in each
    call. It returns what is seen of the model's states beyond what its modules say; None for a model without any.
    """
    if model not in _passed:
        reason, was_tried = _try(model)
        if reason and (was_tried or not if_it_runs):
            hint = " (config.is_decoder is False; load it with is_decoder=True if it is to generate)"
            hint = hint if is_no_decoder(model) else other_version()
            raise UnsupportedModelError(f"{type(model).__name__}: {reason}{hint}")
    return _passed.get(model)


def _try(model: PreTrainedModel) -> tuple[str, bool]:
    """Return why a model with a `DynamicCache` failed, or "" and remember it; and whether anything was compared."""
    padded, was_run, traits = trial_inputs(model), False, None
    alone = {name: value[:1] for name, value in padded.items()}
    with undisturbed(model) as seen:
        try:
            whole = last_logits(model(**alone, use_cache=False))
            was_run = True
            if not whole.isfinite().any():
                return "none of its logits is finite, so nothing can be compared", False
            has_states = any(map(has_state, cache_layers(model)))
            reason = _why_states_are_lost(model, alone) if has_states else ""
            if (
                reason := reason
                or _why_not_continued(model, alone, whole, seen)
                or _why_not_continued(model, padded, last_logits(model(**padded, use_cache=False)), seen)
            ):
                return reason, True
            single = continue_behind(model, alone, dynamic_cache(model), NUM_COLUMNS - _NUM_SINGLE, 1)
            differ = _why_they_differ(whole, single, tolerance(model, seen))
            if differ and not has_states:
                return f"{differ}: it computes one token otherwise than several", True
            if has_states:
                behind = {name: pad(value, (_NUM_PADS, 0)) for name, value in alone.items()}
                shows = distance(whole, last_logits(model(**behind, use_cache=False))) > tolerance(model, seen)
                traits = StateTraits(1, bool(differ), EVERY_PAD if shows else 0)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 (a model may raise anything)
            what = "continued after a cache" if was_run else "run on token ids alone"
            return f"it cannot be {what} ({brief(error)})", was_run
    _passed[model] = traits
    return "", True


def _why_not_continued(model: PreTrainedModel, inputs: _Inputs, whole: Tensor, seen: Iterable[torch.dtype]) -> str:
    """Say what goes wrong where inputs, whose logits are `whole` without a cache, are continued after one; or ""."""
    cache = dynamic_cache(model)
    continued = continue_behind(model, inputs, cache)
    if reason := _why_they_differ(whole, continued, tolerance(model, seen)):
        return f"{reason}: its keys and values depend on more than the tokens before them, or it does not use its cache"
    # what a model has put on the cache itself, such as positions, belongs to the rows, and no block holds it
    names = sorted(vars(cache).keys() - vars(dynamic_cache(model)).keys())
    return (
        f"it keeps {', '.join(names)} on the cache, beside the layers, so it is not kept of a prefix" if names else ""
    )


def _why_they_differ(whole: Tensor, continued: Tensor, allowed: float) -> str:
    """Say by how much the last logits differ, if they differ by more than rounding; "" if they do not."""
    num = continued.shape[1]
    # the median over columns: rounding may send one token to another expert, but not most of them
    pairs = zip(whole[:, -num:], continued, strict=True)
    rows = [float(_distances(*pair).sort().values[num // 2]) for pair in pairs]
    if max(rows) <= allowed:
        return ""
    where = "" if rows[0] > allowed else " in a row with padding"
    return (
        f"continued after {NUM_COLUMNS - num} cached tokens its logits differ{where} by {max(rows):.2g} of their scale"
    )


def _why_states_are_lost(model: PreTrainedModel, inputs: _Inputs) -> str:
    """Say which states several tokens do not resume from: NaN in the place of such a state does not come out.

    Whether a scan reads the state before it does not depend on weights. How much the state shows in logits does.
    """
    begun: Any = dynamic_cache(model)
    run_columns(model, inputs, begun, 0, NUM_CACHED)
    if not all(any(layer.has_previous_state.values()) for layer in begun.layers if has_state(layer)):
        return "its layers keep their state in modules and not in the cache, so the state of a prefix cannot be kept"
    for name, kind, before in _READ:
        holders = [index for index, layer in enumerate(begun.layers) if _numbers_of(layer, name)]
        if holders and not _comes_out(model, inputs, copy.deepcopy(begun), holders[0], name):
            return (
                f"its {kind} of several tokens starts without {before} before them, which only a single token "
                "continues, so no prompt can resume from a prefix"
            )
    return ""


def _comes_out(model: PreTrainedModel, inputs: _Inputs, cache: Any, layer_idx: int, name: str) -> bool:
    """Return whether NaN in a layer's state shows in what two tokens compute after it, or in what they leave."""
    layer = cache.layers[layer_idx]
    for state in _numbers_of(layer, name):
        state.fill_(torch.nan)
    try:
        logits = last_logits(run_columns(model, inputs, cache, NUM_CACHED, NUM_CACHED + 2), 2)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001 (NaN has come to something that may raise any error)
        return True
    return any(bool(out.isnan().any()) for out in (logits, *_numbers_of(layer, "recurrent_states")))


def _numbers_of(layer: Any, name: str) -> list[Tensor]:
    """Return the states of one kind that a layer holds, but for token ids, which some keep of a convolution."""
    return [state for state in states_of(layer, name) if state.is_floating_point()]


def text_types(model: PreTrainedModel, names: Iterable[str]) -> frozenset[str]:
    """Return the arguments, of some that give tokens a type, that the forward takes, if they mean nothing where 0."""
    taken = frozenset(name for name in names if takes(model, name))
    if not taken:
        return taken
    inputs = trial_inputs(model)
    typed = {**inputs, **dict.fromkeys(taken, torch.zeros_like(inputs["input_ids"]))}
    with undisturbed(model):
        try:
            plain, others = (last_logits(model(**given, use_cache=False)) for given in (inputs, typed))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # noqa: BLE001 (a model may raise anything)
            return frozenset()
    return taken if distance(plain, others) <= _MIN_TOLERANCE / 10 else frozenset()
