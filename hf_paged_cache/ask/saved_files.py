"""Says, by `saved_report`, what a folder of saved blocks holds and whether it is whole, without a model."""

from os import PathLike
from pathlib import Path
from typing import NamedTuple

from ..errors import CacheArgumentError, SavedBlocksError
from ..tiers.folder import folder_of, saved_paths
from ..tiers.saved_file import read_saved_file, read_to_the_end


class SavedFileReport(NamedTuple):
    """`SavedFileReport` says what one file of saved blocks holds.

    Attributes:
        path: path of the file.
        problem: what is wrong with the file; None: it is whole.
        num_blocks: number of blocks in the file.
        num_tokens: number of tokens in these blocks.
        num_bytes: size of the file.
        model: what computed the blocks: class, dtype, versions and digests, by name; see docs/save_and_load.md.

    Examples:
        >>> _ = cache.prefill(inputs["input_ids"])
        >>> _ = cache.store.save(folder)
        >>> [(file.problem, file.num_tokens) for file in saved_report(folder)]
        [(None, 80)]
    """

    path: Path
    problem: str | None
    num_blocks: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    model: dict[str, str] = {}  # noqa: RUF012  # the default of a tuple, never written


def saved_report(folder: str | PathLike[str]) -> list[SavedFileReport]:
    """Read every file that `store.save` has written into a folder, to its last byte.

    Effects: none.  Cost: reads all files.

    Raises:
        CacheArgumentError: there is no such folder, or it is a file.

    Examples:
        >>> cache.prefill(inputs["input_ids"]).num_tokens, cache.store.save(folder).num_blocks
        (80, 5)
        >>> [(file.problem, file.num_blocks, file.num_tokens) for file in saved_report(folder)]
        [(None, 5, 80)]
    """
    where = folder_of(folder)
    if not where.is_dir():
        raise CacheArgumentError(f"there is no folder {where}; give one that `save` has written")
    reports = []
    for path in saved_paths(where):
        try:
            file = read_saved_file(path)
            read_to_the_end(file)
        except (SavedBlocksError, OSError) as error:
            reports.append(SavedFileReport(path, str(error)))
            continue
        num_blocks = len(file.blocks)
        num_tokens = num_blocks * file.block_size
        reports.append(SavedFileReport(path, None, num_blocks, num_tokens, file.num_bytes, dict(file.model.facts)))
    return reports
