"""Conditions that change while a call runs, and change back: what was computed under others is never found again.

Each change is one that comes back as it was (a hook that moves a layer's output), so that the root of before is asked
for again; a weight's count of writes never comes back.
"""

import functools
import threading
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_paged_cache import CacheBusyError, PagedPrefixCache, PrefixStore
from hf_paged_cache.integration import opening
from hf_paged_cache.model.fingerprint import Fingerprint

from ..internals import make_forwards_cheap
from ..reference import IDS, AtStep, assert_near, assert_right, assert_same, at_once, batch, is_same, row, run
from ..tiny_models import build
from .test_guards import in_another_thread


class Change:
    """Another condition from `begin` to `end`: the numbers of the first layer's output are another's."""

    def __init__(self, model: Any) -> None:
        self.layer: nn.Module = model.model.layers[0]
        self._handle: Any = None

    def begin(self) -> None:
        self._handle = self.layer.register_forward_hook(lambda *given: given[-1].roll(1, dims=-1))

    def end(self) -> None:
        self._handle.remove()

    def begin_once_in_a_forward(self, module: nn.Module) -> list[Any]:
        """What is put into this list is called when the module is next entered; the hook is there from the start."""
        once: list[Any] = []
        module.register_forward_pre_hook(lambda *_: once.pop()() if once else None)
        return once


@pytest.fixture
def change(model: PreTrainedModel) -> Change:
    return Change(model)


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}, {"prefill_chunk_size": 20}], ids=["greedy", "beams", "chunks"])
def test_a_prompt_computed_under_other_conditions_than_were_read_is_not_kept(
    way: dict[str, Any], model: PreTrainedModel
) -> None:
    cache, change = PagedPrefixCache(model, block_size=4, trust_hooks=True), Change(model)
    once = change.begin_once_in_a_forward(change.layer)
    wanted = run(model, input_ids=IDS)
    once.append(change.begin)
    run(model, cache, input_ids=IDS, **way)
    change.end()
    assert_same(wanted, run(model, cache, input_ids=IDS))
    assert cache.last_call.reused_tokens == 0
    assert cache.stats().num_blocks_in_use + cache.stats().num_cached_blocks == 13  # those of the last call


