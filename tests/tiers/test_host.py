"""The host tier by itself, on a CPU: what it keeps, in which order it gives it up, and that it never takes more than it
may.
"""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
import torch

from hf_paged_cache.blocks import BlockHash, root_hash
from hf_paged_cache.kv.contents import BLOCKS, STATES, Part, Piece
from hf_paged_cache.tiers import host as host_module
from hf_paged_cache.tiers.base import Name, Tier
from hf_paged_cache.tiers.host import HostTier

CPU = torch.device("cpu")
PART = Part(BLOCKS, CPU, 64, (Piece((0, "key"), 0, 64, (64,), torch.uint8),))
OTHER = Part(STATES, CPU, 128, (Piece((1, "key"), 0, 128, (128,), torch.uint8),))


def name(number: int, namespace: bytes = b"") -> Name:
    return Name(BlockHash(root_hash(b"%d" % number), b"%08d" % number), namespace)


def rows(numbers: list[int], part: Part = PART) -> list[torch.Tensor]:
    return [torch.tensor(numbers, dtype=torch.uint8)[:, None].repeat(1, part.num_bytes)]


def tier_of(num_rows: int, below: HostTier | None = None) -> HostTier:
    return HostTier(64 * num_rows, below)


def put(tier: Tier, *numbers: int) -> None:
    tier.put(BLOCKS, [PART], [name(number) for number in numbers], rows(list(numbers)))
    require_counted(tier)


def require_counted(tier: Tier) -> None:
    taken = sum(of_part.nbytes for _, row in tier.entries.values() for of_part in row)
    assert tier.num_bytes == taken <= tier.max_bytes


def held(tier: HostTier, numbers: range = range(40)) -> list[int]:
    return [number for number in numbers if tier.has(BLOCKS, name(number))]


def read(tier: Tier, *numbers: int) -> list[int]:
    (fragments,) = tier.load(BLOCKS, [tier.place_of(BLOCKS, name(number)) for number in numbers])
    return [int(row[0]) for row in torch.cat(fragments)]


def test_the_least_recently_used_goes_first_and_one_that_was_touched_stays() -> None:
    tier = tier_of(4)
    put(tier, 0, 1, 2, 3)
    tier.touch(BLOCKS, [name(0)])
    put(tier, 4)
    assert held(tier) == [0, 2, 3, 4]
    put(tier, 2)  # is there, and is used
    put(tier, 5, 6)
    assert held(tier) == [2, 4, 5, 6]
    assert tier.num_dropped == 3


def test_what_was_found_can_be_read_also_after_it_has_made_room() -> None:
    tier = tier_of(4)
    put(tier, 0, 1, 2, 3)
    places = [tier.place_of(BLOCKS, name(number)) for number in (0, 1)]
    put(tier, 4, 5, 6, 7)
    assert held(tier) == [4, 5, 6, 7]
    assert [int(row[0, 0]) for row in tier.load(BLOCKS, places)[0]] == [0, 1]


def test_what_goes_and_what_has_no_room_goes_to_the_tier_below() -> None:
    below = tier_of(20)
    tier = tier_of(2, below)
    put(tier, 0, 1)
    put(tier, 2, 3, 4)
    assert (held(tier), held(below)) == ([3, 4], [0, 1, 2])
    assert read(below, 0, 1, 2) == [0, 1, 2]


def test_a_name_is_its_digest_its_tokens_and_its_namespace() -> None:
    tier = tier_of(4)
    put(tier, 0)
    digest = name(0).block_hash.digest
    assert not tier.has(BLOCKS, name(0, b"tenant"))
    assert not tier.has(BLOCKS, Name(BlockHash(digest, b"other tokens"), b""))
    tier.put(BLOCKS, [PART], [Name(BlockHash(digest, b"other tokens"), b"")], rows([9]))
    assert read(tier, 0) == [0]


def test_forgetting_names_and_namespaces_frees_their_places() -> None:
    tier = tier_of(4)
    tenants = [name(number, b"tenant") for number in (1, 2)]
    tier.put(BLOCKS, [PART], [name(0), *tenants], rows([0, 1, 2]))
    tier.forget_namespace(b"tenant")
    require_counted(tier)
    assert (tier.num_of(BLOCKS), tier.num_of(BLOCKS, b"tenant")) == (1, 0)
    tier.forget_namespace(b"")
    put(tier, 5, 6, 7, 8)
    assert held(tier) == [5, 6, 7, 8]
    tier.reset()
    assert (tier.num_of(BLOCKS), tier.num_bytes) == (0, 0)


def test_kinds_share_the_memory_and_there_is_never_more_than_there_may_be() -> None:
    tier = HostTier(1000)
    assert tier.num_bytes == 0
    for number in range(30):
        put(tier, number)
        tier.put(STATES, [OTHER], [name(number)], rows([number], OTHER))
        require_counted(tier)
    assert tier.num_of(BLOCKS) + 2 * tier.num_of(STATES) >= 1000 // 64 - 1
    assert min(tier.num_of(BLOCKS), tier.num_of(STATES)) >= 4
    tier.put(BLOCKS, [OTHER], [name(40)], rows([40], OTHER))  # blocks look otherwise from here on
    assert held(tier, range(41)) == [40]
    require_counted(tier)


def test_where_memory_ends_what_there_is_is_used_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier, make = tier_of(8), host_module.host_rows

    def make_two(part: Part, num_rows: int) -> torch.Tensor:
        if tier.num_bytes >= 128:
            raise RuntimeError("CUDA error: out of memory")
        return make(part, num_rows)

    monkeypatch.setattr(host_module, "host_rows", make_two)
    for number in range(9):
        put(tier, number)
    assert held(tier) == [7, 8]
    assert len(caplog.records) == 1


def test_an_interrupted_put_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_of(4)
    put(tier, 0, 1)

    def interrupted(*_: object) -> int:
        if len(tier.entries) == 4:
            raise KeyboardInterrupt
        return 64

    with monkeypatch.context() as patch:
        patch.setattr(host_module, "_bytes_of", interrupted)
        with pytest.raises(KeyboardInterrupt):
            put(tier, 2, 3, 4)
    tier.forget_namespace(b"none")
    require_counted(tier)
    put(tier, 5, 6, 7)
    assert held(tier)[-3:] == [5, 6, 7]
    assert read(tier, 5, 6, 7) == [5, 6, 7]


def test_random_operations_agree_with_a_naive_order() -> None:
    rng, tier, naive = random.Random(0), tier_of(7), OrderedDict[int, None]()
    for _ in range(1000):
        numbers = rng.sample(range(20), rng.randrange(1, 9))
        if rng.random() < 0.6:
            put(tier, *numbers)
            new = [number for number in numbers if number not in naive]
            for number in numbers:
                if number in naive:
                    naive.move_to_end(number)
            for number in new[max(0, len(new) - 7) :]:
                naive[number] = None
            while len(naive) > 7:
                naive.popitem(last=False)
        else:
            tier.touch(BLOCKS, [name(number) for number in numbers])
            for number in numbers:
                if number in naive:
                    naive.move_to_end(number)
        require_counted(tier)
        assert [each for each, _ in tier.entries.values()] == [name(number) for number in naive]
        assert not naive or read(tier, *naive) == [*naive]
