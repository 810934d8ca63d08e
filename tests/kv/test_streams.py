"""The order of streams, with stand-ins for them: there is no device here that has any."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.kv.block_pool import BlockPool
from hf_paged_cache.kv.streams import StreamOrder

from ..reference import run

DEVICE = torch.device("cuda", 0)
OTHER_DEVICE = torch.device("cuda", 1)
STATES = {"key": torch.ones(1, 2, 2, 8)}


@dataclass(eq=False)
class Stream:
    waits_for: list[Stream] = field(default_factory=list)

    def wait_stream(self, other: Stream) -> None:
        self.waits_for.append(other)


@dataclass
class Held:
    device: torch.device
    recorded_on: list[Stream] = field(default_factory=list)

    def record_stream(self, stream: Stream) -> None:
        self.recorded_on.append(stream)


class Streams:
    """The current stream of each device."""

    def __init__(self) -> None:
        self.current = {DEVICE: Stream(), OTHER_DEVICE: Stream()}

    def now(self, device: torch.device) -> Stream:
        return self.current[device]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr(torch.accelerator, "current_stream", made.now)
    return made


def order_on(*devices: torch.device) -> StreamOrder:
    order = StreamOrder()
    order.accelerators.update(devices)
    return order


def test_a_second_stream_waits_for_the_first_and_the_first_for_it(streams: Streams) -> None:
    order, first = order_on(DEVICE), streams.current[DEVICE]
    order.join([DEVICE])
    order.join([DEVICE])
    assert first.waits_for == []
    second = streams.current[DEVICE] = Stream()
    order.join([DEVICE])
    order.join([DEVICE])  # what was launched in between is waited for, too
    assert second.waits_for == [first, first]
    streams.current[DEVICE] = first
    order.join([DEVICE])
    assert first.waits_for == [second]


def test_devices_wait_for_their_own_streams_only(streams: Streams) -> None:
    order, first = order_on(DEVICE, OTHER_DEVICE), streams.current[DEVICE]
    order.join([DEVICE, OTHER_DEVICE])
    streams.current[DEVICE] = Stream()
    order.join([DEVICE, OTHER_DEVICE])
    assert streams.current[DEVICE].waits_for == [first]
    assert streams.current[OTHER_DEVICE].waits_for == []


def test_memory_is_used_again_when_all_streams_are_done_with_it(streams: Streams) -> None:
    order, held = order_on(DEVICE), Held(DEVICE)
    order.join([DEVICE])
    order.release(cast("Any", held))
    assert held.recorded_on == []  # torch itself waits for the stream that it was made on
    first, second = streams.current[DEVICE], Stream()
    streams.current[DEVICE] = second
    order.join([DEVICE])
    order.release(cast("Any", held))
    assert held.recorded_on == [first, second]


@pytest.mark.parametrize("are_together", [False, True], ids=["apart", "together"])
def test_a_pool_that_grows_in_the_middle_of_another_threads_forward_comes_between_what_that_one_does(
    are_together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, copied_after = {"now": Stream()}, []
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: streams["now"])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: copied_after.append(list(first.waits_for)))
    pool, first, second = BlockPool(block_size=4), streams["now"], Stream()
    pool.all.ensure_capacity(3)
    pool.accelerators.add(torch.device("cpu"))
    if are_together:
        pool.lay_out_together({(layer_idx, "key"): STATES["key"] for layer_idx in range(2)})
    else:
        pool.tensor_for(0, "key", STATES["key"])
    pool.join_streams()
    streams["now"] = second  # of a forward that began before the tensors were there
    pool.all.copy_blocks([(1, 2)])
    assert second.waits_for == [first]
    pool.all.copy_blocks([(1, 2)])
    assert second.waits_for == [first]  # once for each move
    streams["now"] = first
    pool.all.ensure_capacity(9)
    assert copied_after[0] == [second]  # what it has written is copied
    streams["now"] = second
    pool.all.copy_blocks([(1, 2)])
    assert second.waits_for == [first, first]


def test_whoever_reads_or_writes_blocks_comes_after_all_that_was_launched_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = {"now": Stream()}
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: streams["now"])
    pool, first, second = BlockPool(block_size=4), streams["now"], Stream()
    pool.join_streams()
    streams["now"] = second
    pool.join_streams()
    assert second.waits_for == []  # there is no accelerator
    pool.accelerators.add(torch.device("cpu"))
    for now in (first, second, second):
        streams["now"] = now
        pool.join_streams()
    assert second.waits_for == [first, first]
    assert first.waits_for == []


def test_calls_on_two_streams_are_in_order_and_memory_that_is_let_go_waits_for_both(
    monkeypatch: pytest.MonkeyPatch, tiny_llama: Any
) -> None:
    """On a CPU that passes for an accelerator: it is the calls that are looked at."""
    host, streams, released = torch.device("cpu"), {"now": Stream()}, []
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: streams["now"])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: released.append(stream))
    cache = PagedPrefixCache(tiny_llama)
    cache.store.blocks.pool.accelerators.add(host)
    ids = torch.arange(1, 41).view(1, 40)
    run(tiny_llama, cache, input_ids=ids)
    first = streams["now"]
    assert first.waits_for == released == []
    streams["now"] = second = Stream()
    run(tiny_llama, cache, input_ids=ids)
    assert second.waits_for
    assert set(map(id, second.waits_for)) == {id(first)}
    cache.store.reset_prefix_cache()
    assert {id(stream) for stream in released} == {id(first), id(second)}
