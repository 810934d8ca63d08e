"""Reads a prompt that a user asks about: token ids, or what a processor returns, with what fills the placeholders."""

from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ..blocks.roots import RootFacts
from ..blocks.tokens import TokenIds
from ..call.request import RowInput
from ..errors import CacheArgumentError, CacheBusyError
from ..integration.token_input import one_sequence
from .asked import AskedCache


class AskedPrompt(NamedTuple):
    """`AskedPrompt` is one prompt that a user asks about.

    Attributes:
        row: row that a call of this prompt alone brings, with the names of its images and its root.
        inputs: the prompt as it was given, for `generate`; None: it was token ids alone.
        why_whole: why nothing of the prompt may be reused or kept; None: it may be.
    """

    row: RowInput
    inputs: Mapping[str, Any] | None = None
    why_whole: str | None = None

    @property
    def token_ids(self) -> TokenIds:
        """Token ids of the prompt: of its text, and image tokens."""
        return self.row.token_ids


def asked_prompt(cache: AskedCache, what: str, given: object) -> AskedPrompt:
    """Read a prompt under the model's conditions of now.

    Cost: with images, a SHA-256 over their pixels. No forward runs.

    Args:
        what: the argument's name, for messages.
        given: token ids, [T] or [1, T]; or a mapping with `input_ids` and whatever else `generate` is passed for them.

    Raises:
        CacheArgumentError: the prompt is something else, or has several rows, or padding.
        CacheBusyError: rotary frequencies depend on length, and a call is running.
    """
    inputs = given if isinstance(given, Mapping) else {"input_ids": given}
    if "input_ids" not in inputs:
        raise CacheArgumentError(f"{what} has {', '.join(map(str, inputs)) or 'nothing'}; give it with its input_ids")
    tokens = array("q", one_sequence(what, inputs["input_ids"]))
    mask = inputs.get("attention_mask")
    if mask is not None and any(one == 0 for one in one_sequence(f"the attention_mask of {what}", mask)):
        raise CacheArgumentError(f"{what} has padding; give one row without it")
    root = _root_of(cache, len(tokens))  # looks at the model; refuses where asking would change frequencies
    why_in_general = cache._calls.opening.asking.why_in_general()
    is_text = inputs is not given or not cache.store.placeholders
    if is_text and not inputs.keys() - {"input_ids", "attention_mask"}:
        return AskedPrompt(RowInput(tokens, 0, 0, root, salt=cache.cache_salt), why_whole=why_in_general)
    if not isinstance(inputs["input_ids"], Tensor) or inputs["input_ids"].dim() != 2:
        raise CacheArgumentError(f'{what} has input_ids that are no tensor of [1, T]; pass return_tensors="pt"')
    with cache.store.fingerprint.rope.put_back():
        request = cache._side_rows.request_of(inputs)
    (row,) = request.rows
    return AskedPrompt(row, inputs, request.bypass or why_in_general)


def _root_of(cache: AskedCache, num_tokens: int) -> bytes:
    """Return the root that a prompt of `num_tokens` tokens without padding would have now. Disturbs no call.

    Raises:
        CacheBusyError: a call is running, and its rotary frequencies would be changed.
    """
    fingerprint, blocks, regime = cache.store.fingerprint, cache.store.blocks, b""
    digest = fingerprint.digest()
    if fingerprint.rope.depends_on_length:
        with blocks.lock:
            if blocks.running:
                raise CacheBusyError("rotary frequencies of this model depend on length; wait until no call is running")
            with fingerprint.rope.put_back():
                regime = fingerprint.rope.at(max(0, num_tokens - 1))
    return fingerprint.roots.of(RootFacts(digest, cache.cache_salt, regime))
