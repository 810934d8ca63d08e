"""Looks through a folder of saved blocks before more is saved into it, and takes out what is damaged.

A file of which a part is damaged is lost to readers as a whole: what is whole in it is written anew, under another name, and the
file goes. Says nothing of what is written in place of the rest.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import SavedBlocksError
from .base import Kind, Name
from .folders import SharedFolder, remove
from .runs import Run
from .saved_file import ROWS_DAMAGED, DamagedFileError, read_saved_file, read_whole_rows, saved_paths


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


def mend(folder: SharedFolder, facts: Mapping[str, str], wanted: Collection[bytes]) -> Mended:
    """Have each file of a folder readable that is of this model and has one of these blocks. The folder is locked.

    A reader that has a damaged file open goes on with it. Files of other models are looked at no further than what they say of
    themselves; what cannot even say that, under a name of ours, goes.  Cost: reads those files to their end.

    Args:
        facts: of the model, see `ModelIdentity`.
        wanted: digests of blocks; without any nothing is done.

    Raises:
        OSError: the folder cannot be written. Nothing is lost that could be read.
    """
    found = Mended(set(), set(), {})
    for path in saved_paths(folder.path) if wanted else ():
        try:
            file = read_saved_file(path)
            if file.facts != facts or not any(block.digest in wanted for block in file.blocks):
                continue
            whole = {content.kind: read_whole_rows(file, content.kind) for content in file.contents}
        except DamagedFileError as error:
            _take_out(path, str(error), found)
            continue
        except (SavedBlocksError, OSError):
            continue
        rest, lost = Run(folder, file), set[bytes]()
        for content in file.contents:
            rows, held = whole[content.kind]
            blocks = [file.blocks[content.blocks[row]] for row in rows]
            found.known.update((content.kind, block.digest) for block in blocks)
            lost.update(file.blocks[number].digest for row, number in enumerate(content.blocks) if row not in rows)
            if blocks:
                rest.add(content.kind, content.parts, [Name(block, b"") for block in blocks], held, file.roots)
        if lost:
            found.lost.update(lost)
            if rest.has_rows:
                rest.save()
            _take_out(path, f"{path} is damaged: {ROWS_DAMAGED}", found)
    return found


def _take_out(path: Path, why: str, found: Mended) -> None:
    remove(path)
    if not path.exists():
        found.replaced[str(path)] = why
