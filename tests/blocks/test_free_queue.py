"""The order in which blocks are handed out. Scenarios 17 and 18."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged_cache.blocks.free_queue import FreeBlockQueue
from hf_paged_cache.errors import BlockStateError


def test_blocks_before_one_that_is_refused_were_put():  # scenario 18
    queue = FreeBlockQueue(8, [1])
    for put, blocks in ((queue.extend, [2, 3, 2, 6]), (queue.extendleft, [4, 5, 4, 7])):
        with pytest.raises(BlockStateError, match="queued twice"):
            put(blocks)
        queue.check()
    assert list(queue) == [5, 4, 1, 2, 3]


@pytest.mark.parametrize("stranger", [2, 0, -1, 99])
def test_a_stranger_is_not_removed(stranger):  # scenario 18
    queue = FreeBlockQueue(4, [1, 3])
    with pytest.raises(BlockStateError, match="does not hold"):
        queue.remove([stranger])
    assert list(queue) == [1, 3]


@pytest.mark.parametrize("stranger", [0, -1, 4])
def test_what_is_no_block_is_not_queued(stranger):
    queue = FreeBlockQueue(4, [1])
    for put in (queue.extend, queue.extendleft):
        with pytest.raises(BlockStateError):
            put([stranger])
    assert list(queue) == [1]


def test_check_notices_a_broken_link():
    queue = FreeBlockQueue(4, [1, 2, 3])
    queue._previous[3] = 1
    with pytest.raises(BlockStateError, match="links disagree"):
        queue.check()


@given(st.lists(st.tuples(st.sampled_from(["extend", "extendleft", "remove", "popleft"]), st.integers(1, 6))))
def test_a_queue_behaves_as_a_deque(steps):
    queue, model = FreeBlockQueue(7), deque()
    for operation, block_id in steps:
        if operation == "popleft":
            assert queue.popleft(0, block_id) == [model.popleft() for _ in range(min(block_id, len(model)))]
        elif operation == "remove":
            if block_id in model:
                queue.remove([block_id])
                model.remove(block_id)
        elif block_id not in model:
            getattr(queue, operation)([block_id])
            getattr(model, operation)([block_id])
        assert list(queue) == list(model)
        assert queue.length == len(model)
        queue.check()
