"""Runs short forwards of our own, with a cache and without.

Owns their inputs, what their logits and their layers show, and how far rounding goes. The inputs are two rows of 24
tokens, one padded on the left. Callers decide what follows from a difference.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .cache_adapters import cache_argument, present_cache
from .layer_streams import streams_of
from .support import cache_layers, has_keys, has_state, states_of, takes

NUM_COLUMNS = 24
NUM_CACHED = 16
MIN_TOLERANCE = 1e-3  # a share of the logits' scale; attention to later tokens makes 0.04 and more
NUM_PADS = 5  # columns of padding of the second row
_TOLERANCE_IN_EPS = 16  # a bfloat16 forward of another length differs by some per cent
_T = TypeVar("_T")


class StateSizes(NamedTuple):
    """`StateSizes` has the sizes of the states of one row.

    Attributes:
        num_bytes: bytes of all states.
        width: number of inputs that the widest convolution of the states looks back at, the last one included.
        are_convolutions_alone: True if all states are inputs of convolutions, so that a forward can show them at any
            token.
    """

    num_bytes: int
    width: int
    are_convolutions_alone: bool


def input_device(model: Any) -> torch.device:
    """Return where to put token ids: on the weights' device, or on the CPU where weights are offloaded."""
    device: torch.device = model.device
    return torch.device("cpu") if device.type == "meta" else device


@contextmanager
def types_of_logits(model: Any) -> Iterator[set[torch.dtype]]:
    """Collect the dtypes that logits are computed in.

    accelerate's mixed precision converts its outputs back to float32, so only the head shows its dtype.
    """
    seen: set[torch.dtype] = set()
    head = model.get_output_embeddings()
    with nullcontext() if head is None else head.register_forward_hook(lambda module, args, out: seen.add(out.dtype)):
        yield seen


def eps_computed_in(model: Any, seen: Iterable[torch.dtype] = ()) -> float:
    """Return the largest `eps` of the dtypes a forward computes in: the weights', autocast's, and those seen."""
    device_type = input_device(model).type
    dtypes = [model.dtype, *seen]
    if torch.is_autocast_enabled(device_type):
        dtypes.append(torch.get_autocast_dtype(device_type))
    return max(torch.finfo(dtype).eps for dtype in dtypes)


class TiesByPosition(TorchFunctionMode):
    """`TiesByPosition` makes `topk` choose the first of equal scores.

    torch chooses in the order in which its kernel comes upon scores, and that order depends on how many columns a
    forward has. So an indexer of few heads, whose scores are often exactly 0, would give other keys with a cache than
    without.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch; `topk` is run by a stable sort."""
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk) or "out" in kwargs:
            return func(*args, **kwargs)
        given = dict(zip(("input", "k", "dim", "largest", "sorted"), args, strict=False)) | kwargs
        dim = given.get("dim", -1)
        found = torch.sort(given["input"], dim=dim, descending=given.get("largest", True), stable=True)
        return torch.return_types.topk((found[0].narrow(dim, 0, given["k"]), found[1].narrow(dim, 0, given["k"])))


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run in eval mode, without gradients and with nothing compiled; each module's training flag is put back."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True


def attempt(run: Callable[[], _T], otherwise: Callable[[Exception], _T]) -> _T:
    """Return what `run` returns; if it raises an error, return what `otherwise` makes of the error.

    A model may raise any error.

    Raises:
        torch.OutOfMemoryError: as it is: it is no property of the model.
    """
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001
        return otherwise(error)


def logits_at_once(
    model: PreTrainedModel, inputs: dict[str, Tensor], num_columns: int = NUM_COLUMNS - NUM_CACHED
) -> Tensor:
    """Return the logits of the last columns, of one forward without a cache: [R, num_columns, vocabulary]."""
    return last_logits(model(**inputs, use_cache=False), num_columns)


def continue_behind(
    model: PreTrainedModel, inputs: dict[str, Tensor], cache: Any, *, one_by_one: bool = False
) -> Tensor:
    """Return the logits of the last 8 columns with the first `NUM_CACHED` in the cache: [R, 8, vocabulary].

    Args:
        one_by_one: run each of the 8 columns in a forward of its own.

    Raises:
        ValueError: the cache holds another number of columns than were passed.
    """
    run_columns(model, inputs, cache, 0, NUM_CACHED)
    if any(map(has_keys, cache.layers)) and cache.get_seq_length() != NUM_CACHED:
        raise ValueError(f"after {NUM_CACHED} tokens its cache holds {cache.get_seq_length()}")
    spans = pairwise(range(NUM_CACHED, NUM_COLUMNS + 1, 1 if one_by_one else NUM_COLUMNS - NUM_CACHED))
    return torch.cat([last_logits(run_columns(model, inputs, cache, *span), span[1] - span[0]) for span in spans], 1)


def run_columns(
    model: PreTrainedModel, inputs: dict[str, Tensor], cache: Any, start: int, stop: int, **options: Any
) -> Any:
    """Run a forward of the columns `[start, stop)`, after those that the cache holds; return its output.

    Args:
        options: other arguments of the forward.
    """
    argument = cache_argument(model)
    wants_new_columns = argument == "cache_params" and isinstance(cache, DynamicCache)  # a cache of ours cuts the mask
    mask_begins = start if wants_new_columns else 0
    columns = {
        name: value[:, mask_begins if name == "attention_mask" else start : stop] for name, value in inputs.items()
    }
    return model(**columns, **present_cache(model, {**options, argument: cache, "use_cache": True}))


