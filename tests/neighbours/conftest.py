"""Shared by the tests of libraries round `generate`: a tiny model, its cache, and the logits that their callers get."""

import pytest
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache

from ..tiny_models import build
from .recorder import Recorder


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
    return PagedPrefixCache(model, trust_hooks=True)  # those of a recorder


@pytest.fixture
def recorder(model: PreTrainedModel, cache: PagedPrefixCache) -> Recorder:
    """Attached after the cache, so that it sees what the model's callers get."""
    return Recorder(model)
