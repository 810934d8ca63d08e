"""The plugin for other suites, on a small suite of its own: what it replaces, what it finds, and what it expects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput

from hf_paged_cache import CacheArgumentError
from hf_paged_cache.rows.layers import RowsLayer

from ..internals import zero_blocks

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))  # as PYTHONPATH does where the plugin is used
import paged_generate  # noqa: E402
from paged_generate import comparison, modes  # noqa: E402
from paged_generate.expected import EXPECTED, Expected  # noqa: E402

sys.path.remove(str(FOLDER))

pytestmark = pytest.mark.usefixtures("one_thread")
ALL_MODES = pytest.mark.parametrize("mode", modes.MODES)

SUITE = """
import unittest
import pytest, torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
IDS = torch.arange(1, 25).view(2, 12)
GREEDY = dict(max_new_tokens=5, do_sample=False)

@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return LlamaForCausalLM(config).eval()

def test_tokens(model):
    wanted = model.generate(IDS, **GREEDY, use_cache=False)
    for _ in range(2):
        assert model.generate(IDS, **GREEDY).equal(wanted)

def test_class_of_the_cache(model):
    output = model.generate(IDS, **GREEDY, return_dict_in_generate=True)
    assert output.past_key_values.is_paged_prefix_cache and output.get("logits") is None

def test_going_on(model):
    first = model.generate(IDS, **GREEDY, return_dict_in_generate=True)
    more = model.generate(first.sequences, **GREEDY, past_key_values=first.past_key_values)
    assert more.equal(model.generate(IDS, max_new_tokens=10, do_sample=False, use_cache=False))

def test_all_outputs_and_beams_and_samples(model):
    flags = dict(output_attentions=True, output_hidden_states=True, output_scores=True, return_dict_in_generate=True)
    model.generate(IDS, max_new_tokens=4, do_sample=True, **flags)
    model.generate(IDS, max_new_tokens=4, num_beams=3, do_sample=False, **flags)

def test_as_ever(model):
    model.generate(IDS, **GREEDY, past_key_values=DynamicCache())
    model.generate(IDS, **GREEDY, cache_implementation="static")
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
                                             decoder_start_token_id=0))
    t5.generate(IDS, max_new_tokens=2)

def test_refused_call(model):
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.generate(IDS, max_new_tokens=-1)

class InAClass(unittest.TestCase):
    def test_in_a_class(self):
        test_tokens(LlamaForCausalLM(LlamaConfig(**SIZES, pad_token_id=0)).eval())
"""
FAILING = """
import pytest

class TestFailing:
    @pytest.fixture
    def given(self):
        return [1]

    def test_fails_by_itself(self, given, model):
        model.generate(IDS, **GREEDY)
        given.append(2)
        assert given == []

    def test_fails_without_a_call(self):
        assert False

    def test_asks_for_another_cache(self, model):
        output = model.generate(IDS, **GREEDY, return_dict_in_generate=True)
        assert isinstance(output.past_key_values, DynamicCache)
"""


class Recorder:
    """What became of each test, and the plugin that ran it."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.plugin: paged_generate.Plugin | None = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[name] = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
            self.texts[name] = str(report.longrepr)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.plugin = session.config.pluginmanager.get_plugin("paged_generate_plugin")

    @property
    def runner(self) -> modes.Mode:
        assert self.plugin is not None
        return self.plugin.runner


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def play(text: str, *arguments: str) -> Recorder:
        path = tmp_path / f"test_of_{tmp_path.name}.py"  # a name of its own, for modules are kept by name
        path.write_text(text)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        monkeypatch.chdir(tmp_path)
        recorder = Recorder()
        pytest.main(
            ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", *arguments, str(path)],
            [paged_generate, recorder],
        )
        return recorder

    return play


