"""How far back the layers of a group see: which tokens they need to resume a sequence, and which columns attention is handed.

Layers that see another run of the last tokens than a window are another class beside `Window`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Sight(Protocol):
    """What layers see of the tokens before one. Equal and hashed by value."""

    @property
    def name(self) -> int | str:
        """Names the group, in the pool and in files."""

    @property
    def words(self) -> str:
        """For messages."""

    @property
    def size(self) -> int:
        """The most tokens that a query sees, itself included: what transformers is told."""

    @property
    def most_needed(self) -> int:
        """The most tokens that `needed` has."""

    def needed(self, num_tokens: int) -> range:
        """The tokens that must be kept to resume after so many."""

    def handed_from(self, start: int) -> int:
        """The first column that attention is handed in a forward from column `start` on."""


@dataclass(frozen=True, slots=True)
class Window:
    """A query sees itself and the `size - 1` tokens before it.

    Examples:
        >>> Window(8).handed_from(20), Window(8).needed(20)
        (13, range(13, 20))
    """

    size: int

    @property
    def name(self) -> int:
        """See `Sight`."""
        return self.size

    @property
    def words(self) -> str:
        """See `Sight`."""
        return f"a window of {self.size} tokens"

    @property
    def most_needed(self) -> int:
        """See `Sight`; the last token is always kept."""
        return max(1, self.size - 1)

    def needed(self, num_tokens: int) -> range:
        """See `Sight`."""
        return range(max(0, num_tokens - self.most_needed), num_tokens)

    def handed_from(self, start: int) -> int:
        """See `Sight`."""
        return max(0, start - self.size + 1)
