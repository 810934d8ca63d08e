"""Random calls on a store whose layers see windows: who was admitted gets its window blocks, and no byte beyond the budget is taken.

Calls in all shapes (several rows, prompts in chunks, copies of rows, drafts that are taken back) run beside loops of plain forwards,
which reserve nothing, pins, and rows whose call is over. Each forward of a call that was admitted must find what it takes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from hf_paged_cache.blocks import Allocation, BlockTable, root_hash
from hf_paged_cache.store.block_store import BlockStore
from hf_paged_cache.store.window_groups import RowToCome

ROOT = root_hash(b"model")


class Tables:
    """Rows of a call."""

    def __init__(self) -> None:
        self.tables: list[BlockTable] = []

    def block_ids(self) -> set[int]:
        return {block for table in self.tables for block in table.block_ids}

    def allocations(self) -> list[Allocation]:
        return [table.allocation for table in self.tables]

    def free(self) -> None:
        while self.tables:
            self.tables.pop().free()


class Call:
    """A holder of rows."""

    is_running = True
    salt = b""

    def __init__(self) -> None:
        self.rows, self.previous = Tables(), Tables()

    def num_previous_blocks(self) -> int:
        return 0

    def drop_rows(self) -> None:
        self.rows.free()


@dataclass
class Calls:
    """A store, and what runs on it."""

    store: BlockStore
    rng: random.Random
    max_tokens: int = 40
    running: list[tuple[Call, Iterator[None]]] = field(default_factory=list)
    budget_bytes: int | None = None
    num_admitted = num_refused = num_forwards = num_plain = 0

    def tokens(self, number: int) -> list[int]:
        document = random.Random(self.rng.randrange(3)).choices(range(3), k=number)
        return document if self.rng.random() < 0.8 else [*document[: number // 2], *range(9, 9 + number - number // 2)]

    def begin(self) -> None:
        """A call, if it is admitted."""
        rng, store, size = self.rng, self.store, self.store.block_size
        call, prompts = (
            Call(),
            [self.tokens(rng.randrange(1, self.max_tokens)) for _ in range(rng.choice((1, 1, 2, 3)))],
        )
        num_copies, keeps_past = rng.choice((1, 1, 1, 3)), rng.random() < 0.2
        # in chunks all rows are padded to one length, so there is one
        chunk = rng.choice((0, 0, 3, 7)) if len(prompts) == 1 and not keeps_past else 0
        most = [len(prompt) + rng.choice((1, 5, 20)) for prompt in prompts]
        for prompt in prompts:
            call.rows.tables.append(store.new_table(ROOT, b""))
            call.rows.tables[-1].hold_prefix(prompt[:-1])
        to_come = [
            RowToCome(
                min(len(prompt), table.num_tokens + chunk) if chunk else len(prompt),
                number,
                num_copies,
                bool(chunk),
            )
            for table, prompt, number in zip(call.rows.tables, prompts, most, strict=True)
        ]
        demand = store.windows.of_call(to_come, keeps_past=keeps_past)
        num_blocks = num_copies * sum(-(-number // size) + 1 for number in most)
        if store.windows.lacking(call, demand) or num_blocks > store.num_obtainable_blocks(call):
            self.num_refused += 1
            call.rows.free()
            return
        store.reserve(call, num_blocks)
        store.windows.reserve(call, demand)
        self.num_admitted += 1
        self.running.append((call, self.run(call, prompts, most, num_copies, chunk, keeps_past=keeps_past)))

    def run(
        self, call: Call, prompts: list[list[int]], most: list[int], num_copies: int, chunk: int, *, keeps_past: bool
    ) -> Iterator[None]:
        """Its forwards, one at a time."""
        rng, tables = self.rng, call.rows.tables
        if len(tables) > 1 and rng.random() < 0.5:  # all begin at one column
            for table in tables:
                table.hold_window(table.num_resumable_tokens(rng.randrange(table.num_tokens + 1)))
        while any(table.num_tokens < len(prompt) for table, prompt in zip(tables, prompts, strict=True)):
            for table, prompt in zip(tables, prompts, strict=True):
                stop = table.num_tokens + chunk if chunk else len(prompt)
                self.append(call, table, prompt[table.num_tokens : stop], len(prompt) if keeps_past else None)
            yield
            for table in tables:
                table.let_pass()
        for table in list(tables):
            tables.extend(table.fork() for _ in range(num_copies - 1))
        limits = [number for number in most for _ in range(1)]
        limits += [number for number in most for _ in range(num_copies - 1)]
        while any(table.num_tokens < number for table, number in zip(tables, limits, strict=True)):
            for table, number in zip(tables, limits, strict=True):
                if table.num_tokens == number:
                    continue
                if keeps_past and rng.random() < 0.5:
                    before = table.num_tokens
                    self.append(call, table, self.tokens(min(4, number - before)), before)
                    table.let_pass()
                    if rng.random() < 0.7:
                        table.truncate(rng.randrange(before, table.num_tokens) + 1)
                else:
                    self.step(call, table)
            if rng.random() < 0.2:
                for table in tables:
                    table.commit_full_blocks(table.num_tokens)
            if num_copies > 1 and rng.random() < 0.3 and len(prompts) == 1:  # beams change places
                source = tables[rng.randrange(len(tables))]
                which = rng.randrange(len(tables))
                if tables[which] is not source and source.num_tokens < limits[which]:
                    dropped, tables[which] = tables[which], source.fork()
                    dropped.free()
            yield
        for table in tables:
            table.commit_full_blocks(table.num_tokens)

    def plain(self) -> None:
        """A loop of forwards that reserves nothing begins."""
        call, prompt = Call(), self.tokens(self.rng.randrange(1, self.max_tokens))
        table = self.store.new_table(ROOT, b"")
        call.rows.tables.append(table)
        table.hold_prefix(prompt[:-1])
        if min(self.store.windows.num_obtainable(None)) < 0:
            call.rows.free()
            return
        self.num_plain += 1
        self.running.append((call, self.loop(call, table, prompt)))

    def loop(self, call: Call, table: BlockTable, prompt: list[int]) -> Iterator[None]:
        if self.can_forward(call, table, len(prompt)):
            self.append(call, table, prompt[table.num_tokens :], None)
            yield
            table.let_pass()
            while self.rng.random() < 0.9 and self.can_forward(call, table, table.num_tokens + 1):
                self.step(call, table)
                yield
            table.commit_full_blocks(table.num_tokens)

    def can_forward(self, call: Call, table: BlockTable, stop: int) -> bool:
        admission = self.store.windows
        num_blocks = table.num_new_blocks_for_append(stop - table.num_tokens)
        return num_blocks <= self.store.num_obtainable_blocks(call) and not admission.lacking(
            call, admission.of_forward([(table.num_tokens, stop, False)])
        )

    def append(self, call: Call, table: BlockTable, tokens: list[int], cut: int | None) -> None:
        self.make_room(call, table.num_new_blocks_for_append(len(tokens)))
        start = table.num_tokens
        table.append_tokens(tokens, cut=cut)
        self.write(table.slots(start, table.num_tokens))

    def step(self, call: Call, table: BlockTable) -> None:
        slot = table.append_in_place(self.rng.randrange(3))
        if slot is None:
            self.make_room(call, table.num_new_blocks_for_append(1))
            slot = table.append_token(self.rng.randrange(3))
        self.write([slot])

    def make_room(self, call: Call, num_blocks: int) -> None:
        self.store.make_room(num_blocks)
        self.store.reserve(call, max(0, self.store.num_blocks_reserved_for(call) - num_blocks))

    def write(self, slots: list[int]) -> None:
        self.store.make_copies()
        mapping = self.store.pool.map_slots(slots)
        for layer in self.store.windows.layers:
            states = torch.ones(1, 1, len(slots), 1)
            self.store.pool.write(layer, {"key": states, "value": states}, mapping)
        if not self.store.is_settled:
            self.store._budget_bytes = {torch.device("cpu"): self.budget_bytes}
            self.store.settle_budget()
        self.num_forwards += 1

    def advance(self) -> None:
        which = self.rng.randrange(len(self.running))
        _call, forwards = self.running[which]
        try:
            next(forwards)
        except StopIteration:
            self.end(which)

    def end(self, which: int) -> None:
        call, _ = self.running.pop(which)
        self.store.give_back_reservation(call)
        call.rows.free()

    def compare(self) -> None:
        """No more than the budget was taken, and all invariants hold."""
        store, pool = self.store, self.store.pool
        store.check()
        if store.max_num_blocks is not None:
            assert store.windows.are_all or store.allocator.num_blocks <= store.max_num_blocks
            assert all(group.num_blocks <= group.most for group in store.windows.groups)
        taken = 0 if store.windows.are_all else (store.allocator.num_blocks - 1) * pool.all.bytes_per_block
        for group in store.windows.groups:
            of_window = pool.groups[group.window]
            assert of_window.num_blocks_used <= group.num_blocks
            taken += (group.num_blocks - 1) * of_window.bytes_per_block
        assert self.budget_bytes is None or taken <= self.budget_bytes


def run_calls(calls: Calls, num_operations: int) -> Calls:
    """Make that many operations."""
    rng = calls.rng
    for number in range(num_operations):
        try:
            turn = rng.random()
            if not calls.running or (turn < 0.2 and len(calls.running) < 6):
                calls.plain() if rng.random() < 0.25 else calls.begin()
            elif turn < 0.23:
                calls.end(rng.randrange(len(calls.running)))
            else:
                calls.advance()
            calls.compare()
        except BaseException as error:
            error.add_note(f"operation {number}")
            raise
    return calls
