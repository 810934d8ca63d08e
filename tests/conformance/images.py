"""Image-text models of all types: prompts with images give what they give with `DynamicCache`, and known images do not
run again.

python -m tests.conformance.images [--types NAMES] [--block-size 8] [--table docs/supported_image_models.md]
"""

from __future__ import annotations

import argparse
import functools
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from hf_paged_cache import PagedCacheError, PagedPrefixCache, UnsupportedModelError

from ..reference import assert_same, is_same, run, zero_blocks
from .image_zoo import Layout, build, layout_of, model_types, prompt, tokens

BLOCK_SIZE = 8
_TEXT = tokens(1, 27)
_FIRST, _SECOND = 1, 2  # seeds of images
SCENES = (
    "text alone",
    "one image",
    "another image",
    "an image first",
    "two images",
    "the same image twice",
    "a batch",
    "beams and samples",
)


class Outcome(NamedTuple):
    """What was seen of a type: "identical", "computed whole", "refused", "not built", "fails", "different"; and why."""

    name: str
    outcome: str
    why: str = ""
    scenes: tuple[str, ...] = ()  # in which an image was reused


class Towers:
    """Counts the images that a model's towers are run for, until the block is left."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.num_runs = 0
        self._kind = type(model.base_model)
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Towers:
        encode: Any = getattr(self._kind, "get_image_features", None)
        if encode is not None:

            @functools.wraps(encode)
            def counting(*args: Any, **kwargs: Any) -> Any:
                self.num_runs += 1
                return encode(*args, **kwargs)

            self._patch.setattr(self._kind, "get_image_features", counting)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


class Player:
    """Plays the scenes of one model."""

    def __init__(self, model: PreTrainedModel, layout: Layout, block_size: int = BLOCK_SIZE) -> None:
        self.model, self._block_size = model, block_size
        self.layout = layout
        self.reused: list[str] = []
        self.is_text = True  # no image has been passed yet
        self.why_not = ""

    def play(self) -> None:
        """Raises AssertionError where a result is another one than with `DynamicCache`."""
        first, second, third, fourth = (tokens(seed, 21) for seed in (2, 3, 4, 5))
        self._pair("text alone", [_TEXT * 3], [_TEXT * 3 + first], len(_TEXT) * 3, holds_image=False)
        together = [[_TEXT * 6 + first], [_TEXT * 6 + second]], [[_TEXT * 6 + third], [_TEXT * 6 + fourth]]
        self._pair(
            "text alone", *map(tuple, together), 1, holds_image=False
        )  # a part runs ahead, in a forward of its own
        self.is_text = False
        self._pair("one image", [_TEXT, _FIRST, first], [_TEXT, _FIRST, second])
        self._other([_TEXT, _FIRST, first], [_TEXT, _SECOND, first])
        self._pair("an image first", [_FIRST, first], [_FIRST, second])
        self._pair("two images", [_TEXT, _FIRST, third, _SECOND, first], [_TEXT, _FIRST, third, _SECOND, second])
        self._pair(
            "two images", [_TEXT, _FIRST, third, _SECOND, first], [_TEXT, _FIRST, third, 3, second], is_partial=True
        )
        self._pair(
            "the same image twice", [_TEXT, _FIRST, third, _FIRST, first], [_TEXT, _FIRST, third, _FIRST, second]
        )
        short, long = [_TEXT[5:], _FIRST, first], [_TEXT, _SECOND, second]
        self._pair("a batch", (short, long), ([_TEXT[5:], _FIRST, third], [_TEXT, _SECOND, fourth]))
        for how in ({"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}):
            self._pair("beams and samples", [_TEXT, _FIRST, first], [_TEXT, _FIRST, second], **how)

    def _pair(
        self,
        scene: str,
        begun: Any,
        asked: Any,
        least: int | None = None,
        *,
        holds_image: bool = True,
        is_partial: bool = False,
        **how: Any,
    ) -> None:
        """A prompt from an empty store, and one that goes on otherwise; what it reused is seen to matter."""
        prompts = [prompt(self.layout, *(rows if isinstance(rows, tuple) else (rows,))) for rows in (begun, asked)]
        references = [run(self.model, **given, **how) for given in prompts]
        with Towers(self.model) as towers:
            cache = PagedPrefixCache(self.model, block_size=self._block_size)
            assert_same(references[0], run(self.model, cache, **prompts[0], **how))
            cold, towers.num_runs = towers.num_runs, 0
            cache.reset()
            assert_same(references[1], run(self.model, cache, **prompts[1], **how))
            again = towers.num_runs
            call = cache.last_call
            assert_same(references[1], run(self.model, cache, **prompts[1], **how))
        cache.check()
        num_images = len(begun[0]) if isinstance(begun, tuple) else len(begun)
        if least is None:
            least = num_images and self.layout.num_tokens
        if not holds_image:
            if not call.reused_tokens and not self.why_not:
                self.why_not = call.rows[0].stopped
            return
        if call.reused_tokens < least or again != is_partial:  # the tower runs for what is not known
            self.why_not = self.why_not or f"{scene}: {call.rows[0].stopped}"
            return
        assert cold == 1, "the towers ran more than once"
        zero_blocks(cache)
        cache.reset()
        assert not is_same(references[1], run(self.model, cache, **prompts[1], **how)), "nothing shows what was reused"
        if scene not in self.reused:
            self.reused.append(scene)

    def _other(self, one: Any, other: Any) -> None:
        """The same prompt with another image, and back."""
        cache = PagedPrefixCache(self.model, block_size=self._block_size)
        outputs = []
        for rows in (one, other, one, other):
            given = prompt(self.layout, rows)
            outputs.append(run(self.model, cache, **given))
            assert_same(run(self.model, **given), outputs[-1])
            cache.reset()
        assert not is_same(outputs[0], outputs[1]), "the model does not look at the image"
        if cache.last_call.reused_tokens > len(one[0]):
            self.reused.append("another image")


def examine(name: str, block_size: int = BLOCK_SIZE) -> Outcome:
    """Build a type and play its scenes, on blocks of this size."""
    try:
        model = build(name)
        layout = layout_of(model)
    except Exception as error:  # noqa: BLE001 (a model may raise anything)
        return Outcome(name, "not built", _short(error))
    try:
        PagedPrefixCache(model, block_size=block_size)
    except UnsupportedModelError as error:
        return Outcome(name, "refused", _short(error))
    except Exception as error:  # noqa: BLE001
        return Outcome(name, "not built", _short(error))
    if layout is None:
        return Outcome(name, "computed whole", "it has no get_image_features")
    try:
        run(model, **prompt(layout, [_TEXT, _FIRST, _TEXT]))
    except Exception as error:  # noqa: BLE001
        return Outcome(name, "not built", f"DynamicCache fails: {_short(error)}")
    player = Player(model, layout, block_size)
    try:
        player.play()
    except (AssertionError, PagedCacheError, RuntimeError, ValueError, IndexError, TypeError, KeyError) as error:
        if not isinstance(error, AssertionError) and player.is_text:
            return Outcome(name, "fails", f"with text alone, too: {_short(error)}")
        return Outcome(name, "different", _short(error), tuple(player.reused))
    reused = tuple(player.reused)
    return Outcome(name, "identical" if reused else "computed whole", player.why_not, reused)


def table(outcomes: Sequence[Outcome]) -> str:
    """The docs' page."""
    counts = {
        kind: sum(each.outcome == kind for each in outcomes)
        for kind in dict.fromkeys(each.outcome for each in outcomes)
    }
    lines = [
        "# Supported image-text models",
        "",
        f"Written by `python -m tests.conformance.images` with transformers {transformers.__version__} and torch "
        f"{torch.__version__.split('+')[0]}; do not edit by hand.",
        "",
        f"transformers lists {len(outcomes)} types of image-text models: "
        + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        + ". Each played the scenes below as in [supported models](supported_models.md). *Identical*: an image was "
        "reused and its tower did not run again.",
        "",
        "Scenes: " + "; ".join(f"**{number}** {scene}" for number, scene in enumerate(SCENES, 1)) + ".",
        "",
        "## Identical, with reuse of images",
        "",
        "| type | reused in scenes | in the others |",
        "|---|---|---|",
    ]
    scenes = SCENES[1:]
    for each in outcomes:
        if each.outcome == "identical":
            missing = [scene for scene in scenes if scene not in each.scenes]
            held = "2 to 8" if not missing else ", ".join(str(SCENES.index(scene) + 1) for scene in each.scenes)
            lines.append(f"| {each.name} | {held} | {each.why if missing else ''} |")
    lines += ["", "## Others", "", "| type | outcome | reason |", "|---|---|---|"]
    lines += [f"| {each.name} | {each.outcome} | {each.why} |" for each in outcomes if each.outcome != "identical"]
    return "\n".join(lines) + "\n"


def _short(error: Exception) -> str:
    said = " ".join(f"{type(error).__name__}: {error}".replace("|", "/").split())
    return said if len(said) < 240 else said[:237] + "..."


def main() -> int:
    """Examine the named types, or all; 1 if one differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.images", description=examine.__doc__)
    parser.add_argument("--types", help="comma-separated; without, all")
    parser.add_argument("--table", type=Path, help="write the docs' page")
    parser.add_argument("--block-size", type=int, default=BLOCK_SIZE, help=f"of the table, {BLOCK_SIZE}")
    options = parser.parse_args()
    outcomes = []
    warnings.simplefilter("ignore")
    for name in options.types.split(",") if options.types else model_types():
        outcomes.append(examine(name, options.block_size))
        print(*outcomes[-1], sep=" | ", flush=True)  # noqa: T201
    if options.table:
        options.table.write_text(table(outcomes), encoding="utf-8")
    return int(any(each.outcome == "different" for each in outcomes))


if __name__ == "__main__":
    sys.exit(main())
