"""Checks numbers that a caller gives, as numbers or as texts. Changes nothing."""

import re
from decimal import Decimal

from ..errors import CacheArgumentError

OWNERS_ALONE = 0o600  # permissions of a file from which prompts can be told
_UNITS = {"": 1, "B": 1} | {
    f"{letter}{unit}": base**power
    for power, letter in enumerate("KMGT", 1)
    for unit, base in (("B", 1000), ("IB", 1024))
}
_OCTAL = re.compile("(0o?)?6[0246]{2}")  # permissions of files that the owner reads and writes
_SIZE = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def negative(name: str, number: int) -> CacheArgumentError:
    """Return the error to raise for a `number` below 0."""
    return CacheArgumentError(f"{name} is {number}; it must be 0 or more")


def int_of_at_least(name: str, value: object, least: int, what: str) -> int:
    """Return `value` if it is an int of `least` or more, and no bool; else raise CacheArgumentError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CacheArgumentError(f"{name} is {value!r}; it must be an int, {least} or more ({what})")
    return value


def num_bytes_of(name: str, size: object, least: int) -> int:
    """Return a number of bytes that is given as an int, or as a text with a unit: decimal (GB) or binary (GiB).

    Raises:
        CacheArgumentError: `size` is neither, says fewer than `least` bytes, or is a text of fewer than 1,000 without a
            unit.

    Examples:
        >>> (
        ...     num_bytes_of("max_bytes", "1.5 GB", 1),
        ...     num_bytes_of("max_bytes", "4GiB", 1),
        ...     num_bytes_of("max_bytes", 512, 1),
        ... )
        (1500000000, 4294967296, 512)
    """
    if not isinstance(size, str):
        return int_of_at_least(name, size, least, "bytes, or a text such as '4GB' or '512MiB'")
    found = _SIZE.fullmatch(size)
    unit = None if found is None else _UNITS.get(found[2].upper())
    if found is None or unit is None:
        raise CacheArgumentError(
            f"{name} is {size!r}; give a number of bytes, or one with a unit: '512MB' or '4GB' (thousands: KB, MB, GB, "
            "TB), '4GiB' (1,024s: KiB, MiB, GiB, TiB)"
        )
    num_bytes = int(Decimal(found[1]) * unit)
    if num_bytes < least:
        raise CacheArgumentError(f"{name} is {size!r}; it must be {least} or more bytes")
    if 0 < num_bytes < 1000 and not found[2]:  # as of 4 GB, where a shell passes on the 4 alone
        raise CacheArgumentError(f"{name} is {size} without a unit; for gigabytes give {size}GB, without a space")
    return num_bytes


def file_mode(name: str, mode: object) -> int:
    """Return the permissions of files to be written, as `chmod` takes them; for None, those of the owner alone.

    Raises:
        CacheArgumentError: `mode` is no such permissions, or would not let the owner read and write.
    """
    if mode is None:
        return OWNERS_ALONE
    if isinstance(mode, int) and not isinstance(mode, bool) and mode & 0o600 == 0o600 and not mode & ~0o666:
        return mode
    raise CacheArgumentError(
        f"{name} is {mode!r}; give permissions of files that their owner reads and writes, as an octal number: 0o600 "
        "(the owner's alone), 0o640 (a group reads), 0o660 (a group reads and writes)"
    )


def file_mode_of_text(name: str, text: str | None) -> int | None:
    """Return the permissions that a text such as "660" gives, or None for no text; raise as `file_mode` does."""
    return None if text is None else file_mode(name, int(text, 8) if _OCTAL.fullmatch(text) else text)
