"""What forwards of our own must know of a model: where their inputs go, in what mode they run, how coarsely they compute.

`generate` is given its inputs by the user; a trial, a check or a score makes its own.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel


def input_device(model: Any) -> torch.device:
    """Where a forward's token ids are made. The weights' device; the host, where these are offloaded: accelerate moves ids on."""
    device: torch.device = model.device
    return torch.device("cpu") if device.type == "meta" else device


@contextmanager
def types_of_logits(model: PreTrainedModel) -> Iterator[set[torch.dtype]]:
    """Collects the types in which forwards make their logits: accelerate's mixed precision shows nowhere else, and not in the output."""
    seen: set[torch.dtype] = set()
    head = model.get_output_embeddings()
    if head is None:
        yield seen
        return
    handle = head.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    try:
        yield seen
    finally:
        handle.remove()


def eps_computed_in(model: Any, seen: Iterable[torch.dtype] = ()) -> float:
    """The coarsest rounding of a forward now: of the weights, of what autocast makes of them, of types that were seen."""
    device_type = input_device(model).type
    dtypes = [model.dtype, *seen]
    if torch.is_autocast_enabled(device_type):
        dtypes.append(torch.get_autocast_dtype(device_type))
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def measure_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of keys and values of one token in all layers, found by a forward of one token.

    Shapes cannot be had from a config: latent attention, shared layers and mixed head sizes are not said there alike.
    """
    cache = DynamicCache()
    ids = torch.zeros((1, 1), dtype=torch.long, device=input_device(model))
    with undisturbed(model):
        model(ids, past_key_values=cache, use_cache=True)
    states = [getattr(layer, name) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in states if tensor is not None)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients, and nothing compiled; afterwards every module trains as it did."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True
