"""A model and its tokenizer in a folder, as users have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def model_folder(tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any) -> str:
    folder = tmp_path / "model"
    tiny_llama.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)
