"""Tables go to the host and come back: what is copied, what is found there, what is shared, and what is refused."""

import pytest

from hf_paged_cache.blocks import BlockTable, HashChain, PrefixCachingBlockAllocator, Window, WindowBlocks, root_hash
from hf_paged_cache.blocks.for_engines import BlockSwapper
from hf_paged_cache.errors import BlockStateError, CacheArgumentError, OutOfBlocksError

from .snapshot import snapshot_of
from .test_interrupts import interrupt

ROOT = root_hash(b"model")


@pytest.fixture
def device():
    return PrefixCachingBlockAllocator(17, 2)


@pytest.fixture
def host():
    return PrefixCachingBlockAllocator(9, 2)


@pytest.fixture
def swapper(device, host):
    made = BlockSwapper(device, host)
    yield made
    for side in (device, host):
        side.check()


def hash_of(tokens):
    return HashChain(ROOT, 2, tokens).hashes_of()[-1]


def table_of(allocator, tokens, *, is_committed=True, namespace=b""):
    table = BlockTable(allocator, ROOT, namespace=namespace)
    table.allocate(tokens)
    if is_committed:
        table.commit_full_blocks(len(tokens))
    return table


def test_a_table_goes_out_and_back_with_its_tokens_and_its_partial_block(device, host, swapper):
    table = table_of(device, [1, 2, 3])
    assert not swapper.is_on_host(table)
    assert swapper.swap_out(table) == [(1, 1), (2, 2)]
    assert swapper.is_on_host(table)
    assert (list(table.token_ids), table.num_committed_blocks, table.num_cached_tokens) == ([1, 2, 3], 1, 0)
    assert (device.num_blocks_in_use, host.num_blocks_in_use) == (0, 2)
    swapper.drop_copies(2)
    table.append_tokens([4, 5])  # it resumes where it is
    table.commit_full_blocks(4)
    host.drop_copies(len(host.pending_copies))
    assert swapper.swap_in(table) == [(2, 2), (3, 3)]
    assert table.append_token(6) == 7


def test_what_a_table_was_hit_with_it_still_counts_as_hit(device, host, swapper):
    table_of(device, [1, 2, 3, 4]).free()
    table = table_of(device, [1, 2, 3, 4, 5])
    swapper.swap_out(table)
    assert table.num_cached_tokens == 4


def test_what_cannot_be_swapped_is_refused_before_anything_changes(device, host, swapper):
    table, freed = table_of(device, [1, 2, 3]), table_of(device, [4])
    freed.free()
    windowed = BlockTable(device, ROOT, groups=[WindowBlocks(device, Window(3), num_blocks=4)])
    before = snapshot_of(device), snapshot_of(host)
    with pytest.raises(BlockStateError, match="is not on the host"):
        swapper.swap_in(table)
    with pytest.raises(BlockStateError, match="is not on the device: it was swapped or freed"):
        swapper.swap_out(table, freed)
    with pytest.raises(BlockStateError, match="was freed, or is of another allocator"):
        swapper.is_on_host(freed)
    with pytest.raises(CacheArgumentError, match="given twice"):
        swapper.swap_out(table, table)
    with pytest.raises(CacheArgumentError, match="window blocks"):
        swapper.swap_out(windowed)
    assert (snapshot_of(device), snapshot_of(host)) == before
    fork = table.fork()
    fork.append_tokens([5])
    with pytest.raises(BlockStateError, match="1 copies on write are pending on the device"):
        swapper.swap_out(fork)
    device.drop_copies(len(device.pending_copies))
    assert swapper.swap_out(fork)


def test_tables_that_do_not_fit_stay_where_they_are(device, host, swapper):
    held = host.allocate([], 6)  # two blocks are left, of which the tables find none
    tables = [table_of(device, [1, 2, 3]), table_of(device, [4, 5], namespace=b"tenant")]
    before = snapshot_of(device), snapshot_of(host)
    with pytest.raises(OutOfBlocksError, match="there are fewer"):
        swapper.swap_out(*tables)
    assert (snapshot_of(device), snapshot_of(host), swapper.pending_copies) == (*before, ())
    held.free()
    assert len(swapper.swap_out(*tables)) == 3


