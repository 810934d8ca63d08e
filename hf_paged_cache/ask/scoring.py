"""Computes log-probabilities of continuations: each context runs once, and its continuations run after it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..blocks.arguments import int_of_at_least
from ..errors import CacheArgumentError
from ..integration.side_rows import row_of
from ..rows.rows import Rows
from ..stats import RowStats
from .prompts import AskedCache, AskedPrompt, asked_prompt, text_of

_MAX_LOGITS = 2**27  # most numbers in the logits of one forward, where no batch_size is given

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """`Score` says how probable a model finds one continuation of a context.

    Attributes:
        log_probs: log-probability of each token, given the context and the tokens before it; natural logarithms.
        is_greedy: True if each token was the most probable one, so greedy search would have generated just these
            tokens.
    """

    log_probs: tuple[float, ...]
    is_greedy: bool

    @property
    def total(self) -> float:
        """Log-probability of the whole continuation."""
        return math.fsum(self.log_probs)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the continuation."""
        return len(self.log_probs)


def score(
    cache: AskedCache,
    context: Tensor | Iterable[int] | Mapping[str, Any],
    continuations: Iterable[Tensor | Iterable[int]],
    *,
    batch_size: int | None = None,
    prefill_chunk_size: int | None = None,
) -> list[Score]:
    """Return a `Score` for each continuation of one context, in order: for multiple choice, reranking, rewards.

    The context is reused as far as it is known, runs once, and is stored. Where rotary frequencies depend on length
    (dynamic, longrope), each continuation runs alone, from the context's start. The number of forwards follows from the
    arguments alone, so processes that share a model stay in step.

    The scores equal the `log_softmax` of one plain forward for each continuation, of all tokens of context and
    continuation. The rows of this cache stay, also while its `generate` runs. `stats()` and `last_call` count a call
    with a row for each continuation, after the context.

    Args:
        context: token ids, [T] or [1, T], at least one; or what a processor returns, with images: such a context runs
            as `generate` runs it, and the continuations after it.
        continuations: sequences of at least one token id, [N] or [1, N]; they follow the context as they are.
        batch_size: most rows of a forward; None: as many as keep its logits below 2**27 numbers.
        prefill_chunk_size: tokens of a forward; each continuation then runs in a row of its own, and its
            log-probabilities are the same bits whatever is cached: those of the same forwards on a `DynamicCache`.

    Raises:
        CacheArgumentError: token ids are no integers, are outside the vocabulary, or are missing; nothing has changed.

    Examples:
        >>> context = tokenizer("Question: What is one and one? Answer:").input_ids
        >>> scores = cache.score(context, [tokenizer(answer).input_ids for answer in (" two", " three")])
        >>> [score.num_tokens for score in scores], all(score.total < 0 for score in scores)
        ([4, 6], True)
    """
    for name, size, what in (("batch_size", batch_size, "rows"), ("prefill_chunk_size", prefill_chunk_size, "tokens")):
        if size is not None:
            int_of_at_least(name, size, 1, f"{what} of a forward, or None")
    asked = None
    if isinstance(context, Mapping):
        asked = _prompt_of(cache, context, prefill_chunk_size)
        prompt = tuple(asked.row.token_ids)
    else:
        prompt = text_of(cache, "the context", context)
    if isinstance(continuations, str | bytes) or not isinstance(continuations, Iterable):
        raise CacheArgumentError(
            f"continuations is of type {type(continuations).__name__}; give a list of token id sequences"
        )
    wanted = [text_of(cache, f"continuation {number}", tokens) for number, tokens in enumerate(continuations)]
    if not wanted:
        return []
    return score_contexts(cache, [(prompt, wanted)], batch_size=batch_size, asked=asked, chunk_size=prefill_chunk_size)


def _prompt_of(cache: AskedCache, inputs: Mapping[str, Any], prefill_chunk_size: int | None) -> AskedPrompt:
    """Read a context that is more than token ids."""
    if prefill_chunk_size is not None:
        raise CacheArgumentError(
            "a context as a processor returns it runs in one forward; leave prefill_chunk_size out"
        )
    if cache.store.fingerprint.rope.depends_on_length:
        raise CacheArgumentError(
            "rotary frequencies of this model depend on length; give the context's token ids alone"
        )
    asked = asked_prompt(cache, "the context", inputs)
    if asked.row.shift is None:
        raise CacheArgumentError(f"at which positions tokens follow the context is not known: {asked.why_whole}")
    return asked


def may_score_together(cache: AskedCache) -> bool:
    """Return whether contexts of several lengths may run in one batch: padding on the left must have no effect."""
    return (
        cache.store.argument_reader.takes_positions
        and not cache.store.fingerprint.rope.depends_on_length
        and not cache.store.blocks.has_states
    )


def score_contexts(
    cache: AskedCache,
    wanted: Sequence[tuple[Tokens, Sequence[Tokens]]],
    *,
    batch_size: int | None,
    dtype: torch.dtype | None = torch.float32,
    asked: AskedPrompt | None = None,
    chunk_size: int | None = None,
) -> list[Score]:
    """Score the continuations of several contexts, one after the other, as one call: the contexts run in one batch.

    Args:
        wanted: contexts, each with at least one continuation; token ids of the vocabulary. More than one context is
            allowed only where `may_score_together`.
        dtype: dtype in which logits become log-probabilities; None: that of the logits.
        asked: the one context, where it is more than token ids.
        chunk_size: tokens of a forward; None: as many as there are.
    """
    cache.store.fingerprint.digest()  # reads which rope the model has now
    scorer = _Scorer(cache, wanted, dtype)
    if chunk_size is not None or cache.store.fingerprint.rope.depends_on_length:
        for number in range(len(scorer.asked)):
            scorer.run_alone(number, chunk_size)
    else:
        scorer.run_after_contexts([prompt for prompt, _ in wanted], batch_size, asked)
    with cache.store.blocks.lock:
        cache._calls.counters.add_call("score", scorer.counts, scorer.peak_kv_bytes, bypassed=scorer.is_bypassed)
    return [Score(tuple(found), best) for found, best in zip(scorer.log_probs, scorer.is_greedy, strict=True)]


