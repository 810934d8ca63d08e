"""Random operations on tables and snapshots beside a naive model: no snapshot without its chain of blocks, none too many, none of other tokens.

python -m tests.blocks.random_snapshots --operations 100000
"""

from __future__ import annotations

import argparse
import random
from typing import NamedTuple

from hf_paged_cache.blocks import BlockTable, PrefixCachingBlockAllocator, Snapshots, resumable, root_hash
from hf_paged_cache.errors import OutOfBlocksError

ROOTS = (root_hash(b"model"), root_hash(b"another"))


class World(NamedTuple):
    """The sizes of a run."""

    num_blocks: int = 24
    block_size: int = 2
    most: int = 4
    forgets: bool = False  # blocks are forgotten in the middle of a chain, too
    settles: bool = True  # after each operation, so that the naive model says exactly what is there

    def __str__(self) -> str:
        how = ("forgets" if self.forgets else "", "settles" if self.settles else "")
        return f"{self.num_blocks} blocks of {self.block_size}, {self.most} snapshots {' '.join(filter(None, how))}"


WORLDS = (
    World(),
    World(num_blocks=9, most=3),
    World(block_size=1, most=40, num_blocks=40),
    World(most=1),
    World(forgets=True),
    World(num_blocks=12, settles=False),
)

Tokens = tuple[bytes, tuple[int, ...]]  # root, and all tokens up to a block's end


