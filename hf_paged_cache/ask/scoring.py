"""Computes log-probabilities of continuations: each context runs once, and so does what its continuations share.

Owns which tokens run in which forward. Every forward runs on a sibling cache, so no rows of the cache are touched. The
number of forwards follows from the arguments alone, never from what is cached, so processes that share a model's
weights stay in step.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..blocks.arguments import int_of_at_least
from ..call.request import RowInput
from ..errors import CacheArgumentError
from ..integration.side_rows import SideRows, row_of
from ..integration.token_input import in_vocabulary
from ..model.support import takes
from ..rows.rows import Rows
from ..stats import RowCount
from .asked import AskedCache
from .prompts import asked_prompt

_MAX_LOGITS = 2**27  # most numbers in the logits of one forward, where no batch_size is given

Tokens = tuple[int, ...]
_Row = TypeVar("_Row")


@dataclass(frozen=True, slots=True)
class Score:
    """`Score` says how probable a model finds one continuation of a context.

    Attributes:
        log_probs: log-probability of each token, given the context and the tokens before it; natural logarithms.
        is_greedy: True if each token was the most probable one, so greedy search would have generated just these
            tokens.

    Examples:
        >>> ids = inputs["input_ids"][0].tolist()
        >>> (score,) = cache.score(ids[:-2], [ids[-2:]])
        >>> score.num_tokens, score.total < 0
        (2, True)
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


class Reading(NamedTuple):
    """`Reading` is one log-probability to read from a forward's logits.

    The readings of a continuation come in the order of its tokens.
    """

    row: int
    column: int  # column of the logits that are kept; the first is 0
    continuation: int
    token: int


class Branches(NamedTuple):
    """`Branches` is one forward of several rows that follow contexts."""

    rows: list[Tokens]
    readings: list[Reading]
    stems: list[int]  # row -> number of the context that the row follows


class Plan(NamedTuple):
    """`Plan` says what runs.

    First runs a row for each context, with the tokens that all its continuations begin with (its trunk). Then the
    branches run after the trunks, each in a row of its own.
    """

    trunks: list[Tokens]  # number of a context -> the tokens that run with it
    readings: list[Reading]
    branches: list[Branches]


def score(
    cache: AskedCache,
    context: Tensor | Iterable[int] | Mapping[str, Any],
    continuations: Iterable[Tensor | Iterable[int]],
    *,
    batch_size: int | None = None,
    prefill_chunk_size: int | None = None,
) -> list[Score]:
    """Return the log-probabilities of many continuations of one context: for multiple choice, reranking, rewards.

    The context is reused from the store as far as it is known, runs once, and is stored. What all continuations have in
    common runs with the context. A continuation that is the beginning of another one runs with that one. Where rotary
    frequencies depend on length (dynamic, longrope), only continuations of one length run together. The number of
    forwards follows from the arguments alone. No gradients are computed.

    The scores equal the `log_softmax` of one plain forward for each continuation, of all tokens of context and
    continuation, at positions that count from 0, as in `generate`, on the model as it is when the call begins.

    Effects: none on the rows of this cache, also while its `generate` runs, and none on rotary frequencies. `stats()`
    counts a call with a row for each continuation, after the context, and `last_call` shows it, unless a `generate`
    runs.

    Args:
        context: token ids, [T] or [1, T], at least one; or what a processor returns, with images: such a context runs
            as `generate` runs it, and the continuations after it.
        continuations: sequences of at least one token id, [N] or [1, N]; they follow the context as they are.
        batch_size: most rows of a forward; None: as many as keep its logits below 2**27 numbers.
        prefill_chunk_size: tokens of a forward; each continuation then runs in a row of its own, from the context's
            start. So its log-probabilities are the same bits whatever is cached: those of the same forwards on a
            `DynamicCache`.

    Returns:
        a `Score` for each continuation, in order.

    Raises:
        CacheArgumentError: token ids are no integers, are outside the vocabulary, or are missing; nothing has changed.

    Examples:
        >>> context = tokenizer("Question: What is one and one? Answer:").input_ids
        >>> scores = cache.score(context, [tokenizer(answer).input_ids for answer in (" two", " three")])
        >>> [score.num_tokens for score in scores], all(score.total < 0 for score in scores)
        ([4, 6], True)
    """
    inputs, shift = context if isinstance(context, Mapping) else None, 0
    if inputs is None:
        prompt = in_vocabulary("the context", context, _vocabulary_size(cache))
        cache.store.placeholders.require_text("the context", prompt)
    else:
        prompt, shift = _prompt_of(cache, inputs, prefill_chunk_size)
    wanted = _continuations(cache, continuations)
    if batch_size is not None:
        int_of_at_least("batch_size", batch_size, 1, "rows of a forward, or None")
    if prefill_chunk_size is not None:
        int_of_at_least("prefill_chunk_size", prefill_chunk_size, 1, "tokens of a forward, or None")
    if not wanted:
        return []
    if prefill_chunk_size is None:
        return score_contexts(cache, [(prompt, wanted)], batch_size=batch_size, inputs=inputs, shift=shift)[0]
    return _score_in_chunks(cache, prompt, wanted, prefill_chunk_size)


