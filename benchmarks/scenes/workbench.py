"""What all scenes have in common: the model, random tokens, a long known text, and `generate` with exactly so many
tokens.

The text is prefilled once, by `DynamicCache` and by ours, as far as the scenes ask for it; they take their prefixes
from it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import PagedPrefixCache, PrefixStore

from .clock import Clock

QUESTION_TOKENS = 16
NEW_TOKENS = 8


@dataclass(frozen=True)
class Sizes:
    """How long things are, in tokens; everything follows from the usual shared prefix.

    Attributes:
        shared: of the prefix that most scenes share.
        num_questions: of the few-shot evaluation.
        num_turns: of the chat.
    """

    shared: int = 1024
    num_questions: int = 100
    num_turns: int = 8

    @property
    def long(self) -> int:
        """The longer prefix of scenes that have two."""
        return 4 * self.shared

    @property
    def lengths(self) -> list[int]:
        """From an eighth of `shared` to eight times it, doubling."""
        return [self.shared * 2**power // 8 for power in range(7)]


class Bench:
    """A model, a stream of random tokens that no two draws share, and a long text that both caches know.

    Args:
        has_bars: whether the bars count, which are for one model, dtype, kind of machine and set of sizes.
        is_quick: times do not matter: no warm-up rounds, and no garbage is collected before a call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        sizes: Sizes,
        *,
        tokenizer: Any = None,
        has_bars: bool = False,
        is_quick: bool = False,
    ) -> None:
        self.model = model
        self.sizes = sizes
        self.tokenizer = tokenizer
        self.has_bars = has_bars
        self.warmups = 0 if is_quick else 2  # rounds
        self.clock = Clock(model.device, collects_garbage=not is_quick)
        self.is_exact = model.dtype == torch.float32  # below, no cache gives the same tokens, DynamicCache included
        self.store = PrefixStore(model)  # of the text; scenes that begin with nothing have stores of their own
        self._vocabulary = model.config.get_text_config().vocab_size
        self._random = torch.Generator().manual_seed(0)
        self._text = torch.zeros((1, 0), dtype=torch.int64, device=model.device)
        self._prefilled = DynamicCache(config=model.config)  # of as much of the text as was asked for

    def tokens(self, num_rows: int, num_tokens: int) -> Tensor:
        """Random ids, [num_rows, num_tokens]; the first 100 of a vocabulary are often special and left out."""
        first = 100 if self._vocabulary > 200 else 1
        ids = torch.randint(first, self._vocabulary, (num_rows, num_tokens), generator=self._random)
        return ids.to(self.model.device)

    def text(self, num_tokens: int) -> Tensor:
        """The first tokens of the known text, [1, num_tokens]."""
        missing = num_tokens - self._text.shape[1]
        if missing > 0:
            self._text = torch.cat((self._text, self.tokens(1, missing)), dim=1)
        return self._text[:, :num_tokens]

    def behind(self, prefix: Tensor, num_rows: int) -> Tensor:
        """`prefix` (of one row, or of as many as asked for), and a fresh question behind it in each row."""
        return torch.cat((prefix.expand(num_rows, -1), self.tokens(num_rows, QUESTION_TOKENS)), dim=1)

    def prefilled(self, num_tokens: int, num_rows: int = 1) -> DynamicCache:
        """A `DynamicCache` of its own that holds the first tokens of the text, in every row."""
        held = self._prefilled.get_seq_length()
        if held < num_tokens:
            self.prefill(self.text(num_tokens), self._prefilled)
        part = copy.copy(self._prefilled)
        part.layers = [copy.copy(layer) for layer in self._prefilled.layers]
        for layer in part.layers:
            layer.keys, layer.values = (
                states[:, :, :num_tokens].expand(num_rows, -1, -1, -1).contiguous().clone()
                for states in (layer.keys, layer.values)
            )
        return part

    def knowing(self, num_tokens: int) -> PagedPrefixCache:
        """A cache of ours that has just seen the first tokens of the text."""
        cache = PagedPrefixCache(self.store)
        self.generate(self.text(num_tokens), past_key_values=cache)
        return cache

    def prefill(self, ids: Tensor, cache: DynamicCache) -> None:
        """Run what of `ids` the cache lacks through the model."""
        with torch.no_grad():
            self.model(ids[:, cache.get_seq_length() :], past_key_values=cache, logits_to_keep=1)

    def generate(self, ids: Tensor, *, new_tokens: int = 1, do_sample: bool = False, **options: Any) -> Any:
        """Exactly `new_tokens` tokens; greedy, or sampled from the same seed each time."""
        torch.manual_seed(0)
        return self.model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=do_sample,
            **options,
        )

    def bar(self, value: float) -> float | None:
        """`value`, where bars count."""
        return value if self.has_bars else None
