"""Owns the order between streams of one device on which calls of one store launch. Nothing waits where nobody uses a second one.

Blocks pass from call to call: what one has launched on its stream must be done before another reads the block, or writes it
anew. The host waits for nothing. The memory of a released tensor is used again only when all these streams are done with it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class StreamOrder:
    """The streams that a store's calls have launched on, on each accelerator."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, list[torch.Stream]] = {}

    def join(self, devices: Iterable[torch.device]) -> None:
        """What this thread launches from here on comes after all that was launched for the store on these accelerators."""
        for device in devices:
            current = torch.accelerator.current_stream(device)
            used = self._streams.setdefault(device, [])
            for stream in used:
                if stream != current:
                    current.wait_stream(stream)
            if current not in used:
                used.append(current)

    def release(self, tensor: Tensor) -> None:
        """This tensor is about to be released: what other streams do with it is waited for by whoever gets its memory."""
        used = self._streams.get(tensor.device, [])
        if len(used) > 1:
            for stream in used:
                tensor.record_stream(stream)
