"""For commands without a network."""

from pathlib import Path

import pytest


@pytest.fixture
def without_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No hub, nothing in its cache, and an empty folder for conversions, which is returned."""
    for module in ("huggingface_hub.constants", "transformers.utils.hub"):
        monkeypatch.setattr(f"{module}.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_PAGED_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
