"""Says how far back the layers of a group see.

From that follow the tokens that these layers need to resume a sequence, and the columns that attention is handed.
Layers that see another run of the last tokens than a window are another class beside `Window`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Window:
    """`Window` lets a query see itself and the `size - 1` tokens before it.

    Examples:
        >>> Window(8).handed_from(20), Window(8).needed(20)
        (13, range(13, 20))
    """

    size: int

    @property
    def name(self) -> int | str:
        """Name of the group, in the pool and in files."""
        return self.size

    @property
    def words(self) -> str:
        """Description of the window, for messages."""
        return f"a window of {self.size} tokens"

    @property
    def most_needed(self) -> int:
        """Most tokens that `needed` returns: the last token is always kept."""
        return max(1, self.size - 1)

    def needed(self, num_tokens: int) -> range:
        """Return the positions of the tokens that must be kept to resume after `num_tokens` tokens."""
        return range(max(0, num_tokens - self.most_needed), num_tokens)

    def handed_from(self, start: int) -> int:
        """Return the first column that attention is handed in a forward from column `start` on."""
        return max(0, start - self.size + 1)
