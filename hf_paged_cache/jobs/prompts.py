"""Reads the prompts of a file or a list as token ids, as `generate_all` runs them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from ..blocks.arguments import int_of_at_least
from ..errors import CacheArgumentError
from ..wording import counted
from .order import num_shared_tokens
from .rows import Row, RowError, prompt_of, read_rows

if TYPE_CHECKING:
    from os import PathLike

    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Prompts:
    """`Prompts` holds prompts as token ids, in the order given.

    Attributes:
        token_ids: token ids of each prompt, special tokens included.
        num_tokens: number of tokens of all prompts.
        num_shared_tokens: number of these tokens that another prompt begins with, too, in whole blocks. A cache with
            room for all prompts reuses as many.

    Examples:
        >>> prompts = read_prompts(["What is one and one?"] * 2, tokenizer, block_size=4)
        >>> len(prompts.token_ids), prompts.num_shared_tokens <= prompts.num_tokens
        (2, True)
    """

    token_ids: list[array[int]]
    num_tokens: int
    num_shared_tokens: int


def read_prompts(
    prompts: str | PathLike[str] | Iterable[str | list[dict[str, Any]] | Row],
    tokenizer: Any,
    *,
    column: str = "prompt",
    block_size: int = 16,
    model: PreTrainedModel | None = None,
    max_new_tokens: int = 1,
) -> Prompts:
    """Read prompts and count what they share, before anything runs. See `generate_all` for what is read.

    Args:
        block_size: tokens of a block; blocks are shared whole.
        model: refuse prompts for which this model has no positions, with `max_new_tokens` after them, or no embeddings;
            None: do not look.

    Raises:
        CacheArgumentError: there are no prompts, or one cannot be used; the error names its row.

    Examples:
        >>> shared = "Question: What is one and one?\\nAnswer: Two.\\n"
        >>> found = read_prompts([shared + "What is ice?", shared + "What is snow?"], tokenizer, model=model)
        >>> len(found.token_ids), found.num_tokens, found.num_shared_tokens
        (2, 113, 48)
    """
    int_of_at_least("block_size", block_size, 1, "tokens of a block")
    rows = dict(enumerate(read_rows(prompts, column)))
    if not rows:
        raise CacheArgumentError("there are no prompts")
    token_ids = list(tokenized(rows, column, tokenizer))
    if model is not None:
        require_positions(model.config, dict(enumerate(token_ids)), max_new_tokens)
    return Prompts(token_ids, sum(map(len, token_ids)), num_shared_tokens(token_ids, block_size=block_size))


def tokenized(rows: Mapping[int, Row], column: str, tokenizer: Any) -> Iterator[array[int]]:
    """Yield the token ids of each row's prompt: a text gets the tokenizer's special tokens, a chat those of its template."""
    words = getattr(tokenizer, "tokenizer", tokenizer)
    templates = tokenizer if getattr(tokenizer, "chat_template", None) is not None else words
    for number, row in rows.items():
        text = prompt = prompt_of(row, number, column)
        try:
            if not isinstance(prompt, str):
                text = templates.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
            str(text).encode()  # not all tokenizers refuse what cannot be encoded
            ids = words(text, add_special_tokens=isinstance(prompt, str))["input_ids"]
        except Exception as error:  # a template is missing, or does not know a role
            said = shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
            raise RowError(number, f"the tokenizer cannot take its {column!r} ({said})") from error
        if not ids:
            raise RowError(number, f"the tokenizer makes no token of its {column!r}; leave it out")
        yield array("i", ids)


def require_positions(config: Any, tokens: Mapping[int, Sequence[int]], max_new_tokens: int) -> None:
    """Refuse prompts with tokens or lengths for which a model of this config has no embedding or position."""
    config = config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    if "factor" in (getattr(config, "rope_parameters", None) or {}):
        limit = None  # rotary embeddings are stretched over more
    for number, each in tokens.items():
        if max(each) >= config.vocab_size:
            problem = f"the tokenizer gives token {max(each)}, and the model has none"
            raise CacheArgumentError(f"{problem}: the two do not belong together")
        if limit is not None and len(each) + max_new_tokens - 1 > limit:
            lengths = f"{counted(len(each), 'token')} and {counted(max_new_tokens, 'new token')}"
            advice = "shorten or remove it, or give fewer new tokens (max_new_tokens)"
            raise RowError(number, f"its {lengths} need more than the model's {limit} positions: {advice}")
