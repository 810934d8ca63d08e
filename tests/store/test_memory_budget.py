"""How much memory a pool may take when nobody says. The platforms are stood in for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from hf_paged_cache.store import memory_budget as memory
from hf_paged_cache.store.memory_budget import DEFAULT_SHARE, default_budget_bytes

CPU = torch.device("cpu")


@pytest.fixture
def control_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A host of which 1,000 bytes are available, and the folder in which a container would be told its limit."""
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


def test_on_an_accelerator_it_is_half_of_what_its_driver_says_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (1001, 5000))
    assert default_budget_bytes(torch.device("cuda", 1)) == 500
    assert asked == [torch.device("cuda", 1)]


def test_on_apple_silicon_it_is_half_of_what_is_recommended_and_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1000)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 400)
    assert default_budget_bytes(torch.device("mps")) == 300


def test_on_this_host_it_is_positive_and_less_than_its_memory() -> None:
    assert 0 < default_budget_bytes(CPU) <= psutil.virtual_memory().total * DEFAULT_SHARE
