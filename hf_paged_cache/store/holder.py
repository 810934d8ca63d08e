"""What a store must know of who holds its blocks: a running call, its rows, and what is left of a collected cache."""

from typing import NamedTuple, Protocol

from ..blocks import Allocation


class Demand(NamedTuple):
    """What a call may need in its worst case.

    Attributes:
        num_blocks: to be taken.
        num_released: in use, and given back before any is taken.
        windows: of each group of layers with a window, window blocks at a time, with those that it has.
    """

    num_blocks: int
    num_released: int = 0
    windows: tuple[int, ...] = ()


class HeldRows(Protocol):
    """Rows of a call."""

    def block_ids(self) -> set[int]: ...

    def allocations(self) -> list[Allocation]: ...

    def free(self) -> None: ...


class LeftBehind(Protocol):
    """Rows of a cache that was collected. Their `end` commits full blocks and gives all blocks back."""

    def end(self) -> None: ...


class CopiedRows(Protocol):
    """What attention reads beside the pool."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def most_copies(self) -> int: ...  # of all columns of the rows, at a time

    def let_go(self) -> None: ...  # of what it reads in the pool, whose memory is about to be replaced


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
