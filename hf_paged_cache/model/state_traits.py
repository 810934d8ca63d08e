"""Finds out how layers compute states, as far as that decides where a state can be kept and which rows may find it.

This is read from the modules, by structure; `trial` adds what only a run shows.
"""

import inspect
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf, lcm
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class StateTraits:
    """`StateTraits` says what is to be heeded where the states of a model are kept.

    Attributes:
        chunk: number of tokens that the model's kernels compute at once. Split at a multiple of it, a forward rounds as
            if it were not split.
        clamps_one_token: True if one token is computed otherwise than several. Then a prompt never ends in a forward of
            one token, and a state that was made token by token is not that of a prompt.
        num_pads_that_show: number of columns of padding before a row that its states, keys and values depend on.
    """

    chunk: int = 1
    clamps_one_token: bool = False
    num_pads_that_show: int = 0

    def root_padding(self, pad: int) -> int:
        """Return the part of a row's padding that belongs to the row's root."""
        return min(pad, self.num_pads_that_show)


EVERY_PAD = 1 << 62  # more columns of padding than there are


def read_state_traits(modules: Iterable[nn.Module], tried: StateTraits) -> StateTraits:
    """Return the traits that the modules of a model with states show, or that a trial has shown."""
    modules = [module for module in modules if hasattr(module, "layer_idx")]  # the modules that use a cache
    return StateTraits(
        lcm(tried.chunk, *_chunks(modules)),
        tried.clamps_one_token or any(map(_limits_time_steps, modules)),
        max([tried.num_pads_that_show, *map(_num_pads_that_show, modules)]),
    )


def _chunks(modules: list[nn.Module]) -> Iterator[int]:
    """Yield the defaults of `chunk_size` in the functions that forwards call: gated delta rules.

    Such a kernel solves for a whole chunk at once. A kernel that is told a size by the config (Mamba 2) sums up, and
    rounds alike wherever it is split.
    """
    for kind in {type(module) for module in modules}:
        forward: Any = inspect.unwrap(kind.forward)
        for name in getattr(getattr(forward, "__code__", None), "co_names", ()):
            with suppress(TypeError, ValueError):  # what has no signature, such as a builtin
                parameter = inspect.signature(forward.__globals__.get(name)).parameters.get("chunk_size")
                if parameter is not None and isinstance(parameter.default, int):
                    yield parameter.default


def _limits_time_steps(module: nn.Module) -> bool:
    """Return whether time steps are clamped, which the step of one token is never told."""
    limit = getattr(module, "time_step_limit", None)
    return isinstance(limit, tuple | list) and len(limit) == 2 and (limit[0] > 0 or limit[1] < inf)


def _num_pads_that_show(module: nn.Module) -> int:
    """Return how far the convolutions of one module look back, if what they look at is not zero where padding was.

    Padding is zeroed before the projection, so a bias is all that is left of it.
    """
    children = list(module.children())
    convolutions = [child for child in children if isinstance(child, nn.Conv1d)]
    projections = [child for child in children if not isinstance(child, nn.Conv1d) and hasattr(child, "in_features")]
    parts = [part for child in projections for part in child.modules()]  # an adapter may have a bias, too
    if not any(getattr(part, "bias", None) is not None for part in parts):
        return 0
    return sum((child.kernel_size[0] - 1) * child.dilation[0] for child in convolutions)
