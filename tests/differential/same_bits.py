"""Random calls in chunks (`prefill_chunk_size`) on our cache and on `DynamicCache`: the same bits, whatever is cached.

python -m tests.differential.same_bits --calls 2000 --seed 0
"""

import argparse
import dataclasses
import random
import re
import sys
import time
from collections import Counter
from typing import Any

import torch
import transformers

from tests.differential.__main__ import say
from tests.differential.cases import Action, Case
from tests.differential.drawing import Draw, draw_case
from tests.differential.kinds import attentions_of
from tests.differential.playing import Played, play_drawn, shrink

# All tokens; windows; states; both; latent attention; sinks; experts.
KINDS = (
    *("llama", "gpt2", "mistral", "gemma2", "gemma3_text", "falcon_h1", "lfm2", "bamba", "qwen3_next"),
    *("deepseek_v3", "gpt_oss", "qwen3_moe"),
)
SIZES = (1, 2, 3, 4, 5, 8, 16, 20)
LONGER = 20  # tokens by which prompts are longer than of other cases: of several chunks
FEW = (4, 8, 16, 5)  # that most calls of a case have, so that they find something


class ChunkDraw(Draw):
    """Calls of `generate` in chunks; between them whatever else leaves something in the cache, evicts or loads it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.prompts.longer = max(self.prompts.longer, LONGER)
        self._asked: list[Action] = []  # calls that may be made again

    def action(self) -> Action:
        slot = self.rng.randrange(len(self.slots))
        few = FEW[self.case.seed % len(FEW)]
        if self._asked and self.rng.random() < 0.4:
            return self.rng.choice(self._asked)
        if self.rng.random() < 0.6:
            self._asked.append(_in_chunks(self._generate(slot), few))
            return self._asked[-1]
        others = ["generate", "prefill", "score", "fault", "forget", "reset", "collected", "beside", "turn"]
        names = ["in_chunks"] * 3 + ["saved"] * 2 + [*others, "weight"]
        name = self.rng.choice(names)
        if name == "in_chunks":  # with all sizes, also those that nobody else has
            return _in_chunks(self._generate(slot), self.rng.choice(SIZES))
        return _unread(getattr(self, f"_{name}")(slot))


def _in_chunks(action: Action, size: int) -> Action:
    """The same call with that chunk size, and all its logits."""
    if action.name == "without":
        return _unread(action)

    def changed(lines: str) -> str:
        lines = re.sub(r", (prefill_chunk_size=\d+|return_dict_in_generate=True|output_\w+=True)", "", lines)
        more = f"prefill_chunk_size={size}, return_dict_in_generate=True, output_logits=True, "
        return lines.replace("max_new_tokens=", f"{more}max_new_tokens=")

    return dataclasses.replace(action, ours=changed(action.ours), reference=changed(action.reference))


def _unread(action: Action) -> Action:
    """The same, whose results are not compared: without chunks they may round otherwise."""
    return dataclasses.replace(action, ours=action.ours.replace("ours = ", "outer = "))


def play(kind: str, seed: int) -> Played | None:
    """Play a case; None where the kind cannot be played."""
    attentions, _ = attentions_of(kind)
    if not attentions:
        return None
    case, rng = draw_case(kind, seed, attentions)
    return play_drawn(with_bits(case, rng), rng, attentions, draws=ChunkDraw)


def with_bits(case: Case, rng: random.Random) -> Case:
    """The same case in a random dtype, whose results must be the same bits."""
    return dataclasses.replace(case, is_exact=True, dtype=rng.choice(["float32", "bfloat16"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=2000, help="compared")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others count on")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--minutes", type=float, default=float("inf"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    begun, seed, kinds = time.monotonic(), options.seed, options.kinds.split(",")
    compared, refusals, left_out, of_kind = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    reused = num_failed = 0
    while compared.total() < options.calls and time.monotonic() - begun < 60 * options.minutes:
        kind = kinds[seed % len(kinds)]
        played = play(kind, seed)
        if played is not None:
            compared.update(played.counts)
            of_kind[kind] += sum(played.counts.values())
            refusals.update(played.refusals)
            left_out.update(played.left_out)
            reused += played.reused
            if played.failure:
                num_failed += 1
                failure = shrink(played.failure)
                say(f"\nFAILED: --kinds {kind} --seed {seed} --calls 1: {failure.action}: {failure.category}")
                say(f"{failure.message[:1000]}\n{failure.case.script()}")
        seed += 1
    say(f"{compared.total()} calls of {len(of_kind)} kinds in {time.monotonic() - begun:.0f} s: {num_failed} failed")
    say(f"{dict(compared)}, of {dict(of_kind)}; {reused} prompt tokens reused")
    for title, found in (("refused by us", refusals), ("refused by transformers, left out", left_out)):
        say(f"{title}: {found.total()}")
        for text, number in found.most_common(8):
            say(f"  {number:5} {text}")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
