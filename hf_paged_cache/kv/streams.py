"""Owns the order between streams of one device on which calls of one store launch. Nothing waits where nobody uses a second one.

Blocks pass from call to call: what one has launched on its stream must be done before another reads the block, or writes it
anew. Tensors are made, and move when they grow, in the middle of others' forwards: whoever uses one next comes after that. The
host waits for nothing. The memory of a released tensor is used again only when all these streams are done with it.
"""

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor


class StreamOrder:
    """The streams that a store's calls have launched on, on each accelerator.

    Attributes:
        accelerators: those that hold tensors of the store, or have.
    """

    def __init__(self) -> None:
        self.accelerators: set[torch.device] = set()
        # device -> stream -> how many moves of the device's tensors it comes after
        self._streams: dict[torch.device, dict[torch.Stream, int]] = {}
        self._num_moves: Counter[torch.device] = Counter()

    def join(self, devices: Iterable[torch.device]) -> None:
        """What this thread launches from here on comes after all that was launched for the store on these of its accelerators."""
        for device in self.accelerators.intersection(devices):
            current = torch.accelerator.current_stream(device)
            used = self._streams.setdefault(device, {})
            for stream in used:
                if stream != current:
                    current.wait_stream(stream)
            used[current] = self._num_moves[device]

    def follow(self, device: torch.device) -> None:
        """A tensor there is about to be used: `join`, if one was made or has moved since this thread's stream did.

        Cost: asks for the current stream.
        """
        if device in self.accelerators:
            known = self._streams.get(device, {}).get(torch.accelerator.current_stream(device))
            if known != self._num_moves[device]:
                self.join([device])

    def move(self, device: torch.device) -> None:
        """This thread has launched what makes a tensor there, or moves one."""
        if device in self.accelerators:
            self._num_moves[device] += 1
            self.join([device])

    def release(self, tensor: Tensor) -> None:
        """This tensor is about to be released: what other streams do with it is waited for by whoever gets its memory."""
        used = [*self._streams.get(tensor.device, ())]
        if len(used) > 1:
            for stream in used:
                tensor.record_stream(stream)
