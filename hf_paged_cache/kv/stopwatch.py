"""How long devices take for what is launched between two lines. Nobody waits for the answer: it is there when they are done."""

import time
from collections.abc import Iterable

import torch

_WITHOUT_EVENTS = ("cpu", "meta", "mps")


class Stopwatch:
    """Started when made. On a host the time between the two lines; on accelerators what passes there, by their own events."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = [device for device in dict.fromkeys(devices) if device.type not in _WITHOUT_EVENTS]
        self._began = time.perf_counter()
        self._seconds: float | None = None
        self._starts = [self._event(device) for device in self._devices]
        self._stops: list[torch.Event] = []

    def stop(self) -> None:
        """What is launched from here on is not counted."""
        self._seconds = time.perf_counter() - self._began
        self._stops = [self._event(device) for device in self._devices]

    def seconds(self) -> float | None:
        """The time, of several devices the longest; None as long as one is not done."""
        if not self._devices:
            return self._seconds
        if not self._stops or not all(event.query() for event in self._stops):
            return None
        return max(start.elapsed_time(stop) for start, stop in zip(self._starts, self._stops, strict=True)) / 1000

    @staticmethod
    def _event(device: torch.device) -> torch.Event:
        event = torch.Event(device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device))
        return event
