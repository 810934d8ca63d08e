"""A disk folder that several stores have: what one evicts the others find, as if they had computed it, and nothing of
another model.

Stores of copies of a model stand for processes, of which the last tests have real ones.
"""

import contextlib
import copy
import gc
import logging
import os
import random
import shutil
import signal
import stat
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache, saved_report
from hf_paged_cache.tiers import folder as folders
from hf_paged_cache.tiers.folder import saved_paths
from hf_paged_cache.tiers.saved_file import read_saved_file

from ..internals import tiers_of, zero_tiers
from ..reference import assert_same, batch, exit_code, forked, is_same, row, run
from ..tiny_models import tiny

KINDS = ("llama", "gemma3", "mistral", "qwen3_next", "lfm2")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="PagedPrefixCache: this prompt")
        yield


def prompts(number: int = 5) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(7)
    return [torch.randint(3, 120, (1, 70), generator=made) for _ in range(number)]


def new_cache(model: PreTrainedModel, folder: Path, **sizes: Any) -> PagedPrefixCache:
    """On a pool for less than three prompts, whose tier writes often."""
    cache = PagedPrefixCache(model, **{"block_size": 4, "num_blocks": 40, "disk_folder": folder, **sizes})
    tiers_of(cache).run_bytes = 2**14
    return cache


def call(model: PreTrainedModel, ids: torch.Tensor, cache: PagedPrefixCache | None = None) -> Any:
    return run(model, cache, input_ids=ids, max_new_tokens=3)


def leave(model: PreTrainedModel, folder: Path, **sizes: Any) -> None:
    """Let a store have computed the prompts, evicted most, and gone."""
    cache = new_cache(model, folder, **sizes)
    for ids in prompts():
        call(model, ids, cache)
    tiers_of(cache).writer.submit(int).result()
    del cache
    gc.collect()


def found(cache: PagedPrefixCache) -> list[int]:
    return [cache.lookup(ids[0]).num_tokens for ids in prompts()]


