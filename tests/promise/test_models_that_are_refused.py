"""Which models are refused when a cache is built on them, or by `check_model`, and that each is told why in a sentence.

What the structure leaves open a trial decides: a forward against the same one continued after cached columns.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import pad as pad_with_zeros
from transformers import LlamaModel

from hf_paged_cache import CacheArgumentError, PagedPrefixCache, UnsupportedModelError, check_model
from hf_paged_cache.model import support

from ..conformance import image_zoo, zoo
from ..internals import read_zeros
from ..reference import FROM_5_23, assert_same, run
from ..tiny_models import build

Model = Any


def why_refused(model: Model) -> str:
    """What whoever builds a cache is told; `check_model` says the same."""
    with pytest.raises(UnsupportedModelError) as caught:
        PagedPrefixCache(model)
    assert "generate" not in vars(model)  # nothing was attached
    report = check_model(model)
    assert not report.is_supported
    assert report.reason in str(caught.value)
    return str(caught.value)


@FROM_5_23
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("jamba", "its scan of several tokens starts without the state before them"),
        ("recurrent_gemma", "keep their state in modules and not in the cache"),
        ("deepseek_v4", "layer 0 is a DeepseekV4HCACache, which carries more than keys, values and states"),
        ("moshi@window", "has layers with a sliding window in its cache, but a mask that knows none"),
        ("blt", "transformers cannot make a DynamicCache of its config (AttributeError: "),
        ("git", "differ in a row with padding by"),
        ("doge@moe", "depend on more than the tokens before them"),
        ("gemma3_text@bidirectional", "depend on more than the tokens before them"),
        ("rembert", "(config.is_decoder is False; load it with is_decoder=True if it is to generate)"),
        ("cpmant", "after 16 tokens its cache holds 24"),
        ("prophetnet", "it cannot be continued after a cache (AssertionError: "),
    ],
)
def test_a_type_of_transformers_is_refused_with_the_reason(name: str, reason: str) -> None:
    assert reason in why_refused(zoo.build(name))


@FROM_5_23
def test_an_index_that_takes_its_sizes_from_the_cache_in_the_middle_of_a_forward_is_refused_by_name() -> None:
    said = why_refused(image_zoo.build("glm5_next"))
    assert "Glm5NextTextIndexer looks at what its layer of the cache holds in the middle of a forward" in said


def test_a_model_without_a_head_is_refused(tiny_llama: Model) -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaModel cannot generate; pass the model with a language-model"):
        PagedPrefixCache(LlamaModel(tiny_llama.config))


def on_call(model: Model, act: Callable[[dict[str, Any], Any], Any]) -> Model:
    """Before each forward that is given a cache, do that with its arguments and the cache."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("past_key_values") is not None:
            act(kwargs, kwargs["past_key_values"])
        return args, kwargs

    model.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def forget_padding(kwargs: dict[str, Any], cache: Any) -> None:
    if cache.get_seq_length():
        kwargs["attention_mask"] = torch.ones_like(kwargs["attention_mask"])


def repeat_tokens(kwargs: dict[str, Any], cache: Any) -> None:
    for name in ("input_ids", "attention_mask", "position_ids"):
        kwargs[name] = torch.cat((kwargs[name][:, :1], kwargs[name]), dim=1)


def fail(kwargs: dict[str, Any], cache: Any) -> None:
    raise RuntimeError("no cache today: " + "known, " * 100 + "\nand a hint")


def keep_positions(kwargs: dict[str, Any], cache: Any) -> None:
    """As Qwen 4 of transformers 5.17, which keeps positions of all columns there: blocks hold none of it."""
    cache.all_positions = kwargs["position_ids"]


def count_twice(kwargs: dict[str, Any], cache: Any) -> None:
    """As GIT of transformers 5.17, which adds what is cached to positions that count it already."""
    if kwargs["input_ids"].shape[1] == 1:
        kwargs["position_ids"] = kwargs["position_ids"] + cache.get_seq_length()


