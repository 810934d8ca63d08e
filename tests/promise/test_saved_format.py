"""The format of saved blocks stays: what other code has written as docs/save_and_load.md says is loaded, and so is an older folder."""

from __future__ import annotations

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
from hf_paged_cache.model.identity import ModelIdentity
from hf_paged_cache.tiers.saved_file import read_saved_file, saved_paths

from ..internals import zero_blocks
from ..reference import assert_same, batch, is_same, row, run
from ..tiny_models import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

# two blocks of four tokens of a tiny Llama, saved by an earlier state of this package
OLDER = Path(__file__).parent / "saved_earlier"
SIZE = 4
PREFIX = row((1, 40))
PROMPT = batch([*PREFIX, *row((2, 9))])


def new_cache(model: PreTrainedModel) -> PagedPrefixCache:
    return PagedPrefixCache(model, block_size=SIZE)


def sha256(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def write_by_hand(model: Any, folder: Path, **other: Any) -> dict[str, Any]:
    """One file with a prefix's blocks, by no code of the package but the model's facts; what it says of itself."""
    identity = new_cache(model).store.conditioning.identity()
    facts = dict(identity.facts)
    of_root = [sha256(json.dumps(facts, sort_keys=True).encode()), b"", b"", b"", b"0 0"]
    root = sha256(*(len(part).to_bytes(8, "little") + part for part in of_root))
    blocks, parent = [], root
    for start in range(0, len(PREFIX), SIZE):
        tokens = PREFIX[start : start + SIZE]
        digest = sha256(parent, *(token.to_bytes(8, "little", signed=True) for token in tokens))
        blocks.append({"digest": digest.hex(), "parent": parent.hex(), "tokens": tokens})
        parent = digest
    with torch.no_grad():
        layers = model(torch.tensor([PREFIX]), use_cache=True).past_key_values.layers
    pieces, columns, offset = [], [], 0
    for layer_idx, layer in enumerate(layers):
        for name, states in (("key", layer.keys), ("value", layer.values)):
            _, heads, _, head_dim = states.shape
            of_blocks = states[0].view(heads, len(blocks), SIZE, head_dim).transpose(0, 1).reshape(len(blocks), -1)
            columns.append(of_blocks.contiguous().view(torch.uint8))
            pieces.append(
                {
                    "key": [layer_idx, name],
                    "offset": offset,
                    "num_bytes": columns[-1].shape[1],
                    "shape": [heads, SIZE, head_dim],
                    "dtype": "float32",
                }
            )
            offset += columns[-1].shape[1]
    rows = torch.cat(columns, dim=1)
    manifest = {
        "version": 1,
        "block_size": SIZE,
        "model": {"facts": facts, "settings": dict(identity.settings)},
        "roots": [{"digest": root.hex(), "regime": "", "adapter": "", "counted_from": 0, "first_position": 0}],
        "blocks": blocks,
        "contents": [
            {
                "kind": "blocks",
                "parts": [{"kind": "blocks", "window": None, "num_bytes": offset, "pieces": pieces}],
                "blocks": [*range(len(blocks))],
                "checksums": [[xxhash.xxh3_128_hexdigest(each.numpy().tobytes()) for each in rows]],
            }
        ],
        **other,
    }
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
        for (checksums,) in (said["contents"][0].pop("checksums") for said in (manifest, by_hand)):
            assert len(checksums) == 10
        assert manifest == by_hand
        assert [*ours.keys()] == [*theirs.keys()] == ["blocks.0"]
        held, expected = (opened.get_tensor("blocks.0").view(torch.float32) for opened in (ours, theirs))
        torch.testing.assert_close(held, expected)


def test_another_version_of_the_format_is_refused_by_name_and_nothing_of_it_is_taken(tmp_path: Path) -> None:
    model, cache = tiny("llama"), new_cache(tiny("llama"))
    write_by_hand(model, tmp_path, version=0)
    loaded = cache.store.load(tmp_path)
    assert loaded.num_blocks == 0
    ((why, _),) = loaded.not_loaded.items()
    assert "is of version 0 of the format, and this is version 1: read it with the hf_paged_cache that" in why
    assert [each.problem for each in saved_report(tmp_path)] == [why]
    before = (tmp_path / "by-hand.safetensors").read_bytes()
    cache.prefill(PREFIX)
    assert cache.store.save(tmp_path).replaced == {}
    shared = PagedPrefixCache(model, block_size=SIZE, disk_folder=tmp_path)
    assert_same(run(model, **PROMPT), run(model, shared, **PROMPT))
    assert (tmp_path / "by-hand.safetensors").read_bytes() == before


def test_a_folder_that_was_saved_earlier_is_read_to_its_last_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    (report,) = saved_report(OLDER)
    assert (report.problem, report.num_blocks, report.num_tokens) == (None, 2, 8)
    file = read_saved_file(report.path)
    cache = new_cache(tiny("llama"))
    there = cache.store.load(OLDER)
    if not there.num_blocks:  # by other versions of torch or transformers, or with other weights
        assert all("it was computed by another model" in why for why in there.not_loaded)
    as_then = ModelIdentity(file.facts, file.settings)
    monkeypatch.setattr(type(cache.store.conditioning), "identity", lambda _: as_then)
    loaded = new_cache(tiny("llama")).store.load(OLDER)
    assert (loaded.num_blocks, loaded.not_loaded) == (2, {})
    assert loaded.num_bytes == 2 * 2**11


def test_one_bit_of_a_folder_that_was_saved_earlier_is_seen(tmp_path: Path) -> None:
    (path,) = saved_paths(OLDER)
    data = bytearray(path.read_bytes())
    for place in range(8, len(data), 97):
        data[place] ^= 1
        (tmp_path / path.name).write_bytes(data)
        data[place] ^= 1
        (report,) = saved_report(tmp_path)
        assert report.problem is not None, f"a bit of byte {place} is another one"
