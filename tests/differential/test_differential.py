from typing import Any

import pytest
import torch

from hf_paged_cache import UnsupportedModelError
from hf_paged_cache.call.find import Finding
from tests.differential import images
from tests.differential.__main__ import draw, play_drawn
from tests.differential.comparing import DifferenceError, compare
from tests.differential.kinds import KINDS, build
from tests.differential.playing import Player, play, shrink
from tests.differential.tools import tokenizer
from tests.internals import zero_blocks, zero_states

PLAYED = (
    *("llama", "gemma3_text", "mistral", "gpt2", "bloom", "deepseek_v3", "qwen3_next", "lfm2", "falcon_h1"),
    *("inkling_text", "images:qwen2_vl", "images:gemma3", "images:idefics3"),
)
SEED, NUM_PARTS = 500, 8
FOUND = [  # that failed once
    ("qwen4_exp", 52791),  # refused after it had computed something
    ("qwen4_exp", 9443),  # columns that had run at other positions were weighed as if they had not
    (
        "qwen4_exp_text@per_layer_embedding",
        530,
    ),  # a look at cached blocks took the token ids that it carries for floats
    ("phi4_multimodal@longrope", 178),  # refused because an output was never tried
]


def spoil(player: Player) -> None:
    """Whatever is reused from here on is zeros."""
    for store in player.stores():
        zero_blocks(store)
        zero_states(store)


@pytest.mark.parametrize(("kind", "seed"), [*((kind, SEED) for kind in PLAYED), *FOUND])
def test_random_programs_give_what_a_fresh_dynamic_cache_gives(kind: str, seed: int) -> None:
    played = play_drawn(kind, seed)
    assert not played.failure, f"{played.failure.message}\n{played.failure.case.script()}"
    assert played.reused or not kind.startswith("images:")


@pytest.mark.parametrize("number", range(NUM_PARTS))
def test_a_random_program_of_each_kind_gives_what_a_fresh_dynamic_cache_gives(number: int) -> None:
    # More of them, and variants of the types: python -m tests.differential --cases 2000 --seed 1000
    kinds = [*(kind for kind in KINDS if "@" not in kind), *(images.PREFIX + kind for kind in images.KINDS)]
    num_reused = 0
    for position in range(number, len(kinds), NUM_PARTS):
        try:
            played = play_drawn(kinds[position], SEED + position)
        except UnsupportedModelError:  # test_conformance.py says which and why
            continue
        assert not played.failure, f"{played.failure.message}\n{played.failure.case.script()}"
        num_reused += played.reused
    assert num_reused


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "lfm2", "falcon_h1", "deepseek_v3"])
def test_random_calls_in_chunks_give_the_same_bits(kind: str) -> None:
    num_reused = 0
    for seed in range(SEED, SEED + 4):
        played = play_drawn(f"bits:{kind}", seed)
        assert not played.failure, f"{played.failure.message}\n{played.failure.case.script()}"
        num_reused += played.reused
    assert num_reused


def test_hits_inside_a_chunk_are_seen_in_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    look_together = Finding.look_together
    monkeypatch.setattr(Finding, "look_together", lambda self, latest, _: look_together(self, latest, 1))
    assert any(play_drawn("bits:llama", seed).failure for seed in range(SEED, SEED + 20))


@pytest.mark.parametrize("kind", ["llama", "lfm2", "images:qwen2_vl"])
def test_wrong_numbers_in_the_pool_are_reported_with_a_case_of_few_actions(kind: str) -> None:
    drawn = (draw(kind, seed) for seed in range(SEED, SEED + 20))
    failures = (play(each.case, each.actions, spoil).failure for each in drawn)
    failure = next(failure for failure in failures if failure and failure.category == "difference")
    smaller = shrink(failure, spoil)
    assert 2 <= len(smaller.case.actions) <= len(failure.case.actions)
    assert play(smaller.case, mutate=spoil).failure
    assert not play(smaller.case).failure


@pytest.mark.parametrize("kind", ["llama", "images:llava"])
def test_the_script_of_a_case_runs_by_itself(kind: str) -> None:
    played = (play_drawn(kind, seed) for seed in range(SEED + 1, SEED + 20))
    case = next(each.case for each in played if not each.refusals)
    assert len(case.actions) > 2
    assert "compare(ours, reference" in case.script()
    names: dict[str, Any] = {}
    exec(case.script(), names)
    if "small" in names:
        names["small"].undo()


def test_a_kind_that_the_library_refuses_is_left_out_with_its_reason() -> None:
    with pytest.raises(UnsupportedModelError, match="scan"):
        draw("mamba", SEED)


def test_stop_strings_stop_a_call() -> None:
    model = build("llama")
    ids, words = torch.tensor([[5, 6, 7]]), tokenizer()
    free = model.generate(ids, max_new_tokens=6, do_sample=False)
    stop = words.decode(free[0, 4])
    stopped = model.generate(ids, max_new_tokens=6, do_sample=False, stop_strings=[stop], tokenizer=words)
    assert stopped.shape[1] <= 5 < free.shape[1]


def test_padding_does_not_count_and_all_else_does() -> None:
    ours, reference = torch.zeros(1, 3, 4), torch.zeros(1, 3, 4)
    reference[0, 2] = 1.0
    ours[0, 2] = 1.0
    ours[0, 0] = 9.0
    logits = [[{"logits": values, "size": 3}] for values in (ours, reference)]
    compare(*logits, mask=[[0, 1, 1]])
    with pytest.raises(DifferenceError, match="differs by 9"):
        compare(*logits, mask=[[1, 1, 1]])
