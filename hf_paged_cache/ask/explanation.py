"""Says what is known of a prompt, and why no more. Changes nothing.

`cache.lookup` gives numbers; `cache.explain` gives words, with the text round the place where the known part stops.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..blocks.hashing import bytes_of
from ..blocks.image_tokens import num_common, said_image, shown_ids
from ..blocks.tokens import TokenIds
from ..call.find import PreviousRow, previous_rows
from ..call.look_up import Found, continuation, look_up
from ..errors import CacheArgumentError
from ..wording import counted
from .prompts import AskedCache, AskedPrompt, asked_prompt

_NUM_SHOWN = 16  # tokens that are shown before the place where prompts part, and after it


class Lookup(NamedTuple):
    """`Lookup` says what `cache.lookup` has found of a prompt.

    Attributes:
        num_tokens: number of known tokens, which a call would show as `last_call.rows[i].matched_tokens`.
        num_blocks: number of full blocks of known tokens.
        stopped: why no more tokens are known, in the words of `last_call.rows[i].stopped`.
        tier: place of the known blocks that lie furthest from the model: "device" is the pool; a call loads blocks from
            "host" or "disk"; None: no token is known.

    Examples:
        >>> _ = cache.prefill(inputs["input_ids"])
        >>> found = cache.lookup(inputs["input_ids"])
        >>> found.num_tokens == 16 * found.num_blocks, found.tier
        (True, 'device')
    """

    num_tokens: int
    num_blocks: int
    stopped: str
    tier: str | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """`Explanation` says what `cache.explain` has found of a prompt. `print` shows it in a few lines.

    Attributes:
        num_tokens: number of tokens of the prompt.
        num_known: number of tokens that a call of this prompt would find now; the last token is computed in any case.
        stopped: why no more tokens are known.
        parts_at: first token at which the prompt differs from the closest cached prompt; `num_tokens` where the prompt
            is the beginning of that one; `num_known` where no cached prompt continues.
        before: the prompt before that token.
        after: the prompt from that token on; empty where the prompt ends there.
        cached: how the closest cached prompt continues from that token on, within its block; None: no cached prompt
            does.
        advice: probable reason; empty where nothing can be said.

    Examples:
        >>> _ = cache.prefill(inputs["input_ids"])
        >>> other = inputs["input_ids"][0].tolist()
        >>> other[20] += 1
        >>> why = cache.explain(other, tokenizer)
        >>> why.num_known, why.parts_at
        (16, 20)
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
        num_computed = max(1, self.num_tokens - self.num_known)
        percent = 100 * self.num_known // max(1, self.num_tokens)
        lines = [
            f"{self.num_known:,} of {self.num_tokens:,} tokens are known ({percent}%); "
            f"{num_computed:,} would be computed",
            f"why no more: {self.stopped}",
        ]
        if self.cached is not None and self.parts_at == self.num_tokens:
            lines += [
                f"the prompt ends at token {self.num_tokens:,}, after   {self.before!r}",
                f"  what is cached continues with   {self.cached!r}",
            ]
        elif self.cached is not None:
            lines += [
                f"from token {self.parts_at} on they part, after   {self.before!r}",
                f"  the prompt continues with   {self.after!r}",
                f"  what is cached with       {self.cached!r}",
            ]
        if self.advice:
            lines.append(self.advice)
        return "\n".join(lines)


def lookup(cache: AskedCache, token_ids: "list[int] | Tensor | Mapping[str, Any]") -> Lookup:
    """Say how much of a prompt a `generate` on this cache would find now, and why no more.

    The store and the last call's rows are looked at. The answer is for a call of this prompt alone, without padding,
    that has room: in a tight pool a call may resume from less, to fit. Any call computes at least one token. While a
    call runs on this cache, only the blocks that this call has committed count.

    Effects: none; nothing is computed, held or made more recent.

    Args:
        token_ids: token ids of the whole prompt, special tokens included: a list or tensor of [T] or [1, T]; or what a
            processor returns, with images.

    Raises:
        CacheArgumentError: `token_ids` are not the token ids of one sequence.
        CacheBusyError: rotary frequencies depend on length, and a call is running.

    Examples:
        >>> cache.lookup(inputs["input_ids"]).stopped
        'no cached block has these first 16 tokens under the same conditions'
        >>> cache.prefill(inputs["input_ids"]).num_tokens, cache.lookup(inputs["input_ids"]).num_tokens
        (80, 80)
    """
    return _look_up(cache, asked_prompt(cache, "the prompt", token_ids), previous_rows(cache._current.rows))


