"""`hf-paged-cache generate`: a file in, a file out, options by name, and one line for every mistake."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_paged_cache import UnsupportedModelError
from hf_paged_cache.cli import loading
from hf_paged_cache.cli.commands import app
from hf_paged_cache.cli.generate import options_by_name
from hf_paged_cache.jobs.calls import BatchCalls

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


def written(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {}),
        (["--num-beams", "2", "--batch-size=3"], {"num_beams": 2}),
        (["--num-beams=2", "--num-return-sequences", "2"], {"num_beams": 2, "num_return_sequences": 2}),
        (["--stop-strings", '["a", "b"]', "--num-blocks", "40"], {"stop_strings": ["a", "b"]}),
        (["--no-repeat-ngram-size", "2", "--seed", "3"], {"no_repeat_ngram_size": 2}),
        (["--max-bytes", "2 MB", "--block-size", "4"], {}),
    ],
)
def test_each_row_gets_what_generate_gives_it(
    arguments: list[str], options: dict[str, Any], prompts: Path, model_folder: str, tmp_path: Path
) -> None:
    done = generate(prompts, model_folder, tmp_path / "out.jsonl", *arguments)
    assert done.exit_code == 0, done.output
    model, tokenizer = loading.load_model(model_folder)
    rows = written(tmp_path / "out.jsonl")
    assert [{**row, "completion": None} for row in rows] == [{**row, "completion": None} for row in written(prompts)]
    assert [row["completion"] for row in rows] == [
        alone(model, tokenizer, row["text"], max_new_tokens=3, **options) for row in rows
    ]
    assert done.stdout.startswith(f"{tmp_path / 'out.jsonl'}: 4 prompts in ")


def test_a_finished_job_that_is_run_again_says_so_and_exits_with_0(
    prompts: Path, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    first = generate(prompts, model_folder, out)
    assert "done already" not in first.stdout
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    monkeypatch.setattr(BatchCalls, "_generate", lambda *_, **__: pytest.fail("it ran"))
    again = generate(prompts, model_folder, out)
    assert again.exit_code == 0, again.output
    assert again.stdout.startswith(f"{out}: done already: 4 prompts in ")
    assert "in all runs, of which earlier ones did 4 prompts" in again.stdout
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
    other = generate(prompts, model_folder, out, "--num-beams", "2")
    assert other.exit_code == 2
    assert "already exists: finished, and from another job (option --num-beams was null and is 2" in other.stderr


WITHOUT_TORCH = (
    "import sys; sys.modules.update(dict.fromkeys(['torch', 'transformers'])); "  # importing either of them fails
    "from hf_paged_cache.cli import main; main()"
)


def without_torch(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_finished_job_that_is_run_again_needs_no_model_to_say_so(
    prompts: Path, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [str(prompts), "--model", model_folder, "--out", str(tmp_path / "out.jsonl"), "--column", "text", "--max-new-tokens", "3"]  # fmt: skip
    first = generate(prompts, model_folder, tmp_path / "out.jsonl")
    assert first.exit_code == 0, first.output
    again = without_torch("generate", *given, folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith(f"{tmp_path / 'out.jsonl'}: done already: 4 prompts in ")
    loaded, load = [], loading.load_model
    monkeypatch.setattr(loading, "load_model", lambda *given: loaded.append(given) or load(*given))
    for name in ("model.safetensors", "config.json"):  # may be another model now: only its weights can tell
        os.utime(Path(model_folder) / name)
    assert "done already" in generate(prompts, model_folder, tmp_path / "out.jsonl").stdout
    assert "done already" in generate(prompts, model_folder, tmp_path / "out.jsonl").stdout
    assert len(loaded) == 1
    other = generate(prompts, model_folder, tmp_path / "out.jsonl", "--dtype", "bfloat16")
    assert (other.exit_code, len(loaded)) == (2, 2)
    assert "from another job (other model)" in other.stderr
    prompts.write_text(prompts.read_text().replace("bc", "cb"))
    assert "from another job (other prompts" in generate(prompts, model_folder, tmp_path / "out.jsonl").stderr


def test_off_a_terminal_there_are_lines_of_progress_and_a_small_pool_changes_no_row(
    prompts: Path, model_folder: str, tmp_path: Path
) -> None:
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a", "bc", SHARED * 4)))
    given = [str(prompts), "--model", model_folder, "--out", str(tmp_path / "out.jsonl"), "--column", "text", "--max-new-tokens", "3"]  # fmt: skip
    sizes = ["--num-blocks", "5", "--block-size", "4"]
    done = subprocess.run(
        [sys.executable, "-m", "hf_paged_cache", "generate", *given, *sizes],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if "prompt" in line or "row" in line]
    assert lines[0].startswith("0 of 3 prompts (0%) after 00:00")
    assert "PagedPrefixCache" not in done.stderr
    assert lines[-1].startswith("3 of 3 prompts (100%) after ")
    model, tokenizer = loading.load_model(model_folder)
    assert [row["completion"] for row in written(tmp_path / "out.jsonl")] == [
        alone(model, tokenizer, row["text"], max_new_tokens=3) for row in written(prompts)
    ]


def test_ctrl_c_says_how_to_go_on(
    prompts: Path, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, num_calls = BatchCalls._run, 0

    def run_one(self: BatchCalls, *given: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise KeyboardInterrupt
        return calls(self, *given)

    monkeypatch.setattr(BatchCalls, "_run", run_one)
    out = tmp_path / "out.jsonl"
    first = generate(prompts, model_folder, out, "--batch-size", "2", "--overwrite")
    assert first.exit_code == 130
    assert f"stopped. What is done is in {out}.journal; the same command without --overwrite resumes" in first.stderr
    second = generate(prompts, model_folder, out, "--batch-size", "2")
    assert second.exit_code == 0, second.output
    assert re.search(r"in all runs, of which earlier ones did [1-3] prompts?", second.stdout)
    assert [row["n"] for row in written(out)] == ["a", "bc", "def", "g"]


MISTAKES: list[tuple[list[str], str]] = [
    (
        ["--column", "question"],
        "line 1: it has no column 'question'; there are 'text', 'n': mend it, or name another (column, --column)",
    ),
    (["--batchsize", "4"], "there is no option --batchsize; did you mean --batch-size?"),
    (["--batch_size", "4"], "there is no option --batch_size; did you mean --batch-size?"),
    (["--temprature=0.5"], "there is no option --temprature; did you mean --temperature?"),
    (["--cache", "3"], "there is no option --cache. See --help"),
    (["--progress", "false"], "there is no option --progress. See --help"),
    (["--progress"], "there is no option --progress. See --help"),
    (["--tokenizer", "x"], "there is no option --tokenizer. See --help"),
    (["--num-workers", "2"], "there is no option --num-workers; did you mean --workers? See --help"),
    (["--max-byte", "4GB"], "there is no option --max-byte; did you mean --max-bytes? See --help"),
    (
        ["--max-bytes", "4 gigs"],
        "--max-bytes is '4 gigs'; give a number of bytes, or one with a unit: '512MB' or '4GB'",
    ),
    (["--max-bytes", "0"], "--max-bytes is '0'; it must be 1 or more bytes"),
    (["--max-bytes", "1GB", "--num-blocks", "9"], "give --num-blocks or --max-bytes, not both"),
    (["--host-bytes", "-1"], "--host-bytes is '-1'; give a number of bytes"),
    (["--disk-bytes", "1GB"], "--disk-bytes is 1GB without --disk-folder"),
    (
        ["--dtype", "int4"],
        "there is no dtype int4; give float32, bfloat16 or float16, or leave it out: a quantized model",
    ),
    (["--dtype", "float99"], "there is no dtype float99; give float32, bfloat16 or float16"),
    (["--dtype", "Tensor"], "there is no dtype Tensor; give float32, bfloat16 or float16"),
    (["--model", "./no-model"], "there is no folder ./no-model"),
    (["--model", "."], "holds no config.json, so no model"),
    (["--stop-strings", '["a"'], '["a" begins as JSON and is none'),
    (["stray"], "'stray' belongs to no option"),
    (["--num-beams"], "--num-beams needs a value after it"),
    (["--max-length", "10"], "--max-length is not an option here: "),
    (["--out", "out.jsonl.gz"], "what is written are plain JSON lines"),
    (["--stop-strings", r"\n\n"], r"\n\n is a backslash and a letter; as JSON it is the character: '"),
    (["--address", "auto"], "give --workers, too"),
    (["--out", "no/such/folder/out.jsonl"], "there is no folder no/such/folder to write out.jsonl into"),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES)
def test_a_mistake_is_one_line_before_a_model_is_loaded(
    arguments: list[str], said: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("it was loaded"))
    before = {path.name for path in tmp_path.iterdir()}
    done = generate(prompts, "no-model", tmp_path / "out.jsonl", *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("hf-paged-cache generate: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == before


def test_prompts_come_before_options_of_generate(prompts: Path, tmp_path: Path) -> None:
    given = ["--do-sample", str(prompts), "--model", "no-model", "--out", str(tmp_path / "out.jsonl")]
    done = CliRunner().invoke(app, ["generate", *given])
    assert done.exit_code == 2
    assert "give PROMPTS before options of transformers' generate, such as --do-sample" in done.stderr


def test_a_model_that_is_refused_is_called_unsupported(
    prompts: Path, model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise UnsupportedModelError("SomeModel: it keeps its state elsewhere")

    monkeypatch.setattr("hf_paged_cache.prefix_store.require_supported", refuse)
    done = generate(prompts, model_folder, tmp_path / "out.jsonl")
    assert done.exit_code == 2
    assert "hf-paged-cache generate: the model is not supported: SomeModel: it keeps" in done.stderr


def test_a_file_without_rows_and_a_folder_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("text,id\n")
    done = generate(tmp_path / "p.csv", "no-model", tmp_path / "out.jsonl")
    assert done.stderr == f"hf-paged-cache generate: {tmp_path / 'p.csv'} holds no rows\n"
    done = generate(tmp_path, "no-model", tmp_path / "out.jsonl")
    assert done.stderr == f"hf-paged-cache generate: {tmp_path} is a folder; give a file\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.5", 0.5), ("[1]", [1]), ("null", None), ("None", None), ("True", True), ("false", False), ("word", "word")],
)
def test_a_value_is_json_or_a_text(text: str, value: object) -> None:
    assert options_by_name(["--top-p", text]) == {"top_p": value}


def test_no_in_front_switches_off_and_is_part_of_a_name() -> None:
    assert options_by_name(["--no-do-sample", "--no-repeat-ngram-size", "2"]) == {
        "do_sample": False,
        "no_repeat_ngram_size": 2,
    }


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no terminals like this here")
def test_on_a_terminal_a_bar_shows_what_is_reused_and_sigterm_ends_it_as_ctrl_c_does(
    prompts: Path, model_folder: str, tmp_path: Path
) -> None:
    prompts.write_text("".join(json.dumps({"text": f"{SHARED}{end}"}) + "\n" for end in range(16)))
    out, (ours, theirs) = tmp_path / "out.jsonl", pty.openpty()
    termios.tcsetwinsize(theirs, (24, 200))
    command = [sys.executable, "-m", "hf_paged_cache", "generate", str(prompts), "--model", model_folder, "--out", str(out), "--column", "text", "--batch-size", "1"]  # fmt: skip
    running = subprocess.Popen(command, stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    shown = read_until(ours, b"of prompt tokens reused")
    running.send_signal(signal.SIGTERM)
    shown += read_until(ours, b"resumes from there.")
    assert running.wait(60) == 130
    assert f"What is done is in {out}.journal".encode() in shown
    assert Path(f"{out}.journal").read_text().count("\n") > 1
    rest = generate(prompts, model_folder, out, "--batch-size", "1", "--max-new-tokens", "128", "--order", "given")
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
