"""Host memory below the pool by itself, on a CPU: what it keeps, gives up first, and never takes beyond its limit."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch

from hf_paged_cache.blocks import BlockHash, RootFacts, Roots, digest_behind
from hf_paged_cache.kv.block_pool import BLOCKS
from hf_paged_cache.kv.contents import STATES, Part, Piece
from hf_paged_cache.tiers.folder import Folder
from hf_paged_cache.tiers.saved_file import ModelIdentity
from hf_paged_cache.tiers.tiers import Name, Tiers

CPU = torch.device("cpu")
PART = Part(BLOCKS, CPU, 64, (Piece((0, "key"), 0, 64, (1, 1, 64), torch.uint8),))
OTHER = Part(STATES, CPU, 128, (Piece((1, "key"), 0, 128, (128,), torch.uint8),))
MODEL = ModelIdentity({"model": "none"}, {})
ROOTS = Roots()
ROOT = ROOTS.of(RootFacts(MODEL.digest))


def name(number: int, namespace: bytes = b"") -> Name:
    tokens = b"%08d" % number
    return BlockHash(digest_behind(ROOT, tokens), tokens, ROOT), namespace


def rows(numbers: Sequence[int], part: Part = PART) -> list[torch.Tensor]:
    return [torch.tensor(numbers, dtype=torch.uint8)[:, None].repeat(1, part.num_bytes)]


def tiers_of(num_rows: int, folder: Path | None = None) -> Tiers:
    """For so many rows of blocks, each of which makes a run."""
    made = Tiers(ROOTS, lambda: [MODEL], 64 * num_rows, None if folder is None else Folder(folder, 2**20))
    made.run_bytes = 64
    return made


def put(tiers: Tiers, *numbers: int, namespace: bytes = b"", part: Part = PART) -> None:
    names = [name(number, namespace) for number in numbers]
    lacking = tiers.touch(part.kind, names)
    new = [number for number, each in zip(numbers, names, strict=True) if each in lacking]
    if new:
        tiers.put(part.kind, [part], [(name(number, namespace), ROOT) for number in new], rows(new, part))
    require_counted(tiers)


def require_counted(tiers: Tiers) -> None:
    stats = tiers.stats(b"")[0]
    assert stats.num_bytes is not None
    assert stats.max_bytes is not None
    assert stats.num_bytes <= stats.max_bytes


def held(tiers: Tiers, numbers: range = range(41), kind: str = BLOCKS) -> list[int]:
    return [number for number in numbers if tiers.place_of(kind, name(number)) is not None]


def read(tiers: Tiers, *numbers: int) -> list[int]:
    places = [tiers.place_of(BLOCKS, name(number)) for number in numbers]
    assert None not in places
    return [int(tiers.read(BLOCKS, place.run, [place.row])[0][0][0, 0]) for place in places if place is not None]


def test_the_least_recently_used_goes_first_and_one_that_was_touched_stays() -> None:
    tiers = tiers_of(4)
    put(tiers, 0, 1, 2, 3)
    tiers.touch(BLOCKS, [name(0)])
    put(tiers, 4)
    assert held(tiers) == [0, 2, 3, 4]
    put(tiers, 2)  # is there, and is used
    put(tiers, 5, 6)
    assert held(tiers) == [2, 4, 5, 6]
    assert tiers.stats(b"")[0].num_dropped == 3


def test_what_was_found_can_be_read_also_after_it_has_made_room() -> None:
    tiers = tiers_of(4)
    put(tiers, 0, 1, 2, 3)
    places = [tiers.place_of(BLOCKS, name(number)) for number in (0, 1)]
    put(tiers, 4, 5, 6, 7)
    assert held(tiers) == [4, 5, 6, 7]
    found = [tiers.read(BLOCKS, place.run, [place.row]) for place in places if place is not None]
    assert [int(fragments[0][0, 0]) for (fragments,) in found] == [0, 1]


def test_what_leaves_memory_is_found_in_files_if_it_has_a_name_elsewhere(tmp_path: Path) -> None:
    tiers = tiers_of(2, tmp_path)
    put(tiers, 0, 1)
    put(tiers, 5, namespace=b"tenant")
    put(tiers, 2, 3, 4)
    assert held(tiers) == [0, 1, 2, 3, 4]
    assert read(tiers, 0, 1, 2, 3, 4) == [0, 1, 2, 3, 4]
    tiers.writer.submit(int).result()
    assert read(tiers, 0, 1, 2, 3, 4) == [0, 1, 2, 3, 4]
    assert tiers.place_of(BLOCKS, name(5, b"tenant")) is None
    host, disk = tiers.stats(b"")
    assert (host.num_blocks, disk.num_blocks) == (2, 3)
    again = tiers_of(2, tmp_path)
    for run in again.look():
        again.adopt(run)
    assert held(again) == [0, 1, 2]


def test_a_name_is_its_digest_its_tokens_and_its_namespace() -> None:
    tiers = tiers_of(4)
    put(tiers, 0)
    digest = name(0)[0].digest
    assert tiers.place_of(BLOCKS, name(0, b"tenant")) is None
    assert tiers.place_of(BLOCKS, (BlockHash(digest, b"other tokens", ROOT), b"")) is None


def test_forgetting_a_namespace_frees_its_memory() -> None:
    tiers = tiers_of(4)
    put(tiers, 0)
    put(tiers, 1, 2, namespace=b"tenant")
    tiers.forget_namespace(b"tenant")
    require_counted(tiers)
    assert [each.num_blocks for salt in (b"", b"tenant") for each in tiers.stats(salt)] == [1, 0]
    tiers.forget_namespace(b"")
    put(tiers, 5, 6, 7, 8)
    assert held(tiers) == [5, 6, 7, 8]
    tiers.reset()
    (stats,) = tiers.stats(b"")
    assert (stats.num_blocks, stats.num_bytes) == (0, 0)


def test_kinds_share_the_memory_and_there_is_never_more_than_there_may_be() -> None:
    tiers = tiers_of(16)
    for number in range(30):
        put(tiers, number)
        put(tiers, number, part=OTHER)
    num_blocks, num_states = len(held(tiers)), len(held(tiers, kind=STATES))
    assert num_blocks + 2 * num_states >= 15
    assert min(num_blocks, num_states) >= 4
    put(tiers, 40, part=OTHER._replace(kind=BLOCKS))  # blocks look otherwise from here on
    assert held(tiers) == [40]


def test_random_operations_agree_with_a_naive_order() -> None:
    rng, tiers, naive = random.Random(0), tiers_of(7), OrderedDict[int, None]()
    for _ in range(1000):
        (number,) = rng.sample(range(20), 1)
        if number in naive:
            naive.move_to_end(number)
        if rng.random() < 0.6:
            put(tiers, number)
            naive[number] = None
            if len(naive) > 7:
                naive.popitem(last=False)
        else:
            tiers.touch(BLOCKS, [name(number)])
        assert held(tiers) == sorted(naive)
        assert not naive or read(tiers, *naive) == [*naive]
