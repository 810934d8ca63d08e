"""Owns the format of a file of blocks, which `save` and tiers write, and the checks before a file is used.

A file is in the safetensors format. For each part of each kind of content it has one tensor of bytes, [N, bytes of a
row], with a row for each block. Its manifest, JSON in the metadata, says what the rows are: see `SavedFile`.
"""

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..blocks import TOKEN_BYTES, BlockHash, RootFacts, digest_behind
from ..errors import SavedBlocksError
from ..kv.contents import STATES, Kind, Part, laid_out
from ..kv.states import StateKey
from .folder import VERSION, is_own

_FORMAT, _MANIFEST, _CHECKSUM = "hf_paged_cache blocks", "manifest", "xxh3_128"
_DIGESTS = {"weights": "weights", "modules": "modules or shapes", "rope": "rotary frequencies", "code": "own code"}


class DamagedFileError(SavedBlocksError):
    """Raised for a file that this package has written, and that is no longer what was written."""


class SavedContents(NamedTuple):
    """`SavedContents` says what a file has of one kind."""

    kind: Kind
    parts: tuple[Part, ...]  # of a row
    blocks: tuple[int, ...]  # for each row, the number of its block in the file
    checksums: tuple[tuple[str, ...], ...]  # for each part, the checksum of each row: XXH3, 128 bits


@dataclass(frozen=True)
class ModelIdentity:
    """`ModelIdentity` has all that keys and values depend on besides tokens, as text."""

    facts: Mapping[str, str]  # name of a fact -> its text; two models with equal facts compute the same
    settings: Mapping[str, str]  # name of a setting of the config -> its value; a fact is a digest of them

    @cached_property
    def digest(self) -> bytes:
        """Digest of the facts, 32 bytes."""
        return hashlib.sha256(json.dumps(dict(self.facts), sort_keys=True).encode()).digest()

    def why_other(self, other: "ModelIdentity") -> str:
        """Say in one sentence what another model has otherwise."""
        told: list[str] = []
        for name in _apart(self.facts, other.facts):
            if name == "settings":
                names = _apart(self.settings, other.settings)[:3]
                told += [f"{key} is {other.settings.get(key)}, here {self.settings.get(key)}" for key in names]
            elif name in _DIGESTS:
                told.append(f"other {_DIGESTS[name]}")
            else:
                told.append(f"{name} is {other.facts.get(name)}, here {self.facts.get(name)}")
        return "it was computed by another model: " + "; ".join(told)


def _apart(here: Mapping[str, str], there: Mapping[str, str]) -> list[str]:
    return [name for name in sorted({*here, *there}) if here.get(name) != there.get(name)]


class SavedFile(NamedTuple):
    """`SavedFile` is the header of a file: its model, its blocks, and where their contents lie."""

    path: Path
    num_bytes: int
    block_size: int
    model: ModelIdentity
    roots: tuple[RootFacts, ...]  # with the model's `digest` in place of a process's own
    blocks: tuple[BlockHash, ...]  # the parent of each is one of them, a root, or in another file
    contents: tuple[SavedContents, ...]

    def content_keys(self) -> list[tuple[Kind, bytes]]:
        """Return kind and digest of each content."""
        return [(each.kind, self.blocks[number].digest) for each in self.contents for number in each.blocks]

    def why_not(self, block_size: int, models: Sequence[ModelIdentity]) -> str | None:
        """Return why nothing of the file is for a model that is or was one of these; None if the file is for it."""
        if not models:
            return "what this model computes has no name that other processes understand"
        if all(model.facts != self.model.facts for model in models):
            return models[-1].why_other(self.model)
        if self.block_size != block_size:
            return f"its blocks have {self.block_size} tokens, and those of this store {block_size}"
        return None


def encoded(
    path: Path,
    model: ModelIdentity,
    roots: Iterable[RootFacts],
    rows_of: Mapping[Kind, tuple[Sequence[Part], Sequence[BlockHash], Sequence[Tensor]]],
) -> tuple[SavedFile, bytes]:
    """Return what a file says of itself, and its bytes.

    Args:
        rows_of: kind -> parts of a row, the block of each row, and for each part its rows, [N, bytes].
    """
    numbers: dict[BlockHash, int] = {}
    tensors: dict[str, Tensor] = {}
    contents = []
    for kind, (parts, blocks, rows) in rows_of.items():
        at = tuple(numbers.setdefault(block, len(numbers)) for block in blocks)
        of_parts = [part_rows.cpu().contiguous() for part_rows in rows]
        tensors |= {f"{kind}.{number}": part_rows for number, part_rows in enumerate(of_parts)}
        checksums = tuple(tuple(_checksum(row) for row in part_rows) for part_rows in of_parts)
        contents.append(SavedContents(kind, tuple(parts), at, checksums))
    block_size = len(next(iter(numbers)).token_bytes) // TOKEN_BYTES
    manifest = json.dumps(
        {
            "version": VERSION,
            "block_size": block_size,
            "model": {"facts": dict(model.facts), "settings": dict(model.settings)},
            "roots": [[root.regime.hex(), *root[3:]] for root in roots],
            "blocks": [[block.parent.hex(), [*array("q", block.token_bytes)]] for block in numbers],
            "contents": [[each.kind, [*map(_pieces, each.parts)], each.blocks, each.checksums] for each in contents],
        }
    )
    checksum = xxhash.xxh3_128_hexdigest(manifest.encode())
    data = save(tensors, {"format": _FORMAT, _MANIFEST: manifest, _CHECKSUM: checksum})
    return SavedFile(path, len(data), block_size, model, (*roots,), (*numbers,), (*contents,)), data


