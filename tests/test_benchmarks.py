"""Nearly every scene of benchmarks/ runs once on a tiny model, and gives the tokens that DynamicCache gives.

No time is tested. Of the soak some seconds run, in a process of its own; half an hour is a command.
"""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_paged_cache.rows.layers import RowsLayer, WindowLayer

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

if not BENCHMARKS.exists():
    pytest.skip("the benchmarks are not beside the tests", allow_module_level=True)
pytest.importorskip("datasets")
pytest.importorskip("matplotlib")
sys.path.insert(0, str(BENCHMARKS))  # as for a script that lies there

import bench_generate  # noqa: E402
import bench_gpu  # noqa: E402
import bench_peers  # noqa: E402
import plots  # noqa: E402
import tables  # noqa: E402

LONG = {"windows", "states"}  # also when they are quick: not run here
SCENES = [name for name in bench_generate.SCENES if name not in LONG]
REUSES_NOTHING = {"nothing_shared_steps", "nohit", "overhead", "bookkeeping", "forward_cost"}
REUSES_IF_IT_PAYS = {"batch_cold", "batch_mixed", "tiers"}  # with prompts as short as here it may not
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
    names, path = ["one1", "rows8_1", "attention"], tmp_path / "gpu.json"
    options = ["--shape", "tiny", "--dtype", "float32", "--known", "64", "--profiles", str(tmp_path)]
    assert bench_gpu.main([*options, "--scenes", ",".join(names), "--json", str(path)]) == 0
    results = json.loads(path.read_text(encoding="utf-8"))
    for name in names[:2]:
        assert results[name]["same"] == 1.0
        assert "forwards were captured" in results[name]["captured"]
        assert not results[name]["captured"].startswith("0 of")
    assert len(results["attention"]) == 9
    assert results["graph 0"]["why_not"] == ""
    assert len([*tmp_path.glob("*.pstats")]) == 2


def test_every_scene_runs_and_gives_the_same_tokens(all_results: dict[str, Any]) -> None:
    lines = all_results["scenes"].values()
    assert {of["scene"] for of in lines} == {*all_results["runs"]} == {*SCENES}
    assert not [of["failure"] for of in lines if "failure" in of]
    assert all(math.isfinite(of["value"]) for of in lines)
    assert all("rounds_with_the_same_tokens" not in of["details"] for of in lines)


def test_what_is_known_is_reused_in_every_scene_that_says_so(all_results: dict[str, Any]) -> None:
    rates = {of["scene"]: of["hit_rate"] for of in all_results["scenes"].values()}  # of the last line of each
    assert not [name for name in REUSING if rates[name] == 0]
    assert rates["nohit"] == 0


@pytest.mark.parametrize("name", ["warm", "beam_warm"])
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["--scenes", "warmth"],
        ["--repeat", "0"],
        ["--shared", "100"],
        ["--json", "a", "--no-json"],
        ["--model", "a", "--random-model", "tiny"],
    ],
    ids=" ".join,
)
def test_bad_options_are_refused_before_a_model_is_loaded(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_generate, "make_bench", lambda options: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as ended:
        bench_generate.main(arguments)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_a_short_soak_loses_no_block_and_gives_no_wrong_result(tmp_path: Path) -> None:
    path = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--minutes", "0.25", "--seed", "0", "--shrink", "60"]
    run = subprocess.run(
        [*command, "--json", str(path)], cwd=BENCHMARKS.parent, capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, f"{run.stdout[-8000:]}\n{run.stderr[-8000:]}"
    report = json.loads(path.read_text(encoding="utf-8"))
    assert report["problems"] == []
    assert report["counts"]["calls"] > 30
    assert report["num_faults"] > 5
    assert report["faults"]["interrupt"] > 0
    assert report["counts"]["times at rest"] > 0
