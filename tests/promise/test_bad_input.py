"""What is wrong or unusual gives the result of `DynamicCache` or a clear error, and the call after it is right."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_paged_cache import CacheArgumentError, PagedCacheError, PagedPrefixCache, PrefixStore, UnsupportedModelError

from ..reference import assert_right, assert_same, batch, is_same, row, run, zero_blocks
from ..tiny_models import build, character_tokenizer, tiny

PROMPT = row((1, 50))
NO_CACHES: tuple[Any, ...] = ("yes", True, 3, {}, torch.zeros(1))


@pytest.fixture
def cache() -> PagedPrefixCache:
    """A cache of the tiny Llama that knows the prompt."""
    warm = PagedPrefixCache(tiny("llama"))
    run(tiny("llama"), warm, **batch(PROMPT))
    return warm


def assert_next_call_is_right(cache: PagedPrefixCache, reused: int | None = None) -> None:
    cache.check()
    model = cache.store.model
    assert_right(model, cache, reused=reused, **batch(PROMPT))
    assert_right(model, cache, **batch(row((1, 50), (2, 9))))
    cache.check()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda _: torch.compile(torch.nn.Linear(1, 1)), "an object of type Linear; for a wrapped model pass"),
        (lambda model: type(model), "the class LlamaForCausalLM: pass a model, an instance of it"),
        (lambda _: "gpt2", "the string 'gpt2': load it first, with AutoModelForCausalLM.from_pretrained"),
        (PagedPrefixCache, "a PagedPrefixCache: pass its store"),
        (lambda _: character_tokenizer("ab"), "a tokenizer, "),
        (lambda _: None, "an object of type NoneType; for a wrapped model pass the PreTrainedModel inside"),
        (lambda _: torch.nn.Linear(1, 1), "an object of type Linear; for a wrapped model pass"),
    ],
)
def test_what_is_no_model_is_named_with_what_to_pass_instead(make: Callable[[Any], Any], said: str) -> None:
    message = re.escape(f"expected a transformers model with generate(), got {said}")
    with pytest.raises(UnsupportedModelError, match=message):
        PagedPrefixCache(make(tiny("llama")))


def test_max_bytes_buys_as_many_blocks_as_it_pays_for() -> None:
    # 2 layers of key and value, 2 heads of 16 numbers of 4 bytes
    bytes_per_block = 2 * 2 * 2 * 16 * 4 * 16
    with pytest.raises(CacheArgumentError, match="PrefixStore"):
        PagedPrefixCache(PrefixStore(tiny("llama")), block_size=8)
    assert PrefixStore(tiny("llama"), max_bytes=10 * bytes_per_block + 1).blocks.budget.num_blocks == 10
    with pytest.raises(CacheArgumentError, match=rf"need {2 * bytes_per_block} bytes \(0.1MB\)$"):
        PrefixStore(tiny("llama"), max_bytes=2 * bytes_per_block - 1)


def test_embeddings_without_ids_are_computed_without_reuse_and_never_reused(cache: PagedPrefixCache) -> None:
    model = cache.store.model
    embeddings = model.get_input_embeddings()(torch.tensor([PROMPT])).detach()
    other = model.get_input_embeddings()(torch.tensor([row((9, 50))])).detach()
    mask = torch.ones(1, 50, dtype=torch.int64)
    for passed in (embeddings, other, embeddings):
        arguments = {"inputs_embeds": passed, "attention_mask": mask}
        assert_right(model, cache, reused=0, **arguments)
        cache.check()
    assert_next_call_is_right(cache)


HOLES = [1] * 10 + [0] * 4 + [1] * 36


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param([[1] * 45 + [0] * 5, [1] * 50], id="right padding"),
        pytest.param([HOLES, [1] * 50], id="holes"),
        pytest.param([[0] * 5 + HOLES[5:], [0] * 7 + [1] * 43], id="left padding and holes"),
        pytest.param([[1] * 50, [0] * 50], id="a row of padding"),
    ],
)
@pytest.mark.parametrize("way", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_an_unusual_mask_gives_what_dynamic_cache_gives(
    mask: list[list[int]], way: dict[str, Any], cache: PagedPrefixCache
) -> None:
    model = cache.store.model
    arguments = {"input_ids": torch.tensor([PROMPT, PROMPT]), "attention_mask": torch.tensor(mask), **way}
    reference = run(model, **arguments)
    for _ in range(2):
        output = run(model, cache, **arguments)
        # A row that sees nothing has no right logits: attention over no column is whatever the kernel makes of it.
        seen = [number for number, columns in enumerate(mask) if any(columns)]
        if len(seen) == len(mask):
            assert_same(reference, output)
        else:
            per_row = len(output.sequences) // len(mask)
            assert torch.equal(output.sequences[:per_row], reference.sequences[:per_row])
        cache.check()
    assert_next_call_is_right(cache)


@pytest.mark.parametrize("is_used", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "opt"])
def test_new_tokens_go_on_from_padded_rows_whose_columns_were_counted(name: str, is_used: bool) -> None:
    """A plain forward without positions counts columns, `generate` the tokens of the mask: as with `DynamicCache`."""
    model = build(name)
    ids = torch.tensor([row((1, 40)), [0] * 8 + row((2, 32))])
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    new = torch.tensor([row((3, 5)), row((4, 5))])
    going_on = {"input_ids": new, "attention_mask": torch.cat([mask, torch.ones_like(new)], 1)}
    cache, plain = PagedPrefixCache(model), DynamicCache(config=model.config)
    if is_used:
        run(model, cache, input_ids=ids, attention_mask=mask)
        cache.reset()
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
        model(ids, attention_mask=mask, past_key_values=plain)
    assert_same(run(model, **going_on, past_key_values=plain), run(model, cache, **going_on))
    cache.check()
    whole = {**going_on, "input_ids": torch.cat([ids, new], 1)}
    for _ in range(2):  # nothing that was numbered otherwise is found
        assert_right(model, cache, **whole)
        cache.reset()


@pytest.mark.parametrize("is_used", [False, True])
def test_a_model_without_some_of_its_layers_gets_nothing_wrong_from_the_cache_of_before(is_used: bool) -> None:
    model = build("llama", num_hidden_layers=3)
    whole, ids = model.model.layers, torch.tensor([PROMPT])
    cache = PagedPrefixCache(model)
    run(model, cache, input_ids=ids if is_used else ids[:, 40:])
    model.model.layers = whole[:1]
    assert_right(model, cache, input_ids=ids)  # rows have as many layers as the model
    cache.check()
    shorter = PagedPrefixCache(model)
    for _ in range(2):
        assert_right(model, shorter, input_ids=ids)
    model.model.layers = whole
    assert_right(model, cache, input_ids=ids)


def ids_of(*tokens: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.tensor([tokens], dtype=torch.int64)}


# what is wrong with a call -> the call, with our cache or with what transformers makes, and whether that refuses it,
# too
REFUSED: dict[str, tuple[Callable[[Any, Any], Any], str, bool]] = {
    "no tokens": (lambda model, cache: run(model, cache, **ids_of()), "", True),
    "a token above the vocabulary": (lambda model, cache: run(model, cache, **ids_of(*PROMPT, 128)), "", True),
    "a token below it": (lambda model, cache: run(model, cache, **ids_of(*PROMPT, -1)), "", True),
    "another number of rows": (
        lambda model, cache: run(
            model, cache, input_ids=torch.tensor([[5], [6]]), attention_mask=torch.ones(2, 56, dtype=torch.int64)
        ),
        "rows",
        False,
    ),
    "a cache implementation beside ours": (
        lambda model, cache: run(model, cache, **batch(PROMPT), cache_implementation="static"),
        "cache_implementation",
        False,
    ),
    "a row that is not there": (lambda _, cache: cache.reorder_cache(torch.tensor([0, 3])), "rows", False),
    "a row below the first": (lambda _, cache: cache.reorder_cache(torch.tensor([-1])), "rows", False),
    "no rows": (lambda _, cache: cache.reorder_cache(torch.tensor([], dtype=torch.int64)), "rows", False),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_what_is_refused_leaves_the_next_call_right(wrong: str, cache: PagedPrefixCache) -> None:
    call, said, is_refused_without = REFUSED[wrong]
    for each in (cache, None) if is_refused_without else (cache,):
        with pytest.raises((ValueError, IndexError, RuntimeError, PagedCacheError), match=said):
            call(cache.store.model, each)
    assert_next_call_is_right(cache)


@pytest.mark.parametrize("num_columns", [30, 54, 58, 80])
def test_a_mask_that_is_not_as_long_as_rows_and_ids_is_refused_or_harmless(
    num_columns: int, cache: PagedPrefixCache
) -> None:
    """Two new ids on 55 columns want 57; transformers drops a mask of ones, and numbers the tokens by its length."""
    model = cache.store.model
    arguments = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, num_columns, dtype=torch.int64)}
    reference_cache = DynamicCache()
    run(model, reference_cache, **batch(PROMPT))
    assert cache.get_seq_length() == reference_cache.get_seq_length() == 55
    try:
        output = run(model, cache, **arguments)
    except (CacheArgumentError, ValueError, RuntimeError, IndexError):
        pass
    else:
        assert_same(run(model, reference_cache, **arguments), output)
    assert_next_call_is_right(cache)


def test_without_use_cache_the_result_is_right_and_a_warning_says_that_nothing_is_reused(
    cache: PagedPrefixCache,
) -> None:
    model = cache.store.model
    with pytest.warns(UserWarning, match="use_cache"):
        output = run(model, cache, **batch(PROMPT), use_cache=False)
    assert_same(run(model, **batch(PROMPT)), output)
    assert_next_call_is_right(cache)


def test_crop_takes_a_negative_number_as_dynamic_cache_does(cache: PagedPrefixCache) -> None:
    for number in (5, 1, -56, -1000):
        with pytest.raises(CacheArgumentError):
            cache.crop(number)
        assert cache.get_seq_length() == 55
    with pytest.raises(CacheArgumentError, match=r"^tokens_to_remove is of type str; give a negative integer"):
        cache.crop("2")  # type: ignore[arg-type]
    cache.crop(0)
    assert cache.get_seq_length() == 55
    cache.crop(-5)
    assert cache.get_seq_length() == 50
    assert_next_call_is_right(cache)


def test_the_checks_of_this_file_see_wrong_keys_and_values(cache: PagedPrefixCache) -> None:
    zero_blocks(cache)
    assert not is_same(run(tiny("llama"), **batch(PROMPT)), run(tiny("llama"), cache, **batch(PROMPT)))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(
            (it, f"of type {type(it).__name__}, which is no cache; pass PagedPrefixCache(model), or")
            for it in NO_CACHES
        ),
        (PagedPrefixCache, "the class PagedPrefixCache, which is no cache; build one, PagedPrefixCache(model) or"),
        ("a store", "a PrefixStore, which is no cache; build one, PagedPrefixCache(model) or"),
    ],
    ids=str,
)
def test_what_is_never_a_cache_is_refused_by_name(given: Any, said: str) -> None:
    model, ids = tiny("llama"), torch.tensor([PROMPT])
    store = PrefixStore(model)
    given = store if given == "a store" else given
    with pytest.raises(CacheArgumentError, match=re.escape(f"past_key_values is {said}")):
        model.generate(ids, past_key_values=given, max_new_tokens=1)
    if "build one" in said:
        with pytest.raises(CacheArgumentError, match=re.escape(f"past_key_values is {said}")):
            model(ids, past_key_values=given)
