"""Models of a program: each gets a store with its first `generate`, each call a cache of its own, and nothing else differs."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.programs.program import Program

from ..reference import IDS, AtStep, assert_same, batch, row, run
from ..tiny_models import build

pytestmark = pytest.mark.usefixtures("one_thread")

NEXT = [torch.tensor([row((1, 50), (seed, 9))]) for seed in range(2, 6)]


def counts(program: Program) -> list[dict[str, Any]]:
    return [each.as_dict() for each in program._models]


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"input_ids": IDS},
    "samples": {"input_ids": IDS, "do_sample": True, "num_return_sequences": 3},
    "beams": {"input_ids": IDS, "num_beams": 3},
    "a padded batch": batch(row((1, 50), (2, 9)), row((1, 50)), row((3, 20))),
    "prompt lookup": {"input_ids": IDS, "prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_gives_what_it_gives_without(program: Program, call: str) -> None:
    model = build("llama")
    plain = run(model, **CALLS[call], past_key_values=DynamicCache(config=model.config))
    for _ in range(2):  # an empty store, and a used one
        assert_same(plain, run(model, **CALLS[call]))
    found = counts(program)[0]
    assert found["num_calls"] == 2
    assert found["reused_tokens"] > 0
    assert found["calls_without_cache"] == {"it brought a DynamicCache": 1}


def test_what_is_returned_as_cache_is_the_call_s_own(program: Program) -> None:
    model = build("llama")
    first, second = run(model, input_ids=IDS), run(model, input_ids=NEXT[0])
    assert first.past_key_values is not second.past_key_values
    assert first.past_key_values.get_seq_length() == first.sequences.shape[1] - 1
    both = {"input_ids": torch.cat([first.sequences, NEXT[0][:, -3:]], dim=1)}
    again = run(model, **both, past_key_values=first.past_key_values)
    assert_same(run(model, **both, past_key_values=DynamicCache(config=model.config)), again)


def test_calls_that_ask_for_another_cache_run_as_ever_and_are_counted(program: Program) -> None:
    model = build("llama")
    for how in ({"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}):
        run(model, input_ids=IDS, **how)
    found = counts(program)[0]
    assert found["num_calls"] == 0
    assert found["calls_without_cache"] == {"use_cache is False": 1, "cache_implementation is 'static'": 1}
    with PagedPrefixCache(model) as cache:  # a block of the program's own comes first
        run(model, input_ids=IDS)
    assert cache.stats().num_calls == 1
    assert counts(program)[0]["num_calls"] == 0


@pytest.mark.parametrize("kind", ["mamba", "t5"])
def test_a_model_that_is_refused_runs_as_ever_and_is_named_once(
    program: Program, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    program._options = program._options._replace(is_quiet=False)
    model = build(kind)
    for _ in range(2):
        assert run(model, input_ids=IDS, max_new_tokens=2, decoder_start_token_id=0).sequences.shape[0] == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("runs without a cache") == 1
    assert counts(program)[0]["calls_without_cache"] == {"the model was refused": 2}


def test_a_generate_that_was_looked_up_before_and_the_class_s_own_get_caches_too(program: Program) -> None:
    model = build("llama")
    early = model.generate
    plain = run(model, input_ids=IDS, past_key_values=DynamicCache(config=model.config)).sequences
    mask = torch.ones_like(IDS)
    for generate in (early, early, lambda **given: type(model).generate(model, **given)):
        assert generate(input_ids=IDS, attention_mask=mask, max_new_tokens=6, do_sample=False).equal(plain)
    found = counts(program)[0]
    assert (found["num_calls"], found["reused_tokens"]) == (3, 2 * 48)  # a cache of its own finds whole blocks


def test_a_generate_inside_of_one_and_calls_of_several_threads_at_once(program: Program) -> None:
    model = build("llama")
    inner: list[Any] = []
    plain = [run(model, input_ids=ids, past_key_values=DynamicCache(config=model.config)) for ids in (IDS, *NEXT)]
    outer = run(model, input_ids=IDS, logits_processor=[AtStep(2, lambda: inner.append(run(model, input_ids=NEXT[0])))])
    assert_same(plain[0], outer)
    assert_same(plain[1], inner[0])
    with ThreadPoolExecutor(4) as pool:
        for wanted, got in zip(plain[1:], pool.map(lambda ids: run(model, input_ids=ids), NEXT), strict=True):
            assert_same(wanted, got)


def test_a_model_goes_with_its_store_and_copies_get_stores_of_their_own(program: Program) -> None:
    model = build("llama")
    plain = run(model, input_ids=IDS)
    copies: list[PreTrainedModel] = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for each in copies:
        assert_same(plain, run(each, input_ids=IDS))
    assert [found["reused_tokens"] for found in counts(program)] == [0, 0, 0]
    gone = weakref.ref(model)
    del model, plain
    gc.collect()
    assert gone() is None
    assert [found["num_calls"] for found in counts(program)] == [1, 1, 1]  # counts stay


def test_the_store_for_a_model_is_the_one_of_its_calls(program: Program) -> None:
    model = build("llama")
    run(model, input_ids=IDS)
    cache = program.cache_of(model)
    assert cache is not None
    assert cache.lookup(IDS).num_tokens == 48
    assert program.cache_of(build("mamba")) is None


class _Steered(torch.nn.Module):
    """Round a layer, as some libraries put one: adds a vector that it holds."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.vector: torch.Tensor | float = 0.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(*args, **kwargs) + self.vector


