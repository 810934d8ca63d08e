"""What one store saves and another loads: the same results; where it is not of this model, nothing, and why."""

import copy
import os
import resource
import signal
import stat
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_paged_cache import CacheArgumentError, NotPortableError, PagedPrefixCache, PrefixStore, saved_report
from hf_paged_cache.tiers.folder import saved_paths

from ..internals import zero_blocks, zero_states
from ..reference import assert_same, at_once, batch, is_same, row, run
from ..tiny_models import tiny

KINDS = ["llama", "gemma3", "mistral", "qwen3_next", "lfm2"]
BASE = row((1, 64))


def new_cache(model: PreTrainedModel, **given: Any) -> PagedPrefixCache:
    return PagedPrefixCache(model, **{"block_size": 4, **given})


def asked(*ends: int) -> list[dict[str, Any]]:
    return [batch([*BASE, *row((end, 9))]) for end in ends]


def save(model: PreTrainedModel, folder: Path, **given: Any) -> PagedPrefixCache:
    """Two prompts after one prefix, saved."""
    cache = new_cache(model)
    for prompt in asked(2, 3):
        run(model, cache, **prompt, max_new_tokens=2)
    cache.prefill(BASE)
    saved = cache.store.save(folder, **given)
    assert saved.num_blocks > 0
    assert not saved.not_saved
    return cache


