"""The pictures of the documentation show what the package does."""

import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"


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
