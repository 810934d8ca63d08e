"""The rotary frequencies that a forward uses; with dynamic NTK and longrope they depend on the sequence's length.

The model owns them, and updates those that depend on length at every forward.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..kv.transfers import read_bytes

_BY_LENGTH = ("dynamic", "longrope")


class RopeRegime:
    """Reads the rotary frequencies of one model, given all its modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._by_length: list[tuple[nn.Module, str | None]] = []  # module, one of its layer types
        self._static: list[
            tuple[nn.Module, str]
        ] = []  # module, prefix of frequencies that are the same at every length
        for module in modules:
            kinds = getattr(module, "rope_type", None)
            by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
            layer_types = [layer for layer, kind in by_layer.items() if any(name in str(kind) for name in _BY_LENGTH)]
            self._by_length += [(module, layer) for layer in layer_types]
            if not layer_types:
                names = [name for name in module._buffers if name.endswith("inv_freq")]
                self._static += [(module, name.removesuffix("inv_freq")) for name in names]

    @property
    def depends_on_length(self) -> bool:
        """Whether any frequencies depend on the sequence's length."""
        return bool(self._by_length)

    def static(self) -> list[Tensor]:
        """The frequencies that do not depend on length, as they are now, each [N] on its device."""
        return [values for place in self._static if (values := _frequencies(*place)) is not None]

    def scales(self) -> bytes:
        """What the cosines and sines of those are multiplied by."""
        return repr([_scale(*place) for place in self._static]).encode()

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """At the end, the model has the frequencies that depend on length as it has them now; not while another forward runs."""
        saved = []
        for module in {module for module, _ in self._by_length}:
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

    def peek(self, max_position: int) -> bytes:
        """`at`, with the model's frequencies put back; not while a forward runs."""
        with self.put_back():
            return self.at(max_position)

    def at(self, max_position: int) -> bytes:
        """The frequencies of a forward whose largest position is `max_position`; b"" where none depend on length.

        Effects: the model updates its frequencies, as that forward would.
        """
        for module, layer_type in self._by_length:
            prefix = "" if layer_type is None else f"{layer_type}_"
            x = torch.zeros(1, device=getattr(module, f"{prefix}inv_freq").device)
            positions = torch.full((1, 1), max_position, device=x.device)
            module(x, positions, **({} if layer_type is None else {"layer_type": layer_type}))
        return self.now()

    def now(self) -> bytes:
        """The frequencies that depend on length, as the last forward left them, and their scales.  Cost: one wait."""
        if not self._by_length:
            return b""
        places = [(module, "" if layer_type is None else f"{layer_type}_") for module, layer_type in self._by_length]
        values: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for place in places:
            if (frequencies := _frequencies(*place)) is not None:
                values.setdefault((frequencies.device, frequencies.dtype), []).append(frequencies)
        return read_bytes(values) + repr([_scale(*place) for place in places]).encode()


def _frequencies(module: nn.Module, prefix: str) -> Tensor | None:
    """The frequencies of a module, [N]; None where they have no values."""
    values: Tensor | None = getattr(module, f"{prefix}inv_freq")
    return None if values is None or values.device.type == "meta" else values.detach().flatten()


def _scale(module: nn.Module, prefix: str) -> Any:
    return getattr(module, f"{prefix}attention_scaling", None)
