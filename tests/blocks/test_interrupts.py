"""Ctrl-C between any two instructions of any change: afterwards it has happened or has not, and nothing else differs.

Each program is run once for every fifth instruction of `blocks/` that its last operation executes, with a
KeyboardInterrupt raised before that instruction.
"""

import contextlib
import math
import sys
from pathlib import Path

import pytest

import hf_paged_cache.blocks
from hf_paged_cache.blocks import BlockTable, HashChain, PrefixCachingBlockAllocator, Snapshots, root_hash
from hf_paged_cache.blocks.for_engines import Ring

from .snapshot import snapshot_of

ROOT = root_hash(b"model")
TENANT = root_hash(b"model", b"tenant")
PACKAGE = str(Path(hf_paged_cache.blocks.__file__).parent)


def hashes(token_ids):
    return HashChain(ROOT, 2, token_ids).hashes_of()


class World:
    """A small allocator with blocks in each state, and one table of its own for each operation to work on."""

    def __init__(self):
        self.allocator = PrefixCachingBlockAllocator(18, 2)
        with BlockTable(self.allocator, TENANT, namespace=b"tenant") as table:  # the first to be evicted
            table.allocate([2, 2])
            table.commit_full_blocks(2)
        for tokens in (range(4), [8, 8, 9, 9]):
            with BlockTable(self.allocator, ROOT) as table:
                table.allocate(tokens)
                table.commit_full_blocks(4)
        self.table = BlockTable(self.allocator, ROOT)
        self.table.allocate([0, 1, 7, 7, 7])
        self.forked = self.table.fork()
        self.duplicate = BlockTable(self.allocator, ROOT)
        self.duplicate.append_tokens([0, 1, 2, 3, 6])
        self.awaiting = self.allocator.allocate()
        self.allocator.allocate_immutable(self.awaiting, hashes([0, 1, 7, 7]))
        self.committed = BlockTable(self.allocator, ROOT)
        self.committed.allocate([3, 3, 4, 4, 5, 5])
        self.committed.commit_full_blocks(6)
        self.tenant = BlockTable(self.allocator, TENANT, namespace=b"tenant")
        self.made = None
        self.allocator.check()
        self.snapshots = Snapshots(self.allocator, 18)
        for block in self.hits():
            self.snapshots.keep(block, block)

    def lists(self):
        return [list(block_ids) for block_ids in self.allocator._held.values()]

    def evicts_tails_first(self):
        """Whether of each sequence that can be hit, what nobody holds is evicted from its end."""
        queue = snapshot_of(self.allocator)[1]
        places = [
            [queue.index(block) for block in self.allocator.match_prefix(hashes(tokens)) if block in queue]
            for tokens in (range(4), [8, 8, 9, 9], [0, 1, 7, 7], [3, 3, 4, 4, 5, 5])
        ]
        return all(of_one == sorted(of_one, reverse=True) for of_one in places)

    def hits(self):
        states = self.allocator._states
        return {block for block in states.blocks.values() if block not in states.uncomputed}


def collect(world):
    world.table = None
    world.allocator.check()


def collect_committed(world):
    world.committed = None
    world.allocator.check()


def give_back(world):
    for table in (world.table, world.forked, world.duplicate, world.committed, world.awaiting):
        if table is not None and not (table.is_freed if table is world.awaiting else table.allocation.is_freed):
            table.free()


def reset(world):
    give_back(world)
    world.allocator.reset_prefix_cache()


def use_up(world):
    """Give back what is held, and take every block: what an interrupt has left out of order, shows."""
    give_back(world)
    world.allocator.check()
    world.allocator.allocate([], world.allocator.num_available_blocks)
    world.allocator.check()


OPERATIONS = {
    "allocate a hit, evicting": lambda w: setattr(w, "made", w.allocator.allocate(hashes(range(4)), 5)),
    "allocate a window, evicting": lambda w: setattr(w, "made", Ring(w.allocator, 20, 8)),
    "allocate fresh blocks": lambda w: w.allocator.allocate_mutable(w.table.allocation, 6),
    "allocate immutable ones": lambda w: w.allocator.allocate_immutable(w.awaiting, hashes([8, 8, 9, 9, 5, 5])),
    "commit": lambda w: w.allocator.commit_many(w.table.allocation, 0, hashes([0, 1, 7, 7])),
    "commit a duplicate": lambda w: w.allocator.commit_many(w.duplicate.allocation, 0, hashes(range(4))),
    "mark computed": lambda w: w.allocator.mark_computed(w.awaiting.block_ids),
    "fork": lambda w: setattr(w, "made", w.allocator.fork(w.table.allocation)),
    "truncate": lambda w: w.allocator.truncate(w.duplicate.allocation, 1),
    "free": lambda w: w.allocator.free(w.duplicate.allocation),
    "truncate what is committed": lambda w: w.allocator.truncate(w.committed.allocation, 1),
    "free what is committed": lambda w: w.allocator.free(w.committed.allocation),
    "free what awaits": lambda w: w.allocator.free(w.awaiting),
    "copy a shared block": lambda w: w.allocator.make_writable(w.forked.allocation, 2),
    "copy a block with a hash": lambda w: w.allocator.make_writable(w.awaiting, 0),
    "grow": lambda w: w.allocator.grow(20),
    "forget": lambda w: w.allocator.forget_cached_blocks(),
    "forget a namespace": lambda w: w.allocator.forget_cached_blocks(b""),
    "hold a prefix of a namespace": lambda w: w.tenant.hold_prefix([2, 2, 6, 6, 6]),
    "collect": collect,
    "collect what is committed": collect_committed,
    "reset": reset,
}


