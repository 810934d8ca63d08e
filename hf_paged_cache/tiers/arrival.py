"""When copies from devices have arrived on the host, asked without waiting."""

from collections.abc import Iterable

import torch

_WITHOUT_EVENTS = ("cpu", "meta", "mps")


def arrival_on(devices: Iterable[torch.device]) -> list[torch.Event]:
    """Events that come when all that was launched so far on these devices is done; none of a host."""
    events = []
    for device in dict.fromkeys(device for device in devices if device.type not in _WITHOUT_EVENTS):
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        events.append(event)
    return events
