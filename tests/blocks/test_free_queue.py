"""The order in which blocks are handed out. Scenarios 17 and 18."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged_cache.blocks.free_queue import FreeBlockQueue
from hf_paged_cache.errors import BlockStateError


def test_a_block_is_not_queued_twice():  # scenario 18
    queue = FreeBlockQueue(4, [1, 2, 3])
    for put in (queue.append, queue.appendleft):
        with pytest.raises(BlockStateError, match="block 2 queued twice"):
            put(2)
    assert len(queue) == 3
    queue.check()


def test_blocks_before_one_that_is_refused_were_put():
    queue = FreeBlockQueue(8, [1])
    for put, blocks in ((queue.append_many, [2, 3, 2, 6]), (queue.appendleft_many, [4, 5, 4, 7])):
        with pytest.raises(BlockStateError, match="queued twice"):
            put(blocks)
        queue.check()
    assert list(queue) == [5, 4, 1, 2, 3]


@pytest.mark.parametrize("number", [-1, 4])
def test_no_more_blocks_come_out_than_there_are_and_no_fewer_than_none(number):
    queue = FreeBlockQueue(4, [1, 2, 3])
    with pytest.raises(BlockStateError, match=f"{number} blocks taken from a queue that holds 3"):
        queue.popleft_many(number)
    assert len(queue) == 3


@pytest.mark.parametrize("stranger", [2, 0, -1, 99])
def test_a_stranger_is_not_removed(stranger):  # scenario 18
    queue = FreeBlockQueue(4, [1, 3])
    assert stranger not in queue
    with pytest.raises(BlockStateError, match="does not hold"):
        queue.remove(stranger)
    assert list(queue) == [1, 3]


@pytest.mark.parametrize("stranger", [0, -1, 4])
def test_what_is_no_block_is_not_queued(stranger):
    queue = FreeBlockQueue(4, [1])
    for put in (queue.append, queue.appendleft):
        with pytest.raises(BlockStateError):
            put(stranger)
    assert list(queue) == [1]


def test_check_notices_a_broken_link():
    queue = FreeBlockQueue(4, [1, 2, 3])
    queue._previous[3] = 1
    with pytest.raises(BlockStateError, match="links disagree"):
        queue.check()


@given(st.lists(st.tuples(st.sampled_from(["append", "appendleft", "remove", "popleft"]), st.integers(1, 6))))
def test_a_queue_behaves_as_a_deque(steps):
    queue, model = FreeBlockQueue(7), deque()
    for operation, block_id in steps:
        if operation == "popleft":
            if model:
                assert queue.popleft() == model.popleft()
        elif (operation == "remove") == (block_id in model):
            getattr(queue, operation)(block_id)
            getattr(model, operation)(block_id)
        assert list(queue) == list(model)
        assert len(queue) == len(model)
        queue.check()
