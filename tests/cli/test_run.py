"""`run` becomes its program: which it is, with which arguments, and what is refused before."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_paged_cache.cli import run as command
from hf_paged_cache.programs.options import options_of


@pytest.fixture
def becomes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The command line and the environment that the process would go on with."""
    told: list[Any] = []
    monkeypatch.setattr(os, "execvpe", lambda file, line, environment: told.extend([line, environment]))
    return told


def test_options_before_the_program_are_the_command_s_and_all_after_it_its_own(
    becomes: list[Any], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    stats = tmp_path / "stats.jsonl"
    given = [
        "--max-bytes",
        "4GB",
        "--cache-salt",
        "me",
        "--stats",
        str(stats),
        str(script),
        "--stats",
        "x",
        "--help",
        "-m",
    ]
    assert CliRunner().invoke(command.app, ["run", *given]).exit_code == 0
    line, environment = becomes
    assert line == [sys.executable, str(script), "--stats", "x", "--help", "-m"]
    options = options_of(environment)
    assert options is not None
    assert options.cache == {"max_bytes": "4GB", "cache_salt": "me"}
    assert (options.stats, options.is_quiet, options.pid) == (str(stats), False, os.getpid())
    assert environment["PYTHONPATH"].split(os.pathsep)[0].endswith(os.path.join("programs", "site"))
    assert json.loads(json.dumps(environment)) == environment


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["-m", "json.tool", "--help"], [sys.executable, "-m", "json.tool", "--help"]),
        (["--quiet", "sh", "-c", "exit 3"], ["/sh", "-c", "exit 3"]),
    ],
)
def test_a_module_and_an_installed_command(becomes: list[Any], given: list[str], line: list[str]) -> None:
    assert CliRunner().invoke(command.app, ["run", *given]).exit_code == 0
    assert becomes[0][0].endswith(line[0])
    assert becomes[0][1:] == line[1:]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "give a program to run"),
        (["-m"], "give a program to run"),
        (["--no-such-option", "train.py"], "there is no option --no-such-option. See --help"),
        (["no/such.py"], "there is no file no/such.py"),
        (["no-such-command"], "there is no command no-such-command"),
        (["--max-bytes", "much", "sh"], "--max-bytes is 'much'"),
        (["--max-bytes", "4", "GB", "sh"], "--max-bytes is 4 without a unit; for gigabytes give 4GB, without a space"),
        (["--max_bytes", "4GB", "sh"], "there is no option --max_bytes; did you mean --max-bytes? See --help"),
        (["--programm", "sh"], "there is no option --programm. See --help"),
        (["--version"], "there is no option --version. See --help"),
        (["--cache-salt", "", "sh"], "--cache-salt is empty"),
        (
            ["--stats", "no/such/folder/file", "sh"],
            "--stats no/such/folder/file cannot be written: No such file or directory",
        ),
    ],
)
def test_what_cannot_be_run_is_one_line(becomes: list[Any], given: list[str], why: str) -> None:
    done = CliRunner().invoke(command.app, ["run", *given])
    assert (done.exit_code, becomes) == (2, [])
    assert done.stderr.startswith("hf-paged-cache run: ")
    assert why in done.stderr
    assert done.stderr.count("\n") == 1


def test_help_is_wrapped_as_the_terminal_is_and_options_without_a_value_have_no_type() -> None:
    said = CliRunner().invoke(command.app, ["run", "--help"], env={"COLUMNS": "300", "TERMINAL_WIDTH": "300"}).stdout
    assert "in this process and in every Python that it starts. What was reused" in said
    assert "--cache-salt" in said
    assert "bool" not in said
