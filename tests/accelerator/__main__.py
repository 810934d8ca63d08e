"""`python -m tests.accelerator [--lines] [WORD]`: the table of counts, of all rows or of those that contain WORD.

With `--lines`, also which lines of the code they come from.
"""

from __future__ import annotations

import sys

import torch

from .backend import start

start()

from .counts import COUNTS, Counter, limit_of  # noqa: E402


def main(arguments: list[str]) -> None:
    words = [argument for argument in arguments if not argument.startswith("-")]
    sys.stdout.write(f"{'':66} DynamicCache       paged    gather   at most (paged, gather)\n")
    for count in COUNTS:
        if not all(word in count.what for word in words):
            continue
        counters = [Counter(None), Counter("paged"), Counter("gather")]
        cells, failed = [], ""
        limits = [limit_of(count, attention, torch.float32) for attention in ("paged", "gather")]
        for counter in counters:
            function = count.plain if counter.attention is None else count.paged
            cells.append("-" if function is None else f"{function(counter):.4g}")
        for cell, limit in zip(cells[1:], limits, strict=True):
            failed += " !" if float(cell) > limit else ""
        limit = "  ".join(f"{limit:.4g}" for limit in limits)
        sys.stdout.write(f"{count.what:66} {cells[0]:>12} {cells[1]:>11} {cells[2]:>9}   {limit}{failed}\n")
        if "--lines" in arguments:
            for counter in counters:
                for lines in counter.shown:
                    sys.stdout.write(
                        f"  {counter.attention or 'DynamicCache'}:\n    " + lines.replace("\n", "\n    ") + "\n"
                    )


main(sys.argv[1:])
