"""Owns the format of a file of saved blocks: how it is written, and what is checked before anything of it is used.

A file is in the safetensors format: for each kind of content, and each part of it, one tensor of bytes, [N, bytes of a row], a row
for each block. Its header says what the rows are: see `SavedFile`. A file is whole as soon as it has its name, and no other file
ever gets this name.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..blocks.arguments import OWNERS_ALONE
from ..blocks.hashing import TOKEN_BYTES, BlockHash, digest_behind, tokens_of
from ..blocks.roots import RootFacts
from ..errors import SavedBlocksError
from ..kv.contents import Part, Piece
from ..kv.states import StateKey
from .base import STATES, Kind

VERSION = 1
SUFFIX = ".safetensors"
_OWN_NAME = re.compile(r"[0-9a-f]{32}(-[0-9a-f]{8})?\.safetensors")
_FORMAT = "hf_paged_cache blocks"
ROWS_DAMAGED = "blocks are not what was written"
_MANIFEST, _CHECKSUM = "manifest", "xxh3_128"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)}  # fmt: skip


class DamagedFileError(SavedBlocksError):
    """Raised for a file that one of us has written, and that is no longer what was written."""


class ModelFacts(Protocol):
    """A model, told so that it means the same everywhere."""

    @property
    def facts(self) -> Mapping[str, str]: ...

    @property
    def settings(self) -> Mapping[str, str]: ...


class Identity(ModelFacts, Protocol):
    """See `ModelIdentity`."""

    @property
    def digest(self) -> bytes: ...

    def why_other(self, facts: Mapping[str, str], settings: Mapping[str, str]) -> str | None: ...


class SavedContents(NamedTuple):
    """What a file has of one kind.

    Attributes:
        kind: see `Kind`.
        parts: of a row.
        blocks: the block of each row, by its number in the file.
        checksums: of each part, of each row: XXH3, 128 bits.
    """

    kind: Kind
    parts: tuple[Part, ...]
    blocks: tuple[int, ...]
    checksums: tuple[tuple[str, ...], ...]


class SavedFile(NamedTuple):
    """What a file says of itself.

    Attributes:
        path: where it is.
        num_bytes: of the file.
        block_size: tokens of a block.
        facts, settings: of the model, see `ModelIdentity`.
        roots: that its blocks begin from, with `facts_digest` in place of a process's digest of the model.
        blocks: those that it names. A digest is of the parent's and the tokens; the parent is one of these, a root, or in another file.
        contents: what it holds of them.
    """

    path: Path
    num_bytes: int
    block_size: int
    facts: Mapping[str, str]
    settings: Mapping[str, str]
    roots: tuple[RootFacts, ...]
    blocks: tuple[BlockHash, ...]
    contents: tuple[SavedContents, ...]

    def content(self, kind: Kind) -> SavedContents:
        """What it holds of a kind."""
        return next(content for content in self.contents if content.kind == kind)


def facts_digest(facts: Mapping[str, str]) -> bytes:
    """32 bytes that are the same for models with equal facts."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).digest()


def new_path(folder: Path) -> Path:
    """Of a file that is not there yet."""
    return folder / f"{uuid4().hex}{SUFFIX}"


