"""`check_model`: what it reports, and that the model is afterwards what it was."""

from typing import Any

import pytest
import torch

from hf_paged_cache import CacheArgumentError, PagedPrefixCache, check_model

from ..conformance import zoo
from ..internals import read_zeros
from ..reference import FROM_5_23
from ..tiny_models import build


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
