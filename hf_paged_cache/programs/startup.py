"""What happens in a Python that `hf-paged-cache run` has started, before its program begins.

Owns when the rest is imported: once the program has imported transformers, or lm-evaluation-harness; till then nothing is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from .options import options_of


def begin() -> None:
    """From here on a `generate` that brings no cache gets one, where the environment says so."""
    options = options_of(os.environ)
    if options is None or any(isinstance(finder, AfterImport) for finder in sys.meta_path):
        return

    def give_caches(module: ModuleType) -> None:
        from . import program

        program.begin(options, module.GenerationMixin)

    sys.meta_path.insert(0, AfterImport({"transformers.generation.utils": give_caches, "lm_eval.models": register}))


def register(module: ModuleType) -> None:
    """lm-evaluation-harness knows the models `hf-paged` and `hf-paged-multimodal`, and imports them where they are asked for."""
    from lm_eval.api.registry import model_registry

    for name, target in (("hf-paged", "PagedHFLM"), ("hf-paged-multimodal", "PagedHFMultimodalLM")):
        model_registry.register(name, target=f"hf_paged_cache.lm_eval:{target}")


class AfterImport(MetaPathFinder):
    """Calls functions with the modules that they wait for, each once, when that has been imported.

    Args:
        then: name of a module -> what is called with it.
    """

    def __init__(self, then: dict[str, Callable[[ModuleType], None]]) -> None:
        self._then = then

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """How everybody else finds the module, with the function after it."""
        then = self._then.pop(fullname, None)
        spec = None if then is None else find_spec(fullname)
        if then is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_tell(module: ModuleType) -> None:
            run(module)
            then(module)

        spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec
