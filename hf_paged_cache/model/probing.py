"""Runs short forwards of our own, with a cache and without: owns their inputs, and how far rounding goes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .layer_streams import hold_as, streams_of
from .own_cache import presented
from .support import cache_argument, has_keys, takes

NUM_COLUMNS = 24
NUM_CACHED = 16
NUM_SINGLE = 4  # columns that run each in a forward of its own
MIN_TOLERANCE = 1e-3  # a share of the logits' scale; attention to later tokens makes 0.04 and more
NUM_PADS = 5  # columns of padding of the second row
_TOLERANCE_IN_EPS = 16  # a bfloat16 forward of another length differs by some per cent


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


@contextmanager
def undisturbed(model: Any) -> Iterator[set[torch.dtype]]:
    """Run in eval mode, without gradients and with nothing compiled; each module's training flag is put back.

    Yields:
        the dtypes in which logits are computed. accelerate's mixed precision converts its outputs back to float32, so
        only the head shows them.
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


def logits_at_once(
    model: PreTrainedModel, inputs: dict[str, Tensor], num_columns: int = NUM_COLUMNS - NUM_CACHED
) -> Tensor:
    """Return the logits of the last columns, of one forward without a cache: [R, num_columns, vocabulary]."""
    return last_logits(model(**inputs, use_cache=False), num_columns)


def continue_behind(
    model: PreTrainedModel,
    inputs: dict[str, Tensor],
    cache: Any,
    num_cached: int = NUM_CACHED,
    step: int = NUM_COLUMNS - NUM_CACHED,
) -> Tensor:
    """Return the logits of the other columns with the first `num_cached` in the cache: [R, columns, vocabulary].

    Args:
        step: number of columns of each forward after the first.

    Raises:
        ValueError: the cache holds another number of columns than were passed.
    """
    run_columns(model, inputs, cache, 0, num_cached)
    if any(map(has_keys, cache.layers)) and cache.get_seq_length() != num_cached:
        raise ValueError(f"after {num_cached} tokens its cache holds {cache.get_seq_length()}")
    spans = pairwise(range(num_cached, NUM_COLUMNS + 1, step))
    return torch.cat([last_logits(run_columns(model, inputs, cache, *span), step) for span in spans], 1)


def run_columns(
    model: PreTrainedModel, inputs: dict[str, Tensor], cache: Any, start: int, stop: int, **options: Any
) -> Any:
    """Run a forward of the columns `[start, stop)`, after those that the cache holds; return its output."""
    argument = cache_argument(model)
    wants_new_columns = argument == "cache_params" and isinstance(cache, DynamicCache)  # a cache of ours cuts the mask
    mask_begins = start if wants_new_columns else 0
    columns = {
        name: value[:, mask_begins if name == "attention_mask" else start : stop] for name, value in inputs.items()
    }
    return model(**columns, **options, **{argument: presented(model, cache), "use_cache": True})


class _OfAnyDtype(DynamicCache):
    """`_OfAnyDtype` is transformers' cache; its layers may be given rows in a finer dtype than the model's."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Update a layer in the dtypes of what is new. Under autocast, attention casts what it reads."""
        if layer_idx < len(self.layers) and not torch.is_autocast_enabled(key_states.device.type):
            hold_as(self.layers[layer_idx], key_states.dtype, value_states.dtype)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def dynamic_cache(model: PreTrainedModel) -> DynamicCache:
    """Make the cache that transformers makes. It grows where the model has more layers than its config names."""
    cache = _OfAnyDtype(config=model.config)
    cache.layer_class_to_replicate = DynamicLayer
    return cache


def distance(reference: Tensor, logits: Tensor) -> float:
    """Return the largest difference of `distances`; infinite if one is NaN."""
    return float(distances(reference, logits).max())


def distances(reference: Tensor, logits: Tensor) -> Tensor:
    """Return the largest difference of each column, as a share of the reference's largest finite number, or of 1."""
    finite = reference.isfinite()
    known = reference.where(finite, 0).double()
    differences = (logits - known).where(finite, 0).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    return differences.amax(-1) / (float(known.abs().max()) or 1.0)


def tolerance(model: PreTrainedModel, seen: Iterable[torch.dtype]) -> float:
    """Return how far rounding may move logits between forwards of other lengths, as a share of their scale."""
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


def last_logits(output: Any, num_columns: int) -> Tensor:
    """Return the logits of the last columns, in float32 on the CPU: [R, columns, vocabulary]."""
    logits: Tensor = output.logits[:, -num_columns:]
    return logits.float().cpu()


def measure_layers(model: PreTrainedModel) -> dict[int, tuple[torch.device, int]]:
    """Return layer index -> (device of its keys and values, their bytes for one token)."""
    held = [[*streams_of(layer).values()] for layer in layers_after_a_token(model)]
    return {at: (keys[0].device, sum(tensor.nbytes for tensor in keys)) for at, keys in enumerate(held) if keys}


def measure_bytes_per_token(model: PreTrainedModel, shares: Mapping[int, float] = MappingProxyType({})) -> float:
    """Return the bytes of keys and values of one token in all layers; of a layer in `shares`, this part counts."""
    return sum(shares.get(index, 1) * num_bytes for index, (_, num_bytes) in measure_layers(model).items())


def layers_after_a_token(model: PreTrainedModel) -> Sequence[Any]:
    """Return the layers of a `DynamicCache` after a forward of one token."""
    cache, ids = dynamic_cache(model), torch.zeros((1, 1), dtype=torch.int64, device=input_device(model))
    with undisturbed(model):
        run_columns(model, {"input_ids": ids}, cache, 0, 1)
    return cache.layers