def _look_up(cache: AskedCache, asked: AskedPrompt, last: Sequence[PreviousRow]) -> Lookup:
    blocks = cache.store.blocks
    num_needed = 2 if blocks.states.rules.clamps_one_token and len(asked.row.token_ids) > 1 else 1
    with blocks.lock:
        blocks.settle()
        found = Found(0, asked.why_whole or "")
        if not asked.why_whole:
            found = look_up(blocks, asked.row, last, num_needed)
    tier = found.tier or ("device" if found.num_tokens else None)
    return Lookup(found.num_tokens, found.num_tokens // blocks.block_size, found.stopped, tier)


def explain(
    cache: AskedCache, token_ids: "list[int] | Tensor | Mapping[str, Any]", tokenizer: Any = None
) -> Explanation:
    """Explain how much of a prompt a `generate` on this cache would reuse now, up to which token, and why no more.

    `print` the answer. It is that of `lookup`, and how the closest cached prompt of this `cache_salt` continues from
    there.

    Effects: none.  Cost: hashes the tokens of each cached block, 1 us a block.

    Args:
        token_ids: token ids of the whole prompt, special tokens included: a list or tensor of [T] or [1, T]; or what a
            processor returns, with images.
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
    if not tokens:
        raise CacheArgumentError("the prompt has no tokens, so there is nothing to explain; give at least one")
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise CacheArgumentError(f"tokenizer is of type {type(tokenizer).__name__}; give the model's, or None")
    last = previous_rows(cache._current.rows)
    found = _look_up(cache, asked, last)
    with blocks.lock:
        blocks.settle()
        goes_on = continuation(blocks, asked.row, found.num_tokens, last)
        first = bytes_of(tokens[: blocks.block_size])
        is_elsewhere = not found.num_tokens and any(
            block_hash.token_bytes == first for block_hash in blocks.allocator.hashes(cache.cache_salt).values()
        )
    num_agreed = num_common(goes_on, tokens[found.num_tokens :])
    parts_at = found.num_tokens + num_agreed
    rest = goes_on[num_agreed : num_agreed + _NUM_SHOWN]
    return Explanation(
        num_tokens=len(tokens),
        num_known=found.num_tokens,
        stopped=found.stopped,
        parts_at=parts_at,
        before=_shown(tokens[max(0, parts_at - _NUM_SHOWN) : parts_at], tokenizer),
        after=_shown(tokens[parts_at : parts_at + _NUM_SHOWN], tokenizer),
        cached=_shown(rest, tokenizer) if rest else None,
        advice=_advice(tokens, found.num_tokens, parts_at, is_elsewhere=is_elsewhere),
    )


def _advice(tokens: TokenIds, num_known: int, parts_at: int, *, is_elsewhere: bool) -> str:
    """Say the probable reason why no more is known; "" where nothing can be said.

    Args:
        parts_at: first token at which the prompt differs from the closest cached prompt.
        is_elsewhere: whether nothing is known, though a cached block has the prompt's first tokens.
    """
    if is_elsewhere:
        return (
            "its first tokens are cached, but after others, as without a special token at the beginning, or under "
            "other conditions: another adapter, other weights or settings, "
            "or padding before them where the model counts columns"
        )
    if image := said_image(tokens, parts_at, parts_at + 1):
        return f"{image} is another one, or stands otherwise, than what is cached there"
    if not num_known < parts_at < len(tokens):
        return ""
    agreed = counted(parts_at - num_known, "token")
    is_computed = "is" if parts_at - num_known == 1 else "are"
    return (
        f"blocks are shared whole, so {agreed} from token {num_known} on that the two have in common {is_computed} "
        "computed, too"
    )


def _shown(tokens: "array[int]", tokenizer: Any) -> str:
    """Return tokens as text; without a tokenizer, as ids. An image is shown by its placeholders."""
    tokens = shown_ids(tokens)
    if tokenizer is None:
        return " ".join(map(str, tokens))
    return str(tokenizer.decode(tokens.tolist(), skip_special_tokens=False))
