"""Captured rows: steps run as graphs of the model's own forward, on rows of a fixed room.

On a CUDA device of this machine graphs are captured and replayed. Elsewhere `capture="dry"` does all but the replay, so
every test proves logits as everywhere. How many forwards ran so is read from `last_call`.
"""

import contextlib
import copy
import functools
import itertools
import pickle
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

from hf_paged_cache import CacheArgumentError, CacheBusyError, PagedPrefixCache
from hf_paged_cache.rows.captured import CapturedForward, Capturing, attach_forward
from hf_paged_cache.rows.graphs import Captured, Model

from ..internals import capture_everywhere
from ..reference import IDS, PROMPT, AtStep, assert_right, assert_same, at_once, batch, is_same, row, run, zero_blocks
from ..tiny_models import build as build_on_the_host
from ..tiny_models import tiny, without_logits_to_keep

STEPS = 10
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _captures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CUDA device shapes are captured whatever that takes, but where a test asks when it pays."""
    if DEVICE.type == "cuda" and "pays" not in request.fixturenames:
        capture_everywhere(monkeypatch)


def build(name: str, **settings: Any) -> Any:
    return build_on_the_host(name, **settings).to(DEVICE)


def captured(model: Any, **options: Any) -> PagedPrefixCache:
    return PagedPrefixCache(model, capture="auto" if DEVICE.type == "cuda" else "dry", **options)


def num_captured(cache: PagedPrefixCache) -> int:
    """Forwards of the last call that were replays."""
    found = re.match(r"(\d+) of (\d+) forwards were captured", cache.last_call.captured)
    return int(found[1]) if found else 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "mixtral", "opt"])
def test_a_prompt_and_its_steps_are_right_cold_and_warm(name: str, attention: str) -> None:
    model = build(name, attn_implementation=attention)
    reference, cache = run(model, input_ids=IDS, max_new_tokens=STEPS), captured(model)
    assert_same(reference, run(model, cache, input_ids=IDS, max_new_tokens=STEPS))
    assert num_captured(cache) == STEPS - 3  # the prompt shows the layers; two steps are compared
    assert "ran eagerly as well, to compare" in cache.last_call.captured
    assert_same(reference, run(model, cache, input_ids=IDS, max_new_tokens=STEPS))
    num_eager = int(name == "mixtral" and DEVICE.type == "cuda")  # experts of a prompt cannot be captured there
    assert (num_captured(cache), cache.last_call.reused_tokens) == (STEPS - num_eager, len(PROMPT) - 1)
    zero_blocks(cache)
    assert not is_same(reference, run(model, cache, input_ids=IDS, max_new_tokens=STEPS))
    cache.check()


@pytest.mark.parametrize("way", [{}, {"num_beams": 3, "num_return_sequences": 2}], ids=["greedy", "beams"])
def test_padded_rows_are_right_cold_and_warm_and_change_places_where_they_lie(way: dict[str, Any]) -> None:
    model = build("llama")
    given: dict[str, Any] = {**batch(PROMPT, row((2, 30)), row((1, 20), (3, 5))), "max_new_tokens": STEPS, **way}
    reference, cache = run(model, **given), captured(model)
    for _ in range(3):
        assert_same(reference, run(model, cache, **given))
        assert num_captured(cache) >= STEPS - 5
    zero_blocks(cache)
    assert not is_same(reference, run(model, cache, **given))


@pytest.mark.parametrize("num_new", [2, 16, 17, 300])
def test_new_tokens_behind_known_ones_are_filled_up_to_a_shape_or_too_many(num_new: int) -> None:
    model = build("llama")
    cache = captured(model)
    run(model, cache, input_ids=IDS, max_new_tokens=2)
    for seed in (5, 6, 7):  # the first two are compared with the eager forward
        ids = torch.tensor([row((1, 48), (seed, num_new))])
        assert_right(model, cache, input_ids=ids, max_new_tokens=4)
        assert cache.last_call.reused_tokens >= 48
        run(model, cache, input_ids=torch.tensor([row((seed, 48 + seed))]), max_new_tokens=2)  # another length
    assert num_captured(cache) >= 1


def test_steps_are_captured_where_generate_sets_other_experts_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA device, where those of a prompt cannot be captured."""
    model = build("mixtral")
    model.set_experts_implementation("grouped_mm")

    @contextlib.contextmanager
    def for_steps(model: Any) -> Iterator[None]:
        model.set_experts_implementation("batched_mm")
        yield
        model.set_experts_implementation("grouped_mm")

    def capture(captured: Captured, pool: Any, capture: Any = Captured.capture) -> Any:
        if model.config._experts_implementation == "grouped_mm":
            raise RuntimeError("no graph of these")
        return capture(captured, pool)

    monkeypatch.setattr(GenerationMixin, "_optimize_model_for_decode", for_steps)
    monkeypatch.setattr(Captured, "capture", capture)
    reference, cache = run(model, input_ids=IDS, max_new_tokens=STEPS), captured(model)
    for _ in range(3):
        assert_same(reference, run(model, cache, input_ids=IDS, max_new_tokens=STEPS))
    assert num_captured(cache) == STEPS - 1


