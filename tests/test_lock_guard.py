"""Scenes that come by every lock of the package pass the guard of `lock_guard.py`, and no lock is held where others' code runs."""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from hf_paged_cache import CacheBusyError, PagedPrefixCache
from hf_paged_cache.call.match import match
from hf_paged_cache.call.request import RowInput

from .conformance import zoo
from .internals import make_forwards_cheap, split_everywhere
from .lock_guard import LockError
from .reference import AtStep, batch, row, run
from .shared_folders import tier_of
from .tiny_models import build

# A handful of scenes that come by every lock.


def fresh(**options: Any) -> PagedPrefixCache:
    return PagedPrefixCache(build("llama"), block_size=4, num_blocks=80, **options)


def generate_and_ask() -> None:
    cache = fresh()
    model, ids = cache.store.model, torch.tensor([row((1, 18))])
    for _ in range(2):
        run(model, cache, input_ids=ids)
    run(model, cache, input_ids=ids, num_beams=3)
    run(model, cache, input_ids=ids, prompt_lookup_num_tokens=3)
    cache.stats()
    cache.last_call  # noqa: B018 - a property that may take the lock
    cache.pin(ids)
    cache.unpin()
    cache.check()
    cache.score(row((1, 18)), [row((2, 3)), row((3, 3))])
    for _ in range(2):
        cache.prefill(row((4, 10)))
    cache.lookup(ids)
    cache.explain(ids)
    cache._repr_html_()
    copy.deepcopy(cache).crop(-2)
    assert cache.layers[0].keys is not None
    assert cache.layers[0].device == torch.device("cpu")
    cache.reset()
    cache.reset_prefix_cache()
    cache.store.stats()
    cache.store.reset_prefix_cache()


def build_in_the_call() -> None:
    model = build("llama")
    ids = torch.tensor([row((1, 18))])
    model.generate(ids, max_new_tokens=2, past_key_values=PagedPrefixCache(model, block_size=4, num_blocks=80))


def put_a_generate_round_it() -> None:
    model = build("llama")
    plain = model.generate
    model.generate = lambda **given: [plain(**given), plain(**given)]
    run(model, PagedPrefixCache(model, block_size=4, num_blocks=80), input_ids=torch.tensor([row((1, 18))]))


def begin_with_a_long_call() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_paged_cache.store.block_store._MOST_UNMEASURED_TOKENS", 8)
        cache = PagedPrefixCache(build("llama"))
        run(cache.store.model, cache, input_ids=torch.tensor([row((1, 18))]))


def pin_where_rope_depends_on_length() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    cache = PagedPrefixCache(build("llama", rope_parameters=scaling, max_position_embeddings=32))
    cache.prefill(row((1, 18)))
    cache.pin(row((1, 18)))


def bypass() -> None:
    cache, ids = fresh(), torch.tensor([row((1, 18))])
    model = cache.store.model
    for _ in range(2):  # with gradients, so that nothing is kept
        model(ids[:, :10], past_key_values=cache)
        model(ids[:, 10:], past_key_values=cache)
        cache.reset()


def fill_a_pool() -> None:
    """Calls that have more than the pool, whose rows hold blocks where it is crowded."""
    cache = PagedPrefixCache(build("llama"), block_size=4, num_blocks=6)
    with pytest.MonkeyPatch.context() as patch:
        split_everywhere(patch)
        for seed in (1, 2, 1):
            prompts = batch(row((seed, 16), (7, 4)), row((seed, 16), (8, 4)))
            run(cache.store.model, cache, **prompts)


def run_out_of_memory() -> None:
    cache, ids = fresh(), torch.tensor([row((1, 18))])
    broken = cache.store.model.lm_head.register_forward_pre_hook(_lack_memory)
    with contextlib.suppress(torch.OutOfMemoryError):
        run(cache.store.model, cache, input_ids=ids)
    broken.remove()
    run(cache.store.model, cache, input_ids=ids)


def _lack_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError


def change_windows_and_dtype() -> None:
    """Each makes what is cached useless."""
    cache, ids = PagedPrefixCache(build("mistral"), block_size=4, max_bytes=2**20), torch.tensor([row((1, 18))])
    model = cache.store.model
    for change in (lambda: None, lambda: setattr(model.config, "sliding_window", 7), model.double):
        change()
        run(model, cache, input_ids=ids)
        assert not cache.last_call.reused_tokens


def share_a_prefix() -> None:
    cache = fresh()
    with pytest.MonkeyPatch.context() as patch:
        make_forwards_cheap(patch)
        run(cache.store.model, cache, **batch(row((1, 20), (2, 4)), row((1, 20), (3, 4))))


def compute_in_chunks() -> None:
    cache = fresh()
    for _ in range(2):
        run(cache.store.model, cache, **batch(row((1, 20))), prefill_chunk_size=8)
        cache.reset()


