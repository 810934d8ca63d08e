"""What is mistyped is found before torch is imported, which takes seconds; each is one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

GENERATE = ("generate", "--model", "no-model", "--out", "out.jsonl")
MISTAKES: list[tuple[list[str], str]] = [
    (
        ["--column", "question"],
        "prompts.jsonl, row 0, counted from 0: it has no column 'question'; there are 'text', 'n': mend it",
    ),
    (["--progress"], "--progress needs a value after it"),
    (["--disk-bytes", "1GB"], "--disk-bytes is 1GB without --disk-folder"),
    (["--disk-folder", ""], "--disk-folder is ''; give a folder's path"),
    (["--model", "."], "holds no config.json, so no model"),
    (["--stop-strings", '["a"'], '["a" is no JSON ('),
    (["--watermarking-config", "x"], """--watermarking-config is 'x'; give its settings by name, such as {"bias"""),
    (["stray"], "'stray' belongs to no option"),
    (["--do-sample", "no"], "--do-sample is 'no'; give True or False"),
    (["--stop-strings", r"\n\n"], r"\n\n is no JSON ("),
    (["--address", "auto"], "give --workers, too"),
]
FOUND: list[tuple[tuple[str, ...], str]] = [
    *(((*GENERATE, "prompts.jsonl", "--column", "text", *given), said) for given, said in MISTAKES),
    ((*GENERATE, "none.jsonl"), "generate: there is no file none.jsonl\n"),
    ((*GENERATE, "."), "generate: . is a folder\n"),
    (
        (*GENERATE, "prompts.jsonl"),
        "prompts.jsonl, row 0, counted from 0: it has no column 'prompt'; there are 'text', 'n'",
    ),
    ((*GENERATE, "good.csv", "--out", "nowhere/out.jsonl"), "cannot be written: there is no folder nowhere"),
    ((*GENERATE, "good.csv", "--out", "done.jsonl"), "exists, and no done.jsonl.job.json says of which job it is"),
    ((*GENERATE, "good.csv", "--max-bytes", "much"), "--max-bytes is 'much'"),
    ((*GENERATE, "good.csv", "--max-bytes", "8", "GB"), "for gigabytes give 8GB, without a space\n"),
    ((*GENERATE, "good.csv", "--dtype", "int4"), "there is no dtype int4; give fp32, bf16 or fp16, or leave it out"),
    ((*GENERATE, "good.csv", "--model", "./modle"), "there is no folder ./modle"),
    (("bench", "no-model", "prompts.jsonl"), "bench: prompts.jsonl, row 0, counted from 0: it has no column 'prompt'"),
    (("bench", "good.csv", "."), "bench: . is a folder; the order is MODEL PROMPTS\n"),
    (("bench", "./nothere", "good.csv"), "bench: there is no folder ./nothere"),
    (("doctor", "./nothere"), "doctor: there is no folder ./nothere\n"),
    (("load", "./nothere"), "load: there is no folder nothere"),
    (("load", ".", "--model", "./nothere"), "load: there is no folder ./nothere"),
    (("save", "to", "--prompt-file", "good.csv", "--model", "./nothere"), "save: there is no folder ./nothere"),
    (("save", "to", "--prompt-file", "nowhere.txt"), "save: there is no file nowhere.txt"),
    (("save", "to", "--prompt-file", "good.csv", "--mode", "0770"), "save: --mode is "),
    (("save", "good.csv", "--prompt-file", "good.csv"), "good.csv is a file; give a folder"),
    (("demo", "--model", "./nothere"), "demo: there is no folder ./nothere"),
]
RUN_ALL = """
import json, sys
sys.modules.update(dict.fromkeys(["torch", "transformers"]))  # importing either of them fails
from typer.testing import CliRunner
from hf_paged_cache.cli.commands import app
results = [CliRunner().invoke(app, arguments) for arguments in json.loads(sys.argv[1])]
print(json.dumps([(done.exit_code, done.stderr, done.stdout) for done in results]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, str, str]]:
    """Exit code, stderr and stdout of each command, and of `demo --help` after them, in one process without torch."""
    folder = tmp_path_factory.mktemp("files")
    files = {"prompts.jsonl": '{"text": "a", "n": 1}\n', "good.csv": "prompt\na\n", "done.jsonl": "mine\n"}
    for name, text in files.items():
        (folder / name).write_text(text)
    given = json.dumps([*(arguments for arguments, _ in FOUND), ("demo", "--help")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", RUN_ALL, given]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    assert {path.name: path.read_text() for path in Path(folder).iterdir()} == files
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(FOUND)), ids=[" ".join(arguments) for arguments, _ in FOUND])
def test_what_is_mistyped_is_one_line_before_torch_is_imported(
    number: int, answers: list[tuple[int, str, str]]
) -> None:
    (exit_code, error, _), (arguments, said) = answers[number], FOUND[number]
    assert exit_code == 2
    lines = [line for line in error.splitlines(keepends=True) if line != "loading the model ...\n"]
    assert len(lines) == 1
    assert lines[0].startswith(f"hf-paged-cache {arguments[0]}: ")
    assert said in lines[0]


def test_help_needs_no_torch(answers: list[tuple[int, str, str]]) -> None:
    exit_code, _, shown = answers[-1]
    assert exit_code == 0
    assert "--questions" in shown
