"""The tree is the architecture: imports point down, heavy libraries stay where they belong, and no module grows without end."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_paged_cache

PACKAGE = Path(hf_paged_cache.__file__).parent

# module or package of ours -> the layer it belongs to. A file imports from lower layers, or from its own.
LEVELS = {
    "errors": 0,
    "stats": 0,
    "tokens": 0,
    "blocks": 0,
    "pool": 1,
    "slots": 1,
    "host_memory": 1,
    "reader": 1,
    "gather_reader": 1,
    "view_reader": 1,
    "block_store": 2,
    "ticket": 2,
    "rows": 2,
    "plan": 2,
    "sharing": 2,
    "matching": 2,
    "counts": 2,
    "forward": 2,
    "memory": 1,
    "pinning": 1,
    "given_tokens": 1,
    "admission": 2,
    "call": 2,
    "forward_thread": 2,
    "reordering": 2,
    "reporting": 2,
    "layer_writes": 2,
    "call_state": 2,
    "fingerprint": 3,
    "offloading": 3,
    "rope": 3,
    "conditioning": 3,
    "own_forwards": 3,
    "support": 4,
    "trial": 4,
    "hooks": 4,
    "arguments": 4,
    "generation": 4,
    "layer": 5,
    "prefix_store": 5,
    "verification": 5,
    "prefill": 5,
    "processes": 4,
    "session": 5,
    "cache": 5,
    "model_check": 5,
    "scoring": 5,
    "demo_model": 6,
    "cli": 7,
    "__main__": 8,
}
MAY_IMPORT_TRANSFORMERS = {
    "cli",
    "demo_model",
    "cache",
    "layer",
    "prefix_store",
    "own_forwards",
    "support",
    "trial",
    "model_check",
    "hooks",
    "conditioning",
}
MAX_LINES = 400


def unit(path: Path) -> str:
    """The name that the layers give to a file: that of its module, or of the package inside ours that it lies in."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(path: Path) -> set[str]:
    """Full names of the modules that a file imports anywhere, also inside functions and under TYPE_CHECKING."""
    inside = ["hf_paged_cache", *path.relative_to(PACKAGE).with_suffix("").parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(inside[: -node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found.add(module)
            found |= {
                f"{module}.{alias.name}" for alias in node.names if module == "hf_paged_cache" or node.module is None
            }
    return found


def our_units(modules: set[str]) -> set[str]:
    return {module.split(".")[1] for module in modules if module.startswith("hf_paged_cache.")} & set(LEVELS)


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
NAMES = [str(path.relative_to(PACKAGE)) for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_file_has_a_layer_and_imports_only_from_its_own_and_those_below(path: Path) -> None:
    assert unit(path) in LEVELS, f"{unit(path)} stands in no layer: add it to LEVELS and to the design's drawing"
    upward = {other for other in our_units(imported_modules(path)) if LEVELS[other] > LEVELS[unit(path)]}
    assert not upward, f"{path.name} is in layer {LEVELS[unit(path)]} and imports {sorted(upward)} from above"


def test_the_designs_drawing_has_every_module() -> None:
    drawing = (Path(__file__).parents[1] / "docs" / "design.md").read_text()
    assert not [name for name in LEVELS if f"`{name}`" not in drawing and f"`{name}/`" not in drawing]


def test_no_two_modules_import_each_other_in_a_circle() -> None:
    edges: dict[str, set[str]] = {}
    for path in FILES:
        edges.setdefault(unit(path), set()).update(our_units(imported_modules(path)) - {unit(path)})
    done: set[str] = set()
    while ready := {name for name in edges if name not in done and edges[name] <= done | (set(LEVELS) - set(edges))}:
        done |= ready
    assert set(edges) == done, f"in or behind a circle: {sorted(set(edges) - done)}"


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_transformers_is_imported_only_where_the_design_says(path: Path) -> None:
    if unit(path) not in MAY_IMPORT_TRANSFORMERS:
        assert not {module for module in imported_modules(path) if module.split(".")[0] == "transformers"}


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_no_module_is_longer_than_one_idea(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_the_command_uses_only_public_names_of_the_package() -> None:
    for path in FILES:
        if unit(path) == "cli":
            assert our_units(imported_modules(path)) <= {"cli", "demo_model", "errors"}, path.name


def run_python(code: str) -> None:
    """Run `code` in a fresh interpreter that finds the same package as this test: the installed one, if that is what is tested."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_blocks_imports_where_torch_and_transformers_cannot_be_imported() -> None:
    run_python(
        "import pkgutil, sys\n"
        "sys.modules.update(dict.fromkeys(['torch', 'transformers', 'numpy']))\n"
        "import hf_paged_cache.blocks as blocks\n"
        "for module in pkgutil.iter_modules(blocks.__path__, 'hf_paged_cache.blocks.'):\n"
        "    __import__(module.name)\n"
    )


def test_importing_the_package_imports_neither_torch_nor_transformers() -> None:
    run_python(
        "import sys, hf_paged_cache, hf_paged_cache.errors, hf_paged_cache.cli\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )


def test_every_public_name_resolves_and_an_unknown_one_is_an_attribute_error() -> None:
    for name in hf_paged_cache.__all__:
        assert getattr(hf_paged_cache, name) is not None
        assert name in dir(hf_paged_cache)
    with pytest.raises(AttributeError, match="no attribute 'PagedCache'"):
        _ = hf_paged_cache.PagedCache
