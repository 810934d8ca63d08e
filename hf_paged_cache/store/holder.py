"""What a store must know of who holds its blocks: a running call, its rows, and what is left of a collected cache."""

from typing import Protocol

from .window_admission import HeldRows


class LeftBehind(Protocol):
    """Rows of a cache that was collected. Their `end` commits full blocks and gives all blocks back."""

    def end(self) -> None: ...


class CopiedRows(Protocol):
    """What attention reads beside the pool."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def most_copies(self) -> int: ...  # of all columns of the rows, at a time


class Holder(Protocol):
    """What a store must know of a call."""

    @property
    def salt(self) -> bytes: ...  # namespace of its blocks

    @property
    def is_running(self) -> bool: ...  # then its rows may not be dropped

    def drop_rows(self) -> None: ...

    def num_previous_blocks(self) -> int: ...  # that only its previous rows hold

    def lose_threads(self, idents: frozenset[int]) -> None: ...  # they ended with a fork: drop what they ran

    @property
    def rows(self) -> "HeldRows": ...

    @property
    def previous(self) -> "HeldRows": ...  # of the call before

    @property
    def view(self) -> "CopiedRows": ...
