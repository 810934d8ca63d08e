"""Play random programs on our cache and on `DynamicCache`, beside each other.

python -m tests.differential --cases 2000 --seed 0 --kinds 'llama,gemma3_text,images:qwen2_vl,bits:*'
"""

import argparse
import functools
import gc
import sys
import time
from collections import Counter
from fnmatch import fnmatchcase

import torch
import transformers

from hf_paged_cache import UnsupportedModelError
from tests.differential import images, same_bits, tools  # noqa: F401 -- whose prompts are drawn on a CPU
from tests.differential.drawing import Draw
from tests.differential.kinds import KINDS
from tests.differential.playing import Played, play, shrink

say = functools.partial(print, flush=True)
DRAWS = {images.PREFIX: images.ImageDraw, same_bits.PREFIX: same_bits.ChunkDraw}


def draw(kind: str, seed: int) -> Draw:
    """The case of a kind and a seed, and what draws its actions."""
    return next((draws for prefix, draws in DRAWS.items() if kind.startswith(prefix)), Draw)(kind, seed)


def play_drawn(kind: str, seed: int) -> Played:
    drawn = draw(kind, seed)
    return play(drawn.case, drawn.actions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others count on")
    parser.add_argument("--kinds", default="*", help="some kinds or patterns of them, with commas between them")
    parser.add_argument("--device", default="cpu", help="where all is made, such as cuda; those with images run on cpu")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no case begins after so many")
    options = parser.parse_args()
    if options.device != "cpu":  # a default device, also the CPU, costs a Python call for each operation
        torch.set_default_device(options.device)
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported; each case collects, and half of its time went there
    transformers.logging.set_verbosity_error()
    modules = (images, same_bits) if options.device == "cpu" else (same_bits,)
    known = [*KINDS, *(module.PREFIX + kind for module in modules for kind in module.KINDS)]
    names = [kind for kind in known if any(fnmatchcase(kind, asked) for asked in options.kinds.split(","))]
    total, of_kind, begun = Played(), Counter[str](), time.monotonic()
    failed, refused = list[str](), dict[str, str]()
    for seed in range(options.seed, options.seed + options.cases):
        if time.monotonic() - begun > 60 * options.minutes:
            break
        kind = names[seed % len(names)]
        try:
            played = play_drawn(kind, seed)
        except UnsupportedModelError as error:
            refused[kind] = str(error)
            continue
        of_kind[kind] += 1
        total.add(played)
        if of_kind.total() % 50 == 0:
            say(f"{of_kind.total()} cases, {len(failed)} failed, {time.monotonic() - begun:.0f} s")
        if played.failure:
            failure = shrink(played.failure)
            failed.append(f"{kind} {seed} {failure.action} {failure.category}: {failure.message[:150]}")
            say(f"\nFAILED: --kinds {kind} --seed {seed} --cases 1: {failure.action}: {failure.category}")
            say(f"{failure.message[:1000]}\n{failure.case.script()}")
    say(f"\n{of_kind.total()} cases of {len(of_kind)} kinds in {time.monotonic() - begun:.0f} s: {len(failed)} failed")
    say(f"{total.counts.total()} results compared: {dict(total.counts.most_common())}")
    say(f"{total.reused} prompt tokens reused; largest distance {total.largest:.1e} of the scale")
    for kind, reason in refused.items():
        say(f"no cache for {kind}: {reason}")
    for title, found in (("refused by us", total.refusals), ("refused by transformers, left out", total.left_out)):
        say(f"{title}: {found.total()}", *(f"  {number:5} {text}" for text, number in found.most_common()), sep="\n")
    say(*(f"failed: {text}" for text in failed), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