def behind_padding(row: dict[str, Tensor], num_pads: int) -> dict[str, Tensor]:
    """Return the same row with `num_pads` columns of padding before it."""
    return {name: torch.nn.functional.pad(value, (num_pads, 0)) for name, value in row.items()}


class _OfAnyDtype(DynamicCache):
    """`_OfAnyDtype` is transformers' cache; its layers may be given rows in a finer dtype than the model's."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Update a layer as transformers does, in the dtypes of what is new."""
        if layer_idx < len(self.layers):
            hold_as(self.layers[layer_idx], key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def hold_as(layer: Any, key_states: Tensor, value_states: Tensor) -> None:
    """Convert what a layer of transformers holds to the dtypes of what it is about to get.

    A pool may have held it in finer dtypes. Under autocast it stays as it is, as in a `DynamicCache`: attention casts
    what it reads. But fp64 is always converted, because autocast does not cast it.
    """
    for name, new in (("keys", key_states), ("values", value_states)):
        held = getattr(layer, name, None)
        if held is None or held.dtype == new.dtype:
            continue
        if held.dtype == torch.float64 or not torch.is_autocast_enabled(new.device.type):
            setattr(layer, name, held.to(new.dtype))


def dynamic_cache(model: PreTrainedModel) -> DynamicCache:
    """Make the cache that transformers makes. It grows where the model has more layers than its config names."""
    cache = _OfAnyDtype(config=model.config)
    cache.layer_class_to_replicate = DynamicLayer
    return cache


def distance(reference: Tensor, logits: Tensor) -> float:
    """Return the largest difference where the reference is finite, as a share of its scale; infinite if one is NaN."""
    return float(distances(reference, logits).max())


def distances(reference: Tensor, logits: Tensor) -> Tensor:
    """Return the largest difference of each column, as a share of the reference's scale.

    The scale is the largest finite number of the whole reference, or 1 if that number is 0.
    """
    finite = reference.isfinite()
    known = reference.where(finite, 0).double()
    differences = (logits - known).where(finite, 0).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return differences.amax(-1) / (float(known.abs().max()) or 1.0)


def tolerance(model: PreTrainedModel, seen: Iterable[torch.dtype]) -> float:
    """Return how far rounding may move logits between forwards of other lengths, as a share of their scale.

    Args:
        seen: dtypes that logits were computed in.
    """
    return max(MIN_TOLERANCE, _TOLERANCE_IN_EPS * eps_computed_in(model, seen))


def trial_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Make ids of no special tokens, their mask and, where the model takes them, positions: [2, 24] each."""
    config = model.config.get_text_config(decoder=True)
    named = [value for part in (model.config, config) for name, value in vars(part).items() if "token" in name]
    special = [token for value in named for token in (value if isinstance(value, list) else [value])]
    known = range(min(int(config.vocab_size), 512))
    plain = [token for token in known[3:] if token not in special] or list(known)
    numbers = [plain[(7 * i * i + 3 * i) % len(plain)] for i in range(2 * NUM_COLUMNS)]
    ids = torch.tensor(numbers, device="cpu").view(2, NUM_COLUMNS)
    mask = torch.ones_like(ids)
    pad = getattr(config, "pad_token_id", None)
    ids[1, :NUM_PADS] = pad if isinstance(pad, int) and pad >= 0 else 0
    mask[1, :NUM_PADS] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if takes(model, "position_ids"):
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp_(min=0)
    return {name: value.to(input_device(model)) for name, value in inputs.items()}


def first_row(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the first row alone."""
    return {name: value[:1] for name, value in inputs.items()}


def last_logits(output: Any, num_columns: int) -> Tensor:
    """Return the logits of the last columns, in float32 on the CPU: [R, columns, vocabulary]."""
    logits: Tensor = output.logits[:, -num_columns:]
    return logits.float().cpu()


def measure_layers(model: PreTrainedModel) -> dict[int, tuple[torch.device, int]]:
    """Return layer index -> (device of its keys and values, their bytes for one token)."""
    held = [[*streams_of(layer).values()] for layer in layers_after_a_token(model)]
    return {at: (keys[0].device, sum(tensor.nbytes for tensor in keys)) for at, keys in enumerate(held) if keys}


def measure_bytes_per_token(model: PreTrainedModel, shares: Mapping[int, float] = MappingProxyType({})) -> float:
    """Return the bytes of keys and values of one token in all layers.

    Args:
        shares: layer index -> part of the layer's bytes that counts; other layers count whole.
    """
    return sum(shares.get(index, 1) * num_bytes for index, (_, num_bytes) in measure_layers(model).items())


def measure_states(model: PreTrainedModel) -> StateSizes | None:
    """Return the sizes of the model's states; None for a model without any."""
    if not any(map(has_state, cache_layers(model))):
        return None
    carriers = [layer for layer in layers_after_a_token(model) if has_state(layer)]
    inputs = [state for layer in carriers for state in states_of(layer, "conv_states")]
    others = [state for layer in carriers for state in states_of(layer, "recurrent_states")]
    width = max((state.shape[-1] for state in inputs), default=0)
    return StateSizes(sum(state.nbytes for state in inputs + others), width, not others)


def layers_after_a_token(model: PreTrainedModel) -> Sequence[Any]:
    """Return the layers of a `DynamicCache` after a forward of one token."""
    cache = dynamic_cache(model)
    with undisturbed(model):
        run_columns(
            model, {"input_ids": torch.zeros((1, 1), dtype=torch.int64, device=input_device(model))}, cache, 0, 1
        )
    return cache.layers
