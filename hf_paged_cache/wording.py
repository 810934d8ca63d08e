"""Words messages that more than one module needs."""

from textwrap import shorten


def where_of(salt: bytes | None) -> str:
    """Say whose calls are meant: those of a salt, or of all if it is None."""
    return "on this store" if salt is None else "on a cache of this salt" if salt else "on a cache without a salt"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun; a plural ends with s or es.

    Examples:
        >>> counted(1, "prompt"), counted(1200, "batch")
        ('1 prompt', '1,200 batches')
    """
    plural = f"{noun}es" if noun.endswith(("s", "x", "ch")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def brief(error: BaseException) -> str:
    """Return kind and message of an error, in one line of 200 characters at most."""
    return shorten(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, 200, placeholder=" ...")
