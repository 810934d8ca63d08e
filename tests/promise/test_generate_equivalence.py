"""The promise: `generate` gives what it gives with `DynamicCache`, logits included, and reuses, on several models.

Each *scene* (scenes.py) is a few calls of one user. Further ways to generate are in test_ways_to_generate.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged_cache import PagedPrefixCache

from ..internals import reused_of_chunks
from ..reference import PROMPT, Forwards, assert_same, batch, row, run
from ..scenes import Player, play
from ..tiny_models import build, tiny

MODELS = ("llama", "mistral", "gemma3", "bloom")
ALIKE = (
    "gpt2",
    "qwen3",
    "mixtral",
    "opt",
)  # to a cache, each is like one of those; they play what moves rows and blocks
pytestmark = pytest.mark.usefixtures("one_thread")


def full_hit(play: Player) -> None:
    play.call(**batch(PROMPT), reused=0)
    play.hit(**batch(PROMPT), reused=49)
    play.cache.reset()
    play.hit(**batch(PROMPT), reused=48)


def full_hit_of_whole_blocks(play: Player) -> None:
    play.call(**batch(row((1, 48))))
    play.hit(**batch(row((1, 48))), reused=47)
    play.cache.reset()
    play.hit(**batch(row((1, 48))), reused=47)


def partial_hit(num_common: int) -> Callable[[Player], None]:
    def scene(play: Player) -> None:
        play.call(**batch(PROMPT))
        play.hit(**batch(row((1, num_common), (2, 20))), reused=num_common)
        play.cache.reset()
        play.hit(**batch(row((1, num_common), (3, 20))), reused=num_common // 16 * 16)

    scene.__name__ = f"partial_hit_of_{num_common}"
    return scene


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


def beams(play: Player) -> None:
    play.build(block_size=4)
    play.call(**batch(PROMPT), num_beams=4, reused=150)
    output = play.hit(**batch(PROMPT), num_beams=4, num_return_sequences=2, reused=199)
    # What the best beam wrote was committed block by block; its rows may be gone, as transformers reorders once more
    # after the last step, when no beam runs any longer. The last token has no keys and values.
    play.hit(**batch(output.sequences[0].tolist() + row((2, 9))), at_least=52)


def batched_beams(play: Player) -> None:
    play.build(block_size=4)
    rows = row((1, 40)), row((4, 30))
    play.call(**batch(*rows), num_beams=3, reused=2 * 70)
    output = play.hit(**batch(*rows), num_beams=3, at_least=2 * 70 + 39 + 29)
    best = [output.sequences[0].tolist(), output.sequences[1, 10:].tolist()]
    play.hit(**batch(*(tokens + row((2, 3)) for tokens in best)), at_least=42 + 32)


def samples(play: Player) -> None:
    sampling = {"do_sample": True, "num_return_sequences": 3}
    play.call(**batch(PROMPT), **sampling, reused=100)
    output = play.hit(**batch(PROMPT), **sampling, seed=1, reused=149)
    rows = [sample.tolist() + row((2, 3)) for sample in output.sequences]
    play.hit(**batch(*rows), reused=3 * 55)


def beam_samples(play: Player) -> None:
    sampling = {"do_sample": True, "num_beams": 3, "num_return_sequences": 3}
    play.call(**batch(PROMPT), **sampling)
    play.hit(**batch(PROMPT), **sampling, seed=1, reused=149)


def prompt_lookup(play: Player) -> None:
    lookup = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 10}
    play.call(**batch(row((1, 20), (1, 20), (1, 9))), **lookup)
    output = play.hit(**batch(row((1, 20), (1, 20), (1, 9))), **lookup, at_least=40)
    play.hit(**batch(output.sequences[0].tolist() + row((1, 9))), **lookup, at_least=50)


def assistant(agrees: bool) -> Callable[[Player], None]:
    def scene(play: Player) -> None:
        helper = tiny("llama", 1) if not agrees else twin(play.model)
        play.call(**batch(PROMPT), assistant_model=helper, max_new_tokens=10)
        output = play.hit(**batch(PROMPT), assistant_model=helper, max_new_tokens=10, at_least=30)
        play.hit(**batch(output.sequences[0].tolist() + row((2, 9))), at_least=48)
        assert "generate" not in vars(helper)  # it ran on the cache that transformers gives it

    scene.__name__ = "assistant_that_agrees" if agrees else "assistant_that_is_wrong"
    return scene


@cache
def twin(model: PreTrainedModel) -> PreTrainedModel:
    """Another model with the same weights."""
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    other.generation_config = model.generation_config
    return other


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


def chunked_prefill_of_beams(play: Player) -> None:
    play.call(**batch(PROMPT), prefill_chunk_size=16, num_beams=3)
    known_in_chunks(play)(**batch(row((1, 40), (2, 10))), prefill_chunk_size=16, num_beams=3, at_least=3 * 32)


def going_on_from_generated_tokens(play: Player) -> None:
    output = play.call(**batch(PROMPT))
    play.hit(**batch(output.sequences[0].tolist() + row((2, 9))), reused=55)
    play.cache.reset()
    play.hit(**batch(output.sequences[0].tolist() + row((3, 9))), reused=48)


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


def two_caches_on_one_store(play: Player) -> None:
    play.call(**batch(PROMPT))
    first = play.cache
    play.other_cache()
    play.hit(**batch(row((1, 45), (2, 9))), reused=32)
    assert first.get_seq_length() == 55  # its rows are as they were


def a_new_cache_in_each_call(play: Player) -> None:
    play.new_cache_each_call = True
    play.call(**batch(PROMPT))
    play.hit(**batch(row((1, 45), (2, 9))), reused=32)
    play.hit(**batch(PROMPT, PROMPT), reused=2 * 50 - 2)


def blocks_of_one_token(play: Player) -> None:
    play.build(block_size=1)
    play.call(**batch(PROMPT))
    play.cache.reset()
    play.hit(**batch(row((1, 33), (2, 9))), num_beams=2, reused=2 * 42 - 9)


def many_turns(play: Player) -> None:
    """Rows come and go: what memory holds of earlier rows is never read."""
    play.call(**batch(PROMPT))
    play.hit(**batch(row((1, 20)), row((1, 33), (2, 8))), at_least=1)
    play.hit(**batch(row((1, 33), (2, 3))), num_beams=3, at_least=36)
    play.call(**batch(row((9, 70))))
    play.hit(**batch(row((1, 33), (2, 8), (3, 5))), at_least=32)


SCENES = (
    full_hit,
    full_hit_of_whole_blocks,
    partial_hit(31),
    partial_hit(32),
    partial_hit(33),
    padded_batch,
    other_padding,
    known_and_unknown_rows,
    beams,
    batched_beams,
    samples,
    beam_samples,
    prompt_lookup,
    assistant(agrees=True),
    assistant(agrees=False),
    chunked_prefill,
    chunked_prefill_of_beams,
    chunks_of_padding,
    going_on_from_generated_tokens,
    going_on_with_new_tokens_only,
    streamer,
    after_eviction,
    two_caches_on_one_store,
    a_new_cache_in_each_call,
    blocks_of_one_token,
    many_turns,
)


MOVING = (padded_batch, known_and_unknown_rows, batched_beams, chunked_prefill, after_eviction, many_turns)


@pytest.mark.parametrize(
    ("scene", "name"),
    [
        pytest.param(scene, name, id=f"{scene.__name__}-{name}")
        for names, scenes in ((MODELS, SCENES), (ALIKE, MOVING))
        for scene in scenes
        for name in names
    ],
)
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