class _Asked(NamedTuple):
    """`_Asked` is one continuation, and the context that it follows."""

    stem: int  # number of the context
    prompt: Tokens
    tokens: Tokens


class _Scorer:
    """`_Scorer` runs the forwards of one score, and collects what is read from their logits; see `score_contexts`."""

    def __init__(
        self, cache: AskedCache, wanted: Sequence[tuple[Tokens, Sequence[Tokens]]], dtype: torch.dtype | None
    ) -> None:
        self._side, self._rope, self._dtype = cache._side_rows, cache.store.fingerprint.rope, dtype
        self._vocabulary_size = cache.store.model.config.get_text_config(decoder=True).vocab_size
        self.asked = [_Asked(stem, prompt, each) for stem, (prompt, some) in enumerate(wanted) for each in some]
        self.counts: list[RowStats] = []
        self.peak_kv_bytes, self.is_bypassed = 0, False
        self.log_probs: list[list[float]] = [[] for _ in self.asked]
        self.is_greedy = [True] * len(self.asked)

    def run_alone(self, number: int, chunk_size: int | None) -> None:
        """Run one continuation in a row of its own, from the context's start, and read its logits."""
        _, prompt, tokens = self.asked[number]
        with self._rope.put_back():
            if chunk_size is None:  # frequencies depend on length: the last token runs, as it counts in the length
                rows = self._side.begin("score")
                logits = self._side.run(rows, [row_of(prompt + tokens)], num_logits=1 + len(tokens))
                rows.calls.close(rows)
            else:
                logits, rows = self._side.run_chunks(row_of(prompt + tokens[:-1]), chunk_size, len(tokens))
        self._read(rows, logits, [(0, column, number, token) for column, token in enumerate(tokens)])
        (count,) = rows.state.counts
        self.counts.append(count)
        most = self.counts[0].matched_tokens  # later rows find what the first one has computed
        count.reused_tokens, count.matched_tokens = min(count.reused_tokens, most), min(count.matched_tokens, most)

    def run_after_contexts(self, prompts: Sequence[Tokens], batch_size: int | None, asked: AskedPrompt | None) -> None:
        """Run the contexts in one batch, and after them all continuations; see `score_contexts`."""
        pads = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
        if asked is None:
            stems = self._side.begin("score")
            rows = [row_of(prompt, pad) for prompt, pad in zip(prompts, pads, strict=True)]
            logits = self._side.run(stems, rows)
            stems.calls.close(stems)
        else:
            logits, stems = self._side.generate(asked.inputs or {})
        self._read(stems, logits, [(each.stem, 0, number, each.tokens[0]) for number, each in enumerate(self.asked)])
        computed = [count.computed_tokens for count in stems.state.counts]
        for stem, prompt, tokens in self.asked:  # a context is computed for the first of its continuations
            count = replace(stems.state.counts[stem], prompt_tokens=len(prompt) + len(tokens) - 1)
            count.computed_tokens, computed[stem] = computed[stem], 0
            self.counts.append(count)
        shift = 0 if asked is None else asked.row.shift
        waiting = [number for number, each in enumerate(self.asked) if len(each.tokens) > 1]
        waiting.sort(key=lambda number: len(self.asked[number].tokens), reverse=True)
        while waiting:
            num_new = len(self.asked[waiting[0]].tokens) - 1
            size = batch_size or max(1, _MAX_LOGITS // self._vocabulary_size // num_new)
            some, waiting = waiting[:size], waiting[size:]
            branches = [self.asked[number] for number in some]
            tails = [row_of(branch.tokens[:-1], pads[branch.stem], shift) for branch in branches]
            forked = stems.calls.fork(stems, [branch.stem for branch in branches])
            logits = self._side.run(forked, tails, num_logits=num_new)
            stems.calls.close(forked)
            readings = []
            for row, (number, branch) in enumerate(zip(some, branches, strict=True)):
                self.counts[number].computed_tokens += len(branch.tokens) - 1
                readings += [(row, column, number, token) for column, token in enumerate(branch.tokens[1:])]
            self._read(forked, logits, readings)

    def _read(self, rows: Rows, logits: Tensor, readings: Sequence[tuple[int, int, int, int]]) -> None:
        """Read the log-probabilities that rows have computed, of a continuation in the order of its tokens.

        Args:
            readings: row and column of the logits, number of the continuation, and token.
        """
        self.peak_kv_bytes = max(self.peak_kv_bytes, rows.state.peak_kv_bytes)
        self.is_bypassed = self.is_bypassed or rows.why_bypassed is not None
        row, column, _, token = torch.tensor(readings, device=logits.device).unbind(1)
        chosen = logits.log_softmax(dim=-1, dtype=self._dtype)[row, column, token].float()
        is_best = logits.argmax(dim=-1)[row, column] == token
        for (_, _, number, _), log_prob, best in zip(readings, chosen.tolist(), is_best.tolist(), strict=True):
            self.log_probs[number].append(log_prob)
            self.is_greedy[number] &= best
