"""The disk tier by itself: what it keeps, in files and before, and that its files never take more than they may."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_paged_cache.tiers import disk as disk_module
from hf_paged_cache.tiers import run_files as runs_module
from hf_paged_cache.tiers import saved_file
from hf_paged_cache.tiers.base import BLOCKS
from hf_paged_cache.tiers.disk import DiskTier
from hf_paged_cache.tiers.folders import OwnFolder
from hf_paged_cache.tiers.run_files import Run

from .test_host import PART, name, put, read, rows

Make = Callable[..., DiskTier]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    tiers: list[DiskTier] = []

    def made(max_bytes: int | None = None, run_bytes: int = 8000) -> DiskTier:
        tiers.append(DiskTier(tmp_path, max_bytes))
        tiers[-1].run_bytes = run_bytes
        return tiers[-1]

    yield made
    for tier in tiers:
        tier.join()


def held(tier: DiskTier) -> list[int]:
    return [number for number in range(200) if tier.has(BLOCKS, name(number))]


def test_what_was_put_is_found_before_it_is_written_and_after(make: Make, tmp_path: Path) -> None:
    tier = make()
    put(tier, 1, 2, 3)
    assert read(tier, 3, 1, 2) == [3, 1, 2]
    assert not list(tmp_path.rglob("*.safetensors"))
    put(tier, *range(10, 40))
    tier.join()
    assert list(tmp_path.rglob("*.safetensors"))
    assert read(tier, 1, 2, 3, *range(39, 9, -1)) == [1, 2, 3, *range(39, 9, -1)]


def test_files_go_whole_and_the_one_that_was_used_stays(make: Make) -> None:
    tier = make(max_bytes=32_000, run_bytes=4500)
    put(tier, 0, 1, 2)
    for first in range(10, 200, 10):
        put(tier, *range(first, first + 5))
        tier.touch(BLOCKS, [name(1)])
        tier.join()
        tier.check()
    assert {0, 1, 2} <= set(held(tier))
    assert not {10, 11} & set(held(tier))
    assert tier.counts.num_dropped > 0


def test_a_file_that_somebody_reads_of_is_not_dropped(make: Make) -> None:
    tier = make(max_bytes=32_000, run_bytes=4500)
    put(tier, 0, 1, 2)
    hold = tier.hold(BLOCKS, [name(1)])
    for first in range(10, 150, 10):
        put(tier, *range(first, first + 5))
        tier.join()
    assert tier.has(BLOCKS, name(1))
    del hold
    for first in range(10, 150, 10):
        put(tier, *range(first + 5, first + 10))
        tier.join()
    assert not tier.has(BLOCKS, name(1))


def test_what_waits_for_the_disk_is_bounded_and_what_is_beyond_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "_MOST_WAITING_BYTES", 60_000)
    monkeypatch.setattr(Run, "write", lambda run: None)
    tier = make()
    for first in range(0, 200, 5):
        put(tier, *range(first, first + 5))
    assert tier.num_waiting_bytes <= 60_000
    assert tier.counts.num_refused > 0
    assert read(tier, 0, 1) == [0, 1]


def test_a_disk_that_is_full_loses_contents_and_nothing_else(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saved_file, "save_file", full)
    tier = make()
    for first in range(0, 30, 10):
        put(tier, *range(first, first + 10))
        tier.join()
    tier.check()
    assert held(tier) == []
    assert caplog.text.count("No space left") == 1
    monkeypatch.undo()
    put(tier, *range(50, 60))
    assert read(tier, 55) == [55]


def run_of(folder: Path, *numbers: int) -> Run:
    run = Run(OwnFolder(folder))
    run.add(BLOCKS, [PART], [name(number) for number in numbers], rows(list(numbers)))
    return run


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]


def test_a_run_that_is_dropped_before_its_turn_is_never_written(tmp_path: Path) -> None:
    run = run_of(tmp_path, 1, 2)
    run.drop()
    run.write()
    assert not files_in(tmp_path)


def test_a_run_that_is_dropped_while_it_is_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, save = run_of(tmp_path, 1, 2), runs_module.write_saved_file

    def dropping(*given: Any, **named: Any) -> Any:
        written = save(*given, **named)
        run.drop()
        return written

    monkeypatch.setattr(runs_module, "write_saved_file", dropping)
    run.write()
    assert not files_in(tmp_path)


def test_rows_that_came_in_at_different_times_are_read_in_one_stretch_from_memory_and_from_the_file(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path, 1, 2)
    assert run.add(BLOCKS, [PART], [name(3), name(4), name(5)], rows([3, 4, 5])) == 2
    for _ in range(2):
        for stretches, expected in (([(0, 5)], [1, 2, 3, 4, 5]), ([(1, 2), (4, 1), (0, 1)], [2, 3, 5, 1])):
            (fragments,) = run.read(BLOCKS, stretches)
            assert torch.cat(fragments)[:, 0].tolist() == expected
        run.write()
    assert not run.is_in_memory
    assert files_in(tmp_path) == [run.path]
    assert run.path.stat().st_size <= run.num_bytes


@pytest.mark.parametrize("place", [-1, 6], ids=["of a row", "of the header's length"])
def test_a_flipped_bit_in_a_file_of_this_process_alone_is_a_miss(place: int, make: Make, tmp_path: Path) -> None:
    tier = make(run_bytes=1)
    put(tier, 1)
    put(tier, 2)
    tier.join()
    first, _ = [run.path for run in tier._runs]
    data = bytearray(first.read_bytes())
    data[place] ^= 1
    first.write_bytes(data)
    with pytest.raises(OSError, match="damaged"):
        read(tier, 1)
    assert held(tier) == [2]
    assert read(tier, 2) == [2]
    assert not first.exists()
    tier.check()


def test_forgetting_all_of_a_file_removes_it(make: Make, tmp_path: Path) -> None:
    tier = make()
    put(tier, *range(8))
    tier.join()
    tier.forget({name(number) for number in range(7)})
    assert held(tier) == [7]
    tier.forget({name(7)})
    tier.check()
    assert (tier.num_bytes, list(tmp_path.rglob("*.safetensors"))) == (0, [])


def test_a_budget_that_holds_nothing_keeps_nothing(make: Make) -> None:
    tier = make(max_bytes=1000)
    put(tier, 0, 1)
    assert held(tier) == []
    assert tier.counts.num_refused == 2
