"""Tells when devices are done with what was launched on them, and how long they took. Nobody waits for the answer."""

import time
from collections.abc import Iterable

import torch

_WITHOUT_EVENTS = ("cpu", "meta", "mps")


def events_on(devices: Iterable[torch.device], *, have_times: bool = False) -> list[torch.Event]:
    """Return events that come when all that was launched so far on these devices is done; none for a host."""
    events = []
    for device in dict.fromkeys(device for device in devices if device.type not in _WITHOUT_EVENTS):
        event = torch.Event(device, enable_timing=have_times)
        event.record(torch.accelerator.current_stream(device))
        events.append(event)
    return events


class Stopwatch:
    """`Stopwatch` measures the time from when it is made until `stop`.

    On a host this is the time between the two lines; on accelerators what passes there, by their own events.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [*devices]
        self._began = time.perf_counter()
        self._seconds: float | None = None
        self._starts = events_on(self._devices, have_times=True)
        self._stops: list[torch.Event] = []

    def stop(self) -> None:
        """Stop the time: what is launched from now on is not counted."""
        self._seconds = time.perf_counter() - self._began
        self._stops = events_on(self._devices, have_times=True)

    def seconds(self) -> float | None:
        """Return the time, of several devices the longest; None as long as one device is not done."""
        if not self._starts:
            return self._seconds
        if not self._stops or not all(event.query() for event in self._stops):
            return None
        return max(start.elapsed_time(stop) for start, stop in zip(self._starts, self._stops, strict=True)) / 1000
