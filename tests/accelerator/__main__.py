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
    sys.stdout.write(f"{'':66} DynamicCache       paged   at most\n")
    for count in COUNTS:
        if not all(word in count.what for word in words):
            continue
        plain, paged = Counter(is_paged=False), Counter(is_paged=True)
        base = "-" if count.plain is None else f"{count.plain(plain):.4g}"
        number, limit = count.paged(paged), limit_of(count, torch.float32)
        sys.stdout.write(f"{count.what:66} {base:>12} {number:>11.4g}   {limit:.4g}{' !' if number > limit else ''}\n")
        if "--lines" in arguments:
            for name, counter in (("DynamicCache", plain), ("paged", paged)):
                for lines in counter.shown:
                    sys.stdout.write(f"  {name}:\n    " + lines.replace("\n", "\n    ") + "\n")


main(sys.argv[1:])