@pytest.mark.parametrize("way", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3, "top_k": 0}, {}])
def test_rows_that_are_captured_share_nothing(way: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged_cache.call.share.launch_tokens", lambda *_, **__: 0)
    model = build("llama")
    inputs = batch(PROMPT, row((1, 48), (2, 2)), row((1, 48), (3, 2))) if not way else {"input_ids": IDS}
    reference = run(model, **inputs, max_new_tokens=STEPS, **way)
    shared, cache = PagedPrefixCache(model, capture=False), captured(model)
    for each in (shared, shared, cache, cache):
        with torch.inference_mode(each is cache):
            assert_same(reference, run(model, each, **inputs, max_new_tokens=STEPS, **way))
    assert shared.last_call.read_once_tokens > 0
    assert cache.last_call.read_once_tokens == 0
    assert num_captured(cache) >= STEPS - 3


def test_a_long_prompt_runs_eagerly_and_its_steps_are_captured() -> None:
    model = build("llama")
    cache = captured(model)
    ids = torch.tensor([row((1, 400))])
    reference = run(model, input_ids=ids, max_new_tokens=STEPS)
    for _ in range(2):
        assert_same(reference, run(model, cache, input_ids=ids, max_new_tokens=STEPS))
        assert num_captured(cache) >= STEPS - 3
    other = torch.tensor([row((1, 32), (2, 300))])
    assert_right(model, cache, input_ids=other, max_new_tokens=STEPS)
    assert cache.last_call.captured == f"{STEPS - 1} of {STEPS} forwards were captured"


@pytest.mark.parametrize("has_memory", [False, True])
def test_rows_that_outgrow_their_room_move_to_a_larger_one(has_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged_cache.rows.captured._MOST_COMING", 4)
    model = build("llama", max_position_embeddings=1024)
    ids = torch.tensor([row((1, 500))])
    reference, cache = run(model, input_ids=ids, max_new_tokens=30), captured(model)
    if has_memory:  # both rooms begin at its start
        cache.warm_up(rows=4, tokens=512)
    for _ in range(2):
        assert_same(reference, run(model, cache, input_ids=ids, max_new_tokens=30))
        assert num_captured(cache) >= 20
    rooms = {room for _, room in cache.store.arena._rows}
    assert 1024 in rooms


def test_rows_that_are_too_large_for_the_arena_go_on_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged_cache.rows.captured._MOST_COMING", 4)
    model = build("llama", max_position_embeddings=1024)
    ids = torch.tensor([row((1, 500))])
    reference, cache = run(model, input_ids=ids, max_new_tokens=30), captured(model)
    run(model, cache, input_ids=IDS, max_new_tokens=2)
    most = cache.store.arena.num_bytes  # a row of 512
    cache.store.arena.most_bytes = lambda: most
    assert_same(reference, run(model, cache, input_ids=ids, max_new_tokens=30))
    assert 1 <= num_captured(cache) <= 12
    assert cache.last_call.captured.endswith("1 rows of 1024 columns are more than the arena may take")
    assert_same(reference, run(model, cache, input_ids=ids, max_new_tokens=30))
    cache.check()


def test_static_rows_count_in_the_budget_of_the_blocks() -> None:
    model = build("llama", max_position_embeddings=1024)
    row_bytes = 2 * 2 * 512 * 2 * 16 * 4  # keys and values of 2 layers, 512 columns, 2 heads of 16 floats
    budget = 2 * row_bytes
    cache = captured(model, block_size=4, max_bytes=budget)
    plain = PagedPrefixCache(model, capture=False, block_size=4, max_bytes=budget)
    for seed in range(1, 12):
        ids = torch.tensor([row((seed, 200))])
        reference = run(model, input_ids=ids, max_new_tokens=4)
        for each in (cache, plain):
            assert_same(reference, run(model, each, input_ids=ids, max_new_tokens=4))
        assert cache.store.blocks.pool.bytes_on().total() + cache.store.arena.num_bytes <= budget
    assert num_captured(cache) >= 3
    assert cache.store.arena.num_bytes == row_bytes
    assert plain.stats().num_cached_blocks > 1.5 * cache.stats().num_cached_blocks > 0
    assert cache.store.blocks.pool.bytes_on().total() > 0.9 * row_bytes
    pair = torch.tensor([row((1, 200)), row((2, 200))])
    assert_right(model, cache, input_ids=pair, max_new_tokens=4)
    assert cache.last_call.captured == "2 rows of 512 columns are more than the arena may take"
    cache.check()


def test_of_two_calls_at_once_one_has_the_arena_and_both_are_right() -> None:
    model = build("llama")
    cache = captured(model)
    prompts = [torch.tensor([row((seed, 40))]) for seed in (1, 2)]
    references = [run(model, input_ids=ids, max_new_tokens=STEPS) for ids in prompts]
    run(model, cache, input_ids=prompts[0], max_new_tokens=STEPS)
    said: list[str] = []

    def meanwhile() -> None:
        other = captured(cache.store)
        assert_same(references[1], run(model, other, input_ids=prompts[1], max_new_tokens=STEPS))
        said.append(other.last_call.captured)

    step = AtStep(4, lambda: at_once(meanwhile))
    output = run(model, cache, input_ids=prompts[0], max_new_tokens=STEPS, logits_processor=[step])
    assert_same(references[0], output)
    assert said == ["another call has the arena"]
    assert num_captured(cache) == STEPS


def scale_weights(model: Any) -> None:
    model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(model.model.layers[0].mlp.down_proj.weight * 1.5)


def hook_a_layer(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, output: output * 1.1)


def turn_off_a_layer(model: Any) -> None:
    model.model.layers[0].mlp.forward = torch.zeros_like


@pytest.mark.parametrize("change", [scale_weights, hook_a_layer, turn_off_a_layer])
def test_a_callback_that_changes_the_model_has_the_rest_run_eagerly(change: Any) -> None:
    outputs = []
    for is_ours in (False, True):
        model = build("llama")
        cache = captured(model) if is_ours else None
        if cache is not None:
            run(model, cache, input_ids=IDS, max_new_tokens=STEPS)
        act = AtStep(5, lambda model=model: change(model))
        outputs.append(run(model, cache, input_ids=IDS, max_new_tokens=STEPS, logits_processor=[act]))
        if cache is not None:
            assert num_captured(cache) == 5
            assert cache.last_call.captured.endswith("changed after the capture")
    assert_same(*outputs)


@pytest.mark.parametrize("change", [scale_weights, lambda model: model.double().float()], ids=["others", "elsewhere"])
def test_weights_that_are_others_or_lie_elsewhere_are_captured_anew(change: Any) -> None:
    """The same values elsewhere, as after `model.to("cpu").to("cuda")`: a graph would read what was freed."""
    model = build("llama")
    cache = captured(model)
    for _ in range(2):
        run(model, cache, input_ids=IDS, max_new_tokens=STEPS)
    assert num_captured(cache) == STEPS
    change(model)
    reference = run(model, input_ids=IDS, max_new_tokens=STEPS)
    for compared in (True, False):
        assert_same(reference, run(model, cache, input_ids=IDS, max_new_tokens=STEPS))
        assert (num_captured(cache) < STEPS) is compared


@pytest.mark.parametrize("calls_back", [False, True])
def test_the_model_is_looked_at_before_each_step_where_code_of_others_may_run(
    calls_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, look = [], Model.look
    model = build("llama")
    cache = captured(model)
    monkeypatch.setattr(cache.store.fingerprint, "may_change_in_a_forward", lambda: False)  # whatever threads there are
    run(model, cache, input_ids=IDS, max_new_tokens=STEPS)
    monkeypatch.setattr(Model, "look", lambda looking: looks.append(1) or look(looking))
    given = {"logits_processor": [AtStep(99, lambda: None)]} if calls_back else {}
    run(model, cache, input_ids=IDS, max_new_tokens=STEPS, **given)
    assert len(looks) == (STEPS + 1 if calls_back else 1)


def test_a_graph_that_says_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    reference, cache = run(model, input_ids=IDS, max_new_tokens=STEPS), captured(model)
    with monkeypatch.context() as patch:
        patch.setattr("hf_paged_cache.rows.graphs.StaticLayer.update", lambda layer, keys, values, *_: (keys, values))
        assert_same(reference, run(model, cache, input_ids=IDS, max_new_tokens=STEPS))
    assert num_captured(cache) == 0
    assert "the captured forward failed" in cache.last_call.captured
    cache.release()
    monkeypatch.setattr("torch.Tensor.index_copy_", lambda tensor, *_: tensor)
    assert_same(reference, run(model, cache, input_ids=IDS, max_new_tokens=STEPS))
    assert num_captured(cache) == 0
    assert "of their scale from the eager forward's" in cache.last_call.captured


def test_memory_is_given_back_and_taken_again() -> None:
    model = build("llama")
    reference, cache = run(model, input_ids=IDS, max_new_tokens=STEPS), captured(model)
    assert cache.warm_up(rows=1, tokens=100) == ""
    assert cache.store.arena.num_bytes > 0
    for _ in range(2):
        assert_same(reference, run(model, cache, input_ids=IDS, max_new_tokens=STEPS))
        assert num_captured(cache) >= STEPS - 3
        cache.release()
        assert cache.store.arena.num_bytes == 0
        assert all(graph.captured is None for graph in cache.store.arena._graphs.values())

    def release() -> None:
        with pytest.raises(CacheBusyError, match="a call runs on static rows"):
            cache.release()
        with pytest.raises(CacheBusyError, match="warm up before"):
            cache.warm_up(1, 10)

    assert_same(
        reference, run(model, cache, input_ids=IDS, max_new_tokens=STEPS, logits_processor=[AtStep(5, release)])
    )


def test_rows_that_a_call_returns_are_nobody_elses() -> None:
    model = build("llama")
    cache = captured(model)
    rows = run(model, cache, input_ids=IDS, max_new_tokens=STEPS).past_key_values
    theirs = [layer.keys.clone() for layer in rows.layers]
    run(model, cache, input_ids=torch.tensor([row((9, 60))]), max_new_tokens=STEPS)
    for layer, keys in zip(rows.layers, theirs, strict=True):
        torch.testing.assert_close(layer.keys, keys, rtol=0, atol=0)
    again = copy.deepcopy(rows)
    for layer, keys in zip(again.layers, theirs, strict=True):
        torch.testing.assert_close(layer.keys, keys, rtol=0, atol=0)


def test_what_a_broken_model_has_left_is_not_seen() -> None:
    model = build("llama")
    reference, cache = run(model, input_ids=IDS, max_new_tokens=STEPS), captured(model)
    weight = model.model.layers[0].self_attn.v_proj.weight
    values = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
        run(model, cache, input_ids=torch.tensor([row((3, 100))]), max_new_tokens=STEPS)
        weight.copy_(values)
    assert_same(reference, run(model, cache, input_ids=IDS, max_new_tokens=STEPS))
    assert num_captured(cache) >= STEPS - 3


def test_an_interrupted_call_gives_the_arena_back_and_keeps_what_ran() -> None:
    model = build("llama")
    reference, cache = run(model, input_ids=IDS, max_new_tokens=STEPS), captured(model)

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, cache, input_ids=IDS, max_new_tokens=STEPS, logits_processor=[AtStep(7, stop)])
    assert_same(reference, run(model, cache, input_ids=IDS, max_new_tokens=STEPS))
    assert num_captured(cache) == STEPS
    assert cache.last_call.reused_tokens >= 48
    cache.check()


def test_a_call_that_runs_out_of_memory_gives_the_arena_away() -> None:
    model = build("llama")
    reference, cache = run(model, input_ids=IDS, max_new_tokens=STEPS), captured(model)

    def fail() -> None:
        assert cache.store.arena.num_bytes > 0
        raise torch.OutOfMemoryError("no memory")

    with pytest.raises(torch.OutOfMemoryError):
        run(model, cache, input_ids=IDS, max_new_tokens=STEPS, logits_processor=[AtStep(7, fail)])
    assert cache.store.arena.num_bytes == 0
    assert_same(reference, run(model, cache, input_ids=IDS, max_new_tokens=STEPS))
    assert num_captured(cache) >= STEPS - 3


def own_loop(model: Any, input_ids: Any, **kwargs: Any) -> Any:
    past_key_values = kwargs["past_key_values"]
    with torch.no_grad():
        first = model(input_ids, past_key_values=past_key_values)
        return model(first.logits[:, -1:].argmax(-1), past_key_values=past_key_values).logits


def compiled() -> Any:
    model = build("llama", num_hidden_layers=1)  # compiling takes as long as there are layers
    model.forward = torch.compile(model.forward, backend="eager", dynamic=True)
    return model


def with_a_forward_of_others() -> Any:
    model = build("llama")
    original = model.forward
    model.forward = functools.wraps(original)(lambda *args, **kwargs: original(*args, **kwargs))
    return model


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (lambda: build("llama"), {"prompt_lookup_num_tokens": 3}, "drafts are verified, and ask for several logits"),
        (lambda: build("llama"), {"custom_generate": own_loop}, "custom_generate calls the model in its own way"),
        (compiled, {}, "the model is compiled"),
        (with_a_forward_of_others, {}, "code of others"),
        (lambda: build("bloom"), {}, "the model takes no position_ids"),
        (lambda: build("mistral"), {}, "some layers do not see all tokens"),
    ],
    ids=["drafts", "a loop of one's own", "compiled", "a forward of others", "no positions", "windows"],
)
def test_what_runs_eagerly_is_right_and_says_why(make: Any, given: dict[str, Any], said: str) -> None:
    model = make()
    ids = torch.tensor([row((1, 20), (1, 20))], device=DEVICE)
    own_forward, cache = model.__dict__.get("forward"), captured(model, trust_hooks=True)
    asked = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": STEPS, "do_sample": False}
    if "custom_generate" in given:
        torch.testing.assert_close(
            model.generate(**asked, past_key_values=cache, **given), model.generate(**asked, **given)
        )
    else:
        reference = run(model, **asked, **given)
        for _ in range(2):
            assert_same(reference, run(model, cache, **asked, **given))
    assert num_captured(cache) == 0
    assert said in cache.last_call.captured
    if model.__class__.__name__ in ("BloomForCausalLM", "MistralForCausalLM"):
        assert cache.warm_up(1, 10) == cache.why_not_captured() == said
    cache.detach()
    assert model.__dict__.get("forward") is own_forward


