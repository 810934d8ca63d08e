"""Reads token ids as users give them: one sequence, as a list or a tensor, or an error that says what is wrong."""

import operator
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch import bool as torch_bool

from ..errors import CacheArgumentError

_MAX_TOKEN = 2**63 - 1  # largest int64


def one_sequence(what: str, given: object) -> tuple[int, ...]:
    """Return the token ids of one sequence: [T], or [1, T] as tokenizers return it, or any iterable of integers.

    `what` is the argument's name in the error that refuses anything else.
    """
    if isinstance(given, Tensor):
        if given.is_floating_point() or given.is_complex() or given.dtype is torch_bool:
            raise CacheArgumentError(f"{what} is a tensor of {given.dtype}; token ids are integers")
        if given.dim() != 1 and (given.dim() != 2 or given.shape[0] != 1):
            raise CacheArgumentError(f"{what} is a tensor of shape {tuple(given.shape)}; give one row of token ids")
        if given.is_meta:
            raise CacheArgumentError(f"{what} is on the meta device, where tensors have no values")
        given = given.tolist()
    if hasattr(given, "keys"):
        raise CacheArgumentError(f"{what} is of type {type(given).__name__}; give its input_ids")
    if isinstance(given, str | bytes | bytearray | set | frozenset) or not isinstance(given, Iterable):
        raise CacheArgumentError(
            f"{what} is of type {type(given).__name__}; give a sequence of token ids, such as tokenizer(text).input_ids"
        )
    tokens = list(given)
    if are_several(tokens):
        if len(tokens) > 1:
            raise CacheArgumentError(f"{what} has {len(tokens)} rows; give one row of token ids")
        tokens = list(tokens[0])
    return tuple([_token_id(what, token) for token in tokens])


def are_several(given: object) -> bool:
    """Return whether a list or tuple of token id sequences is given, and not one such sequence."""
    if not isinstance(given, list | tuple) or not given:
        return False
    return isinstance(given[0], list | tuple | Mapping) or getattr(given[0], "ndim", 0) > 0


def _token_id(what: str, token: Any) -> int:
    try:
        number = None if isinstance(token, bool) else operator.index(token)
    except TypeError:
        number = None
    if number is None:
        raise CacheArgumentError(f"{what} has {token!r} among its token ids, which is of type {type(token).__name__}")
    if abs(number) > _MAX_TOKEN:
        raise CacheArgumentError(f"{what} has {number} among its token ids, which is too large for one")
    return number
