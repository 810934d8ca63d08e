"""One model type -> what came of it: all scenes played, each with a word on how it went.

Outcomes: *identical*, *refused* (when the cache is built, with its reason), *not built* (no tiny model, or transformers
itself fails on it); or a defect: *different*, *error*, *blind* (zeros in place of what is reused change nothing) or
*no reuse* (less is reused than must be).
"""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_paged_cache import PrefixStore, UnsupportedModelError

from ..internals import state_rules
from .player import CellError, Measured, Player
from .scenes import SCENES
from .windows import WINDOWS, build_with, short_window, windowed_layers
from .zoo import CannotBuildError, build

DEFECTS = ("error", "different", "blind", "no reuse")  # worst first
SAME = "same"
NO_SCENES = {  # a tiny model can be built, but not played
    "musicgen_melody": "its own generate takes audio codes: it replaces the first id it is given, and strips pads"
}


@dataclass
class TypeResult:
    """What came of one model type.

    Attributes:
        cells: scene -> "same", or how it went: "uncovered: ..." (transformers itself refuses), or a defect.
        distance: the largest of our logits from `DynamicCache`'s, as a share of their scale.
        own_distance: the largest of `DynamicCache` from itself, where more than the usual had to be allowed.
        num_windows: lengths of the window that were played; 0 for a type without any.
        notes: documented reasons for which some call reused nothing.
    """

    name: str
    model_class: str = ""
    outcome: str = ""
    reason: str = ""
    cells: dict[str, str] = field(default_factory=dict)
    distance: float = 0.0
    own_distance: float = 0.0
    num_windows: int = 0
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_defect(self) -> bool:
        return self.outcome in DEFECTS

    def as_stored(self) -> dict[str, Any]:
        """What is kept: nothing that changes from run to run."""
        stored = {name: value for name, value in asdict(self).items() if value and name not in ("name", "seconds")}
        cells = {scene: cell for scene, cell in self.cells.items() if cell != SAME}
        for name in ("distance", "own_distance"):
            if name in stored:
                stored[name] = float(f"{stored[name]:.1e}")
        return {
            **{name: value for name, value in stored.items() if name != "cells"},
            **({"cells": cells} if cells else {}),
        }


def examine(name: str, windows: Sequence[int] = WINDOWS, *, device: str | None = None) -> TypeResult:
    """Play all scenes on a tiny model of this type, and where it has windows one more with each of these lengths."""
    started = time.perf_counter()
    result = TypeResult(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _examine(name, result, windows, device)
    result.seconds = round(time.perf_counter() - started, 2)
    return result


def _examine(name: str, result: TypeResult, windows: Sequence[int], device: str | None) -> None:
    if name in NO_SCENES:
        result.outcome, result.reason = "not built", NO_SCENES[name]
        return
    doing = "the model"
    try:
        model = build(name)
        if device is not None:
            model.to(device)
        result.model_class, doing = type(model).__name__, "the cache"
        PrefixStore(model)
    except (CannotBuildError, UnsupportedModelError) as error:
        result.outcome = "refused" if isinstance(error, UnsupportedModelError) else "not built"
        result.reason = _one_line(error)
        return
    except Exception as error:  # noqa: BLE001
        result.outcome = "error"
        result.reason = f"while {doing} was built: {type(error).__name__}: {_one_line(error)}"
        return
    measured = Measured()
    for scene_name, scene in SCENES.items():
        result.cells[scene_name] = play(name, model, scene, measured)
        if scene_name == "cold" and result.cells[scene_name].startswith("uncovered"):
            result.outcome, result.reason = "not built", result.cells[scene_name]
            return
    for window in windows if windowed_layers(model.config) else ():
        shorter = build_with(name, window)
        if device is not None:
            shorter.to(device)
        measured.references.clear()
        windowed = windowed_layers(shorter.config)
        cell = play(name, shorter, short_window, measured, {*windowed})
        if set(windowed.values()) != {window}:
            cell = f"blind: windows are {sorted(set(windowed.values()))}"
        result.cells[f"window of {window} tokens"] = cell
        result.num_windows += 1
    result.distance, result.own_distance = measured.distance, measured.own_distance
    result.notes = sorted(measured.unreused)
    kinds = [cell.split(":")[0] for cell in result.cells.values()]
    result.outcome = next((kind for kind in DEFECTS if kind in kinds), "identical")


def play(
    name: str,
    model: PreTrainedModel,
    scene: Callable[[Player], None],
    measured: Measured,
    windowed: set[int] | None = None,
) -> str:
    """One scene, then again with zeros in place of what each hit reuses; how it went.

    Args:
        windowed: layers with a window; a third time with zeros in place of their blocks alone.
    """
    reused: list[int] = []
    try:
        torch.manual_seed(0)
        player = Player(name, model, measured, reused, zeroed=False)
        scene(player)
        kinds: list[dict[str, Any]] = [{}]
        kinds += [{"windowed": windowed}] if windowed else []
        kinds += [{"states_alone": True}] if state_rules(player.store) is not None else []
        for kind in kinds if reused else ():
            torch.manual_seed(0)
            scene(Player(name, model, measured, reused, zeroed=True, **kind))
        if windowed and not all(reused):
            raise CellError("no reuse", f"the hits reused {reused} tokens, so zeros are seen in none or some")
    except CellError as error:
        return f"{error.outcome}: {_one_line(error.detail)}"
    except Exception as error:  # noqa: BLE001 (whatever comes out of a call is a defect to report)
        return f"error: {type(error).__name__}: {_one_line(error)}"
    return SAME


def _one_line(message: object) -> str:
    return " ".join(str(message).split())[:400]
