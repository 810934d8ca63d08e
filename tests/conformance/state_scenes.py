"""What each type's comparison must see beside zeros, where layers carry states."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ..internals import forget_to_reorder_states, keep_no_copies, lend_snapshots_themselves, snapshot_behind
from ..reference import batch, row
from .player import Player
from .scenes import a_prompt

KNOWN = 5 * 64  # tokens of the prompt of 325


def one_token_old(play: Player) -> None:
    """A hit on the states after one token less."""
    play.fill(**batch(a_prompt(play)))
    old = play.states_behind(a_prompt(play)[: KNOWN - 1])
    for key, held in snapshot_behind(play.cache, KNOWN).items():
        held.copy_(old[key])
    play.cache.reset()
    play.spoiled(**batch(a_prompt(play)))


def not_reordered(play: Player) -> None:
    """Beams that resume from the states of others."""
    play.fill(**batch(a_prompt(play)))
    with pytest.MonkeyPatch.context() as patch:
        forget_to_reorder_states(patch)
        play.spoiled(**batch(a_prompt(play)), num_beams=3, num_return_sequences=2, max_new_tokens=8)


def written_by_a_borrower(play: Player) -> None:
    """A snapshot that is lent as it is: the first row that resumes from it overwrites it."""
    play.fill(**batch(a_prompt(play)))
    play.cache.reset()
    with pytest.MonkeyPatch.context() as patch:
        lend_snapshots_themselves(patch)
        play.fill(**batch(a_prompt(play)))
    play.cache.reset()
    play.spoiled(**batch(a_prompt(play)))


def written_by_the_row_that_left_it(play: Player) -> None:
    """A snapshot that is no copy: the row from which it was taken token by token resumes and overwrites it."""
    if play.clamps_one_token:
        return  # none is taken there
    prompt = batch(a_prompt(play)[: KNOWN - 3])
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
