"""With a device as torch's default one, what is of the host stays there: tables, files, and tiers in host memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_paged_cache import PagedPrefixCache
from tests.reference import assert_same, batch, row, run
from tests.tiny_models import build

pytestmark = pytest.mark.usefixtures("one_thread")


def inputs(number: int, length: int = 100) -> dict[str, torch.Tensor]:
    with torch.device("cpu"):
        return batch(row((number, length)))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_what_is_saved_is_loaded(kind: str, tmp_path: Path) -> None:
    with torch.device("sim"):
        model = build(kind).to("sim")
        reference, cache = run(model, **inputs(1)), PagedPrefixCache(model)
        assert_same(reference, run(model, cache, **inputs(1)))
        assert cache.store.save(tmp_path)
        other = PagedPrefixCache(model)
        other.store.load(tmp_path)
        assert_same(reference, run(model, other, **inputs(1)))
        assert other.last_call.reused_tokens == 96


def test_blocks_go_to_host_memory_and_come_back() -> None:
    with torch.device("sim"):
        model = build("llama").to("sim")
        cache = PagedPrefixCache(model, num_blocks=18, host_bytes=2**24)
        references = [run(model, **inputs(number)) for number in range(3)]
        for turn in range(2):
            for number, reference in enumerate(references):
                assert_same(reference, run(model, cache, **inputs(number)))
                assert cache.last_call.reused_tokens >= 96 * turn
                cache.reset()


def test_scores() -> None:
    with torch.device("sim"):
        model = build("llama").to("sim")
        cache = PagedPrefixCache(model)
        context = inputs(1)["input_ids"][0].tolist()
        first, second = (cache.score(context, [[5, 6], [7]]) for _ in range(2))
        for score, again in zip(first, second, strict=True):
            assert score.log_probs == pytest.approx(again.log_probs, rel=1e-4)
        with torch.no_grad():
            wanted = model(torch.tensor([[*context, 5, 6]]), use_cache=False).logits[0, -3:-1].log_softmax(-1)
        assert first[0].log_probs == pytest.approx([float(wanted[0, 5]), float(wanted[1, 6])], rel=1e-4)