def test_nothing_is_attached_on_a_cpu_nor_where_it_is_turned_off() -> None:
    model = build_on_the_host("llama")
    cache = PagedPrefixCache(model)
    run(model, cache, input_ids=IDS)
    assert (cache.warm_up(1, 10), cache.last_call.captured) == ("the model is not on a CUDA device", "")
    off = PagedPrefixCache(cache.store, capture=False)
    run(model, off, input_ids=IDS)
    assert off.last_call.captured == ""
    assert off.warm_up(1, 10) == "the cache was built with capture=False"
    assert "forward" not in model.__dict__


def test_a_model_that_cannot_leave_out_logits_is_captured_in_steps_alone_and_what_these_wrote_is_reused() -> None:
    model = without_logits_to_keep(build("llama"))
    assert "a graph runs no Python of" in captured(model).why_not_captured()  # nobody knows what its forward does
    reference, cache = run(model, input_ids=IDS, max_new_tokens=40), captured(model, trust_hooks=True)
    assert_same(reference, run(model, cache, input_ids=IDS, max_new_tokens=40))
    assert num_captured(cache) >= 40 - 3
    cache.reset()
    ids = torch.cat([reference.sequences, torch.tensor([row((8, 5))], device=DEVICE)], dim=1)
    reference = run(model, input_ids=ids)
    assert_same(reference, run(model, cache, input_ids=ids))
    assert cache.last_call.reused_tokens >= 80
    zero_blocks(cache)
    assert not is_same(reference, run(model, cache, input_ids=ids))


