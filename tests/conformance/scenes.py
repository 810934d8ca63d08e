"""The scenes that every model plays: each a few calls of one user on a cache of its own.

The first prompt is five full blocks and five tokens, so five new ones complete a sixth block. Beams and samples count
as reused what equal rows compute once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..internals import failing_layer
from ..reference import batch, row
from .player import CellError, Player

PROMPT = row((1, 45))


def cold(play: Player) -> None:
    play.call(**batch(PROMPT), reused=0)


def full_hit(play: Player) -> None:
    play.fill(**batch(PROMPT))
    play.hit(**batch(PROMPT), reused=44)
    play.cache.reset()
    play.hit(**batch(PROMPT), reused=40)


def partial_hit(num_common: int) -> Callable[[Player], None]:
    def scene(play: Player) -> None:
        play.fill(**batch(PROMPT))
        play.hit(**batch(row((1, num_common), (2, 12))), reused=num_common)
        play.cache.reset()
        play.hit(**batch(row((1, num_common), (3, 12))), reused=num_common // 8 * 8)

    return scene


def padded_batch(play: Player) -> None:
    play.fill(**batch(row((1, 32), (2, 8)), row((4, 28), (5, 4))))
    play.hit(**batch(row((1, 32), (6, 9)), row((4, 28), (7, 5))), reused=32 + 24)
    play.cache.reset()
    play.hit(**batch(row((1, 32), (8, 9)), row((4, 28), (9, 5))), reused=32 + 24)


def other_padding(play: Player) -> None:
    play.fill(**batch(row((1, 45)), row((4, 35))))
    # Where positions are counted from the padding, a row with other padding is another row.
    play.hit(**batch(row((1, 45), (2, 5)), row((4, 35))), reused=45 + 30 if play.takes_positions else 15)


def known_and_unknown_rows(play: Player) -> None:
    play.fill(**batch(PROMPT))
    play.hit(**batch(row((1, 45), (2, 3)), row((8, 16))), reused=32)


def beams(play: Player) -> None:
    play.fill(**batch(PROMPT))
    best = (
        play.hit(**batch(PROMPT), num_beams=3, num_return_sequences=2, reused=3 * 45 - 1)
        .sequences[0]
        .flatten()
        .tolist()
    )
    if play.zeroed:
        return  # what these beams wrote is another text
    play.cache.reset()
    play.call(**batch(best + row((2, 5))), reused=48)


def batched_beams(play: Player) -> None:
    rows = batch(row((1, 45)), row((4, 37)))
    play.fill(**rows)
    play.hit(**rows, num_beams=2, reused=2 * (45 + 37) - 2)


def samples(play: Player) -> None:
    play.fill(**batch(PROMPT))
    play.hit(**batch(PROMPT), do_sample=True, num_return_sequences=3, seed=1, reused=3 * 45 - 1)


def prompt_lookup(play: Player) -> None:
    prompt = batch(row((1, 15), (1, 15), (1, 9)))
    play.fill(**prompt)
    play.hit(**prompt, prompt_lookup_num_tokens=3, max_new_tokens=8, at_least=32)


def chunked_prefill(play: Player) -> None:
    play.fill(**batch(PROMPT), prefill_chunk_size=16)
    play.hit(**batch(row((1, 45), (2, 7))), prefill_chunk_size=16, at_least=0)


def going_on(play: Player) -> None:
    whole = play.call(**batch(PROMPT)).sequences[0].flatten().tolist()
    play.hit(**batch(whole + row((2, 5))), reused=49)
    play.cache.reset()
    play.hit(**batch(whole + row((3, 5))), reused=48)


def nothing_shared(play: Player) -> None:
    play.fill(**batch(PROMPT))
    play.call(**batch(row((9, 45))), reused=0)


class _FaultError(Exception):
    """Raised in a middle layer."""


def after_a_fault(play: Player) -> None:
    play.fill(**batch(PROMPT))
    _fail_in_a_middle_layer(play, batch(row((1, 20), (5, 25))))
    play.hit(**batch(row((1, 20), (5, 25))), reused=16)


def _fail_in_a_middle_layer(play: Player, arguments: dict[str, Any]) -> None:
    layers = [number for number in range(len(play.cache.layers)) if play.cache.get_seq_length(number)]
    try:
        with failing_layer(play.cache, layers[len(layers) // 2], _FaultError()):
            play.fill(**arguments)
    except _FaultError:
        return
    raise CellError("different", "the fault in a middle layer did not come out of generate")


def after_eviction(play: Player) -> None:
    play.build(num_blocks=12)  # eleven, where each call needs seven
    for seed in (1, 2, 3):
        play.fill(**batch(row((seed, 45))))
    play.hit(**batch(row((3, 40), (2, 5))), reused=40)
    play.call(**batch(PROMPT))
    if play.reuses and play.cache.stats().num_evictions == 0:
        raise CellError("no reuse", "nothing was evicted from a pool of 11 blocks")


def gathered(play: Player) -> None:
    play.build(attention="gather")
    play.fill(**batch(PROMPT))
    play.hit(**batch(row((1, 45), (2, 3)), row((8, 16))), reused=32)
    play.hit(**batch(PROMPT), num_beams=3, at_least=2 * 45 + 40)


def behind_padding(num_pads: int, *rows: list[int]) -> dict[str, torch.Tensor]:
    """A batch with so many columns of padding before all of its rows, as `pad_to_multiple_of` gives them."""
    return {name: torch.nn.functional.pad(value, (num_pads, 0)) for name, value in batch(*rows).items()}


def every_row_padded(play: Player) -> None:
    """On an empty store; then one of the prompts without padding."""
    for attention, rows in (("paged", [PROMPT]), ("gather", [PROMPT, row((4, 35))])):
        play.build(attention=attention)
        play.call(**behind_padding(3, *rows), reused=0)
        play.hit(**batch(PROMPT), reused=44 if play.takes_positions else 0)
        play.cache.reset()
        play.hit(**batch(row((1, 45), (2, 5))), reused=40)


def padded_forward(play: Player) -> None:
    """The same of a plain forward."""
    for attention, rows in (("gather", [PROMPT]), ("paged", [PROMPT, row((4, 35))])):
        play.build(attention=attention)
        play.forward(**behind_padding(3, *rows))
        play.hit(**batch(PROMPT), reused=44 if play.takes_positions else 0)
        play.cache.reset()
        play.hit(**batch(row((1, 45), (2, 5))), reused=40)


def outputs_then_none(play: Player) -> None:
    """Calls with each output flag on an empty store, and where all is known; then without."""
    for flag in filter(play.takes, OUTPUT_FLAGS):
        try:
            play.reference(**batch(PROMPT), **{flag: True})
        except CellError:
            continue  # transformers itself refuses it
        play.build()
        play.call(**batch(PROMPT), **{flag: True}, reused=0)
        play.cache.reset()
        play.hit(**batch(PROMPT), reused=40 if play.keeps_with(flag) else 0)
        play.build(attention="gather")
        play.fill(**batch(PROMPT))
        play.call(**batch(PROMPT), **{flag: True}, reused=0)
        play.cache.reset()
        play.hit(**batch(PROMPT), reused=40)


OUTPUT_FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")

SCENES: dict[str, Callable[[Player], None]] = {
    "cold": cold,
    "full hit": full_hit,
    "hit of k blocks - 1": partial_hit(31),
    "hit of k blocks": partial_hit(32),
    "hit of k blocks + 1": partial_hit(33),
    "padded batch": padded_batch,
    "other padding": other_padding,
    "known and unknown rows": known_and_unknown_rows,
    "beams": beams,
    "batched beams": batched_beams,
    "samples": samples,
    "prompt lookup": prompt_lookup,
    "chunked prefill": chunked_prefill,
    "resuming": going_on,
    "nothing shared": nothing_shared,
    "after a fault": after_a_fault,
    "after eviction": after_eviction,
    "gather": gathered,
    "every row padded": every_row_padded,
    "padded forward": padded_forward,
    "outputs, then none": outputs_then_none,
}
