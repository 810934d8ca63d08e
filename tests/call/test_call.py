"""One running call: every event in every state, and that nothing which was not confirmed is ever found again.

idle -> announced -> written -> confirmed -> announced ... -> ended -> idle
"""

from __future__ import annotations

import gc
import threading
import zlib
from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_paged_cache import CacheArgumentError, CacheBusyError, ForwardMismatchError, OutOfBlocksError
from hf_paged_cache.attention.contiguous import ContiguousReader
from hf_paged_cache.attention.gather import GatherReader
from hf_paged_cache.blocks import BlockTable, root_hash
from hf_paged_cache.call.admission import num_blocks_to_take
from hf_paged_cache.call.call import Call, CallState
from hf_paged_cache.call.call_state import Bracket, CallLimits
from hf_paged_cache.call.scheduled_forward import ForwardRequest, RowInput, ScheduledForward
from hf_paged_cache.store.block_store import BlockStore

ROOT = root_hash(b"model")
BLOCK_SIZE = 4
LAYERS = (0, 1)
STATES = list(CallState)


def request(
    *rows: list[int], pads: list[int] | None = None, num_new: int | None = None, **options: Any
) -> ForwardRequest:
    pads = [0] * len(rows) if pads is None else pads
    inputs = tuple(RowInput(array("q", tokens), pad, 0, ROOT) for tokens, pad in zip(rows, pads, strict=True))
    return ForwardRequest(inputs, len(rows[0]) + pads[0] if num_new is None else num_new, **options)


BRACKET = Bracket()


def begin(call: Call, given: CallLimits | None = None, *, keep_rows: bool = False) -> None:
    call.begin(BRACKET, limits() if given is None else given, keep_rows=keep_rows)


def limits(max_columns: int | None = None, num_prompt: int = 4, num_rows: int = 1) -> CallLimits:
    return CallLimits(num_prompt, max_columns, num_rows, frozenset())


def value_of(tokens: list[int], layer_idx: int) -> float:
    """Keys and values depend on all tokens so far, as a model's do."""
    return zlib.crc32(repr((tokens, layer_idx)).encode()) % 9973


