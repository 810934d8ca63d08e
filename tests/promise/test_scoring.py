"""`cache.score`: what one plain forward of context and continuation says, with the context run once."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from hf_paged_cache import CacheArgumentError, PagedPrefixCache, Score

from ..reference import IDS, PROMPT, Forwards, assert_same, row, run, zero_blocks
from ..tiny_models import build, tiny, without_logits_to_keep
from .test_conditions_of_reuse import ROPES

MODELS = ("llama", "gpt2", "mistral", "gemma3", "bloom", "bert_decoder")
SHARED = row((2, 3))  # what all but the last begin with
CONTINUATIONS = [SHARED + row((3, 4)), SHARED + row((4, 40)), SHARED, SHARED[:2] + row((5, 1)), SHARED + row((3, 2))]
NUM_BEHIND = sum(len(each) - 1 for each in CONTINUATIONS)  # tokens that run after the context


def log_probs(model: PreTrainedModel, context: Sequence[int], continuation: Sequence[int]) -> torch.Tensor:
    """What one plain forward of all tokens, without a cache, says of the continuation."""
    ids = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, len(context) - 1 : -1]
    return logits.log_softmax(dim=-1).gather(1, ids[0, len(context) :, None])[:, 0]


def assert_right(
    model: PreTrainedModel, context: Sequence[int], continuations: Sequence[Sequence[int]], scores: Sequence[Score]
) -> None:
    assert len(scores) == len(continuations)
    for tokens, score in zip(continuations, scores, strict=True):
        wanted = log_probs(model, context, tokens)
        assert score.num_tokens == len(tokens)
        torch.testing.assert_close(torch.tensor(score.log_probs), wanted, rtol=0, atol=1e-5 * float(wanted.abs().max()))
        assert score.total == pytest.approx(float(wanted.sum()), rel=1e-5)


@pytest.mark.parametrize(("name", "batch_size"), [*((name, None) for name in MODELS), ("llama", 1), ("llama", 2)])
def test_scores_are_those_of_plain_forwards_and_reuse(name: str, batch_size: int | None) -> None:
    model = tiny(name)
    cache = PagedPrefixCache(model)
    for turn in range(2):
        assert_right(model, PROMPT, CONTINUATIONS, cache.score(PROMPT, CONTINUATIONS, batch_size=batch_size))
        # all as if run alone; then the context, of which 48 tokens are known the second time, and the two longest
        stats = cache.stats()
        assert stats.prompt_tokens == (turn + 1) * (5 * 50 + sum(len(tokens) - 1 for tokens in CONTINUATIONS))
        assert stats.computed_tokens == (turn + 1) * (50 + NUM_BEHIND) - turn * 48
        assert stats.num_calls == turn + 1
        assert stats.num_blocks_in_use == 0
        cache.check()
    zero_blocks(cache)
    with pytest.raises(AssertionError):
        assert_right(model, PROMPT, CONTINUATIONS, cache.score(PROMPT, CONTINUATIONS, batch_size=batch_size))


@pytest.mark.parametrize(("name", "batch_size"), [("llama", None), ("bloom", 1), ("lfm2", None)])
def test_under_a_hook_of_others_scores_are_right_and_nothing_is_reused(name: str, batch_size: int | None) -> None:
    model = build(name)
    model.register_forward_pre_hook(lambda *_: None)
    cache = PagedPrefixCache(model)
    for _ in range(2):
        assert_right(model, PROMPT, CONTINUATIONS, cache.score(PROMPT, CONTINUATIONS, batch_size=batch_size))
        assert cache.last_call.reused_tokens == 0
    assert cache.stats().num_bypassed_calls == 2


@pytest.mark.parametrize(("name", "size", "is_hooked"), [("mixtral", 24, False), ("llama", 16, True)])
def test_what_runs_in_chunks_on_transformers_layers_is_scored(name: str, size: int, is_hooked: bool) -> None:
    """Experts compute all tokens of a chunk together, and a chunk is more than a block here; or there is a hook."""
    model = build(name)
    if is_hooked:
        model.register_forward_pre_hook(lambda *_: None)
    cache = PagedPrefixCache(model)
    for _ in range(2):
        scores = cache.score(PROMPT, CONTINUATIONS, prefill_chunk_size=size)
        assert_right(model, PROMPT, CONTINUATIONS, scores)
        assert cache.last_call.computed_tokens == cache.last_call.prompt_tokens == 5 * 50 + NUM_BEHIND
    assert cache.stats().num_bypassed_calls == 2


def test_a_model_that_cannot_leave_out_logits_is_scored_and_reuses() -> None:
    model = without_logits_to_keep(build("llama"))
    cache = PagedPrefixCache(model)
    with Forwards(model) as shapes:
        for _ in range(2):
            scores = cache.score(PROMPT, CONTINUATIONS)
    assert shapes == [(1, 50), (5, 42), (1, 2), (5, 42)]
    assert_right(model, PROMPT, CONTINUATIONS, scores)
    for _ in range(2):  # of both rows the first blocks are known the second time, and their logits needed
        long = [row((6, 40)), row((7, 40))]
        assert_right(model, PROMPT, long, cache.score(PROMPT, long))


def test_what_is_known_is_not_run_and_only_the_logits_that_are_read_are_computed(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model, trust_hooks=True)
    logits: list[tuple[int, ...]] = []
    model.lm_head.register_forward_pre_hook(lambda _, args: logits.append(tuple(args[0].shape[:2])))
    run(model, cache, input_ids=IDS)
    logits.clear()
    with Forwards(model) as shapes:
        cache.score(PROMPT, CONTINUATIONS)
        assert shapes == [(1, 2), (5, 42)]
        assert logits == [(1, 1), (5, 42)]
        shapes.clear()
        cache.score(row((1, 48)), [[7], [8], [9]])  # all of the context is known; its last token says what follows
        assert shapes == [(1, 1)]
        shapes.clear()
        cache.score(PROMPT + SHARED, [SHARED] * 3)
        assert shapes == [(1, 5), (3, 2)]


def test_a_continuation_s_blocks_are_found_by_later_calls(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    cache.score(PROMPT, CONTINUATIONS)
    ids = torch.tensor([PROMPT + CONTINUATIONS[1]])
    assert_same(run(model, input_ids=ids), run(model, cache, input_ids=ids))
    assert cache.last_call.reused_tokens == (50 + 42) // 16 * 16


def test_is_greedy_says_whether_greedy_search_would_have_generated_it(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    generated = run(model, input_ids=IDS).sequences[0, 50:].tolist()
    other = [*generated[:-1], (generated[-1] + 1) % 128]
    scores = cache.score(PROMPT, [generated, other, generated[:2], other[1:]])
    assert [score.is_greedy for score in scores] == [True, False, True, False]


@pytest.mark.parametrize("kind", ["tensor", "a row of a batch", "numpy", "array of arrays"])
def test_token_ids_may_come_as_tokenizers_give_them(kind: str, cache: PagedPrefixCache) -> None:
    rows = [row((2, 5)), row((3, 5))]
    wanted = cache.score(PROMPT, rows)
    given: dict[str, tuple[Any, Any]] = {
        "tensor": (torch.tensor(PROMPT), torch.tensor(rows)),
        "a row of a batch": (IDS, [torch.tensor([tokens], dtype=torch.int32) for tokens in rows]),
        "numpy": (np.array(PROMPT), [np.array(tokens, dtype=np.int32) for tokens in rows]),
        "array of arrays": (tuple(PROMPT), (iter(tokens) for tokens in rows)),
    }
    assert [s.total for s in cache.score(*given[kind])] == pytest.approx([s.total for s in wanted])


BAD: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "no context": ([], [[1]], {}, "the context is empty"),
    "an empty continuation": ([1], [[1], []], {}, "continuation 1 is empty"),
    "a token outside": ([1, 128], [[1]], {}, "the context has token 128; the vocabulary has ids 0 to 127"),
    "a text": ("one", [[1]], {}, "the context is of type str"),
    "flat continuations": ([1], [1, 2], {}, "continuation 0 is of type int; give a sequence"),
    "floats": ([1.0], [[1]], {}, "1.0 among its token ids, which is of type float"),
    "a batch size of 0": ([1], [[1]], {"batch_size": 0}, "batch_size is 0"),
    "a batch size of True": ([1], [[1]], {"batch_size": True}, "batch_size is True"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_scored_is_refused_before_anything_runs(
    what: str, model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    context, continuations, options, message = BAD[what]
    run(model, cache, input_ids=IDS)
    before = str(cache.stats())
    with Forwards(model) as shapes, pytest.raises(CacheArgumentError, match=message):
        cache.score(context, continuations, **options)
    assert (str(cache.stats()), shapes) == (before, [])


def test_no_continuations_have_no_scores(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    with Forwards(model) as shapes:
        assert cache.score(PROMPT, []) == []
    assert (shapes, cache.stats().num_calls) == ([], 0)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}])
def test_the_rows_of_a_generate_that_runs_are_not_touched(
    model: PreTrainedModel, cache: PagedPrefixCache, how: dict[str, Any]
) -> None:
    ids = torch.tensor([row((1, 48), (9, 5))])
    for reused in (0, 52):
        found: list[list[Score]] = []

        def score(input_ids: torch.Tensor, scores: torch.Tensor, found: list[list[Score]] = found) -> torch.Tensor:
            found.append(cache.score(PROMPT, CONTINUATIONS))
            return scores

        assert_same(run(model, input_ids=ids, **how), run(model, cache, input_ids=ids, logits_processor=[score], **how))
        assert len(found) == 6
        for scores in found:
            assert_right(model, PROMPT, CONTINUATIONS, scores)
        assert cache.last_call.rows[0].reused_tokens == reused
        cache.check()


@pytest.mark.parametrize("by_length", [False, True])
def test_the_last_call_tells_of_a_score_with_a_row_for_each_continuation(by_length: bool) -> None:
    """In an empty store nothing is reused: what continuations have in common is shared."""
    given = {"rope_parameters": ROPES["dynamic"], "max_position_embeddings": 64} if by_length else {}
    model, continuations = build("llama", **given), [[5, 6, 7], [5, 6, 8, 9], [5, 6], [11], [5, 6, 7]]
    # what runs by its length runs with its last token
    cache, num_tokens = PagedPrefixCache(model), [50 + len(each) - (not by_length) for each in continuations]
    cache.score(PROMPT, continuations)
    first = cache.last_call
    assert first.kind == "score"
    assert [each.prompt_tokens for each in first.rows] == num_tokens
    assert (first.reused_tokens, first.hit_rate) == (0, 0.0)
    assert first.rows[0].stopped.startswith("no cached block has these first 16")
    cache.score(PROMPT, continuations)
    again = cache.last_call
    assert all(each.reused_tokens == 48 for each in again.rows)
    for call in (first, again):
        assert call.computed_tokens + call.reused_tokens + call.shared_tokens == call.prompt_tokens == sum(num_tokens)
        assert all(min(each.computed_tokens, each.reused_tokens, each.shared_tokens) >= 0 for each in call.rows)
    stats = cache.stats()
    assert (stats.num_calls, stats.prompt_tokens, stats.reused_tokens) == (2, 2 * sum(num_tokens), 48 * 5)
    assert stats.computed_tokens == first.computed_tokens + again.computed_tokens
    assert again.peak_kv_bytes == stats.peak_kv_bytes > 0


def test_a_forward_that_fails_leaves_nothing_behind(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model, trust_hooks=True)

    def fail(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].shape[0] > 1:
            raise KeyError("on purpose")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="on purpose"):
        cache.score(PROMPT, CONTINUATIONS)
    assert cache.stats().num_blocks_in_use == 0
    handle.remove()
    assert_right(model, PROMPT, CONTINUATIONS, cache.score(PROMPT, CONTINUATIONS))
    cache.check()


def test_a_batch_that_does_not_fit_into_the_pool_is_scored(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model, num_blocks=12)
    rows = [row((seed, 40)) for seed in range(2, 8)]
    assert_right(model, PROMPT, rows, cache.score(PROMPT, rows))
    assert cache.stats().num_blocks_in_use == 0
    cache.check()


def test_what_is_cached_may_be_forgotten_while_continuations_run(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model, trust_hooks=True)
    resets: list[bool] = []

    def reset(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        cache.store.reset_prefix_cache()
        resets.append(True)

    hook = model.model.layers[0].mlp.register_forward_pre_hook(reset)
    assert_right(model, PROMPT, CONTINUATIONS, cache.score(PROMPT, CONTINUATIONS))
    assert len(resets) >= 2
    hook.remove()
    assert_right(model, PROMPT, CONTINUATIONS, cache.score(PROMPT, CONTINUATIONS))
    cache.check()


LIMIT = 64
BY_LENGTH = ("dynamic", "longrope")


def of_rope(kind: str) -> PreTrainedModel:
    """A model whose frequencies change where a forward has more than `LIMIT` tokens."""
    return build("llama", rope_parameters=ROPES[kind], max_position_embeddings=LIMIT if kind == "dynamic" else 256)


def assert_as_plain_forwards(
    model: PreTrainedModel, context: Sequence[int], continuations: Sequence[Sequence[int]], scores: Sequence[Score]
) -> None:
    """Takes the model as it was before: frequencies stay as a forward left them, until a short one comes."""
    for tokens, score in zip(continuations, scores, strict=True):
        wanted = log_probs(copy.deepcopy(model), context, tokens)
        torch.testing.assert_close(torch.tensor(score.log_probs), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("num_tokens", "is_used"), [(LIMIT, False), (LIMIT, True), (LIMIT + 1, True)])
@pytest.mark.parametrize("kind", BY_LENGTH)
def test_scores_at_the_length_where_frequencies_change_are_those_of_a_forward_of_all_tokens(
    kind: str, num_tokens: int, is_used: bool
) -> None:
    """Of context and continuation together; the last token counts, though nothing is asked after it."""
    model = of_rope(kind)
    cache = PagedPrefixCache(model, block_size=8)
    if is_used:
        for length in (LIMIT - 1, LIMIT + 9):
            run(model, cache, input_ids=torch.tensor([row((1, length))]))
    for num_scored in (1, 17):
        context = row((1, num_tokens - num_scored))
        same_length = [row((seed, num_scored)) for seed in (2, 3, 4)]
        same_length.append([*same_length[0][:-1], (same_length[0][-1] + 1) % 128])
        others = [tokens for length in (1, 2, 3, 5) for tokens in (row((5, length)), row((6, length)))]
        for continuations in (same_length, same_length + others):
            fresh = copy.deepcopy(model)
            assert_as_plain_forwards(fresh, context, continuations, cache.score(context, continuations))
            cache.check()


def test_dynamic_frequencies_are_as_they_were_when_scores_are_done() -> None:
    model = of_rope("dynamic")
    cache = PagedPrefixCache(model)
    ids = torch.tensor([row((1, LIMIT + 4))])
    with torch.no_grad():
        model(torch.tensor([row((1, LIMIT + 20))]), use_cache=False)
        wanted = copy.deepcopy(model)(ids, use_cache=False).logits
        cache.score(PROMPT, [row((2, 3)), row((3, 40))])
        assert torch.equal(model(ids, use_cache=False).logits, wanted)
