"""What the lines of a case call, beside the library and transformers."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerFast

from hf_paged_cache import CacheArgumentError, PagedPrefixCache
from tests.conformance.image_zoo import prompt as prompt
from tests.conformance.image_zoo import tiny as tiny
from tests.differential.kinds import VOCABULARY
from tests.internals import (
    failing_modules,
    make_forwards_cheap,
    make_pools_grow,
    make_snapshots_frequent,
    split_everywhere,
)
from tests.promise.test_interrupted_calls import Interrupter
from tests.reference import AtStep
from tests.reference import run as run

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def forbid(n: int) -> Processor:
    """No token that is a multiple of `n` is generated."""
    return lambda ids, scores: scores.index_fill(-1, torch.arange(0, scores.shape[-1], n), -torch.inf)


def jitter(seed: int) -> Processor:
    """Moves scores by some rounding errors: where tokens change by that, two were as good as equal."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)

    def moved(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        finite = scores[torch.isfinite(scores)]
        size = 3e-6 * float(finite.abs().max()) if len(finite) else 0.0
        return scores + size * torch.randn(scores.shape, generator=generator)

    return moved


def stop_at(n: int) -> Callable[..., torch.Tensor]:
    """A row ends at a token that is a multiple of `n`."""
    return lambda ids, scores, **_: ids[:, -1] % n == 0


class During(AtStep):
    """At step `at` of a call another one is made."""

    def __init__(self, at: int, call: Callable[[], Any]) -> None:
        self.inner: dict[str, Any] = {"size": 0}

        super().__init__(at + 1, lambda: self.inner.update(call()))


class FaultError(Exception):
    """Raised on purpose, in the middle of a call."""


def fail() -> None:
    raise FaultError


def dying(model: PreTrainedModel, at: int) -> AbstractContextManager[None]:
    """At its call number `at` a layer's module is interrupted."""
    return failing_modules(
        [part for part in model.modules() if hasattr(part, "layer_idx")], at + 1, KeyboardInterrupt()
    )


def fails(model: PreTrainedModel, at: int, where: str, *args: Any, **options: Any) -> None:
    """A generate that is ended at call number `at` of a "step" or a "layer"."""
    if where == "step":
        options["logits_processor"] = [AtStep(at + 1, fail)]
    with contextlib.suppress(FaultError, KeyboardInterrupt), dying(model, at) if where == "layer" else nullcontext():
        model.generate(*args, **options)


def interrupted(deed: Callable[[], Any], at: int) -> None:
    """Interrupt it at line `at` of those of this package that it runs, or let it end before."""
    with contextlib.suppress(KeyboardInterrupt), Interrupter(at):
        deed()
    torch.set_grad_enabled(True)  # where torch's own `no_grad` was interrupted on its way out, they are off


def make_small() -> pytest.MonkeyPatch:
    """Costs are those of short prompts, and pools begin small."""
    patch = pytest.MonkeyPatch()
    for change in (make_forwards_cheap, make_snapshots_frequent, make_pools_grow, split_everywhere):
        change(patch)
    return patch


def pin_and_fill(model: PreTrainedModel, cache: PagedPrefixCache, tokens: list[int], others: list[list[int]]) -> None:
    """What is pinned is found whatever others compute; that there is nothing to pin changes nothing."""
    with contextlib.suppress(CacheArgumentError):
        num_pinned = cache.pin(tokens)
        for other in others:
            guest = PagedPrefixCache(cache.store)
            with torch.no_grad():  # a forward, as the generate of some models takes no such prompt
                model(torch.tensor([other]), use_cache=True, **{cache_argument(model): guest})
        assert (
            cache.lookup([*tokens, 3, 3]).num_tokens >= num_pinned
        )  # one token alone some layers with a state compute otherwise


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
    outputs, end, before = [], 0, 0 if mask is None else mask.shape[1] - ids.shape[1]
    for size in sizes:
        start, end = end, end + size
        more = {cache_argument(model): cache}
        if mask is not None:
            more["attention_mask"] = mask[:, : before + end]
        if positions is not None:
            more["position_ids"] = positions[:, start:end]
        forward = torch.no_grad()(functools.partial(model, ids[:, start:end], use_cache=True, **more, **options))
        try:
            with nullcontext() if start or die is None else dying(model, die):
                output = forward()
        except KeyboardInterrupt:
            output = forward()
        outputs.append({"size": size, **output})
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


def text(model: PreTrainedModel, ids: list[int]) -> dict[str, torch.Tensor]:
    """What a forward takes for a row; positions count from 0, as in `generate`."""
    given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    if "position_ids" in inspect.signature(model.forward).parameters:
        given["position_ids"] = torch.arange(len(ids))[None]
    return given


def plain_scores(model: PreTrainedModel, rows: list[dict[str, torch.Tensor]], ends: list[list[int]]) -> list[Any]:
    """Log-probabilities of the tokens that each row ends with, by one forward without a cache."""
    with torch.no_grad():
        logits = [
            model(**row, use_cache=False).logits[0, -1 - len(ids) : -1] for row, ids in zip(rows, ends, strict=True)
        ]
    return [of.float().log_softmax(-1)[torch.arange(len(of)), ids] for of, ids in zip(logits, ends, strict=True)]


def tokenizer() -> PreTrainedTokenizerFast:
    """Every token is a letter, so that stop strings have something to look at."""
    inner = Tokenizer(models.BPE(vocab={chr(33 + i): i for i in range(VOCABULARY)}, merges=[]))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token=chr(33), eos_token=chr(35))