def _continuations(cache: AskedCache, given: Iterable[Tensor | Iterable[int]]) -> list[Tokens]:
    """Return the token ids of continuations.

    Raises:
        CacheArgumentError: token ids are no integers, are outside the vocabulary, or are missing.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise CacheArgumentError(f"continuations is of type {type(given).__name__}; give a list of token id sequences")
    vocabulary_size = _vocabulary_size(cache)
    wanted = [in_vocabulary(f"continuation {i}", tokens, vocabulary_size) for i, tokens in enumerate(given)]
    for number, tokens in enumerate(wanted):
        cache.store.placeholders.require_text(f"continuation {number}", tokens)
    return wanted


def _score_in_chunks(cache: AskedCache, prompt: Tokens, wanted: Sequence[Tokens], chunk_size: int) -> list[Score]:
    """Score continuations that each run in a row of its own, in forwards of so many tokens."""
    cache.store.conditioning.digest()  # reads which rope the model has now
    rope = cache.store.conditioning.rope
    num_tokens = [len(prompt) + len(tokens) - (not rope.depends_on_length) for tokens in wanted]
    scorer = _Scorer(cache._side_rows, num_tokens, torch.float32)
    for number, tokens in enumerate(wanted):
        with rope.put_back():
            scorer.run_chunks(number, prompt, tokens, chunk_size)
    with cache.store.blocks.lock:
        cache._counters.add_call("score", scorer.counts, scorer.peak_kv_bytes, bypassed=scorer.is_bypassed)
    return scorer.scores()


def _prompt_of(cache: AskedCache, inputs: Mapping[str, Any], prefill_chunk_size: int | None) -> tuple[Tokens, int]:
    """Return the tokens of a context that is more than token ids, and how far its images move later positions.

    Raises:
        CacheArgumentError: such a context cannot be scored so; the error says why.
    """
    if prefill_chunk_size is not None:
        raise CacheArgumentError(
            "a context as a processor returns it runs in one forward; leave prefill_chunk_size out"
        )
    if cache.store.conditioning.rope.depends_on_length:
        raise CacheArgumentError(
            "rotary frequencies of this model depend on length; give the context's token ids alone"
        )
    asked = asked_prompt(cache, "the context", inputs)
    if asked.row.shift is None:
        raise CacheArgumentError(f"at which positions tokens follow the context is not known: {asked.why_whole}")
    return tuple(asked.token_ids), asked.row.shift


def may_score_together(cache: AskedCache) -> bool:
    """Return whether contexts of several lengths may run in one batch: padding on the left must have no effect."""
    return (
        cache._side_rows.takes_positions
        and not cache.store.conditioning.rope.depends_on_length
        and not cache.store.blocks.states
    )


def score_contexts(
    cache: AskedCache,
    wanted: Sequence[tuple[Tokens, Sequence[Tokens]]],
    *,
    batch_size: int | None,
    dtype: torch.dtype | None = torch.float32,
    inputs: Mapping[str, Any] | None = None,
    shift: int = 0,
) -> list[list[Score]]:
    """Score the continuations of several contexts as one call: the contexts run in one batch.

    Args:
        wanted: contexts, each with at least one continuation; token ids of the vocabulary. More than one context is
            allowed only where `may_score_together`.
        dtype: dtype in which logits become log-probabilities; None: that of the logits.
        inputs: what a processor returned for the one context, where it is more than token ids.
        shift: how far the images of that context move later positions.
    """
    cache.store.conditioning.digest()  # reads which rope the model has now
    side, rope = cache._side_rows, cache.store.conditioning.rope
    max_tokens = max(1, _MAX_LOGITS // _vocabulary_size(cache))
    lengths = [[len(prompt) + len(tokens) for tokens in continuations] for prompt, continuations in wanted]
    # where frequencies depend on length, a row also runs its last token, and shares nothing
    scorer = _Scorer(side, [length - (not rope.depends_on_length) for of_one in lengths for length in of_one], dtype)
    if rope.depends_on_length:
        ((prompt, continuations),) = wanted
        for rows, readings, _ in plan_by_length(continuations, batch_size=batch_size, max_tokens=max_tokens):
            with rope.put_back():
                inputs_of_rows = [row_of(prompt + row) for row in rows]
                whole = side.begin("score")
                scorer.run(whole, inputs_of_rows, readings, [0] * len(rows), num_logits=1 + len(rows[0]))
                side.close(whole)
    else:
        can_keep = takes(side.model, "logits_to_keep") and inputs is None
        trunks, of_trunks, branches = plan(
            [continuations for _, continuations in wanted],
            batch_size=batch_size,
            max_tokens=max_tokens,
            share_trunk=can_keep,
        )
        stems = [prompt + trunk for (prompt, _), trunk in zip(wanted, trunks, strict=True)]
        pads = [max(map(len, stems)) - len(stem) for stem in stems]
        rows_of_stems = [row_of(stem, pad) for stem, pad in zip(stems, pads, strict=True)]
        if inputs is None:
            running = side.begin("score")
            scorer.run(running, rows_of_stems, of_trunks, range(len(stems)), num_logits=1 + max(map(len, trunks)))
            side.close(running)
        else:
            logits, running = side.generate(inputs)
            scorer.read_first(running, logits, rows_of_stems, of_trunks)
        for rows, readings, of_stems in branches:
            tails = [row_of(row, pads[stem], shift) for row, stem in zip(rows, of_stems, strict=True)]
            branch = side.fork(running, of_stems)
            scorer.run(branch, tails, readings, of_stems, num_logits=max(map(len, rows)))
            side.close(branch)
    with cache.store.blocks.lock:
        cache._counters.add_call("score", scorer.counts, scorer.peak_kv_bytes, bypassed=scorer.is_bypassed)
    scores = iter(scorer.scores())
    return [[next(scores) for _ in of_one] for of_one in lengths]


def _vocabulary_size(cache: AskedCache) -> int:
    size: int = cache.store.model.config.get_text_config(decoder=True).vocab_size
    return size


def plan(
    wanted: Sequence[Sequence[Tokens]], *, batch_size: int | None, max_tokens: int, share_trunk: bool = True
) -> Plan:
    """Plan which tokens run in which forward, so that prefixes which continuations share run as seldom as possible.

    The last token of a continuation is not run. A continuation that is the beginning of another one needs no row of its
    own. What all continuations of a context have in common runs with the context. Continuations are numbered through
    all contexts.

    Args:
        wanted: continuations of each context.
        batch_size: most rows of a forward; None: as many as have `max_tokens` tokens, or one row.
        share_trunk: whether what all continuations of a context have in common runs with the context.

    Examples:
        >>> plan([[(1, 2, 3), (1, 2, 4), (1, 5, 6)]], batch_size=None, max_tokens=100).trunks
        [(1,)]
        >>> plan([[(1, 2, 3), (1, 2, 4), (1, 5, 6)]], batch_size=None, max_tokens=100).branches[0].rows
        [(5,), (2,)]
    """
    trunks, tails, first = [], [], 0
    for stem, continuations in enumerate(wanted):
        rows = _rows(continuations, first)
        in_common = takewhile(lambda pair: pair[0] == pair[1], zip(rows[0].tokens, rows[-1].tokens, strict=False))
        num_shared = len(list(in_common)) if share_trunk else 0
        trunks.append(rows[0].tokens[:num_shared])
        tails += [
            _Tail(stem, row.tokens[num_shared:], num_shared, row.members)
            for row in rows
            if len(row.tokens) > num_shared
        ]
        first += len(continuations)
    width = max(map(len, trunks))  # all contexts end at one column
    tokens_of = [tokens for continuations in wanted for tokens in continuations]
    stem_of = [stem for stem, continuations in enumerate(wanted) for _ in continuations]
    readings = [
        Reading(stem, width - len(trunks[stem]) + column, i, token)
        for i, (stem, tokens) in enumerate(zip(stem_of, tokens_of, strict=True))
        for column, token in enumerate(tokens[: len(trunks[stem]) + 1])
    ]
    tails.sort(key=lambda tail: len(tail.tokens), reverse=True)
    branches = [
        Branches(
            [tail.tokens for tail in some],
            [
                Reading(number, column, i, token)
                for number, tail in enumerate(some)
                for i in tail.members
                for column, token in enumerate(tokens_of[i][tail.start + 1 :])
            ],
            [tail.stem for tail in some],
        )
        for some in _batches(tails, lambda tail: len(tail.tokens), batch_size, max_tokens)
    ]
    return Plan(trunks, readings, branches)


class _Tail(NamedTuple):
    """`_Tail` is a row that follows a context: the tokens of its continuations from `start` on."""

    stem: int
    tokens: Tokens
    start: int
    members: list[int]  # numbers of the continuations that the row runs


def _rows(continuations: Sequence[Tokens], first: int) -> list[_Tail]:
    """Make a row for each continuation that is not the beginning of another; the first one has the number `first`."""
    rows: list[_Tail] = []
    for run in sorted(range(len(continuations)), key=lambda i: continuations[i][:-1], reverse=True):
        tokens = continuations[run][:-1]
        # in this order, a sequence comes right after the sequences that begin with it
        if not rows or rows[-1].tokens[: len(tokens)] != tokens:
            rows.append(_Tail(0, tokens, 0, []))
        rows[-1].members.append(first + run)
    return rows


def plan_by_length(continuations: Sequence[Tokens], *, batch_size: int | None, max_tokens: int) -> list[Branches]:
    """Plan forwards of rows of one length each, all after the context; nothing is shared between lengths.

    Each continuation runs with a last token, its own or another continuation's: the token does not change the scores,
    but it counts in the length.
    """
    rows: dict[Tokens, Tokens] = {}  # all tokens but the last -> the row that is run
    members: dict[Tokens, list[int]] = {}  # row -> numbers of its continuations
    for i, tokens in enumerate(continuations):
        members.setdefault(rows.setdefault(tokens[:-1], tokens), []).append(i)
    return [
        Branches(
            some,
            [
                Reading(number, column, i, token)
                for number, row in enumerate(some)
                for i in members[row]
                for column, token in enumerate(continuations[i])
            ],
            [0] * len(some),
        )
        for _, alike in groupby(sorted(members, key=len), key=len)
        for some in _batches(list(alike), lambda row: len(row) + 1, batch_size, max_tokens)
    ]


class _Scorer:
    """`_Scorer` runs forwards, and collects what is read from their logits.

    Args:
        num_tokens: number of tokens of each continuation, with its context.
        dtype: see `score_contexts`.
    """

    def __init__(self, side: SideRows, num_tokens: Sequence[int], dtype: torch.dtype | None) -> None:
        self._side, self._dtype = side, dtype
        self.counts = [RowCount(number, stopped="") for number in num_tokens]  # counts of each continuation and context
        self.peak_kv_bytes, self.is_bypassed = 0, False
        self._found: dict[tuple[int, bytes], int] = {}  # context and root -> most tokens that the first forward found
        self._log_probs: list[list[float]] = [[] for _ in num_tokens]
        self._is_greedy = [True] * len(num_tokens)

    def scores(self) -> list[Score]:
        return [Score(tuple(log_probs), best) for log_probs, best in zip(self._log_probs, self._is_greedy, strict=True)]

    def run(
        self,
        rows: Rows,
        inputs: Sequence[RowInput],
        readings: Sequence[Reading],
        contexts: Sequence[int],
        *,
        num_logits: int,
    ) -> None:
        """Run tokens after what rows hold, and read the logits of the last columns.

        Args:
            inputs: tokens that each row runs.
            contexts: number of each row's context.
            num_logits: number of last columns whose logits are read.
        """
        begins, held = not rows.is_open, [max(0, rows.n - row.pad) for row in inputs]
        logits = self._side.run(rows, inputs, num_logits=num_logits)
        counts = rows.state.counts if begins else [RowCount(computed_tokens=len(row.token_ids)) for row in inputs]
        if begins:
            self._note_found(rows, contexts)
        self._took(rows, logits, readings, inputs, counts, held)

    def _note_found(self, rows: Rows, contexts: Sequence[int]) -> None:
        """Limit what rows count as found to what their context's first forward found: this score computed the rest."""
        keys = [(context, prompt.root) for context, prompt in zip(contexts, rows.prompts, strict=False)]
        pairs = [*zip(keys, rows.state.counts, strict=False)]
        first = {key: max(count.matched_tokens for other, count in pairs if other == key) for key in keys}
        self._found = first | self._found
        for key, count in pairs:
            count.reused_tokens = min(count.reused_tokens, self._found[key])
            count.matched_tokens = min(count.matched_tokens, self._found[key])

    def read_first(self, rows: Rows, logits: Tensor, inputs: Sequence[RowInput], readings: Sequence[Reading]) -> None:
        """Read the logits of a prompt that has just run in these rows."""
        self._took(rows, logits, readings, inputs, rows.state.counts, [0] * len(inputs))

    def _took(
        self,
        rows: Rows,
        logits: Tensor,
        readings: Sequence[Reading],
        inputs: Sequence[RowInput],
        counts: Sequence[RowCount],
        held: Sequence[int],
    ) -> None:
        self._note(rows)
        self._read(logits, readings)
        members: list[dict[int, None]] = [{} for _ in inputs]
        for read in readings:
            members[read.row][read.continuation] = None
        for count, row, of_row, num_held in zip(counts, inputs, members, held, strict=True):
            self._count(count, num_held, len(row.token_ids), [*of_row])

    def _note(self, rows: Rows) -> None:
        """Note that rows have run: their memory, and whether they were bypassed."""
        self.peak_kv_bytes = max(self.peak_kv_bytes, rows.state.peak_kv_bytes)
        self.is_bypassed = self.is_bypassed or rows.why_bypassed is not None

    def run_chunks(self, number: int, prompt: Tokens, tokens: Tokens, size: int) -> None:
        """Run one continuation after its context, in chunks from the context's start, and read its logits."""
        logits, rows = self._side.run_chunks(row_of(prompt + tokens[:-1]), size, len(tokens))
        self._note(rows)
        self._read(logits, [Reading(0, column, number, token) for column, token in enumerate(tokens)])
        (self.counts[number],) = rows.state.counts

    def _read(self, logits: Tensor, readings: Sequence[Reading]) -> None:
        index = torch.tensor([(read.row, read.column, read.token) for read in readings], device=logits.device)
        row_of, column, token = index.unbind(1)
        chosen = logits.log_softmax(dim=-1, dtype=self._dtype)[row_of, column, token].float()
        is_best = logits.argmax(dim=-1)[row_of, column] == token
        for read, log_prob, best in zip(readings, chosen.tolist(), is_best.tolist(), strict=True):
            self._log_probs[read.continuation].append(log_prob)
            self._is_greedy[read.continuation] &= best

    def _count(self, row: RowCount, num_held: int, num_tokens: int, members: Sequence[int]) -> None:
        """Count a row that ran `num_tokens` tokens after the tokens that it held.

        Computed tokens count for the first continuation that has them all; reused tokens count for each.
        """
        num_computed = min(row.computed_tokens, num_tokens)  # other tokens fill the row up
        payer = next(i for i in members if self.counts[i].prompt_tokens >= num_held + num_tokens)
        self.counts[payer].computed_tokens += num_computed
        for i in members:
            count = self.counts[i]
            count.reused_tokens += min(row.reused_tokens, num_tokens - num_computed, count.prompt_tokens - num_held)
            count.matched_tokens += min(row.matched_tokens, count.prompt_tokens - num_held)
            count.host_tokens += row.host_tokens
            count.disk_tokens += row.disk_tokens
            count.stopped = count.stopped or row.stopped


def _batches(
    rows: Sequence[_Row], length: Callable[[_Row], int], batch_size: int | None, max_tokens: int
) -> list[list[_Row]]:
    """Cut rows, the longest first, into batches that each fit into one forward."""
    batches: list[list[_Row]] = []
    for row in rows:
        limit = max(1, max_tokens // length(batches[-1][0])) if batches and batch_size is None else batch_size
        if not batches or limit is None or len(batches[-1]) >= limit:
            batches.append([])
        batches[-1].append(row)
    return batches
