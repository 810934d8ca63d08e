"""A folder of saved blocks that was damaged, and is saved into again: everything is there again, and nothing is lost that was whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from hf_paged_cache import PagedPrefixCache, saved_report
from hf_paged_cache.store import saving
from hf_paged_cache.tiers.saved_file import read_saved_file, saved_paths

from ..reference import assert_same, batch, row, run
from ..tiny_models import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

BASE = row((1, 64))
Damage = Callable[[bytearray], bytes]


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged_cache.store.saving._FILE_BYTES", 2**14)


def new_cache(model: Any) -> PagedPrefixCache:
    return PagedPrefixCache(model, block_size=4)


def asked(*ends: int) -> list[dict[str, Any]]:
    return [batch([*BASE, *row((end, 9))]) for end in ends]


def computed(model: Any, *ends: int) -> PagedPrefixCache:
    """A cache that has seen prompts after one prefix."""
    cache = new_cache(model)
    for prompt in asked(*ends):
        run(model, cache, **prompt, max_new_tokens=2)
    cache.prefill(BASE)
    return cache


def at(place: int | Callable[[bytearray], int]) -> Damage:
    """A bit is another one at a place, from the end where it is below 0."""

    def damage(data: bytearray) -> bytes:
        data[place(data) if callable(place) else place] ^= 4
        return bytes(data)

    return damage


def header_end(data: bytearray) -> int:
    return 8 + int.from_bytes(data[:8], "little")


DAMAGES: dict[str, Damage] = {
    "length of the header": at(6),
    "brace of the header": at(8),
    "name of the format": at(lambda data: data.index(b"hf_paged_cache blocks")),
    "name of the manifest": at(lambda data: data.index(b"manifest")),
    "tokens in the manifest": at(lambda data: data.index(b"tokens") + 12),
    "checksum in the manifest": at(lambda data: data.index(b"checksums") + 20),
    "where a tensor lies": at(lambda data: data.index(b"data_offsets") + 18),
    "first row": at(header_end),
    "last row": at(-1),
    "cut in the header": lambda data: bytes(data[:100]),
    "cut in the rows": lambda data: bytes(data[:-100]),
    "of zero length": lambda data: b"",
    "longer": lambda data: bytes(data) + b"\0",
    "zeros": lambda data: bytes(len(data)),
}


def there_again(model: Any, folder: Path, num_blocks: int) -> None:
    assert all(report.problem is None for report in saved_report(folder))
    fresh = new_cache(model)
    loaded = fresh.store.load(folder)
    assert (loaded.num_blocks, loaded.not_loaded) == (num_blocks, {})
    fresh.check()
    for prompt in asked(2, 3):
        assert fresh.lookup(prompt["input_ids"]).num_tokens == 72
        assert_same(run(model, **prompt), run(model, fresh, **prompt))


@pytest.mark.parametrize(
    ("how", "saver"),
    [(how, "the same process") for how in DAMAGES]
    + [(how, saver) for how in ("brace of the header", "last row") for saver in ("another store", "another order")],
)
def test_what_is_damaged_is_replaced_when_it_is_saved_again(how: str, saver: str, tmp_path: Path) -> None:
    model = tiny("llama")
    cache = computed(model, 2, 3)
    num_blocks = cache.store.save(tmp_path).num_blocks
    paths = saved_paths(tmp_path)
    assert len(paths) > 2
    damaged = paths[1]
    whole = damaged.read_bytes()
    num_damaged = len(read_saved_file(damaged).blocks)
    damaged.write_bytes(DAMAGES[how](bytearray(whole)))
    assert damaged.read_bytes() != whole
    if saver != "the same process":
        cache = computed(model, *((2, 3) if saver == "another store" else (3, 2)))
    saved = cache.store.save(tmp_path)
    assert [*saved.replaced] == [str(damaged)]
    assert f"{damaged} is damaged" in saved.replaced[str(damaged)]
    assert 1 <= saved.num_blocks <= num_damaged
    assert saved.num_blocks + saved.num_known == num_blocks
    assert not saved.not_saved
    there_again(model, tmp_path, num_blocks)
    again = cache.store.save(tmp_path)
    assert (again.num_blocks, again.num_known, again.replaced) == (0, num_blocks, {})


@pytest.mark.parametrize("kind", ["gemma3", "lfm2", "qwen3_next"])
def test_windows_and_states_are_replaced_too(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    cache = computed(model, 2, 3)
    cache.store.save(tmp_path)
    fresh = new_cache(model)
    before = fresh.store.load(tmp_path)
    for path in saved_paths(tmp_path):
        data = bytearray(path.read_bytes())
        for place in range(header_end(data), len(data), 4096):
            data[place] ^= 1
        path.write_bytes(data)
    saved = cache.store.save(tmp_path)
    assert len(saved.replaced) > 1
    fresh = new_cache(model)
    after = fresh.store.load(tmp_path)
    assert (after.num_blocks, after.not_loaded) == (before.num_blocks, before.not_loaded)
    for prompt in asked(2, 3, 4):
        assert_same(run(model, **prompt), run(model, fresh, **prompt))


def test_what_is_whole_in_a_damaged_file_stays_also_where_it_is_not_cached_here(tmp_path: Path) -> None:
    model = tiny("llama")
    computed(model, 2, 3).store.save(tmp_path)
    names = {block.digest for path in saved_paths(tmp_path) for block in read_saved_file(path).blocks}
    for path in saved_paths(tmp_path):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    cache = computed(model, 2)
    saved = cache.store.save(tmp_path, [BASE])
    assert saved.replaced
    left = {block.digest for path in saved_paths(tmp_path) for block in read_saved_file(path).blocks}
    lost = sum(saved.not_saved.values())
    assert len(names - left) == lost
    assert [*saved.not_saved] == ["they were in a damaged file, and are not among those that are saved now"][:lost]
    fresh = new_cache(model)
    fresh.store.load(tmp_path)
    for prompt in asked(2, 3):
        assert_same(run(model, **prompt), run(model, fresh, **prompt))


def test_files_of_others_stay(tmp_path: Path) -> None:
    cache = computed(tiny("llama"), 2)
    cache.store.save(tmp_path)
    computed(tiny("gemma3"), 2).store.save(tmp_path)
    others = {path: path.read_bytes() for path in saved_paths(tmp_path) if "gemma3" in str(read_saved_file(path).facts)}
    for path, data in others.items():
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # of another model: not looked at
    theirs = tmp_path / "weights.safetensors"
    theirs.write_bytes(b"")
    assert cache.store.save(tmp_path).replaced == {}
    assert theirs.exists()
    assert all(path.exists() for path in others)


def test_a_reader_that_has_the_damaged_file_open_keeps_it_and_one_that_opens_it_later_misses(tmp_path: Path) -> None:
    model = tiny("llama")
    cache = computed(model, 2, 3)
    cache.store.save(tmp_path)
    path = saved_paths(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    reader = new_cache(model)
    load = reader.store.blocks.tiers.load_from

    def meanwhile(*given: Any) -> Any:
        patch.setattr(reader.store.blocks.tiers, "load_from", load)
        with safe_open(path, framework="pt") as opened:
            before = opened.get_tensor("blocks.0")
            cache.store.save(tmp_path)
            assert opened.get_tensor("blocks.0").equal(before)
        return load(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader.store.blocks.tiers, "load_from", meanwhile)
        loaded = reader.store.load(tmp_path)
    assert loaded.num_blocks + sum(loaded.not_loaded.values()) == 20
    for prompt in asked(2, 3):
        assert_same(run(model, **prompt), run(model, reader, **prompt))
    there_again(model, tmp_path, 20)


def test_killed_between_two_steps_of_mending_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    cache = computed(model, 2, 3)
    cache.store.save(tmp_path)
    path = saved_paths(tmp_path)[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    names = {block.digest for each in saved_paths(tmp_path) for block in read_saved_file(each).blocks}

    def die(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(saving, "remove", die)
        with pytest.raises(KeyboardInterrupt):
            cache.store.save(tmp_path)
    assert {block.digest for each in saved_paths(tmp_path) for block in read_saved_file(each).blocks} == names
    assert [*cache.store.save(tmp_path).replaced] == [str(path)]
    there_again(model, tmp_path, 20)


def test_where_there_is_nothing_to_save_nothing_is_touched(tmp_path: Path) -> None:
    cache = computed(tiny("llama"), 2)
    cache.store.save(tmp_path)
    os.truncate(saved_paths(tmp_path)[0], 50)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert cache.store.save(tmp_path, "pinned").replaced == {}
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_that_cannot_be_removed_is_not_said_to_be_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = computed(tiny("llama"), 2)
    cache.store.save(tmp_path)
    path = saved_paths(tmp_path)[0]
    os.truncate(path, 50)
    monkeypatch.setattr(saving, "remove", lambda _: None)  # such as in a folder that only its owner may take files from
    assert cache.store.save(tmp_path).replaced == {}
