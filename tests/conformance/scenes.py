"""The scenes that every model plays: each a few calls of one user on a cache of its own.

Lengths are in units of `play.unit` tokens, so that the first prompt is five units and five tokens. A unit is a block,
and five new tokens complete a sixth block. Beams and samples count as reused what equal rows compute once.

Where layers carry states, a unit is 64 tokens: a multiple of what all kernels compute in, and what a forward more
counts for on a CPU. A state is known only where a forward ended, so there a prompt is hit where a snapshot was taken:
at the last place for one before a prompt's last token, where prompts part for the second time, and at the end of what
was generated. Convolutions alone have one at every block.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from ..internals import failing_forward, failing_layer
from ..reference import batch, row
from .player import CellError, Player


def a_prompt(play: Player, seed: int = 1) -> list[int]:
    return row((seed, 5 * play.unit + 5))


def known(play: Player, reused: int, at_least: int) -> dict[str, int]:
    """What a call reuses: exactly that; at least that where layers have windows, whose rows resume exactly where they
    are known; or where they carry states, at least the other number.
    """
    if play.has_states:
        return {"at_least": at_least}
    return {"at_least": reused} if play.has_windows else {"reused": reused}


def cold(play: Player) -> None:
    play.call(**batch(a_prompt(play)), reused=0)


def full_hit(play: Player) -> None:
    prompt, last = batch(a_prompt(play)), 5 * play.unit
    play.fill(**prompt)
    play.hit(**prompt, reused=last if play.has_states else last + 4)
    play.cache.reset()
    play.hit(**prompt, reused=last)


def partial_hit(num_more: int) -> Callable[[Player], None]:
    """With snapshots, the second prompt that parts there is computed whole, and leaves one that the third one hits."""

    def scene(play: Player) -> None:
        num_common = 4 * play.unit + num_more
        second = batch(row((1, num_common), (2, 12)))
        play.fill(**batch(a_prompt(play)))
        if play.has_states and not play.keeps_every_block:
            play.call(**second, reused=0)
        else:
            play.hit(**second, reused=play.places(num_common) if play.has_states else num_common)
        play.cache.reset()
        play.hit(**batch(row((1, num_common), (3, 12))), reused=play.places(num_common))

    return scene


def padded_batch(play: Player) -> None:
    unit, half = play.unit, play.unit // 2

    def rows(first: int, second: int, more: int) -> dict[str, torch.Tensor]:
        return batch(row((1, 4 * unit), (first, unit + more)), row((4, 4 * unit - half), (second, half + more)))

    play.fill(**rows(2, 5, 0))
    if play.has_states:
        play.call(**rows(6, 7, 1), at_least=0)
    else:
        play.hit(**rows(6, 7, 1), **known(play, 7 * unit, 0))
    play.cache.reset()
    play.hit(**rows(8, 9, 1), **known(play, 7 * unit, 3 * unit))


def other_padding(play: Player) -> None:
    unit, other = play.unit, row((4, 4 * play.unit + 3))
    play.fill(**batch(a_prompt(play), other))
    # Where positions are counted from the padding, a row with other padding is another row.
    reused = known(play, 75, 9 * unit) if play.takes_positions else known(play, 15, 5 * unit)
    play.hit(**batch(a_prompt(play) + row((2, 5)), other), **reused)


def known_and_unknown_rows(play: Player) -> None:
    play.fill(**batch(a_prompt(play)))
    rows = batch(a_prompt(play) + row((2, 3)), row((8, 2 * play.unit)))
    play.hit(**rows, **known(play, 32, 5 * play.unit))


def beams(play: Player) -> None:
    prompt = a_prompt(play)
    play.fill(**batch(prompt))
    reused = 3 * len(prompt) - (5 if play.has_states else 1)
    found = play.hit(**batch(prompt), num_beams=3, num_return_sequences=2, reused=reused)
    if play.zeroed:
        return  # what these beams wrote is another text
    best = found.sequences[0].flatten().tolist()
    play.cache.reset()
    play.call(**batch(best + row((2, 5))), reused=play.places(len(prompt) + 4, of_prompt=len(prompt)))


def batched_beams(play: Player) -> None:
    rows = batch(a_prompt(play), row((4, 4 * play.unit + 5)))
    play.fill(**rows)
    play.hit(**rows, num_beams=2, reused=2 * (9 * play.unit + 10) - (10 if play.has_states else 2))


def samples(play: Player) -> None:
    prompt = a_prompt(play)
    play.fill(**batch(prompt))
    reused = 3 * len(prompt) - (5 if play.has_states else 1)
    play.hit(**batch(prompt), do_sample=True, num_return_sequences=3, seed=1, reused=reused)


def prompt_lookup(play: Player) -> None:
    prompt = batch(row((1, 2 * play.unit - 1), (1, 2 * play.unit - 1), (1, play.unit + 1)))
    play.fill(**prompt)
    play.hit(**prompt, prompt_lookup_num_tokens=3, max_new_tokens=8, at_least=4 * play.unit)


def chunked_prefill(play: Player) -> None:
    chunks = {"prefill_chunk_size": 2 * play.unit}
    play.reference(**batch(a_prompt(play)), **chunks)  # or transformers itself refuses it
    play.fill(**batch(a_prompt(play)), **chunks)
    play.hit(**batch(a_prompt(play) + row((2, 7))), **chunks, at_least=0)


def going_on(play: Player) -> None:
    prompt = a_prompt(play)
    whole = play.call(**batch(prompt)).sequences[0].flatten().tolist()
    num_run = len(whole) - 1
    play.hit(**batch(whole + row((2, 5))), reused=5 * play.unit if play.clamps_one_token else num_run)
    play.cache.reset()
    play.hit(**batch(whole + row((3, 5))), reused=play.places(num_run, of_prompt=len(prompt)))


def nothing_shared(play: Player) -> None:
    play.fill(**batch(a_prompt(play)))
    play.call(**batch(a_prompt(play, 9)), reused=0)


class _FaultError(Exception):
    """Raised in a middle layer."""


def after_a_fault(play: Player) -> None:
    """A forward that dies in a prompt; with states, which are of no row then, also in the middle of a generation."""
    num_common = 2 * play.unit + (16 if play.has_states else 4)
    parted = batch(row((1, num_common), (5, 3 * play.unit + 1)))
    play.fill(**batch(a_prompt(play)))
    for number in (1, 3) if play.has_states else (1,):
        try:
            with _fault(play, number):
                play.fill(**parted, max_new_tokens=4)
        except _FaultError:
            continue
        raise CellError("different", f"the fault in forward {number} did not come out of generate")
    if play.has_states:
        play.call(**parted, at_least=0)
        play.cache.reset()
        parted = batch(row((1, num_common), (6, 3 * play.unit)))
    play.hit(**parted, at_least=play.places(num_common))


def _fault(play: Player, number: int) -> AbstractContextManager[None]:
    if play.has_states or play.cache.stats().num_bypassed_calls:  # their layers are transformers' own
        return failing_forward(play.model, number, _FaultError())
    layers = [number for number in range(len(play.cache.layers)) if play.cache.get_seq_length(number)]
    return failing_layer(play.cache, layers[len(layers) // 2], _FaultError())


def after_eviction(play: Player) -> None:
    num_blocks = 12 * play.unit // 8  # where each call needs more than half
    play.build(num_blocks=num_blocks)
    for seed in (1, 2, 3):
        play.fill(**batch(a_prompt(play, seed)))
    play.hit(**batch(row((3, 5 * play.unit), (2, 5))), reused=5 * play.unit)
    play.call(**batch(a_prompt(play)))
    if play.reuses and play.cache.stats().num_evictions == 0:
        raise CellError("no reuse", f"nothing was evicted from a pool of {num_blocks} blocks")


def behind_padding(num_pads: int, *rows: list[int]) -> dict[str, torch.Tensor]:
    """A batch with so many columns of padding before all of its rows, as `pad_to_multiple_of` gives them."""
    return {name: torch.nn.functional.pad(value, (num_pads, 0)) for name, value in batch(*rows).items()}


def every_row_padded(play: Player) -> None:
    """On an empty store; then without padding, which some models with states find only behind as much of it."""
    prompt = a_prompt(play)
    for rows in ([prompt], [prompt, row((4, 4 * play.unit))]):
        play.build()
        play.call(**behind_padding(3, *rows), reused=0)
        play.hit(**batch(prompt), **known(play, 44 if play.takes_positions else 0, 0))
        play.cache.reset()
        play.hit(**batch(prompt + row((2, 5))), **known(play, 40, 5 * play.unit))


def padded_forward(play: Player) -> None:
    """The same of a plain forward."""
    prompt = a_prompt(play)
    for rows in ([prompt], [prompt, row((4, 4 * play.unit))]):
        play.build()
        play.forward(**behind_padding(3, *rows))
        if play.has_states:
            play.call(**batch(prompt), at_least=0)
        else:
            play.hit(**batch(prompt), reused=44 if play.takes_positions else 0)
        play.cache.reset()
        play.hit(**batch(prompt + row((2, 5))), **known(play, 40, 0))


def outputs_then_none(play: Player) -> None:
    """Calls with each output flag, whose forwards are not cut for a snapshot, on an empty store; then without."""
    prompt, last = batch(a_prompt(play)), 5 * play.unit
    for flag in filter(play.takes, OUTPUT_FLAGS):
        try:
            play.reference(**prompt, **{flag: True})
        except CellError:
            continue  # transformers itself refuses it
        play.build()
        play.call(**prompt, **{flag: True}, reused=0)
        play.cache.reset()
        play.hit(**prompt, **known(play, 0, 0))
        play.build()
        play.fill(**prompt)
        play.call(**prompt, **{flag: True}, **known(play, 0, 0))
        play.cache.reset()
        play.hit(**prompt, reused=last)


OUTPUT_FLAGS = ("output_hidden_states", "output_attentions", "output_router_logits")

SCENES: dict[str, Callable[[Player], None]] = {
    "cold": cold,
    "full hit": full_hit,
    "hit of k blocks - 1": partial_hit(-1),
    "hit of k blocks": partial_hit(0),
    "hit of k blocks + 1": partial_hit(1),
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
    "every row padded": every_row_padded,
    "padded forward": padded_forward,
    "outputs, then none": outputs_then_none,
}
