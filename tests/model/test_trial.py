"""The trial of a model: what it finds, and that the model is afterwards what it was."""

from __future__ import annotations

import copy
import json
import re
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import pad as pad_with_zeros

from hf_paged_cache import PagedPrefixCache, UnsupportedModelError, check_model, prefix_store
from hf_paged_cache.model import support, trial
from hf_paged_cache.model.probing import (
    NUM_CACHED,
    NUM_COLUMNS,
    behind_padding,
    continue_behind,
    distance,
    dynamic_cache,
    last_logits,
    tolerance,
    trial_inputs,
    types_of_logits,
)
from hf_paged_cache.model.state_traits import EVERY_PAD, StateTraits, read_state_traits
from hf_paged_cache.model.trial import (
    default_numbering,
    require_continuable,
    state_traits,
    why_it_fails,
)

from ..conformance import zoo
from ..reference import assert_same, run
from ..tiny_models import build
from .test_support import FROM_5_23

NUM_FORWARDS = 3 * 3  # of two rows, of one, and of those that continue by a token: whole, the first columns, the others


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "opt", "bloom", "bert_decoder"])
def test_a_decoder_is_itself_behind_a_cache(name: str) -> None:
    assert why_it_fails(build(name)).reason == ""


def test_attention_to_later_tokens_is_seen() -> None:
    assert "depend on more than the tokens before them" in why_it_fails(build("bert")).reason


