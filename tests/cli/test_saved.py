"""`hf-paged-cache save` and `load`: from a shell, one run computes and the next one has it."""

import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.cli.commands import app
from hf_paged_cache.cli.demo_model import load_demo_model


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompt.txt"
    path.write_text("What is one and one? " * 8, encoding="utf-8")
    return str(path)


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def test_one_run_saves_and_the_next_one_has_it(model_folder: str, prompt_file: str, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    done = command("save", folder, "--prompt-file", prompt_file, "--model", model_folder)
    assert done.exit_code == 0, done.output
    model, tokenizer = load_demo_model(model_folder)
    ids = tokenizer(Path(prompt_file).read_text(encoding="utf-8"))["input_ids"]
    num_blocks = len(ids) // 16
    assert f"wrote {num_blocks} blocks" in done.output
    again = command("save", folder, "--prompt-file", prompt_file, "--model", model_folder)
    assert f"wrote 0 blocks, 0.0 MiB, into {folder}; there already: {num_blocks} blocks" in again.output
    checked = command("load", folder, "--check")
    assert checked.exit_code == 0
    assert f"{num_blocks} blocks, {num_blocks * 16} tokens" in checked.output
    assert "1 file, 0 of them damaged" in checked.output
    taken = command("load", folder, "--model", model_folder)
    assert taken.exit_code == 0
    assert f"took {num_blocks} blocks" in taken.output
    cache = PagedPrefixCache(model)
    cache.store.load(folder)
    assert cache.lookup(ids).num_tokens == num_blocks * 16


def test_a_damaged_file_is_named_and_written_again_by_the_next_run(
    model_folder: str, prompt_file: str, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    arguments = ("save", str(folder), "--prompt-file", prompt_file, "--model", model_folder, "--mode", "660")
    looks = ("load", str(folder), "--check"), ("load", str(folder), "--model", model_folder)
    first = command(*arguments)
    (path,) = folder.glob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    for look, said in zip(looks, ("1 file, 1 of them damaged", f"{path} is damaged"), strict=True):
        done = command(*look)
        assert done.exit_code == 1
        assert f"{path} is damaged" in done.output
        assert said in done.output
    again = command(*arguments)
    assert again.exit_code == 0, again.output
    assert first.output.splitlines()[1] in again.output
    assert not path.exists()
    assert [command(*look).exit_code for look in looks] == [0, 0]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o770
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {0o660}


def test_a_prompt_that_a_model_cannot_take_is_one_line(model_folder: str, prompt_file: str, tmp_path: Path) -> None:
    long = tmp_path / "long.txt"
    long.write_text("What is one and one? " * 400)
    done = command(
        "save", str(tmp_path / "to"), "--prompt-file", prompt_file, "--prompt-file", str(long), "--model", model_folder
    )
    assert done.exit_code == 2
    assert f"hf-paged-cache save: {long}: its " in done.stderr
    assert "1 new token need more than the model's" in done.stderr
    assert not (tmp_path / "to").exists()
