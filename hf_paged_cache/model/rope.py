"""Rotary embeddings: the frequencies in force, also where they depend on the length of a sequence (dynamic NTK, longrope).

Owns the question alone; the frequencies are the model's, which updates those that depend on length at every forward.
"""

from collections.abc import Iterable

import torch
from torch import nn

_BY_LENGTH = ("dynamic", "longrope")


class RopeRegime:
    """The frequencies that a forward up to some position will use, for one model.

    Args:
        modules: all modules of the model.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._rotaries: list[tuple[nn.Module, list[str | None]]] = []  # module, layer types that depend on length
        self._static: list[nn.Module] = []  # modules whose frequencies are the same at every length
        for module in modules:
            rope_type = getattr(module, "rope_type", None)
            by_layer = rope_type if isinstance(rope_type, dict) else {None: rope_type}
            layer_types = [layer for layer, kind in by_layer.items() if any(name in str(kind) for name in _BY_LENGTH)]
            if layer_types:
                self._rotaries.append((module, layer_types))
            elif any(name.endswith("inv_freq") for name in module._buffers):
                self._static.append(module)

    @property
    def depends_on_length(self) -> bool:
        """Whether there is anything to ask."""
        return bool(self._rotaries)

    def static(self) -> bytes:
        """The frequencies that no forward changes, as they are now."""
        parts = []
        for module in self._static:
            for name, buffer in module._buffers.items():
                if buffer is not None and name.endswith("inv_freq") and buffer.device.type != "meta":
                    parts.append(buffer.detach().float().cpu().numpy().tobytes())
            parts.append(repr(getattr(module, "attention_scaling", None)).encode())
        return b"".join(parts)

    def peek(self, max_position: int) -> bytes:
        """As `at`, but the model is left as it was; no forward may be running."""
        saved = []
        for module, _ in self._rotaries:
            values = [(buffer, buffer.clone()) for buffer in module._buffers.values() if buffer is not None]
            saved.append((module, dict(module.__dict__), dict(module._buffers), values))
        try:
            return self.at(max_position)
        finally:
            for module, attributes, buffers, values in saved:
                module.__dict__.update(attributes)
                module._buffers.update(buffers)
                for buffer, value in values:  # some updates replace a buffer, some write into it
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)

    def at(self, max_position: int) -> bytes:
        """The frequencies in force when `max_position` is the largest of a forward; b"" when none depend on that.

        Effects: the model's own update for such a forward, which that forward would make itself.
        """
        parts = []
        for module, layer_types in self._rotaries:
            for layer_type in layer_types:
                prefix = "" if layer_type is None else f"{layer_type}_"
                device = getattr(module, f"{prefix}inv_freq").device
                x, positions = torch.zeros(1, device=device), torch.tensor([[max_position]], device=device)
                if layer_type is None:
                    module(x, positions)
                else:
                    module(x, positions, layer_type=layer_type)
                frequencies = getattr(module, f"{prefix}inv_freq")
                parts.append(frequencies.detach().float().cpu().numpy().tobytes())
                parts.append(repr(getattr(module, f"{prefix}attention_scaling", None)).encode())
        return b"".join(parts)
