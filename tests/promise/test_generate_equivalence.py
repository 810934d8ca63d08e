"""The promise: `generate` gives what it gives with `DynamicCache`, logits included, and reuses, on several models.

Each *scene* (scenes.py) is a few calls of one user. Further ways to generate are in test_ways_to_generate.py; what is
short and common, tests/conformance plays on all types of models, and tests/differential in random programs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_paged_cache import PagedPrefixCache

from ..internals import reused_of_chunks
from ..reference import PROMPT, Forwards, assert_same, batch, row, run
from ..scenes import Player, play
from ..tiny_models import build, tiny

MODELS = ("llama", "mistral", "gemma3", "bloom")
pytestmark = pytest.mark.usefixtures("one_thread")


def full_hit(play: Player) -> None:
    play.call(**batch(PROMPT), reused=0)
    play.hit(**batch(PROMPT), reused=49)
    play.cache.reset()
    play.hit(**batch(PROMPT), reused=48)


def padded_batch(play: Player) -> None:
    play.call(**batch(row((1, 40), (2, 10)), row((4, 36), (5, 4))), reused=0)
    play.hit(**batch(row((1, 40), (6, 14)), row((4, 36), (7, 8))), at_least=40 + 40 - 10)
    play.cache.reset()
    play.hit(**batch(row((1, 40), (6, 14)), row((4, 36), (7, 8))), at_least=42 + 42 - 10)


def other_padding(play: Player) -> None:
    play.call(**batch(row((1, 54)), row((4, 44))))
    # Where positions follow the padding, the padding is part of the root.
    play.hit(**batch(row((1, 54), (2, 6)), row((4, 44))), at_least=54 + 54 - 16 if play.takes_positions else 16)


def known_and_unknown_rows(play: Player) -> None:
    play.call(**batch(PROMPT))
    play.hit(**batch(row((1, 50), (2, 4)), row((8, 30))), at_least=24)
    if play.reuses:
        known, unknown = play.cache.last_call.rows
        assert (known.matched_tokens, unknown.matched_tokens) == (50, 0)
    play.cache.reset()
    play.hit(**batch(row((8, 30)), row((9, 20)), row((1, 50), (2, 4))), at_least=34)


def batched_beams(play: Player) -> None:
    play.build(block_size=4)
    rows = row((1, 40)), row((4, 30))
    play.call(**batch(*rows), num_beams=3, reused=2 * 70)
    output = play.hit(**batch(*rows), num_beams=3, at_least=2 * 70 + 39 + 29)
    best = [output.sequences[0].tolist(), output.sequences[1, 10:].tolist()]
    play.hit(**batch(*(tokens + row((2, 3)) for tokens in best)), at_least=42 + 32)


def known_in_chunks(play: Player) -> Callable[..., Any]:
    """How a known prompt is played in chunks: before transformers 5.23 it is computed whole."""
    if reused_of_chunks(1):
        return play.hit
    return lambda reused=0, at_least=0, **given: play.call(**given)


def chunked_prefill(play: Player) -> None:
    play.call(**batch(PROMPT), prefill_chunk_size=16)
    known_in_chunks(play)(**batch(row((1, 50), (2, 13))), prefill_chunk_size=16, reused=3 * 16)
    play.call(**batch(row((1, 50), (3, 9))), prefill_chunk_size=13)


def chunks_of_padding(play: Player) -> None:
    """The first chunks of the second row hold no token of it."""
    play.call(**batch(row((1, 50)), row((4, 16))), prefill_chunk_size=13)
    play.call(**batch(row((1, 48), (2, 2)), row((4, 16))), prefill_chunk_size=13)
    play.call(**batch(row((1, 48), (2, 2)), row((4, 16)), row((4, 16))), prefill_chunk_size=8, num_beams=2)


def going_on_with_new_tokens_only(play: Player) -> None:
    output = play.call(**batch(PROMPT, row((4, 30))))
    assert output.past_key_values is not play.cache  # it is given the rows
    new = torch.tensor([row((2, 7)), row((3, 7))])
    whole = torch.cat((output.sequences.cpu(), new), dim=1)
    mask = torch.cat((batch(PROMPT, row((4, 30)))["attention_mask"], torch.ones(2, 13, dtype=torch.int64)), dim=1)
    play.hit(whole_prompt={"input_ids": whole, "attention_mask": mask}, input_ids=whole[:, 55:], attention_mask=mask)


class Listener:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.tokens += tokens.flatten().tolist()

    def end(self) -> None:
        pass


def streamer(play: Player) -> None:
    play.call(**batch(PROMPT))
    listener = Listener()
    output = play.hit(**batch(row((1, 40), (2, 9))), streamer=listener, reused=40)
    assert listener.tokens[-55:] == output.sequences[0].tolist()


def after_eviction(play: Player) -> None:
    play.build(num_blocks=9)
    for seed in (1, 2, 3, 1, 2):
        play.call(**batch(row((seed, 50))))
    assert play.cache.stats().num_evictions > 0 or not play.reuses
    play.hit(**batch(row((2, 45), (3, 5))), reused=45)


def many_turns(play: Player) -> None:
    """Rows come and go: what memory holds of earlier rows is never read."""
    play.call(**batch(PROMPT))
    play.hit(**batch(row((1, 20)), row((1, 33), (2, 8))), at_least=1)
    play.hit(**batch(row((1, 33), (2, 3))), num_beams=3, at_least=36)
    play.call(**batch(row((9, 70))))
    play.hit(**batch(row((1, 33), (2, 8), (3, 5))), at_least=32)


def assistant(play: Player) -> None:
    helper = tiny("llama", 1)
    play.call(**batch(PROMPT), assistant_model=helper, max_new_tokens=10)
    output = play.hit(**batch(PROMPT), assistant_model=helper, max_new_tokens=10, at_least=30)
    play.hit(**batch(output.sequences[0].tolist() + row((2, 9))), at_least=48)
    assert "generate" not in vars(helper)  # it ran on the cache that transformers gives it


MOVING = (padded_batch, known_and_unknown_rows, batched_beams, chunked_prefill, after_eviction, many_turns)
SCENES = (*MOVING, full_hit, other_padding, assistant, chunks_of_padding, going_on_with_new_tokens_only, streamer)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_generate_gives_what_it_gives_with_dynamic_cache(scene: Callable[[Player], None], name: str) -> None:
    play(scene, tiny(name))


@pytest.mark.parametrize("how", [{"num_beams": 4}, {"do_sample": True, "num_return_sequences": 4}, {}])
def test_equal_rows_of_a_prompt_are_computed_once(how: dict[str, Any]) -> None:
    model = build("llama")
    cache = PagedPrefixCache(model)
    rows = [PROMPT] if how else [PROMPT] * 4
    with Forwards(model) as shapes:
        output = run(model, cache, **batch(*rows), **how)
    assert shapes == [(1, 50), *[(4, 1)] * 5]
    assert_same(run(model, **batch(*rows), **how), output)
