"""What transformers asks of a cache and its layers, each question against the installed version's own answer."""

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from hf_paged_cache import ForwardMismatchError, PagedPrefixCache

from ..conformance.zoo import build as build_type
from ..internals import split_everywhere

IDS = torch.arange(1, 41).view(2, 20)
NEXT = torch.tensor([[50, 51, 52], [60, 61, 62]])


def run(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache, logits_to_keep=1).logits


@pytest.fixture
def filled(tiny_llama: Any) -> tuple[PagedPrefixCache, DynamicCache]:
    """Ours and transformers' cache after the same forwards."""
    ours, theirs = PagedPrefixCache(tiny_llama, block_size=4), DynamicCache(config=tiny_llama.config)
    for ids in (IDS, NEXT):
        run(tiny_llama, ids, ours)
        run(tiny_llama, ids, theirs)
    return ours, theirs


def assert_same_content(ours: PagedPrefixCache, theirs: DynamicCache) -> None:
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        torch.testing.assert_close(mine.keys, other.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mine.values, other.values, atol=1e-4, rtol=1e-4)


ASKED_FOR_OTHER_LAYERS = {  # linear attention, indexed attention, offloading: a DynamicCache of such a model has none
    "get_conv_state",
    "get_recurrent_state",
    "has_previous_state",
    "update_conv_state",
    "update_indexer",
    "update_recurrent_state",
    "prefetch",
    "offload",
}
CHANGING = {"update", "reset", "reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices"}
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "get_query_offset": (0,),
    "get_mask_sizes": (3, 1),
    "early_initialization": (2, 2, 16, torch.float32, torch.device("cpu")),
    "is_recording_past": (0,),
}
DIFFERENT = {"is_initialized", "batch_size", "layers"}  # told below, each for itself
QUESTIONS = sorted(
    name
    for name in dir(Cache)
    if not name.startswith("_") and name not in ASKED_FOR_OTHER_LAYERS | CHANGING | DIFFERENT
)


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize("when", ["empty", "filled"])
def test_every_question_gets_the_answer_that_a_dynamic_cache_gives(
    name: str, when: str, filled: Any, tiny_llama: Any
) -> None:
    ours, theirs = filled
    if when == "empty":
        ours, theirs = PagedPrefixCache(tiny_llama), DynamicCache(config=tiny_llama.config)
    answers = []
    for cache in (ours, theirs):
        answer = getattr(cache, name)
        answers.append(answer(*ARGUMENTS.get(name, ())) if callable(answer) else answer)
    assert answers[0] == answers[1]
    assert (ours.get_seq_length(), len(ours)) == (theirs.get_seq_length(), len(theirs))


def test_a_cache_is_initialized_exactly_while_it_has_rows(filled: Any, tiny_llama: Any) -> None:
    ours, _ = filled
    assert ours.is_initialized
    assert ours.layers[0].is_initialized
    ours.reset()
    assert not ours.is_initialized
    assert not ours.layers[0].is_initialized
    assert not PagedPrefixCache(tiny_llama).is_initialized


def test_a_layer_is_initialized_only_if_it_was_written(tiny_llama: Any) -> None:
    """As a `DynamicCache`'s: a layer that a model skips, such as a cross attention without an image, holds nothing."""
    skipped = tiny_llama.model.layers[1]
    skipped.forward = lambda hidden_states, **kwargs: hidden_states
    cache = PagedPrefixCache(tiny_llama)
    run(tiny_llama, IDS, cache)
    assert cache.get_seq_length() == IDS.shape[1]
    assert [layer.is_initialized for layer in cache.layers] == [True, False]
    assert [layer.get_seq_length() for layer in cache.layers] == [IDS.shape[1], 0]
    assert cache.get_seq_length(1) == 0


KINDS = {  # type of model -> the kinds of layers that transformers gives it
    "llama": {"DynamicLayer"},
    "gemma2": {"DynamicLayer", "DynamicSlidingWindowLayer"},
    "glm_moe_dsa": {"DynamicIndexedLayer"},
    "mamba2": {"LinearAttentionLayer"},
    "bamba": {"DynamicLayer", "LinearAttentionLayer"},
    "falcon_h1": {"LinearAttentionAndFullAttentionLayer"},
    "zaya": {"LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"},
}
CHANGING_ROWS = {  # layers change as transformers' own do
    "crop",
    "reorder_cache",
    "batch_repeat_interleave",
    "batch_select_indices",
    "activate_past_recording",
}
WRITING = {  # what a forward does, or had to do first
    "update",
    "update_conv_state",
    "update_recurrent_state",
    "update_indexer",
    "lazy_initialization",
    "lazy_initialization_indexer",
    "reset",
}
OTHERWISE = {
    "supports_early_init",  # tensors that are made before the first forward would be nobody's
    "record_past",  # of a window's layer: `cache.is_recording_past(layer_idx)`
    "indexer_position_ids",  # known of the rows, whether a model has set them or not
}


