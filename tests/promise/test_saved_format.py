"""The format of saved blocks: what other code writes as docs/save_and_load.md says is loaded, no damaged byte is."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache, saved_report
from hf_paged_cache.tiers.folder import saved_paths

from ..internals import zero_blocks
from ..reference import assert_same, batch, is_same, row, run
from ..tiny_models import tiny

# two blocks of four tokens of a tiny Llama, saved in the former format
OLDER = Path(__file__).parent / "saved_earlier"
SIZE = 4
PREFIX = row((1, 40))
PROMPT = batch([*PREFIX, *row((2, 9))])


def new_cache(model: PreTrainedModel) -> PagedPrefixCache:
    return PagedPrefixCache(model, block_size=SIZE)


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def write_by_hand(model: Any, folder: Path, change: Any = lambda said: None) -> dict[str, Any]:
    """One file with a prefix's blocks, by no code of the package but the model's facts; what it says of itself."""
    identity = new_cache(model).store.fingerprint.identity()
    facts = dict(identity.facts)
    of_root = [sha256(json.dumps(facts, sort_keys=True).encode()), b"", b"", b"", b"0 0"]
    root = sha256(*(len(part).to_bytes(8, "little") + part for part in of_root))
    blocks, parent = [], root
    for start in range(0, len(PREFIX), SIZE):
        tokens = PREFIX[start : start + SIZE]
        digest = sha256(parent, *(token.to_bytes(8, "little", signed=True) for token in tokens))
        blocks.append([parent.hex(), tokens])
        parent = digest
    with torch.no_grad():
        layers = model(torch.tensor([PREFIX]), use_cache=True).past_key_values.layers
    pieces, columns = [], []
    for layer_idx, layer in enumerate(layers):
        for name, states in (("key", layer.keys), ("value", layer.values)):
            _, heads, _, head_dim = states.shape
            of_blocks = states[0].view(heads, len(blocks), SIZE, head_dim).transpose(0, 1).reshape(len(blocks), -1)
            columns.append(of_blocks.contiguous().view(torch.uint8))
            pieces.append([[layer_idx, name], [heads, SIZE, head_dim], "float32"])
    rows = torch.cat(columns, dim=1)
    manifest = {
        "version": 2,
        "block_size": SIZE,
        "model": {"facts": facts, "settings": dict(identity.settings)},
        "roots": [["", "", 0, 0]],
        "blocks": blocks,
        "contents": [
            [
                "blocks",
                [pieces],
                [*range(len(blocks))],
                [[xxhash.xxh3_128_hexdigest(each.numpy().tobytes()) for each in rows]],
            ]
        ],
    }
    change(manifest)
    said = json.dumps(manifest)
    metadata = {
        "format": "hf_paged_cache blocks",
        "manifest": said,
        "xxh3_128": xxhash.xxh3_128_hexdigest(said.encode()),
    }
    folder.mkdir(exist_ok=True)
    save_file({"blocks.0": rows}, folder / "by-hand.safetensors", metadata)
    return manifest


def test_what_other_code_has_written_in_the_format_is_loaded_and_gives_the_same(tmp_path: Path) -> None:
    model = tiny("llama")
    write_by_hand(model, tmp_path)
    assert [(each.problem, each.num_blocks) for each in saved_report(tmp_path)] == [(None, 10)]
    for is_tier in (False, True):
        cache = new_cache(model)
        if is_tier:
            cache = PagedPrefixCache(model, block_size=SIZE, disk_folder=tmp_path)
        else:
            loaded = cache.store.load(tmp_path)
            assert (loaded.num_blocks, loaded.not_loaded) == (10, {})
        assert_same(run(model, **PROMPT), run(model, cache, **PROMPT))
        (of_row,) = cache.last_call.rows
        assert (of_row.matched_tokens, of_row.disk_tokens) == (40, 40 if is_tier else 0)
        cache.check()
    zero_blocks(cache)
    assert not is_same(run(model, **PROMPT), run(model, cache, **PROMPT))


def test_what_is_written_is_what_the_page_says(tmp_path: Path) -> None:
    model = tiny("llama")
    by_hand = write_by_hand(model, tmp_path / "by hand")
    cache = new_cache(model)
    cache.prefill(PREFIX)
    cache.store.save(tmp_path / "ours")
    (path,) = saved_paths(tmp_path / "ours")
    with (
        safe_open(path, framework="pt") as ours,
        safe_open(tmp_path / "by hand" / "by-hand.safetensors", framework="pt") as theirs,
    ):
        metadata = ours.metadata()
        assert metadata.keys() == theirs.metadata().keys()
        manifest = json.loads(metadata["manifest"])
        for (checksums,) in (said["contents"][0].pop() for said in (manifest, by_hand)):
            assert len(checksums) == 10
        assert manifest == by_hand
        assert [*ours.keys()] == [*theirs.keys()] == ["blocks.0"]
        held, expected = (opened.get_tensor("blocks.0").view(torch.float32) for opened in (ours, theirs))
        torch.testing.assert_close(held, expected)


def test_a_folder_of_the_former_format_is_refused_by_name_and_nothing_of_it_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, cache = tiny("llama"), new_cache(tiny("llama"))
    (older,) = saved_paths(OLDER)
    path = tmp_path / older.name
    for copied in (path, tmp_path / "another.safetensors"):
        copied.write_bytes(older.read_bytes())
    loaded = cache.store.load(tmp_path)
    why = (
        f"{tmp_path} has files of version 1 of the format, and this is version 2: read them with the hf_paged_cache "
        "that has written them, or save the blocks again, into another folder"
    )
    assert (loaded.num_blocks, loaded.not_loaded) == (0, {why: 0})
    assert [each.problem for each in saved_report(tmp_path)] == [why, why]
    cache.prefill(PREFIX)
    assert cache.store.save(tmp_path).num_blocks == 10
    shared = PagedPrefixCache(model, block_size=SIZE, disk_folder=tmp_path)
    assert_same(run(model, **PROMPT), run(model, shared, **PROMPT))
    assert shared.last_call.rows[0].disk_tokens == 40
    assert caplog.text.count(why) == 1
    assert path.read_bytes() == older.read_bytes()


def set_at(*path: Any, to: Any) -> Any:
    def change(said: Any) -> Any:
        for step in path[:-1]:
            said = said[step]
        said[path[-1]] = to

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_at("block_size", to=3),
        set_at("blocks", 1, 1, to=[1, 2]),
        set_at("blocks", 1, 1, to=[2**70, 2, 3, 4]),
        set_at("blocks", 1, 0, to="zz"),
        set_at("contents", 0, 2, to=[0, 1, 50]),
        set_at("contents", 0, 2, 0, to=-1),
        set_at("contents", 0, 3, to=[]),
        set_at("contents", 0, 1, 0, 0, 2, to="object"),
        set_at("contents", 0, 1, 0, 0, 2, to="float64"),
        set_at("contents", 0, 1, 0, 0, 1, to=[1, 4, 4]),
        set_at("roots", to=[{}]),
        set_at("model", to="M"),
    ],
)
def test_a_manifest_that_says_what_cannot_be_is_refused(change: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    write_by_hand(model, tmp_path, change)
    loaded = new_cache(model).store.load(tmp_path)
    assert loaded.num_blocks == 0
    ((why, _),) = loaded.not_loaded.items()
    assert "by-hand.safetensors holds no saved blocks, or is damaged" in why


def test_one_bit_of_any_region_of_a_file_is_seen(tmp_path: Path) -> None:
    cache = new_cache(tiny("llama"))
    cache.prefill(PREFIX)
    cache.store.save(tmp_path)
    (path,) = saved_paths(tmp_path)
    whole = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(whole[:8], "little")
    for place in (*range(8), *range(8, end, 41), *range(end, len(whole), 997), len(whole) - 1):
        whole[place] ^= 4
        path.write_bytes(whole)
        whole[place] ^= 4
        (report,) = saved_report(tmp_path)
        assert report.problem is not None, f"a bit of byte {place} is another one"
    for cut in (b"", whole[:100], whole[:-100], whole + b"\0", bytes(len(whole))):
        path.write_bytes(cut)
        assert "is damaged" in str(saved_report(tmp_path)[0].problem)
