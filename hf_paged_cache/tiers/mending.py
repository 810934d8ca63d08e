"""Looks through a folder of saved blocks before more is saved into it, and takes out what is damaged.

A file of which a part is damaged is lost to readers as a whole: what is whole in it is written anew, under another name, and the
file goes. Says nothing of what is written in place of the rest.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import SavedBlocksError
from .base import Kind
from .saved_file import (
    ROWS_DAMAGED,
    SUFFIX,
    DamagedFileError,
    SavedFile,
    content_name,
    read_saved_file,
    read_whole_rows,
    saved_paths,
    write_saved_file,
)
from .shared_folder import remove


class Mended(NamedTuple):
    """What was found in a folder.

    Attributes:
        known: kind and digest of what is in it of blocks that were asked for, and whole.
        lost: digests of blocks of which something was damaged.
        replaced: path of each file that was damaged, and has gone -> what was wrong.
    """

    known: set[tuple[Kind, bytes]]
    lost: set[bytes]
    replaced: dict[str, str]


def mend(folder: Path, facts: Mapping[str, str], wanted: Collection[bytes], mode: int) -> Mended:
    """Have each file of a folder readable that is of this model and has one of these blocks. The folder's lock is held.

    A reader that has a damaged file open goes on with it. Files of other models are looked at no further than what they say of
    themselves; what cannot even say that, under a name of ours, goes.  Cost: reads those files to their end.

    Args:
        facts: of the model, see `ModelIdentity`.
        wanted: digests of blocks; without any nothing is done.
        mode: permissions of files that are written.

    Raises:
        OSError: the folder cannot be written. Nothing is lost that could be read.
    """
    found = Mended(set(), set(), {})
    for path in saved_paths(folder) if wanted else ():
        try:
            file = read_saved_file(path)
            if file.facts != facts or not any(block.digest in wanted for block in file.blocks):
                continue
            whole, rows = read_whole_rows(file)
        except DamagedFileError as error:
            _take_out(path, str(error), found)
            continue
        except (SavedBlocksError, OSError):
            continue
        contents = _contents(whole)
        if lost := _contents(file) - contents:
            found.lost.update(digest for _, digest in lost)
            if contents:
                write_saved_file(whole._replace(path=folder / f"{content_name(whole)}{SUFFIX}"), rows, mode)
            _take_out(path, f"{path} is damaged: {ROWS_DAMAGED}", found)
        found.known.update(contents)
    return found


def _contents(file: SavedFile) -> set[tuple[Kind, bytes]]:
    return {(content.kind, file.blocks[number].digest) for content in file.contents for number in content.blocks}


def _take_out(path: Path, why: str, found: Mended) -> None:
    remove(path)
    if not path.exists():
        found.replaced[str(path)] = why
