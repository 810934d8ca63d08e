"""The window blocks of a store: how many there are, and how many are needed."""

from __future__ import annotations

from hf_paged_cache.blocks import BlockTable, root_hash
from hf_paged_cache.blocks.sight import Window
from hf_paged_cache.store.block_store import BlockStore

ROOT = root_hash(b"model")


def store_of(share: float = 0.1, window: int = 4) -> BlockStore:
    return BlockStore(2, 300, sight_of={0: Window(window)}, layers=range(2), window_share=share)


def filled(store: BlockStore, tokens: range) -> BlockTable:
    table = store.new_table(ROOT, b"")
    store.make_room(len(tokens))
    table.append_tokens(tokens)
    table.release_passed()
    table.commit_full_blocks(len(tokens))
    return table


def test_there_are_as_many_window_blocks_as_the_share_says() -> None:
    windows = store_of(0.1).windows
    assert [(group.num_blocks, group.most) for group in windows.groups] == [(6, 30)]
    windows.limit(400)
    assert windows.groups[0].most == 40
    windows.stop_growing()
    assert windows.groups[0].most == 6
    windows.reset(100)
    assert windows.groups[0].num_blocks == 10
    everything = BlockStore(2, 300, sight_of={0: Window(4), 1: Window(8)}, layers=range(2), window_share=0.1).windows
    assert [group.most for group in everything.groups] == [300, 300]
    assert everything.are_all
    assert not store_of(1.0).windows.are_all
    assert not BlockStore(2, 300).windows


def test_what_a_namespace_needs_is_counted_by_itself() -> None:
    store = store_of()
    table = filled(store, range(8))
    tenant = store.new_table(ROOT, b"tenant")
    tenant.append_tokens(range(3))
    assert (store.windows.num_needed(), store.windows.num_needed(b"tenant")) == ([4], [2])
    table.free()
    assert (store.windows.num_needed(), store.windows.num_needed(b"")) == ([2], [0])


def test_other_windows_begin_anew_once_nobody_holds_a_block() -> None:
    store, windows = store_of(), {0: Window(4), 1: Window(9)}
    assert store.follow_windows({0: Window(4)})
    table = filled(store, range(8))
    assert not store.follow_windows(windows)
    assert [group.name for group in store.windows.groups] == [4]
    assert table.num_committed_blocks == 4
    table.free()
    assert store.follow_windows(windows)
    assert [(group.name, group.num_needed) for group in store.windows.groups] == [(9, 0), (4, 0)]
    assert store.windows_now() == windows
    assert store.windows.are_all
    assert store.new_table(ROOT, b"").hold_prefix(range(8)) == 0
