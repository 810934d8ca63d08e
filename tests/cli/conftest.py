"""For commands without a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_paged_cache.cli import demo_model, hub


@pytest.fixture
def without_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No hub, nothing in its cache, and an empty folder for conversions, which is returned."""
    for module in (hub, demo_model):
        monkeypatch.setattr(module, "in_hub_cache", lambda name, revision=None: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_PAGED_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