@pytest.mark.parametrize("kind", KINDS)
def test_another_store_goes_on_from_what_was_saved(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    save(model, tmp_path)
    twin = copy.deepcopy(model)  # at other addresses
    cache = new_cache(twin)
    loaded = cache.store.load(tmp_path)
    assert loaded.num_blocks >= 16
    assert loaded.not_loaded.keys() <= {"no state was saved after which they could be resumed"}
    cache.check()
    for prompt in (*asked(2, 3, 4), batch(BASE[:50]), batch([*BASE, *row((5, 9))], [*BASE[:60], *row((6, 13))])):
        assert_same(run(model, **prompt), run(twin, cache, **prompt))
        cache.check()
    again = cache.store.load(tmp_path)
    assert (again.num_blocks, again.num_bytes) == (0, 0)
    assert again.num_known >= loaded.num_blocks
    files = saved_paths(tmp_path)
    assert cache.store.save(tmp_path).num_known >= loaded.num_blocks
    assert {*files} < {*saved_paths(tmp_path)}
    assert cache.store.save(tmp_path).num_blocks == 0
    cache.store.reset_prefix_cache()
    cache.reset()
    assert cache.store.load(tmp_path).num_blocks > loaded.num_blocks
    (prompt,) = asked(7)
    reference = run(twin, **prompt)
    zero_blocks(cache)
    zero_states(cache)
    output = run(twin, cache, **prompt)
    assert cache.last_call.rows[0].matched_tokens >= 48
    assert not is_same(reference, output)


def test_prefixes_by_their_tokens_pins_and_all(tmp_path: Path) -> None:
    model = tiny("llama")
    cache = new_cache(model)
    for prompt in asked(2, 3):
        run(model, cache, **prompt, max_new_tokens=1)
    cache.pin(BASE[:32])
    number = {
        name: cache.store.save(tmp_path / name, prefixes).num_blocks
        for name, prefixes in (
            ("all", None),
            ("pinned", "pinned"),
            ("some", [BASE[:40], torch.tensor([BASE[:20]])]),
            ("one", BASE[:40]),
            ("a tensor", torch.tensor(BASE[:40])),
        )
    }
    assert number == {"all": 20, "pinned": 8, "some": 10, "one": 10, "a tensor": 10}
    unknown = cache.store.save(tmp_path / "none", [row((77, 20))])
    assert (unknown.num_blocks, [*unknown.not_saved.values()]) == (0, [0])
    assert "compute it first" in next(iter(unknown.not_saved))
    cache.unpin()
    assert cache.store.save(tmp_path / "none", "pinned").not_saved == {"nothing is pinned": 0}
    with pytest.raises(CacheArgumentError, match=r"such as tokenizer.*, 'pinned', or None"):
        cache.store.save(tmp_path, "pins")
    with pytest.raises(CacheArgumentError, match="prefix 0"):
        cache.store.save(tmp_path, [torch.ones(2, 3)])


def test_what_is_in_a_pool_stays_and_what_does_not_fit_is_said(tmp_path: Path) -> None:
    model = tiny("llama")
    save(model, tmp_path)
    cache = new_cache(model, num_blocks=14)
    loaded = cache.store.load(tmp_path)
    assert loaded.num_blocks == 13
    assert loaded.not_loaded == {"there is no room for them in the pool": 7}
    cache.check()
    assert cache.lookup(BASE).num_tokens == 52
    for prompt in asked(2):
        cache = new_cache(model, num_blocks=25)
        cache.store.load(tmp_path)
        assert_same(run(model, **prompt), run(model, cache, **prompt))


def other_weights(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.view(-1)[17] += 1e-3  # one value


def test_what_another_model_or_version_computed_and_other_block_sizes_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    save(model, tmp_path)
    told = [
        new_cache(tiny("mistral")).store.load(tmp_path).not_loaded,
        new_cache(model, block_size=8).store.load(tmp_path).not_loaded,
    ]
    other = copy.deepcopy(model)
    other_weights(other)
    told.append(new_cache(other).store.load(tmp_path).not_loaded)
    monkeypatch.setattr("hf_paged_cache.model.identity._version", lambda package: "0.1")
    told.append(new_cache(model).store.load(tmp_path).not_loaded)
    whys = [" ".join(each) for each in told]
    assert "model is modeling_llama.LlamaForCausalLM, here modeling_mistral.MistralForCausalLM" in whys[0]
    assert whys[1] == "its blocks have 4 tokens, and those of this store 8"
    assert "other weights" in whys[2]
    assert "transformers is" in whys[3]
    assert [sum(each.values()) for each in told] == [20] * 4


@pytest.mark.parametrize("kind", [dict, PreTrainedConfig])
def test_what_a_mapping_or_a_config_within_the_config_says_is_of_the_model(kind: Any, tmp_path: Path) -> None:
    """Such as attn_config.clip_qkv of DBRX, and rope_parameters["mscale_all_dim"] of DeepSeek V3."""
    model, other = copy.deepcopy(tiny("llama")), copy.deepcopy(tiny("llama"))
    model.config.attn_config, other.config.attn_config = kind(clip_qkv=8.0), kind(clip_qkv=0.5)
    save(model, tmp_path)
    loaded = new_cache(other).store.load(tmp_path)
    why = "it was computed by another model: attn_config.clip_qkv is 8.0, here 0.5"
    assert (loaded.num_blocks, [*loaded.not_loaded]) == (0, [why])


def test_what_has_a_salt_is_not_written_and_not_found(tmp_path: Path) -> None:
    model = tiny("llama")
    tenant = new_cache(model, cache_salt="a tenant")
    run(model, tenant, **asked(2)[0], max_new_tokens=1)
    assert tenant.store.save(tmp_path).num_blocks == 0
    assert not saved_paths(tmp_path)
    save(model, tmp_path)
    other = new_cache(model, cache_salt="a tenant")
    other.store.load(tmp_path)
    assert other.lookup(BASE).num_tokens == 0


def test_a_model_under_a_hook_is_neither_saved_nor_loaded_and_what_was_computed_before_a_change_is_not(
    tmp_path: Path,
) -> None:
    model = copy.deepcopy(tiny("llama"))
    cache = save(model, tmp_path)
    handle = model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 1.5)
    for work in (cache.store.save, cache.store.load):
        with pytest.raises(NotPortableError, match="hooks or replaces the forward of a LlamaMLP"):
            work(tmp_path)
    handle.remove()
    with torch.autocast("cpu", torch.bfloat16):
        run(model, cache, **asked(2)[0], max_new_tokens=1)
    saved = cache.store.save(tmp_path / "others")
    assert saved.num_blocks == 20
    assert saved.not_saved == {"the model has changed since they were computed, or blocks before them were evicted": 18}


def test_the_folder_and_its_files_are_their_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    save(tiny("llama"), folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


@pytest.mark.parametrize(("mode", "of_folder"), [(0o660, 0o770), (0o640, 0o750), (0o664, 0o775)])
def test_a_folder_and_its_files_are_those_of_a_group_where_that_is_asked_for(
    mode: int, of_folder: int, tmp_path: Path
) -> None:
    folder = tmp_path / "made" / "here"
    before = os.umask(0o077)
    try:
        save(tiny("llama"), folder, mode=mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == of_folder
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {mode}


def test_a_folder_that_is_there_keeps_its_permissions(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    save(tiny("llama"), tmp_path, mode=0o660)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    with pytest.raises(CacheArgumentError, match=r"^mode is 660; give permissions"):
        new_cache(tiny("llama")).store.save(tmp_path / "other", mode=660)
    assert not (tmp_path / "other").exists()


def test_a_folder_that_is_not_there_or_cannot_be_written_is_said(tmp_path: Path) -> None:
    cache = new_cache(tiny("llama"))
    run(tiny("llama"), cache, **asked(2)[0], max_new_tokens=1)
    with pytest.raises(CacheArgumentError, match="there is no folder"):
        cache.store.load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    for folder in (tmp_path / "file", tmp_path / "file" / "inside"):
        with pytest.raises(CacheArgumentError, match=r"file is a file; give a folder$"):
            cache.store.save(folder)
        with pytest.raises(CacheArgumentError, match=r"file is a file; give a folder$"):
            saved_report(folder)
    with pytest.raises(CacheArgumentError, match=r"^folder is None; give a folder's path$"):
        cache.store.load(None)  # type: ignore[arg-type]
    empty = cache.store.load(tmp_path)
    assert (empty.num_blocks, empty.not_loaded) == (0, {f"{tmp_path} holds no saved blocks": 0})


def test_a_disk_that_is_full_leaves_whole_files(tmp_path: Path) -> None:
    model = tiny("llama")
    cache = new_cache(model)
    run(model, cache, **asked(2)[0], max_new_tokens=1)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # of a file
        with pytest.raises(OSError, match="safetensors could not be written"):
            cache.store.save(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not saved_paths(tmp_path)
    assert cache.store.save(tmp_path).num_blocks == 18


def test_calls_go_on_while_others_save_and_load(tmp_path: Path) -> None:
    model, is_over = tiny("llama"), threading.Event()
    store = PrefixStore(model, block_size=4, num_blocks=100)

    def again_and_again(deed: Any) -> None:
        while not is_over.is_set():
            deed(tmp_path)

    def ask() -> None:
        try:
            for number in range(5):
                prompt = batch([*BASE[: 12 * number], *row((number, 20))])
                assert_same(run(model, **prompt), run(model, PagedPrefixCache(store), **prompt))
        finally:
            is_over.set()

    store.save(tmp_path)
    at_once(ask, partial(again_and_again, store.save), partial(again_and_again, store.load))
    store.check()


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2", "qwen3_next"])
def test_what_is_damaged_is_removed_and_saved_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hf_paged_cache.store.saved._FILE_BYTES", 2**14)
    model = tiny(kind)
    cache = save(model, tmp_path)
    before = new_cache(model).store.load(tmp_path)
    paths = saved_paths(tmp_path)
    assert len(paths) > 1
    for number, path in enumerate(paths):
        data = bytearray(path.read_bytes())
        data[-1 if number % 2 else 100] ^= 1
        path.write_bytes(data)
    damaged = new_cache(model)
    loaded = damaged.store.load(tmp_path)
    assert len([why for why in loaded.not_loaded if "is damaged" in why]) >= len(paths) // 2
    damaged.check()
    for prompt in asked(2, 3):
        assert_same(run(model, **prompt), run(model, damaged, **prompt))
    assert saved_paths(tmp_path) == paths  # who reads removes nothing
    saved = cache.store.save(tmp_path)
    assert saved.num_blocks >= before.num_blocks
    assert not {*paths} & {*saved_paths(tmp_path)}
    assert all(caplog.text.count(f"saved again: {path}") == 1 for path in paths)
    assert all(report.problem is None for report in saved_report(tmp_path))
    fresh = new_cache(model)
    after = fresh.store.load(tmp_path)
    assert (after.num_blocks, after.not_loaded) == (before.num_blocks, before.not_loaded)
    for prompt in asked(2, 3, 4):
        assert_same(run(model, **prompt), run(model, fresh, **prompt))


def test_files_of_others_and_of_other_models_stay(tmp_path: Path) -> None:
    cache = save(tiny("llama"), tmp_path)
    ours = saved_paths(tmp_path)
    save(tiny("gemma3"), tmp_path)
    theirs = {*saved_paths(tmp_path)} - {*ours}
    for path in theirs:
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # of another model: not looked at
    (tmp_path / "weights.safetensors").write_bytes(b"")
    cache.store.save(tmp_path)
    assert (tmp_path / "weights.safetensors").exists()
    assert all(path.exists() for path in theirs)
