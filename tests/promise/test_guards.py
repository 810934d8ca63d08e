"""Guards that no ordinary call comes to: each test here fails when one line that guards is taken out."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import CacheArgumentError, PagedPrefixCache

from ..internals import failing_forward
from ..reference import IDS, PROMPT, AtStep, Forwards, assert_near, assert_right, assert_same, at_once, batch, row, run
from ..tiny_models import build, tiny
from .test_interrupted_calls import StopError, stop


def in_another_thread(act: Callable[[], Any]) -> list[BaseException]:
    """What it raises there."""
    try:
        at_once(act)
    except BaseException as error:  # noqa: BLE001  # whatever it is, the test looks at it
        return [error]
    return []


DEEDS: dict[str, Callable[[PagedPrefixCache], Any]] = {
    "reset": lambda cache: cache.reset(),
    "crop": lambda cache: cache.crop(-1),
    "reorder_cache": lambda cache: cache.reorder_cache(torch.tensor([0])),
    "batch_repeat_interleave": lambda cache: cache.batch_repeat_interleave(2),
    "batch_select_indices": lambda cache: cache.batch_select_indices(torch.tensor([0])),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("deed", DEEDS)
def test_rows_are_not_changed_by_another_thread_between_steps(deed: str, model: PreTrainedModel) -> None:
    """They are the call's, and not the cache's before it has ended."""
    cache, errors = PagedPrefixCache(model), []
    act = AtStep(3, lambda: errors.extend(in_another_thread(lambda: DEEDS[deed](cache))))
    assert_same(run(model, input_ids=IDS), run(model, cache, input_ids=IDS, logits_processor=[act]))
    wanted = [] if deed in ("reset", "deepcopy") else [CacheArgumentError]  # the cache has none to change
    assert [type(error) for error in errors] == wanted


def test_nothing_runs_ahead_of_a_short_row_that_is_padding_where_the_others_are_known() -> None:
    model, cache = tiny("llama"), PagedPrefixCache(tiny("llama"))
    run(model, cache, **batch(row((1, 128))))
    cache.reset()
    given = batch(row((1, 128), (2, 22)), row((3, 12)))
    with Forwards(model) as shapes:
        output = run(model, cache, **given)
    assert_same(run(model, **given), output)
    assert shapes[0] == (2, 22)


@pytest.mark.parametrize("pads", [(0,), (3,), (0, 3)], ids=str)
def test_of_a_call_that_fails_all_that_ran_is_stored(pads: tuple[int, ...]) -> None:
    """After the third step a row has its prompt, and two tokens that are stored."""
    model = tiny("llama")
    cache = PagedPrefixCache(model, block_size=1)
    rows = [row((seed, 13 - pad)) for seed, pad in enumerate(pads, 1)]
    given = batch(*rows)
    if pads == (3,):
        given = {name: torch.nn.functional.pad(tensor, (3, 0)) for name, tensor in given.items()}
    with pytest.raises(StopError):
        run(model, cache, **given, logits_processor=[AtStep(3, stop)])
    cache.reset()
    assert cache.stats().num_cached_blocks == sum(len(tokens) + 2 for tokens in rows)
    assert_right(model, cache, **given)


@pytest.mark.parametrize("where", ["before its forward", "in its forward", "after its forward"])
def test_a_continuation_that_fails_leaves_all_columns_before_it_to_be_found(where: str, model: PreTrainedModel) -> None:
    cache, armed = PagedPrefixCache(model, trust_hooks=True), False
    # there from the start: it is a condition
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: stop() if armed else None)
    said = run(model, cache, input_ids=IDS).sequences
    assert cache.get_seq_length() == 55
    whole = torch.cat([said, torch.tensor([row((2, 7))])], 1)
    given: dict[str, Any] = {"input_ids": whole[:, 55:], "attention_mask": torch.ones_like(whole)}
    armed = where == "in its forward"
    if where == "before its forward":
        given["no_such_option"] = True
    elif where == "after its forward":
        given["logits_processor"] = [AtStep(1, stop)]
    with pytest.raises(ValueError if where == "before its forward" else StopError):
        run(model, cache, **given)
    armed = False
    assert_right(model, cache, reused=62 if where == "after its forward" else 55, input_ids=whole)


def test_a_plain_forward_after_a_generate_that_died_in_its_first_one_owes_it_nothing() -> None:
    model, end = tiny("llama"), PROMPT[5]
    cache = PagedPrefixCache(model, block_size=4, num_blocks=60)
    with failing_forward(model, 1, StopError()), pytest.raises(StopError):
        run(model, cache, input_ids=torch.tensor([row((3, 4))]), max_new_tokens=2, eos_token_id=end)
    with torch.no_grad():
        model(IDS, past_key_values=cache, logits_to_keep=1)
    assert (cache.last_call.kind, cache.last_call.prompt_tokens) == ("forward", 50)
    cache.reset()
    assert cache.stats().num_cached_blocks == 12


def preparing(model: PreTrainedModel, change: Callable[[dict[str, Any]], Any]) -> None:
    """Let a model of somebody else's change the inputs of its decode steps."""
    prepare = type(model).prepare_inputs_for_generation

    def changed(*args: Any, **kwargs: Any) -> Any:
        inputs = prepare(model, *args, **kwargs)
        if inputs["input_ids"].shape[1] == 1:
            change(inputs)
        return inputs

    model.prepare_inputs_for_generation = functools.wraps(prepare)(changed)  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", ["of four dimensions", "with a hole"])
