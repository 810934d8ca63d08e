"""`hf-paged-cache doctor`: of this machine, of a supported model, of a refused one, and of what is none."""

import platform
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache
from typer.testing import CliRunner

from hf_paged_cache.cli.commands import app

from ..tiny_models import build


def doctor(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_without_a_model_it_says_what_there_is() -> None:
    done = doctor()
    assert done.exit_code == 0, done.output
    for version in (transformers.__version__, torch.__version__, platform.python_version()):
        assert version in done.output
    free, total = map(float, re.findall(r"cpu +([\d.]+) of ([\d.]+) GiB free", done.output)[0])
    assert 0 < free < total
    assert torch.accelerator.is_available() or "none that torch can use" in done.output


def test_of_a_supported_model_it_says_what_a_token_costs_and_how_many_fit(model_folder: str, tiny_llama: Any) -> None:
    done = doctor(model_folder, "--dtype", "float32", "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "LlamaForCausalLM is supported" in done.output
    plain = DynamicCache(config=tiny_llama.config)
    tiny_llama(torch.tensor([[1]]), past_key_values=plain)
    of_a_token = sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)
    assert f"a token takes {of_a_token / 2**10:,.1f} KiB of keys and values\n" in done.output
    tokens, blocks = re.findall(r"room for +([\d,]+) tokens, in ([\d,]+) blocks of 16", done.output)[0]
    assert int(tokens.replace(",", "")) == 16 * int(blocks.replace(",", "")) > 0


def test_it_says_what_it_does_meanwhile_and_takes_short_names_of_dtypes(model_folder: str) -> None:
    done = doctor(model_folder, "--dtype", "bf16")
    assert "bfloat16 on " in done.stdout
    assert len(re.findall(r"^(?:loading|trying) .* \.\.\.$", done.stderr, re.MULTILINE)) == 2


def test_of_a_refused_model_it_says_why_and_fails(tmp_path: Path, tiny_tokenizer: Any) -> None:
    build("mamba").save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    done = doctor(str(tmp_path))
    assert done.exit_code == 1
    assert "MambaForCausalLM is not supported: its scan of several tokens starts without the state" in done.output
    assert "room for" not in done.output


@pytest.mark.parametrize("command", ["doctor", "bench"])
def test_what_cannot_be_loaded_is_one_line(command: str, model_folder: str) -> None:
    Path(model_folder, "model.safetensors").write_bytes(b"none")
    prompts = Path(model_folder, "prompts.csv")
    prompts.write_text("prompt\na\n")
    done = CliRunner().invoke(app, [command, model_folder, *[str(prompts)] * (command == "bench")])
    assert (done.exit_code, type(done.exception)) == (2, SystemExit)
    why = f"hf-paged-cache {command}: {model_folder} cannot be loaded (SafetensorError: "
    assert [line for line in done.stderr.splitlines() if line.startswith(why)]


def test_a_defect_keeps_its_traceback(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("index 9 is out of bounds")

    monkeypatch.setattr("hf_paged_cache.check_model", broken)
    assert str(doctor(model_folder).exception) == "index 9 is out of bounds"


def test_a_device_that_is_not_there_is_refused(model_folder: str) -> None:
    assert "cannot be loaded (RuntimeError: " in doctor(model_folder, "--device", "cudda").stderr
