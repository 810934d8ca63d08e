"""Every path by which a call can reach the cache gives what a fresh `DynamicCache` gives, or an error that says why."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged_cache import (
    CacheArgumentError,
    CacheBusyError,
    ForwardMismatchError,
    PagedPrefixCache,
    PrefixStore,
)

from ..internals import begin_chunks_at_the_first_column
from ..reference import IDS, assert_right, assert_same, batch, row, run
from ..tiny_models import build, without_logits_to_keep


def test_rows_do_not_resume_in_chunks_where_transformers_begins_these_at_the_first_column(
    model: PreTrainedModel, cache: PagedPrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before 5.23, where a `DynamicCache` gives other tokens."""
    said = torch.cat([run(model, cache, input_ids=IDS).sequences, torch.tensor([row((2, 7))])], 1)
    given = {"input_ids": said[:, cache.get_seq_length() :], "attention_mask": torch.ones_like(said)}
    with monkeypatch.context() as patch:
        begin_chunks_at_the_first_column(patch)
        with pytest.raises(CacheArgumentError, match="leave prefill_chunk_size out"):
            run(model, cache, **given, prefill_chunk_size=4)
    assert_same(run(model, input_ids=said), run(model, cache, **given))


def test_resetting_the_store_never_ends_a_conversation_by_hand(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(PrefixStore(model, block_size=2))
    other = PagedPrefixCache(cache.store)
    with torch.no_grad():
        reference = model(IDS, use_cache=False).logits
        model(IDS[:, :10], past_key_values=cache)
        with pytest.raises(CacheBusyError, match=r"cache's reset\(\)"):
            other.reset_prefix_cache()
        ours = model(IDS[:, 10:], past_key_values=cache).logits
    assert (reference[:, 10:] - ours).abs().max() <= 1e-4 * reference.abs().max()
    cache.reset()
    other.reset_prefix_cache()
    assert cache.stats().num_cached_blocks == 0


def test_one_cache_on_two_models_of_one_architecture_is_refused(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    other = build("llama", seed=1)
    run(model, cache, input_ids=IDS)
    with pytest.raises(ForwardMismatchError, match="run the model that the cache was built for"):
        run(other, cache, input_ids=IDS)  # nothing is attached to it
    PagedPrefixCache(other)
    with pytest.raises(CacheArgumentError, match="was built for another model"):
        run(other, cache, input_ids=IDS)
    with pytest.raises(CacheArgumentError, match="another model"):
        other(IDS, past_key_values=cache)
    cache.check()
    assert_right(model, cache, input_ids=IDS)
    own = PagedPrefixCache(other)
    assert_right(other, own, reused=0, input_ids=IDS)


def test_a_hub_style_custom_generate_works(model: PreTrainedModel, cache: PagedPrefixCache, tmp_path: Path) -> None:
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text(
        "def generate(model, **kwargs):\n    kwargs.pop('custom_generate', None)\n    return model.generate(**kwargs)\n"
    )
    how = {"custom_generate": str(tmp_path), "trust_remote_code": True}
    for _ in range(2):
        assert_same(run(model, input_ids=IDS), run(model, cache, input_ids=IDS, **how))
    assert cache.last_call.reused_tokens == 49


@pytest.mark.parametrize("takes_logits_to_keep", [True, False])
def test_prompt_lookup_works_at_every_length_with_and_without_logits_to_keep(
    model: PreTrainedModel, takes_logits_to_keep: bool
) -> None:
    if not takes_logits_to_keep:
        model = without_logits_to_keep(model)
    cache = PagedPrefixCache(model)
    for length in (30, 33, 38, 43):
        ids = torch.tensor([row((1, 10), (1, 10), (1, 10), (1, length - 30))])  # repeats itself
        reference = run(model, input_ids=ids, prompt_lookup_num_tokens=3)
        for _ in range(2):
            assert_same(reference, run(model, cache, input_ids=ids, prompt_lookup_num_tokens=3))
    assert cache.last_call.reused_tokens == (42 if takes_logits_to_keep else 0)
    run(model, cache, input_ids=ids)
    assert cache.last_call.reused_tokens == 42
    cache.check()


@pytest.mark.parametrize("in_block", [False, True])
def test_assistant_early_exit_is_right(model: PreTrainedModel, cache: PagedPrefixCache, in_block: bool) -> None:
    """The assistant is the model itself with fewer layers: it shares the weights, and must not get our cache."""
    for _ in range(2):
        reference = run(model, input_ids=IDS, assistant_early_exit=1)
        if in_block:
            with cache:
                output = run(model, input_ids=IDS, assistant_early_exit=1)
        else:
            output = run(model, cache, input_ids=IDS, assistant_early_exit=1)
        assert_same(reference, output)
        cache.check()


def test_prefill_by_hand_then_deepcopy_then_generate(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    prefix = torch.tensor([row((1, 43))])
    with torch.no_grad():
        cache = model(prefix, past_key_values=cache).past_key_values
    for question in (2, 3, 4):
        ids = torch.cat([prefix, torch.tensor([row((question, 7))])], 1)
        twin = copy.deepcopy(cache)
        assert_right(model, twin, reused=43, input_ids=ids)
        assert cache.get_seq_length() == 43
    cache.check()


def test_tokens_behind_a_row_s_end_of_sequence_are_not_committed(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    inputs = batch(row((1, 20)), row((2, 20)))
    free = run(model, **inputs, max_new_tokens=40)
    first_ends = free.sequences[0, 21].item()  # the second token generated in row 0
    reference = run(model, **inputs, max_new_tokens=40, eos_token_id=first_ends)
    assert_same(reference, run(model, cache, **inputs, max_new_tokens=40, eos_token_id=first_ends))
    generated = reference.sequences.shape[1]
    cache.reset()
    other = (generated - 1) // 16 if first_ends not in reference.sequences[1, 20:-1] else None
    assert cache.stats().num_cached_blocks <= 22 // 16 + (other if other is not None else generated // 16)
