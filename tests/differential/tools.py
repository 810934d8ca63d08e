"""What the lines of a case call, beside the library and transformers."""

import contextlib
import inspect
from typing import Any

import torch
from transformers import Cache, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerFast, StoppingCriteria

from tests.differential.kinds import VOCABULARY

__all__ = [
    "Fault",
    "Forbid",
    "Jitter",
    "StopAt",
    "TakeFault",
    "fails",
    "pieces",
    "plain_scores",
    "tokenizer",
    "with_gradients",
]


class Forbid(LogitsProcessor):
    """No token that is a multiple of `n` is generated."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, :: self.n] = -torch.inf
        return scores


class Jitter(LogitsProcessor):
    """Moves scores by some rounding errors: where tokens change by that, two were as good as equal."""

    def __init__(self, seed: int) -> None:
        self.random = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        finite = torch.isfinite(scores)
        size = 3e-6 * float(scores[finite].abs().max()) if bool(finite.any()) else 0.0
        return scores + size * torch.randn(scores.shape, generator=self.random)


class StopAt(StoppingCriteria):
    """A row ends at a token that is a multiple of `n`."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % self.n == 0


class Fault(Exception):  # noqa: N818 -- it is no error of anybody's
    """Raised on purpose, in the middle of a call."""


class TakeFault(LogitsProcessor):
    """Raises at its call number `at`."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise Fault
        return scores


def fails(function: Any, *args: Any, at: int, **options: Any) -> None:
    """Call `function`, a generate, and let it raise at token `at`."""
    with contextlib.suppress(Fault):
        function(*args, logits_processor=[TakeFault(at)], **options)


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which a forward takes a cache."""
    return "past_key_values" if "past_key_values" in inspect.signature(model.forward).parameters else "cache_params"


def pieces(
    model: PreTrainedModel,
    cache: Cache,
    ids: torch.Tensor,
    sizes: list[int],
    mask: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    **options: Any,
) -> list[Any]:
    """Forward `ids` on `cache` in pieces of `sizes`; `mask` covers what the cache holds, too."""
    outputs, start = [], 0
    before = 0 if mask is None else mask.shape[1] - ids.shape[1]
    with torch.no_grad():
        for size in sizes:
            end = start + size
            more = {} if mask is None else {"attention_mask": mask[:, : before + end]}
            if positions is not None:
                more["position_ids"] = positions[:, start:end]
            more[cache_argument(model)] = cache
            output = model(ids[:, start:end], use_cache=True, **more, **options)
            outputs.append({"size": size, **output})
            start = end
    return outputs


def with_gradients(model: PreTrainedModel, ids: torch.Tensor, cache: Cache, **options: Any) -> dict[str, Any]:
    """A forward with its loss, and the gradients of all weights."""
    model.zero_grad()
    with torch.enable_grad():
        output = model(ids, labels=ids, **{cache_argument(model): cache}, **options)
        output.loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return {"logits": output.logits.detach(), "loss": output.loss.detach(), "gradients": gradients}


def plain_scores(model: PreTrainedModel, context: list[int], continuations: list[list[int]]) -> list[Any]:
    """Log-probabilities by one forward for each continuation, without a cache; positions count from 0, as in `generate`."""
    scores, takes_positions = [], "position_ids" in inspect.signature(model.forward).parameters
    for continuation in continuations:
        ids = torch.tensor([context + continuation])
        positions = {"position_ids": torch.arange(ids.shape[1])[None]} if takes_positions else {}
        with torch.no_grad():
            logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False, **positions).logits
        logits = logits[0, len(context) - 1 : -1]
        chosen = torch.tensor(continuation)
        scores.append(logits.float().log_softmax(-1)[torch.arange(len(chosen)), chosen])
    return scores


def tokenizer() -> PreTrainedTokenizerFast:
    """Every token is a letter, so that stop strings have something to look at."""
    from tokenizers import Tokenizer, decoders, models

    inner = Tokenizer(models.BPE(vocab={chr(33 + i): i for i in range(VOCABULARY)}, merges=[]))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=chr(33), eos_token=chr(35))