def come_back_from_a_tier() -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        cache = PagedPrefixCache(build("llama"), block_size=4, num_blocks=20, disk_folder=folder)
        tier_of(cache).run_bytes = 2**12
        for tokens in ((1, 18), (2, 30), (3, 30), (1, 18)):
            run(cache.store.model, cache, input_ids=torch.tensor([row(tokens)]))
        assert cache.last_call.rows[0].disk_tokens
        tier_of(cache).join()
        other = PagedPrefixCache(copy.deepcopy(cache.store.model), block_size=4, disk_folder=folder)
        run(other.store.model, other, input_ids=torch.tensor([row((2, 30))]))
        assert other.last_call.rows[0].disk_tokens
        weight = other.store.model.model.layers[0].self_attn.k_proj.weight
        weight.detach().numpy()[:, 1:7] += 1.0  # seen by no count, so only by a look at a block
        assert other.verify().differing
        run(other.store.model, other, input_ids=torch.tensor([row((2, 30))]))


def save_and_load() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cache = fresh()
        run(cache.store.model, cache, input_ids=torch.tensor([row((1, 18))]))
        cache.store.save(folder)
        assert PagedPrefixCache(cache.store.model, block_size=4).store.load(folder).num_blocks


def verify() -> None:
    cache = fresh()
    run(cache.store.model, cache, input_ids=torch.tensor([row((1, 18))]))
    assert cache.verify().num_blocks


def carry_states() -> None:
    """Rows whose layers do: one alone, several that share a prefix, others that join on the way, and a look at a block."""
    cache = PagedPrefixCache(_model_with_states(), block_size=4)
    model = cache.store.model
    with pytest.MonkeyPatch.context() as patch:
        make_forwards_cheap(patch)
        run(model, cache, **batch(row((1, 20), (2, 4)), row((1, 20), (3, 4)), row((4, 12))), max_new_tokens=2)
        run(model, cache, **batch(row((1, 20), (5, 4)), row((1, 20), (6, 7))), max_new_tokens=2)
        run(model, cache, input_ids=torch.tensor([row((1, 20), (7, 4))]), max_new_tokens=2)
        assert cache.verify().num_blocks


@functools.cache
def _model_with_states() -> Any:
    return zoo.build("falcon_h1")


def fail_in_a_layer() -> None:
    cache = fresh()
    model, ids = cache.store.model, torch.tensor([row((1, 18))])
    broken = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError), torch.no_grad():
        model(ids, past_key_values=cache)
    broken.remove()
    with torch.no_grad():
        model(ids, past_key_values=cache)


def share_columns() -> None:
    """Calls of rows that share and of equal ones, beams, a loop, and a reset."""
    with pytest.MonkeyPatch.context() as patch:
        split_everywhere(patch)
        cache = fresh()
        model, prompts = cache.store.model, batch(row((1, 40), (2, 9)), row((1, 40), (3, 12)))
        for _ in range(2):
            run(model, cache, **prompts)
            run(model, cache, **prompts, num_beams=2)
            cache.reset()
        assert cache.last_call.reused_tokens
        with torch.no_grad():
            model(prompts["input_ids"], past_key_values=cache, logits_to_keep=1)
        with pytest.raises(CacheBusyError):
            cache.reset_prefix_cache()
        cache.reset()
        cache.reset_prefix_cache()
        cache.store.reset_prefix_cache()


SCENES = [
    generate_and_ask,
    save_and_load,
    build_in_the_call,
    put_a_generate_round_it,
    begin_with_a_long_call,
    pin_where_rope_depends_on_length,
    bypass,
    fill_a_pool,
    run_out_of_memory,
    change_windows_and_dtype,
    share_a_prefix,
    compute_in_chunks,
    come_back_from_a_tier,
    verify,
    carry_states,
    fail_in_a_layer,
    share_columns,
]


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_with_all_locks_no_scene_fails(scene: Callable[[], None]) -> None:
    scene()


def test_a_lock_that_is_not_taken_is_seen() -> None:
    store = fresh().store.blocks
    row_of_a_call = RowInput(array("q", range(8)), 0, 0, root=b"a root")
    with pytest.raises(LockError, match="without the store's lock"):
        match(store, [row_of_a_call], (), {})
    with store.lock:
        (known,) = match(store, [row_of_a_call], (), {})
    assert not known.num_tokens


def test_a_lock_held_where_a_model_runs_is_seen() -> None:
    cache = fresh()
    with (
        cache.store.blocks.lock,
        pytest.raises(LockError, match=r"is held at Rows\.before_forward"),
        torch.no_grad(),
    ):
        cache.store.model(torch.tensor([row((1, 8))]), past_key_values=cache)


def test_no_lock_is_held_in_a_module_or_in_a_user_s_callback() -> None:
    seen: set[str] = set()

    def look(name: str) -> None:
        seen.add(name)
        assert not cache.store.blocks.lock._is_owned(), name  # type: ignore[attr-defined]

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            look("streamer")

        def end(self) -> None:
            look("streamer")

    class Processor(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            look("logits processor")
            return scores

    cache = fresh(trust_hooks=True)
    model = cache.store.model
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: look(name))
        module.register_forward_hook(lambda module, args, output, name=name: look(name))
    for ids in (batch(row((1, 20), (2, 4)), row((1, 20), (3, 4))), {"input_ids": torch.tensor([row((1, 18))])}):
        run(model, cache, **ids, logits_processor=[Processor(), AtStep(1, lambda: look("at a step"))])
    run(model, cache, input_ids=torch.tensor([row((1, 18))]), streamer=Streamer())
    cache.score(row((1, 18)), [row((2, 3)), row((3, 3))])
    assert cache.verify().num_blocks
    assert seen >= {"streamer", "logits processor", "", "model.layers.1.self_attn", "lm_head"}
