"""Programs in processes of their own print byte for byte what they print without the command; `python -m tests.programs` runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from .comparing import PROGRAMS, compared, run_program, save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def test_a_script_prints_what_it_prints_without_and_reuses(folder: Path, tmp_path: Path) -> None:
    plain, ours = compared("exits", folder, tmp_path / "stats")
    assert (ours.exit_code, ours.stdout) == (plain.exit_code, plain.stdout)
    assert (plain.exit_code, len(ours.models)) == (3, 1)


def test_processes_that_it_spawns_have_caches(folder: Path, tmp_path: Path) -> None:
    ours = run_program([str(PROGRAMS / "spawned.py"), str(folder)], stats=tmp_path / "stats", options=("--quiet",))
    assert ours.exit_code == 0
    assert [model["num_calls"] for model in ours.models] == [2, 2]
    assert all(model["reused_tokens"] for model in ours.models)
    assert "hf-paged-cache run" not in ours.stderr


def test_nothing_is_imported_where_transformers_is_not(folder: Path, tmp_path: Path) -> None:
    plain, ours = compared("raises", folder, tmp_path / "stats")
    assert (ours.exit_code, ours.stdout) == (plain.exit_code, plain.stdout) == (1, plain.stdout)
    assert ours.stderr == plain.stderr


def test_a_sitecustomize_that_is_hidden_runs_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.customised = True")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, sitecustomize; print(sitecustomize.__file__, sys.customised, [p for p in sys.path if 'programs/site' in p])"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    ours = run_program([str(script)], stats=tmp_path / "stats")
    assert ours.stdout.decode() == f"{tmp_path / 'sitecustomize.py'} True []\n"
