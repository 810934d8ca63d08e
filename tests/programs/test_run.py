"""`hf-paged-cache run`: which program runs, as what, with which exit code, and what is said at the end."""

import atexit
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_paged_cache.cli import run as command
from hf_paged_cache.cli.commands import app
from hf_paged_cache.every_generate import EveryGenerate

from ..tiny_models import build
from .comparing import PROGRAMS, run_program

Start = Callable[..., Callable[[], str]]


@pytest.fixture
def start(every: EveryGenerate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Start:
    """Runs a program in this process, and returns what tells of its end and returns that."""
    told: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda function, *args: told.append((function, args)))
    for name in ("argv", "path"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.delitem(sys.modules, "lm_eval", raising=False)

    def run(*arguments: str) -> Callable[[], str]:
        done = CliRunner().invoke(app, ["run", *arguments])
        assert isinstance(done.exception, command.ProgramStart), done.output
        done.exception.args[0]()

        def end() -> str:
            capsys.readouterr()
            for function, args in told:
                function(*args)
            return capsys.readouterr().err

        return end

    return run


TELLS = "import sys; print([__name__, sys.modules['__main__'].__dict__ is globals(), sys.argv, sys.path[0]])"


def test_a_script_and_a_module_have_their_own_arguments_and_path_and_are_main(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "inside").mkdir()
    script, package = tmp_path / "inside" / "tells.py", tmp_path / "telling"
    package.mkdir()
    for path in (script, package / "__main__.py"):
        path.write_text(TELLS)
    (package / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    start("--max-bytes", "4GB", "inside/tells.py", "--stats", "x", "--help", "-m")
    argv = ["inside/tells.py", "--stats", "x", "--help", "-m"]
    assert capsys.readouterr().out == f"{['__main__', True, argv, str(script.parent)]}\n"
    start("-m", "telling", "--quiet")
    argv = [str(package / "__main__.py"), "--quiet"]
    assert capsys.readouterr().out == f"{['__main__', True, argv, str(tmp_path)]}\n"


def test_a_console_command_runs_in_this_process_and_exits_as_it_does(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    script = tmp_path / "says-three"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nsys.exit(3 if sys.argv == [{str(script)!r}, '--help'] else 0)\n"
    )
    script.chmod(0o755)
    with pytest.raises(SystemExit) as ended:
        start("says-three", "--help")
    assert ended.value.code == 3


def test_an_error_of_the_program_is_its_own(start: Start, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("open('no such file')")
    with pytest.raises(FileNotFoundError):  # the command would make it one line
        start(str(tmp_path / "fails.py"))


def test_where_nothing_has_generated_that_is_one_line(start: Start, tmp_path: Path) -> None:
    (tmp_path / "nothing.py").touch()
    end = start(str(tmp_path / "nothing.py"))
    (line,) = end().splitlines()
    assert line.startswith("hf-paged-cache run: no generate call got a cache in this process.")
    assert "processes that it starts, unless their code calls hf_paged_cache.cache_every_generate()" in line
    sys.modules["lm_eval"] = ModuleType("lm_eval")
    assert "--model hf-paged reuses" in end()
    assert start("--quiet", str(tmp_path / "nothing.py"))().count("\n") == 2  # those of the run before


def test_the_summary_and_the_file_of_stats_say_what_was_done(start: Start, tmp_path: Path) -> None:
    (tmp_path / "nothing.py").touch()
    stats = tmp_path / "stats.json"
    end = start("--stats", str(stats), str(tmp_path / "nothing.py"))
    model = build("llama")
    for _ in range(2):
        model.generate(model.dummy_inputs["input_ids"], max_new_tokens=20, do_sample=False)
    said = end().splitlines()
    assert said[0].startswith("hf-paged-cache run: LlamaForCausalLM: 2 calls, ")
    assert " reused, " in said[0]
    (counts,) = json.loads(stats.read_text("utf-8"))["models"]
    assert counts["num_calls"] == 2
    assert counts["reused_tokens"] + counts["shared_tokens"] + counts["computed_tokens"] == counts["prompt_tokens"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ([], "Missing argument 'PROGRAM"),
        (["-m"], "Missing argument 'PROGRAM"),
        (["--max_bytes", "4GB", "sh"], "No such option: --max_bytes (Possible options: --max-bytes"),
        (["no/such.py"], "run: there is no file and no command no/such.py"),
        (["no-such-command"], "run: there is no file and no command no-such-command"),
        (["sh"], "/sh cannot run in this process; give a Python script"),
        (["--max-bytes", "much", "."], "run: --max-bytes is 'much'"),
        (["--max-bytes", "4", "GB", "."], "run: --max-bytes is 4 without a unit; for gigabytes give 4GB"),
        (["--cache-salt", "", "."], "run: --cache-salt is empty"),
        (["--stats", "no/such/folder/file", "."], "No such file or directory: "),
        (["--stats", __file__, "."], "test_run.py is there already, and would be lost; give --stats another file"),
    ],
)
def test_what_cannot_be_run_is_said_and_exits_with_2(
    given: list[str], why: str, tmp_path: Path, every: EveryGenerate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["run", *given], env={"COLUMNS": "200"})
    assert done.exit_code == 2, done.output
    assert why in done.stderr
    assert every.options == {}


def test_a_program_in_a_process_of_its_own_prints_and_exits_as_without_and_reuses(
    model_folder: str, tmp_path: Path
) -> None:
    command_line = [str(PROGRAMS / "answers.py"), model_folder]
    plain, ours = run_program(command_line), run_program(command_line, stats=tmp_path / "stats")
    assert (plain.exit_code, plain.stdout.splitlines()[-1]) == (3, b"at exit")
    assert (ours.exit_code, ours.stdout) == (plain.exit_code, plain.stdout)
    (model,) = ours.models
    assert model["reused_tokens"] > model["prompt_tokens"] / 3
    assert f"{model['reused_tokens']} reused" in ours.stderr


def test_a_process_that_a_program_starts_has_caches_if_its_own_code_says_so(model_folder: str, tmp_path: Path) -> None:
    ours = run_program([str(PROGRAMS / "spawned.py"), model_folder], stats=tmp_path / "stats")
    assert ours.exit_code == 0, ours.stderr
    answers, nothing, same, summary, *_ = ours.stdout.decode().splitlines()
    assert (same, nothing) == (answers, "no caches")
    assert "2 calls" in summary
    assert " 0 reused" not in summary
    assert "no generate call got a cache in this process" in ours.stderr
