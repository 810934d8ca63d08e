"""How much memory a pool may take when nobody says. The platforms are stood in for."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from hf_paged_cache import memory
from hf_paged_cache.memory import DEFAULT_SHARE, default_budget_bytes

CPU = torch.device("cpu")


def host(monkeypatch: pytest.MonkeyPatch, **values: int) -> None:
    """A host that answers these sysconf names and no others."""
    stand_in = SimpleNamespace(sysconf_names=dict.fromkeys(values, 0), sysconf=values.__getitem__)
    monkeypatch.setattr(memory, "os", stand_in)


def test_on_a_host_it_is_half_of_the_pages_that_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, SC_AVPHYS_PAGES=1000, SC_PHYS_PAGES=9000, SC_PAGE_SIZE=4096)
    assert default_budget_bytes(CPU) == 500 * 4096


def test_on_a_host_that_tells_only_its_total_it_is_a_quarter_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    host(monkeypatch, SC_PHYS_PAGES=1000, SC_PAGE_SIZE=4096)
    assert default_budget_bytes(CPU) == 250 * 4096


def test_on_a_host_that_tells_nothing_it_is_a_few_gibibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "os", SimpleNamespace())  # no sysconf at all, as on Windows
    assert default_budget_bytes(CPU) == 4 * 2**30


def test_on_an_accelerator_it_is_half_of_what_its_driver_says_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: asked.append(device) or (1001, 5000))
    assert default_budget_bytes(torch.device("cuda", 1)) == 500
    assert asked == [torch.device("cuda", 1)]


def test_on_apple_silicon_it_is_half_of_what_is_recommended_and_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1000)
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: 400)
    assert default_budget_bytes(torch.device("mps")) == 300


@pytest.mark.skipif(not hasattr(os, "sysconf"), reason="this platform has no sysconf")
def test_on_this_host_it_is_positive_and_less_than_its_memory() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < default_budget_bytes(CPU) <= total * DEFAULT_SHARE
