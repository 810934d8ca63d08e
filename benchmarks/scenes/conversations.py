"""A chat: each turn begins with all that was said before."""

from __future__ import annotations

import torch
from harness import Timing
from transformers import DynamicCache

from hf_paged_cache import PagedPrefixCache

from .line import BASELINE, BY_HAND, OURS, Line
from .registry import Lines, Repeat, scene
from .several_rows import forget
from .ways import Measured, Way, from_scratch, on_ours, run_round, timed_call, turned
from .workbench import Bench

CONVERSATIONS = "Conversations and evaluation"


@scene(CONVERSATIONS, minutes=1.3)
def chat(bench: Bench, repeat: Repeat) -> Lines:
    """A chat of 8 turns from an empty cache: a system prompt, then 64 tokens from the user and 16 from the model a
    turn.
    """
    sizes, cache = bench.sizes, PagedPrefixCache(bench.model)
    turns = [Measured() for _ in range(sizes.num_turns)]
    for number in range(repeat(2)):
        forget(cache)
        kept = DynamicCache(config=bench.model.config)
        said = bench.tokens(1, sizes.shared // 4)
        for turn, measured in enumerate(turns):
            ids, given = torch.cat((said, bench.tokens(1, 64)), dim=1), {"new_tokens": 16}
            ways = {
                BASELINE: from_scratch(bench, ids, **given),
                BY_HAND: Way(
                    lambda ids=ids, kept=kept: bench.generate(ids, past_key_values=kept, new_tokens=16),
                    lambda kept=kept: kept,
                ),
                OURS: on_ours(bench, cache, ids, **given),
            }
            order = turned(list(ways), number + turn)
            seconds, said = run_round(bench, ways, order, measured, lambda way: timed_call(bench, way))
            measured.rounds.append(seconds)
    yield "chat", _whole(turns, BASELINE, "8 turns, against DynamicCache from scratch each turn")
    yield f"chat / {BY_HAND}", _whole(turns, BY_HAND, "8 turns, against a DynamicCache that the caller keeps")
    for turn, measured in enumerate(turns, start=1):
        yield f"chat, turn {turn}", measured.line(f"turn {turn}", point={"turn": turn})


def _whole(turns: list[Measured], against: str, what: str) -> Line:
    """The sum over all turns, conversation by conversation."""
    totals = {
        name: [sum(seconds) for seconds in zip(*(measured.seconds(name) for measured in turns), strict=True)]
        for name in (BASELINE, BY_HAND, OURS)
    }
    ways = {name: Timing.of(seconds) for name, seconds in totals.items()}
    return Line(
        what=what,
        value=ways[against].median / ways[OURS].median,
        kind="ratio",
        spread=Timing.of([theirs / mine for theirs, mine in zip(totals[against], totals[OURS], strict=True)]),
        ways=ways,
        against=against,
        hit_rate=turns[-1].hit_rate,
        kv_bytes=turns[-1].kv_bytes,
    )
