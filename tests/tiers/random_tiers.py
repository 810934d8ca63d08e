"""Random calls on a store with tiers of tiny budgets, beside a naive model: what is found is right, and nothing is lost that had room.

python -m tests.tiers.random_tiers --operations 50000

A block's content is made from its digest, so whatever is read anywhere can be told right or wrong. The host tier lies on a CPU here,
which a user's cannot: what is tried is who keeps what, not how it is copied.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from tqdm import tqdm

from hf_paged_cache.blocks import BlockTable, WindowBlocks, resumable, root_hash
from hf_paged_cache.blocks.sight import Window
from hf_paged_cache.errors import OutOfBlocksError
from hf_paged_cache.kv.contents import write_blocks
from hf_paged_cache.kv.states import StateKey
from hf_paged_cache.store import tier_load
from hf_paged_cache.store.block_store import BlockStore
from hf_paged_cache.store.state_snapshots import StateRules
from hf_paged_cache.store.tier_load import Wanted
from hf_paged_cache.tiers.base import BLOCKS, STATES, Kind, Name, Tier
from hf_paged_cache.tiers.disk import DiskTier
from hf_paged_cache.tiers.host import HostTier

SALTS = (b"", b"tenant")
HEAD_DIM = 8  # of float64: a row of 2 tensors of 2 tokens has 256 bytes
STATE = StateKey(9, "recurrent", 0)


class World(NamedTuple):
    """The sizes of a run. 0 bytes: no such tier."""

    host_bytes: int = 2**12
    disk_bytes: int = 0
    num_blocks: int = 9
    window: int = 0  # of a second layer
    has_states: bool = False
    is_ample: bool = False  # tiers have room for all that there can be
    run_bytes: int = 2**10  # of a file
    is_windowed_alone: bool = False  # no layer without a window

    def __str__(self) -> str:
        tiers = " ".join(
            f"{name}={size}" for name, size in (("host", self.host_bytes), ("disk", self.disk_bytes)) if size
        )
        kinds = f"window={self.window}{' alone' * self.is_windowed_alone}" if self.window else ""
        return " ".join(filter(None, (tiers, kinds, "states" * self.has_states, "ample" * self.is_ample)))


WORLDS = (
    World(),
    World(host_bytes=0, disk_bytes=2**16),
    World(host_bytes=2**11, disk_bytes=3 * 2**14),
    World(host_bytes=2**20, is_ample=True),
    World(host_bytes=0, disk_bytes=2**24, is_ample=True),
    World(host_bytes=2**11, disk_bytes=2**24, is_ample=True),
    World(host_bytes=2**13, window=3),
    World(host_bytes=2**12, disk_bytes=2**24, window=4, num_blocks=12),
    World(host_bytes=2**12, window=3, is_windowed_alone=True),
    World(host_bytes=2**13, has_states=True),
    World(host_bytes=0, disk_bytes=2**24, has_states=True, window=3, num_blocks=12),
)


class Rows(NamedTuple):
    """A sequence that holds blocks."""

    table: BlockTable
    salt: bytes


class Driver:
    """A store, the sequences that hold blocks of it, and what was ever committed."""

    def __init__(self, world: World, seed: str, folder: Path) -> None:
        self.world, self.rng = world, random.Random(f"{world} {seed}")
        disk = DiskTier(folder, world.disk_bytes) if world.disk_bytes else None
        if disk is not None:
            disk.run_bytes = world.run_bytes
        host = HostTier(world.host_bytes, disk) if world.host_bytes else None
        self.tiers: list[Tier] = [tier for tier in (host, disk) if tier is not None]
        windows = {1: Window(world.window)} if world.window else {}
        if world.is_windowed_alone:
            windows[0] = Window(world.window)
        self.store = BlockStore(
            2,
            world.num_blocks,
            sight_of=windows,
            layers={0, 1} if world.window else {0},
            states=StateRules(8 * HEAD_DIM) if world.has_states else None,
            bytes_per_block=256,
            tiers=self.tiers,
        )
        self.rows: list[Rows] = []
        self.known: dict[Name, None] = {}  # what was committed and not forgotten
        self.seen_snapshots: set[Name] = set()
        self.num_from: dict[str, int] = {}
        self.num_refused = self.num_hits = self.num_interrupted = 0

    # What contents must be.

    def content(self, digest: bytes, layer_idx: int) -> Tensor:
        """[heads=1, block_size, HEAD_DIM] of a block."""
        numbers = torch.frombuffer(bytearray(digest[:16]), dtype=torch.int64).double()
        return (numbers.sum() + layer_idx + torch.arange(2 * HEAD_DIM, dtype=torch.float64)).view(1, 2, HEAD_DIM)

    def state(self, digest: bytes) -> dict[StateKey, Tensor]:
        return {STATE: self.content(digest, 7)[:, 0]}

    def held(self) -> Iterator[tuple[int, Tensor, Mapping[int, int] | None]]:
        """Layer, its tensor of keys, and where a window has blocks."""
        groups: dict[int | str, WindowBlocks] = {group.name: group for group in self.store.windows.groups}
        for window, tensors in ((window, group.named()) for window, group in self.store.pool.groups.items()):
            for (layer_idx, name), tensor in tensors.items():
                if name == "key":
                    yield layer_idx, tensor, None if window is None else groups[window].places

    def compare(self, block_id: int, digest: bytes, *, must_have_window: bool = False) -> None:
        """A block that was found holds what it must, in every layer that has it."""
        for layer_idx, tensor, places in self.held():
            if places is None:
                assert tensor[block_id].equal(self.content(digest, layer_idx)), f"block {block_id} holds something else"
            elif block_id in places:
                assert tensor[places[block_id]].equal(self.content(digest, layer_idx)), (
                    "a window block holds something else"
                )
            else:
                assert not must_have_window, "a window block is missing where the prefix was hit"

    def write(self, table: BlockTable, start: int, stop: int) -> None:
        """What a forward over these tokens writes, whole blocks at a time."""
        hashes, pool = table._chain.hashes_of(0, stop // 2), self.store.pool
        places_of = {group.name: group.places for group in self.store.windows.groups}
        for index in range(start // 2, stop // 2):
            block_id, _ = table.writable_block(2 * index, 2 * index + 2)
            for layer_idx in (0, 1) if self.world.window else (0,):
                sight = self.store.windows.sight_of.get(layer_idx)
                at = block_id if sight is None else places_of[sight.name].get(block_id)
                content = self.content(hashes[index].digest, layer_idx)
                for name, of_block in (("key", content), ("value", -content)):
                    tensor = pool.tensor_for(layer_idx, name, of_block[None])
                    if at is not None:
                        tensor[at] = of_block
                if at is not None:
                    pool.groups[None if sight is None else sight.name].use(1 + at)

    # Operations.

    def tokens(self) -> array[int]:
        length = self.rng.randrange(2, 13)
        document = random.Random(self.rng.randrange(6)).choices(range(2), k=14)
        return array("q", document[:length] + self.rng.choices(range(3), k=self.rng.randrange(3)))

    def call(self) -> None:
        """One or two prompts at once: brought up, hit, computed, committed."""
        salt = self.rng.choice(SALTS)
        prompts = [self.tokens() for _ in range(self.rng.choice((1, 1, 2)))]
        root = root_hash(b"model", salt)
        with self.store.lock:
            self.store.settle()
        wanted = [Wanted(root, salt, tokens, len(tokens) - 1) for tokens in prompts]
        if self.rng.random() < 0.15:
            self.load_interrupted(wanted)
        brought = self.store.tiers.load(wanted)
        for block_id, tier in brought.items():
            self.num_from[tier] = self.num_from.get(tier, 0) + 1
            digest = self.store.allocator.digest_of(block_id)
            assert digest is not None, "what came up is not cached"
        self.store.check()
        for tokens in prompts:
            self.run(root, salt, tokens)

    def load_interrupted(self, wanted: list[Wanted]) -> None:
        """Ctrl-C before something is written, of some of it: nothing may be found of what was not."""
        countdown = self.rng.randrange(3)

        def write_some(*given: Any) -> None:
            nonlocal countdown
            countdown -= 1
            if countdown < 0:
                raise KeyboardInterrupt
            write_blocks(*given)

        with mock.patch.object(tier_load, "write_blocks", write_some):
            try:
                self.store.tiers.load(wanted)
            except KeyboardInterrupt:
                self.num_interrupted += 1
        self.store.check()
        self.check(looks=True)

    def run(self, root: bytes, salt: bytes, tokens: array[int]) -> None:
        store, table = self.store, self.store.new_table(root, salt)
        num_hit = table.hold_prefix(tokens)
        hashes = table._chain.hashes_of(0, num_hit // 2)
        for index, block_hash in enumerate(hashes):
            is_seen = 2 * index >= num_hit - self.world.window + 1
            self.compare(table.block_ids[index], block_hash.digest, must_have_window=is_seen)
            if is_seen or not self.world.is_windowed_alone:  # else a block holds nothing, and can be had of nothing
                assert Name(block_hash, salt) in self.known, "hit, and was never committed, or forgotten"
        self.num_hits += bool(num_hit)
        if store.states:
            deepest = resumable((store.states.kept,), table.block_ids, num_hit)
            if deepest:
                digest = hashes[deepest // 2 - 1].digest
                assert store.states.use(table.block_ids, deepest)[STATE].equal(self.state(digest)[STATE]), (
                    "other states"
                )
        try:
            store.make_room(len(tokens) // 2 + 1)
            table.append_tokens(tokens[num_hit:])
        except OutOfBlocksError:
            self.num_refused += 1
            store.make_copies()
            table.free()
            return
        store.make_copies()
        self.write(table, num_hit, len(tokens))
        table.release_passed()
        for block_hash in table.commit_full_blocks(len(tokens)):
            self.known[Name(block_hash, salt)] = None
        if store.states and table.num_committed_blocks and self.rng.random() < 0.7:
            index = table.num_committed_blocks
            digest = table._chain.block_hash(index - 1).digest
            store.states.keep(table.block_ids, 2 * index, self.state(digest))
        if self.rng.random() < 0.3 and len(self.rows) < 2:
            self.rows.append(Rows(table, salt))
        else:
            table.free()

    def end(self) -> None:
        if self.rows:
            self.rows.pop(self.rng.randrange(len(self.rows))).table.free()

    def go_on(self) -> None:
        """A block of generated tokens."""
        if not self.rows:
            return
        row = self.rng.choice(self.rows)
        start = row.table.num_tokens
        if start % 2:
            return
        try:
            row.table.append_tokens(array("q", self.rng.choices(range(2), k=2)))
        except OutOfBlocksError:
            self.num_refused += 1
            self.store.make_copies(may_wait=False)
            return
        self.store.make_copies(may_wait=False)
        self.write(row.table, start, start + 2)
        row.table.release_passed()
        for block_hash in row.table.commit_full_blocks(start + 2):
            self.known[Name(block_hash, row.salt)] = None

    def forget_salt(self) -> None:
        if self.rng.random() < 0.1:
            salt = self.rng.choice(SALTS)
            for row in [row for row in self.rows if row.salt == salt]:
                self.rows.remove(row)
                row.table.free()
            self.store.forget(salt)
            self.known = {name: None for name in self.known if name.namespace != salt}

    def reset(self) -> None:
        if self.rng.random() < 0.03:
            for row in self.rows:
                row.table.free()
            self.rows = []
            self.store.reset_prefix_cache()
            self.known = {}

    def operate(self) -> None:
        often = [self.call] * 6 + [self.end, self.end, self.go_on, self.go_on]
        with self.store.lock:
            self.rng.choice([*often, self.forget_salt, self.reset])()

    # What must hold after each.

    def check(self, *, looks: bool) -> None:
        """Invariants and budgets; and `looks` at every content there is, which takes long."""
        self.store.check()
        if not looks:
            return
        for name in self.known:
            at = self.store.allocator.match_prefix((name.block_hash,), name.namespace)
            if at:
                self.compare(at[0], name.digest)
        for tier in self.tiers:
            for kind in (BLOCKS, STATES, *(group.name for group in self.store.windows.groups)):
                self.compare_tier(tier, kind)
        if self.world.is_ample and not self.store.windows and not self.world.has_states:
            for name in self.known:
                at = self.store.allocator.match_prefix((name.block_hash,), name.namespace)
                pending = any(each.name == name for each in self.store.tiers._evicted)
                assert at or pending or any(tier.has(BLOCKS, name) for tier in self.tiers), (
                    "a block that had room is lost"
                )
            assert not self.tiers[-1].counts.num_refused

    def compare_tier(self, tier: Tier, kind: Kind) -> None:
        for name in self.known:
            if not tier.has(kind, name):
                continue
            ups = tier.counts.num_up
            loaded = tier.load(kind, (name,))
            tier.counts.num_up = ups
            for part, fragments in zip(tier.parts_of(kind), loaded, strict=True):
                for piece in part.pieces:
                    field = (
                        fragments[0][0, piece.offset : piece.offset + piece.num_bytes].contiguous().view(piece.dtype)
                    )
                    if kind == STATES:
                        expected = self.state(name.digest)[STATE][0]
                    else:
                        layer_idx, of = piece.key[0], piece.key[1]
                        expected = self.content(name.digest, int(layer_idx)) * (1 if of == "key" else -1)
                    assert field.equal(expected.flatten()), f"{tier.name} has something else"
        shelf_names = set(self.names_in(tier, kind))
        assert shelf_names <= set(self.known), f"{tier.name} has what was forgotten"

    def names_in(self, tier: Tier, kind: Kind) -> Iterator[Name]:
        return (name for name, _ in tier._shelf(kind))


def run_operations(world: World, operations: int, seed: str = "0") -> Driver:
    """That many random operations; the state is checked after each, and every content now and then."""
    with tempfile.TemporaryDirectory() as folder:
        driver = Driver(world, seed, Path(folder))
        for number in tqdm(range(operations), desc=str(world), disable=None):
            try:
                driver.operate()
                driver.check(looks=number % 25 == 0 or number == operations - 1)
            except BaseException as error:
                raise AssertionError(f"world {world}, seed {seed}, operation {number}: {error}") from error
        for tier in driver.tiers:
            if isinstance(tier, DiskTier):
                tier.join()
        driver.check(looks=True)  # from the files
        return driver


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--operations", type=int, default=50_000, help="in all worlds together")
    parser.add_argument("--seed", default="0")
    given = parser.parse_args()
    for world in WORLDS:
        driver = run_operations(world, given.operations // len(WORLDS), given.seed)
        print(f"{world}: {driver.num_hits} hits, {driver.num_from} blocks came up, {driver.num_refused} refused")  # noqa: T201


if __name__ == "__main__":
    main()