def both(name: str, ids: torch.Tensor | None = None) -> tuple[PagedPrefixCache, DynamicCache]:
    """Ours and transformers' cache after two forwards of two rows, or before any."""
    model = build_type(name)
    ours, theirs = PagedPrefixCache(model, block_size=4), DynamicCache(config=model.config)
    argument = "cache_params" if name == "mamba2" else "past_key_values"
    for columns in () if ids is None else (ids[:, :14], ids[:, 14:]):
        for cache in (ours, theirs):
            with torch.no_grad():
                model(columns, **{argument: cache})
    return ours, theirs


def assert_same_answer(mine: Any, theirs: Any) -> None:
    if isinstance(theirs, dict):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert_same_answer(mine[key], value)
    elif isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    else:
        assert mine == theirs


def public_members(layer: Any) -> list[str]:
    return [name for name in dir(layer) if not name.startswith("_")]


@pytest.mark.parametrize("name", KINDS)
def test_every_member_of_a_dynamic_layer_has_an_answer(name: str) -> None:
    ours, theirs = both(name, IDS)
    assert {type(layer).__name__ for layer in theirs.layers} == KINDS[name]
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert isinstance(mine, LinearAttentionLayer) == isinstance(other, LinearAttentionLayer)
        assert isinstance(mine, CacheLayerMixin) == isinstance(other, CacheLayerMixin)
        assert (type(mine) is LinearAttentionLayer) == (type(other) is LinearAttentionLayer)
        for member in public_members(other):
            if member in WRITING:
                assert callable(getattr(mine, member))
            elif member in CHANGING_ROWS:
                assert callable(getattr(mine, member, None)) == callable(getattr(other, member))
            elif member not in OTHERWISE:
                answers = [getattr(layer, member) for layer in (mine, other)]
                if callable(answers[1]):
                    arguments = (3,) if member == "get_mask_sizes" else ()
                    answers = [answer(*arguments) for answer in answers]
                assert_same_answer(*answers)
    ours.check()


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_that_was_not_written_has_no_more_members_than_a_dynamic_one(name: str) -> None:
    ours, theirs = both(name)
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        for member in ("device", "dtype", "indexer_device", "indexer_dtype", "sliding_window", "cumulative_length"):
            assert hasattr(mine, member) == hasattr(other, member), (type(other), member)
            if hasattr(other, member):
                assert getattr(mine, member) == getattr(other, member)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "mamba2"])
def test_a_cache_is_iterated_as_a_dynamic_one_is(name: str) -> None:
    ours, theirs = both(name, IDS)
    for layer, mine in zip(theirs.layers, ours, strict=True):
        keys = getattr(layer, "keys", None), getattr(layer, "values", None)
        assert_same_answer(
            dict(enumerate(mine)), dict(enumerate((*keys, getattr(layer, "_sliding_window_tensor", None))))
        )
    assert len(list(ours)) == len(theirs)


def test_layers_without_keys_are_iterated_as_none() -> None:
    """There `DynamicCache` itself raises AttributeError."""
    assert set(both("mamba2", IDS)[0]) == {(None, None, None)}


@pytest.mark.skipif(not hasattr(DynamicCache, "is_recording_past"), reason="this transformers' caches do not say it")
@pytest.mark.parametrize("name", ["gemma2", "mamba2", "zaya"])
def test_a_cache_says_of_each_layer_whether_it_records_the_past(name: str) -> None:
    ours, theirs = both(name)
    for is_activated in (False, True):
        if is_activated:
            ours.activate_past_recording()
            theirs.activate_past_recording()
        answers = [[cache.is_recording_past(layer) for layer in range(len(theirs))] for cache in (ours, theirs)]
        assert answers[0] == answers[1]
        assert any(answers[0]) == is_activated


def test_a_cache_is_true_even_when_it_is_empty(tiny_llama: Any) -> None:
    assert PagedPrefixCache(tiny_llama)


