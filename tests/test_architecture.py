"""The tree is the architecture: imports point down, heavy libraries stay in their places, and the drawings are true."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import hf_paged_cache

PACKAGE = Path(hf_paged_cache.__file__).parent
ROOT = Path(__file__).parents[1]


def drawn() -> Iterator[dict[str, set[str]]]:
    """The levels of the drawing in docs/design.md, from the top: name of a folder or module -> modules in it.

    A line is `name` or `name/`, two spaces or more, what it is, and after a colon the modules, which may resume,
    indented, on the next line. An arrow parts levels.
    """
    found = re.search(
        r"```text\nhf_paged_cache/\n(.*?)```", (ROOT / "docs" / "design.md").read_text("utf-8"), re.DOTALL
    )
    assert found, "docs/design.md has no drawing that begins with hf_paged_cache/"
    for level in re.split(r"\n *↓\n", re.sub(r"\n {4,}(?=\w)", " ", found[1].rstrip())):
        lines = [re.split(r"  +", line.strip(), maxsplit=1) for line in level.splitlines()]
        yield {name.rstrip("/"): set(re.findall(r"\w+(?:\.\w+)*", what.partition(": ")[2])) for name, what in lines}


# What stands on one level does not import each other, but for the modules that a user holds, and the package, which has
# their names. A file imports from its own folder and from lower levels.
LEVELS = [*drawn()][::-1]
LEVEL = {unit: number for number, units in enumerate(LEVELS) for unit in units}
LEVEL["__init__"] = LEVEL["jobs"]
SIDE_BY_SIDE = {LEVEL["cache"], LEVEL["__init__"]}

IMPORT_TRANSFORMERS = {  # exactly these do, for types as well
    "cache",
    "prefix_store",
    "every_generate",
    "trainer",
    "ask.model_check",
    "jobs.calls",
    "jobs.job",
    "jobs.options",
    "cli.demo_model",
    "cli.bench",
    "cli.doctor",
    "cli.command",
    "integration.chunked_prompt",
    "integration.generate_arguments",
    "kv.states",
    "model.layers",
    "integration.images",
    "model.fingerprint",
    "model.support",
    "model.trial",
    "rows.graphs",
    "rows.layers",
    "rows.rows",
}
WITHOUT_TORCH = {
    *("errors", "stats", "locks", "wording", "blocks", "__init__", "__main__"),
    *("jobs.order", "jobs.options", "jobs.prompts", "jobs.answers", "jobs.job"),
}

FILES = {  # name inside the package -> file; a folder's own name is its __init__.py
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def unit(module: str) -> str:
    """What stands in the drawing for a module: its folder, or itself in the top folder."""
    return module.partition(".")[0]


@cache
def imported_names(module: str) -> frozenset[str]:
    """Full names of what a module imports anywhere, also inside functions and under TYPE_CHECKING."""
    path = FILES[module]
    inside = ("hf_paged_cache", *path.relative_to(PACKAGE).with_suffix("").parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = [*(inside[: -node.level] if node.level else ()), *([node.module] if node.module else ())]
            found |= {".".join([*base, alias.name]) for alias in node.names}
    return frozenset(found)


def our_module(name: str) -> str | None:
    """The module of ours that `hf_paged_cache.a.b.Name` is or lies in; None for others' names."""
    if name.partition(".")[0] != "hf_paged_cache":
        return None
    parts = name.split(".")[1:]
    known = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((module for module in known if module in FILES), "__init__")


def our_modules(module: str) -> set[str]:
    """The modules of ours that a module imports."""
    return {ours for name in imported_names(module) if (ours := our_module(name))}


def imports_library(module: str, library: str) -> bool:
    return any(name.partition(".")[0] == library for name in imported_names(module))


def test_every_folder_and_module_stands_on_a_level_and_every_level_is_there() -> None:
    assert {unit(module) for module in FILES} == set(LEVEL)


@pytest.mark.parametrize("module", FILES)
def test_a_module_imports_only_from_its_own_folder_and_from_lower_levels(module: str) -> None:
    mine = unit(module)
    wrong = {
        other
        for other in our_modules(module)
        if LEVEL[unit(other)] >= LEVEL[mine]
        and unit(other) != mine
        and not (LEVEL[unit(other)] == LEVEL[mine] and LEVEL[mine] in SIDE_BY_SIDE)
    }
    assert not wrong, f"{module} imports {sorted(wrong)}, which are not below {mine}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    order = TopologicalSorter({module: our_modules(module) for module in FILES})
    assert len(list(order.static_order())) == len(FILES)  # raises CycleError, which names the circle


