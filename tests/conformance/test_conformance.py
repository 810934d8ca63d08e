"""The commonest model types and one in 24 in every scene, those with windows with 4 of the 15 in turn.

`python -m tests.conformance` runs all of them and stores what came out.
"""

import random
import re
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from . import zoo
from .examine import DEFECTS, TypeResult, examine
from .report import STORED, counts, load, table
from .scenes import SCENES
from .windows import WINDOWS
from .zoo import VARIANTS, model_types
from .zoo_settings import CANNOT_BUILD

COMMON = ("llama", "mistral", "gemma3_text", "bloom")
SEED = 1458  # of the part that is run, so that it has each window; another one with each release
NUM_WINDOWS = 4  # of each type that has some; the next type plays others
MOST_NOT_BUILT = 4
LEAST_IDENTICAL = 168
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types", "block_types")


def chosen() -> list[str]:
    names = [*model_types(), *VARIANTS]
    some = sorted(random.Random(SEED).sample(names, len(names) // 24))
    return [*some, *(name for name in COMMON if name not in some)]


def windows_in_turn(number: int) -> list[int]:
    """Those that the type of this number plays; with each type they begin 4 further, so that 15 types begin at each."""
    return [WINDOWS[(SEED + 4 * number + step) % len(WINDOWS)] for step in range(NUM_WINDOWS)]


@pytest.fixture(scope="module")
def stored() -> dict[str, Any]:
    return load()


@pytest.mark.parametrize(("number", "name"), [*enumerate(chosen())], ids=chosen())
def test_a_type_is_identical_in_every_scene_or_refused_as_stored(
    number: int, name: str, stored: dict[str, Any]
) -> None:
    result = examine(name, windows_in_turn(number))
    assert not result.is_defect, told(result)
    if stored["versions"]["transformers"] == transformers.__version__:
        kept = stored["types"][name]
        assert (result.outcome, unmeasured(result.reason)) == (kept["outcome"], unmeasured(kept.get("reason", "")))
        not_same = {scene: cell for scene, cell in kept.get("cells", {}).items() if scene in result.cells}
        assert {scene: cell for scene, cell in result.cells.items() if cell != "same"} == not_same


def unmeasured(reason: str) -> str:
    """A reason without its numbers, which differ between machines."""
    return re.sub(r"[0-9.]+", "#", reason)


def told(result: TypeResult) -> str:
    cells = [f"{scene}: {cell}" for scene, cell in result.cells.items() if cell != "same"]
    return "\n".join([f"{result.name} is {result.outcome} {result.reason}", *cells])


def test_what_is_stored_keeps_the_promise(stored: dict[str, Any]) -> None:
    outcomes = {name: result["outcome"] for name, result in stored["types"].items()}
    assert not set(outcomes.values()) & set(DEFECTS)
    numbers = counts(outcomes)
    assert numbers == stored["counts"]
    assert numbers["identical"] >= LEAST_IDENTICAL
    assert numbers.get("not built", 0) <= MOST_NOT_BUILT
    for name, result in stored["types"].items():
        assert result["outcome"] == "identical" or result["reason"], f"{name} has no reason"
        assert result.get("num_windows", 0) in (0, len(WINDOWS)), f"{name} was played with some of the windows"
        assert set(result.get("cells", {})) <= {*SCENES, *(f"window of {window} tokens" for window in WINDOWS)}


def require_the_types_stored(stored: dict[str, Any]) -> None:
    if stored["versions"]["transformers"] != transformers.__version__:
        pytest.skip("made with another version of transformers, which lists other types")


def test_types_with_windows_in_some_layers_and_in_all_are_stored_with_every_window(stored: dict[str, Any]) -> None:
    assert {"gemma3", "gpt_oss", "llama4", "mistral"} <= {
        name for name, result in stored["types"].items() if result.get("num_windows") == len(WINDOWS)
    }


def test_the_part_that_is_played_here_has_each_window(stored: dict[str, Any]) -> None:
    require_the_types_stored(stored)
    played = [
        windows_in_turn(number)
        for number, name in enumerate(chosen())
        if stored["types"].get(name, {}).get("num_windows")
    ]
    assert set(WINDOWS) == {window for windows in played for window in windows}


def test_every_type_that_transformers_lists_is_stored(stored: dict[str, Any]) -> None:
    require_the_types_stored(stored)
    assert set(stored["types"]) == {*model_types(), *VARIANTS}


def test_the_docs_table_is_made_of_what_is_stored(stored: dict[str, Any]) -> None:
    page = STORED.parents[2] / "docs" / "supported_models.md"
    assert page.read_text(encoding="utf-8") == table(stored)


def kinds_of_layers(config: PreTrainedConfig) -> set[tuple[str, str]]:
    return {(name, kind) for name in KINDS for kind in getattr(config, name, None) or ()}


def test_all_types_have_a_tiny_configuration_with_every_kind_of_layer_of_the_default() -> None:
    for name in [*model_types(), *VARIANTS]:
        if name in CANNOT_BUILD:
            continue
        _, config = zoo.configuration(name)
        tiny, default = config.get_text_config(decoder=True), type(config)().get_text_config(decoder=True)
        assert kinds_of_layers(default) <= kinds_of_layers(tiny), name
        assert tiny.vocab_size <= 260, name
        assert getattr(tiny, "hidden_size", 64) <= 64, name


def test_a_model_is_the_same_for_the_same_seed_and_leaves_the_generator_as_it_was() -> None:
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    first, again, other = (zoo.build("mixtral", seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_what_has_no_tiny_model_says_why_and_an_unknown_name_is_an_error() -> None:
    assert len(CANNOT_BUILD) <= 4
    for name in CANNOT_BUILD:
        with pytest.raises(zoo.CannotBuildError, match=name):
            zoo.build(name)
    for name in ("no_such_type", "llama@no_such_variant"):
        with pytest.raises(KeyError):
            zoo.build(name)
