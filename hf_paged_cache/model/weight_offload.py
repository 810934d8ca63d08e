"""Where accelerate keeps weights that are on their device only while a module runs: in host memory, or in files.

Reads accelerate's hooks by their structure; imports nothing of it and changes nothing.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

_Place = tuple[dict[str, Any], str] | str  # a mapping in host memory and the key in it, or the path of a file


def offloaded_weights(modules: Iterable[nn.Module]) -> dict[tuple[int, str], _Place]:
    """(id of a module, name of its parameter or buffer) -> where it is loaded from, for every weight that is found."""
    places = {}
    for module in modules:
        hook = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            weights_map = getattr(each, "weights_map", None)
            inside = module.named_modules() if getattr(each, "place_submodules", False) else [("", module)]
            for path, child in inside if weights_map is not None else ():
                for name in (*child._parameters, *child._buffers):
                    place = _find(weights_map, f"{path}.{name}" if path else name)
                    if place is not None:
                        places[id(child), name] = place
    return places


def file_state(path: str) -> tuple[str, int, int]:
    """Path, size and time of the last write; zeros for a file that is not there."""
    try:
        state = os.stat(path)
    except OSError:
        return path, 0, 0
    return path, state.st_size, state.st_mtime_ns


def _find(weights_map: Any, name: str) -> _Place | None:
    """The place of the weight that a hook loads as `weights_map[name]`."""
    while hasattr(weights_map, "prefix") and hasattr(weights_map, "dataset"):
        name, weights_map = f"{weights_map.prefix}{name}", weights_map.dataset
    held = getattr(weights_map, "state_dict", weights_map)
    if isinstance(held, dict) and isinstance(held.get(name), Tensor):
        return held, name
    index = getattr(weights_map, "index", None)
    if isinstance(index, Mapping) and name in index:
        file = index[name].get("safetensors_file")
        return str(file) if file else os.path.join(str(weights_map.save_folder), f"{name}.dat")
    return None
