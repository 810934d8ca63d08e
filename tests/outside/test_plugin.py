"""The plugin for other suites, on its own small suite: what it compares, what it finds, and what it leaves alone."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

from hf_paged_cache.rows.layers import RowsLayer

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))  # as PYTHONPATH does where the plugin is used
import paged_generate  # noqa: E402

sys.path.remove(str(FOLDER))

SUITE = """
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

def test_going_on(model):
    first = model.generate(IDS, **GREEDY, return_dict_in_generate=True)
    assert first.past_key_values.is_paged_prefix_cache and first.get("logits") is None
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
"""
FAILING = """
class TestFailing:
    @pytest.fixture
    def given(self):
        return [1]

    def test_fails_by_itself(self, given, model):
        model.generate(IDS, **GREEDY)
        given.append(2)
        assert given == []

    def test_asks_for_another_cache(self, model):
        output = model.generate(IDS, **GREEDY, return_dict_in_generate=True)
        assert isinstance(output.past_key_values, DynamicCache)
"""


class Recorder:
    """What became of each test, and the plugin that ran it."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.plugin: Any = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[name], self.texts[name] = report.outcome, str(report.longrepr)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.plugin = session.config.pluginmanager.get_plugin("paged_generate_plugin")


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def play(text: str, *arguments: str) -> Recorder:
        path = tmp_path / f"test_of_{tmp_path.name}.py"  # a name of its own, for modules are kept by name
        path.write_text(text)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        monkeypatch.chdir(tmp_path)
        recorder = Recorder()
        options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", *arguments, str(path)]
        pytest.main(options, [paged_generate, recorder])
        return recorder

    return play


def test_calls_are_compared_where_they_may_and_what_fails_anyway_is_skipped(
    play: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    before = GenerationMixin.generate
    played = play(SUITE + FAILING, "--paged")
    assert GenerationMixin.generate is before
    failing, skipped = (played.outcomes.pop(f"test_{name}") for name in ("asks_for_another_cache", "fails_by_itself"))
    assert set(played.outcomes.values()) == {"passed"}, played.texts
    assert (failing, skipped, played.plugin.num_failing_without) == ("failed", "skipped", 1)
    assert paged_generate.FAILS_WITHOUT in played.texts["test_fails_by_itself"]
    refused = played.plugin.beside.refused
    assert refused["use_cache is False"] == 2
    assert refused["it asks for a cache_implementation"] == 1
    assert refused["it brings a cache"] == 2
    assert any(reason.startswith("not supported: is an encoder-decoder model") for reason in refused)
    assert played.plugin.beside.num_compared == 7
    assert played.plugin.beside.num_reused > 0
    assert "7 calls of generate compared with those on a PagedPrefixCache" in capsys.readouterr().out


def test_without_the_option_nothing_is_replaced(play: Any) -> None:
    played = play(SUITE)
    assert played.plugin is None
    assert played.outcomes.pop("test_going_on") == "failed"
    assert set(played.outcomes.values()) == {"passed"}


def test_keys_and_values_that_are_wrong_are_found(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    update = RowsLayer.update

    def wrong(self: Any, key: torch.Tensor, value: torch.Tensor, *more: Any, **named: Any) -> Any:
        return update(self, key, value * 1.01, *more, **named)

    monkeypatch.setattr(RowsLayer, "update", wrong)
    played = play(SUITE, "--paged")
    assert played.outcomes["test_tokens"] == "failed"
    assert "logits[0]: Tensor-likes are not close" in played.texts["test_tokens"]