def test_tokens_generated_under_a_mask_of_the_user_s_own_are_not_stored(kind: str, model: PreTrainedModel) -> None:
    """Every step hides eight tokens of the prompt, which the model's own `prepare_inputs_for_generation` does."""

    def hide(inputs: dict[str, Any]) -> None:
        mask = torch.ones(1, int(inputs["position_ids"][0, -1]) + 1, dtype=torch.int64)
        mask[:, 8:16] = 0
        floats = (1.0 - mask.float())[:, None, None] * torch.finfo(torch.float32).min
        inputs["attention_mask"] = mask if kind == "with a hole" else floats

    preparing(model, hide)
    cache = PagedPrefixCache(model, block_size=4)
    ids = assert_right(model, cache, input_ids=IDS, max_new_tokens=20).sequences
    del model.prepare_inputs_for_generation
    cache.reset()
    assert_right(model, cache, reused=48, input_ids=ids)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_padded_rows_that_step_without_positions_leave_nothing_to_later_calls(name: str) -> None:
    model = build(name)
    cache = PagedPrefixCache(model)
    preparing(model, lambda inputs: inputs.pop("position_ids", None))
    rows = run(model, cache, **batch(row((1, 10)), row((2, 30))), max_new_tokens=40).sequences[:1, 20:]
    del model.prepare_inputs_for_generation
    cache.reset()
    assert_right(model, cache, input_ids=rows)


def test_a_mask_that_shows_padding_is_refused(model: PreTrainedModel) -> None:
    """It has no keys and values here; a `DynamicCache` would attend to those of the padding."""
    cache, inputs = PagedPrefixCache(model), batch(row((1, 10)), row((2, 30)))
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
        with pytest.raises(CacheArgumentError, match="shows column 0 of row 0, which was padding"):
            model(torch.tensor([[5], [6]]), past_key_values=cache)
    bloom = build("bloom")
    preparing(bloom, lambda inputs: inputs.update(attention_mask=inputs["attention_mask"].flip(0)))
    cache = PagedPrefixCache(bloom)
    with pytest.raises(CacheArgumentError, match="shows column 0 of row 0, which was padding"):
        run(bloom, cache, **inputs, max_new_tokens=4)
    cache.reset()
    assert cache.stats().num_blocks_in_use == 0


