"""What bench_generate.py can measure, a function a scene.

Importing this registers all of them, in the order of the tables.
"""

from . import (  # noqa: I001
    one_row,
    several_rows,
    beams,
    steps,
    read_once,
    windows,
    states,
    conversations,
    tiers,
    saved,
    few_shot,
    images,
    batch_job,
    memory,
    overhead,
    forward_cost,
)
from .registry import SCENES, Repeat, Scene

__all__ = ["SCENES", "Repeat", "Scene"]

assert all(
    (
        one_row,
        several_rows,
        beams,
        steps,
        read_once,
        windows,
        states,
        conversations,
        tiers,
        saved,
        few_shot,
        images,
        batch_job,
        memory,
        overhead,
        forward_cost,
    )
)