@pytest.mark.parametrize("kind", KINDS)
def test_another_store_finds_what_one_has_evicted_and_left(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    leave(model, tmp_path)
    twin = copy.deepcopy(model)  # at other addresses
    cache = new_cache(twin, tmp_path)
    looked = found(cache)
    assert looked[0] >= 64
    assert cache.lookup(prompts()[0][0]).tier == "disk"
    for ids, num_tokens in list(zip(prompts(), looked, strict=True))[:2]:
        assert_same(call(model, ids), call(twin, ids, cache))
        (of_row,) = cache.last_call.rows
        assert of_row.disk_tokens == of_row.matched_tokens == num_tokens
        cache.check()
    other = new_cache(copy.deepcopy(model), tmp_path)
    zero_tiers(cache)
    assert found(other)[0] >= 64
    assert not is_same(call(model, prompts()[0]), call(other.store.model, prompts()[0], other))


def test_stores_that_run_at_the_same_time_find_what_the_others_write(tmp_path: Path) -> None:
    model, ids, folder = tiny("llama"), prompts()[0], tmp_path / "made"
    one, two = new_cache(model, folder), new_cache(copy.deepcopy(model), folder)
    assert found(two) == [0] * 5
    for each in prompts():
        call(model, each, one)
        tiers_of(one).writer.submit(int).result()
    assert found(two)[0] == 68
    assert_same(call(model, ids), call(two.store.model, ids, two))
    assert two.last_call.rows[0].disk_tokens == 68
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    two.check()


def test_what_is_evicted_is_found_by_others_although_its_head_never_was(tmp_path: Path) -> None:
    model, ids = tiny("llama"), prompts()[0]
    cache = new_cache(model, tmp_path)
    cache.prefill(ids)
    cache.pin(ids[:, :32])  # as a prefix that is always in use
    for each in prompts()[1:]:
        call(model, each, cache)
        tiers_of(cache).writer.submit(int).result()
    assert cache.stats().num_pinned_blocks == 8
    assert found(new_cache(copy.deepcopy(model), tmp_path))[0] == 68


def test_files_stay_where_keys_take_on_another_dtype(tmp_path: Path) -> None:
    twin, model = tiny("llama"), copy.deepcopy(tiny("llama"))
    leave(model, tmp_path)
    theirs = {*saved_paths(tmp_path)}
    cache = new_cache(model, tmp_path)
    for ids in prompts(10)[5:]:
        call(model, ids, cache)
    tiers_of(cache).writer.submit(int).result()
    paths = {*saved_paths(tmp_path)}
    assert theirs < paths
    model.double()
    for ids in prompts():
        assert_same(call(model, ids), call(model, ids, cache))
    assert paths <= {*saved_paths(tmp_path)}
    assert all(run.problem is None for run in tiers_of(cache).runs)
    assert found(new_cache(twin, tmp_path))[0] == 68
    cache.check()


@pytest.mark.parametrize("what", ["before a look", "after a look", "the folder"])
def test_files_that_have_gone_are_misses(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, folder = tiny("llama"), tmp_path / "folder"
    leave(model, folder)
    cache = new_cache(copy.deepcopy(model), folder)
    if what != "before a look":
        assert found(cache)[0] == 68
    if what == "after a look":
        tiers_of(cache).look = list  # type: ignore[method-assign]  # they go right after the look
    for path in saved_paths(folder):
        path.unlink()
    if what == "the folder":
        shutil.rmtree(folder)
    for ids in prompts():
        assert_same(call(model, ids), call(cache.store.model, ids, cache))
        tiers_of(cache).writer.submit(int).result()
    assert cache.last_call.reused_tokens == 0
    assert folder.exists() == (what != "the folder")
    assert (caplog.text.count("cannot be read, so nothing") == 1) == (what == "the folder")
    cache.check()


def test_a_damaged_file_is_a_miss_is_said_once_and_its_blocks_are_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny("llama")
    leave(model, tmp_path)
    paths = saved_paths(tmp_path)
    for number, path in enumerate(paths):  # the last byte is of a row
        data = path.read_bytes()
        path.write_bytes(data[:100] if number % 2 else data[:-1] + bytes([data[-1] ^ 1]))
    cache = new_cache(copy.deepcopy(model), tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for ids in prompts():
                assert_same(call(model, ids), call(cache.store.model, ids, cache))
                tiers_of(cache).writer.submit(int).result()
    removed = [path for path in paths if not path.exists()]
    assert len(removed) > 1
    assert all(caplog.text.count(f"is not used: {path}") == 1 for path in removed)
    assert found(new_cache(copy.deepcopy(model), tmp_path))[0] == 68
    cache.check()


def test_what_is_not_ours_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("llama")
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "notes.safetensors").write_bytes(b"none")
    leave(model, tmp_path)
    cache = new_cache(copy.deepcopy(model), tmp_path)
    assert found(cache)[0] == 68
    assert (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "notes.safetensors").read_bytes() == b"none"
    assert "model.safetensors holds no saved blocks" in caplog.text


def test_a_full_folder_makes_room_without_weights_and_files_of_other_versions(tmp_path: Path) -> None:
    model = tiny("llama")
    model.save_pretrained(tmp_path)
    theirs = [tmp_path / name for name in ("model.safetensors", f"{0:032}.v3.safetensors", f"{0:032}.safetensors")]
    for path in theirs[1:]:
        path.write_bytes(b"of another version")
    for path in theirs:
        os.utime(path, (1, 1))  # the least recently used files of all
    for number in range(6):
        leave(model, tmp_path, disk_bytes=200_000)
        assert all(path.exists() for path in theirs), number
    assert {*saved_paths(tmp_path)} > {*theirs}


def one_value(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3


def hooked(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 1.5)


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "one value of one weight": (one_value, "other weights"),
    "dtype": (lambda model: model.to(torch.bfloat16), "dtype is torch.float32, here torch.bfloat16"),
    "setting": (lambda model: setattr(model.config, "rms_norm_eps", 1e-3), "rms_norm_eps is 1e-06, here 0.001"),
    "hook": (hooked, "hooks or replaces the forward"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_finds_nothing_and_it_is_said_why(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, (changed, why) = tiny("llama"), CHANGES[change]
    leave(model, tmp_path)
    files = saved_paths(tmp_path)
    twin = copy.deepcopy(model)
    changed(twin)
    cache = new_cache(twin, tmp_path)
    with caplog.at_level(logging.INFO, "hf_paged_cache"):
        assert found(cache) == [0] * 5
        assert_same(call(twin, prompts()[0]), call(twin, prompts()[0], cache))
    assert why in caplog.text
    assert saved_paths(tmp_path) == files
    cache.check()


def test_what_weights_computed_that_changed_later_is_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = copy.deepcopy(tiny("llama"))
    cache = new_cache(model, tmp_path)
    call(model, prompts()[0], cache)
    one_value(model)
    for _ in range(2):
        for ids in prompts():
            assert_same(call(model, ids), call(model, ids, cache))
    assert cache.last_call.rows[0].disk_tokens == 0
    assert caplog.text.count("weights have changed since they were read") == 1
    tiers_of(cache).writer.submit(int).result()
    of_files = [block for path in saved_paths(tmp_path) for block in read_saved_file(path).blocks]
    assert len(of_files) <= 18  # of the first call alone
    assert found(new_cache(copy.deepcopy(model), tmp_path)) == [0] * 5


def test_what_has_a_salt_is_in_no_file(tmp_path: Path) -> None:
    model = tiny("llama")
    cache = new_cache(model, tmp_path, cache_salt="tenant")
    for _ in range(2):
        for ids in prompts():
            assert_same(call(model, ids), call(model, ids, cache))
    assert cache.last_call.rows[0].disk_tokens == 0
    (tier,) = cache.store.stats().tiers
    assert (tier.num_blocks, tier.num_down) == (0, 0)
    assert tier.num_refused
    (of_salt,) = cache.stats().tiers
    assert (of_salt.num_blocks, of_salt.num_bytes, of_salt.num_refused) == (0, None, None)
    tiers_of(cache).writer.submit(int).result()
    assert not saved_paths(tmp_path)


def test_the_budget_is_over_the_files_of_all_and_what_is_used_stays(tmp_path: Path) -> None:
    model = tiny("llama")
    leave(model, tmp_path)
    left = sum(path.stat().st_size for path in saved_paths(tmp_path))
    assert left > 100_000
    caches = [new_cache(copy.deepcopy(model), tmp_path, disk_bytes=100_000) for _ in range(3)]
    made = torch.Generator().manual_seed(9)
    for cache in caches * 3:
        for _ in range(3):
            ids = torch.randint(3, 120, (1, 70), generator=made)
            assert_same(call(model, ids), call(cache.store.model, ids, cache))
            call(cache.store.model, prompts()[0], cache)
        tiers_of(cache).writer.submit(int).result()
        assert sum(path.stat().st_size for path in saved_paths(tmp_path)) <= 100_000
        cache.check()
    assert sum(cache.stats().tiers[0].num_dropped for cache in caches) > 0
    nothing = new_cache(copy.deepcopy(model), tmp_path / "small", disk_bytes=1000)
    for ids in prompts():
        call(nothing.store.model, ids, nothing)
    tiers_of(nothing).writer.submit(int).result()
    assert nothing.stats().tiers[0].num_refused
    assert not saved_paths(tmp_path / "small")


def test_a_disk_that_is_full_is_a_miss_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    model = tiny("llama")
    cache = new_cache(model, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "fsync", full)
        for _ in range(2):
            for ids in prompts():
                assert_same(call(model, ids), call(model, ids, cache))
            tiers_of(cache).writer.submit(int).result()
        cache.check()
        assert {path.name for path in tmp_path.iterdir()} == {".lock"}
    assert caplog.text.count("No space left") == 1
    for ids in prompts():
        call(model, ids, cache)
    tiers_of(cache).writer.submit(int).result()
    assert saved_paths(tmp_path)


def test_what_was_saved_by_hand_is_found_and_what_a_tier_has_written_is_loaded(tmp_path: Path) -> None:
    model = tiny("llama")
    by_hand = PagedPrefixCache(model, block_size=4)
    by_hand.prefill(prompts()[0])
    by_hand.store.save(tmp_path)
    cache = new_cache(copy.deepcopy(model), tmp_path)
    assert found(cache)[0] >= 64
    assert_same(call(model, prompts()[0]), call(cache.store.model, prompts()[0], cache))
    for ids in prompts():
        call(cache.store.model, ids, cache)
    cache.reset()
    tiers_of(cache)._end()  # as when the store goes
    loading = PagedPrefixCache(copy.deepcopy(model), block_size=4)
    assert loading.store.load(tmp_path).num_blocks > 30
    assert_same(call(model, prompts()[1]), call(loading.store.model, prompts()[1], loading))
    assert loading.last_call.reused_tokens >= 60


@pytest.mark.parametrize("whose", ["of the store", "of caches without a salt"])
def test_a_reset_finds_nothing_any_more_and_leaves_what_others_have_written(whose: str, tmp_path: Path) -> None:
    model = tiny("llama")
    leave(model, tmp_path)
    files = saved_paths(tmp_path)
    cache = new_cache(copy.deepcopy(model), tmp_path)
    reset = cache.store.reset_prefix_cache if whose == "of the store" else cache.reset_prefix_cache
    assert found(cache)[0] == 68
    reset()
    assert found(cache) == [0] * 5
    assert saved_paths(tmp_path) == files
    for ids in prompts():
        call(cache.store.model, ids, cache)
    tiers_of(cache).writer.submit(int).result()
    assert len(saved_paths(tmp_path)) > len(files)
    cache.reset()
    reset()
    assert saved_paths(tmp_path) == files
    assert found(cache) == [0] * 5


def test_where_a_look_shows_that_weights_changed_unseen_what_was_written_goes(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny("llama"))
    cache = new_cache(model, tmp_path)
    call(model, prompts()[0], cache)
    model.model.layers[0].self_attn.k_proj.weight.detach().numpy()[:, 1:7] += 1.0  # seen by no count
    for ids in [*prompts()[1:], prompts()[4]]:
        call(model, ids, cache)
        tiers_of(cache).writer.submit(int).result()
    call(model, prompts()[0], cache)
    assert cache.verify().differing
    assert not saved_paths(tmp_path)
    assert_same(call(model, prompts()[0]), call(model, prompts()[0], cache))


def prompt(number: int) -> dict[str, torch.Tensor]:
    """One of few that begin alike."""
    return batch(row((number % 3, 24), (100 + number, 16)))


def test_killed_while_it_evicts_and_saves_a_process_leaves_whole_files(tmp_path: Path) -> None:
    """At random moments; the next process reads whole files alone."""
    random_numbers, num_files, num_tokens = random.Random(1), 0, 0
    models = {kind: tiny(kind) for kind in ("llama", "gemma3", "lfm2")}
    for number in range(8):
        kind = random_numbers.choice([*models])

        def compute(kind: str = kind, first: int = 10 * number) -> None:
            cache = new_cache(models[kind], tmp_path / kind)
            for each in range(first, first + 1000):
                run(models[kind], cache, **prompt(each), max_new_tokens=1)
                if each % 3 == 0:
                    cache.store.save(tmp_path / kind)

        child, latest = forked(compute), time.monotonic() + 60
        while not list((tmp_path / kind).glob("[!.]*.safetensors")) and time.monotonic() < latest:
            time.sleep(0.01)  # on a busy machine it has not begun yet
        time.sleep(random_numbers.uniform(0.02, 0.3))
        os.kill(child, signal.SIGKILL)
        assert exit_code(child) == -signal.SIGKILL
        reports = saved_report(tmp_path / kind)
        assert all(report.problem is None for report in reports), reports
        num_files += len(reports)
    for kind, model in models.items():
        cache = new_cache(model, tmp_path / kind)
        for number in range(0, 80, 10):
            assert_same(run(model, **prompt(number)), run(model, cache, **prompt(number)))
            num_tokens += cache.last_call.rows[0].disk_tokens
        cache.check()
        cache.store.save(tmp_path / kind)
        assert not list((tmp_path / kind).glob(".*.unfinished"))
    assert num_files > 0 < num_tokens


def damage(path: Path, random_numbers: random.Random) -> None:
    """Flip a bit of a file, cut it off, or remove it; a reader that has it open has the whole one."""
    with contextlib.suppress(FileNotFoundError):
        data = bytearray(path.read_bytes())
        place = random_numbers.randrange(len(data))
        data[place] ^= 1 << random_numbers.randrange(8)
        damaged = path.with_name(f".{os.getpid()}.damaged")
        damaged.write_bytes(data[:place] if random_numbers.random() < 0.3 else data)
        damaged.replace(path)
        if random_numbers.random() < 0.3:
            path.unlink()


def test_processes_on_one_folder_that_save_load_reset_and_damage_files_get_right_results(tmp_path: Path) -> None:
    def work(number: int) -> None:
        random_numbers, model, num_tokens = random.Random(3 + number), tiny(("llama", "lfm2")[number % 2]), 0
        cache = new_cache(model, tmp_path, disk_bytes=2**20)
        for _ in range(30):
            match random_numbers.random():
                case chance if chance < 0.06:
                    cache.store.save(tmp_path)
                case chance if chance < 0.12:
                    cache.store.load(tmp_path)
                case chance if chance < 0.15:
                    cache.reset()
                    cache.store.reset_prefix_cache()
                case chance if chance < 0.2:
                    for path in saved_paths(tmp_path)[:1]:
                        damage(path, random_numbers)
                case chance if chance < 0.22:
                    del cache
                    gc.collect()
                    cache = new_cache(model, tmp_path, disk_bytes=2**20)
            given = prompt(random_numbers.randrange(40))
            assert_same(run(model, **given, max_new_tokens=1), run(model, cache, **given, max_new_tokens=1))
            num_tokens += cache.last_call.rows[0].disk_tokens
            cache.check()
        assert num_tokens > 0

    children = [forked(partial(work, number)) for number in range(3)]
    assert [exit_code(child) for child in children] == [0] * 3