class Driver:
    """Tables that come and go; a snapshot is the tokens before it."""

    def __init__(self, world: World, seed: str) -> None:
        self.world, self.rng = world, random.Random(f"{world} {seed}")
        self.allocator = PrefixCachingBlockAllocator(world.num_blocks, world.block_size)
        self.snapshots: Snapshots[Tokens] = Snapshots(self.allocator, world.most)
        self.tables: list[BlockTable] = []
        self.naive: list[Tokens] = []  # the least recently used first
        self.num_hits = self.num_evicted = self.num_refused = self.num_gone = 0

    def tokens(self) -> list[int]:
        """The beginning of one of few documents, with an end of its own at times."""
        length = self.rng.randrange(1, 4 * self.world.block_size + 3)
        document = random.Random(self.rng.randrange(4)).choices(range(2), k=12 * self.world.block_size)
        return document[:length] + self.rng.choices(range(3), k=self.rng.randrange(3))

    def blocks(self) -> dict[Tokens, int]:
        """The tokens before the end of every block that can be hit -> the block."""
        found = {}
        for root in ROOTS:
            chains: list[tuple[int, ...]] = [()]
            while chains:
                chain = chains.pop()
                table = BlockTable(self.allocator, root)
                for more in self.next_blocks():
                    table._chain.truncate(0)
                    table._chain.extend((*chain, *more))
                    hits = self.allocator.match_prefix(table._chain.hashes())
                    if len(hits) * self.world.block_size == len(chain) + len(more):
                        chains.append((*chain, *more))
                        found[root, chains[-1]] = hits[-1]
                table._chain.truncate(0)
                table.free()
        return found

    def next_blocks(self) -> list[tuple[int, ...]]:
        blocks: list[tuple[int, ...]] = [()]
        for _ in range(self.world.block_size):
            blocks = [(*block, token) for block in blocks for token in range(3)]
        return blocks

    def behind(self, table: BlockTable, num_blocks: int) -> Tokens:
        return table.root, tuple(table.token_ids[: num_blocks * self.world.block_size])

    def begin(self) -> None:
        table, tokens = BlockTable(self.allocator, self.rng.choice(ROOTS)), self.tokens()
        num_hit = table.hold_prefix(tokens)
        deepest = resumable([self.snapshots], table.block_ids, num_hit) // self.world.block_size
        known = [n for n in range(1, len(table.block_ids) + 1) if self.behind(table, n) in self.naive]
        if self.world.settles:
            assert deepest == max(known, default=0), "the deepest snapshot is another one"
        if deepest:
            self.num_hits += 1
            assert self.snapshots.use(table.block_ids[deepest - 1]) == self.behind(table, deepest), "of other tokens"
            self.touch(self.behind(table, deepest))
        try:
            table.append_tokens(tokens[num_hit:])
        except OutOfBlocksError:
            self.num_refused += 1
        self.tables.append(table)

    def go_on(self) -> None:
        table = self.rng.choice(self.tables)
        try:
            table.append_tokens(self.rng.choices(range(2), k=self.rng.randrange(1, 2 * self.world.block_size + 1)))
        except OutOfBlocksError:
            self.num_refused += 1

    def commit(self) -> None:
        table = self.rng.choice(self.tables)
        table.commit_full_blocks(table.num_tokens)

    def keep(self) -> None:
        table = self.rng.choice(self.tables)
        if not table.num_committed_blocks:
            return
        index, may_evict = self.rng.randrange(table.num_committed_blocks), self.rng.random() < 0.8
        behind, has_hash = self.behind(table, index + 1), self.allocator.digest_of(table.block_ids[index]) is not None
        if not self.world.settles:
            self.snapshots.keep(table.block_ids[index], behind, may_evict=may_evict)
            return
        was_there, has_room = behind in self.naive, len(self.naive) < self.snapshots.most
        is_kept = self.snapshots.keep(table.block_ids[index], behind, may_evict=may_evict)
        assert is_kept == (has_hash and (was_there or has_room or may_evict)), "kept, or not"
        if is_kept and not was_there and not has_room:
            self.naive.pop(0)
            self.num_evicted += 1
        if is_kept:
            self.touch(behind)

    def touch(self, behind: Tokens) -> None:
        if behind in self.naive:
            self.naive.remove(behind)
        self.naive.append(behind)

    def drop(self) -> None:
        table = self.rng.choice(self.tables)
        if table.num_committed_blocks:
            index = self.rng.randrange(table.num_committed_blocks)
            if self.allocator.digest_of(table.block_ids[index]) is not None:
                self.snapshots.drop(table.block_ids[index])
                behind = self.behind(table, index + 1)
                self.naive = [each for each in self.naive if each != behind]

    def fork(self) -> None:
        if len(self.tables) < 5:
            self.tables.append(self.rng.choice(self.tables).fork())

    def truncate(self) -> None:
        table = self.rng.choice(self.tables)
        table.truncate(self.rng.randrange(table.num_tokens + 1))

    def free(self) -> None:
        self.tables.pop(self.rng.randrange(len(self.tables))).free()

    def forget(self) -> None:
        """What a table has committed is found no more; in its middle where the world forgets so, else all of it."""
        table = self.rng.choice(self.tables)
        hashes = table._chain.hashes_of(0, table.num_committed_blocks)
        if self.world.forgets and hashes:
            self.allocator.forget([self.rng.choice(hashes)])
        elif self.rng.random() < 0.1:
            self.allocator.forget_cached_blocks()

    def limit(self) -> None:
        if self.rng.random() < 0.05:
            most = self.rng.randrange(self.world.most + 1)
            self.snapshots.limit(most)
            self.naive = self.naive[max(0, len(self.naive) - most) :]
            self.snapshots.most = self.world.most

    def operate(self) -> None:
        """One operation, and a look at everything."""
        always = [self.begin] if len(self.tables) < 4 else []
        others = [self.go_on, self.drop, self.fork, self.truncate, self.forget, self.limit] if self.tables else []
        often = [self.keep, self.commit, self.free] if self.tables else []
        self.rng.choice([*always, *always, *others, *often, *often])()

    def settle(self, *, looks: bool) -> None:
        """Let both let go of what has gone, and compare them; `looks` at all blocks there are, which takes long."""
        if not self.world.settles and not looks:
            return
        self.snapshots.check()
        contents = list(self.snapshots._contents.values())
        if self.world.settles:
            gone = [behind for behind in self.naive if behind not in contents]
            self.num_gone += len(gone)
            self.naive = [behind for behind in self.naive if behind not in gone]
            assert contents == self.naive, "other snapshots, or in another order"
        if looks:
            blocks = self.blocks()
            if not self.world.forgets:
                assert set(contents) <= set(blocks), "a snapshot without its chain of blocks"
            if self.world.settles:
                assert not set(gone) & set(blocks), "a snapshot has gone before its block"


def run_operations(world: World, number: int, seed: str) -> Driver:
    """So many operations, each beside the naive model."""
    driver = Driver(world, seed)
    for operation in range(number):
        try:
            driver.operate()
            driver.settle(looks=operation % 50 == 0)
            driver.allocator.check()
        except AssertionError as error:
            error.add_note(f"operation {operation}")
            raise
    return driver


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", default="0")
    given = parser.parse_args()
    for each in WORLDS:
        done = run_operations(each, given.operations // len(WORLDS), given.seed)
        print(f"{each}: {done.num_hits} hits, {done.num_evicted} evicted, {done.num_gone} gone with their blocks")  # noqa: T201