def write_saved_file(
    file: SavedFile, rows: Mapping[Kind, Sequence[Tensor]], mode: int = OWNERS_ALONE, *, outlives: bool = True
) -> SavedFile:
    """Write a file whole, or not at all.

    Args:
        file: what it says; checksums and size are not looked at.
        rows: kind -> of each part, [N, bytes].
        mode: its permissions, whatever the umask is.
        outlives: it is for other processes, and must be whole after a power cut, too.

    Returns:
        The same with checksums and size.

    Raises:
        OSError: the disk is full, or the folder cannot be written; nothing is left of it.
    """
    tensors: dict[str, Tensor] = {}
    contents = []
    for content in file.contents:
        of_parts = [part_rows.cpu().contiguous() for part_rows in rows[content.kind]]
        tensors |= {_tensor(content.kind, number): part_rows for number, part_rows in enumerate(of_parts)}
        checksums = tuple(tuple(_checksum(row) for row in part_rows) for part_rows in of_parts)
        contents.append(content._replace(checksums=checksums))
    file = file._replace(contents=tuple(contents))
    manifest = json.dumps(_manifest(file))
    metadata = {"format": _FORMAT, _MANIFEST: manifest, _CHECKSUM: xxhash.xxh3_128_hexdigest(manifest.encode())}
    unfinished = file.path.with_name(f".{uuid4().hex}.unfinished")
    try:
        os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        try:
            save_file(tensors, unfinished, metadata)
        except SafetensorError as error:
            raise OSError(f"{unfinished} could not be written: {error}") from error
        os.chmod(unfinished, mode)
        if outlives:
            with open(unfinished, "rb") as written:
                os.fsync(written.fileno())
        os.replace(unfinished, file.path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    return file._replace(num_bytes=file.path.stat().st_size)


def read_saved_file(path: Path) -> SavedFile:
    """Read what a file says of itself, and check all of it but the rows, which `read_rows` checks.

    Raises:
        SavedBlocksError: it is none of ours, of another version of the format, cut or damaged.
        OSError: it cannot be read.
    """
    num_bytes = path.stat().st_size
    try:
        with _opened(path) as opened:
            metadata = opened.metadata() or {}
            if metadata.get("format") != _FORMAT:
                is_ours = _OWN_NAME.fullmatch(path.name) and {_MANIFEST, _CHECKSUM} & metadata.keys()
                kind = DamagedFileError if is_ours else SavedBlocksError
                raise kind(f"{path} {'is damaged: it says that it ' if is_ours else ''}holds no saved blocks")
            manifest = metadata.get(_MANIFEST, "")
            if xxhash.xxh3_128_hexdigest(manifest.encode()) != metadata.get(_CHECKSUM):
                raise DamagedFileError(f"{path} is damaged: its header is not what was written")
            file = _of_json(path, num_bytes, json.loads(manifest))
            for content in file.contents:
                for number, part in enumerate(content.parts):
                    held = opened.get_slice(_tensor(content.kind, number))
                    if held.get_dtype() != "U8" or held.get_shape() != [len(content.blocks), part.num_bytes]:
                        raise DamagedFileError(f"{path} is damaged: a tensor has another shape than its header says")
    except SavedBlocksError:
        raise
    except (SafetensorError, ArithmeticError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        if not path.exists():
            raise FileNotFoundError(f"{path} has gone") from error
        kind = DamagedFileError if _OWN_NAME.fullmatch(path.name) else SavedBlocksError
        raise kind(f"{path} is damaged, or no file of saved blocks: {error}") from error
    return file


def _opened(path: Path) -> Any:
    """The file, to read from.  Raises OSError where it has gone since, which torch, who opens it a second time, says in words of its own."""
    try:
        return safe_open(path, framework="pt")
    except RuntimeError as error:
        raise OSError(f"{path} cannot be read: {error}") from error


def read_rows(file: SavedFile, kind: Kind, rows: Sequence[tuple[int, int]]) -> list[list[Tensor]]:
    """Of each part of a kind, the rows `[first, first + number)` for each (first, number), as so many tensors of the host.

    Raises:
        SavedBlocksError: a row is not what was written.
        OSError: the file is not there any more, or cannot be read.
    """
    loaded, damaged = _read(file, kind, rows)
    if damaged:
        raise DamagedFileError(f"{file.path} is damaged: {ROWS_DAMAGED}")
    return loaded


def read_whole_rows(file: SavedFile, kind: Kind) -> tuple[list[int], list[Tensor]]:
    """Which rows of a kind are what was written, and these, of each part.

    Raises:
        SavedBlocksError: nothing can be read any more.
        OSError: the file is not there any more, or cannot be read.
    """
    number = len(file.content(kind).blocks)
    loaded, damaged = _read(file, kind, [(0, number)])
    whole = [row for row in range(number) if row not in damaged]
    return whole, [rows[whole] if damaged else rows for (rows,) in loaded]


def _read(file: SavedFile, kind: Kind, rows: Sequence[tuple[int, int]]) -> tuple[list[list[Tensor]], set[int]]:
    """The rows, and the numbers of those that are not what was written."""
    loaded, damaged = [], set()
    try:
        with torch.device("cpu"), _opened(file.path) as opened:  # what is read would go to torch's default device
            for number, checksums in enumerate(file.content(kind).checksums):
                held = opened.get_slice(_tensor(kind, number))
                loaded.append([held[first : first + length] for first, length in rows])
                for fragment, (first, _) in zip(loaded[-1], rows, strict=True):
                    damaged |= {at for at, row in enumerate(fragment, first) if _checksum(row) != checksums[at]}
    except SafetensorError as error:
        if not file.path.exists():
            raise FileNotFoundError(f"{file.path} has gone") from error
        raise DamagedFileError(f"{file.path} is damaged: {error}") from error
    return loaded, damaged


def saved_paths(folder: Path) -> list[Path]:
    """Files that may hold saved blocks, in the order of their names."""
    return sorted(path for path in folder.iterdir() if path.suffix == SUFFIX and not path.name.startswith("."))


def remove_unfinished(folder: Path) -> None:
    """What processes have left that died while they wrote."""
    for path in folder.glob(".*.unfinished"):
        with contextlib.suppress(OSError):
            path.unlink()


def _checksum(row: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(row.numpy().data)


def _tensor(kind: Kind, part: int) -> str:
    return f"{kind}.{part}"


def _manifest(file: SavedFile) -> dict[str, Any]:
    model = {"facts": dict(file.facts), "settings": dict(file.settings)}
    blocks = [
        {"digest": each.digest.hex(), "parent": each.parent.hex(), "tokens": [*tokens_of(each.token_bytes)]}
        for each in file.blocks
    ]
    held = {
        "roots": [_root_as_json(each) for each in file.roots],
        "blocks": blocks,
        "contents": _as_json(file.contents),
    }
    return {"version": VERSION, "block_size": file.block_size, "model": model, **held}


def _root_as_json(root: RootFacts) -> dict[str, Any]:
    of_row = {name: getattr(root, name) for name in ("adapter", "counted_from", "first_position")}
    return {"digest": root.root().hex(), "regime": root.regime.hex(), **of_row}


def _as_json(value: Any) -> Any:
    """Tuples with names become objects, all others lists."""
    match value:
        case torch.dtype():
            return str(value).removeprefix("torch.")
        case SavedContents() | Part() | Piece():
            return {name: _as_json(each) for name, each in value._asdict().items() if name != "device"}
        case tuple():
            return [_as_json(each) for each in value]
    return value


def _of_json(path: Path, num_bytes: int, said: Any) -> SavedFile:
    """The same from JSON. Whatever is not as `_manifest` writes it raises, of some kind."""
    if said["version"] != VERSION:
        raise SavedBlocksError(
            f"{path} is of version {said['version']} of the format, and this is version {VERSION}: read it with the "
            "hf_paged_cache that has written it, or save the blocks again"
        )
    block_size = _count(said["block_size"], at_least=1)
    facts, settings = (_texts(said["model"][name]) for name in ("facts", "settings"))
    roots = tuple(_root(path, facts, root) for root in said["roots"])
    blocks = tuple(_block(path, block_size, block) for block in said["blocks"])
    contents = tuple(_contents(path, len(blocks), content) for content in said["contents"])
    if len({content.kind for content in contents}) < len(contents):
        raise DamagedFileError(f"{path} is damaged: it holds a kind of content twice")
    return SavedFile(path, num_bytes, block_size, facts, settings, roots, blocks, contents)


def _root(path: Path, facts: Mapping[str, str], said: Any) -> RootFacts:
    of_row = (_count(said[name]) for name in ("counted_from", "first_position"))
    root = RootFacts(facts_digest(facts), b"", bytes.fromhex(said["regime"]), str(said["adapter"]), *of_row)
    if root.root().hex() != said["digest"]:
        raise DamagedFileError(f"{path} is damaged: a root has another digest than what it stands for")
    return root


def _block(path: Path, block_size: int, said: Any) -> BlockHash:
    token_bytes = b"".join(int(token).to_bytes(TOKEN_BYTES, "little", signed=True) for token in said["tokens"])
    block = BlockHash(bytes.fromhex(said["digest"]), token_bytes, bytes.fromhex(said["parent"]))
    if len(token_bytes) != block_size * TOKEN_BYTES or block.digest != digest_behind(block.parent, token_bytes):
        raise DamagedFileError(f"{path} is damaged: a block has other tokens than its digest says")
    return block


def _contents(path: Path, num_blocks: int, said: Any) -> SavedContents:
    kind = said["kind"] if isinstance(said["kind"], str) else _count(said["kind"], at_least=1)
    blocks = tuple(_count(number) for number in said["blocks"])
    checksums = tuple(tuple(map(str, of_part)) for of_part in said["checksums"])
    content = SavedContents(kind, tuple(_parts(kind, said["parts"])), blocks, checksums)
    is_right = len(set(blocks)) == len(blocks) and all(number < num_blocks for number in blocks)
    is_right &= len(checksums) == len(content.parts) and all(len(of_part) == len(blocks) for of_part in checksums)
    for part in content.parts:
        end = 0
        for piece in part.pieces:
            size = torch.Size(piece.shape).numel() * piece.dtype.itemsize
            is_right &= piece.offset >= end and piece.num_bytes == size
            end = piece.offset + piece.num_bytes
        is_right &= end <= part.num_bytes
    if not is_right:
        raise DamagedFileError(f"{path} is damaged: its header contradicts itself")
    return content


def _parts(kind: Kind, said: Any) -> Iterator[Part]:
    for part in said:
        pieces = tuple(
            Piece(
                StateKey(*piece["key"]) if kind == STATES else (_count(piece["key"][0]), str(piece["key"][1])),
                _count(piece["offset"]),
                _count(piece["num_bytes"]),
                tuple(map(_count, piece["shape"])),
                _DTYPES[piece["dtype"]],
            )
            for piece in part["pieces"]
        )
        yield Part(part["kind"], part["window"], torch.device("cpu"), _count(part["num_bytes"], at_least=1), pieces)


def _count(number: Any, at_least: int = 0) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < at_least:
        raise ValueError(f"{number!r} is no number of at least {at_least}")
    return number


def _texts(said: Any) -> dict[str, str]:
    return {str(name): str(value) for name, value in said.items()}
