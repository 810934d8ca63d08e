"""Log-probabilities of continuations of one context: the context runs once, and so does what continuations share.

Owns which tokens run in which forward; every forward runs on a further cache of the same store, so no cache's rows are
touched. How many forwards there are follows from the arguments alone, never from what is cached: processes that share a
model's weights stay in step.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .call.call import Call
from .call.call_state import CallLimits
from .errors import CacheArgumentError
from .integration.generate_arguments import GenerateArguments
from .integration.token_input import one_sequence
from .model.probing import input_device
from .model.support import takes

_MAX_LOGITS = 2**27  # numbers that the logits of one forward may have, where no batch_size is given

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """What a model says of one continuation of a context.

    Attributes:
        log_probs: of each token, given the context and the tokens before it; natural logarithms.
        is_greedy: each token was the most probable one, so greedy search would have generated just these.
    """

    log_probs: tuple[float, ...]
    is_greedy: bool

    @property
    def total(self) -> float:
        """The log-probability of the whole continuation."""
        return math.fsum(self.log_probs)

    @property
    def num_tokens(self) -> int:
        """Tokens of the continuation."""
        return len(self.log_probs)


class Scored(NamedTuple):
    """The scores, and what they cost."""

    scores: list[Score]
    prompt_tokens: int  # of all continuations, each behind the context
    computed_tokens: int


class ScoringCache(Protocol):
    """What scoring asks of a cache."""

    call: Call

    def generating(self, model: Any, given: GenerateArguments) -> AbstractContextManager[None]:
        """The span of one call."""

    def activate_past_recording(self) -> None:
        """Logits of more tokens than the last will be read."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row becomes `repeats` rows."""

    def reset(self) -> None:
        """Drop the rows."""


class Reading(NamedTuple):
    """One log-probability to be read of a forward's logits; those of a continuation come in the order of its tokens."""

    row: int
    column: int  # of the logits that are kept, the first is 0
    continuation: int
    token: int


class Branches(NamedTuple):
    """One forward of several rows."""

    rows: list[Tokens]
    readings: list[Reading]


class Plan(NamedTuple):
    """What runs: `trunk` behind the context in one row, then the branches behind that, each in a row of its own."""

    trunk: Tokens
    readings: list[Reading]
    branches: list[Branches]


