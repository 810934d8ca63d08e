"""The format of a file of saved blocks: what was written is read, and whatever else is in it is refused."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file, safe_open, save_file

from hf_paged_cache import SavedBlocksError
from hf_paged_cache.blocks.hashing import BlockHash, digest_behind
from hf_paged_cache.blocks.roots import RootFacts
from hf_paged_cache.kv.contents import Part, Piece
from hf_paged_cache.kv.states import StateKey
from hf_paged_cache.tiers.base import BLOCKS, STATES
from hf_paged_cache.tiers.saved_file import (
    SavedContents,
    SavedFile,
    facts_digest,
    read_rows,
    read_saved_file,
    remove_unfinished,
    saved_paths,
    write_saved_file,
)

CPU = torch.device("cpu")
FACTS = {"model": "M"}
ROOT = RootFacts(facts_digest(FACTS), b"", b"\2\3", "an adapter", 3, 5)
OF_BLOCKS = Part(
    "blocks", None, CPU, 32, (Piece((0, "key"), 0, 16, (1, 2, 2), torch.float32), Piece((1, "value"), 16, 8, (1, 2, 2), torch.bfloat16))
)  # fmt: skip
OF_WINDOW = Part("window", 4, CPU, 16, (Piece((2, "key"), 0, 16, (1, 2, 2), torch.float32),))
OF_STATES = Part("states", None, CPU, 16, (Piece(StateKey(3, "conv", 0), 0, 12, (3,), torch.float32),))


def chain(*token_ids: int) -> tuple[BlockHash, ...]:
    """A block of two tokens for each id."""
    blocks, parent = [], ROOT.root()
    for token_id in token_ids:
        tokens = b"".join(token.to_bytes(8, "little", signed=True) for token in (token_id, -token_id))
        blocks.append(BlockHash(digest_behind(parent, tokens), tokens, parent))
        parent = blocks[-1].digest
    return tuple(blocks)


def rows(number: int, part: Part) -> torch.Tensor:
    return torch.randint(0, 256, (number, part.num_bytes), dtype=torch.uint8)


@pytest.fixture
def written(tmp_path: Path) -> tuple[SavedFile, dict[Any, list[torch.Tensor]]]:
    contents = (
        SavedContents(BLOCKS, (OF_BLOCKS,), (0, 1, 2), ()),
        SavedContents(4, (OF_WINDOW,), (2,), ()),
        SavedContents(STATES, (OF_STATES,), (0, 2), ()),
    )
    held = {BLOCKS: [rows(3, OF_BLOCKS)], 4: [rows(1, OF_WINDOW)], STATES: [rows(2, OF_STATES)]}
    file = SavedFile(tmp_path / "x.safetensors", 0, 2, FACTS, {"size": "1"}, (ROOT,), chain(7, 8, 9), contents)
    return write_saved_file(file, held), held


def test_what_was_written_is_read(written: Any) -> None:
    file, held = written
    assert read_saved_file(file.path) == file
    for content in file.contents:
        number = len(content.blocks)
        ((all_rows,),) = read_rows(file, content.kind, [(0, number)])
        assert all_rows.equal(held[content.kind][0])
        ((last, first),) = read_rows(file, content.kind, [(number - 1, 1), (0, 1)])
        assert last.equal(all_rows[-1:])
        assert first.equal(all_rows[:1])


def test_a_file_is_its_owners_alone_and_nothing_is_left_beside_it(written: Any) -> None:
    file, _ = written
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert [*file.path.parent.iterdir()] == [file.path]
    assert file.num_bytes == file.path.stat().st_size


def test_what_cannot_be_written_leaves_nothing(written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, held = written

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half of it")
        assert saved_paths(tmp_path) == [file.path], "others would find half of it"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hf_paged_cache.tiers.saved_file.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        write_saved_file(file._replace(path=tmp_path / "y.safetensors"), held)
    assert [*tmp_path.iterdir()] == [file.path]


def test_unfinished_files_are_not_looked_at_and_are_removed(written: Any, tmp_path: Path) -> None:
    file, _ = written
    (tmp_path / ".a.unfinished").write_bytes(b"x")
    (tmp_path / ".b.safetensors").write_bytes(b"x")
    assert saved_paths(tmp_path) == [file.path]
    remove_unfinished(tmp_path)
    assert not (tmp_path / ".a.unfinished").exists()


def rewrite(path: Path, change: Any, *, with_checksum: bool = True) -> None:
    """Let a file say something else of itself."""
    with safe_open(path, framework="pt") as opened:
        metadata = opened.metadata()
    manifest = json.loads(metadata["manifest"])
    change(manifest)
    metadata["manifest"] = json.dumps(manifest)
    if with_checksum:
        metadata["xxh3_128"] = xxhash.xxh3_128_hexdigest(metadata["manifest"].encode())
    save_file(load_file(path), path, metadata)


def set_at(*path: Any, to: Any) -> Any:
    def change(manifest: Any) -> None:
        for step in path[:-1]:
            manifest = manifest[step]
        manifest[path[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            set_at("version", to=2),
            "is of version 2 of the format, and this is version 1: read it with the .* that has written it, or save",
        ),
        (set_at("block_size", to=3), "other tokens than its digest says"),
        (set_at("block_size", to=True), "is no number of at least 1"),
        (set_at("blocks", 1, "tokens", to=[1, 2]), "other tokens than its digest says"),
        (set_at("blocks", 1, "tokens", to=[2**70, 2]), "damaged"),
        (set_at("blocks", 1, "digest", to="zz"), "damaged"),
        (set_at("contents", 0, "blocks", to=[0, 1, 5]), "its header contradicts itself"),
        (set_at("contents", 0, "blocks", to=[0, 1, 1]), "its header contradicts itself"),
        (set_at("contents", 0, "blocks", to=[0, 1]), "its header contradicts itself"),
        (set_at("contents", 0, "checksums", to=[]), "its header contradicts itself"),
        (set_at("contents", 0, "parts", 0, "num_bytes", to=16), "its header contradicts itself"),
        (set_at("contents", 0, "parts", 0, "num_bytes", to=64), "a tensor has another shape"),
        (set_at("contents", 0, "parts", 0, "pieces", 1, "offset", to=8), "its header contradicts itself"),
        (set_at("contents", 0, "parts", 0, "pieces", 1, "num_bytes", to=16), "its header contradicts itself"),
        (set_at("contents", 0, "parts", 0, "pieces", 1, "dtype", to="object"), "damaged"),
        (set_at("contents", 1, "kind", to="blocks"), "holds a kind of content twice"),
        (set_at("contents", 1, "kind", to=-4), "is no number of at least 1"),
        (set_at("roots", to=[{}]), "damaged"),
        (set_at("roots", 0, "adapter", to="another"), "a root has another digest than what it stands for"),
        (set_at("model", "facts", "model", to="N"), "a root has another digest than what it stands for"),
        (set_at("model", to="M"), "damaged"),
    ],
)
def test_a_header_that_says_what_cannot_be_is_refused(written: Any, change: Any, why: str) -> None:
    file, _ = written
    rewrite(file.path, change)
    with pytest.raises(SavedBlocksError, match=why):
        read_saved_file(file.path)


def test_a_header_that_was_changed_a_file_that_was_cut_and_one_of_others_are_refused(
    written: Any, tmp_path: Path
) -> None:
    file, _ = written
    whole = file.path.read_bytes()
    rewrite(file.path, set_at("block_size", to=4), with_checksum=False)
    with pytest.raises(SavedBlocksError, match="its header is not what was written"):
        read_saved_file(file.path)
    for length in (0, 4, 100, len(whole) - 1):
        file.path.write_bytes(whole[:length])
        with pytest.raises(SavedBlocksError, match="damaged"):
            read_saved_file(file.path)
    save_file({"weight": torch.ones(2)}, file.path)
    with pytest.raises(SavedBlocksError, match="holds no saved blocks"):
        read_saved_file(file.path)


def test_rows_that_were_changed_are_refused_and_others_read(written: Any) -> None:
    file, held = written
    with safe_open(file.path, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file.path)
    tensors["blocks.0"][1, 5] ^= 1
    save_file(tensors, file.path, metadata)
    with pytest.raises(SavedBlocksError, match="blocks are not what was written"):
        read_rows(file, BLOCKS, [(0, 3)])
    ((first,),) = read_rows(file, BLOCKS, [(0, 1)])
    assert first.equal(held[BLOCKS][0][:1])
    read_rows(file, 4, [(0, 1)])


@pytest.mark.parametrize(
    "read", [lambda file: read_saved_file(file.path), lambda file: read_rows(file, BLOCKS, [(0, 1)])]
)
def test_a_file_that_goes_while_it_is_opened_has_gone(written: Any, read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch maps a file after its header was read, and says in an error of its own that it is not there."""
    file, _ = written
    mapped = torch.UntypedStorage.from_file

    def gone(name: str, *given: Any, **named: Any) -> Any:
        file.path.unlink()
        return mapped(name, *given, **named)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", gone)
    with pytest.raises(OSError, match=r"cannot be read: .*No such file"):
        read(file)
