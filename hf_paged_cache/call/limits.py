"""What `generate` knows of the call that it begins. Plain numbers."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallLimits:
    """What `generate` knows of the call that it begins.

    Attributes:
        num_prompt_columns: columns of the prompt, padding included; later ones are generated.
        max_columns: the most columns a row can get.
        num_rows: rows of the batch once beams and samples are expanded.
        end_of_sequence: token ids that end a row.
    """

    num_prompt_columns: float = math.inf
    max_columns: float = math.inf
    num_rows: int = 0
    end_of_sequence: frozenset[int] = frozenset()


UNLIMITED = CallLimits()
"""Of forwards without `generate`, and of calls whose arguments do not tell."""