def _pieces(part: Part) -> list[Any]:
    return [[piece.key, piece.shape, str(piece.dtype).removeprefix("torch.")] for piece in part.pieces]


def read_saved_file(path: Path) -> SavedFile:
    """Read what a file says of itself, and check all of it but the rows, which `read_rows` checks.

    Raises:
        SavedBlocksError: the file is none of this package's, has another version of the format, is cut or is damaged.
        OSError: the file cannot be read.
    """
    num_bytes = path.stat().st_size
    try:
        with _opened(path) as opened:
            metadata = opened.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise ValueError("it does not say that it holds blocks")
            manifest = metadata[_MANIFEST]
            if xxhash.xxh3_128_hexdigest(manifest.encode()) != metadata[_CHECKSUM]:
                raise ValueError("its header is not what was written")
            said = json.loads(manifest)
            if said["version"] != VERSION:
                raise SavedBlocksError(
                    f"{path.parent} has files of version {said['version']} of the format, and this is version "
                    f"{VERSION}: read them with the hf_paged_cache that has written them, or save the blocks again, "
                    "into another folder"
                )
            file = _decoded(path, num_bytes, said)
            for content in file.contents:
                for number, part in enumerate(content.parts):
                    held = opened.get_slice(f"{content.kind}.{number}")
                    if held.get_dtype() != "U8" or held.get_shape() != [len(content.blocks), part.num_bytes]:
                        raise ValueError("a tensor has another shape than its header says")
    except (SafetensorError, ArithmeticError, ValueError, LookupError, TypeError, AttributeError) as error:
        if not path.exists():
            raise FileNotFoundError(f"{path} has gone") from error
        if is_own(path):
            raise DamagedFileError(f"{path} is damaged: {error}") from error
        raise SavedBlocksError(f"{path} holds no saved blocks, or is damaged: {error}") from error
    return file


def _decoded(path: Path, num_bytes: int, said: Any) -> SavedFile:
    """Read a manifest. Raises an error of some kind if the manifest is not as `encoded` writes it."""
    block_size = said["block_size"]
    facts, settings = ({str(k): str(v) for k, v in said["model"][name].items()} for name in ("facts", "settings"))
    model, blocks, contents = ModelIdentity(facts, settings), [], []
    roots = [RootFacts(model.digest, b"", bytes.fromhex(regime), *of_row) for regime, *of_row in said["roots"]]
    for parent_hex, tokens in said["blocks"]:
        parent, token_bytes = bytes.fromhex(parent_hex), array("q", tokens).tobytes()
        blocks.append(BlockHash(digest_behind(parent, token_bytes), token_bytes, parent))
        if len(tokens) != block_size:
            raise ValueError("a block has another size than the others")
    for kind, parts, numbers, checksums in said["contents"]:
        of_kind = tuple(_part(kind, pieces) for pieces in parts)
        contents.append(SavedContents(kind, of_kind, tuple(numbers), tuple(map(tuple, checksums))))
        if [*map(len, checksums)] != [len(numbers)] * len(parts) or not all(0 <= at < len(blocks) for at in numbers):
            raise ValueError("its header contradicts itself")
    return SavedFile(path, num_bytes, block_size, model, tuple(roots), tuple(blocks), tuple(contents))


def _part(kind: Kind, pieces: Any) -> Part:
    shapes = []
    for key, shape, name in pieces:
        of_tensor = StateKey(*key) if kind == STATES else (int(key[0]), str(key[1]))
        shapes.append((of_tensor, torch.device("cpu"), tuple(map(int, shape)), getattr(torch, name)))
    (part,) = laid_out(kind, shapes)
    return part


def _opened(path: Path) -> Any:
    """Open a file to read from it; raises OSError where torch, which opens it again, raises a RuntimeError."""
    try:
        return safe_open(path, framework="pt")
    except RuntimeError as error:
        raise OSError(f"{path} cannot be read: {error}") from error


def read_rows(file: SavedFile, kind: Kind, rows: Sequence[int]) -> list[Tensor]:
    """Return these rows of each part of a kind, [N, bytes] on the host, or raise DamagedFileError or OSError."""
    loaded, first = [], min(rows)
    try:
        with torch.device("cpu"), _opened(file.path) as opened:  # else rows would go to torch's default device
            content = next(content for content in file.contents if content.kind == kind)
            for number, checksums in enumerate(content.checksums):
                span = opened.get_slice(f"{kind}.{number}")[first : max(rows) + 1]
                loaded.append(span[[at - first for at in rows]])
                if any(_checksum(row) != checksums[at] for row, at in zip(loaded[-1], rows, strict=True)):
                    raise DamagedFileError(f"{file.path} is damaged: blocks are not what was written")
    except SafetensorError as error:
        if not file.path.exists():
            raise FileNotFoundError(f"{file.path} has gone") from error
        raise DamagedFileError(f"{file.path} is damaged: {error}") from error
    return loaded


def read_to_the_end(file: SavedFile) -> None:
    """Read all rows of a file; raises as `read_rows` does."""
    for content in file.contents:
        read_rows(file, content.kind, range(len(content.blocks)))


def _checksum(row: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(row.numpy().data)
