"""Layers whose attention sees a window hand over what `DynamicCache` does there, wherever the window ends."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import ForwardMismatchError, PagedPrefixCache, PrefixStore
from hf_paged_cache.model.layers import cache_layers
from hf_paged_cache.model.trial import measure_bytes_per_token
from hf_paged_cache.rows import layers

from ..internals import make_forwards_cheap
from ..reference import PROMPT, assert_near, assert_right, assert_same, batch, is_same, row, run
from ..tiny_models import WINDOW, build, tiny

MODELS = ("mistral", "gemma3")  # each layer has a window, or every other
NAMES = pytest.mark.parametrize("name", MODELS)
IDS = torch.tensor([row((1, 200))])


def forward(model: PreTrainedModel, cache: Any, start: int, stop: int) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS[:, start:stop], past_key_values=cache).logits  # type: ignore[no-any-return]


@NAMES
@pytest.mark.parametrize(
    "stops",
    [
        (WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1),
        (WINDOW - 1, WINDOW + 5),
        (3 * WINDOW, 3 * WINDOW + 1, 5 * WINDOW),
        (1, 2, 2 * WINDOW + 1),
    ],
)
def test_a_layer_is_to_transformers_what_that_of_a_dynamic_cache_is(stops: tuple[int, ...], name: str) -> None:
    model = tiny(name)
    ours, theirs = PagedPrefixCache(model), DynamicCache(config=model.config)
    assert ours.is_sliding == theirs.is_sliding
    assert [layer.get_max_length() for layer in ours.layers] == [layer.get_max_length() for layer in theirs.layers]
    for start, stop in zip((0, *stops), stops, strict=False):
        for query_length in (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW):
            for index, layer in enumerate(theirs.layers):
                assert ours.get_mask_sizes(query_length, index) == layer.get_mask_sizes(query_length), (start, index)
        assert_near(forward(model, ours, start, stop), forward(model, theirs, start, stop))
        for mine, layer in zip(ours.layers, theirs.layers, strict=True):
            assert mine.get_seq_length() == layer.get_seq_length() == stop
            for got, wanted in ((mine.keys, layer.keys), (mine.values, layer.values)):
                assert_near(got, wanted)


CHANGES: dict[str, Callable[[Any], None]] = {
    "a shorter window": lambda config: setattr(config, "sliding_window", 8),
    "a longer window": lambda config: setattr(config, "sliding_window", 40),
    "no window": lambda config: setattr(config, "sliding_window", None),
    "other layers": lambda config: setattr(
        config, "layer_types", ["full_attention", "sliding_attention", "sliding_attention"]
    ),
    "another layer, in the same list": lambda config: config.layer_types.__setitem__(0, "full_attention"),
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, change) for name in MODELS for change in ("a shorter window", "a longer window")),
        ("mistral", "no window"),
        ("gemma3", "other layers"),
        ("gemma3", "another layer, in the same list"),
    ],
)
def test_calls_with_other_windows_than_when_the_cache_was_built_reuse_nothing(name: str, change: str) -> None:
    model = build(name)
    if name == "gemma3":
        model.config.layer_types = [*model.config.layer_types]  # not the list that all models are built with
    cache = PagedPrefixCache(model)
    run(model, cache, **batch(PROMPT), max_new_tokens=30)
    CHANGES[change](model.config)
    wanted = run(model, **batch(PROMPT), max_new_tokens=30)
    for _ in range(2):
        assert_same(wanted, run(model, cache, **batch(PROMPT), max_new_tokens=30))
        assert cache.last_call.rows[0].stopped.startswith("layers have other windows")
    assert cache.lookup(PROMPT).num_tokens == 0
    assert cache.is_sliding == DynamicCache(config=model.config).is_sliding
    another = PagedPrefixCache(model)
    for reused in (0, len(PROMPT) - 1):
        assert_same(wanted, run(model, another, **batch(PROMPT), max_new_tokens=30))
        assert another.last_call.reused_tokens == reused


def test_a_window_that_a_config_gets_later_is_in_the_mask() -> None:
    model = build("mistral", sliding_window=None)
    cache = PagedPrefixCache(model)
    without = run(model, cache, **batch(PROMPT))
    model.config.sliding_window = 8
    wanted = run(model, **batch(PROMPT), max_new_tokens=30)
    assert not is_same(run(model, **batch(PROMPT)), without)
    for _ in range(2):
        assert_same(wanted, run(model, cache, **batch(PROMPT), max_new_tokens=30))


@NAMES
@pytest.mark.parametrize(("window", "block_size"), [(WINDOW, 7), (5, 16)])
def test_a_long_generation_is_that_of_a_dynamic_cache(window: int, block_size: int, name: str) -> None:
    """Every step's window begins elsewhere in a block, in rows of different padding; what it leaves is whole."""
    model = build(name, sliding_window=window)
    store = PrefixStore(model, block_size=block_size)
    cache = PagedPrefixCache(store)
    rows = batch(row((1, 40)), row((2, 27)))
    wanted = run(model, **rows, max_new_tokens=70)
    assert_same(wanted, run(model, cache, **rows, max_new_tokens=70))
    other = PagedPrefixCache(store)
    going_on = batch([*wanted.sequences[0].tolist(), 5, 6])
    assert_right(model, other, **going_on)
    assert other.last_call.reused_tokens >= 110 - block_size