def test_a_plain_forward_under_other_conditions_than_were_read_is_not_kept(model: PreTrainedModel) -> None:
    cache, change = PagedPrefixCache(model, block_size=4, trust_hooks=True), Change(model)
    once = change.begin_once_in_a_forward(change.layer)
    with torch.no_grad():
        wanted = model(IDS, use_cache=False).logits[:, -1]
        model(IDS[:, :20], past_key_values=cache, logits_to_keep=1)
        once.append(change.begin)
        model(IDS[:, 20:40], past_key_values=cache, logits_to_keep=1)
        change.end()
        cache.reset()
        got = model(IDS, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    assert_near(got, wanted)
    assert cache.last_call.reused_tokens == 20  # of the forward that ran as was read


@pytest.mark.parametrize("way", ["a loop", "a generate that goes on", "steps"])
def test_what_rows_compute_once_a_dropout_is_active_is_not_kept(way: str) -> None:
    model = build("gpt2")
    cache = PagedPrefixCache(model, block_size=4)
    with torch.no_grad():
        if way == "steps":
            step = AtStep(3, model.train)
            ran = run(model, cache, input_ids=IDS[:, :20], max_new_tokens=20, logits_processor=[step]).sequences
        else:
            model(IDS[:, :20], past_key_values=cache, logits_to_keep=1)
            model.train()
            ran, mask = IDS[:, :40], torch.ones((1, 40), dtype=torch.int64)
            if way == "a loop":
                model(IDS[:, 20:40], past_key_values=cache, logits_to_keep=1)
            else:
                run(model, cache, input_ids=IDS[:, 20:40], attention_mask=mask)
    model.eval()
    assert_right(model, cache, input_ids=torch.cat([ran, IDS[:, :5]], dim=1), reused=20)


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_shared_prefix_computed_before_the_model_changed_is_not_what_rows_resume_from(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forward ahead ends, the model changes, and the rows' own forward runs as the model is now."""
    model, once = build(name), []

    def begin(*_: Any) -> None:
        while once:
            once.pop()()

    model.model.norm.register_forward_hook(begin)  # after all keys, values and states of a forward
    change = Change(model)
    prompts = batch(row((1, 140), (2, 9)), row((1, 140), (3, 9)))
    change.begin()
    wanted = run(model, **prompts)
    change.end()
    make_forwards_cheap(monkeypatch)
    cache = PagedPrefixCache(model, trust_hooks=True)
    once.append(change.begin)
    found = run(model, cache, **prompts)
    assert not once
    assert_same(wanted, found)
    change.end()
    assert_right(model, cache, **prompts)


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_what_generate_adds_under_other_conditions_is_not_kept_and_its_prompt_is(
    way: dict[str, Any], model: PreTrainedModel, change: Change
) -> None:
    """Full blocks of it were committed while the call ran: other calls may have found them, no later one does."""
    cache = PagedPrefixCache(model, block_size=4, trust_hooks=True)
    run(model, cache, input_ids=IDS, max_new_tokens=20, logits_processor=[AtStep(3, change.begin)], **way)
    change.end()
    said = run(model, input_ids=IDS, max_new_tokens=12).sequences
    cache.reset()
    assert cache.stats().num_cached_blocks == 12  # the prompt's
    assert_right(model, cache, reused=48, input_ids=said)


def test_rows_that_went_on_under_other_conditions_match_no_further_than_these_held(
    model: PreTrainedModel, change: Change
) -> None:
    """The call's own rows become previous rows, of which even a part of a block is matched."""
    cache = PagedPrefixCache(model, block_size=4, trust_hooks=True)
    got = run(model, cache, input_ids=IDS, max_new_tokens=9, logits_processor=[AtStep(2, change.begin)])
    change.end()
    assert_right(model, cache, reused=50, input_ids=got.sequences)


def test_a_change_that_is_over_before_anybody_looks_is_not_seen(model: PreTrainedModel, change: Change) -> None:
    """As docs/what_is_reused.md says. This is what the look at the end of a call cannot find; `verify` can."""
    cache = PagedPrefixCache(model, block_size=4, trust_hooks=True)
    steps = [AtStep(3, change.begin), AtStep(8, change.end)]
    got = run(model, cache, input_ids=IDS, max_new_tokens=12, logits_processor=steps).sequences
    assert not is_same(run(model, input_ids=got), run(model, cache, input_ids=got))


def test_frequencies_that_another_thread_has_changed_meanwhile_leave_nothing() -> None:
    """Whether the forward has used its own or the other's cannot be said afterwards."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = build("llama", rope_parameters=scaling, max_position_embeddings=32)
    cache, ids, armed = PagedPrefixCache(model, block_size=4, trust_hooks=True), torch.tensor([row((1, 40))]), []

    def disturb(*_: Any) -> None:
        if armed:  # what the forward of a short prompt does
            model.model.rotary_emb(torch.zeros(1), torch.tensor([[0]]))

    model.model.layers[1].register_forward_pre_hook(disturb)
    wanted = run(model, input_ids=ids)
    run(model, cache, input_ids=ids)
    assert cache.stats().num_cached_blocks == 11
    cache.reset_prefix_cache()
    armed.append(True)
    run(model, cache, input_ids=ids)
    armed.clear()
    cache.reset()
    assert cache.stats().num_cached_blocks == 0
    assert_same(wanted, run(model, cache, input_ids=ids))


def test_a_reset_while_what_rows_share_is_computed_is_refused_and_changes_nothing(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a plain forward, of which no bracket tells."""
    make_forwards_cheap(monkeypatch)
    store = PrefixStore(model, block_size=4, trust_hooks=True)
    cache, other = PagedPrefixCache(store), PagedPrefixCache(store)
    errors: list[BaseException] = []
    armed = threading.Event()  # which no look at the hook enters

    def reset(*_: Any) -> None:
        if armed.is_set():
            armed.clear()
            for act in (store.reset_prefix_cache, cache.reset_prefix_cache):
                errors.extend(in_another_thread(act))
                with pytest.raises(CacheBusyError):
                    act()

    model.model.layers[1].mlp.register_forward_pre_hook(reset)
    rows = batch([*row((1, 40)), *row((2, 5))], [*row((1, 40)), *row((3, 5))])
    ended = run(model, other, input_ids=IDS)
    with torch.no_grad():
        wanted = model(**rows, use_cache=False).logits[:, -1]
        armed.set()
        got = model(**rows, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    assert [type(error) for error in errors] == [CacheBusyError] * 2
    assert_near(got, wanted)
    assert cache.last_call.rows[0].computed_tokens + cache.last_call.rows[1].computed_tokens < 90
    again = torch.cat([ended.sequences, torch.tensor([row((7, 3))])], 1)
    run(model, other, input_ids=again)
    assert other.last_call.reused_tokens == ended.sequences.shape[1] - 1  # its rows were there, partial block and all


def test_two_threads_on_a_model_whose_forward_takes_a_lock_both_come_to_an_end(
    model: PreTrainedModel, switching: None
) -> None:
    store, lock = PrefixStore(model, block_size=4, trust_hooks=True), threading.RLock()
    model.model.register_forward_pre_hook(lambda *_: lock.acquire() and None)
    model.model.register_forward_hook(lambda *_: lock.release())
    wanted = run(model, input_ids=IDS)
    run(model, PagedPrefixCache(store), input_ids=IDS)

    def work() -> None:
        cache = PagedPrefixCache(store)
        for _ in range(3):
            assert_same(wanted, run(model, cache, input_ids=IDS))
            assert not cache.verify().differing

    at_once(work, work)


def test_a_thread_that_ends_during_the_forward_that_it_changes_is_seen(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, change = PagedPrefixCache(model, block_size=4, trust_hooks=True), Change(model)
    wanted = run(model, input_ids=IDS)
    looks = [True]  # another thread runs when the conditions are read, and from then on none
    monkeypatch.setattr(Fingerprint, "may_change_in_a_forward", lambda self: looks.pop() if looks else False)
    fill = opening.fill

    def changed(*args: Any, **kwargs: Any) -> None:
        change.begin()
        fill(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(opening, "fill", changed)
        computed = run(model, cache, input_ids=IDS, max_new_tokens=1)
    change.end()
    assert not is_same(run(model, input_ids=IDS, max_new_tokens=1), computed)
    assert_same(wanted, run(model, cache, input_ids=IDS))


@pytest.mark.parametrize("where", ["forward", "_update_model_kwargs_for_generation", "prepare_inputs_for_generation"])
def test_a_model_whose_own_code_changes_it_in_the_middle_of_a_call_leaves_nothing_to_others(where: str) -> None:
    """As remote code does that sets its adapter by what it is passed.

    Nobody else runs, and no function is anybody else's.
    """
    model = build("llama")
    layer, num_calls = model.model.layers[0].self_attn.k_proj, 0
    kept, other = layer.weight, nn.Parameter(layer.weight.data.roll(1, 0))
    plain = getattr(type(model), where)

    def changing(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 5:
            layer.weight = other
        return plain(self, *args, **kwargs)

    model.__class__ = type("Changing", (type(model),), {where: functools.wraps(plain)(changing)})
    cache = PagedPrefixCache(model, block_size=4, trust_hooks=True)
    num_calls = 0
    ids = run(model, cache, input_ids=IDS, max_new_tokens=20).sequences
    assert num_calls > 5
    layer.weight, num_calls = kept, 9
    assert_right(model, cache, input_ids=ids)


def test_rows_that_are_older_than_a_reset_are_not_begun_with(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reset comes when the call has taken them, and no forward has run yet."""
    cache, prepare = PagedPrefixCache(model, block_size=4), model.prepare_inputs_for_generation
    reference = run(model, input_ids=IDS)
    model.generate(IDS, past_key_values=cache, max_new_tokens=1)

    @functools.wraps(prepare)
    def reset(*given: Any, **more: Any) -> Any:
        if cache.stats().num_calls == 1:
            cache.reset_prefix_cache()
        return prepare(*given, **more)

    monkeypatch.setattr(model, "prepare_inputs_for_generation", reset)
    assert_same(reference, run(model, cache, input_ids=IDS))
    assert cache.last_call.reused_tokens == 0


def test_a_loop_whose_layers_are_given_keys_by_hand_is_counted_as_bypassed(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(model, block_size=4)
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        cache.layers[0].keys = cache.layers[0].keys.clone()
        model(IDS[:, :1], past_key_values=cache)
    assert cache.stats().num_bypassed_calls == 1
