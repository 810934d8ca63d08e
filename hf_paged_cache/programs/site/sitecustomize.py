"""Imported by each Python that finds this folder in PYTHONPATH, as `hf-paged-cache run` arranges.

Leaves `sys.path` as it would be without it, and imports the `sitecustomize` that it hides.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

_here = str(Path(__file__).parent)
sys.path[:] = [folder for folder in sys.path if folder != _here]
try:
    from hf_paged_cache.programs.startup import begin
except ImportError:  # another Python than the command's, without the package
    print(f"hf-paged-cache run: {sys.executable} has no hf_paged_cache, and runs without it", file=sys.stderr)  # noqa: T201
else:
    begin()
_hidden = PathFinder.find_spec("sitecustomize", sys.path)
if _hidden is not None and _hidden.loader is not None:
    sys.modules["sitecustomize"] = module_from_spec(_hidden)
    _hidden.loader.exec_module(sys.modules["sitecustomize"])
