"""With `prefill_chunk_size` a call gives the bits that `DynamicCache` gives, and computes only what follows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import CacheArgumentError, PagedPrefixCache, PrefixStore
from hf_paged_cache.call.find import Finding
from hf_paged_cache.integration.chunked_prompt import ChunkedPrompt
from hf_paged_cache.rows.request import Chunks
from tests.differential.kinds import build

from ..internals import reused_of_chunks
from ..reference import FROM_5_23, batch, row

SIZE = 16  # of a chunk
PROMPT = row((1, 70))


def logits(model: PreTrainedModel, cache: Any, prompts: list[list[int]], **options: Any) -> torch.Tensor:
    torch.manual_seed(0)
    given = {"prefill_chunk_size": SIZE, "max_new_tokens": 6, "do_sample": False, **options}
    asked = {"output_logits": True, "return_dict_in_generate": True, "eos_token_id": None}
    return torch.stack(model.generate(**batch(*prompts), past_key_values=cache, **given, **asked).logits)


def is_same(model: PreTrainedModel, cache: PagedPrefixCache, prompts: list[list[int]], **options: Any) -> bool:
    reference = logits(model, DynamicCache(config=model.config), prompts, **options)
    return torch.equal(reference, logits(model, cache, prompts, **options))


def tiny(kind: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return build(kind, attention="eager").to(dtype)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *(("llama", dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        *((kind, torch.bfloat16) for kind in ("gemma3_text", "falcon_h1", "lfm2", "deepseek_v3", "gpt_oss")),
    ],
    ids=str,
)
def test_a_known_prompt_is_computed_from_its_last_chunk_on(kind: str, dtype: torch.dtype) -> None:
    model = tiny(kind, dtype)
    cache = PagedPrefixCache(model)
    for prompt, num_computed in ((PROMPT, 70), (PROMPT, 6), (row((1, 70), (2, 20)), 26), (row((1, 60), (3, 20)), 32)):
        assert is_same(model, cache, [prompt])
        assert cache.last_call.reused_tokens == reused_of_chunks(len(prompt) - num_computed)
        assert cache.last_call.computed_tokens + cache.last_call.reused_tokens == len(prompt)
        assert cache.last_call.prompt_tokens == len(prompt)
    cache.check()


def test_a_prompt_of_whole_chunks_computes_its_last_one() -> None:
    model = tiny()
    cache = PagedPrefixCache(model)
    for num_computed in (64, 16, 16):
        assert is_same(model, cache, [PROMPT[:64]])
        assert cache.last_call.reused_tokens == reused_of_chunks(64 - num_computed)


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"do_sample": True}, {"do_sample": True, "num_return_sequences": 3}]
)
def test_rows_of_one_prompt(options: dict[str, Any]) -> None:
    model = tiny()
    cache = PagedPrefixCache(model)
    assert is_same(model, cache, [PROMPT], **options)
    assert is_same(model, cache, [row((1, 70), (2, 9))], **options)
    num_rows = max(options.get(name, 1) for name in ("num_beams", "num_return_sequences"))
    assert cache.last_call.reused_tokens == reused_of_chunks(64 * num_rows)


def test_drafts_run_the_whole_prompt_in_one_forward() -> None:
    model = tiny()
    cache = PagedPrefixCache(model)
    for prompt in (PROMPT, PROMPT, row((1, 70), (2, 9))):
        logits(model, cache, [prompt])
        assert is_same(model, cache, [prompt], prompt_lookup_num_tokens=3)


def test_a_batch_with_the_same_padding_is_reused_and_another_one_is_not() -> None:
    model = tiny()
    cache = PagedPrefixCache(model)
    prompts = [PROMPT, row((2, 50))]
    for asked, num_reused in ((prompts, 0), (prompts, 64 + 44), (prompts[:1], 0), (prompts[::-1], 0)):
        assert is_same(model, cache, asked)
        assert cache.last_call.reused_tokens == reused_of_chunks(num_reused)
        assert cache.last_call.dense.startswith("prefill_chunk_size was given") == (len(asked) > 1)


def test_what_was_computed_in_other_shapes_is_not_taken() -> None:
    model = tiny()
    cache = PagedPrefixCache(model)
    cache.prefill(PROMPT)
    for options in ({"prefill_chunk_size": None}, {"prefill_chunk_size": 8}, {"num_beams": 2}):
        logits(model, cache, [PROMPT], **options)
    assert is_same(model, cache, [PROMPT])
    assert cache.last_call.reused_tokens == 0
    answered = model.generate(**batch(PROMPT), past_key_values=cache, max_new_tokens=40, prefill_chunk_size=SIZE)
    assert is_same(model, cache, answered.tolist())
    assert cache.last_call.reused_tokens == reused_of_chunks(64)  # of the prompt, none of what was generated


def test_experts_are_reused_in_blocks_of_whole_chunks() -> None:
    model = tiny("qwen3_moe")
    for block_size, num_reused in ((16, 64), (8, 0), (32, 64)):
        cache = PagedPrefixCache(model, block_size=block_size)
        assert is_same(model, cache, [PROMPT])
        assert is_same(model, cache, [row((1, 64), (2, 9))])
        assert cache.last_call.reused_tokens == reused_of_chunks(num_reused)
    assert is_same(model, cache, [PROMPT, row((2, 50))])
    assert "experts compute all rows" in cache.last_call.rows[0].stopped


def test_chunks_are_found_in_a_saved_file_and_in_a_lower_tier(tmp_path: Path) -> None:
    model = tiny()
    cache = PagedPrefixCache(model, num_blocks=9, disk_folder=tmp_path / "tier")
    logits(model, cache, [PROMPT])
    logits(model, cache, [row((5, 70))])
    assert is_same(model, cache, [PROMPT])
    assert cache.last_call.reused_tokens >= reused_of_chunks(48)
    assert is_same(model, cache, [PROMPT])
    assert cache.last_call.reused_tokens == reused_of_chunks(64)
    cache.store.save(tmp_path / "saved")
    other = PrefixStore(model)
    other.load(tmp_path / "saved")
    cache = PagedPrefixCache(other)
    assert is_same(model, cache, [PROMPT])
    assert cache.last_call.reused_tokens == reused_of_chunks(64)


def test_with_other_threads_nothing_is_taken() -> None:
    model, before = tiny(), torch.get_num_threads()
    cache = PagedPrefixCache(model)
    logits(model, cache, [PROMPT])
    try:
        torch.set_num_threads(before + 1)
        assert is_same(model, cache, [PROMPT])
    finally:
        torch.set_num_threads(before)
    assert cache.last_call.reused_tokens == 0


def test_a_call_that_the_pool_has_no_room_for_gives_the_same_bits() -> None:
    model = tiny()
    cache = PagedPrefixCache(model, num_blocks=4)
    assert is_same(model, cache, [PROMPT])
    assert is_same(model, cache, [row((1, 70), (2, 60))])


@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", torch.float32), ("mistral", torch.bfloat16), ("falcon_h1", torch.bfloat16)], ids=str
)
def test_scores_are_those_of_the_same_forwards_without_a_cache(kind: str, dtype: torch.dtype) -> None:
    model = tiny(kind, dtype)
    cache = PagedPrefixCache(model)
    context, answers = row((1, 50)), [row((2, 30)), row((2, 3)), row((3, 1))]
    logits(model, cache, [context])
    for num_reused in (48 * 3, 48 * 3):
        scores = cache.score(context, answers, prefill_chunk_size=SIZE)
        assert cache.last_call.reused_tokens == reused_of_chunks(num_reused)
        for answer, score in zip(answers, scores, strict=True):
            assert score.log_probs == plain_log_probs(model, context, answer)


def plain_log_probs(model: PreTrainedModel, context: list[int], answer: list[int]) -> tuple[float, ...]:
    ids, cache = torch.tensor([context + answer[:-1]]), DynamicCache(config=model.config)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split(SIZE, dim=1)]
    found = torch.cat(parts, dim=1)[0, len(context) - 1 :]
    chosen = found.log_softmax(dim=-1, dtype=torch.float32)[torch.arange(len(answer)), torch.tensor(answer)]
    return tuple(chosen.tolist())


def test_a_chunk_size_that_is_none_is_refused() -> None:
    with pytest.raises(CacheArgumentError, match="prefill_chunk_size"):
        PagedPrefixCache(tiny()).score([1, 2], [[3]], prefill_chunk_size=0)


def anywhere(patch: pytest.MonkeyPatch) -> None:
    """Hits end at any token."""
    look_together = Finding.look_together
    patch.setattr(Finding, "look_together", lambda self, latest, _: look_together(self, latest, 1))


def any_shape(patch: pytest.MonkeyPatch) -> None:
    """Other shapes live under the same root."""
    patch.setattr(ChunkedPrompt, "shape_of", lambda *_: b"")


def all_committed(patch: pytest.MonkeyPatch) -> None:
    """What is computed in other shapes is committed."""
    patch.setattr(Chunks, "commit_end", lambda *_: 1000)


@FROM_5_23
@pytest.mark.parametrize("without", [anywhere, any_shape, all_committed])
def test_each_rule_is_needed(without: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch)
    model = tiny()
    found = []
    for size in (None, SIZE):
        cache = PagedPrefixCache(model, block_size=4)
        given = {"max_new_tokens": 60, "eos_token_id": None, "prefill_chunk_size": size}
        answered = model.generate(**batch(row((4, 20))), past_key_values=cache, **given).tolist()
        found += [is_same(model, cache, [tokens]) for tokens in (*answered, row((1, 70)), row((1, 60), (2, 17)))]
    assert not all(found)