def test_what_is_attached_copies_pickles_and_comes_off() -> None:
    model = build("llama")
    cache = captured(model)
    attached = model.__dict__["forward"]
    assert isinstance(attached, CapturedForward)
    captured(model)
    assert model.__dict__["forward"] is attached
    copied = copy.deepcopy(model)
    assert copied.__dict__["forward"].model is copied
    assert pickle.loads(pickle.dumps(model)).__dict__["forward"].model is not model
    with torch.no_grad():
        copied.lm_head.weight.zero_()
        assert not copied(IDS.to(DEVICE)).logits.any()
    reference = run(model, input_ids=IDS)
    assert_same(reference, run(model, cache, input_ids=IDS))
    cache.detach()
    assert "forward" not in model.__dict__
    assert_same(reference, run(model, input_ids=IDS))


@pytest.mark.parametrize("pays", [True, False])
def test_a_shape_is_captured_once_it_would_have_paid(pays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.accumulate(itertools.cycle([1.0, 1.0, 20.0] if pays else [1.0, 20.0, 1.0]))
    monkeypatch.setattr(Capturing, "attach", lambda self: attach_forward(self._fingerprint.model) is None)
    monkeypatch.setattr("hf_paged_cache.rows.captured.CapturedCall._now", lambda *_: next(clock))
    model = build("llama")
    reference, cache = run(model, input_ids=IDS, max_new_tokens=STEPS), PagedPrefixCache(model, capture="auto")
    said = []
    for _ in range(12):
        assert_same(reference, run(model, cache, input_ids=IDS, max_new_tokens=STEPS))
        said.append(cache.last_call.captured)
    assert said[0] == "a capture takes more time than it would save"
    if pays:
        assert said[-1] == f"{STEPS} of {STEPS} forwards were captured"
    else:
        assert said[-1].endswith("a replay took as long as the eager forward")


@pytest.mark.parametrize("capture", ["yes", True, None, 0, ""])
def test_other_ways_to_capture_are_refused(capture: Any) -> None:
    with pytest.raises(CacheArgumentError, match=r"capture is .*; give 'auto', False or 'dry'"):
        PagedPrefixCache(tiny("llama"), capture=capture)


def test_a_warm_up_of_no_rows_or_tokens_or_more_than_there_are_positions_is_refused() -> None:
    cache = captured(build("llama", max_position_embeddings=600))
    for rows, tokens in ((0, 10), (1, 1), ("1", 10), (1, 2.5)):
        with pytest.raises(CacheArgumentError, match=r"(rows|tokens) is .*; it must be an int"):
            cache.warm_up(rows, tokens)
    with pytest.raises(CacheArgumentError, match="tokens is 601, and the model has 600 positions; give at most 600"):
        cache.warm_up(rows=1, tokens=601)
    assert cache.warm_up(rows=1, tokens=600) == ""


def test_stats_say_what_static_rows_take_until_they_are_released() -> None:
    cache = captured(build("llama"))
    assert cache.stats().static_bytes == 0
    run(cache.store.model, cache, input_ids=IDS, max_new_tokens=4)
    for stats in (cache.stats(), cache.store.stats()):
        assert stats.static_bytes == cache.store.arena.num_bytes > 0
    assert PagedPrefixCache(cache.store, cache_salt="a tenant").stats().static_bytes is None
    cache.release()
    assert cache.stats().static_bytes == 0
