"""Calls on models whose layers see a window, or chunks: as with `DynamicCache`, from empty, used and small stores."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_paged_cache import CacheArgumentError, ForwardMismatchError, PagedPrefixCache
from hf_paged_cache.rows import memory

from ..conformance import zoo
from ..internals import failing_forward
from ..reference import FROM_5_23, TOLERANCE, assert_same, batch, is_same, row, run, zero_blocks
from ..tiny_models import build
from .test_rows_go_on import distance, forward


@FROM_5_23
def test_a_window_is_kept_where_prompts_part_that_it_no_longer_shows() -> None:
    model = build("mistral", sliding_window=64, max_position_embeddings=1024)
    cache, reused, shared = PagedPrefixCache(model), [], row((1, 320))
    for question in range(2, 5):
        prompt = batch([*shared, *row((question, 150))])
        assert_same(run(model, **prompt), run(model, cache, **prompt))
        reused.append(cache.last_call.reused_tokens)
    assert reused[2] == 320
    cache.check()
    zero_blocks(cache)
    prompt = batch([*shared, *row((5, 30))])  # its last token still sees what is before
    assert not is_same(run(model, **prompt), run(model, cache, **prompt))


def test_more_than_a_window_lets_take_back_is_refused_before_anything_changes() -> None:
    model = zoo.build("mistral")
    cache, prompt = PagedPrefixCache(model, block_size=4), torch.tensor([row((1, 40))])
    forward(model, prompt, cache, logits_to_keep=1)
    steps = [step % 90 + 1 for step in range(150)]
    for step in steps:
        forward(model, torch.tensor([[step]]), cache)
    with pytest.raises(CacheArgumentError, match="cannot take back 120 tokens: layers with a window"):
        cache.crop(-120)
    plain = DynamicCache(config=model.config)
    forward(model, torch.cat([prompt, torch.tensor([steps])], dim=1), plain)
    assert distance(forward(model, prompt[:, :1], cache), forward(model, prompt[:, :1], plain)) < TOLERANCE


def test_a_forward_that_died_while_windows_moved_leaves_nothing_wrong() -> None:
    """The first layer has moved its columns then, and the second has not."""
    model, steps = zoo.build("mistral"), torch.tensor([row((1, 40), (2, 160))])
    cache, plain = PagedPrefixCache(model, block_size=4), DynamicCache(config=model.config)
    for past in (cache, plain):
        forward(model, steps[:, :40], past, logits_to_keep=1)
    num_lost = 0
    for at in range(40, 200):
        new = steps[:, at : at + 1]
        with failing_forward(model, 1, KeyError("planted")), pytest.raises(KeyError):
            forward(model, new, cache)
        wanted = forward(model, new, plain)
        try:
            got = forward(model, new, cache)
        except ForwardMismatchError:
            num_lost += 1
            cache.reset()
            assert not cache.verify().differing
            got = forward(model, steps[:, : at + 1], cache, logits_to_keep=1)
        assert distance(got, wanted) < TOLERANCE
    cache.reset()
    assert not cache.verify().differing
    assert num_lost


def test_a_bypassed_call_goes_on_where_the_rows_were() -> None:
    model, prompt, logits = zoo.build("gemma3_text"), torch.tensor([row((1, 60))]), []
    for past in (DynamicCache(config=model.config), PagedPrefixCache(model, block_size=4)):
        forward(model, prompt, past, logits_to_keep=1)
        embeddings = model.get_input_embeddings()(prompt[:, :2])
        with torch.no_grad():
            logits.append(model(inputs_embeds=embeddings, past_key_values=past).logits[:, -1])
        logits.append(forward(model, prompt[:, :1], past))
    assert distance(logits[2], logits[0]) < TOLERANCE
    assert distance(logits[3], logits[1]) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "error"), [("write_blocks", torch.OutOfMemoryError), ("load_blocks", KeyboardInterrupt)]
)
def test_a_fault_while_windows_are_kept_or_loaded_leaves_nothing_wrong_behind(
    name: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each time that it is called."""
    model, given = zoo.build("gemma3_text"), batch(row((1, 34), (2, 9)), row((1, 34), (3, 20)))
    reference, number, num_calls = run(model, **given), 0, [0]
    act = getattr(memory, name)

    def failing(*arguments: Any, **more: Any) -> Any:
        num_calls[0] += 1
        if num_calls[0] == number:
            raise error("in the middle")
        return act(*arguments, **more)

    while num_calls[0] >= number:
        number, num_calls[0] = number + 1, 0
        cache = PagedPrefixCache(model, block_size=4, num_blocks=60)
        run(model, cache, **batch(row((1, 34))), max_new_tokens=1)
        cache.reset()
        with monkeypatch.context() as patch:
            patch.setattr(memory, name, failing)
            try:
                assert_same(reference, run(model, cache, **given))
            except error:
                assert error is KeyboardInterrupt or name == "load_blocks"
        cache.check()
        assert_same(reference, run(model, cache, **given))
        cache.check()
    assert number > 2