def score(
    make_cache: Callable[[], ScoringCache],
    model: Any,
    context: Tensor | Iterable[int],
    continuations: Iterable[Tensor | Iterable[int]],
    *,
    batch_size: int | None,
    by_length: bool,
) -> Scored:
    """Score the continuations; see `PagedPrefixCache.score`.

    Args:
        make_cache: a further cache on the same store.
        by_length: keys and values depend on the length of the forward, so rows of other lengths share nothing.
    """
    vocabulary_size = model.config.get_text_config(decoder=True).vocab_size
    prompt = _token_ids("the context", context, vocabulary_size)
    if isinstance(continuations, str | bytes) or not isinstance(continuations, Iterable):
        raise CacheArgumentError(
            f"continuations is of type {type(continuations).__name__}; give a list of token id sequences"
        )
    wanted = [_token_ids(f"continuation {i}", given, vocabulary_size) for i, given in enumerate(continuations)]
    if batch_size is not None and (not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1):
        raise CacheArgumentError(f"batch_size is {batch_size!r}; it must be an int of at least 1 row, or None")
    if not wanted:
        return Scored([], 0, 0)
    max_tokens = max(1, _MAX_LOGITS // vocabulary_size)
    scorer = _Scorer(make_cache, model, len(wanted))
    with torch.no_grad():
        if by_length:
            for branches in plan_by_length(wanted, batch_size=batch_size, max_tokens=max_tokens):
                scorer.run_alone(prompt, branches)
        else:
            can_keep = takes(model, "logits_to_keep")
            scorer.run(prompt, plan(wanted, batch_size=batch_size, max_tokens=max_tokens, share_trunk=can_keep))
    num_tokens = sum(len(prompt) + len(tokens) - 1 for tokens in wanted)
    return Scored(scorer.scores(), num_tokens, scorer.num_computed)


def plan(continuations: Sequence[Tokens], *, batch_size: int | None, max_tokens: int, share_trunk: bool = True) -> Plan:
    """Which tokens run where, so that each prefix that continuations share runs as seldom as few forwards allow.

    The last token of a continuation is never run. One that is the beginning of another needs no row of its own, and
    what all have in common goes with the context.

    Args:
        batch_size: rows of a forward at most; None: as many as have `max_tokens` tokens, or one.
        share_trunk: False: with the context runs nothing else.
    Example:
        >>> plan([(1, 2, 3), (1, 2, 4), (1, 5, 6)], batch_size=None, max_tokens=100).trunk
        (1,)
        >>> plan([(1, 2, 3), (1, 2, 4), (1, 5, 6)], batch_size=None, max_tokens=100).branches[0].rows
        [(5,), (2,)]
    """
    rows: list[Tokens] = []
    members: dict[Tokens, list[int]] = {}
    for run in sorted(range(len(continuations)), key=lambda i: continuations[i][:-1], reverse=True):
        tokens = continuations[run][:-1]
        # in this order, a sequence comes straight behind those that it is the beginning of
        if not rows or rows[-1][: len(tokens)] != tokens:
            rows.append(tokens)
            members[tokens] = []
        members[rows[-1]].append(run)
    num_shared = _num_common(rows[0], rows[-1]) if share_trunk else 0
    readings = [
        Reading(0, column, i, token)
        for i, tokens in enumerate(continuations)
        for column, token in enumerate(tokens[: num_shared + 1])
    ]
    tails = sorted((row for row in rows if len(row) > num_shared), key=len, reverse=True)
    branches = []
    for some in _batches(tails, lambda row: len(row) - num_shared, batch_size, max_tokens):
        reads = [
            Reading(number, column, i, token)
            for number, row in enumerate(some)
            for i in members[row]
            for column, token in enumerate(continuations[i][num_shared + 1 :])
        ]
        branches.append(Branches([row[num_shared:] for row in some], reads))
    return Plan(rows[0][:num_shared], readings, branches)


def plan_by_length(continuations: Sequence[Tokens], *, batch_size: int | None, max_tokens: int) -> list[Branches]:
    """Forwards of rows of one length each, all behind the context; nothing is shared between lengths."""
    members: dict[Tokens, list[int]] = {}
    for i, tokens in enumerate(continuations):
        members.setdefault(tokens[:-1], []).append(i)
    forwards = []
    for _, rows in groupby(sorted(members, key=len), key=len):
        for some in _batches(list(rows), lambda row: len(row) + 1, batch_size, max_tokens):
            reads = [
                Reading(number, column, i, token)
                for number, row in enumerate(some)
                for i in members[row]
                for column, token in enumerate(continuations[i])
            ]
            forwards.append(Branches(some, reads))
    return forwards


class _Scorer:
    """Runs forwards and collects what is read of their logits."""

    def __init__(self, make_cache: Callable[[], ScoringCache], model: Any, num_continuations: int) -> None:
        self._make_cache = make_cache
        self._model = model
        self.num_computed = 0  # tokens
        self._takes_logits_to_keep = takes(model, "logits_to_keep")
        self._log_probs: list[list[float]] = [[] for _ in range(num_continuations)]
        self._is_greedy = [True] * num_continuations

    def scores(self) -> list[Score]:
        return [Score(tuple(log_probs), best) for log_probs, best in zip(self._log_probs, self._is_greedy, strict=True)]

    def run(self, prompt: Tokens, what: Plan) -> None:
        """The context and the trunk in one forward, then every branch behind forks of that row."""
        with ExitStack() as stack:
            stem = self._begin(stack, num_held=0, num_rows=1, num_new=len(prompt) + len(what.trunk))
            logits = self._forward(stem, [prompt + what.trunk], num_held=0, num_logits=1 + len(what.trunk))
            self._read(logits, what.readings)
            num_held = len(prompt) + len(what.trunk)
            for rows, readings in what.branches:
                num_new = max(map(len, rows))
                with ExitStack() as inner:
                    cache = self._begin(inner, num_held=num_held, num_rows=len(rows), num_new=num_new, behind=stem)
                    self._read(self._forward(cache, rows, num_held=num_held, num_logits=num_new), readings)

    def run_alone(self, prompt: Tokens, branches: Branches) -> None:
        """A forward of context and branches, which are of one length."""
        num_new = len(prompt) + len(branches.rows[0])
        with ExitStack() as stack:
            cache = self._begin(stack, num_held=0, num_rows=len(branches.rows), num_new=num_new)
            rows = [prompt + row for row in branches.rows]
            logits = self._forward(cache, rows, num_held=0, num_logits=1 + len(branches.rows[0]))
            self._read(logits, branches.readings)

    def _begin(
        self, stack: ExitStack, *, num_held: int, num_rows: int, num_new: int, behind: ScoringCache | None = None
    ) -> ScoringCache:
        """A cache whose call runs until the stack is closed; of `num_rows` forks of a cache's row, or of new rows."""
        cache = self._make_cache()
        stack.callback(cache.reset)
        if behind is not None:
            cache.call.take_over(behind.call.fork_rows(), ended=True)
            cache.batch_repeat_interleave(num_rows)
        num_columns = num_held + num_new
        given = GenerateArguments(
            limits=CallLimits(num_columns, num_columns, num_rows, frozenset()),
            only_new_tokens=behind is not None,
            cache_implementation=None,
            use_cache=True,
            is_assistant=False,
            num_masked=num_columns,
            num_given=num_new,
        )
        stack.enter_context(cache.generating(self._model, given))
        return cache

    def _forward(self, cache: ScoringCache, rows: Sequence[Tokens], *, num_held: int, num_logits: int) -> Tensor:
        """Run rows behind what the cache holds. Returns the logits of the last columns, [rows, num_logits, vocabulary].

        Shorter rows are filled up on the right, where no other token sees them, with tokens of their own; those are
        never committed.
        """
        num_new = max(map(len, rows))
        ids = torch.tensor([row + row[-1:] * (num_new - len(row)) for row in rows], device=input_device(self._model))
        arguments: dict[str, Any] = {"use_cache": True, "return_dict": True}
        if self._takes_logits_to_keep:
            arguments["logits_to_keep"] = num_logits
        elif num_logits > 1:
            cache.activate_past_recording()
        mask = torch.ones((len(rows), num_held + num_new), dtype=torch.int64, device=ids.device)
        output = self._model(input_ids=ids, attention_mask=mask, past_key_values=cache, **arguments)
        for count, row, tokens in zip(cache.call.counts.rows, cache.call.rows.in_batch(), rows, strict=True):
            self.num_computed += min(count.computed_tokens, len(tokens))
            if len(tokens) < num_new:
                row.stop_commits(num_held + len(tokens))
        logits: Tensor = output.logits[:, -num_logits:]
        return logits

    def _read(self, logits: Tensor, readings: Sequence[Reading]) -> None:
        index = torch.tensor([(read.row, read.column, read.token) for read in readings], device=logits.device)
        rows, columns, tokens = index.unbind(1)
        chosen = logits[rows, columns, tokens].float() - logits.float().logsumexp(dim=-1)[rows, columns]
        is_best = logits.argmax(dim=-1)[rows, columns] == tokens
        for read, log_prob, best in zip(readings, chosen.tolist(), is_best.tolist(), strict=True):
            self._log_probs[read.continuation].append(log_prob)
            self._is_greedy[read.continuation] &= best


def _batches(
    rows: Sequence[Tokens], length: Callable[[Tokens], int], batch_size: int | None, max_tokens: int
) -> list[list[Tokens]]:
    """Runs of rows, the longest first, that fit into one forward."""
    batches: list[list[Tokens]] = []
    for row in rows:
        limit = max(1, max_tokens // length(batches[-1][0])) if batches and batch_size is None else batch_size
        if not batches or limit is None or len(batches[-1]) >= limit:
            batches.append([])
        batches[-1].append(row)
    return batches


def _num_common(first: Tokens, second: Tokens) -> int:
    """How many tokens both start with."""
    for number, (mine, theirs) in enumerate(zip(first, second, strict=False)):
        if mine != theirs:
            return number
    return min(len(first), len(second))


def _token_ids(what: str, given: object, vocabulary_size: int) -> Tokens:
    """Token ids of the vocabulary as a tuple, or an error that says what is wrong with them."""
    ids: Tokens = one_sequence(what, given)
    if not ids:
        raise CacheArgumentError(f"{what} is empty; give at least one token (a context may be the model's first token)")
    if min(ids) < 0 or max(ids) >= vocabulary_size:
        wrong = next(token for token in ids if not 0 <= token < vocabulary_size)
        raise CacheArgumentError(f"{what} has token {wrong}; the vocabulary has ids 0 to {vocabulary_size - 1}")
    return ids
