"""The batch job on a real local Ray: the same results as on one machine, also if a worker is killed, each row once."""

import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_paged_cache import CacheArgumentError, WorkersLostError, generate_all, generate_all_on_ray
from hf_paged_cache.cli.commands import app
from hf_paged_cache.jobs import job as module
from hf_paged_cache.jobs.options import How

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.xdist_group("ray")

SHARED = ["Question: What is one and one?\nAnswer: Two.\n" * 2, "Write a word that rhymes with light: " * 3]
PROMPTS = [f"{SHARED[number % 2]}{number} and {number}" for number in range(12)]


def load(folder: str, deadly: str | None = None) -> tuple[Any, Any]:
    """Runs in a worker, which has no access to the tests; with `deadly` a forward kills the first one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model, seen = AutoModelForCausalLM.from_pretrained(folder).eval(), []

    def count(*_: Any) -> None:
        seen.append(1)
        if len(seen) == 12 and not Path(str(deadly)).stat().st_size:
            die(str(deadly))

    if deadly is not None:
        model.register_forward_pre_hook(count)
    return model, AutoTokenizer.from_pretrained(folder)


def die(deadly: str) -> None:
    with open(deadly, "ab") as deaths:
        deaths.write(b"x")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(autouse=True)
def _workers_know_this_file() -> Iterator[None]:
    module = __import__(__name__, fromlist=["load"])
    ray.cloudpickle.register_pickle_by_value(module)
    yield
    ray.cloudpickle.unregister_pickle_by_value(module)


@pytest.mark.usefixtures("local_ray")
def test_workers_give_the_same_results_also_where_one_is_killed_and_the_job_resumes(
    model_folder: str, tmp_path: Path
) -> None:
    alone = generate_all(*load(model_folder), PROMPTS, max_new_tokens=4, batch_size=2).completions
    out, deadly = tmp_path / "out.jsonl", tmp_path / "dead"
    deadly.touch()
    loads, options = partial(load, model_folder, str(deadly)), {"max_new_tokens": 4, "batch_size": 2}
    sizes: Any = {"block_size": 8, "max_bytes": "2 MB", "disk_folder": tmp_path / "blocks", "disk_bytes": "1MB"}
    with pytest.raises(WorkersLostError, match=r"^a worker has died \(.*the same job resumes") as raised:
        generate_all_on_ray(loads, PROMPTS, num_workers=2, out=out, **options, **sizes, trust_hooks=True)
    assert "\n" not in str(raised.value)
    num_done = len(out.read_text("utf-8").splitlines())
    assert 2 <= num_done < len(PROMPTS)
    result = generate_all_on_ray(loads, PROMPTS, num_workers=2, out=out, **options, **sizes, trust_hooks=True)
    rows = sorted(map(json.loads, out.read_text("utf-8").splitlines()), key=lambda row: row["index"])
    assert [(row["index"], row["prompt"], row["completion"]) for row in rows] == [
        (number, prompt, text) for number, (prompt, text) in enumerate(zip(PROMPTS, alone or (), strict=True))
    ]
    assert (result.summary.num_prompts, result.summary.num_done_before) == (len(PROMPTS), num_done)
    assert (tmp_path / "blocks").is_dir()
    out.write_text("".join(out.read_text("utf-8").splitlines(keepends=True)[:7]), "utf-8")
    again = generate_all_on_ray(partial(load, model_folder), PROMPTS, num_workers=1, out=out, **options)
    assert again.summary.num_done_before == 7
    assert sorted(map(json.loads, out.read_text("utf-8").splitlines()), key=lambda row: row["index"]) == rows
    assert again.summary.reused_tokens > again.summary.prompt_tokens / 4


@pytest.mark.usefixtures("local_ray")
def test_what_a_worker_refuses_is_said_as_it_is_on_one_machine(model_folder: str, tmp_path: Path) -> None:
    given = {"num_workers": 1, "out": tmp_path / "out.jsonl"}
    with pytest.raises(CacheArgumentError, match=r"^row 11, counted from 0: its 3,000 tokens and "):
        generate_all_on_ray(partial(load, model_folder), [*PROMPTS[:11], "x" * 3000], **given)
    with pytest.raises(CacheArgumentError, match=r"^load returned int; it is to return a model and its tokenizer$"):
        generate_all_on_ray(lambda: 1, PROMPTS, **given)  # type: ignore[arg-type, return-value]
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.usefixtures("local_ray")
def test_the_command_gives_with_workers_what_it_gives_without(model_folder: str, tmp_path: Path) -> None:
    prompts, outs = tmp_path / "prompts.jsonl", [tmp_path / "one.jsonl", tmp_path / "workers.jsonl"]
    prompts.write_text("".join(json.dumps({"prompt": each}) + "\n" for each in PROMPTS[:4]))
    for out, given in zip(outs, ([], ["--workers", "1"]), strict=True):
        arguments = ["generate", str(prompts), "--model", model_folder, "--out", str(out), "--max-new-tokens", "3"]
        done = CliRunner().invoke(app, [*arguments, *given])
        assert done.exit_code == 0, done.output
    assert outs[0].read_bytes() == outs[1].read_bytes()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"load": "name"}, "load is a str; give a function that returns model and tokenizer"),
    ({"load": torch.nn.Linear(1, 1)}, "load is a Linear; give a function"),
    ({"num_workers": 0}, "num_workers is 0"),
    ({"max_bytes": "much"}, "max_bytes is 'much'"),
    ({"prompts": ["a", 3]}, "row 1, counted from 0: 'prompt' is of type int"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_what_no_worker_is_needed_to_refuse_is_refused_before_ray_begins(
    given: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: pytest.fail("it began"))
    with pytest.raises(CacheArgumentError, match=f"^{said}"):
        generate_all_on_ray(**{"load": lambda: (None, None), "prompts": PROMPTS, "num_workers": 1, **given})


def test_without_ray_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(CacheArgumentError, match=r"^workers need Ray: pip install ray, or '\.\[ray\]'$"):
        generate_all_on_ray(lambda: (None, None), PROMPTS, num_workers=1)


def test_prompts_that_share_a_prefix_are_one_workers() -> None:
    stretches = module._stretches(dict(enumerate({"prompt": text} for text in PROMPTS)), How({}), 2)
    assert [{number % 2 for number in stretch} for stretch in stretches] in ([{0}, {1}], [{1}, {0}])
