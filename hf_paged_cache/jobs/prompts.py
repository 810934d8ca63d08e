"""The prompts of a file or a list as token ids, as `generate_all` runs them."""

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from os import PathLike
from textwrap import shorten
from typing import Any

from transformers import PreTrainedModel

from ..blocks.arguments import int_of_at_least
from ..errors import CacheArgumentError
from ..model.placeholders import Placeholders
from ..model.support import unwrapped
from ..wording import counted
from .order import num_shared_tokens
from .pictures import FIRST_NAME, ChatTokens, chat_tokens, has_images, with_images
from .rows import Prompt, Row, RowError, opened, prompt_of

_CHUNK = 1000  # prompts that are tokenized at a time


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts as token ids, in the order given.

    Attributes:
        token_ids: of each prompt, special tokens included.
        num_tokens: of all prompts.
        num_shared_tokens: of these, those that another prompt begins with, too, in whole blocks: what a cache with room for all of
            them reuses.

    Examples:
        >>> prompts = read_prompts(["What is one and one?"] * 2, tokenizer, block_size=4)
        >>> len(prompts.token_ids), prompts.num_shared_tokens <= prompts.num_tokens
        (2, True)
    """

    token_ids: "list[array[int]]"
    num_tokens: int
    num_shared_tokens: int


def read_prompts(
    prompts: "str | PathLike[str] | Iterable[str | list[dict[str, Any]] | Row]",
    tokenizer: Any,
    *,
    column: str = "prompt",
    block_size: int = 16,
    model: PreTrainedModel | None = None,
    max_new_tokens: int = 1,
) -> Prompts:
    """Read prompts and count what they share, before anything runs: see `generate_all` for what is read.

    Args:
        block_size: tokens of a block, which is shared whole.
        model: refuse prompts that it has no positions for, with `max_new_tokens` after them, or no embeddings; None: do not look.

    Raises:
        CacheArgumentError: no prompts, or one that cannot be used, with its row.

    Examples:
        >>> shared = "Question: What is one and one?\\nAnswer: Two.\\n"
        >>> found = read_prompts([shared + "What is ice?", shared + "What is snow?"], tokenizer, model=model)
        >>> len(found.token_ids), found.num_tokens, found.num_shared_tokens
        (2, 113, 48)
    """
    int_of_at_least("block_size", block_size, 1, "tokens of a block")
    with opened(prompts, column) as rows:
        if not len(rows):
            raise CacheArgumentError("there are no prompts")
        token_ids = list(tokenized(rows, column, tokenizer))
    if model is not None:
        require_positions(unwrapped(model).config, token_ids, max_new_tokens)
    return Prompts(token_ids, sum(map(len, token_ids)), num_shared_tokens(token_ids, block_size=block_size))


def tokenized(
    rows: Sequence[Row],
    column: str,
    tokenizer: Any,
    *,
    image_column: str | None = None,
    placeholders: Collection[int] = (),
) -> "Iterator[array[int]]":
    """Token ids of each row's prompt: of a text with the tokenizer's special tokens, of a chat with its template's.

    Args:
        tokenizer: or a processor, which a chat with images needs.
        image_column: of a row, what images its text asks about.
        placeholders: the model's; see `pictures`.

    Raises:
        CacheArgumentError: a chat, and the tokenizer has no template for it; or images, and there is no processor.
        RowError: a row has no prompt, or one that makes no tokens.
    """
    words = getattr(tokenizer, "tokenizer", tokenizer)
    templates = tokenizer if getattr(tokenizer, "chat_template", None) is not None else words
    for start in range(0, len(rows), _CHUNK):
        numbers = range(start, min(start + _CHUNK, len(rows)))
        prompts = [
            with_images(prompt_of(rows[number], number, column), image_column and rows[number].get(image_column))
            for number in numbers
        ]
        texts = [
            "" if has_images(prompt) else _text(number, prompt, templates)
            for number, prompt in zip(numbers, prompts, strict=True)
        ]
        found: list[Sequence[int]] = []
        for (is_text, are_pictures), same in groupby(zip(prompts, texts, strict=True), _kind):
            if are_pictures:
                first = start + len(found)
                found += [_chat_tokens(n, tokenizer, chat, placeholders) for n, (chat, _) in enumerate(same, first)]
            else:
                found += words([text for _, text in same], add_special_tokens=is_text)["input_ids"]
        for number, ids in zip(numbers, found, strict=True):
            if not ids:
                raise RowError(number, f"the tokenizer makes no token of its {column!r}; leave it out")
            yield ids if isinstance(ids, ChatTokens) else array("i", ids)


def _kind(pair: tuple[Prompt, str]) -> tuple[bool, bool]:
    return isinstance(pair[0], str), has_images(pair[0])


def _chat_tokens(number: int, processor: Any, chat: Any, placeholders: Collection[int]) -> ChatTokens:
    if not hasattr(processor, "tokenizer"):
        raise CacheArgumentError(
            "there are images among the prompts: give the model's processor (AutoProcessor) in place of its tokenizer"
        )
    try:
        return chat_tokens(processor, chat, placeholders)
    except Exception as error:  # a file that is no picture, a template that knows no images
        said = shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
        raise RowError(number, f"the processor cannot take its images ({said})") from error


def _text(number: int, prompt: Prompt, tokenizer: Any) -> str:
    text = prompt
    if not isinstance(prompt, str):
        if getattr(tokenizer, "chat_template", None) is None:
            raise CacheArgumentError("there are chats among the prompts, and the tokenizer has no chat template")
        try:
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # of the template: a role that it knows not, a variable that is not there
            said = shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")
            raise RowError(number, f"the chat template cannot be filled with it ({said})") from error
    try:
        str(text).encode()
    except UnicodeEncodeError as error:
        raise RowError(number, f"its prompt is no text ({error})") from error
    return str(text)


def require_positions(config: Any, tokens: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Refuse prompts with tokens or lengths that a model of this config has no embedding or position for.

    Raises:
        CacheArgumentError: naming the first.
    """
    config = config.get_text_config(decoder=True)
    highest = max((id_ for each in map(set, tokens) for id_ in each if id_ < FIRST_NAME), default=0)
    if highest >= config.vocab_size:
        raise CacheArgumentError(
            f"the tokenizer gives token {highest}, and the model has none: the two do not belong together"
        )
    limit = _num_positions(config)
    too_long = [n for n, each in enumerate(tokens) if limit and len(each) + max_new_tokens - 1 > limit]
    if too_long:
        first = too_long[0]
        others = f", and so do {counted(len(too_long) - 1, 'prompt')} after it" if len(too_long) > 1 else ""
        raise RowError(
            first,
            f"its {counted(len(tokens[first]), 'token')} and {counted(max_new_tokens, 'new token')} need more than the "
            f"model's {limit} positions{others}: shorten or remove it, or give fewer new tokens (max_new_tokens)",
        )


def require_text(placeholders: Placeholders, tokens: Sequence[Sequence[int]]) -> None:
    """Refuse placeholders that nothing fills: of chats with images they have names.

    Raises:
        CacheArgumentError: naming the first.
    """
    for number, each in enumerate(tokens):
        if why := placeholders.why_no_text(each):
            raise RowError(number, f"its prompt {why}")


def _num_positions(config: Any) -> int:
    """Positions of a model, those included that its rotary embedding is stretched over; 0: without a limit."""
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int):
        return 0
    rope = getattr(config, "rope_parameters", None) or {}
    factor = rope.get("factor") if isinstance(rope, Mapping) else None
    if not isinstance(factor, int | float):
        return limit
    return max(limit, int((rope.get("original_max_position_embeddings") or limit) * factor))