def test_what_the_other_side_has_is_found_and_not_evicted_for_the_rest(device, host, swapper):
    tables = [table_of(device, tokens) for tokens in ([5, 6], [1, 2, 3, 4])]
    table_of(host, [1, 2, 3, 4]).free()
    held = host.allocate([], 5)
    assert host.num_free_blocks == 1
    assert len(swapper.swap_out(*tables)) == 1
    assert host.num_evictions == 0
    held.free()


def test_a_swapper_needs_two_allocators_of_one_block_size(device):
    with pytest.raises(CacheArgumentError, match="one allocator"):
        BlockSwapper(device, device)
    with pytest.raises(CacheArgumentError, match="block_size is 2 on the device and 4 on the host"):
        BlockSwapper(device, PrefixCachingBlockAllocator(9, 4))


class World:
    """Tables that share, on a device, and a host that has one of their blocks, and another one to be evicted."""

    def __init__(self):
        self.device, self.host = PrefixCachingBlockAllocator(12, 2), PrefixCachingBlockAllocator(7, 2)
        self.swapper = BlockSwapper(self.device, self.host)
        for tokens in ([1, 2], [8, 8], [9, 9]):
            table_of(self.host, tokens).free()
        table = table_of(self.device, [1, 2, 3, 4, 5])
        self.tables = [table, table.fork(), table_of(self.device, [6, 6, 7])]
        self.content = [self.written(self.device), self.written(self.host)]

    def written(self, allocator):
        """Block -> the prefix that was computed into it."""
        content = {}
        for tokens in ([1, 2], [1, 2, 3, 4], [6, 6], [8, 8], [9, 9]):
            for block_id in allocator.match_prefix([hash_of(tokens)]):
                content[block_id] = tokens
        for table in self.tables if allocator is self.device else ():
            for index, block_id in enumerate(table.block_ids):
                content[block_id] = list(table.token_ids[: 2 * index + 2])
        return content

    def assert_whole(self):
        """Once what is pending is copied, each table reads what it wrote, and every hash has its content."""
        self.swapper.device.check()
        self.swapper.host.check()
        for source, destination, is_to_host in self.swapper.pending_copies:
            self.content[is_to_host][destination] = self.content[not is_to_host][source]
        for table in self.tables:
            content = self.content[self.swapper.is_on_host(table)]
            for index, block_id in enumerate(table.block_ids):
                assert content[block_id] == list(table.token_ids[: 2 * index + 2])
        for allocator, content in zip((self.device, self.host), self.content, strict=True):
            for block_id in range(1, allocator.num_blocks):
                block_hash = allocator.block_hash_of(block_id)
                assert block_hash is None or block_hash == hash_of(content[block_id])


STRIDE = 19  # of the instructions that are interrupted


class WorldOut(World):
    """The same, when the tables have gone out and the copies were made."""

    def __init__(self):
        super().__init__()
        swap_out(self)
        self.assert_whole()
        self.swapper.drop_copies(len(self.swapper.pending_copies))


def swap_out(world):
    world.swapper.swap_out(*world.tables)


def swap_in(world):
    world.swapper.swap_in(*world.tables)


@pytest.mark.parametrize(("kind", "operation"), [(World, swap_out), (WorldOut, swap_in)], ids=["out", "in"])
def test_of_a_swap_interrupted_anywhere_each_table_has_moved_or_has_not(kind, operation):
    done = kind()
    operation(done)
    done.assert_whole()
    instruction = num_undone = num_partly_done = 0
    while interrupt(operation, world := kind(), instruction):
        world.assert_whole()
        world.swapper.drop_copies(len(world.swapper.pending_copies))
        left = [table for table in world.tables if world.swapper.is_on_host(table) == (kind is WorldOut)]
        for allocator, is_here in ((world.device, kind is World), (world.host, kind is WorldOut)):
            tables = [table for table in world.tables if (table in left) == is_here]
            assert allocator.num_blocks_in_use == len({each for table in tables for each in table.block_ids})
        num_undone += len(left) == 3
        num_partly_done += 0 < len(left) < 3
        for table in left:  # it can be done again
            (world.swapper.swap_out if kind is World else world.swapper.swap_in)(table)
        world.assert_whole()
        instruction += STRIDE
    assert num_undone > 14
    assert num_partly_done > 3
