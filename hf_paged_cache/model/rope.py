"""Reads the rotary frequencies that a forward uses; with dynamic NTK and longrope they depend on the sequence's length.

The model owns the frequencies, and updates those that depend on length at every forward.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..kv.tensors import read_bytes

_BY_LENGTH = ("dynamic", "longrope")


def _prefixes_by_length(module: nn.Module) -> list[str]:
    """Return the prefixes of the names of frequencies that depend on length: "", or that of a layer type."""
    kinds = getattr(module, "rope_type", None)
    by_layer = kinds.items() if isinstance(kinds, dict) else [("", kinds)]
    return [f"{layer}_" if layer else "" for layer, kind in by_layer if any(name in str(kind) for name in _BY_LENGTH)]


def static_frequencies(module: nn.Module) -> list[str]:
    """Return the names of a module's buffers of frequencies that are the same at every length."""
    names = [name for name in module._buffers if name.endswith("inv_freq")]
    return names if names and not _prefixes_by_length(module) else []


class RopeRegime:
    """`RopeRegime` reads the rotary frequencies of one model that depend on length, given all its modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places = [(module, prefix) for module in modules for prefix in _prefixes_by_length(module)]
        self.depends_on_length = bool(self._places)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Give the model back, at the end, the frequencies that depend on length. No other forward may run."""
        saved = []
        for module in {module for module, _ in self._places}:
            buffers = [(name, buffer, buffer.clone()) for name, buffer in module._buffers.items() if buffer is not None]
            saved.append((module, dict(module.__dict__), buffers))
        try:
            yield
        finally:
            for module, attributes, buffers in saved:
                module.__dict__.update(attributes)
                for name, buffer, value in buffers:  # some updates replace a buffer, some write into it
                    module._buffers[name] = buffer
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)

    def at(self, max_position: int) -> bytes:
        """Update the frequencies as a forward would whose largest position is `max_position`; return `now`."""
        for module, prefix in self._places:
            x = torch.zeros(1, device=getattr(module, f"{prefix}inv_freq").device)
            positions = torch.full((1, 1), max_position, device=x.device)
            module(x, positions, **({"layer_type": prefix.removesuffix("_")} if prefix else {}))
        return self.now()

    def now(self) -> bytes:
        """Return the frequencies, and the factors of their cosines and sines; b"": none depend on length."""
        if not self._places:
            return b""
        values: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for module, prefix in self._places:
            frequencies = getattr(module, f"{prefix}inv_freq")
            values.setdefault((frequencies.device, frequencies.dtype), []).append(frequencies.detach().flatten())
        scales = [getattr(module, f"{prefix}attention_scaling", None) for module, prefix in self._places]
        return read_bytes(values) + repr(scales).encode()


class RopeDeltas:
    """`RopeDeltas` remembers how far images have moved later positions, which some modules keep of the last call."""

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[Any] = [module for module in model.modules() if hasattr(module, "rope_deltas")]
        self._held = [module.rope_deltas for module in self._modules]

    def put_back(self, num_rows: int = 0) -> None:
        """Let the modules keep what was remembered, for each of so many rows."""
        for module, deltas in zip(self._modules, self._held, strict=True):
            times = 1 if deltas is None else max(1, num_rows // max(1, len(deltas)))
            module.rope_deltas = deltas if times == 1 else deltas.repeat_interleave(times, dim=0)
