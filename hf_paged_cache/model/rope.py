"""The rotary frequencies that a forward uses; with dynamic NTK and longrope they depend on the sequence's length.

The model owns them, and updates those that depend on length at every forward.
"""

from collections.abc import Iterable

import torch
from torch import nn

_BY_LENGTH = ("dynamic", "longrope")


class RopeRegime:
    """Reads the rotary frequencies of one model.

    Args:
        modules: all modules of the model.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._rotaries: list[tuple[nn.Module, list[str | None]]] = []  # module, layer types that depend on length
        self._static: list[nn.Module] = []  # modules with the same frequencies at every length
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
        """Whether any frequencies depend on the sequence's length."""
        return bool(self._rotaries)

    def static(self) -> bytes:
        """The frequencies that do not depend on length, as they are now."""
        parts = []
        for module in self._static:
            for name, buffer in module._buffers.items():
                if buffer is not None and name.endswith("inv_freq") and buffer.device.type != "meta":
                    parts.append(buffer.detach().float().cpu().numpy().tobytes())
            parts.append(repr(getattr(module, "attention_scaling", None)).encode())
        return b"".join(parts)

    def peek(self, max_position: int) -> bytes:
        """`at`, with the model's frequencies put back; not while a forward runs."""
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
        """The frequencies of a forward whose largest position is `max_position`; b"" where none depend on length.

        Effects: the model updates its frequencies, as that forward would.
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
