"""The examples run as they stand, on a tiny model."""

import io
import re
import runpy
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from hf_paged_cache import PagedCacheError

from .internals import split_everywhere
from .programs.comparing import run_program

EXAMPLES = Path(__file__).parents[1] / "examples"
Run = Callable[..., list[str]]

pytestmark = pytest.mark.skipif(not EXAMPLES.exists(), reason="the examples are not beside the tests")


@pytest.fixture
def run_example(model_folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs one as the command does, and returns what it prints, line by line."""

    def run(name: str, *arguments: str, typed: str = "") -> list[str]:
        monkeypatch.setattr(sys, "argv", [name, *arguments, "--model", model_folder])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return run


def numbers(line: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", line)]


def test_every_example_is_run_here() -> None:
    text = Path(__file__).read_text("utf-8")
    elsewhere = {"execute.py", "lm_eval_few_shot.py"}  # test_notebook.py; its model is the demo's
    assert all(path.name in text for path in EXAMPLES.glob("*.py") if path.name not in elsewhere)


@pytest.mark.parametrize(
    "name",
    [
        "adapters",
        "beam_search",
        "best_of_n",
        "chat",
        "few_shot_eval",
        "grpo_rollouts",
        "multi_gpu",
        "ray_batch",
        "recommend",
        "score_choices",
        "speculative",
    ],
)
def test_a_model_that_is_not_there_is_said_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in {"adapters": ["peft"], "grpo_rollouts": ["trl", "datasets"], "ray_batch": ["ray"]}.get(name, []):
        pytest.importorskip(package)
    monkeypatch.setattr(sys, "argv", [name, "--model", "no/such/folder"])
    with pytest.raises((SystemExit, PagedCacheError)) as ended:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert str(ended.value).startswith("there is no folder no/such/folder")
    assert "\n" not in str(ended.value)


def test_chat_about_an_image_computes_the_image_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["chat_about_an_image.py", "--questions", "2", "--crops", "1"])
    runpy.run_path(str(EXAMPLES / "chat_about_an_image.py"), run_name="__main__")
    first, second, _, same = capsys.readouterr().out.splitlines()
    assert numbers(first)[0] == 0
    assert numbers(second)[0] == 8 + 64
    assert same == "the same tokens: True"


def test_save_and_load_computes_in_its_first_run_alone(run_example: Run, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    runs = [run_example("save_and_load.py", folder) for _ in range(2)]
    computed, answer = runs[0][0], runs[0][-1]
    assert " 0 known" in computed
    assert runs[1][0].startswith("loaded ")
    assert runs[1][0].endswith("not loaded: none")
    assert runs[1][1].endswith(" 0 computed")
    assert runs[1][2].startswith("saved 0 new blocks")
    assert runs[1][-1].split()[0] == answer.split()[0]


def test_few_shot_eval_computes_its_examples_once(run_example: Run) -> None:
    right, reused = run_example("few_shot_eval.py", "--shots", "2", "--questions", "6", "--batch-size", "3")
    assert right.split(" right")[0].endswith(" of 6")
    share = int(re.findall(r"\((\d+)% saved\)", reused)[0])
    assert share > 40


def test_chat_computes_what_is_new_of_a_turn(run_example: Run) -> None:
    lines = run_example(
        "chat.py", "--max-new-tokens", "6", typed="What is one and one?\nAnd two and two?\n\nnever read\n"
    )
    first, second = (numbers(line) for line in lines if line.startswith("("))
    assert first[0] == 0
    assert second[0] >= first[1] - 16
    assert not any("never read" in line for line in lines)


def test_best_of_n_computes_the_prompt_once(run_example: Run) -> None:
    computed, best = run_example("best_of_n.py", "What is one and one?", "--samples", "4", "--max-new-tokens", "4")
    assert computed == "computed 20 prompt tokens for 4 samples"
    assert re.match(r"sample [0-3]: ", best)


def test_beam_search_gives_the_same_tokens_in_less_memory(run_example: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    split_everywhere(monkeypatch)  # of a tiny model it takes less time to read the prompt for each beam
    *_, same, memory = run_example("beam_search.py", "--max-new-tokens", "4")
    assert same.endswith("True")
    ours, plain = map(float, re.findall(r"([\d.]+) MiB", memory))
    assert ours < plain / 2  # four beams hold the prompt once


def test_recommend_ranks_items_of_its_catalogue_and_computes_the_history_once(run_example: Run) -> None:
    first, _, _, items, computed = run_example("recommend.py", "They buy a", "--beams", "128")
    assert len(first.split()) == 4
    assert items == "128 different items of 144 by 128 beams"
    assert computed == "computed 10 tokens of 1280 in the prompts of all beams"


def test_score_choices_computes_a_question_once(run_example: Run) -> None:
    *_, counts = run_example("score_choices.py")
    computed, of = numbers(counts)
    assert computed < of / 2


def test_speculative_decoding_gives_the_same_tokens(run_example: Run, model_folder: str) -> None:
    *ways, same = run_example("speculative.py", "--assistant", model_folder, "--max-new-tokens", "8")
    assert len(ways) == 3
    assert same == "the same tokens: True"


def test_adapters_have_blocks_of_their_own(run_example: Run) -> None:
    reused = [numbers(line)[0] for line in run_example("adapters.py")]
    assert reused[:2] == [0, 0]
    assert min(reused[2:]) > 200


def test_grpo_under_the_command_computes_the_samples_of_a_prompt_once(model_folder: str, tmp_path: Path) -> None:
    command = [str(EXAMPLES / "grpo_rollouts.py"), "--samples", "4", "--model", model_folder]
    ran = run_program(command, stats=tmp_path / "stats")
    assert ran.exit_code == 0, ran.stderr
    steps = [line for line in ran.stdout.decode().splitlines() if line.startswith("reward ")]
    assert [numbers(line)[-1] for line in steps] == [75, 75]
    assert ran.stdout.count(b"'prefix_cache/shared_rate': ") == 2  # printed by the trainer, too
    (model,) = ran.models
    assert (model["num_calls"], model["calls_without_cache"]) == (2, {})
    assert model["computed_tokens"] == model["prompt_tokens"] / 4


def test_multi_gpu_runs_on_what_there_is(run_example: Run) -> None:
    first, second, devices = run_example("multi_gpu.py")
    assert " 0 of " in first
    assert numbers(second)[1] > 200
    assert devices.startswith("layers on ")


@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("local_ray")
def test_a_service_sends_each_task_to_the_replica_that_knows_it(run_example: Run) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    lines = run_example("ray_serve.py", "--questions", "3", "--port", str(port))
    answers = [numbers(line.rpartition("reused ")[2]) for line in lines if "reused" in line]
    assert [reused for reused, _ in answers[:2]] == [0, 0]
    assert len(answers) == 6
    assert all(reused > of / 2 for reused, of in answers[2:])
    ran = {line.partition(" on replica ")[2] for line in lines if " ran on replica " in line}
    assert len(ran) == 2
    assert not any("," in replica for replica in ran)


@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("local_ray")
def test_ray_batch_completes_each_prompt(run_example: Run) -> None:
    lines = run_example("ray_batch.py", "--questions", "4")
    assert len([line for line in lines if "' ->" in line]) == 4
    assert any(line.startswith("8 prompts; ") for line in lines)