def interrupt(operation, world, instruction):
    """Run `operation(world)`; raise before its `instruction`-th instruction in the package. Whether it was reached."""
    return num_begun(operation, world, instruction) > instruction


def num_begun(operation, world, instruction=math.inf):
    """The same; how many instructions were begun, the last of them in vain if there are so many."""
    num_instructions = 0

    def trace(frame, event, _argument):
        nonlocal num_instructions
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            num_instructions += 1
            if num_instructions > instruction:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            operation(world)
    finally:
        sys.settrace(before)
    return num_instructions


REPEATABLE = (
    set(OPERATIONS)
    - {"allocate a hit, evicting", "allocate a window, evicting", "fork", "reset"}
    - {"collect", "collect what is committed", "hold a prefix of a namespace"}
)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_interrupted_anywhere_has_happened_or_has_not(name):
    operation = OPERATIONS[name]
    before, done = World(), World()
    operation(done)
    done.allocator.check()
    blocks_before, blocks_done = before.lists(), done.lists()
    hits_allowed = before.hits() | done.hits()
    instruction = num_undone = 0
    while interrupt(operation, world := World(), instruction):
        world.allocator.check()  # repairs, takes back what was collected, and proves the invariants
        world.snapshots.check()
        assert not world.allocator._dirty
        assert world.evicts_tails_first()
        if name == "reset":  # some of it may have happened
            assert all(block_ids in blocks_before or block_ids in blocks_done for block_ids in world.lists())
        else:
            assert world.lists() in (blocks_before, blocks_done)
        assert world.hits() <= hits_allowed
        if world.lists() == blocks_done:
            assert world.allocator.pending_copies == done.allocator.pending_copies
        if name in REPEATABLE and world.lists() == blocks_before != blocks_done:
            num_undone += 1
            operation(world)  # it can be done again, with the same effect
            world.allocator.check()
            assert world.evicts_tails_first()
            assert len(world.lists()) == len(blocks_done)
            assert world.allocator.num_available_blocks == done.allocator.num_available_blocks
            assert world.hits() <= hits_allowed | {block for block_ids in world.lists() for block in block_ids}
        if name == "grow":
            operation(world)
            world.allocator.check()
            assert world.allocator.num_blocks == 20
            assert sorted(snapshot_of(world.allocator)[1]) == sorted(snapshot_of(done.allocator)[1])
        use_up(world)
        instruction += 5
    assert instruction > 20
    assert num_undone > 4 or name not in REPEATABLE or blocks_before == blocks_done


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_repair_itself_may_be_interrupted_anywhere(name):
    operation = OPERATIONS[name]
    num_instructions = num_begun(operation, World())
    for instruction in range(5, num_instructions, max(1, num_instructions // 4)):
        repair = 0
        while True:
            world = World()
            interrupt(operation, world, instruction)
            if not interrupt(lambda world: world.allocator._settle(), world, repair):
                break
            world.allocator.check()
            repair += 61


COME_NEXT = {
    **{name: operation for name, operation in OPERATIONS.items() if name != "reset"},  # refused where blocks are in use
    "allocate nothing": lambda w: setattr(w, "made", w.allocator.allocate()),
    "begin a table": lambda w: setattr(w, "made", BlockTable(w.allocator, ROOT)),
}


@pytest.mark.parametrize("name", COME_NEXT)
def test_whatever_comes_next_derives_what_an_interrupt_has_left(name):
    num_left, instruction = 0, 0
    while True:
        world = World()
        spare = world.allocator.fork(world.committed.allocation)
        if not interrupt(lambda world: world.allocator.free(spare), world, instruction):  # noqa: B023
            break
        num_left += world.allocator._dirty
        COME_NEXT[name](world)
        world.allocator.check()
        instruction += 5
    assert num_left > 3