def test_a_layer_put_round_another_may_hold_anything_so_its_calls_run_as_ever(program: Program) -> None:
    model = build("llama")
    layer = model.model.layers[0] = _Steered(model.model.layers[0])
    layer.attention_type = "full_attention"
    for vector in (0.0, torch.linspace(-3, 3, 64), torch.linspace(3, -3, 64)):
        layer.vector = vector
        plain = run(model, input_ids=IDS, past_key_values=DynamicCache(config=model.config))
        assert_same(plain, run(model, input_ids=IDS))
    found = counts(program)[0]
    assert found["num_calls"] == 0
    assert found["calls_without_cache"][f"a _Steered ({__name__}) is round a layer"] == 3


def test_hooks_see_what_they_see_without_and_reuse_goes_on_when_they_are_off(program: Program) -> None:
    model = build("llama")
    seen: list[torch.Tensor] = []
    factor = [1.0]

    def steer(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        seen.append(output)
        return output * factor[0]

    run(model, input_ids=IDS)
    layer = model.model.layers[0]
    handle = layer.register_forward_hook(steer)
    for factor[0] in (1.0, -2.0):
        plain = run(model, input_ids=IDS, past_key_values=DynamicCache(config=model.config))
        of_plain = [*seen]
        seen.clear()
        assert_same(plain, run(model, input_ids=IDS))
        assert [each.shape for each in seen] == [each.shape for each in of_plain]
        seen.clear()
    handle.remove()
    plainly = layer.forward
    layer.forward = lambda *args, **kwargs: plainly(*args, **kwargs) * factor[0]
    plain = run(model, input_ids=IDS, past_key_values=DynamicCache(config=model.config))
    assert_same(plain, run(model, input_ids=IDS))
    del layer.forward
    run(model, input_ids=IDS)
    found = counts(program)[0]
    assert found["num_calls"] == 2
    assert found["reused_tokens"] > 0
    without = {why: number for why, number in found["calls_without_cache"].items() if "DynamicCache" not in why}
    assert [*without.values()] == [2, 1]
    assert (
        next(iter(without)) == f"{steer.__qualname__} ({__name__}) hooks or replaces the forward of a LlamaDecoderLayer"
    )


@pytest.mark.parametrize("package", ["accelerate.utils", "deepspeed.runtime", "optimum.quanto", "trl.trainer.utils"])
def test_what_libraries_put_on_a_model_that_treats_all_tokens_alike_is_reused_with(
    program: Program, package: str
) -> None:
    model = build("llama")
    layer = model.model.layers[0]
    of_library: dict[str, Any] = {"__name__": package, "plainly": layer.forward}
    exec("def forward(*args, **kwargs): return plainly(*args, **kwargs) * 2", of_library)
    layer.forward = of_library["forward"]
    plain = run(model, input_ids=IDS, past_key_values=DynamicCache(config=model.config))
    for _ in range(2):
        assert_same(plain, run(model, input_ids=IDS))
    assert counts(program)[0]["reused_tokens"] > 0


class _LearnedPrompt:
    """What PEFT's prompt learning leaves on a model: who prepares its inputs."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.active_adapter, self.active_peft_config = "soft", SimpleNamespace(is_prompt_learning=True)
        self._prepare = model.prepare_inputs_for_generation

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        return self._prepare(*args, **kwargs)


def test_calls_that_their_caches_refuse_are_counted_once_with_the_reason(program: Program) -> None:
    model = build("llama")
    model.prepare_inputs_for_generation = _LearnedPrompt(model).prepare
    plain = run(model, input_ids=IDS, past_key_values=DynamicCache(config=model.config))
    for _ in range(3):
        assert_same(plain, run(model, input_ids=IDS))
    without = counts(program)[0]["calls_without_cache"]
    assert [number for why, number in without.items() if "adapter 'soft' is prompt learning" in why] == [3]
