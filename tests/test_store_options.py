"""What a store may be given besides its model: read in one place, before anything is loaded."""

from typing import Any

import pytest

from hf_paged_cache import CacheArgumentError, PagedPrefixCache, PrefixStore
from hf_paged_cache.store_options import StoreOptions, StoreSizes, store_options

from .tiny_models import tiny


def test_a_store_has_these_options_with_these_defaults() -> None:
    assert StoreSizes.__annotations__.keys() == StoreOptions._field_defaults.keys() == {*StoreOptions._fields}
    assert store_options() == StoreOptions()
    assert all(f" {name}: " in str(PrefixStore.__doc__) for name in StoreOptions._fields)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *(({"block_size": given}, f"block_size is {given!r}") for given in (0, -1, True, "16", 16.0)),
        *(({"num_blocks": given}, f"num_blocks is {given!r}") for given in (1, 0, "9", True)),
        *(({"max_bytes": given}, f"max_bytes is {given!r}") for given in (0, -5, 1e9)),
        ({"num_blocks": 8, "max_bytes": "4GB"}, "give num_blocks or max_bytes, not both"),
        ({"max_bytes": "4 gigs"}, "max_bytes is '4 gigs'; give a number of bytes"),
        ({"host_bytes": "-1"}, "host_bytes is '-1'; give a number of bytes"),
        ({"disk_bytes": "4GB"}, "disk_bytes is 4GB without disk_folder"),
        ({"disk_folder": ""}, "disk_folder is ''; give a folder's path"),
        ({"disk_folder": 3}, "disk_folder is 3; give a folder's path"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_looked_at(options: dict[str, Any], said: str) -> None:
    for build in (PrefixStore, PagedPrefixCache):
        with pytest.raises(CacheArgumentError, match=said):
            build(tiny("llama"), **options)
    with pytest.raises(CacheArgumentError, match=said):
        PrefixStore(None, **options)  # type: ignore[arg-type]


def test_a_text_buys_what_its_bytes_buy(tmp_path: Any) -> None:
    model = tiny("llama")
    for text, number in (("1MB", 10**6), ("1MiB", 2**20)):
        stores = [PrefixStore(model, max_bytes=size) for size in (text, number)]
        assert len({store.blocks.budget.num_blocks for store in stores}) == 1
    assert (
        PagedPrefixCache(model, max_bytes="1MB").store.blocks.budget.num_blocks
        == PrefixStore(model, max_bytes=10**6).blocks.budget.num_blocks
    )
    store = PrefixStore(model, disk_folder=tmp_path, disk_bytes="3 MB")
    assert [tier.max_bytes for tier in store.stats().tiers] == [3 * 10**6]