def as_blocks(seen: torch.Tensor) -> BlockMask:
    """The same mask for flex attention."""
    rows, _, queries, columns = seen.shape
    return create_block_mask(
        lambda row, _, query, column: seen[row, 0, query, column], rows, None, queries, columns, device="cpu"
    )


@pytest.mark.parametrize(
    ("name", "attention", "masks", "pads"),
    [
        pytest.param("llama", "sdpa", lambda seen: seen, (0, 20), id="booleans"),
        pytest.param("llama", "eager", lambda seen: seen, (0, 20), id="booleans that are added"),
        pytest.param("llama", "flex_attention", lambda seen: seen, (20,), id="booleans that flex attention adds"),
        pytest.param("llama", "sdpa", as_blocks, (20,), id="blocks"),
        pytest.param(
            "gemma3", "sdpa", lambda seen: {"full_attention": seen, "sliding_attention": None}, (20,), id="none"
        ),
        pytest.param(
            "gemma3", "sdpa", lambda seen: {"full_attention": seen, "sliding_attention": seen[:, 0]}, (20,), id="3-D"
        ),
    ],
)
def test_a_mask_of_another_form_is_refused_where_rows_have_padding_and_is_right_where_not(
    name: str, attention: str, masks: Callable[[torch.Tensor], Any], pads: tuple[int, ...]
) -> None:
    model = build(name)
    model.set_attn_implementation(attention)
    for pad in pads:
        inputs, new = batch(row((1, 30 - pad)), row((2, 30))), torch.tensor([[5, 6], [7, 8]])
        seen = torch.cat((inputs["attention_mask"], torch.ones_like(new)), dim=1)[:, None, None, :].bool()
        given: dict[str, Any] = {
            "attention_mask": masks(seen & torch.ones(2, 1, 2, 32, dtype=torch.bool).tril(30)),
            "position_ids": torch.tensor([[30 - pad, 31 - pad], [30, 31]]),
            "logits_to_keep": 1,
        }
        reference, cache = DynamicCache(config=model.config), PagedPrefixCache(model)
        with torch.no_grad():
            for kept in (reference, cache):
                model(**inputs, past_key_values=kept)
            if pad:
                with pytest.raises(CacheArgumentError, match="cannot be asked whether it hides the padding of row 0"):
                    model(new, past_key_values=cache, **given)
            else:
                wanted, got = (model(new, past_key_values=kept, **given).logits for kept in (reference, cache))
                assert_near(got, wanted)
        cache.check()


def test_a_generate_that_was_overtaken_on_its_cache_gives_no_wrong_result(model: PreTrainedModel) -> None:
    """A streamer gets the prompt before the first forward, and may run another call in between."""
    cache = PagedPrefixCache(model)
    others = iter([torch.tensor([row((7, 33))])])

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            for ids in others:
                run(model, cache, input_ids=ids)

        def end(self) -> None:
            """Nothing is held back."""

    assert_same(run(model, input_ids=IDS), run(model, cache, input_ids=IDS, streamer=Streamer()))
    assert_right(model, cache, input_ids=IDS)


def test_padding_of_a_forward_that_died_is_no_padding_of_the_rows(model: PreTrainedModel) -> None:
    """The next forward may bring fewer columns than that one did."""
    cache, inputs = PagedPrefixCache(model), batch(row((1, 10)), row((2, 30)))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def forward(start: int, stop: int) -> torch.Tensor:
        given = {"attention_mask": mask[:, :stop], "position_ids": positions[:, start:stop]}
        logits: torch.Tensor = model(ids[:, start:stop], past_key_values=cache, **given).logits
        return logits

    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, position_ids=positions).logits
        forward(0, 2)
        handle = model.model.layers[1].register_forward_pre_hook(lambda module, args: stop())
        with pytest.raises(StopError):
            forward(2, 25)
        handle.remove()
        forward(2, 4)
        got = forward(4, 30)[:, -10:]
    assert_near(got, wanted[:, -10:])
