"""Many new tokens after few known ones are attended as one causal square, and give what `DynamicCache` gives."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.attention import causal

from ..internals import note_served, split_everywhere
from ..reference import assert_near, assert_right, assert_same, batch, is_same, row, run, zero_blocks
from ..tiny_models import build, tiny

KNOWN = (1, 40)
LONG = row(KNOWN, (2, 90))
CALLS: dict[str, dict[str, Any]] = {
    "one row": batch(LONG),
    "beams": {**batch(LONG), "num_beams": 3},
    "rows of one length": batch(row(KNOWN, (2, 90)), row(KNOWN, (3, 90))),
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each attention that was asked of a square, whether it was served. Squares are tried wherever they can be."""
    split_everywhere(monkeypatch)
    return note_served(monkeypatch, causal)


@pytest.mark.parametrize("what", [*CALLS])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mixtral", "bloom"])
def test_a_long_rest_gives_the_same_logits(name: str, what: str, served: list[bool]) -> None:
    model, call = tiny(name), CALLS[what]
    cache, reference = PagedPrefixCache(model), run(model, **call)
    run(model, cache, **batch(row(KNOWN)))
    cache.reset()
    assert_same(reference, run(model, cache, **call))
    # of rows that share what is known it is read once instead; bloom looks at keys and values
    assert any(served) == (what != "rows of one length" and name != "bloom")
    run(model, fresh := PagedPrefixCache(model), **batch(row(KNOWN)))
    fresh.reset()
    zero_blocks(fresh)
    assert not is_same(reference, run(model, fresh, **call))


@pytest.mark.parametrize(
    "what", ["padding", "a mask with a hole", "bidirectional", "numbers", "numbers that say how much"]
)
def test_only_what_is_causal_is_served(what: str, served: list[bool]) -> None:
    model = tiny("llama")
    ours, theirs = PagedPrefixCache(model), DynamicCache(config=model.config)
    ids = torch.tensor([LONG[:-3]])
    mask: torch.Tensor = torch.tril(torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool))
    if what == "a mask with a hole":
        mask[..., 100:, 60] = False
    elif what == "bidirectional":
        mask[..., 50:60, 50:60] = True
    elif what == "padding":
        mask[..., :3] = False
        mask |= torch.eye(ids.shape[1], dtype=torch.bool)
    if "numbers" in what:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    if what == "numbers that say how much":
        mask[..., 10] = -1.0
    outputs = []
    for cache in (ours, theirs):
        with torch.no_grad():
            model(ids[:, :40], past_key_values=cache, attention_mask=mask[..., :40, :40])
            rest = mask[..., 40:, :]
            outputs.append(model(ids[:, 40:], past_key_values=cache, attention_mask=rest).logits)
    assert_near(*outputs)
    assert not served  # a forward with a mask of one's own is bypassed
    square = causal.CausalSquare(40, ids.shape[1], None)  # as where transformers makes such a mask
    assert square.is_causal(mask[..., 40:, :]) == (what == "numbers")


def test_rows_with_padding_are_no_square(served: list[bool]) -> None:
    model, call = tiny("llama"), batch(row(KNOWN, (2, 90)), row((3, 120)))
    run(model, cache := PagedPrefixCache(model), **batch(row(KNOWN), row((3, 40))))
    cache.reset()
    assert_right(model, cache, **call)
    assert {*served} == {False}


def test_a_mask_that_is_written_between_layers_is_looked_at_again(served: list[bool]) -> None:
    model = build("llama")
    ours, theirs, outputs = PagedPrefixCache(model, trust_hooks=True), DynamicCache(config=model.config), []

    def hide(module: Any, args: Any, given: dict[str, Any]) -> None:
        mask = given["attention_mask"]
        if mask is not None and mask.shape[-1] > 50:
            mask[..., 20:, 50] = False

    model.model.layers[1].register_forward_pre_hook(hide, with_kwargs=True)
    ids = torch.tensor([LONG])
    for cache in (ours, theirs):
        with torch.no_grad():
            model(ids[:, :40], past_key_values=cache)
            outputs.append(model(ids[:, 40:], past_key_values=cache).logits)
    assert_near(*outputs)
    assert served == [True, False]


def test_where_no_fused_kernel_serves_there_is_a_mask(served: list[bool]) -> None:
    model, call = tiny("llama"), CALLS["one row"]
    run(model, cache := PagedPrefixCache(model), **batch(row(KNOWN)))
    with sdpa_kernel(SDPBackend.MATH):
        assert_right(model, cache, **call)
    assert not served


def test_what_a_model_asks_to_be_contiguous_is(served: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def flat(module: Any, query: Any, key: torch.Tensor, *args: Any, **options: Any) -> Any:
        key.contiguous().view(key.shape[0], -1, key.shape[3])
        return attend(module, query, key, *args, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", flat)
    model, call = tiny("llama"), CALLS["one row"]
    run(model, cache := PagedPrefixCache(model), **batch(row(KNOWN)))
    assert_right(model, cache, **call)