class Bench:
    """A call, and a stand-in for the model that computes what its ticket lets run."""

    def __init__(self, store: BlockStore | None = None, make_reader: Any = ContiguousReader) -> None:
        self.store = BlockStore(BLOCK_SIZE, 100) if store is None else store
        self.call = Call(self.store, make_reader(self.store.pool))
        self.num_steps = 0  # writes of layers by `write_step`

    def _written(self, layer_idx: int, states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As the cache does it: by `write_step` where that will do."""
        with torch.no_grad():
            pair = self.call.write_step(layer_idx, states["key"], states["value"])
            if pair is None:
                return self.call.write(layer_idx, states)
        self.num_steps += 1
        return dict(zip(("key", "value"), pair, strict=True))

    def write(self, ticket: ScheduledForward, layers: tuple[int, ...] = LAYERS) -> None:
        """Each layer writes what the ticket announces, and reads what the rows' tokens say."""
        for layer_idx in layers:
            rows = self.call.rows.distinct
            new = torch.zeros(len(rows), 1, ticket.num_columns, 1)
            full = torch.zeros(len(rows), 1, ticket.stop, 1)
            for i, row in enumerate(rows):
                tokens = list(row.table.token_ids)
                for position in range(len(tokens)):
                    column, value = position + row.pad, value_of(tokens[: position + 1], layer_idx)
                    full[i, 0, column] = value
                    if column >= ticket.start:
                        new[i, 0, column - ticket.start] = value
            got = self._written(layer_idx, {"key": new, "value": -new})
            for i, row in enumerate(rows):
                assert got["key"][i, 0, row.pad :].equal(full[i, 0, row.pad :])
                assert got["value"][i, 0, row.pad :].equal(-full[i, 0, row.pad :])

    def forward(self, *rows: list[int], **options: Any) -> ScheduledForward:
        ticket = self.call.announce(request(*rows, **options))
        self.write(ticket)
        self.call.confirm()
        return ticket

    def tokens(self) -> list[list[int]]:
        return [list(row.table.token_ids) for row in self.call.rows.in_batch()]

    def num_hit(self, tokens: list[int]) -> int:
        """Tokens that any other call would find."""
        with BlockTable(self.store.allocator, ROOT) as table:
            return table.hold_prefix(tokens)

    def bring_to(self, state: CallState) -> None:
        """Six tokens announced, and confirmed where the state has rows; a second forward is open where it is."""
        if state is CallState.IDLE:
            return
        begin(self.call)
        self.forward([1, 2, 3, 4, 5, 6])
        if state is CallState.ENDED:
            self.call.end()
        elif state is not CallState.CONFIRMED:
            ticket = self.call.announce(request([7, 8]))
            if state is CallState.WRITTEN:
                self.write(ticket, layers=(0,))
        assert self.call.state is state


@pytest.fixture
def bench() -> Bench:
    return Bench()


# A decode step


@pytest.mark.parametrize("make_reader", [ContiguousReader, GatherReader])
def test_each_layer_of_a_decode_step_is_written_in_fewer_lines_but_not_with_gradients(make_reader: Any) -> None:
    bench = Bench(make_reader=make_reader)
    bench.forward([1, 2, 3, 4], [5, 6, 7, 8])
    assert bench.num_steps == 0
    bench.forward([1], [2])
    assert bench.num_steps == len(LAYERS)
    bench.forward([1, 1], [2, 2])
    assert bench.num_steps == len(LAYERS)
    bench.call.announce(request([3], [3]))
    new = torch.ones(2, 1, 1, 1)
    assert bench.call.write_step(0, new, new) is None  # gradients are on
    with torch.no_grad():
        assert bench.call.write_step(0, new, new) is not None
        assert bench.call.state is CallState.WRITTEN
        bench.call.roll_back()
        assert bench.call.state is CallState.CONFIRMED
        assert bench.call.write_step(1, new, new) is None  # no ticket


# Every event in every state

IN_EVERY_STATE = pytest.mark.parametrize("state", STATES, ids=lambda state: state.name)
BEFORE = {CallState.IDLE: []}  # the tokens that are left once an open ticket is taken back; six in all other states
SIX = [[1, 2, 3, 4, 5, 6]]


@IN_EVERY_STATE
def test_a_forward_can_be_announced_in_every_state_and_takes_an_open_one_back(bench: Bench, state: CallState) -> None:
    bench.bring_to(state)
    ticket = bench.call.announce(request([9, 9, 9]))
    assert bench.call.state is CallState.ANNOUNCED
    assert ticket.start == (0 if state is CallState.IDLE else 6)
    assert bench.tokens() == [[*(BEFORE.get(state) or SIX[0]), 9, 9, 9] if state is not CallState.IDLE else [9, 9, 9]]
    bench.write(ticket)
    bench.call.confirm()
    assert bench.call.state is CallState.CONFIRMED


@IN_EVERY_STATE
def test_a_layer_writes_under_an_open_ticket_and_nowhere_else(bench: Bench, state: CallState) -> None:
    bench.bring_to(state)
    states = {"key": torch.zeros(1, 1, 2, 1), "value": torch.zeros(1, 1, 2, 1)}
    if bench.call.ticket is None:
        with pytest.raises(ForwardMismatchError, match=f"layer 1 writes to a cache whose call {state.value}"):
            bench.call.write(1, states)
        assert bench.call.state is state
    else:
        bench.call.write(1, states)
        assert bench.call.state is CallState.WRITTEN


@IN_EVERY_STATE
def test_only_a_forward_that_all_layers_wrote_is_confirmed(bench: Bench, state: CallState) -> None:
    bench.bring_to(state)
    open_ticket = bench.call.ticket is not None
    missing = {CallState.ANNOUNCED: r"layers \[0, 1\]", CallState.WRITTEN: r"layers \[1\]"}.get(state)
    message = f"did not write {missing}" if open_ticket else f"nothing to confirm: the call {state.value}"
    with pytest.raises(ForwardMismatchError, match=message):
        bench.call.confirm()
    assert bench.call.state is (CallState.CONFIRMED if open_ticket else state)
    assert bench.tokens() == BEFORE.get(state, SIX)


@IN_EVERY_STATE
@pytest.mark.parametrize("times", [1, 2])
def test_rolling_back_takes_an_open_ticket_back_and_else_does_nothing(
    bench: Bench, state: CallState, times: int
) -> None:
    bench.bring_to(state)
    open_ticket = bench.call.ticket is not None
    for _ in range(times):
        bench.call.roll_back()
    assert bench.call.ticket is None
    assert bench.call.state is (CallState.CONFIRMED if open_ticket else state)
    assert bench.tokens() == BEFORE.get(state, SIX)


@IN_EVERY_STATE
def test_rows_can_be_reordered_in_every_state(bench: Bench, state: CallState) -> None:
    bench.bring_to(state)
    bench.call.reorder([0, 0])
    assert bench.call.ticket is None
    assert bench.tokens() == ([] if state is CallState.IDLE else SIX * 2)


@IN_EVERY_STATE
def test_tokens_can_be_taken_back_in_every_state(bench: Bench, state: CallState) -> None:
    bench.bring_to(state)
    bench.call.crop(2)
    assert bench.tokens() == ([] if state is CallState.IDLE else [[1, 2, 3, 4]])
    assert bench.call.num_columns == (0 if state is CallState.IDLE else 4)


@IN_EVERY_STATE
def test_a_call_can_be_ended_in_every_state_and_keeps_its_confirmed_rows(bench: Bench, state: CallState) -> None:
    bench.bring_to(state)
    bench.call.end()
    assert bench.call.state is (CallState.IDLE if state is CallState.IDLE else CallState.ENDED)
    assert bench.tokens() == BEFORE.get(state, SIX)
    assert bench.call.limits is None


@IN_EVERY_STATE
@pytest.mark.parametrize("keep_rows", [True, False])
def test_a_call_can_begin_in_every_state(bench: Bench, state: CallState, keep_rows: bool) -> None:
    bench.bring_to(state)
    begin(bench.call, keep_rows=keep_rows)
    kept = keep_rows and state is not CallState.IDLE
    assert bench.call.num_columns == (6 if kept else 0)
    assert len(bench.call.rows) == (1 if kept else 0)
    assert bench.call.ticket is None


@IN_EVERY_STATE
def test_dropping_the_rows_gives_every_block_back_in_every_state(bench: Bench, state: CallState) -> None:
    bench.bring_to(state)
    bench.call.drop_rows()
    assert bench.call.state is CallState.IDLE
    assert bench.store.allocator.num_blocks_in_use == 0
    assert bench.call.reader.num_bytes == 0
    assert bench.num_hit([1, 2, 3, 4, 5, 6]) == (0 if state is CallState.IDLE else 4)
    bench.store.allocator.check()


@IN_EVERY_STATE
def test_rows_can_be_forked_and_read_in_every_state(bench: Bench, state: CallState) -> None:
    bench.bring_to(state)
    rows = bench.call.fork_rows()
    other = Bench(bench.store)
    other.call.take_over(rows)
    assert other.tokens() == BEFORE.get(state, SIX)
    read = other.call.read_layer(0)
    if state is CallState.IDLE:
        assert (read, other.call.state) == ({}, CallState.IDLE)
    else:
        assert read["key"].flatten().tolist() == [value_of(SIX[0][: i + 1], 0) for i in range(6)]
        other.forward([7, 8])
        bench.forward([9])
        assert (other.tokens(), bench.tokens()) == ([[*SIX[0], 7, 8]], [[*SIX[0], 9]])


@IN_EVERY_STATE
def test_a_call_that_is_collected_in_any_state_leaves_its_blocks_to_the_store(state: CallState) -> None:
    bench = Bench()
    bench.bring_to(state)
    store = bench.store
    bench.call.leave_behind()
    del bench
    gc.collect()
    store.settle()
    assert store.allocator.num_blocks_in_use == 0
    store.allocator.check()


# What a ticket lets through


@pytest.mark.parametrize("shape", [(2, 1, 3, 1), (1, 1, 2, 1)], ids=["rows", "tokens"])
def test_states_of_other_rows_or_tokens_than_announced_are_refused(bench: Bench, shape: tuple[int, ...]) -> None:
    bench.call.announce(request([1, 2, 3]))
    with pytest.raises(
        ForwardMismatchError,
        match=f"writes value of {shape[0]} rows and {shape[2]} tokens; announced were 1 rows and 3",
    ):
        bench.call.write(0, {"key": torch.zeros(1, 1, 3, 1), "value": torch.zeros(shape)})
    assert bench.call.state is CallState.ANNOUNCED
    assert bench.store.pool.layer_indices == []


def test_a_layer_writes_once_in_a_forward(bench: Bench) -> None:
    ticket = bench.call.announce(request([1, 2, 3]))
    bench.write(ticket, layers=(0,))
    with pytest.raises(ForwardMismatchError, match="layer 0 writes twice in one forward"):
        bench.call.write(0, {"key": torch.zeros(1, 1, 3, 1), "value": torch.zeros(1, 1, 3, 1)})


def test_a_layer_may_write_in_parts_but_each_of_them_once_and_all_in_every_forward(bench: Bench) -> None:
    """As sparse attention does, which stores its index keys before keys and values."""
    states, index = {"key": torch.ones(1, 1, 3, 1), "value": torch.ones(1, 1, 3, 1)}, torch.full((1, 1, 3, 2), 5.0)
    bench.call.announce(request([1, 2, 3]))
    assert bench.call.write(0, {"index": index}).keys() == {"index"}
    assert bench.call.write(0, states).keys() == {"key", "value"}
    with pytest.raises(ForwardMismatchError, match="layer 0 writes twice in one forward"):
        bench.call.write(0, {"index": index})
    bench.call.confirm()
    bench.call.announce(request([4, 5, 6]))
    read = bench.call.write(0, {"index": index})
    assert read["index"].shape == (1, 1, 6, 2)
    assert read["index"].eq(5.0).all()
    with pytest.raises(ForwardMismatchError, match=r"did not write layers \[0\]"):
        bench.call.confirm()


def test_a_first_forward_that_writes_nothing_is_refused(bench: Bench) -> None:
    bench.call.announce(request([1, 2, 3]))
    with pytest.raises(ForwardMismatchError, match="did not write any layer: gradient checkpointing"):
        bench.call.confirm()
    assert bench.call.state is CallState.IDLE


def test_a_forward_of_no_tokens_is_refused(bench: Bench) -> None:
    with pytest.raises(CacheArgumentError, match="a forward of no tokens"):
        bench.call.announce(request([], num_new=0))
    assert bench.call.state is CallState.IDLE


@pytest.mark.parametrize("sources", [[], [1], [-1], [0, 5]])
def test_rows_cannot_go_on_as_rows_that_there_are_not(bench: Bench, sources: list[int]) -> None:
    bench.forward([1, 2, 3])
    with pytest.raises(CacheArgumentError, match="the cache has rows 0 to 0"):
        bench.call.reorder(sources)
    assert bench.tokens() == [[1, 2, 3]]


def test_no_more_tokens_than_there_are_can_be_taken_back(bench: Bench) -> None:
    bench.forward([1, 2, 3])
    with pytest.raises(CacheArgumentError, match="cannot crop 4 tokens; give 0 to 3"):
        bench.call.crop(4)
    bench.call.crop(0)
    assert bench.tokens() == [[1, 2, 3]]


# What is computed


@pytest.mark.parametrize("make_reader", [ContiguousReader, GatherReader])
@pytest.mark.parametrize("num_tokens", [7, 8, 9])
def test_the_next_call_computes_what_no_call_before_it_did(make_reader: Any, num_tokens: int) -> None:
    bench = Bench(make_reader=make_reader)
    bench.forward(list(range(num_tokens)))
    begin(bench.call)
    same = bench.forward(list(range(num_tokens)))
    assert same.num_columns == 1  # the last token's logits
    begin(bench.call)
    longer = bench.forward([*range(num_tokens), 50, 51])
    assert (longer.start, longer.num_columns) == (num_tokens, 2)
    other = Bench(bench.store, make_reader)
    assert other.forward([*range(num_tokens), 60]).start == num_tokens // BLOCK_SIZE * BLOCK_SIZE


def test_equal_rows_run_once_until_they_part(bench: Bench) -> None:
    first = bench.forward([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 6])
    assert (first.sources, first.copies) == ((0, 2), (0, 0, 1))
    second = bench.forward([7], [8], [9])
    assert (second.sources, second.copies) == ((0, 1, 2), None)
    assert bench.tokens() == [[1, 2, 3, 4, 5, 7], [1, 2, 3, 4, 5, 8], [1, 2, 3, 4, 6, 9]]
    bench.store.allocator.check()


@pytest.mark.parametrize("make_reader", [ContiguousReader, GatherReader])
def test_beams_keep_their_own_tokens_through_reorders_drops_and_repeats(make_reader: Any) -> None:
    bench = Bench(make_reader=make_reader)
    begin(bench.call, limits(30, num_prompt=5, num_rows=3))
    bench.forward(*[[1, 2, 3, 4, 5]] * 3)
    naive = [[1, 2, 3, 4, 5]] * 3
    for step, sources in enumerate([[0, 0, 0], [2, 1, 0], [1, 1, 2], [0, 0, 2], [2, 2, 2], [0, 1, 2]]):
        bench.forward(*[[10 * step + i] for i in range(3)])
        naive = [[*tokens, 10 * step + i] for i, tokens in enumerate(naive)]
        bench.call.reorder(sources)
        naive = [naive[source] for source in sources]
        assert bench.tokens() == naive
        bench.store.allocator.check()
    bench.forward([90], [91], [92])


@pytest.mark.parametrize("make_reader", [ContiguousReader, GatherReader])
def test_rows_multiplied_chosen_and_ended_are_found_right_by_the_next_call(make_reader: Any) -> None:
    """The view of rows that were multiplied or chosen among is gone; nothing of it may be taken for kept."""
    bench = Bench(make_reader=make_reader)
    bench.forward([1, 2, 3, 4, 5], [6, 7, 8, 9, 10])
    bench.call.reorder([1])
    begin(bench.call)
    assert bench.forward([6, 7, 8, 9, 10, 11]).start == 5
    bench.call.reorder([0, 0, 0])
    bench.forward([1], [2], [3])


@pytest.mark.parametrize("make_reader", [ContiguousReader, GatherReader])
def test_after_a_forward_that_failed_half_way_the_next_call_reads_what_is_true(make_reader: Any) -> None:
    bench = Bench(make_reader=make_reader)
    begin(bench.call)
    bench.forward([1, 2, 3, 4, 5])
    bench.write(bench.call.announce(request([6])), layers=(0,))
    bench.call.end(failed=True)
    begin(bench.call)
    assert bench.forward([1, 2, 3, 4, 5, 7]).start > 0


def test_prompts_of_chunks_are_one_call(bench: Bench) -> None:
    begin(bench.call, limits(20, num_prompt=9))
    for chunk in ([0, 1, 2, 3], [4, 5, 6, 7], [8]):
        bench.forward(chunk, chunk)
    assert bench.tokens() == [list(range(9))] * 2
    assert bench.call.num_announced == 3


# What is committed, and when


def test_a_full_block_is_found_by_others_once_the_next_forward_is_announced(bench: Bench) -> None:
    tokens = [1, 2, 3, 4]
    ticket = bench.call.announce(request(tokens))
    assert bench.num_hit(tokens) == 0
    bench.write(ticket)
    assert bench.num_hit(tokens) == 0
    bench.call.confirm()
    assert bench.num_hit(tokens) == 0  # `crop` may still take it back
    bench.call.announce(request([5]))
    assert bench.num_hit(tokens) == 4


def test_a_draft_that_was_taken_back_is_never_found(bench: Bench) -> None:
    begin(bench.call, limits(20, num_prompt=2))
    bench.forward([1, 2])
    bench.forward([3, 4, 5, 6, 7, 8])
    bench.call.crop(4)
    bench.forward([9])
    bench.call.end()
    assert bench.num_hit([1, 2, 3, 4, 5, 6, 7, 8]) == 4
    assert bench.tokens() == [[1, 2, 3, 4, 9]]


@pytest.mark.parametrize("layers", [(), (0,), LAYERS], ids=["unwritten", "half written", "written, not confirmed"])
@pytest.mark.parametrize(
    "event",
    [
        lambda call: call.end(),
        lambda call: call.end(failed=True),
        lambda call: call.roll_back(),
        begin,
        lambda call: begin(call, keep_rows=True),
        lambda call: call.drop_rows(),
        lambda call: call.crop(1),
        lambda call: call.reorder([0, 0]),
        lambda call: call.announce(request([50])),
        lambda call: call.fork_rows(),
        lambda call: (call.leave_behind(), call.store.settle()),
    ],
    ids=["end", "fail", "roll back", "begin", "go on", "drop", "crop", "reorder", "announce", "fork", "collect"],
)
@pytest.mark.parametrize("first", [True, False], ids=["first forward", "later forward"])
def test_nothing_that_was_not_confirmed_is_ever_found(
    bench: Bench, layers: tuple[int, ...], event: Callable[[Call], Any], first: bool
) -> None:
    known = [] if first else [0, 1, 2, 3]
    bench.store.writing_layers = frozenset((layer, name) for layer in LAYERS for name in ("key", "value"))
    if known:
        bench.forward(known)
    new = list(range(len(known), len(known) + 12))
    bench.write(bench.call.announce(request(new)), layers=layers)
    event(bench.call)
    bench.call.roll_back()
    for call in (bench.call, Bench(bench.store).call):
        if call.rows.distinct:
            call.end()
    assert bench.num_hit([*known, *new]) <= len(known)
    bench.store.allocator.check()


def test_what_the_last_forward_of_a_failed_call_computed_is_not_committed(bench: Bench) -> None:
    """It may have been drafts."""
    begin(bench.call, limits(20, num_prompt=4))
    bench.forward([1, 2, 3, 4])
    bench.forward([5, 6, 7, 8])
    bench.call.end(failed=True)
    assert bench.num_hit([1, 2, 3, 4, 5, 6, 7, 8]) == 4


def test_a_forward_without_reuse_is_committed_by_no_event(bench: Bench) -> None:
    bench.forward([1, 2, 3, 4], bypass="a reason")
    bench.forward([5, 6, 7, 8])
    bench.call.end()
    begin(bench.call)
    assert bench.num_hit([1, 2, 3, 4]) == 0
    assert bench.forward([1, 2, 3, 4]).start == 0


# Blocks


def test_a_call_that_does_not_fit_is_refused_before_anything_changes() -> None:
    bench = Bench(BlockStore(BLOCK_SIZE, 6))
    bench.forward([1, 2, 3, 4, 5])
    begin(bench.call, limits(22))
    with pytest.raises(OutOfBlocksError, match=r"this call \(1 row of up to 22 tokens\) may need 6"):
        bench.call.announce(request([9] * 6))
    assert bench.call.state is CallState.IDLE
    assert bench.num_hit([1, 2, 3, 4]) == 4
    begin(bench.call, limits(20))
    bench.forward([9] * 6)
    bench.store.allocator.check()


def test_a_call_that_was_admitted_ends_whatever_others_ask_for() -> None:
    bench = Bench(BlockStore(BLOCK_SIZE, 9))
    begin(bench.call, limits(20, num_prompt=3))
    bench.forward([1, 2, 3])
    other = Bench(bench.store)
    with pytest.raises(OutOfBlocksError, match="4 are promised to running calls"):
        other.forward([7] * 17)
    other.forward([7] * 12)
    for token in range(17):
        bench.forward([token])
    bench.call.end()


@pytest.mark.parametrize("event", ["reorder", "crop"])
def test_a_call_is_still_promised_all_it_may_need_after_rows_gave_blocks_back(event: str) -> None:
    """Rows that go on as others, or drafts taken back, give blocks back that the call will need again."""
    bench = Bench(BlockStore(BLOCK_SIZE, 100))
    begin(bench.call, limits(20, num_prompt=3, num_rows=2))
    bench.forward([1, 2, 3], [1, 2, 3])
    bench.forward([4, 5, 6], [6, 5, 4])
    if event == "reorder":
        bench.call.reorder([0, 0])
    else:
        bench.call.crop(3)
    needed = num_blocks_to_take(
        bench.call.rows, num_columns=bench.call.num_columns, max_columns=20, block_size=BLOCK_SIZE
    )
    assert bench.store.num_reserved_blocks(Bench(bench.store).call) >= needed


def test_a_promise_ends_with_its_call() -> None:
    bench = Bench()
    other = Bench(bench.store).call
    begin(bench.call, limits(40))
    bench.forward([1, 2, 3, 4])
    assert bench.store.num_reserved_blocks(other) > 0
    bench.call.end()
    assert bench.store.num_reserved_blocks(other) == 0


def test_blocks_of_ended_rows_are_counted_and_given_back_by_the_next_call(bench: Bench) -> None:
    bench.forward(list(range(9)))
    assert bench.call.num_previous_blocks() == 0  # it may go on
    bench.call.end()
    assert bench.call.num_previous_blocks() == 3
    begin(bench.call)
    assert bench.call.num_previous_blocks() == 3
    bench.forward([50, 51])
    assert bench.store.allocator.num_blocks_in_use == 1
    assert bench.store.allocator.num_cached_blocks == 2


# Threads


def in_thread(function: Callable[[], Any]) -> Any:
    """Run in another thread, which ends; its result or its error."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(function())
        except Exception as error:  # noqa: BLE001  # handed on to the test
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return result[0]


@pytest.mark.parametrize(
    "event",
    [
        lambda call: call.announce(request([1])),
        begin,
        lambda call: call.drop_rows(),
    ],
    ids=["announce", "begin", "drop"],
)
def test_a_call_with_a_forward_in_another_thread_is_busy_until_that_ends(
    bench: Bench, event: Callable[[Call], Any]
) -> None:
    ticket = bench.call.announce(request([1, 2, 3]))
    error = in_thread(lambda: event(bench.call))
    assert isinstance(error, CacheBusyError)
    assert "PagedPrefixCache(cache.store)" in str(error)
    bench.write(ticket)  # the forward is not disturbed
    bench.call.confirm()
    assert not isinstance(in_thread(lambda: event(bench.call)), Exception)


def test_a_forward_whose_thread_died_is_taken_back_by_whoever_comes_next(bench: Bench) -> None:
    in_thread(lambda: bench.call.announce(request([1, 2, 3])))
    assert bench.call.ticket is not None
    bench.forward([7, 8])
    assert bench.tokens() == [[7, 8]]


def test_a_call_is_running_inside_generate_and_in_a_forward_of_another_living_thread(bench: Bench) -> None:
    assert not bench.call.is_running
    begin(bench.call)
    assert bench.call.is_running
    bench.call.end()
    assert not bench.call.is_running
    bench.call.announce(request([1]))
    assert not bench.call.is_running  # this thread's own
    assert in_thread(lambda: bench.call.is_running)
