"""Which cached block is handed out next."""

import pytest


@pytest.fixture
def ask(make_allocator, hashes):
    """Asks an allocator of 8 blocks for one block of each given document; returns which of them were hit."""
    allocator = make_allocator(num_blocks=9)

    def ask_for(*documents):
        hit = []
        for document in documents:
            with allocator.allocate(hashes([document] * 2)) as allocation:
                if allocation.num_prefix_blocks:
                    hit.append(document)
                else:
                    allocator.allocate_mutable(allocation, 1)
                    allocator.commit_many(allocation, 0, hashes([document] * 2))
        return hit

    ask_for.allocator = allocator
    return ask_for


def test_what_was_used_again_stays_when_what_was_used_once_passes(ask):
    ask(1, 2, 3, 1, 2, 3)
    ask(*range(100, 150))
    assert ask(1, 2, 3) == [1, 2, 3]


def test_beyond_half_of_the_pool_the_least_recently_used_goes_whatever_it_was(ask):
    ask(*range(1, 7), *range(1, 7))  # six of eight were used again
    ask(7, 8, 9)
    assert ask(2, 9) == [2, 9]
    assert ask(1) == []


def test_what_comes_back_soon_after_it_was_evicted_was_used_again(ask):
    ask(*range(1, 11))  # 1 and 2 are evicted, and remembered
    ask(1, *range(100, 120))
    assert ask(1) == [1]


def test_what_comes_back_late_is_new(ask):
    ask(*range(1, 60))
    ask(1, *range(100, 120))
    assert ask(1) == []
