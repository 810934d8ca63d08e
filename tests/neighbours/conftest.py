"""Shared by the tests of libraries round `generate`: a tiny model, its cache, and the logits that their callers get."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from hf_paged_cache import PagedPrefixCache

from ..tiny_models import build
from .recorder import Recorder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a library would like to look up, it does without."""
    import datasets.config
    import huggingface_hub.constants

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def model() -> PreTrainedModel:
    return build("llama", max_position_embeddings=2048)


@pytest.fixture
def cache(model: PreTrainedModel) -> PagedPrefixCache:
    return PagedPrefixCache(model)


@pytest.fixture
def recorder(model: PreTrainedModel, cache: PagedPrefixCache) -> Recorder:
    """Attached after the cache, so that it sees what the model's callers get."""
    return Recorder(model)
