"""A model and its tokenizer in a folder, as users have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_paged_cache.cli import demo_model, hub


@pytest.fixture
def model_folder(tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any) -> str:
    folder = tmp_path / "model"
    tiny_llama.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def without_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No hub, nothing in its cache, and an empty folder for conversions, which is returned."""
    for module in (hub, demo_model):
        monkeypatch.setattr(module, "in_hub_cache", lambda name, revision=None: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_PAGED_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