def test_transformers_is_imported_by_exactly_these_modules() -> None:
    assert {module for module in FILES if imports_library(module, "transformers")} == IMPORT_TRANSFORMERS


def test_torch_is_not_imported_where_integers_are_enough() -> None:
    assert {*LEVEL, *FILES} >= WITHOUT_TORCH
    assert not [
        module for module in FILES if {module, unit(module)} & WITHOUT_TORCH and imports_library(module, "torch")
    ]


def test_the_command_uses_only_public_names_of_the_package_and_what_looks_at_arguments() -> None:
    commands = [module for module in FILES if unit(module) == "cli"]
    others = {"cli", "jobs", "store_options", "wording"}
    used = {
        name
        for module in commands
        for name in imported_names(module)
        if unit(our_module(name) or "cli") not in others and our_module(name) != "blocks.arguments"
    }
    names = {name.rpartition(".")[2] for name in used - {"hf_paged_cache"}}
    assert {"PagedPrefixCache", "PagedCacheError"} <= names <= set(hf_paged_cache.__all__)
    attributes = {
        node.attr
        for module in commands
        for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cache"
    }
    assert (
        {"last_call"}
        <= attributes
        <= {"last_call", "stats", "score", "pin", "unpin", "reset", "detach", "prefill", "store"}
    )


def test_the_drawing_has_every_module_in_its_folder() -> None:
    folders = {unit(module) for module in FILES if "." in module}
    modules_of = {folder: {m.partition(".")[2] for m in FILES if m.startswith(f"{folder}.")} for folder in folders}
    in_drawing = {name: modules for level in LEVELS for name, modules in level.items()}
    assert {name: in_drawing[name] for name in folders} == modules_of


def run_python(code: str) -> None:
    """Run `code` in a fresh interpreter that finds the same package as this test, installed or not."""
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
        "import hf_paged_cache.blocks as blocks, hf_paged_cache.errors, hf_paged_cache.stats\n"
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


_FACTORIES = frozenset(
    ("tensor", "as_tensor", "asarray", "empty", "zeros", "ones", "full", "arange", "eye", "rand", "randn", "randint")
)


@cache
def parsed() -> list[tuple[str, ast.AST]]:
    """Everything that is written in the package: the module, and a node of it."""
    trees = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in FILES.items()}
    return [(module, node) for module, tree in trees.items() for node in ast.walk(tree)]


def test_a_tensor_is_made_on_a_device_that_is_named() -> None:
    """Whatever `torch.set_default_device` says: what is of the host is made there."""
    unnamed = [
        f"{module}, line {call.lineno}: torch.{call.func.attr}"
        for module, call in parsed()
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr in _FACTORIES) == ("torch", True)
        and not any(keyword.arg in ("device", None) for keyword in call.keywords)
    ]
    assert not unnamed


def test_one_module_alone_writes_into_the_layers_of_transformers() -> None:
    written = {"keys", "values", "cumulative_length", "indexer_keys"}
    writing = {
        module
        for module, node in parsed()
        if isinstance(node, ast.Attribute)
        and node.attr in written
        and isinstance(node.ctx, ast.Store)
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }
    assert writing == {"model.layers"}


def test_nobody_looks_at_frames_reference_counts_or_other_peoples_objects() -> None:
    forbidden = {"_getframe", "currentframe", "settrace", "setprofile", "getrefcount", "get_referrers", "get_objects"}
    forbidden |= {"getsource", "__del__", "ctypes"}
    names = [
        (module, getattr(node, "attr", getattr(node, "name", getattr(node, "id", "")))) for module, node in parsed()
    ]
    assert not [found for found in names if found[1] in forbidden]


@pytest.mark.parametrize("name", hf_paged_cache.__all__)
def test_a_public_name_and_its_methods_say_what_they_do(name: str) -> None:
    public = getattr(hf_paged_cache, name)
    if callable(public):
        assert public.__doc__
        assert public.__doc__ != object.__doc__
    if isinstance(public, type):
        own = [member for key, member in vars(public).items() if not key.startswith("_") and callable(member)]
        assert not [member.__name__ for member in own if not member.__doc__]
