"""Shared by the tests of `blocks`: hashes of a chain, and an allocator that is checked when a test ends."""

import pytest

from hf_paged_cache.blocks import HashChain, PrefixCachingBlockAllocator, root_hash

ROOT = root_hash(b"model")


@pytest.fixture
def hashes():
    """Hashes of the full blocks of `token_ids`, block size 2."""

    def hashes_of(token_ids, root=ROOT):
        return HashChain(root, 2, token_ids).hashes_of()

    return hashes_of


@pytest.fixture
def make_allocator():
    made = []

    def make(num_blocks=17, block_size=2):
        made.append(PrefixCachingBlockAllocator(num_blocks, block_size))
        return made[-1]

    yield make
    for allocator in made:
        allocator.check()


@pytest.fixture
def allocator(make_allocator):
    return make_allocator()


@pytest.fixture
def cache_sequence(allocator, hashes):
    """Computes, commits and frees a sequence; returns its block ids."""

    def cache(token_ids, **options):
        block_hashes = hashes(token_ids, **options)
        allocation = allocator.allocate((), len(block_hashes))
        allocator.commit_many(allocation, 0, block_hashes)
        block_ids = list(allocation.block_ids)
        allocation.free()
        return block_ids

    return cache