def test_a_model_that_is_wrong_behind_a_past_in_padded_rows_alone_is_seen(tiny_llama: Any) -> None:
    def forget_padding(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length():
            kwargs["attention_mask"] = torch.ones_like(kwargs["attention_mask"])
        return args, kwargs

    tiny_llama.register_forward_pre_hook(forget_padding, with_kwargs=True)
    assert "differ in a row with padding by" in why_it_fails(tiny_llama).reason


@pytest.mark.parametrize(("num_columns", "is_seen"), [(3, False), (5, True)])
def test_a_few_columns_may_differ_as_where_rounding_sends_a_token_to_another_expert(
    tiny_llama: Any, num_columns: int, is_seen: bool
) -> None:
    def differ(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        cache = kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length() == NUM_COLUMNS:
            output.logits[:, :num_columns] += output.logits.abs().max()

    tiny_llama.register_forward_hook(differ, with_kwargs=True)
    assert bool(why_it_fails(tiny_llama).reason) == is_seen


def test_a_cache_with_other_columns_than_the_tokens_is_seen(tiny_llama: Any) -> None:
    def repeat_tokens(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("past_key_values") is not None:
            for name in ("input_ids", "attention_mask", "position_ids"):
                kwargs[name] = torch.cat((kwargs[name][:, :1], kwargs[name]), dim=1)
        return args, kwargs

    tiny_llama.register_forward_pre_hook(repeat_tokens, with_kwargs=True)
    assert f"after {NUM_CACHED} tokens its cache holds {NUM_CACHED + 1}" in why_it_fails(tiny_llama).reason


def test_a_model_that_raises_behind_a_cache_is_refused_with_its_error(tiny_llama: Any) -> None:
    def fail(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("past_key_values") is not None:
            raise RuntimeError("no cache today")

    tiny_llama.register_forward_pre_hook(fail, with_kwargs=True)
    message = re.escape("it cannot be continued after a cache (RuntimeError: no cache today)")
    for if_it_runs in (False, True):
        with pytest.raises(UnsupportedModelError, match=message):
            require_continuable(tiny_llama, if_it_runs=if_it_runs)


def test_of_a_long_error_the_first_line_is_quoted_cut_to_200_characters(tiny_llama: Any) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("known models: " + "model, " * 500 + "\nand a hint")

    tiny_llama.register_forward_pre_hook(fail)
    reason = why_it_fails(tiny_llama).reason
    assert "(ValueError: known models: model, " in reason
    assert reason.endswith("...)")
    assert len(reason) < 260
    assert support.quoted(KeyError("a\nb")) == r"KeyError: 'a\nb'"
    assert support.quoted(ValueError("a\nb")) == "ValueError: a"
    assert support.quoted(ValueError()) == "ValueError: "
    assert support.quoted(ValueError("x" * 200)) == "ValueError: " + "x" * 200


def test_a_model_that_cannot_be_run_on_token_ids_alone_is_refused_only_where_there_is_doubt(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def want_more(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if kwargs.pop("task", None) is None:
            raise ValueError("no task")
        return args, kwargs

    tiny_llama.register_forward_pre_hook(want_more, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match=re.escape("it cannot be run on token ids alone (ValueError: no")):
        require_continuable(tiny_llama)
    monkeypatch.setattr(support, "TESTED_VERSION", "5.0.0")
    PagedPrefixCache(tiny_llama)
    monkeypatch.setattr(prefix_store, "leaves_doubt", lambda model: True)
    with pytest.raises(UnsupportedModelError, match="no task"):
        PagedPrefixCache(tiny_llama)


@pytest.mark.parametrize("vocab_size", [2, 3, 10, 16])
@pytest.mark.parametrize("special", [[], list(range(16))])
def test_a_small_vocabulary_of_special_tokens_alone_can_be_tried(vocab_size: int, special: list[int]) -> None:
    model = build("llama", vocab_size=vocab_size, pad_token_id=0)
    model.config.eos_token_id = special
    assert int(trial_inputs(model)["input_ids"].max()) < vocab_size
    assert why_it_fails(model).reason == ""


def test_logits_that_are_not_finite_are_no_trial_and_a_model_that_was_mended_is_tried_again() -> None:
    model = build("llama")
    weight = model.lm_head.weight.data.clone()
    model.lm_head.weight.data.fill_(float("nan"))
    assert "none of its logits is finite" in why_it_fails(model).reason
    with pytest.raises(UnsupportedModelError, match="none of its logits is finite"):
        require_continuable(model)
    require_continuable(model, if_it_runs=True)
    model.lm_head.weight.data.copy_(weight)
    require_continuable(model)


def test_a_model_is_tried_once(tiny_llama: Any) -> None:
    calls: list[int] = []
    tiny_llama.register_forward_pre_hook(lambda *_: calls.append(1))
    assert why_it_fails(tiny_llama).reason == why_it_fails(tiny_llama).reason == ""
    assert len(calls) == NUM_FORWARDS


@pytest.mark.parametrize("tested", ["5.0.0", transformers.__version__])
def test_every_model_is_tried_on_a_version_of_transformers_that_was_not_tested(
    tested: str, tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "TESTED_VERSION", tested)
    calls: list[int] = []
    tiny_llama.register_forward_pre_hook(lambda *_: calls.append(1))
    PagedPrefixCache(tiny_llama)
    assert len(calls) == (NUM_FORWARDS if tested == "5.0.0" else 0)


def test_a_model_that_computes_one_continued_token_otherwise_is_refused_on_another_version(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As GIT of transformers 5.17, which adds what is cached to positions that count it already."""

    def count_twice(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is not None and kwargs["input_ids"].shape[1] == 1:
            assert kwargs["position_ids"].dtype == torch.int64
            kwargs["position_ids"] = kwargs["position_ids"] + cache.get_seq_length()
        return args, kwargs

    tiny_llama.register_forward_pre_hook(count_twice, with_kwargs=True)
    monkeypatch.setattr(support, "TESTED_VERSION", "5.99.0")
    seen = "by a single one its logits differ by .* no prompt can resume at its last token"
    hint = f"; transformers {re.escape(transformers.__version__)} is installed, and 5.99.0, with which all types"
    with pytest.raises(UnsupportedModelError, match=seen + hint):
        PagedPrefixCache(tiny_llama)
    monkeypatch.setattr(support, "TESTED_VERSION", transformers.__version__)
    with pytest.raises(UnsupportedModelError, match=f"{seen}$"):
        require_continuable(tiny_llama)


@pytest.mark.parametrize(("num_rows", "is_seen"), [(3, False), (5, True)])
def test_of_single_tokens_a_few_may_differ_too(tiny_llama: Any, num_rows: int, is_seen: bool) -> None:
    def differ(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if kwargs["input_ids"].shape == (8, 1):
            output.logits[:num_rows] += output.logits.abs().max()

    tiny_llama.register_forward_hook(differ, with_kwargs=True)
    assert bool(why_it_fails(tiny_llama).reason) == is_seen


def test_what_a_model_keeps_on_the_cache_itself_is_seen(tiny_llama: Any) -> None:
    """As Qwen 4 of transformers 5.17, which keeps positions of all columns there: blocks hold none of it."""

    def keep(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("past_key_values") is not None:
            kwargs["past_key_values"].all_positions = kwargs["position_ids"]

    tiny_llama.register_forward_pre_hook(keep, with_kwargs=True)
    assert why_it_fails(tiny_llama).reason == (
        "it keeps all_positions on the cache, beside the layers, so it is not kept of a prefix"
    )


def test_the_tested_version_is_the_one_whose_results_are_stored() -> None:
    stored = json.loads((Path(__file__).parents[1] / "conformance" / "results.json").read_text(encoding="utf-8"))
    assert stored["versions"]["transformers"] == support.TESTED_VERSION


def test_a_model_that_attends_to_later_tokens_where_nothing_is_padded_is_seen() -> None:
    """As Doge of transformers 5.17: without padding no mask is made, and so none that is causal."""
    model = build("llama")
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(without_causality, with_kwargs=True)
    assert "depend on more than the tokens before them" in why_it_fails(model).reason


def without_causality(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs["attention_mask"] is None:
        length, past = kwargs["hidden_states"].shape[1], kwargs["past_key_values"]
        num_before = 0 if past is None else past.get_seq_length(module.layer_idx)
        kwargs["attention_mask"] = torch.zeros(1, 1, length, num_before + length)
    return args, kwargs


def test_memory_that_runs_out_is_no_property_of_the_model(tiny_llama: Any) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    handle = tiny_llama.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        why_it_fails(tiny_llama)
    handle.remove()
    assert why_it_fails(tiny_llama).reason == ""


def test_the_inputs_are_two_rows_of_plain_tokens_one_of_them_padded(tiny_llama: Any) -> None:
    tiny_llama.config.image_token_id, tiny_llama.config.bos_token_id = 9, 11
    inputs = trial_inputs(tiny_llama)
    assert {tuple(value.shape) for value in inputs.values()} == {(2, NUM_COLUMNS)}
    assert not {9, 11} & set(inputs["input_ids"].flatten().tolist())
    assert int(inputs["input_ids"].max()) < tiny_llama.config.vocab_size
    assert inputs["attention_mask"].sum(1).tolist() == [NUM_COLUMNS, NUM_COLUMNS - 5]
    assert inputs["position_ids"][1].tolist() == [0] * 5 + list(range(NUM_COLUMNS - 5))


def test_a_distance_is_a_share_of_the_references_largest() -> None:
    reference = torch.tensor([1.0, -4.0, float("-inf")])
    assert distance(reference, torch.tensor([1.0, -2.0, float("-inf")])) == 0.5
    assert distance(reference, torch.tensor([float("nan"), -4.0, float("-inf")])) == float("inf")


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.float32, 1e-4, 1e-2), (torch.bfloat16, 0.05, 0.2)])
def test_more_is_allowed_where_numbers_are_rounded_more(
    tiny_llama: Any, dtype: torch.dtype, least: float, most: float
) -> None:
    for model, context in (
        (copy.deepcopy(tiny_llama).to(dtype), nullcontext()),
        (tiny_llama, torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)),
    ):
        with types_of_logits(model) as seen, context, torch.no_grad():
            model(torch.ones((1, 4), dtype=torch.int64))
        assert least < tolerance(model, seen) < most


HELD_STATES = ("lfm2", "bamba", "qwen3_next", "mamba2", "minimax")


@FROM_5_23
@pytest.mark.parametrize("name", HELD_STATES)
def test_a_state_that_is_continued_by_any_number_of_tokens_has_nothing_to_heed(name: str) -> None:
    model = zoo.build(name)
    assert why_it_fails(model).reason == ""
    assert state_traits(model) == StateTraits()


def test_a_model_without_states_has_no_traits_and_runs_nothing(tiny_llama: Any) -> None:
    tiny_llama.register_forward_pre_hook(lambda *_: pytest.fail("a forward"))
    assert state_traits(tiny_llama) is None


@FROM_5_23
def test_a_scan_that_forgets_is_seen_where_its_state_does_not_show_in_logits() -> None:
    model = drawn_as_new("zamba", 0)
    inputs = trial_inputs(model)
    with torch.no_grad():
        whole = last_logits(model(**inputs, use_cache=False), NUM_COLUMNS - NUM_CACHED)
        continued = continue_behind(model, inputs, dynamic_cache(model))
    assert distance(whole, continued) < 1e-6
    with pytest.raises(UnsupportedModelError, match="scan of several tokens starts without the state"):
        PagedPrefixCache(model)


def drawn_as_new(name: str, seed: int) -> Any:
    """A model as transformers draws a new one: its layers add little."""
    model_class, config = zoo.configuration(name)
    torch.manual_seed(seed)
    return model_class(config).eval()


@FROM_5_23
# of all but the first, neither logits nor the last state show it
@pytest.mark.parametrize("seed", [0, 17, 25, 26, 28, 36])
def test_a_scan_that_forgets_is_seen_whatever_its_weights(seed: int) -> None:
    assert "scan of several tokens starts without the state" in why_it_fails(drawn_as_new("jamba", seed)).reason


@FROM_5_23
def test_a_convolution_that_forgets_its_inputs_is_seen() -> None:
    model = zoo.build("lfm2")

    def forget(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].shape[1] == 2:
            for layer in kwargs["past_key_values"].layers:
                for state in getattr(layer, "conv_states", {}).values():
                    state.zero_()

    model.register_forward_pre_hook(forget, with_kwargs=True)
    assert "its convolution of several tokens starts without the inputs before them" in why_it_fails(model).reason


@FROM_5_23
def test_a_state_that_makes_a_model_raise_is_read() -> None:
    model = zoo.build("lfm2")

    def raise_at_nan(_: Any, args: Any, output: Any) -> None:
        if output.logits.isnan().any():
            raise ValueError("no number")

    model.register_forward_hook(raise_at_nan)
    assert why_it_fails(model).reason == ""


@FROM_5_23
@pytest.mark.parametrize("seed", [0, 4, 5, 6, 7, 9, 13, 16])
def test_an_indexer_whose_scores_are_equal_is_no_reason_to_refuse(seed: int) -> None:
    """With two heads a fourth of the scores is exactly 0, and torch takes any of those."""
    model_class, config = zoo.configuration("axk2")
    config.index_n_heads = 2
    assert why_it_fails(zoo.instantiate(model_class, config, seed)).reason == ""


@FROM_5_23
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_is_a_tenth_off_is_seen_where_logits_hardly_show_it(dtype: torch.dtype) -> None:
    model_class, config = zoo.configuration("bamba")
    model = model_class(config).eval().to(dtype)
    assert why_it_fails(copy.deepcopy(model)).reason == ""

    def disturb(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        if kwargs["input_ids"].shape[1] == NUM_COLUMNS - NUM_CACHED and kwargs.get("past_key_values") is not None:
            for layer in kwargs["past_key_values"].layers:
                for state in getattr(layer, "recurrent_states", {}).values():
                    state.mul_(1.1)

    model.register_forward_hook(disturb, with_kwargs=True)
    assert "the state before" in why_it_fails(model).reason


@FROM_5_23
@pytest.mark.parametrize(
    ("num_columns", "said"),
    [
        (NUM_COLUMNS, "it cannot be continued after a cache"),
        (1, "it cannot be run a token at a time, or after padding"),
    ],
)
def test_an_error_where_states_are_looked_at_is_a_reason_and_no_traceback(num_columns: int, said: str) -> None:
    model = zoo.build("lfm2")

    def fail(_: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[1] == num_columns and kwargs.get("past_key_values") is not None:
            raise RuntimeError("of the model's own")

    model.register_forward_pre_hook(fail, with_kwargs=True)
    report = check_model(model)
    assert not report.is_supported
    assert report.reason.startswith(f"{said} (RuntimeError: of the model's own)")
    with pytest.raises(UnsupportedModelError, match=said):
        PagedPrefixCache(model)


@FROM_5_23
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_that_no_forward_leaves_in_the_cache_is_seen_whatever_its_weight(dtype: torch.dtype) -> None:
    model_class, config = zoo.configuration("recurrent_gemma")
    assert (
        "keep their state in modules and not in the cache" in why_it_fails(model_class(config).eval().to(dtype)).reason
    )


@FROM_5_23
def test_a_state_that_is_kept_in_modules_is_said_to_be() -> None:
    assert "keep their state in modules and not in the cache" in why_it_fails(zoo.build("recurrent_gemma")).reason


@FROM_5_23
@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
def test_a_time_step_that_is_clamped_for_several_tokens_alone_is_seen(name: str) -> None:
    model_class, config = zoo.configuration(name)
    config.time_step_min = 0.5
    model = zoo.instantiate(model_class, config, 0)
    assert why_it_fails(model).reason == ""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = [*module.time_step_limit, "of another form"]  # nothing is read of it
            module.forward = partial(_forward_with_limit, type(module).forward.__get__(module), module)
    assert state_traits(model) == StateTraits(clamps_one_token=True)


def _forward_with_limit(forward: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    whole = module.time_step_limit
    module.time_step_limit = tuple(whole[:2])
    try:
        return forward(*args, **kwargs)
    finally:
        module.time_step_limit = whole


@FROM_5_23
@pytest.mark.parametrize(
    ("name", "setting"), [("lfm2", "conv_bias"), ("bamba", "mamba_proj_bias"), ("mamba2", "use_bias")]
)
def test_padding_that_shows_through_a_bias_is_the_same_from_where_the_modules_say(name: str, setting: str) -> None:
    model_class, config = zoo.configuration(name)
    setattr(config, setting, True)
    model = zoo.instantiate(model_class, config, 0)
    zoo.draw_biases(model)
    num_shown = read_state_traits(model.modules()).num_pads_that_show
    assert num_shown
    assert state_traits(model) == StateTraits()
    row = {key: value[:1] for key, value in trial_inputs(model).items()}
    with torch.no_grad():
        logits = [
            model(**behind_padding(row, num_pads)).logits[:, -NUM_COLUMNS:]
            for num_pads in (0, num_shown - 1, num_shown, num_shown + 8)
        ]
    assert distance(logits[2], logits[3]) < 1e-5
    assert min(distance(logits[2], logits[0]), distance(logits[2], logits[1])) > 1e-3


@FROM_5_23
def test_padding_that_shows_without_an_end_is_seen() -> None:
    model = zoo.build("bamba")
    for layer in model.model.layers:
        if hasattr(layer, "mamba"):
            layer.mamba.register_forward_pre_hook(_without_mask, with_kwargs=True)
    assert state_traits(model) == StateTraits(num_pads_that_show=EVERY_PAD)


def _without_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return args, kwargs | {"attention_mask": None}


@FROM_5_23
def test_states_are_tried_once() -> None:
    model, calls = zoo.build("lfm2"), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    assert state_traits(model) == state_traits(model)
    assert len(calls) == 4 + NUM_COLUMNS - NUM_CACHED  # whole, filled, after less and more padding; one by one


# Which positions a model gives when it is passed none.

NUMBERINGS = {
    **dict.fromkeys(("llama", "gpt2", "lfm2", "bert@decoder"), "columns"),
    **dict.fromkeys(("opt",), "tokens"),
    "bamba": None,  # starts at 0 again after a cache
    "roberta@decoder": None,  # counts from the id of padding
}


@pytest.mark.parametrize("name", NUMBERINGS)
def test_models_are_known_by_their_code_or_by_what_they_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zoo.build(name)
    before = model.training
    assert default_numbering(model) == NUMBERINGS[name]
    monkeypatch.setattr(trial, "_says_so", lambda kind: False)  # and by what they do alone
    assert default_numbering(model) == NUMBERINGS[name]
    assert model.training == before


@pytest.mark.parametrize("name", NUMBERINGS)
@pytest.mark.parametrize("num_first", [12, 40])
@pytest.mark.parametrize("pad", [0, 3])
def test_a_prefill_without_positions_changes_no_later_call(name: str, num_first: int, pad: int) -> None:
    model, generator = zoo.build(name), torch.Generator().manual_seed(5)
    prompt = torch.randint(5, 100, (1, 40), generator=generator)
    other = torch.cat([prompt[:, :34], torch.randint(5, 100, (1, 60), generator=generator)], 1)
    cache = PagedPrefixCache(model, block_size=8, num_blocks=100)
    padded, mask = pad_with_zeros(prompt, (pad, 0)), pad_with_zeros(torch.ones_like(prompt), (pad, 0))
    with torch.no_grad():
        for start in range(0, 40 + pad, num_first):
            stop = min(start + num_first, 40 + pad)
            arguments = {"attention_mask": mask[:, :stop]} if pad else {}
            model(padded[:, start:stop], past_key_values=cache, use_cache=True, **arguments)
    cache.reset()
    assert_same(run(model, input_ids=other), run(model, cache, input_ids=other))
    (row,) = cache.last_call.rows
    if name != "lfm2" or num_first == 12:  # where a forward has ended, a state is known
        is_shared = NUMBERINGS[name] == "tokens" or (NUMBERINGS[name] and not pad)
        assert row.matched_tokens >= 8 if is_shared else row.matched_tokens == 0
    cache.check()
