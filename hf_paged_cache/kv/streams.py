"""Owns the order between streams of one device on which calls of one store launch.

Nothing waits where nobody uses a second stream. Blocks pass from call to call: what one call has launched on its stream
must be done before another call reads the block, or writes it anew. Tensors are made, and move when they grow, in the
middle of others' forwards: whoever uses such a tensor next comes after that. The host waits for nothing. The memory of
a released tensor is used again only when all these streams are done with it.
"""

from collections import Counter
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
        # device -> stream -> how many moves of the device's tensors the stream comes after
        self._streams: dict[torch.device, dict[torch.Stream, int]] = {}
        self._num_moves: Counter[torch.device] = Counter()

    def join(self, devices: Iterable[torch.device]) -> None:
        """Let what this thread launches from now on come after all that was launched for the store on these devices.

        Only devices among the store's accelerators are joined.
        """
        for device in self.accelerators.intersection(devices):
            current = torch.accelerator.current_stream(device)
            used = self._streams.setdefault(device, {})
            for stream in used:
                if stream != current:
                    current.wait_stream(stream)
            used[current] = self._num_moves[device]

    def follow(self, device: torch.device) -> None:
        """Prepare to use a tensor on a device: `join` if one was made or moved there since this thread's stream did.

        Cost: asks for the current stream.
        """
        if device in self.accelerators:
            known = self._streams.get(device, {}).get(torch.accelerator.current_stream(device))
            if known != self._num_moves[device]:
                self.join([device])

    def move(self, device: torch.device) -> None:
        """Note that this thread has launched what makes a tensor on a device, or moves one."""
        if device in self.accelerators:
            self._num_moves[device] += 1
            self.join([device])

    def release(self, tensor: Tensor) -> None:
        """Prepare to release a tensor: whoever gets its memory waits for what other streams do with it."""
        used = [*self._streams.get(tensor.device, ())]
        if len(used) > 1:
            for stream in used:
                tensor.record_stream(stream)
