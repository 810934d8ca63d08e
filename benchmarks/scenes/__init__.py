"""What bench_generate.py can measure, a function a scene. Importing this registers all of them, in the order of the tables."""

from . import one_row, several_rows, beams, steps, windows, conversations, few_shot, memory, overhead, forward_cost  # noqa: I001
from .registry import SCENES, Repeat, Scene

__all__ = ["SCENES", "Repeat", "Scene"]

assert all((one_row, several_rows, beams, steps, windows, conversations, few_shot, memory, overhead, forward_cost))
