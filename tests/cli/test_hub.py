"""A model by its name: what is asked of the hub, and what is said where it keeps a model back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from hf_paged_cache.cli import hub
from hf_paged_cache.cli.demo_model import load_demo_model
from hf_paged_cache.cli.hub import ModelLoadError


def test_a_hub_that_does_not_answer_is_asked_once(without_hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no_network(self: Any, name: str, revision: str | None, timeout: float) -> None:
        asked.append((name, revision, timeout))
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", no_network)
    with pytest.raises(ModelLoadError, match=r"from the hub: OSError: no route to host$"):
        load_demo_model("nobody/nothing")
    assert asked == [("nobody/nothing", None, hub._HUB_TIMEOUT_SECONDS)]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("GatedRepoError", "some/model is gated: ask for access on its page there, and log in with `hf auth login`"),
        ("RepositoryNotFoundError", "it has no some/model, or keeps it private: see how it is written, or log in with"),
        ("RevisionNotFoundError", "it has no revision v2 of some/model; give a branch, a tag or a commit"),
    ],
)
def test_of_a_model_that_the_hub_keeps_back_it_is_said_what_to_do(
    kind: str, why: str, without_hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept_back(self: Any, name: str, revision: str | None, timeout: float) -> None:
        error = getattr(huggingface_hub.errors, kind)
        raise error.__new__(error)  # its class's arguments are an HTTP library's, and have changed

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", kept_back)
    with pytest.raises(ModelLoadError, match=f"from the hub: {re.escape(why)}"):
        load_demo_model("some/model", revision="v2")


def test_a_half_downloaded_model_in_the_hubs_cache_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, revision, local_files_only: str(tmp_path))
    for name in ("config.json", "tokenizer_config.json", "model-00001-of-00002.safetensors"):
        (tmp_path / name).touch()
    assert hub.in_hub_cache("some/model") is None
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert hub.in_hub_cache("some/model") is None
    (tmp_path / shards["b"]).touch()
    assert hub.in_hub_cache("some/model") == tmp_path


@pytest.mark.parametrize("weights", [["pytorch_model.bin"], ["model.safetensors", "pytorch_model.bin"]])
def test_of_a_revision_on_the_hub_all_files_come_that_a_model_may_need(
    weights: list[str], without_hub: Path, model_folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, wanted = [], []
    files = [
        "config.json",
        "spiece.model",
        "vocab.txt",
        "added_tokens.json",
        "modeling.py",
        *weights,
        "onnx/model.onnx",
    ]
    found = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in files])

    def download(name: str, revision: str | None, ignore_patterns: list[str]) -> str:
        asked.append((name, revision))
        wanted.extend(filter_repo_objects(files, ignore_patterns=ignore_patterns))
        return model_folder

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda self, name, revision, timeout: found)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    model, _ = load_demo_model("some/model", revision="v2")
    assert asked == [("some/model", "v2")]
    assert wanted == [
        name for name in files if "onnx" not in name and (name != "pytorch_model.bin" or len(weights) == 1)
    ]
    assert type(model).__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("named", [True, False])
def test_a_revision_of_a_folder_or_of_no_model_is_refused(named: bool, model_folder: str) -> None:
    with pytest.raises(ModelLoadError, match="revision v2"):
        load_demo_model(model_folder if named else None, revision="v2")
