"""What the lines of a case call, beside the library and transformers."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import Cache, LogitsProcessor, PreTrainedModel, PreTrainedTokenizerFast, StoppingCriteria

from hf_paged_cache import CacheArgumentError, OutOfBlocksError, PagedPrefixCache
from tests.differential.kinds import VOCABULARY
from tests.internals import (
    always_worth_it,
    make_forwards_cheap,
    make_pools_grow,
    make_snapshots_frequent,
    recycle_all_memory,
    split_everywhere,
)
from tests.promise.test_interrupted_calls import Interrupter

__all__ = [
    "During",
    "Forbid",
    "Jitter",
    "StopAt",
    "always_worth_it",
    "fails",
    "interrupted",
    "make_small",
    "pin_and_fill",
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


class During(LogitsProcessor):
    """At step `at` of a call another one is made. There may be no room for it."""

    def __init__(self, at: int, call: Callable[[], Any]) -> None:
        self.left, self.call = at, call
        self.inner: dict[str, Any] = {"size": 0}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == -1:
            with contextlib.suppress(OutOfBlocksError):
                self.inner |= self.call()
        return scores


class Fault(Exception):  # noqa: N818 -- it is no error of anybody's
    """Raised on purpose, in the middle of a call."""


class TakeFault(LogitsProcessor):
    """Raises at its call number `at`."""

    def __init__(self, at: int, error: type[BaseException] = Fault) -> None:
        self.left, self.error = at, error

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return scores


@contextlib.contextmanager
def dying(model: PreTrainedModel, at: int | None) -> Iterator[None]:
    """At its call number `at` a layer's module is interrupted. No hook, which would be a condition of what is reused."""
    parts = [part for part in model.modules() if hasattr(part, "layer_idx")]
    processor, kinds = TakeFault(at or 0, KeyboardInterrupt), {type(part) for part in parts if at is not None}

    def counting(call: Any) -> Any:
        def counted(module: torch.nn.Module, *args: Any, **options: Any) -> Any:
            if module in parts:
                processor(None, None)
            return call(module, *args, **options)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for kind in kinds:
            patch.setattr(kind, "__call__", counting(kind.__call__))
        yield


def fails(model: PreTrainedModel, at: int, where: str, *args: Any, **options: Any) -> None:
    """A generate that is ended at call number `at` of a "step" or a "layer"."""
    given = {"logits_processor": [TakeFault(at)]} if where == "step" else {}
    with contextlib.suppress(Fault, KeyboardInterrupt), dying(model, at if where == "layer" else None):
        model.generate(*args, **given, **options)


def interrupted(deed: Callable[[], Any], at: int) -> None:
    """Interrupt it at line `at` of those of this package that it runs, or let it end before."""
    with contextlib.suppress(KeyboardInterrupt), Interrupter(at):
        deed()
    torch.set_grad_enabled(True)  # where torch's own `no_grad` was interrupted on its way out, they are off


def make_small() -> pytest.MonkeyPatch:
    """Costs are those of short prompts, and pools and memory begin small."""
    patch = pytest.MonkeyPatch()
    for change in (make_forwards_cheap, make_snapshots_frequent, make_pools_grow, recycle_all_memory, split_everywhere):
        change(patch)
    return patch


def pin_and_fill(model: PreTrainedModel, cache: PagedPrefixCache, tokens: list[int], others: list[list[int]]) -> None:
    """What is pinned is found whatever others compute; that there is nothing to pin changes nothing."""
    with contextlib.suppress(CacheArgumentError):
        num_pinned = cache.pin(tokens)
        for other in others:
            guest = PagedPrefixCache(cache.store, on_full="bypass")
            model.generate(torch.tensor([other]), past_key_values=guest, max_new_tokens=2, do_sample=False)
        assert cache.lookup([*tokens, 3]).num_tokens >= num_pinned


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
    die: int | None = None,
    **options: Any,
) -> list[Any]:
    """Forward `ids` on `cache` in pieces of `sizes`; `mask` covers what the cache holds, too.

    With `die` the first piece is ended at that call of a layer, and then run again.
    """
    outputs, start = [], 0
    before = 0 if mask is None else mask.shape[1] - ids.shape[1]
    with torch.no_grad():
        for size in sizes:
            end = start + size
            more = {} if mask is None else {"attention_mask": mask[:, : before + end]}
            if positions is not None:
                more["position_ids"] = positions[:, start:end]
            more[cache_argument(model)] = cache
            forward = functools.partial(model, ids[:, start:end], use_cache=True, **more, **options)
            try:
                with dying(model, None if start else die):
                    output = forward()
            except KeyboardInterrupt:
                output = forward()
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
