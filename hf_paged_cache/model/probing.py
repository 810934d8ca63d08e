"""What forwards of our own (trials, checks, scores) need: the device of inputs, eval mode, the dtype in use."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


def input_device(model: Any) -> torch.device:
    """Where to put token ids: on the weights' device, or on the CPU where weights are offloaded."""
    device: torch.device = model.device
    return torch.device("cpu") if device.type == "meta" else device


@contextmanager
def types_of_logits(model: Any) -> Iterator[set[torch.dtype]]:
    """Collects the dtypes that logits are computed in.

    accelerate's mixed precision converts its outputs back to float32, so only the head shows its dtype.
    """
    seen: set[torch.dtype] = set()
    head = model.get_output_embeddings()
    with nullcontext() if head is None else head.register_forward_hook(lambda module, args, out: seen.add(out.dtype)):
        yield seen


def eps_computed_in(model: Any, seen: Iterable[torch.dtype] = ()) -> float:
    """The largest `eps` of the dtypes a forward computes in: the weights', autocast's, and those that were seen."""
    device_type = input_device(model).type
    dtypes = [model.dtype, *seen]
    if torch.is_autocast_enabled(device_type):
        dtypes.append(torch.get_autocast_dtype(device_type))
    return max(torch.finfo(dtype).eps for dtype in dtypes)


class TiesByPosition(TorchFunctionMode):
    """Of equal scores, `topk` chooses the first ones.

    torch chooses as its kernel comes upon them, which depends on how many columns a forward has: an indexer of few heads, whose
    scores are often exactly 0, would give other keys with a cache than without.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, `topk` by a stable sort."""
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk) or "out" in kwargs:
            return func(*args, **kwargs)
        given = dict(zip(("input", "k", "dim", "largest", "sorted"), args, strict=False)) | kwargs
        dim = given.get("dim", -1)
        found = torch.sort(given["input"], dim=dim, descending=given.get("largest", True), stable=True)
        return torch.return_types.topk((found[0].narrow(dim, 0, given["k"]), found[1].narrow(dim, 0, given["k"])))


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, nothing compiled; at the end each module's training flag is as before."""
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True
