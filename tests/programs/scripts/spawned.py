"""What a program does so that processes which it starts have caches: a line in their own code."""

import sys
from multiprocessing import get_context

from answers import answers

from hf_paged_cache import cache_every_generate


def child(with_caches):
    every = cache_every_generate() if with_caches else "no caches"
    return [*answers(sys.argv[1])], str(every)


if __name__ == "__main__":
    with get_context("spawn").Pool(1) as pool:
        for each in pool.map(child, [False, True]):
            print(*each, sep="\n")
