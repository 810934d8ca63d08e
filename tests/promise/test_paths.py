"""Every path by which a call can reach the cache gives what a fresh `DynamicCache` gives, or an error that says why."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel

from hf_paged_cache import CacheArgumentError, CacheBusyError, ForwardMismatchError, PagedPrefixCache, PrefixStore

from ..internals import begin_chunks_at_the_first_column
from ..reference import IDS, assert_near, assert_right, assert_same, at_once, batch, row, run
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
    assert_near(ours, reference[:, 10:])
    cache.reset()
    other.reset_prefix_cache()
    assert cache.stats().num_cached_blocks == 0


def test_one_cache_on_two_models_of_one_architecture_is_refused(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    other = build("llama", seed=1)
    run(model, cache, input_ids=IDS)
    with pytest.raises(ForwardMismatchError, match=r"belongs to another model object \(a LlamaForCausalLM;"):
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


def ids(tokens: list[int]) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([tokens])}


def test_a_processor_that_rewrites_a_token_that_ran(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    class Heal(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if input_ids.shape[1] == 40:
                input_ids[0, 36] = 5 if int(input_ids[0, 36]) != 5 else 6
            return scores

    said = run(model, cache, **ids(row((1, 32))), max_new_tokens=20, logits_processor=[Heal()]).sequences[0].tolist()
    turn = ids(said + row((2, 5)))
    assert_right(model, cache, **turn)
    cache.reset()
    assert_right(model, cache, **turn)


def test_embeddings_beside_ids_are_not_taken_for_the_ids(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    prompt = ids(row((1, 40)))
    own = {**prompt, "inputs_embeds": model.get_input_embeddings()(torch.tensor([row((2, 40))]))}
    assert_right(model, cache, **own)
    assert "embeddings" in cache.last_call.rows[0].stopped
    assert_right(model, cache, reused=0, **prompt)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("is_shared", [True, False], ids=["one cache", "caches of one store"])
def test_threads_that_call_at_once_are_all_right(
    is_shared: bool, model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    prompts = [ids(row((1, 48), (seed, 16))) for seed in range(2, 6)]
    wanted = [run(model, **prompt, max_new_tokens=20) for prompt in prompts]

    def call(prompt: dict[str, torch.Tensor]) -> list[Any]:
        mine = cache if is_shared else PagedPrefixCache(cache.store)
        given = {**prompt, "attention_mask": torch.ones_like(prompt["input_ids"]), "do_sample": False}
        options = {"return_dict_in_generate": True, "output_logits": True, "past_key_values": mine}
        return [model.generate(**given, max_new_tokens=20, **options) for _ in range(2)]

    for reference, outputs in zip(wanted, at_once(*(partial(call, prompt) for prompt in prompts)), strict=True):
        for output in outputs:
            assert_same(reference, output)
    cache.check()


def test_rows_that_a_call_returned_go_on_beside_later_calls(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    """They are theirs who have them: no later call of the cache writes to them."""
    prompt = row((1, 50))
    returned = run(model, cache, **ids(prompt))
    run(model, cache, **ids(prompt[:40] + row((2, 30))), max_new_tokens=20)
    said = returned.sequences[0].tolist()
    turn = ids(said + row((3, 6)))
    wanted = run(model, **turn)
    assert_same(wanted, run(model, copy.deepcopy(returned.past_key_values), **turn))
    assert_same(wanted, run(model, returned.past_key_values, **turn))
    mask = torch.ones_like(turn["input_ids"])
    new = {"input_ids": turn["input_ids"][:, returned.past_key_values.get_seq_length() :], "attention_mask": mask}
    assert_same(wanted, run(model, returned.past_key_values, **new))


def test_the_tensors_of_a_layer_are_contiguous_as_a_dynamic_caches_are(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    run(model, cache, **ids(row((1, 30))))
    for layer in cache.layers:
        assert layer.keys.is_contiguous()
        assert layer.values.untyped_storage().nbytes() == layer.values.nbytes
