"""Says what is known of a prompt (`cache.lookup`), and where it parts from what is cached (`cache.explain`)."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..blocks.image_tokens import num_common, said_image, shown_ids
from ..call.find import PreviousRow, continuation, known_of, previous_rows, why_stopped
from ..errors import CacheArgumentError
from ..store import tier_load
from ..wording import counted
from .prompts import AskedCache, AskedPrompt, asked_prompt

_NUM_SHOWN = 16  # tokens that are shown before the place where prompts part, and after it
_ELSEWHERE = (
    "its first tokens are cached, but after others, as without a special token at the beginning, or under "
    "other conditions: another adapter, other weights or settings, "
    "or padding before them where the model counts columns"
)


class Lookup(NamedTuple):
    """`Lookup` says what `cache.lookup` has found of a prompt.

    Attributes:
        num_tokens: known tokens, which a call would show as `last_call.rows[i].matched_tokens`.
        num_blocks: full blocks of known tokens.
        stopped: why no more tokens are known, in the words of `last_call.rows[i].stopped`.
        tier: where the known blocks lie that lie furthest from the model: in the pool ("device"), or on "host" or
            "disk", from which a call loads them; None: no token is known.
    """

    num_tokens: int
    num_blocks: int
    stopped: str
    tier: str | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """`Explanation` says what `cache.explain` has found of a prompt. `print` shows it in a few lines.

    Attributes:
        num_tokens: tokens of the prompt.
        num_known: tokens that a call of this prompt would find now; the last token is computed in any case.
        stopped: why no more tokens are known.
        parts_at: first token at which the prompt differs from the closest cached prompt; `num_tokens` where the prompt
            is the beginning of that one; `num_known` where no cached prompt continues.
        before, after: the prompt before that token, and from it on.
        cached: how the closest cached prompt continues from that token on, within its block; None: no cached prompt
            does.
        advice: probable reason; empty where nothing can be said.
    """

    num_tokens: int
    num_known: int
    stopped: str
    parts_at: int
    before: str
    after: str
    cached: str | None = None
    advice: str = ""

    def __str__(self) -> str:
        num_known, num_tokens = self.num_known, self.num_tokens
        said = (
            f"{num_known:,} of {num_tokens:,} tokens are known ({100 * num_known // num_tokens}%); "
            f"{max(1, num_tokens - num_known):,} would be computed\nwhy no more: {self.stopped}"
        )
        if self.cached is not None and self.parts_at == num_tokens:
            said += f"\nthe prompt ends at token {num_tokens:,}, after   {self.before!r}"
            said += f"\n  what is cached continues with   {self.cached!r}"
        elif self.cached is not None:
            said += f"\nfrom token {self.parts_at} on they part, after   {self.before!r}"
            said += f"\n  the prompt continues with   {self.after!r}"
            said += f"\n  what is cached with       {self.cached!r}"
        return f"{said}\n{self.advice}" if self.advice else said


def lookup(cache: AskedCache, token_ids: "list[int] | Tensor | Mapping[str, Any]") -> Lookup:
    """Say how much of a prompt a `generate` on this cache would find now, and why no more.

    The answer is for a call of this prompt alone, without padding. Any call computes at least one token. While a call
    runs on this cache, only the blocks that it has committed count. Nothing is computed, held or made more recent.

    Args:
        token_ids: token ids of the whole prompt, special tokens included: a list or tensor of [T] or [1, T]; or what a
            processor returns, with images.

    Raises:
        CacheArgumentError: `token_ids` are not token ids of one sequence, lie outside the vocabulary, are missing, or
            stand for images that are not given.
        CacheBusyError: rotary frequencies depend on length, and a call is running.

    Examples:
        >>> cache.lookup(inputs["input_ids"]).stopped
        'no cached block has these first 16 tokens under the same conditions'
        >>> cache.prefill(inputs["input_ids"]).num_tokens, cache.lookup(inputs["input_ids"]).num_tokens
        (80, 80)
    """
    return _look_up(cache, asked_prompt(cache, "the prompt", token_ids), previous_rows(cache._current.rows))


def _look_up(cache: AskedCache, asked: AskedPrompt, last: Sequence[PreviousRow]) -> Lookup:
    if asked.why_whole:
        return Lookup(0, 0, asked.why_whole, None)
    blocks, row = cache.store.blocks, asked.row
    size = blocks.block_size
    num_needed = 2 if blocks.rules.clamps_one_token and len(row.token_ids) > 1 else 1
    most = max(0, len(row.token_ids) - num_needed)  # the last tokens run in any case
    with blocks.lock:
        blocks.settle()
        known = known_of(blocks, row, {}, last, most if blocks.groups else None, leases=False)
        below = tier_load.look_up(blocks, tier_load.Wanted(row.root, row.salt, row.token_ids, most))
    num_tokens, stopped, tier = known.num_found, known.stopped, "device" if known.num_found else None
    if below is not None and below[0] > num_tokens:
        num_tokens, tier = below
        stopped = why_stopped(num_tokens, row.token_ids, size, None)
    return Lookup(num_tokens, num_tokens // size, stopped, tier)


def explain(
    cache: AskedCache, token_ids: "list[int] | Tensor | Mapping[str, Any]", tokenizer: Any = None
) -> Explanation:
    """Explain how much of a prompt a `generate` on this cache would reuse now, up to which token, and why no more.

    `print` it: it is what `lookup` says, and how the closest cached prompt of this `cache_salt` continues from there.

    Args:
        token_ids: see `lookup`.
        tokenizer: shows tokens as text; None: as token ids.

    Raises:
        CacheArgumentError, CacheBusyError: see `lookup`.

    Examples:
        >>> text = "Answer in one word. What is ice? "
        >>> cache.prefill(tokenizer(text + "And what is a fire?").input_ids).num_computed
        48
        >>> print(cache.explain(tokenizer(text + "And what is snow?").input_ids, tokenizer))
        32 of 50 tokens are known (64%); 18 would be computed
        why no more: no cached block continues with tokens 32 to 47
        from token 45 on they part, after   'ce? And what is '
          the prompt continues with   'snow?'
          what is cached with       'a f'
        blocks are shared whole, so 13 tokens from token 32 on that the two have in common are computed, too
    """
    asked, blocks = asked_prompt(cache, "the prompt", token_ids), cache.store.blocks
    tokens = asked.row.token_ids
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise CacheArgumentError(f"tokenizer is of type {type(tokenizer).__name__}; give the model's, or None")
    last = previous_rows(cache._current.rows)
    found = _look_up(cache, asked, last)
    with blocks.lock:
        goes_on = continuation(blocks, asked.row, found.num_tokens, last)
        hashes = blocks.allocator.hashes(cache.cache_salt).values()
    num_agreed = num_common(goes_on, tokens[found.num_tokens :])
    parts_at = found.num_tokens + num_agreed
    advice, first = "", tokens[: blocks.block_size].tobytes()
    if not found.num_tokens and any(block_hash.token_bytes == first for block_hash in hashes):
        advice = _ELSEWHERE
    elif image := said_image(tokens, parts_at, parts_at + 1):
        advice = f"{image} is another one, or stands otherwise, than what is cached there"
    elif num_agreed and parts_at < len(tokens):
        advice = (
            f"blocks are shared whole, so {counted(num_agreed, 'token')} from token {found.num_tokens} on that the two "
            f"have in common {'is' if num_agreed == 1 else 'are'} computed, too"
        )
    return Explanation(
        num_tokens=len(tokens),
        num_known=found.num_tokens,
        stopped=found.stopped,
        parts_at=parts_at,
        before=_shown(tokens[max(0, parts_at - _NUM_SHOWN) : parts_at], tokenizer),
        after=_shown(tokens[parts_at : parts_at + _NUM_SHOWN], tokenizer),
        cached=_shown(goes_on[num_agreed : num_agreed + _NUM_SHOWN], tokenizer) if goes_on[num_agreed:] else None,
        advice=advice,
    )


def _shown(tokens: "array[int]", tokenizer: Any) -> str:
    """Return tokens as text; without a tokenizer, as ids. An image is shown by its placeholders."""
    tokens = shown_ids(tokens)
    if tokenizer is None:
        return " ".join(map(str, tokens))
    return str(tokenizer.decode(tokens.tolist(), skip_special_tokens=False))