CHANGES: dict[str, Any] = {
    "crop": lambda cache: cache.crop(-5),
    "crop of nothing": lambda cache: cache.crop(0),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "reorder to one": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(3),
    "repeat once": lambda cache: cache.batch_repeat_interleave(1),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "select more": lambda cache: cache.batch_select_indices(torch.tensor([1, 0, 1])),
    "select the last": lambda cache: cache.batch_select_indices(torch.tensor([-1])),
    "select by mask": lambda cache: cache.batch_select_indices(torch.tensor([False, True])),
}


@pytest.mark.parametrize("is_shared", [False, True], ids=["apart", "held once"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_rows_change_as_those_of_a_dynamic_cache_do(
    change: Any, is_shared: bool, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = PagedPrefixCache(tiny_llama, block_size=4), DynamicCache(config=tiny_llama.config)
    ids = torch.cat([torch.arange(1, 41).repeat(2, 1), IDS], 1) if is_shared else IDS
    if is_shared:
        split_everywhere(monkeypatch)
        run(tiny_llama, ids, ours)
        ours.reset()
    for cache in (ours, theirs):
        run(tiny_llama, ids, cache)
    assert ours.last_call.reused_tokens == is_shared * 2 * 59
    for cache in (ours, theirs):
        change(cache)
    assert_same_content(ours, theirs)
    assert ours.get_seq_length() == theirs.get_seq_length()
    num_rows = theirs.layers[0].keys.shape[0]
    more = torch.arange(70, 70 + 2 * num_rows).view(num_rows, 2)
    torch.testing.assert_close(run(tiny_llama, more, ours), run(tiny_llama, more, theirs), atol=1e-4, rtol=1e-4)
    assert_same_content(ours, theirs)
    ours.check()


@pytest.mark.parametrize("layer_idx", [0, -1, 99, -99])
def test_a_layer_does_not_write_and_is_not_made_without_a_forward_of_the_model(filled: Any, layer_idx: int) -> None:
    ours, theirs = filled
    new, num_layers = torch.zeros(2, 2, 1, 16), len(ours.layers)
    with pytest.raises(ForwardMismatchError, match="run it through its own __call__"):
        ours.update(new, new, layer_idx)
    assert len(ours.layers) == num_layers
    assert_same_content(ours, theirs)


def test_a_copy_shares_all_blocks_and_copies_no_keys(filled: Any, tiny_llama: Any) -> None:
    ours, theirs = filled
    before = ours.stats()
    twin = copy.deepcopy(ours)
    after = ours.stats()
    assert after.num_blocks_in_use == before.num_blocks_in_use
    assert after.pool_bytes == before.pool_bytes
    assert_same_content(twin, theirs)
    other = copy.deepcopy(theirs)
    run(tiny_llama, NEXT + 10, twin)
    run(tiny_llama, NEXT + 10, other)
    assert_same_content(twin, other)
    assert_same_content(ours, theirs)
    ours.check()


def test_a_cache_in_a_structure_is_copied_once(filled: Any) -> None:
    twins = copy.deepcopy([filled[0], filled[0]])
    assert twins[0] is twins[1]
    assert twins[0] is not filled[0]
    assert twins[0].store is filled[0].store


def test_a_cache_and_a_store_cannot_be_pickled(filled: Any) -> None:
    for thing in (filled[0], filled[0].store):
        with pytest.raises(TypeError, match="pickled"):
            pickle.dumps(thing)


def test_a_reset_gives_rows_back_and_keeps_full_blocks_to_be_found(filled: Any, tiny_llama: Any) -> None:
    ours, _ = filled
    ours.reset()
    stats = ours.stats()
    assert (stats.num_blocks_in_use, stats.kv_bytes, ours.get_seq_length()) == (0, 0, 0)
    assert stats.num_cached_blocks == 2 * (23 // 4)
    tiny_llama.generate(IDS, max_new_tokens=1, past_key_values=ours)
    assert ours.last_call.reused_tokens == 2 * 19  # of each row but its last token


def test_a_list_of_the_same_layers_put_in_place_of_the_cache_s_changes_nothing(tiny_llama: Any) -> None:
    cache = PagedPrefixCache(tiny_llama)
    expected = tiny_llama.generate(IDS, max_new_tokens=3, do_sample=False)
    for _ in range(2):
        output = tiny_llama.generate(IDS, max_new_tokens=3, do_sample=False, past_key_values=cache)
        assert output.equal(expected)
        cache.layers = list(cache.layers)
    assert cache.last_call.reused_tokens == 2 * 19
