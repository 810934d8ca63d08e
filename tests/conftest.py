"""Fixtures of more than one test file: a tiny model built from its configuration, and the real one for slow tests."""

from __future__ import annotations

import gc
import os
import sys
import threading
from typing import TYPE_CHECKING

import hypothesis
import pytest
import tqdm

# No time is tested: what takes a millisecond alone takes a second beside other work.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# Its own lock is shared with forked processes: one that a test ends while it holds it would hold it for ever.
tqdm.tqdm.set_lock(threading.RLock())

# Before torch is imported: a second thread makes tiny models slower, and tests that run beside others much slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_paged_cache import PagedPrefixCache


_frozen = ""  # the file before whose first test all was frozen


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before a file's first test what was imported is left out of collections, which took a fifth of a second each."""
    global _frozen
    if _frozen != str(item.path):
        _frozen = str(item.path)
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread_and_gradients_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny models run on one thread. A test that leaves gradients off fails itself, instead of another one after it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads((os.cpu_count() or 1) if request.node.get_closest_marker("slow") else 1)
    yield
    if torch is not None and not torch.is_grad_enabled():
        torch.set_grad_enabled(True)
        pytest.fail("this test has left gradients off")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that live before a test are the runner's: with them a model would be looked at more often than it is."""
    fingerprint = sys.modules.get("hf_paged_cache.model.fingerprint")
    if fingerprint is not None:
        before, plain = {*threading.enumerate()} - {threading.current_thread()}, fingerprint._draws_progress
        monkeypatch.setattr(fingerprint, "_draws_progress", lambda thread: thread in before or plain(thread))


@pytest.fixture
def tiny_llama() -> PreTrainedModel:
    """As `model`, with room for longer prompts."""
    from .tiny_models import build

    return build("llama", max_position_embeddings=2048)


@pytest.fixture
def tiny_tokenizer() -> PreTrainedTokenizerBase:
    """A character a token; its ids are smaller than the tiny Llama's vocabulary."""
    from .tiny_models import CHARACTERS, character_tokenizer

    return character_tokenizer(CHARACTERS)


@pytest.fixture
def model_folder(tmp_path: Path, tiny_llama: PreTrainedModel, tiny_tokenizer: PreTrainedTokenizerBase) -> str:
    """A model and its tokenizer in a folder, as users have them."""
    folder = tmp_path / "model"
    tiny_llama.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """One cluster of two cores for all tests of Ray, which are one group: `pytest.mark.xdist_group("ray")`."""
    import ray

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # this machine may be busy
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
        yield
        ray.shutdown()


@pytest.fixture
def switching() -> Iterator[None]:
    """For tests that start threads: the interpreter switches between them as often as it can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def model() -> PreTrainedModel:
    """A tiny Llama that the test may change."""
    from .tiny_models import build

    return build("llama")


@pytest.fixture
def cache(model: PreTrainedModel) -> PagedPrefixCache:
    """A cache of that model."""
    from hf_paged_cache import PagedPrefixCache

    return PagedPrefixCache(model)


@pytest.fixture(scope="session")
def demo_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct and its tokenizer; only for tests that are marked slow."""
    from hf_paged_cache.cli.demo_model import load_demo_model

    return load_demo_model()
