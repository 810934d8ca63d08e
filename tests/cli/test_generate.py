"""`hf-paged-cache generate`: a file in, a file out, options by name, and one line for every mistake."""

import json
import os
import pty
import signal
import subprocess
import sys
import termios
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_paged_cache.cli import command as common
from hf_paged_cache.cli.commands import app
from hf_paged_cache.cli.generate import options_by_name

from ..jobs.test_job import alone

SHARED = "What is one and one? " * 4


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"text": f"{SHARED}{end}", "n": end}) + "\n" for end in ("a", "bc", "def", "g")))
    return path


def generate(prompts: Path, model: str, out: Path, *arguments: str) -> Any:
    given = [str(prompts), "--model", model, "--out", str(out), "--column", "text", "--max-new-tokens", "3"]
    return CliRunner().invoke(app, ["generate", *given, *arguments], env={"COLUMNS": "200"})


def written(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, sorted by their index if they have one."""
    return sorted(map(json.loads, path.read_text("utf-8").splitlines()), key=lambda row: row.get("index", 0))


ALL = ["--num-beams=2", "--num-return-sequences", "2", "--stop-strings", '["a", "b"]', "--max-bytes", "2 MB"]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {}),
        (ALL, {"num_beams": 2, "num_return_sequences": 2, "stop_strings": ["a", "b"]}),
        (
            ["--no-repeat-ngram-size", "2", "--batch-size=3", "--num-blocks", "5", "--block-size", "4"],
            {"no_repeat_ngram_size": 2},
        ),
    ],
)
def test_each_row_gets_what_generate_gives_it(
    arguments: list[str], options: dict[str, Any], prompts: Path, model_folder: str, tmp_path: Path
) -> None:
    done = generate(prompts, model_folder, tmp_path / "out.jsonl", *arguments)
    assert done.exit_code == 0, done.output
    model, tokenizer = common.load_model(model_folder)
    rows = written(tmp_path / "out.jsonl")
    assert rows == [
        {"index": number, **row, "completion": alone(model, tokenizer, row["text"], max_new_tokens=3, **options)}
        for number, row in enumerate(written(prompts))
    ]
    assert done.stdout.startswith(f"{tmp_path / 'out.jsonl'}: 4 prompts; ")
    assert "prompt/s" not in done.stderr  # a short job shows no progress off a terminal


def test_a_job_that_writes_into_the_models_folder_resumes(prompts: Path, model_folder: str) -> None:
    out = Path(model_folder) / "out.jsonl"
    options = ["--disk-folder", str(Path(model_folder) / "blocks")]
    assert generate(prompts, model_folder, out, *options).exit_code == 0
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:2]) + lines[2][:9])  # as if it was killed there
    again = generate(prompts, model_folder, out, *options)
    assert again.exit_code == 0, again.output
    assert sorted(out.read_bytes().splitlines(keepends=True)) == sorted(lines)


WITHOUT_TORCH = (
    "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers'])); "  # importing either of them fails
    "from hf_paged_cache.cli import main; main()"
)


def test_a_finished_job_that_is_run_again_says_so_without_a_model_and_another_one_is_refused(
    prompts: Path, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    first = generate(prompts, model_folder, out)
    assert "done already" not in first.stdout
    monkeypatch.setattr(common, "load_model", lambda *_: pytest.fail("it was loaded"))
    given = [str(prompts), "--model", model_folder, "--out", str(out), "--column", "text", "--max-new-tokens", "3"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WITHOUT_TORCH, "generate", *given]
    again = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (again.returncode, again.stderr, again.stdout) == (0, "", f"{out}: done already: 4 prompts\n")
    for option, said in {
        "--num-beams=2": "--num-beams: null then, 2 now",
        "--dtype=bfloat16": 'dtype: null then, "bfloat16" now',
        "--seed=3": "seed: 0 then, 3 now",
    }.items():
        other = generate(prompts, model_folder, out, option)
        assert other.exit_code == 2
        assert f"{out} already exists, of another job ({said}" in other.stderr
    os.utime(Path(model_folder) / "model.safetensors")  # may be another model now
    assert "another job (model files: " in generate(prompts, model_folder, out).stderr
    prompts.write_text(prompts.read_text().replace("bc", "cb"))
    assert "; the input has other rows than when this job began); " in generate(prompts, model_folder, out).stderr


MISTAKES: list[tuple[list[str], str]] = [
    (["--batchsize", "4"], "--batchsize is no option of generate that a job takes; did you mean --batch-size?"),
    (["--temprature=0.5"], "temprature is no option of generate that a job takes; did you mean --temperature?"),
    (["--max-length", "10"], "--max-length is not an option here: "),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES)
def test_a_mistake_is_one_line_before_a_model_is_loaded(
    arguments: list[str], said: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "load_model", lambda *_, **__: pytest.fail("it was loaded"))
    before = {path.name for path in tmp_path.iterdir()}
    done = generate(prompts, "no-model", tmp_path / "out.jsonl", *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("hf-paged-cache generate: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_value_that_generate_cannot_take_is_refused_by_its_name(
    prompts: Path, model_folder: str, tmp_path: Path
) -> None:
    done = generate(prompts, model_folder, tmp_path / "out.jsonl", "--do-sample", "--temperature", "-1")
    assert done.exit_code == 2
    assert "generate cannot run with --do-sample=True, temperature=-1 (ValueError: " in done.stderr
    assert not (tmp_path / "out.jsonl").exists()


VALUES = {"0.5": 0.5, "[1]": [1], "null": None, "None": None, "True": True, "false": False, "word": "word"}


def test_a_value_is_json_or_a_text_and_no_in_front_switches_off() -> None:
    for text, value in VALUES.items():
        assert options_by_name(["--top-p", text]) == {"top_p": value}
    given = options_by_name(["--no-do-sample", "--no-repeat-ngram-size", "2"])
    assert given == {"do_sample": False, "no_repeat_ngram_size": 2}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no terminals like this here")
def test_on_a_terminal_a_bar_shows_what_is_reused_until_ctrl_c(
    prompts: Path, model_folder: str, tmp_path: Path
) -> None:
    prompts.write_text("".join(json.dumps({"text": f"{SHARED}{end}"}) + "\n" for end in range(16)))
    out, (ours, theirs) = tmp_path / "out.jsonl", pty.openpty()
    termios.tcsetwinsize(theirs, (24, 200))
    given = [str(prompts), "--model", model_folder, "--out", str(out), "--column", "text", "--batch-size", "1"]
    command = [sys.executable, "-m", "hf_paged_cache", "generate", *given, "--overwrite"]
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell has its background jobs ignore it
    running = subprocess.Popen(command, stderr=theirs, stdout=subprocess.DEVNULL, preexec_fn=heeds)
    os.close(theirs)
    shown = read_until(ours, b"% reused")
    running.send_signal(signal.SIGINT)
    shown += read_until(ours, b"resumes.")
    assert running.wait(60) == 130
    assert f"stopped. What is done is in {out}; the same command without --overwrite resumes.".encode() in shown
    assert written(out)
    rest = generate(prompts, model_folder, out, "--batch-size", "1", "--max-new-tokens", "128")
    assert rest.exit_code == 0, rest.output
    assert len(written(out)) == 16


def read_until(terminal: int, wanted: bytes) -> bytes:
    """What a terminal shows until that; it ends without it only with its process."""
    shown = b""
    while wanted not in shown:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # the other end is closed
            pytest.fail(f"{wanted!r} was never shown: {shown!r}")
    return shown
