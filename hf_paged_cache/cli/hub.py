"""A model by its name: in a folder, in the hub's cache on this machine, or on the hub. Says in one line why it cannot be had."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from textwrap import shorten
from typing import Any

from ..errors import PagedCacheError

_NOT_NEEDED = ["*/*", "*.h5", "*.msgpack", "*.ot", "*.onnx", "*.gguf", "*.pth", "*.pt", "*.tflite", "*.zip", "consolidated*", "*.png", "*.jpg", "*.pdf"]  # fmt: skip
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first that is there is read; of parts, with an index
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
_HUB_TIMEOUT_SECONDS = 5.0
_LOG_IN = "log in with `hf auth login`"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class ModelLoadError(PagedCacheError):
    """The model could not be had; the message lists every place that was tried."""


def find_named_model(name: str, revision: str | None, progress: bool) -> Path:
    """The folder of a model: `name` itself, or what the hub's cache or the hub has under it.

    Raises:
        ModelLoadError: there is none; the message says what the hub answered.
    """
    require_name(name, revision)
    try:
        return known_folder(name, revision) or from_hub(name, progress, revision)
    except ModelLoadError as error:
        raise ModelLoadError(f"there is no folder {name} here, and from the hub: {error}") from error


def known_folder(name: str, revision: str | None = None) -> Path | None:
    """The folder of a model that is on this machine: `name` itself, or a snapshot in the hub's cache."""
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else in_hub_cache(name, revision)


def require_name(name: str, revision: str | None = None) -> None:
    """Refuse what can be no model's name, as far as that is seen without the hub.

    Raises:
        ModelLoadError: a file, a folder without a model, or a path of nothing.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise ModelLoadError(f"{name} is a folder, which has no revisions; leave revision {revision} out")
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"{folder} holds no config.json, so no model; write one there: model.save_pretrained")
    elif folder.exists():
        raise ModelLoadError(f"{name} is a file; give the folder that it is in")
    elif not _HUB_NAME.fullmatch(name):
        raise ModelLoadError(f"there is no folder {name}")


def in_hub_cache(name: str, revision: str | None = None) -> Path | None:
    """The snapshot of `name` in the local hub cache, if it holds configuration, weights and tokenizer."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):  # not there, not whole, or no name that a hub repository can have
        return None
    has_tokenizer = any(True for pattern in _TOKENIZERS for _ in folder.glob(pattern))
    return folder if (folder / "config.json").exists() and _has_weights(folder) and has_tokenizer else None


def _has_weights(folder: Path) -> bool:
    for whole in _WEIGHTS:
        index = folder / f"{whole}.index.json"
        parts = json.loads(index.read_text("utf-8"))["weight_map"].values() if index.exists() else [whole]
        if all((folder / part).exists() for part in parts):
            return True
    return False


def from_hub(name: str, progress: bool, revision: str | None = None) -> Path:
    """Download `name` from the hub; the error says why not.

    The first request has a short timeout: without a network, transformers' own loader keeps trying for 25 s.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if constants.is_offline_mode():
        raise ModelLoadError("not in the local cache, and HF_HUB_OFFLINE is set")
    try:
        found = HfApi().model_info(name, revision=revision, timeout=_HUB_TIMEOUT_SECONDS)
        has_safetensors = any(file.rfilename.endswith(".safetensors") for file in found.siblings or ())
        with nullcontext() if progress else quiet_transformers():
            others = [*_NOT_NEEDED, *(["*.bin"] if has_safetensors else [])]
            return Path(snapshot_download(name, revision=revision, ignore_patterns=others))
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"it has no revision {revision} of {name}; give a branch, a tag or a commit") from error
    except GatedRepoError as error:
        raise ModelLoadError(f"{name} is gated: ask for access on its page there, and {_LOG_IN}") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(f"it has no {name}, or keeps it private: see how it is written, or {_LOG_IN}") from error
    except Exception as error:  # those of the client's HTTP library, too, which changed with its version 1
        is_unreachable = "connect" in type(error).__name__.lower() or "timeout" in type(error).__name__.lower()
        raise ModelLoadError(f"{'it cannot be reached: ' if is_unreachable else ''}{brief(error)}") from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch progress bars and notes of transformers and of the hub's client off, and back to what they were."""
    logging: Any = importlib.import_module("transformers.utils.logging")  # most of it has no types
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def brief(error: Exception) -> str:
    """Kind and message of an error, in one line of 200 characters at most."""
    return shorten(f"{type(error).__name__}: {str(error).strip() or 'no message'}", 200, placeholder=" ...")
