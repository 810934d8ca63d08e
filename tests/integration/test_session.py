"""What a forward's arguments and the model's state mean for the rows: how it is scheduled, counted, and warned of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.call.call import Call

from ..internals import runs_on_rows
from ..reference import IDS, PROMPT, assert_same, batch, row, run
from ..tiny_models import build

pytestmark = pytest.mark.usefixtures("one_thread")

# Decode steps: scheduled as such, or with a look at all that may have changed.


@pytest.fixture
def scheduled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From here on, "step" or "schedule" for each forward."""
    ways: list[str] = []

    def noted(name: str, way: str) -> None:
        method = getattr(Call, name)

        def noting(*args: Any) -> Any:
            ways.append(way)
            return method(*args)

        monkeypatch.setattr(Call, name, noting)

    noted("schedule", "schedule")
    noted("schedule_step", "step")
    return ways


@pytest.mark.way("pool")
@pytest.mark.parametrize(
    ("arguments", "num_first"),
    [
        ({}, 1),
        ({"num_beams": 3}, 1),  # which part when they are reordered
        ({"do_sample": True, "num_return_sequences": 2}, 2),  # equal rows run once until they part
        ({"prefill_chunk_size": 16}, 3),
        ({"eos_token_id": [5, 6]}, 1),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_each_token_of_generate_but_the_first_ones_is_a_step(
    arguments: dict[str, Any], num_first: int, model: PreTrainedModel, cache: PagedPrefixCache, scheduled: list[str]
) -> None:
    given = batch(row((1, 40)), row((1, 32), (2, 5)))
    assert_same(run(model, **given, **arguments), run(model, cache, **given, **arguments))
    num_steps = len(scheduled) - num_first
    assert num_steps > 2
    assert scheduled == ["schedule"] * num_first + ["step"] * num_steps


@pytest.mark.way("pool")
def test_a_plain_forward_is_no_step(model: PreTrainedModel, cache: PagedPrefixCache, scheduled: list[str]) -> None:
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        model(IDS[:, :1], past_key_values=cache)
    assert scheduled == ["schedule"] * 2


def test_rows_that_go_on_under_another_root_take_no_step_and_commit_nothing(
    model: PreTrainedModel, cache: PagedPrefixCache, scheduled: list[str]
) -> None:
    """Weights have changed between a call and the tokens that are passed to continue with its rows."""
    said = run(model, cache, input_ids=IDS).sequences
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(-1)
    whole = torch.cat([said, torch.tensor([row((2, 7))])], 1)
    new = {"input_ids": whole[:, cache.get_seq_length() :], "attention_mask": torch.ones_like(whole)}
    scheduled.clear()
    mixed = run(model, cache, **new, max_new_tokens=40).sequences
    assert runs_on_rows(cache) or scheduled == ["schedule"] * 40
    prompt = torch.cat([said[:, :55], mixed], 1)  # all of these tokens, under the weights of now
    assert_same(run(model, input_ids=prompt), run(model, PagedPrefixCache(cache.store), input_ids=prompt))
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(-1)
    other = PagedPrefixCache(cache.store)
    assert_same(run(model, input_ids=prompt), run(model, other, input_ids=prompt))
    assert other.last_call.reused_tokens <= 55


def test_rows_that_may_not_be_reused_take_no_step_and_commit_nothing(scheduled: list[str]) -> None:
    model = build("llama", attention_dropout=1e-9).train()  # so little that no number is dropped
    cache = PagedPrefixCache(model)
    assert_same(run(model, input_ids=IDS, max_new_tokens=40), run(model, cache, input_ids=IDS, max_new_tokens=40))
    assert "dropout" in cache.last_call.rows[0].stopped
    assert runs_on_rows(cache) or scheduled == ["schedule"] * 40
    cache.reset()
    assert cache.stats().num_cached_blocks == 0


def test_tokens_behind_a_prompt_of_embeddings_are_steps_of_which_none_is_committed(
    model: PreTrainedModel, cache: PagedPrefixCache, scheduled: list[str]
) -> None:
    given = {"inputs_embeds": model.get_input_embeddings()(IDS).detach(), "attention_mask": torch.ones_like(IDS)}
    assert_same(run(model, **given, max_new_tokens=40), run(model, cache, **given, max_new_tokens=40))
    assert runs_on_rows(cache) or scheduled == ["schedule"] * 2 + ["step"] * 38
    cache.reset()
    assert cache.stats().num_cached_blocks == 0


def test_frequencies_that_depend_on_length_are_looked_at_for_each_token(scheduled: list[str]) -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = build("llama", rope_parameters=dynamic, max_position_embeddings=64)
    cache = PagedPrefixCache(model)
    reference = run(
        build("llama", rope_parameters=dynamic, max_position_embeddings=64), input_ids=IDS, max_new_tokens=24
    )
    assert_same(reference, run(model, cache, input_ids=IDS, max_new_tokens=24))
    assert runs_on_rows(cache) or scheduled == ["schedule"] * 24


def test_rows_of_adapters_are_looked_at_for_each_token(model: PreTrainedModel, scheduled: list[str]) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    cache = PagedPrefixCache(adapted)
    given = {**batch(PROMPT, PROMPT), "adapter_names": ["default", "__base__"]}
    assert_same(run(adapted, **given), run(adapted, cache, **given))
    assert runs_on_rows(cache) or scheduled == ["schedule"] * 6
    scheduled.clear()
    run(adapted, cache, **batch(PROMPT, PROMPT))
    assert runs_on_rows(cache) or scheduled.count("step") == 4  # without names the adapter is a condition of all rows


# What is counted.


MASKS = {
    "none hidden": [[1] * 40, [1] * 40],
    "padding on the right": [[1] * 40, [1] * 30 + [0] * 10],
    "padding on the left": [[1] * 40, [0] * 10 + [1] * 30],
    "a hole": [[1] * 10 + [0] * 5 + [1] * 25, [1] * 40],
}


@pytest.mark.parametrize("kind", ["ids", "ids in chunks", "embeddings"])
@pytest.mark.parametrize("mask", MASKS)
def test_tokens_of_prompts_are_those_that_the_mask_shows_and_none_that_were_generated(
    kind: str, mask: str, model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    ids = torch.tensor([row((1, 40)), row((2, 40))])
    given: dict[str, Any] = {"attention_mask": torch.tensor(MASKS[mask]), "max_new_tokens": 8}
    if kind == "embeddings":
        given["inputs_embeds"] = model.get_input_embeddings()(ids).detach()
    else:
        given["input_ids"] = ids
    if kind == "ids in chunks":
        given["prefill_chunk_size"] = 16
    assert_same(run(model, **given), run(model, cache, **given))
    call, wanted = cache.last_call, given["attention_mask"].sum(dim=1).tolist()
    assert [counted.prompt_tokens for counted in call.rows] == wanted
    assert (call.prompt_tokens, call.computed_tokens, call.reused_tokens) == (sum(wanted), sum(wanted), 0)
    assert cache.stats().prompt_tokens == sum(wanted)
    run(model, cache, **given)
    assert [counted.prompt_tokens for counted in cache.last_call.rows] == wanted
    assert cache.stats().prompt_tokens == 2 * sum(wanted)


# A chat whose new turn is passed alone, which is a new prompt, as any other that begins otherwise.

TURN = torch.tensor([row((2, 12))])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("turn", [TURN, torch.tensor([row((2, 20))])])
def test_a_prompt_that_begins_otherwise_than_the_last_call_says_so_and_warns_of_nothing(
    turn: torch.Tensor, model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    """The same short prompt twice, a new chat after few-shot work, and a lone turn look alike."""
    other = ", and the last call's begin otherwise"
    run(model, cache, input_ids=IDS)
    assert not cache.last_call.rows[0].stopped.endswith(other)  # there was none
    said = cache.lookup(turn[0].tolist()).stopped
    assert_same(run(model, input_ids=turn), run(model, cache, input_ids=turn))
    assert cache.last_call.rows[0].stopped == said
    assert said.endswith(other)
    run(model, cache, input_ids=turn)
    assert cache.last_call.rows[0].stopped == "the whole prompt was known"
    run(model, cache, input_ids=IDS)  # whose blocks are known
    assert other not in cache.last_call.rows[0].stopped
    run(model, cache, input_ids=torch.cat([IDS[:, :3], turn], 1))
    assert cache.last_call.rows[0].stopped == "the prompt differs from the last call's tokens at token 3"


def test_behind_a_reset_nothing_is_said_of_the_last_call(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    run(model, cache, input_ids=IDS)
    cache.reset()
    run(model, cache, input_ids=TURN)
    assert cache.last_call.rows[0].stopped == "from token 0 on there is no full block: 12 of 16 tokens"


# Out of memory


@pytest.mark.parametrize("num_before", [0, 2])
def test_a_model_that_runs_out_of_memory_gets_what_nobody_holds(
    num_before: int, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that end so, and of what is cached; and the pool is smaller from then on."""
    cache = PagedPrefixCache(model, block_size=4, num_blocks=1000)
    long = {"input_ids": torch.tensor([row((1, 300))])}
    run(model, cache, **long)
    managed = cache.store.blocks.allocator.num_blocks
    assert managed > 64
    assert cache.stats().num_cached_blocks + cache.stats().num_blocks_in_use >= 75

    mlp, num_run = model.model.layers[1].mlp, 0
    forward = mlp.forward

    def failing(states: torch.Tensor) -> torch.Tensor:
        nonlocal num_run
        num_run += 1
        if num_run > num_before:
            raise torch.OutOfMemoryError("on purpose")
        return forward(states)

    with monkeypatch.context() as patch:
        patch.setattr(mlp, "forward", failing)
        with pytest.raises(torch.OutOfMemoryError):
            run(model, cache, input_ids=IDS)
    stats = cache.stats()
    assert (cache.get_seq_length(), stats.num_blocks_in_use, stats.num_cached_blocks, stats.pool_bytes) == (0, 0, 0, 0)
    assert stats.num_blocks == managed - managed // 4
    assert_same(run(model, **long), run(model, cache, **long))
    cache.check()
