"""Checks of numbers that a caller gives. Changes nothing."""

from ..errors import CacheArgumentError


def check_not_negative(name: str, number: int) -> None:
    """Raises CacheArgumentError if `number` is below 0."""
    if number < 0:
        raise CacheArgumentError(f"{name} is {number}; it must be 0 or more")


def int_of_at_least(name: str, value: object, least: int, what: str) -> int:
    """Return `value`. Raises CacheArgumentError unless it is an int, and no bool, of `least` or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CacheArgumentError(f"{name} is {value!r}; it must be an int, {least} or more ({what})")
    return value
