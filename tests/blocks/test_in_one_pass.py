"""What many rows change at a step, in one pass: the same as one after the other, the order of eviction included."""

from __future__ import annotations

import random

import pytest

from hf_paged_cache.blocks import BlockTable, PrefixCachingBlockAllocator, root_hash
from hf_paged_cache.blocks.block_table import append_to_each, forks_in_place_of
from hf_paged_cache.errors import BlockStateError, OutOfBlocksError

SIZE = 4
TWO_ROOTS = (root_hash(b"model"), root_hash(b"other"))


def beams(chance: random.Random, num_blocks: int = 200) -> tuple[PrefixCachingBlockAllocator, list[BlockTable]]:
    """Rows of two prompts that have parted: some blocks are shared, some have hashes, and some are of one row alone."""
    allocator = PrefixCachingBlockAllocator(num_blocks, SIZE)
    tables: list[BlockTable] = []
    for number in range(2):
        table = BlockTable(allocator, TWO_ROOTS[number])
        table.allocate(range(100 * number, 100 * number + 9 + number))
        tables += [table, *(table.fork() for _ in range(3))]
    equal = BlockTable(allocator, TWO_ROOTS[0])
    equal.append_tokens(range(8))
    equal.commit_full_blocks(8)  # its blocks take the place of equal ones, in one table and not yet in its fork
    tables.append(equal)
    for _ in range(chance.randrange(12)):
        table = chance.choice(tables)
        if chance.randrange(2):
            table.append_token(chance.randrange(3))
        table.commit_full_blocks(chance.choice([0, table.num_tokens]))
    return allocator, tables


@pytest.mark.parametrize("seed", range(20))
def test_forks_in_place_of_other_tables_are_forks_and_the_others_are_free(seed: int) -> None:
    def play(is_one_pass: bool) -> tuple[object, list[object]]:
        chance = random.Random(seed)
        allocator, tables = beams(chance)
        chosen = chance.sample(range(8), chance.randrange(2, 8))
        num_freed = chance.randrange(len(chosen))
        freed = [tables[number] for number in chosen[:num_freed]]
        sources = [chance.choice([tables[number] for number in chosen[num_freed:]]) for _ in range(chance.randrange(6))]
        if is_one_pass:
            with forks_in_place_of(sources, freed) as forks:
                pass
        else:
            forks = [table.fork() for table in sources]
            for table in freed:
                table.free()
        assert all(table.allocation.is_freed and not table.num_tokens for table in freed)
        allocator.check()
        for table, source in zip(forks, sources, strict=True):
            assert table.token_ids == source.token_ids
            assert table.commit_full_blocks(table.num_tokens) is not None
            table.append_token(7)
            assert table.num_tokens == source.num_tokens + 1
        *state, lists, namespaces = allocator.snapshot()
        return (state, sorted(lists), namespaces), [table.block_ids for table in forks]

    assert play(is_one_pass=True) == play(is_one_pass=False)


def test_what_is_left_by_an_exception_is_as_it_was() -> None:
    allocator, tables = beams(random.Random(1))
    before = allocator.snapshot()
    with pytest.raises(KeyboardInterrupt), forks_in_place_of(tables[:1], tables[1:2]):
        raise KeyboardInterrupt
    assert allocator.snapshot() == before
    assert not tables[1].allocation.is_freed
    tables[1].free()
    with pytest.raises(BlockStateError), forks_in_place_of(tables[:1], tables[1:2]):
        pass
    allocator.check()


@pytest.mark.parametrize("seed", range(20))
def test_a_token_for_each_table_is_one_for_one_after_the_other(seed: int) -> None:
    def play(is_one_pass: bool) -> object:
        chance = random.Random(seed)
        allocator, tables = beams(chance)
        chosen = chance.sample(tables, chance.randrange(9))
        tokens = [chance.randrange(9) for _ in chosen]
        if is_one_pass:
            slots = append_to_each(chosen, tokens)
        else:
            slots = [table.append_token(token) for table, token in zip(chosen, tokens, strict=True)]
        allocator.check()
        return (
            slots,
            allocator.take_copies(),
            [table.token_ids for table in tables],
            allocator.snapshot(),
        )

    assert play(is_one_pass=True) == play(is_one_pass=False)


def test_where_one_of_the_tables_gets_no_block_none_changes() -> None:
    allocator, tables = beams(random.Random(2))
    hog = allocator.allocate((), allocator.num_available_blocks - 3)
    before, tokens = allocator.snapshot(), [list(table.token_ids) for table in tables]
    with pytest.raises(OutOfBlocksError, match="need 7 blocks: 3 free"):
        append_to_each(tables, [7] * len(tables))
    assert allocator.snapshot() == before
    assert not allocator.pending_copies
    assert [list(table.token_ids) for table in tables] == tokens
    hog.free()
    assert len(append_to_each(tables, [7] * len(tables))) == len(tables)
