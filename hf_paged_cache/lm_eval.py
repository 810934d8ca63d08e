"""Registers models of lm-evaluation-harness on a prefix cache, when it is imported: `hf-paged`, `hf-paged-multimodal`.

They give what `hf` and `hf-multimodal` give. This module owns the order and the batches of requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.hf_vlms import HFMultimodalLM
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from .ask.scoring import Tokens, may_score_together, score_contexts
from .cache import PagedPrefixCache
from .errors import CacheArgumentError
from .every_generate import every_generate
from .model.trial import measure_bytes_per_token
from .store.memory_budget import free_bytes
from .store_options import StoreOptions, store_options

_OF_FREE_MEMORY = 4  # rows take at most one part in so many of the free memory; blocks and forwards need the rest
_NUM_BATCHES = 8  # batches of generation given to the harness at a time; it orders them by length
_Item = TypeVar("_Item")

Request = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, or None; token ids of context and continuation


@register_model("hf-paged")
class PagedHFLM(HFLM):  # type: ignore[misc]
    """`PagedHFLM` is the harness's HF model on a prefix cache: what requests have in common is computed once.

    It takes the options of `HFLM` and of a `PrefixStore`. Under `hf-paged-cache run` it uses the program's store of its
    model, whose options are given to `run`. Batch size "auto" means as many rows as `max_batch_size` and the free
    memory allow, without trying.

    Raises:
        UnsupportedModelError: the model's keys and values cannot be reused; `--model hf` runs it.
        CacheArgumentError: an option is refused, such as `backend="seq2seq"`, or processes share the weights of one
            model (FSDP).
    """

    def __init__(self, pretrained: Any, **options: Any) -> None:
        sizes: Any = {name: options.pop(name) for name in StoreOptions._fields if name in options}
        store_options(**sizes)
        super().__init__(pretrained, **options)
        if self.backend != "causal":
            raise CacheArgumentError(f"hf-paged is for causal models: the backend is {self.backend}; use --model hf")
        every = every_generate()
        if every is not None and sizes:
            given = ", ".join(sizes)
            raise CacheArgumentError(f"{given} cannot be given here: the store is that of hf-paged-cache run")
        self.cache = PagedPrefixCache(self.model, **sizes) if every is None else every.cache_of(self.model)
        if self.world_size > 1 and self.cache.store.fingerprint.rank_groups:
            raise CacheArgumentError(
                "processes share this model's weights and get requests of their own, so each would run another number "
                "of forwards; use --model hf, or accelerate without FSDP"
            )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate as the harness does, with prompts that begin alike one after the other."""
        order = sorted(range(len(requests)), key=lambda i: requests[i].args[0])
        answers = [""] * len(requests)
        with self.cache:
            for some in _runs(order, _NUM_BATCHES * self._num_rows()):
                given = super().generate_until([requests[i] for i in some], disable_tqdm=disable_tqdm)
                for i, answer in zip(some, given, strict=True):
                    answers[i] = answer
        return answers

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Score requests: each context runs once, its continuations after it, and several contexts in a batch."""
        of_context: dict[Tokens, list[int]] = {}  # context, as it is cut for a continuation -> numbers of its requests
        for number, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise CacheArgumentError(
                    f"a continuation has {len(continuation)} tokens; the model takes 1 to {self.max_length}"
                )
            first = max(0, len(context) + len(continuation) - self.max_length - 1)  # the last token is not run
            of_context.setdefault(tuple(context[first:]), []).append(number)
        contexts = sorted(of_context)
        answers = [(0.0, False)] * len(requests)
        size, is_mixed = override_bs or self._num_rows(), self.mixed_precision_dtype is not None
        bar = tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")
        for some in _runs(contexts, size if may_score_together(self.cache) else 1):
            wanted = [(context, [tuple(requests[i][2]) for i in of_context[context]]) for context in some]
            numbers = [i for context in some for i in of_context[context]]
            with torch.autocast(self.device.type, self.mixed_precision_dtype, enabled=is_mixed):
                scores = score_contexts(self.cache, wanted, batch_size=size, dtype=self.softmax_dtype)
            for i, score in zip(numbers, scores, strict=True):
                answers[i] = answer = (score.total, score.is_greedy)
                if (texts := requests[i][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answer)
            bar.update(len(numbers))
        bar.close()
        return answers

    def _num_rows(self) -> int:
        return int(self._detect_batch_size() if self.batch_size == "auto" else self.batch_size)

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        """Return how many rows of the longest prompt a part of the free memory holds; none is tried."""
        num_bytes = max(1, self.max_length * measure_bytes_per_token(self.model))
        return max(1, min(int(self.max_batch_size), int(free_bytes(self.device) // (_OF_FREE_MEMORY * num_bytes))))


@register_model("hf-paged-multimodal")
class PagedHFMultimodalLM(PagedHFLM, HFMultimodalLM):  # type: ignore[misc]
    """`PagedHFMultimodalLM` is the harness's model for prompts with images on a prefix cache.

    Arguments and errors are those of `PagedHFLM`, with the options of `HFMultimodalLM`, which takes no batch size
    "auto".
    """


def _runs(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    return (items[first : first + size] for first in range(0, len(items), size))