@NAMES
@pytest.mark.parametrize("window", [17, 64])
def test_a_row_holds_its_windows_and_a_fixed_number_of_columns_beside_them_however_long_it_is(
    window: int, name: str
) -> None:
    """In bytes: a block of 16 tokens, 32 that may be taken back, and room for 64 until the window moves."""
    model = build(name, sliding_window=window)
    layers, prompt = cache_layers(model), row((1, 150))
    has_window = [getattr(layer, "is_sliding", False) for layer in layers]
    token_bytes = measure_bytes_per_token(model) / len(layers)
    cache = PagedPrefixCache(model)
    for num_new in (1, 2, 16, 17, 65, 100, 100):
        run(model, cache, **batch(prompt), max_new_tokens=num_new, min_new_tokens=num_new)
        num_tokens, held, most = cache.get_seq_length(), cache.stats().kv_bytes, cache.last_call.peak_kv_bytes
        assert num_tokens == 149 + num_new
        least = sum(min(num_tokens, window - 1) if each else num_tokens for each in has_window)
        allowed = sum(min(num_tokens, window - 1 + 16 + 32 + 64) if each else num_tokens for each in has_window)
        assert least * token_bytes <= held <= most <= allowed * token_bytes


@pytest.mark.parametrize("num_blocks", [2, 5, 8])
@pytest.mark.parametrize(("name", "window"), [("mistral", 2), ("gemma3", 17)])
def test_a_call_is_right_in_a_pool_of_any_size(
    name: str, window: int, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hit inside a full block; rows that share a prefix, or part in their first block."""
    make_forwards_cheap(monkeypatch)
    model = build(name, sliding_window=window)
    max_bytes = math.ceil(num_blocks * 8 * measure_bytes_per_token(model))
    first = row((1, 17))
    calls = [
        {**batch(*prompts), "max_new_tokens": 12}
        for prompts in (
            (first,),
            ([*first[:12], *row((2, 30))],),
            ([*first, *row((3, 1))], [*first, *row((4, 1))]),
            (first,),
            ([*first[:1], *row((5, 5))], first[:1]),
            (row((6, 30)),),
            ([*first[:16], *row((7, 20))],),
        )
    ]
    references = [run(model, **arguments) for arguments in calls]
    for sizes in ({"num_blocks": num_blocks}, {"max_bytes": max_bytes}):
        store = PrefixStore(model, block_size=8, **sizes)
        caches = [PagedPrefixCache(store) for _ in range(2)]
        for arguments, reference in zip(calls, references, strict=True):
            for cache in caches:
                assert_same(reference, run(model, cache, **arguments))
                cache.check()


@pytest.mark.parametrize(("owner", "name"), [(torch, "cat"), (layers, "zeros")], ids=["cat", "zeros"])
def test_a_loop_whose_window_runs_out_of_memory_as_it_moves_goes_on_right_or_is_refused(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys have moved then and values have not, or one layer has and the next one has not."""
    model, make, number = tiny("mistral"), getattr(owner, name), 0
    stops = [42, 98, 128, 160, *range(188, 200)]  # the room grows at 98, and is full at 192
    wanted, past = [], DynamicCache(config=model.config)
    for start, stop in pairwise([0, *stops]):
        wanted.append(forward(model, past, start, stop))
    num_calls = 0

    def failing(*given: Any, **more: Any) -> Any:
        nonlocal num_calls
        if owner is layers or more == {"dim": 2}:
            num_calls += 1
            if num_calls == number:
                raise torch.OutOfMemoryError("on purpose")
        return make(*given, **more)

    monkeypatch.setattr(owner, name, failing)
    while num_calls >= number:
        number, num_calls, cache = number + 1, 0, PagedPrefixCache(model, block_size=4)
        for (start, stop), logits in zip(pairwise([0, *stops]), wanted, strict=True):
            try:
                got = forward(model, cache, start, stop)
            except torch.OutOfMemoryError:
                try:
                    got = forward(model, cache, start, stop)
                except ForwardMismatchError:
                    break
            assert_near(got, logits)
    assert number > 3
