"""Reads a prompt that a user asks about: token ids, or what a processor returns, with what fills the placeholders."""

from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..blocks import RootFacts
from ..errors import CacheArgumentError, CacheBusyError
from ..integration.calls import Calls, Current
from ..integration.side_rows import SideRows
from ..integration.token_input import one_sequence
from ..prefix_store import PrefixStore
from ..rows.request import RowInput


class AskedCache(Protocol):
    """`AskedCache` is what the modules of this folder see of a `PagedPrefixCache`, whose methods they have."""

    store: PrefixStore
    cache_salt: bytes
    _calls: Calls
    _current: Current
    _side_rows: SideRows


class AskedPrompt(NamedTuple):
    """`AskedPrompt` is one prompt that a user asks about."""

    row: RowInput  # what a call of this prompt alone brings, with the names of its images and its root
    inputs: Mapping[str, Any] | None = None  # the prompt as `generate` takes it; None: it was token ids alone
    why_whole: str | None = None  # why nothing of the prompt may be reused or kept


def text_of(cache: AskedCache, what: str, given: Any) -> tuple[int, ...]:
    """Return the token ids of a text; CacheArgumentError: there are none, or some are no text of this model."""
    tokens, size = one_sequence(what, given), cache.store.model.config.get_text_config(decoder=True).vocab_size
    if not tokens:
        raise CacheArgumentError(f"{what} is empty; give at least one token (a context may be the model's first token)")
    wrong = next((token for token in tokens if not 0 <= token < size), None)
    if wrong is not None:
        raise CacheArgumentError(f"{what} has token {wrong}; the vocabulary has ids 0 to {size - 1}")
    if why := cache.store.image_inputs.why_no_text(tokens):
        raise CacheArgumentError(f"{what} {why}")
    return tokens


def asked_prompt(cache: AskedCache, what: str, given: Any) -> AskedPrompt:
    """Read a prompt under the model's conditions of now; no forward runs.

    Args:
        what: the argument's name, for messages.
        given: token ids of a text, [T] or [1, T]; or a mapping with `input_ids` and whatever else `generate` is passed.

    Raises:
        CacheArgumentError: the prompt is something else, or has several rows, or padding.
        CacheBusyError: rotary frequencies depend on length, and a call is running.
    """
    fingerprint, blocks, regime = cache.store.fingerprint, cache.store.blocks, b""
    inputs = given if isinstance(given, Mapping) else {"input_ids": given}
    if "input_ids" not in inputs:
        raise CacheArgumentError(f"{what} has {', '.join(map(str, inputs)) or 'nothing'}; give it with its input_ids")
    ids, is_plain = inputs["input_ids"], not inputs.keys() - {"input_ids", "attention_mask"}
    is_text = is_plain and (inputs is not given or not cache.store.image_inputs.kinds)
    tokens = array("q", text_of(cache, what, ids) if is_text else one_sequence(what, ids))
    mask = inputs.get("attention_mask")
    if mask is not None and 0 in one_sequence(f"the attention_mask of {what}", mask):
        raise CacheArgumentError(f"{what} has padding; give one row without it")
    digest = fingerprint.digest()
    if fingerprint.rope.depends_on_length:
        with blocks.lock:
            if blocks.running:  # asking would change their frequencies
                raise CacheBusyError("rotary frequencies of this model depend on length; wait until no call is running")
            with fingerprint.rope.put_back():
                regime = fingerprint.rope.at(max(0, len(tokens) - 1))
    why_whole = cache._calls.why_in_general()
    if is_text:
        root = fingerprint.roots.of(RootFacts(digest, cache.cache_salt, regime))
        return AskedPrompt(RowInput(tokens, 0, 0, root, salt=cache.cache_salt), why_whole=why_whole)
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        raise CacheArgumentError(f'{what} has input_ids that are no tensor of [1, T]; pass return_tensors="pt"')
    with fingerprint.rope.put_back():
        request = cache._side_rows.request_of(inputs)
    (row,) = request.rows
    return AskedPrompt(row, inputs, request.bypass or why_whole)