@ALL_MODES
def test_calls_run_on_a_paged_cache_where_they_may(mode: str, play: Any) -> None:
    before = GenerationMixin.generate
    played = play(SUITE, f"--paged-mode={mode}")
    assert set(played.outcomes.values()) == {"passed"}, played.texts
    assert len(played.outcomes) == 7
    refused = played.runner.refused
    assert refused.pop("use_cache is False") == 3
    assert refused.pop("it asks for a cache_implementation") == 1
    assert refused.pop("it brings a cache") == (1 if mode == "beside" else 2)  # beside, what resumes is compared, too
    assert [reason for reason in refused if reason.startswith("not supported: is an encoder-decoder model")] == [
        *refused
    ]
    assert played.runner.num_replaced == (10 if mode == "beside" else 9)
    assert played.runner.num_reused > 0
    assert GenerationMixin.generate is before


def test_without_a_mode_nothing_is_replaced(play: Any) -> None:
    played = play(SUITE)
    assert played.plugin is None
    assert played.outcomes.pop("test_class_of_the_cache") == "failed"
    assert set(played.outcomes.values()) == {"passed"}


def test_keys_and_values_that_are_wrong_are_found_beside_a_dynamic_cache(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = RowsLayer.update

    def wrong(self: Any, key: torch.Tensor, value: torch.Tensor, *more: Any, **named: Any) -> Any:
        return update(self, key, value * 1.01, *more, **named)

    monkeypatch.setattr(RowsLayer, "update", wrong)
    played = play(SUITE, "--paged-mode=beside")
    assert played.outcomes["test_tokens"] == "failed"
    assert "logits[0]: Tensor-likes are not close" in played.texts["test_tokens"]


def test_blocks_that_are_wrong_are_found_when_a_call_is_made_twice(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = modes.Twice._first

    def after_zeros(self: Any, call: Any, cache: Any, everything: Any) -> Any:
        cache.reset()  # else the previous rows are resumed from
        zero_blocks(cache)
        return run(self, call, cache, everything)

    monkeypatch.setattr(modes.Twice, "_second", after_zeros)
    played = play(SUITE, "--paged-mode=twice")
    assert played.outcomes["test_tokens"] == "failed"
    assert "logits[0]" in played.texts["test_tokens"]


@pytest.mark.parametrize("mode", ["kept", "fresh"])
def test_a_test_sees_what_is_wrong_itself(mode: str, play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run_on = modes.Mode._run_on

    def after_zeros(self: Any, call: Any, cache: Any, **more: Any) -> Any:
        cache.reset()  # else the previous rows are resumed from
        zero_blocks(cache)
        return run_on(self, call, cache, **more)

    monkeypatch.setattr(modes.Mode, "_run_on", after_zeros)
    assert play(SUITE, f"--paged-mode={mode}").outcomes["test_tokens"] == "failed"


@ALL_MODES
@pytest.mark.parametrize(
    ("why", "outcome"), [("token 3 at position 0 is the placeholder of an image", "passed"), ("no", "failed")]
)
def test_a_refusal_of_ids_whose_image_is_not_there_is_no_failure_and_any_other_is(
    why: str, outcome: str, mode: str, play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any, call: Any, cache: Any, **more: Any) -> Any:
        raise CacheArgumentError(why)

    monkeypatch.setattr(modes.Mode, "_run_on", refuse)
    played = play(SUITE, f"--paged-mode={mode}")
    assert played.outcomes["test_tokens"] == outcome
    # one that fails without it, too, does not get so far
    assert (played.runner.num_replaced <= 1) == (outcome == "passed")
    assert (played.runner.refused["ids have a placeholder that nothing fills"] > 0) == (outcome == "passed")


@ALL_MODES
def test_what_fails_without_a_paged_cache_is_skipped_and_counted(mode: str, play: Any) -> None:
    played = play(SUITE + FAILING, f"--paged-mode={mode}")
    assert played.plugin is not None
    assert played.plugin.num_failing_without == 2
    assert played.outcomes["test_fails_by_itself"] == played.outcomes["test_fails_without_a_call"] == "skipped"
    assert paged_generate.FAILS_WITHOUT in played.texts["test_fails_by_itself"]
    assert played.outcomes["test_asks_for_another_cache"] == "failed"
    assert played.outcomes["test_in_a_class"] == "passed"


def test_a_failure_that_is_listed_is_expected_and_one_that_passes_is_reported(
    play: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = (
        Expected("*::test_asks_for_another_cache", "it asks for a class"),
        Expected("*.py::test_tokens", "nothing"),
        Expected("*::test_going_on", "in another mode", ("fresh",)),
        Expected("*::test_refused_call", "by chance", by_chance=True),
    )
    monkeypatch.setattr(paged_generate, "EXPECTED", listed)
    played = play(SUITE + FAILING, "--paged-mode=kept")
    assert played.outcomes["test_asks_for_another_cache"] == "xfailed"
    assert played.outcomes["test_tokens"] == "failed"
    assert "[XPASS(strict)] nothing" in played.texts["test_tokens"]
    assert played.outcomes["test_going_on"] == played.outcomes["test_refused_call"] == "passed"


def test_every_failure_that_is_expected_has_a_reason_and_a_mode() -> None:
    assert all(expected.reason and set(expected.modes) <= set(modes.MODES) for expected in EXPECTED)
    assert len({(expected.test, expected.modes) for expected in EXPECTED}) == len(EXPECTED)


def test_the_command_prints_what_was_replaced_and_what_was_not(tmp_path: Path) -> None:
    (tmp_path / "test_fake.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "paged_generate", "--paged-mode=beside", "test_fake.py"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER), str(FOLDER.parents[1])])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("10 calls of generate on a PagedPrefixCache", "3 calls as ever: use_cache is False", "7 passed"):
        assert line in done.stdout


# What counts as the same


def output(tokens: list[list[int]], logits: list[list[list[float]]], **more: Any) -> GenerateDecoderOnlyOutput:
    return GenerateDecoderOnlyOutput(
        sequences=torch.tensor(tokens), logits=tuple(torch.tensor(step) for step in logits), **more
    )


WANTED = output([[1, 2, 3]], [[[0.0, 0.0, 9.0, 1.0]], [[0.0, 0.0, 5.0, 5.00001]]])


@pytest.mark.parametrize(
    ("got", "why"),
    [
        (output([[1, 2, 3]], [[[0.0, 0.0, 9.0, 1.01]], [[0.0, 0.0, 5.0, 5.0]]]), r"logits\[0\]"),
        (output([[1, 3, 3]], [[[0.0, 0.0, 9.0, 1.0]], [[0.0, 0.0, 5.0, 5.0]]]), "tokens are others from step 0 on"),
        (output([[1, 2, 2]], [[[0.0, 0.0, 9.0, 1.0]], [[0.0, 0.0, 5.0, 4.0]]]), r"tokens are others; logits\[1\]"),
        (output([[1, 2, 3]], [[[0.0, 0.0, 9.0, 1.0]]]), "logits: 1 of them, not 2"),
        (output([[1, 2, 3]], [[[0.0] * 4]] * 2, scores=(torch.zeros(1, 4),)), "logits"),
    ],
)
def test_a_result_that_differs_is_refused(got: Any, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        comparison.assert_same(WANTED, got)


def test_rounding_may_decide_between_equal_logits_and_what_comes_behind_is_not_compared() -> None:
    comparison.assert_same(WANTED, output([[1, 2, 2]], [[[0.0, 0.0, 9.0, 1.0]], [[0.0, 0.0, 5.00001, 5.0]]]))
    comparison.assert_same(torch.tensor([1]), torch.tensor([1]))


def test_what_was_asked_for_is_compared() -> None:
    step = [[[0.0, 0.0, 9.0, 1.0]]]
    for name in ("scores", "hidden_states", "attentions"):
        wanted = output([[1, 2]], step, **{name: ((torch.ones(2), torch.tensor([-torch.inf, 1.0])),)})
        comparison.assert_same(
            wanted, output([[1, 2]], step, **{name: ((torch.ones(2), torch.tensor([-torch.inf, 1.0])),)})
        )
        with pytest.raises(AssertionError, match=rf"{name}\[0\]\[1\]"):
            comparison.assert_same(
                wanted, output([[1, 2]], step, **{name: ((torch.ones(2), torch.tensor([-1e9, 1.0])),)})
            )
        with pytest.raises(AssertionError, match=name):
            comparison.assert_same(wanted, output([[1, 2]], step))
