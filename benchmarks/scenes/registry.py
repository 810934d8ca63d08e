"""The scenes by name, in the order in which they are written; a scene is a generator of named lines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .line import Line
from .workbench import Bench

Lines = Iterator[tuple[str, Line]]


@dataclass(frozen=True)
class Repeat:
    """How often things are repeated: as often as the scene needs, or as the user says."""

    given: int | None = None

    def __call__(self, needed: int) -> int:
        return needed if self.given is None else self.given


@dataclass(frozen=True)
class Scene:
    """Something to measure.

    Attributes:
        run: yields its lines one by one, each with its name; raises AssertionError when tokens differ.
        group: which table it stands in.
        minutes: about what it takes on two cores, at its own number of repetitions.
    """

    name: str
    group: str
    minutes: float
    run: Callable[[Bench, Repeat], Lines]

    @property
    def what(self) -> str:
        """A sentence."""
        return (self.run.__doc__ or "").partition("\n")[0]


SCENES: dict[str, Scene] = {}


def scene(group: str, minutes: float) -> Callable[[Callable[[Bench, Repeat], Lines]], Callable[[Bench, Repeat], Lines]]:
    """Register a function under its own name."""

    def register(run: Callable[[Bench, Repeat], Lines]) -> Callable[[Bench, Repeat], Lines]:
        SCENES[run.__name__] = Scene(run.__name__, group, minutes, run)
        return run

    return register
