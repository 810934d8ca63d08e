"""Defines what `generate` knows of the call that it begins. Plain numbers."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallLimits:
    """`CallLimits` has what `generate` knows of the call that it begins.

    Attributes:
        num_prompt_columns: columns of the prompt, padding included; later columns are generated.
        max_columns: most columns that a row can get.
        num_rows: rows of the batch once beams and samples are expanded.
        end_of_sequence: token ids that end a row.
    """

    num_prompt_columns: float = math.inf
    max_columns: float = math.inf
    num_rows: int = 0
    end_of_sequence: frozenset[int] = frozenset()


UNLIMITED = CallLimits()
"""Limits of forwards without `generate`, and of calls whose arguments do not tell any."""
