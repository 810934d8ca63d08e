"""Owns the order between streams of one device on which calls of one store launch.

Nothing waits where nobody uses a second stream. Blocks pass from call to call: what one call has launched on its stream
must be done before another call reads the block, or writes it anew. Tensors are made, and move when they grow, in the
middle of others' forwards: whoever uses such a tensor next comes after that. The host waits for nothing. The memory of
a released tensor is used again only when all these streams are done with it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class StreamOrder:
    """`StreamOrder` knows the streams that a store's calls have launched on, on each accelerator.

    Attributes:
        accelerators: accelerators that hold tensors of the store, or have held some.
    """

    def __init__(self) -> None:
        self.accelerators: set[torch.device] = set()
        self._streams: dict[torch.device, set[torch.Stream]] = {}

    def join(self, devices: Iterable[torch.device]) -> None:
        """Let what this thread launches from now on come after all that was launched for the store on these devices.

        Only devices among the store's accelerators are joined.
        """
        for device in self.accelerators.intersection(devices):
            current = torch.accelerator.current_stream(device)
            used = self._streams.setdefault(device, set())
            for stream in used - {current}:
                current.wait_stream(stream)
            used.add(current)

    def release(self, tensor: Tensor) -> None:
        """Prepare to release a tensor: whoever gets its memory waits for what other streams do with it."""
        used = self._streams.get(tensor.device, set())
        if len(used) > 1:
            for stream in used:
                tensor.record_stream(stream)
