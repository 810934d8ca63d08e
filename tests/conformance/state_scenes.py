"""The scenes of models whose layers carry states: the same calls as in `scenes`, with lengths in units of 64 tokens.

A state is known only where a forward ended, so here a prompt is hit where a snapshot was taken: at the last place for one
before a prompt's last token, where prompts part for the second time, and at the end of what was generated. Convolutions alone
have one at every block. 64 is a multiple of what all kernels compute in, and what a forward more counts for on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..internals import (
    failing_forward,
    forget_to_reorder_states,
    keep_no_copies,
    lend_snapshots_themselves,
    snapshot_behind,
)
from ..reference import batch, row
from . import scenes
from .player import CellError, Player

U = 64
PROMPT = row((1, 5 * U + 5))  # five units, and five tokens of which the last is always computed
KNOWN = 5 * U


def cold(play: Player) -> None:
    play.call(**batch(PROMPT), reused=0)


def full_hit(play: Player) -> None:
    play.fill(**batch(PROMPT))
    play.hit(**batch(PROMPT), reused=KNOWN)
    play.cache.reset()
    play.hit(**batch(PROMPT), reused=KNOWN)


def partial_hit(num_common: int) -> Callable[[Player], None]:
    """The second prompt that parts there is computed from its start, and leaves a snapshot; the third one hits it."""

    def scene(play: Player) -> None:
        common = play.places(num_common)
        play.fill(**batch(PROMPT))
        if play.keeps_every_block:
            play.hit(**batch(row((1, num_common), (2, 12))), reused=common)
        else:
            play.call(**batch(row((1, num_common), (2, 12))), reused=0)
        play.cache.reset()
        play.hit(**batch(row((1, num_common), (3, 12))), reused=common)

    return scene


def padded_batch(play: Player) -> None:
    half = U // 2
    play.fill(**batch(row((1, 4 * U), (2, U)), row((4, 4 * U - half), (5, half))))
    play.call(**batch(row((1, 4 * U), (6, U + 1)), row((4, 4 * U - half), (7, half + 1))), at_least=0)
    play.cache.reset()
    play.hit(**batch(row((1, 4 * U), (8, U + 1)), row((4, 4 * U - half), (9, half + 1))), at_least=3 * U)


def other_padding(play: Player) -> None:
    play.fill(**batch(row((1, 5 * U + 5)), row((4, 4 * U + 5))))
    longer = batch(row((1, 5 * U + 5), (2, 5)), row((4, 4 * U + 5)))
    # Where positions are counted from the padding, a row with other padding is another row.
    play.hit(**longer, at_least=9 * U if play.takes_positions else 5 * U)


def known_and_unknown_rows(play: Player) -> None:
    play.fill(**batch(PROMPT))
    play.hit(**batch(row((1, 5 * U + 5), (2, 3)), row((8, 2 * U))), at_least=5 * U)


def beams(play: Player) -> None:
    play.fill(**batch(PROMPT))
    found = play.hit(**batch(PROMPT), num_beams=3, num_return_sequences=2, reused=3 * len(PROMPT) - 5)
    if play.zeroed:
        return  # what these beams wrote is another text
    best = found.sequences[0].flatten().tolist()
    play.cache.reset()
    play.call(**batch(best + row((2, 5))), reused=play.places(len(PROMPT) + 4, of_prompt=len(PROMPT)))


def batched_beams(play: Player) -> None:
    rows = batch(row((1, 5 * U + 5)), row((4, 4 * U + 5)))
    play.fill(**rows)
    play.hit(**rows, num_beams=2, reused=2 * (9 * U + 10) - 10)


def samples(play: Player) -> None:
    play.fill(**batch(PROMPT))
    play.hit(**batch(PROMPT), do_sample=True, num_return_sequences=3, seed=1, reused=3 * len(PROMPT) - 5)


def prompt_lookup(play: Player) -> None:
    prompt = batch(row((1, 2 * U - 1), (1, 2 * U - 1), (1, U + 1)))
    play.fill(**prompt)
    play.hit(**prompt, prompt_lookup_num_tokens=3, max_new_tokens=8, at_least=4 * U)


def chunked_prefill(play: Player) -> None:
    play.reference(**batch(PROMPT), prefill_chunk_size=2 * U)  # or transformers itself refuses it
    play.fill(**batch(PROMPT), prefill_chunk_size=2 * U)
    play.hit(**batch(row((1, 5 * U + 5), (2, 7))), prefill_chunk_size=2 * U, at_least=0)


def going_on(play: Player) -> None:
    whole = play.call(**batch(PROMPT)).sequences[0].flatten().tolist()
    num_run = len(whole) - 1
    again = num_run if not play.clamps_one_token else KNOWN
    play.hit(**batch(whole + row((2, 5))), reused=again)
    play.cache.reset()
    play.hit(**batch(whole + row((3, 5))), reused=play.places(num_run, of_prompt=len(PROMPT)))


def nothing_shared(play: Player) -> None:
    play.fill(**batch(PROMPT))
    play.call(**batch(row((9, 5 * U + 5))), reused=0)


class _FaultError(Exception):
    """Raised in a middle layer."""


def after_a_fault(play: Player) -> None:
    """A forward that dies leaves states that are of no row: in a prompt, and in the middle of a generation."""
    play.fill(**batch(PROMPT))
    parted = batch(row((1, 2 * U + 16), (5, 3 * U)))
    for number in (1, 3):
        try:
            with failing_forward(play.model, number, _FaultError()):
                play.fill(**parted, max_new_tokens=4)
        except _FaultError:
            continue
        raise CellError("different", f"the fault in forward {number} did not come out of generate")
    play.call(**parted, at_least=0)
    play.cache.reset()
    play.hit(**batch(row((1, 2 * U + 16), (6, 3 * U))), reused=play.places(2 * U + 16))


def after_eviction(play: Player) -> None:
    num_blocks = 12 * U // 8  # where each call needs 42
    play.build(num_blocks=num_blocks)
    for seed in (1, 2, 3):
        play.fill(**batch(row((seed, 5 * U + 5))))
    play.hit(**batch(row((3, 5 * U), (2, 5))), reused=5 * U)
    play.call(**batch(PROMPT))
    if play.cache.stats().num_evictions == 0:
        raise CellError("no reuse", f"nothing was evicted from a pool of {num_blocks} blocks")


def gathered(play: Player) -> None:
    play.build(attention="gather")
    play.fill(**batch(PROMPT))
    play.hit(**batch(row((1, 5 * U + 5), (2, 3)), row((8, 2 * U))), at_least=5 * U)
    play.hit(**batch(PROMPT), num_beams=3, at_least=3 * KNOWN)


def every_row_padded(play: Player) -> None:
    """On an empty store; then one of the prompts without padding, which some of these models find after as much alone."""
    for attention, rows in (("paged", [PROMPT]), ("gather", [PROMPT, row((4, 4 * U))])):
        play.build(attention=attention)
        play.call(**scenes.behind_padding(3, *rows), reused=0)
        play.hit(**batch(PROMPT), at_least=0)
        play.cache.reset()
        play.hit(**batch(row((1, 5 * U + 5), (2, 5))), at_least=KNOWN)


def padded_forward(play: Player) -> None:
    """The same of a plain forward."""
    for attention, rows in (("gather", [PROMPT]), ("paged", [PROMPT, row((4, 4 * U))])):
        play.build(attention=attention)
        play.forward(**scenes.behind_padding(3, *rows))
        play.call(**batch(PROMPT), at_least=0)
        play.cache.reset()
        play.hit(**batch(row((1, 5 * U + 5), (2, 5))), at_least=0)


def outputs_then_none(play: Player) -> None:
    """Calls with each output flag, whose forwards are not cut for a snapshot, on an empty store; then without."""
    for flag in filter(play.takes, scenes.OUTPUT_FLAGS):
        try:
            play.reference(**batch(PROMPT), **{flag: True})
        except CellError:
            continue  # transformers itself refuses it
        play.build()
        play.call(**batch(PROMPT), **{flag: True}, reused=0)
        play.cache.reset()
        play.hit(**batch(PROMPT), at_least=0)
        play.build(attention="gather")
        play.fill(**batch(PROMPT))
        play.call(**batch(PROMPT), **{flag: True}, at_least=0)
        play.cache.reset()
        play.hit(**batch(PROMPT), reused=KNOWN)


STATE_SCENES: dict[str, Callable[[Player], None]] = {
    "cold": cold,
    "full hit": full_hit,
    "hit of k blocks - 1": partial_hit(4 * U - 1),
    "hit of k blocks": partial_hit(4 * U),
    "hit of k blocks + 1": partial_hit(4 * U + 1),
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
assert STATE_SCENES.keys() == scenes.SCENES.keys()


# What each type's comparison must see, beside zeros.


def one_token_old(play: Player) -> None:
    """A hit on the states after one token less."""
    play.fill(**batch(PROMPT))
    old = play.states_behind(PROMPT[: KNOWN - 1])
    for key, held in snapshot_behind(play.cache, KNOWN).items():
        held.copy_(old[key])
    play.cache.reset()
    play.spoiled(**batch(PROMPT))


def not_reordered(play: Player) -> None:
    """Beams that resume from the states of others."""
    play.fill(**batch(PROMPT))
    with pytest.MonkeyPatch.context() as patch:
        forget_to_reorder_states(patch)
        play.spoiled(**batch(PROMPT), num_beams=3, num_return_sequences=2, max_new_tokens=8)


def written_by_a_borrower(play: Player) -> None:
    """A snapshot that is lent as it is: the first row that resumes from it overwrites it."""
    play.fill(**batch(PROMPT))
    play.cache.reset()
    with pytest.MonkeyPatch.context() as patch:
        lend_snapshots_themselves(patch)
        play.fill(**batch(PROMPT))
    play.cache.reset()
    play.spoiled(**batch(PROMPT))


def written_by_the_row_that_left_it(play: Player) -> None:
    """A snapshot that is no copy: the row from which it was taken token by token resumes and overwrites it."""
    if play.clamps_one_token:
        return  # none is taken there
    prompt = batch(PROMPT[: KNOWN - 3])
    whole = play.reference(**prompt, max_new_tokens=9).sequences[0].tolist()
    with pytest.MonkeyPatch.context() as patch:
        keep_no_copies(patch)
        play.fill(**prompt, max_new_tokens=9)
    play.cache.reset()
    play.spoiled(**batch(whole[:KNOWN] + row((2, 5))))


SPOILED: dict[str, Callable[[Player], None]] = {
    "states one token old": one_token_old,
    "states not reordered": not_reordered,
    "states written by a borrower": written_by_a_borrower,
    "states written by the row that left them": written_by_the_row_that_left_it,
}
