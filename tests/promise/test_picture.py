"""A cache shows itself: what is drawn is what was counted, and nothing in a name is taken for HTML."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from typing import Any

import pytest
import torch
from IPython.core.formatters import DisplayFormatter

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.ask import picture
from hf_paged_cache.ask.picture import (
    _COMPUTED,
    _FREE,
    _IN_USE,
    _REUSED,
    _SHARED,
    Picture,
    as_figure,
    as_html,
)
from hf_paged_cache.errors import CacheArgumentError

from ..reference import row, run
from ..tiny_models import tiny


def used_cache(**options: Any) -> PagedPrefixCache:
    cache = PagedPrefixCache(tiny("llama"), block_size=4, num_blocks=40, **options)
    for end in (2, 3):
        run(cache.store.model, cache, input_ids=torch.tensor([row((1, 12), (end, 4))]), max_new_tokens=2)
    return cache


def drawings(html: str) -> tuple[ET.Element, ET.Element]:
    bars, blocks = (ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    return bars, blocks


def test_bars_are_the_tokens_of_the_last_prompts() -> None:
    cache = used_cache()
    bars, _ = drawings(cache._repr_html_())
    heights: Counter[str] = Counter()
    for bar in bars:
        heights[bar.attrib["fill"]] += float(bar.attrib["height"])
    stats = cache.stats()
    share = heights[_REUSED] / (heights[_REUSED] + heights[_COMPUTED])
    assert stats.reused_tokens == 12
    assert share == pytest.approx(stats.hit_rate, abs=0.01)
    assert f"12 of {stats.prompt_tokens} prompt tokens reused" in cache._repr_html_()


def test_what_rows_of_a_call_share_has_a_colour_of_its_own() -> None:
    cache = PagedPrefixCache(tiny("llama"), block_size=4, num_blocks=40)
    run(tiny("llama"), cache, input_ids=torch.tensor([row((1, 12))] * 4), max_new_tokens=2)
    bars, _ = drawings(cache._repr_html_())
    heights = {bar.attrib["fill"]: float(bar.attrib["height"]) for bar in bars}
    assert heights == {_SHARED: pytest.approx(60), _COMPUTED: pytest.approx(20)}
    assert "0 of 48 prompt tokens reused (0%), 36 computed for another row" in cache._repr_html_()
    drawn = {
        container.get_label(): sum(bar.get_height() for bar in container)
        for container in cache.plot().axes[0].containers
    }
    assert drawn == {"reused": 0, "computed": 12, "shared by rows": 36}


def test_the_map_has_a_square_for_each_block() -> None:
    cache = used_cache()
    _, blocks = drawings(cache._repr_html_())
    stats, shown = cache.stats(), Counter(cell.attrib["fill"] for cell in blocks)
    assert shown == Counter(
        {
            _IN_USE: stats.num_blocks_in_use,
            _REUSED: stats.num_cached_blocks,
            _FREE: cache.store.blocks.allocator.num_blocks - 1 - stats.num_blocks_in_use - stats.num_cached_blocks,
        }
    )
    cache.reset()
    _, blocks = drawings(cache._repr_html_())
    assert all(cell.attrib["fill"] != _IN_USE for cell in blocks)


def test_with_a_salt_only_its_own_blocks_are_drawn() -> None:
    owner = used_cache()
    tenant = PagedPrefixCache(owner.store, cache_salt="a tenant")
    assert len(drawings(tenant._repr_html_())[1]) == 0
    run(owner.store.model, tenant, input_ids=torch.tensor([row((1, 8))]), max_new_tokens=2)
    stats = tenant.stats()
    num_blocks = stats.num_blocks_in_use + stats.num_cached_blocks
    assert len(drawings(tenant._repr_html_())[1]) == num_blocks == 2


def test_a_name_is_no_html() -> None:
    html = as_html(Picture("<script>alert(1)</script>", "a & b", [(0, 0, 0)], b""))
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "a &amp; b" in html


def test_a_figure_has_the_same_numbers() -> None:
    cache = used_cache()
    figure = cache.plot()
    bars, blocks = figure.axes
    assert sum(bar.get_height() for bar in bars.containers[0]) == cache.stats().reused_tokens
    assert sum(bar.get_height() for bar in bars.containers[1]) == cache.stats().computed_tokens
    (image,) = blocks.images
    assert (image.get_array() == 2).sum() == cache.stats().num_blocks_in_use


def test_a_notebook_without_pyplot_shows_the_figure() -> None:
    shown, _ = DisplayFormatter().format(used_cache().plot())
    assert shown["image/png"].startswith(b"\x89PNG")


def test_without_matplotlib_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    with pytest.raises(CacheArgumentError, match=r"^plot needs matplotlib: pip install matplotlib, or '\.\[plot\]'$"):
        as_figure(Picture("", "", [], b""))


def test_a_new_cache_has_an_empty_picture() -> None:
    cache = PagedPrefixCache(tiny("llama"))
    assert "0 calls, 0 of 0 prompt tokens reused (0%)" in cache._repr_html_()
    cache.plot()
