"""Python of the README and other pages, the README's diff and docstrings run on a tiny model, as pictures are drawn."""

import doctest
import pkgutil
import re
import runpy
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

import hf_paged_cache

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PICTURES = ROOT / "docs" / "pictures"
PAGES = [
    README,
    *(
        (ROOT / "docs" / f"{name}.md")
        for name in ("index", "batch_jobs", "use", "what_is_reused", "save_and_load", "security", "neighbours", "run")
    ),
]
MODULES = [
    "hf_paged_cache",
    *(m.name for m in pkgutil.walk_packages(hf_paged_cache.__path__, "hf_paged_cache.") if "__main__" not in m.name),
]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def code_blocks(language: str, page: Path = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture
def reader(tiny_llama: Any, tiny_tokenizer: Any) -> dict[str, Any]:
    """What the README's examples take as given."""
    return {
        "PagedPrefixCache": hf_paged_cache.PagedPrefixCache,
        "cache": hf_paged_cache.PagedPrefixCache(tiny_llama),
        "trainer": SimpleNamespace(train=lambda: None),
        "question": "Question: What is snow?\nAnswer:",
        "model": tiny_llama,
        "tokenizer": tiny_tokenizer,
        "few_shot_prompt": "Question: What is one and one?\nAnswer: Two.\n" * 2,
        "questions": ["Question: What is two and two?\nAnswer:", "Question: What is ice?\nAnswer:"],
    }


@pytest.mark.parametrize(
    ("page", "code"),
    [
        pytest.param(page, code, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, code in enumerate(code_blocks("python", page))
    ],
)
def test_a_pages_python_runs(
    page: Path, code: str, reader: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if page.stem == "save_and_load":  # whose second piece loads what the first has saved
        reader["cache"].prefill(reader["tokenizer"](reader["few_shot_prompt"]).input_ids)
        reader["cache"].store.save("prompts")
    elsewhere = re.sub(r'"/(dev/shm|nvme)/', f'"{tmp_path}/', code)
    elsewhere = re.sub(r",\s*host_bytes=[\d *]+", "", elsewhere)  # is refused where the model is in host memory
    exec(compile(elsewhere, str(page), "exec"), reader)


def test_both_sides_of_the_readmes_diff_run_and_give_the_same_tokens(reader: dict[str, Any]) -> None:
    (diff,) = code_blocks("diff")
    outputs = []
    for dropped in "+-":
        kept = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith(dropped))
        namespace = {**reader, "answers": []}
        exec(compile(f"{kept}\n    answers.append(output.tolist())", str(README), "exec"), namespace)
        outputs.append(namespace["answers"])
    assert len(outputs[0]) == len(reader["questions"])
    assert outputs[0] == outputs[1]


WIDTH = 85  # columns that a block of code has on the site, and in most terminals
WHOLE = ("python3.11 -m venv ",)  # a command to be copied in one piece, from the README


def long_lines(page: Path) -> list[str]:
    """Lines of a page's code blocks that are longer than `WIDTH`; but the design's drawing of the tree is a list."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks if not block.startswith("hf_paged_cache/\n") for line in block.splitlines()]
    return [line for line in lines if len(line) > WIDTH and not line.startswith(WHOLE)]


@pytest.mark.parametrize("page", [README, *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.stem)
def test_no_line_of_a_pages_code_is_too_long_for_the_site(page: Path) -> None:
    assert not long_lines(page)


def make_allocator() -> Any:
    from hf_paged_cache.blocks.allocator import PrefixCachingBlockAllocator

    return PrefixCachingBlockAllocator(num_blocks=16, block_size=16)


@cache
def docstring_examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for name in MODULES for test in finder.find(import_module(name), name)]
    return [test for test in found if test.examples]


@pytest.mark.parametrize("test", docstring_examples(), ids=lambda test: test.name)
def test_the_docstrings_example_runs(test: doctest.DocTest, request: pytest.FixtureRequest) -> None:
    given: dict[str, Callable[[], Any]] = {  # a name that an example may use without defining it
        "model": lambda: request.getfixturevalue("tiny_llama"),
        "tokenizer": lambda: request.getfixturevalue("tiny_tokenizer"),
        "inputs": lambda: request.getfixturevalue("tiny_tokenizer")("What is one and one?" * 4, return_tensors="pt"),
        "cache": lambda: hf_paged_cache.PagedPrefixCache(request.getfixturevalue("tiny_llama")),
        "allocator": make_allocator,
        "folder": lambda: str(request.getfixturevalue("tmp_path") / "saved"),
        "torch": lambda: import_module("torch"),
        **{name: partial(getattr, hf_paged_cache, name) for name in hf_paged_cache.__all__},
    }
    blocks = import_module("hf_paged_cache.blocks")
    test.globs["__name__"] = "__main__"  # where a reader types it
    test.globs.update({name: getattr(blocks, name) for name in blocks.__all__})
    source = "".join(example.source for example in test.examples)
    for name, make in given.items():
        if name not in test.globs and re.search(rf"\b{name}\b", source):
            test.globs[name] = make()
    report: list[str] = []
    failed, _ = doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=report.append, clear_globs=False)
    assert not failed, "".join(report)


METHODS = {  # what a user calls, besides what the package exports
    hf_paged_cache.PagedPrefixCache: ["score", "prefill", "lookup", "explain", "pin", "verify", "in_all_threads"],
    hf_paged_cache.PrefixStore: ["load"],  # its example saves first
}


@pytest.mark.parametrize("name", [name for name in hf_paged_cache.__all__ if name != "__version__"])
def test_every_public_name_has_a_place_in_the_interface_and_what_a_user_calls_an_example(name: str) -> None:
    public = getattr(hf_paged_cache, name)
    is_called = not isinstance(public, type) or public in METHODS  # other classes are what these return, and errors
    assert not is_called or f"{public.__module__}.{name}" in {test.name for test in docstring_examples()}
    pages = (ROOT / "docs" / "interface.md").read_text("utf-8")
    whole_modules = ("hf_paged_cache.errors", "hf_paged_cache.stats")
    shown = public.__module__ if public.__module__ in whole_modules else f"{public.__module__}.{name}"
    assert f"::: {shown}\n" in pages


@pytest.mark.parametrize(
    "method", [getattr(kind, name) for kind, names in METHODS.items() for name in names], ids=lambda each: each.__name__
)
def test_every_method_for_users_has_an_example(method: Any) -> None:
    assert any(test.name.endswith(f".{method.__qualname__}") for test in docstring_examples())


def test_a_public_name_is_what_it_names_whatever_was_imported_before() -> None:
    for name in MODULES:
        import_module(name)
    assert not [name for name in hf_paged_cache.__all__ if isinstance(getattr(hf_paged_cache, name), ModuleType)]


def test_the_example_of_how_it_works_is_what_a_cache_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    drawer = runpy.run_path(str(PICTURES / "draw_blocks.py"))
    assert drawer["draw"]([*drawer["play"]()]) == (PICTURES / "blocks.svg").read_text("utf-8")


@pytest.mark.parametrize("path", [*PICTURES.glob("*.svg")], ids=lambda path: path.stem)
def test_a_picture_has_a_title_and_both_schemes(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    title, style = (root.find(f"{{http://www.w3.org/2000/svg}}{name}") for name in ("title", "style"))
    assert title is not None
    assert title.text
    assert style is not None
    assert "prefers-color-scheme: dark" in (style.text or "")
