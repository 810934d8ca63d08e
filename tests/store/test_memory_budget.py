"""How much memory a pool may take when nobody says. The platforms are stood in for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import psutil
import pytest
import torch

from hf_paged_cache.store import memory_budget as memory
from hf_paged_cache.store.memory_budget import add_store, default_budget_bytes, lacks_room

CPU = torch.device("cpu")


@pytest.fixture
def control_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host of which 1,000 bytes are available, without a store, and the folder in which a container is told its limit."""
    monkeypatch.setattr(memory, "_stores", WeakSet())
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    monkeypatch.setattr(memory, "_CONTROL_GROUP_ROOT", tmp_path)
    (tmp_path / "memory").mkdir()
    return tmp_path


def test_on_a_host_it_is_half_of_what_is_available(control_groups: Path) -> None:
    assert default_budget_bytes(CPU) == 500


@pytest.mark.parametrize(
    ("limit", "usage", "reclaimable", "expected"),
    [
        ("700", "500", "100", 150),  # less is left to the container than to the host
        ("70000", "500", "100", 500),  # more is: the host's is what there is
        ("max", "500", "100", 500),  # no limit
        ("700", "900", "0", 0),  # none is left
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_in_a_container_it_is_half_of_what_its_limit_leaves(
    limit: str, usage: str, reclaimable: str, expected: int, version: int, control_groups: Path
) -> None:
    names = ("memory.max", "memory.current", "memory.stat")
    if version == 1:
        names = ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat")
    stat = f"cache 5\n{'total_' if version == 1 else ''}inactive_file {reclaimable}\nother 7\n"
    for name, text in zip(names, (limit + "\n", usage + "\n", stat), strict=True):
        (control_groups / name).write_text(text)
    assert default_budget_bytes(CPU) == expected


@pytest.fixture
def accelerators(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, tuple[int, int, int]]:
    """Devices of this process: device -> bytes that the driver says are free, that torch holds, and that it uses of them."""
    devices: dict[torch.device, tuple[int, int, int]] = {}

    def told(at: int) -> Any:
        def tell(device: torch.device) -> Any:
            if device not in devices:
                raise ValueError(f"{device} is not of the current accelerator")
            return (devices[device][0], 10**9) if at == 0 else devices[device][at]

        return tell

    for at, name in enumerate(("get_memory_info", "memory_reserved", "memory_allocated")):
        monkeypatch.setattr(torch.accelerator, name, told(at))
    return devices


def test_on_an_accelerator_it_is_half_of_what_its_driver_says_is_free_and_torch_holds_unused(
    accelerators: dict[torch.device, tuple[int, int, int]], control_groups: Path
) -> None:
    accelerators[torch.device("cuda", 1)] = (1001, 500, 200)
    accelerators[torch.device("xpu", 0)] = (600, 0, 0)
    assert default_budget_bytes(torch.device("cuda", 1)) == 650
    assert default_budget_bytes(torch.device("xpu", 0)) == 300
    assert default_budget_bytes(torch.device("xpu", 1)) == 500  # does not tell: the host's


def test_an_accelerator_that_tells_of_less_than_is_needed_has_no_room_and_a_host_is_not_asked(
    accelerators: dict[torch.device, tuple[int, int, int]], control_groups: Path
) -> None:
    first, second, unknown = (torch.device("cuda", 0), torch.device("cuda", 1), torch.device("xpu", 0))
    accelerators[first], accelerators[second] = (100, 50, 20), (10**6, 0, 0)
    assert not lacks_room({first: 130, second: 10**6, CPU: 10**9, unknown: 10**9})
    assert lacks_room({first: 131, second: 1})
    assert lacks_room({second: 10**6 + 1})
    assert not lacks_room({})


# Several stores in a process


class Store:
    """A store that was promised so many bytes and has not taken them."""

    def __init__(self, to_come: int, device: torch.device = CPU) -> None:
        self._to_come, self._device = to_come, device
        add_store(self)

    def bytes_to_come(self, device: torch.device) -> int:
        return self._to_come if device == self._device else 0


def test_what_others_were_promised_is_not_promised_again(control_groups: Path) -> None:
    first = Store(400)
    assert default_budget_bytes(CPU, first) == 500  # its own does not count
    assert default_budget_bytes(CPU) == 300
    del first
    assert default_budget_bytes(CPU) == 500
    elsewhere = Store(900, torch.device("meta"))
    assert default_budget_bytes(CPU) == 500
    assert elsewhere.bytes_to_come(CPU) == 0


def test_of_many_stores_each_gets_its_part_whatever_others_were_promised(control_groups: Path) -> None:
    boundless, taken = Store(10**12), Store(-5)
    assert default_budget_bytes(CPU) == 250
    another = Store(10)
    assert default_budget_bytes(CPU) == 166
    assert {boundless, taken, another} == set(memory._stores)


def test_on_apple_silicon_it_is_half_of_what_is_recommended_and_not_taken(
    monkeypatch: pytest.MonkeyPatch, control_groups: Path
) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1000)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 400)
    assert default_budget_bytes(torch.device("mps")) == 300