@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (forget_padding, "differ in a row with padding by"),
        (repeat_tokens, "after 16 tokens its cache holds 17"),
        (fail, r"it cannot be continued after a cache \(RuntimeError: no cache today: (known, )+.{,7}\.\.\.\)"),
        (keep_positions, "it keeps all_positions on the cache, beside the layers, so it is not kept of a prefix"),
        (count_twice, "after 20 cached tokens its logits differ by .*: it computes one token otherwise than several"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_what_goes_wrong_after_a_cache_is_a_reason(act: Any, reason: str, tiny_llama: Model) -> None:
    report = check_model(on_call(tiny_llama, act))
    assert not report.is_supported
    assert re.search(reason, report.reason)


def without_causality(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As Doge of transformers 5.17: without padding no mask is made, and so none that is causal."""
    if kwargs["attention_mask"] is None:
        length, past = kwargs["hidden_states"].shape[1], kwargs["past_key_values"]
        num_before = 0 if past is None else past.get_seq_length(module.layer_idx)
        kwargs["attention_mask"] = torch.zeros(1, 1, length, num_before + length)
    return args, kwargs


def test_attention_to_later_tokens_where_nothing_is_padded_is_seen(tiny_llama: Model) -> None:
    for layer in tiny_llama.model.layers:
        layer.self_attn.register_forward_pre_hook(without_causality, with_kwargs=True)
    assert "depend on more than the tokens before them" in check_model(tiny_llama).reason


@pytest.mark.parametrize(("num_columns", "is_seen"), [(3, False), (5, True)])
def test_a_few_columns_may_differ_as_where_rounding_sends_a_token_to_another_expert(
    num_columns: int, is_seen: bool
) -> None:
    model = build("mixtral")

    def differ(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        cache = kwargs.get("past_key_values")
        if cache is not None and output.logits.shape[1] > 5:
            output.logits[:, :num_columns] += output.logits.abs().max()

    handle = model.register_forward_hook(differ, with_kwargs=True)
    if is_seen:
        assert "differ" in why_refused(model)
    else:
        PagedPrefixCache(model)
    handle.remove()


def test_on_a_version_that_was_not_tested_every_model_is_tried_and_the_version_is_named(
    tiny_llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    PagedPrefixCache(tiny_llama).detach()
    monkeypatch.setattr(support, "TESTED_VERSION", "5.99.0")
    said = why_refused(on_call(tiny_llama, count_twice))
    assert f"transformers {transformers.__version__} is installed, and 5.99.0, with which all types" in said


def test_the_tested_version_is_the_one_whose_results_are_stored() -> None:
    stored = json.loads((Path(__file__).parents[1] / "conformance" / "results.json").read_text(encoding="utf-8"))
    assert stored["versions"]["transformers"] == support.TESTED_VERSION


@pytest.mark.parametrize("vocab_size", [2, 16])
def test_a_small_vocabulary_of_special_tokens_alone_can_be_tried(vocab_size: int) -> None:
    model = build("llama", vocab_size=vocab_size, pad_token_id=0)
    model.config.eos_token_id = list(range(16))
    assert check_model(model).reason == ""


def test_a_model_whose_logits_are_not_finite_is_refused_until_it_is_mended() -> None:
    model = build("bloom")
    weight = model.lm_head.weight.data.clone()
    model.lm_head.weight.data.fill_(float("nan"))
    assert "none of its logits is finite" in why_refused(model)
    model.lm_head.weight.data.copy_(weight)
    PagedPrefixCache(model)


def test_memory_that_runs_out_is_no_property_of_the_model() -> None:
    model = build("bloom")

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    handle = model.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        PagedPrefixCache(model)
    handle.remove()
    PagedPrefixCache(model)


@FROM_5_23
@pytest.mark.parametrize("seed", [0, 17])  # of the second one, neither logits nor the last state show it
def test_a_scan_that_forgets_is_seen_whatever_its_weights(seed: int) -> None:
    model_class, config = zoo.configuration("jamba")
    torch.manual_seed(seed)
    assert "scan of several tokens starts without the state" in why_refused(model_class(config).eval())


def forget_inputs(kwargs: dict[str, Any], cache: Any) -> None:
    if kwargs["input_ids"].shape[1] == 2:
        for layer in cache.layers:
            for state in getattr(layer, "conv_states", {}).values():
                state.zero_()


def raise_one_by_one(kwargs: dict[str, Any], cache: Any) -> None:
    if kwargs["input_ids"].shape[1] == 1:
        raise RuntimeError("of the model's own")


@FROM_5_23
@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (forget_inputs, "its convolution of several tokens starts without the inputs before them"),
        (raise_one_by_one, "it cannot be continued after a cache (RuntimeError: of the model's own)"),
    ],
)
def test_what_goes_wrong_with_states_is_a_reason(act: Any, reason: str) -> None:
    assert reason in why_refused(on_call(zoo.build("lfm2"), act))


# Models that are passed no positions number columns, or otherwise; then nothing is shared with calls that pass them.

NUMBERS = {
    **dict.fromkeys(("llama", "gpt2", "lfm2"), "columns"),
    "opt": None,  # numbers tokens, which its code does not say
    "bamba": None,  # starts at 0 again after a cache
    "roberta@decoder": None,  # counts from the id of padding
}


@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_prefill_without_positions_changes_no_later_call(name: str, pad: int) -> None:
    model, generator = zoo.build(name), torch.Generator().manual_seed(5)
    prompt = torch.randint(5, 100, (1, 40), generator=generator)
    other = torch.cat([prompt[:, :34], torch.randint(5, 100, (1, 60), generator=generator)], 1)
    cache = PagedPrefixCache(model, block_size=8, num_blocks=100)
    padded, mask = pad_with_zeros(prompt, (pad, 0)), pad_with_zeros(torch.ones_like(prompt), (pad, 0))
    with torch.no_grad():
        for start in range(0, 40 + pad, 12):
            stop = min(start + 12, 40 + pad)
            arguments = {"attention_mask": mask[:, :stop]} if pad else {}
            model(padded[:, start:stop], past_key_values=cache, use_cache=True, **arguments)
    cache.reset()
    assert_same(run(model, input_ids=other), run(model, cache, input_ids=other))
    (row,) = cache.last_call.rows
    is_shared = NUMBERS[name] and not pad
    assert row.matched_tokens >= 8 if is_shared else row.matched_tokens == 0
    cache.check()


@pytest.mark.parametrize("name", ["llama", "gemma3", "opt", "bert_decoder"])
def test_a_model_that_is_held_is_reported_with_what_was_measured(name: str) -> None:
    report = check_model(build(name))
    assert report.is_supported, report
    assert report.reason == ""
    assert report.distance is not None
    assert report.own_distance is not None
    assert max(report.distance, report.own_distance) < 1e-4
    assert report.reused_tokens == 23
    assert report.prompt_tokens == 24
    assert sum(report.layers.values()) == build(name).config.num_hidden_layers


@FROM_5_23
@pytest.mark.parametrize(
    ("name", "reused", "multiple"),
    [
        ("bamba", 16, "the block size"),
        ("mamba2", 16, "the block size"),
        ("qwen3_next", 0, "64 tokens and of the block size"),
    ],
)
def test_a_model_whose_layers_carry_states_is_held_and_told_where_they_are_kept(
    name: str, reused: int, multiple: str
) -> None:
    report = check_model(zoo.build(name))
    assert report.is_supported, report
    assert max(report.distance, report.own_distance) < 1e-4
    assert report.reused_tokens == reused
    assert report.remarks[-1].endswith(f"up to where one was kept, at a multiple of {multiple}")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("bert", "attends in both directions"),
        ("mamba", "its scan of several tokens starts without the state before them"),
        ("t5", "is an encoder-decoder model"),
        (torch.nn.Linear(1, 1), "expected a transformers model"),
    ],
)
def test_what_is_refused_is_reported_with_the_reason(given: Any, reason: str) -> None:
    report = check_model(build(given) if isinstance(given, str) else given)
    assert not report.is_supported
    assert reason in report.reason
    assert report.distance is None


@pytest.mark.parametrize(("given", "why"), [(None, "an object of type NoneType"), ("a name", "load it first")])
def test_what_is_no_model_at_all_is_an_error(given: Any, why: str) -> None:
    with pytest.raises(CacheArgumentError, match=f"expected a transformers model.*{why}"):
        check_model(given)


def test_a_cache_of_ours_that_serves_something_else_is_a_reason(
    tiny_llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_zeros(monkeypatch)
    report = check_model(tiny_llama)
    assert not report.is_supported
    assert "with our cache its logits differ by" in report.reason


@pytest.mark.parametrize("is_attached", [True, False])
def test_the_model_is_afterwards_what_it_was(is_attached: bool) -> None:
    model = build("llama")
    cache = PagedPrefixCache(model) if is_attached else None
    model.train()
    before = (set(model.__dict__), len(model._forward_hooks), len(model._forward_pre_hooks))
    assert check_model(model).is_supported
    assert (set(model.__dict__), len(model._forward_hooks), len(model._forward_pre_hooks)) == before
    assert model.training
    assert cache is None or cache.get_seq_length() == 0


def test_a_report_reads_as_a_few_lines() -> None:
    lines = str(check_model(build("bloom"))).splitlines()
    assert lines[0] == "BloomForCausalLM is supported"
    assert lines[1] == "cache layers: 2 DynamicLayer"
    assert lines[2].startswith("distance from one forward without a cache: ")
    assert lines[3] == "reused 23 of 24 tokens of a prompt that was known"
    assert lines[4].startswith("a token takes ")
    assert lines[5] == "its steps cannot run as CUDA graphs: the model takes no position_ids"
    assert lines[6].startswith("it takes no position_ids")
    llama = str(check_model(build("llama"))).splitlines()
    assert llama[5:] == ["on a CUDA device its steps can run as graphs (capture='auto')"]
    refused = str(check_model(build("mamba")))
    assert refused.startswith("MambaForCausalLM is not supported: its scan of several tokens starts without")
