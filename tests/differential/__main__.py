"""Play random programs on our cache and on `DynamicCache`, beside each other.

python -m tests.differential --cases 2000 --seed 0 --kinds llama,gemma3_text,images:qwen2_vl
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch
import transformers

from tests.differential.drawing import draw_case
from tests.differential.images import PREFIX, TYPES, play_images
from tests.differential.kinds import attentions_of, kinds
from tests.differential.playing import play_drawn, shrink


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others count on")
    parser.add_argument("--kinds", help="some kinds, with commas between them")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no case begins after so many")
    parser.add_argument("--failures", type=Path, help="a folder for the scripts of failures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    names = options.kinds.split(",") if options.kinds else [*kinds(), *(PREFIX + name for name in TYPES)]
    failures, counts, refusals, left_out = [], Counter(), Counter(), Counter()
    played_kinds: Counter[str] = Counter()
    refused: dict[str, str] = {}
    reused, largest, begun = 0, 0.0, time.monotonic()
    for seed in range(options.seed, options.seed + options.cases):
        if time.monotonic() - begun > 60 * options.minutes:
            break
        kind = names[seed % len(names)]
        if kind.startswith(PREFIX):
            played = play_images(kind, seed)
        else:
            attentions, why_none = attentions_of(kind)
            if not attentions:
                refused[kind] = why_none
                continue
            played = play_drawn(*draw_case(kind, seed, attentions), attentions)
        played_kinds[kind] += 1
        counts.update(played.counts)
        refusals.update(played.refusals)
        left_out.update(played.left_out)
        reused += played.reused
        largest = max(largest, played.largest)
        if sum(played_kinds.values()) % 50 == 0:
            say(f"{sum(played_kinds.values())} cases, {len(failures)} failed, {time.monotonic() - begun:.0f} s")
        if played.failure:
            failure = played.failure if kind.startswith(PREFIX) else shrink(played.failure)
            failures.append((kind, seed, failure))
            say(f"\nFAILED: --kinds {kind} --seed {seed} --cases 1: {failure.action}: {failure.category}")
            say(failure.message[:1000])
            say(failure.case.script())
            if options.failures:
                options.failures.mkdir(parents=True, exist_ok=True)
                text = f"# {failure.action}: {failure.category}: {failure.message!r}\n{failure.case.script()}\n"
                (options.failures / f"{kind}_{seed}.py").write_text(text)
    say(
        f"\n{sum(played_kinds.values())} cases of {len(played_kinds)} kinds in {time.monotonic() - begun:.0f} s: {len(failures)} failed"
    )
    say(f"{sum(counts.values())} results compared: {dict(counts.most_common())}")
    say(f"{reused} prompt tokens reused; largest distance {largest:.1e} of the scale")
    for kind, reason in refused.items():
        say(f"no cache for {kind}: {reason}")
    for title, found in (("refused by us", refusals), ("refused by transformers, left out", left_out)):
        say(f"{title}: {sum(found.values())}")
        for text, number in found.most_common():
            say(f"  {number:5} {text}")
    for kind, seed, failure in failures:
        say(f"failed: {kind} {seed} {failure.action} {failure.category}: {failure.message[:150]}")
    return 1 if failures else 0


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
