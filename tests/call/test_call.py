"""One running call: every event in every state, and that nothing which was not confirmed is ever found again.

idle -> scheduled -> confirmed -> scheduled ... -> ended -> idle
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch

from hf_paged_cache import CacheArgumentError, CacheBusyError, ForwardMismatchError, OutOfBlocksError
from hf_paged_cache.call.admission import UNLIMITED, num_blocks_to_take
from hf_paged_cache.call.call import Call, CallState
from hf_paged_cache.call.running import Bracket
from hf_paged_cache.call.scheduled_forward import RowInput
from hf_paged_cache.kv.block_pool import BlockPool
from hf_paged_cache.store.block_store import BlockStore

from .bench import (
    BLOCK_SIZE,
    LAYERS,
    OTHER_ROOT,
    Bench,
    in_forward,
    limits,
    new_row,
    request,
    schedule,
    value_of,
)

BOTH_VIEWS = pytest.mark.parametrize("keeps_copies", [True, False], ids=["paged", "gather"])
BRACKET = Bracket()


def begin(call: Call, *, keep_rows: bool = False) -> None:
    call.begin(ref(BRACKET), limits(), keep_rows=keep_rows)


@pytest.fixture
def bench() -> Bench:
    return Bench()


# Every event in every state

SITUATIONS = {
    "idle": CallState.IDLE,
    "prepared": CallState.SCHEDULED,
    "scheduled": CallState.SCHEDULED,
    "half written": CallState.SCHEDULED,
    "step": CallState.SCHEDULED,
    "half written step": CallState.SCHEDULED,
    "confirmed": CallState.CONFIRMED,
    "ended": CallState.ENDED,
}
IN_EVERY_STATE = pytest.mark.parametrize("where", SITUATIONS)
SIX = [[1, 2, 3, 4, 5, 6]]


def bring_to(bench: Bench, where: str) -> CallState:
    """Six tokens, confirmed where there are rows, and a second forward open where there is one; returns the state."""
    if where != "idle":
        bench.begin()
        bench.forward(*SIX)
    if where == "ended":
        bench.end()
    elif where == "prepared":
        bench.call.prepare(request([7, 8]))
    elif where in ("scheduled", "half written"):
        bench.schedule([7, 8])
    elif where in ("step", "half written step"):
        bench.call.schedule_step([7])
    if where.startswith("half written"):
        bench.write(bench.open_forward, layers=(0,))
    assert bench.call.state is SITUATIONS[where]
    assert (bench.call.forward is not None) == (where in MISSING)
    return bench.call.state


def kept(where: str) -> list[list[int]]:
    """The tokens that are left once an open forward is taken back."""
    return [] if where == "idle" else SIX


MISSING = {  # the layers that have yet to write
    "scheduled": r"layers \[0, 1\]",
    "half written": r"layers \[1\]",
    "step": r"layers \[0, 1\]",
    "half written step": r"layers \[1\]",
}


def taken_back(state: CallState) -> CallState:
    return CallState.CONFIRMED if state is CallState.SCHEDULED else state


@IN_EVERY_STATE
def test_a_forward_can_be_scheduled_in_every_state_and_takes_an_open_one_back(bench: Bench, where: str) -> None:
    bring_to(bench, where)
    forward = bench.schedule([9, 9, 9])
    assert bench.call.state is CallState.SCHEDULED
    assert forward.start == (0 if where == "idle" else 6)
    assert bench.tokens() == ([[9, 9, 9]] if where == "idle" else [[*SIX[0], 9, 9, 9]])
    bench.write(forward)
    bench.call.confirm()
    assert bench.call.state is CallState.CONFIRMED


@IN_EVERY_STATE
def test_what_was_not_prepared_cannot_be_scheduled(bench: Bench, where: str) -> None:
    """Rows that were prepared may be gone by then: their prefix is computed in between, without the lock."""
    state = bring_to(bench, where)
    bench.call.roll_back()
    with pytest.raises(CacheBusyError, match="the cache was reset while what its rows share was computed"):
        bench.call.schedule(request([7, 8]))
    assert bench.call.state is taken_back(state)
    assert bench.tokens() == kept(where)


@IN_EVERY_STATE
def test_a_layer_writes_in_a_scheduled_forward_and_nowhere_else(bench: Bench, where: str) -> None:
    state = bring_to(bench, where)
    num_columns = 1 if "step" in where else 2
    states = {name: torch.zeros(1, 1, num_columns, 1) for name in ("key", "value")}
    if where in MISSING:
        assert bench.call.write(1, states)["key"].shape == (1, 1, 6 + num_columns, 1)
    else:
        with pytest.raises(ForwardMismatchError, match=f"layer 1 writes to a cache whose call {state.value}"):
            bench.call.write(1, states)
    assert bench.call.state is state


@IN_EVERY_STATE
def test_only_a_forward_that_all_layers_wrote_is_confirmed(bench: Bench, where: str) -> None:
    state = bring_to(bench, where)
    message = f"did not write {MISSING[where]}" if where in MISSING else f"nothing to confirm: the call {state.value}"
    with pytest.raises(ForwardMismatchError, match=message):
        bench.call.confirm()
    assert bench.call.state is (CallState.CONFIRMED if where in MISSING else state)
    bench.call.roll_back()
    assert bench.tokens() == kept(where)


@IN_EVERY_STATE
@pytest.mark.parametrize("times", [1, 2])
def test_rolling_back_takes_an_open_forward_back_and_else_does_nothing(bench: Bench, where: str, times: int) -> None:
    state = bring_to(bench, where)
    for _ in range(times):
        bench.call.roll_back()
    assert bench.call.forward is None
    assert bench.call.state is taken_back(state)
    assert bench.tokens() == kept(where)
    bench.store.allocator.check()


@IN_EVERY_STATE
def test_rows_can_be_reordered_in_every_state(bench: Bench, where: str) -> None:
    bring_to(bench, where)
    bench.call.reorder([0, 0])
    assert bench.call.forward is None
    assert bench.tokens() == ([] if where == "idle" else SIX * 2)


@IN_EVERY_STATE
def test_tokens_can_be_taken_back_in_every_state(bench: Bench, where: str) -> None:
    bring_to(bench, where)
    bench.call.crop(2)
    assert bench.tokens() == ([] if where == "idle" else [[1, 2, 3, 4]])
    assert bench.call.num_columns == (0 if where == "idle" else 4)


@IN_EVERY_STATE
def test_a_call_can_be_ended_in_every_state_and_keeps_its_confirmed_rows(bench: Bench, where: str) -> None:
    bring_to(bench, where)
    bench.end()
    assert bench.call.state is (CallState.IDLE if where == "idle" else CallState.ENDED)
    assert bench.tokens() == kept(where)
    assert bench.call.limits is UNLIMITED


@IN_EVERY_STATE
@pytest.mark.parametrize("keep_rows", [True, False])
def test_a_call_can_begin_in_every_state(bench: Bench, where: str, keep_rows: bool) -> None:
    bring_to(bench, where)
    bench.begin(keep_rows=keep_rows)
    goes_on = keep_rows and where != "idle"
    assert bench.call.num_columns == (6 if goes_on else 0)
    assert len(bench.call.rows) == (1 if goes_on else 0)
    assert bench.call.forward is None


@IN_EVERY_STATE
def test_dropping_the_rows_gives_every_block_back_in_every_state(bench: Bench, where: str) -> None:
    bring_to(bench, where)
    bench.call.drop_rows()
    assert bench.call.state is CallState.IDLE
    assert bench.store.allocator.num_blocks_in_use == 0
    assert bench.call.view.num_bytes == 0
    assert bench.num_hit([1, 2, 3, 4, 5, 6]) == (0 if where == "idle" else 4)
    bench.store.allocator.check()


@IN_EVERY_STATE
def test_rows_can_be_forked_and_read_in_every_state(bench: Bench, where: str) -> None:
    bring_to(bench, where)
    rows = bench.call.fork_rows()
    other = Bench(bench.store)
    other.call.take_over(rows)
    assert other.tokens() == kept(where)
    read = other.call.read_layer(0)
    if where == "idle":
        assert (read, other.call.state) == ({}, CallState.IDLE)
    else:
        assert read["key"].flatten().tolist() == [value_of(SIX[0][: i + 1], 0) for i in range(6)]
        other.forward([7, 8])
        bench.forward([9])
        assert (other.tokens(), bench.tokens()) == ([[*SIX[0], 7, 8]], [[*SIX[0], 9]])


@IN_EVERY_STATE
def test_a_call_that_is_collected_in_any_state_leaves_its_blocks_to_the_store(where: str) -> None:
    bench = Bench()
    bring_to(bench, where)
    store = bench.store
    bench.call.leave_behind()
    del bench
    gc.collect()
    store.settle()
    assert store.allocator.num_blocks_in_use == 0
    store.allocator.check()


# A decode step


def state_of(bench: Bench) -> list[Any]:
    """All that a forward changes of the rows, blocks and reservations."""
    rows, call, store = bench.call.rows, bench.call, bench.store
    return [
        [(row.layout(), row.num_confirmed, row.commit_end) for row in rows.distinct],
        (rows.alias, rows.num_columns, call.num_columns, call.num_scheduled, call.state),
        (store.num_reserved_blocks(None), store.allocator.num_blocks_in_use, store.allocator.num_cached_blocks),
        call.counters.of_call(0),
    ]


@BOTH_VIEWS
@pytest.mark.parametrize("end", [(), (7,)])
def test_a_step_is_what_prepare_and_schedule_make_of_it(end: tuple[int, ...], *, keeps_copies: bool) -> None:
    """In two benches side by side, from one step to the next, with beams that move and a row that ends."""
    benches = [Bench(keeps_copies=keeps_copies) for _ in range(2)]
    for bench in benches:
        bench.begin(limits(30, num_prompt=5, num_rows=2, end=end))
        bench.forward([1, 2, 3, 4, 5], [1, 2, 3, 4, 5])
        bench.forward([6], [8])
    for number in range(10):
        tokens = [5 + number % 3, 2 + number]
        assert benches[0].call.may_step
        benches[0].call.schedule_step(tokens)
        one, other = benches[0].open_forward, benches[1].schedule(*([token] for token in tokens))
        assert one._replace(slot_mapping=other.slot_mapping, is_step=False) == other
        assert (one.slot_mapping.slots, one.slot_mapping.sources) == (
            other.slot_mapping.slots,
            other.slot_mapping.sources,
        )
        assert state_of(benches[0]) == state_of(benches[1])
        for bench in benches:
            if number == 4:
                bench.call.roll_back()
                continue
            bench.write(bench.open_forward)
            bench.call.confirm()
            bench.call.reorder([1, 1] if number == 6 else [1, 0])
        assert state_of(benches[0]) == state_of(benches[1])
    for bench in benches:
        bench.end()
        bench.store.allocator.check()
    assert state_of(benches[0]) == state_of(benches[1])


def test_only_what_generate_computes_behind_its_prompt_may_be_a_step(bench: Bench) -> None:
    bench.forward([1, 2, 3])
    assert not bench.call.may_step  # no `generate` runs
    bench.begin(limits(20, num_prompt=8), keep_rows=True)
    assert not bench.call.may_step  # it has run nothing
    bench.forward([4, 5, 6])
    assert not bench.call.may_step  # a later chunk may be known
    bench.forward([7, 8])
    assert bench.call.may_step
    bench.step(9)
    assert bench.call.may_step
    bench.end()
    assert not bench.call.may_step
    bench.begin()
    bench.forward([1, 2, 3, 4])
    assert not bench.call.may_step  # who knows how far it goes


def test_a_call_whose_bracket_is_gone_takes_no_step(bench: Bench) -> None:
    bench.begin(limits(20))
    bench.forward([1, 2, 3, 4])
    assert bench.call.may_step
    bench.bracket = Bracket()
    assert not bench.call.may_step


def test_aliases_take_no_step_until_they_have_parted(bench: Bench) -> None:
    bench.begin(limits(20, num_rows=2))
    bench.forward([1, 2, 3, 4], [1, 2, 3, 4])
    assert not bench.call.may_step
    bench.forward([5], [6])
    assert bench.call.may_step


@pytest.mark.parametrize(
    ("new", "options"),
    [
        (new_row([5], root=OTHER_ROOT), {}),
        (new_row([5], pad=1), {"num_new": 1}),
        (new_row([5]), {"bypass": "a reason"}),
    ],
    ids=["root", "padding", "bypass"],
)
def test_rows_that_run_otherwise_than_they_began_take_no_step(
    bench: Bench, new: RowInput, options: dict[str, Any]
) -> None:
    """A step looks at neither, so it would commit what is computed under other conditions than the row's root says."""
    bench.begin(limits(20, num_rows=2))
    bench.forward([1, 2, 3, 4], [5, 6, 7, 8])
    assert bench.call.may_step
    bench.forward([1], new, **options)
    assert not bench.call.may_step
    bench.forward([1], new_row([5]))
    assert bench.call.may_step  # as it began again; what was computed in between is never committed
    assert bench.call.rows.distinct[1].commit_end == 4


# What a scheduled forward lets through


@pytest.mark.parametrize("shape", [(2, 1, 3, 1), (1, 1, 2, 1)], ids=["rows", "tokens"])
def test_states_of_other_rows_or_tokens_than_scheduled_are_refused(bench: Bench, shape: tuple[int, ...]) -> None:
    bench.schedule([1, 2, 3])
    with pytest.raises(
        ForwardMismatchError,
        match=f"writes value of {shape[0]} rows and {shape[2]} tokens; scheduled are 1 rows and 3",
    ):
        bench.call.write(0, {"key": torch.zeros(1, 1, 3, 1), "value": torch.zeros(shape)})
    assert bench.call.state is CallState.SCHEDULED
    assert bench.store.pool.layer_indices == []


def test_a_layer_writes_once_in_a_forward(bench: Bench) -> None:
    forward = bench.schedule([1, 2, 3])
    bench.write(forward, layers=(0,))
    with pytest.raises(ForwardMismatchError, match="layer 0 writes twice in one forward"):
        bench.call.write(0, {"key": torch.zeros(1, 1, 3, 1), "value": torch.zeros(1, 1, 3, 1)})


def test_a_layer_may_write_in_parts_but_each_of_them_once_and_all_in_every_forward(bench: Bench) -> None:
    """As sparse attention does, which stores its index keys before keys and values."""
    states, index = {"key": torch.ones(1, 1, 3, 1), "value": torch.ones(1, 1, 3, 1)}, torch.full((1, 1, 3, 2), 5.0)
    bench.schedule([1, 2, 3])
    assert bench.call.write(0, {"index": index}).keys() == {"index"}
    assert bench.call.write(0, states).keys() == {"key", "value"}
    with pytest.raises(ForwardMismatchError, match="layer 0 writes twice in one forward"):
        bench.call.write(0, {"index": index})
    bench.call.confirm()
    bench.schedule([4, 5, 6])
    read = bench.call.write(0, {"index": index})
    assert read["index"].shape == (1, 1, 6, 2)
    assert read["index"].eq(5.0).all()
    with pytest.raises(ForwardMismatchError, match=r"did not write layers \[0\]"):
        bench.call.confirm()


def test_a_first_forward_that_writes_nothing_is_refused(bench: Bench) -> None:
    bench.schedule([1, 2, 3])
    with pytest.raises(ForwardMismatchError, match="did not write any layer: gradient checkpointing"):
        bench.call.confirm()
    assert bench.call.state is CallState.IDLE


def test_a_forward_of_no_tokens_is_refused(bench: Bench) -> None:
    with pytest.raises(CacheArgumentError, match="a forward of no tokens"):
        bench.schedule([], num_new=0)
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


def test_equal_rows_run_once_until_they_part(bench: Bench) -> None:
    first = bench.forward([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 6])
    assert (first.sources, first.copies) == ((0, 2), (0, 0, 1))
    second = bench.forward([7], [8], [9])
    assert (second.sources, second.copies) == ((0, 1, 2), None)
    assert bench.tokens() == [[1, 2, 3, 4, 5, 7], [1, 2, 3, 4, 5, 8], [1, 2, 3, 4, 6, 9]]
    bench.store.allocator.check()


@BOTH_VIEWS
def test_beams_keep_their_own_tokens_through_reorders_drops_and_repeats(*, keeps_copies: bool) -> None:
    bench = Bench(keeps_copies=keeps_copies)
    bench.begin(limits(30, num_prompt=5, num_rows=3))
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


@BOTH_VIEWS
def test_after_a_forward_that_failed_half_way_the_next_call_reads_what_is_true(*, keeps_copies: bool) -> None:
    bench = Bench(keeps_copies=keeps_copies)
    bench.begin()
    bench.forward([1, 2, 3, 4, 5])
    bench.write(bench.schedule([6]), layers=(0,))
    bench.end(failed=True)
    bench.begin()
    assert bench.forward([1, 2, 3, 4, 5, 7]).start > 0


# What is committed, and when


def test_a_full_block_is_found_by_others_once_the_next_forward_is_scheduled(bench: Bench) -> None:
    tokens = [1, 2, 3, 4]
    forward = bench.schedule(tokens)
    assert bench.num_hit(tokens) == 0
    bench.write(forward)
    assert bench.num_hit(tokens) == 0
    bench.call.confirm()
    assert bench.num_hit(tokens) == 0  # `crop` may still take it back
    bench.schedule([5])
    assert bench.num_hit(tokens) == 4


def test_a_draft_that_was_taken_back_is_never_found(bench: Bench) -> None:
    bench.begin(limits(20, num_prompt=2))
    bench.forward([1, 2])
    bench.forward([3, 4, 5, 6, 7, 8])
    bench.call.crop(4)
    bench.forward([9])
    bench.end()
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
        lambda call: schedule(call, [50]),
        lambda call: call.fork_rows(),
        lambda call: (call.leave_behind(), call.store.settle()),
    ],
    ids=["end", "fail", "roll back", "begin", "resume", "drop", "crop", "reorder", "schedule", "fork", "collect"],
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
    bench.write(bench.schedule(new), layers=layers)
    event(bench.call)
    bench.call.roll_back()
    for call in (bench.call, Bench(bench.store).call):
        if call.rows.distinct:
            call.end()
    assert bench.num_hit([*known, *new]) <= len(known)
    bench.store.allocator.check()


def test_what_the_last_forward_of_a_failed_call_computed_is_not_committed(bench: Bench) -> None:
    """It may have been drafts."""
    bench.begin(limits(20, num_prompt=4))
    bench.forward([1, 2, 3, 4])
    bench.forward([5, 6, 7, 8])
    bench.end(failed=True)
    assert bench.num_hit([1, 2, 3, 4, 5, 6, 7, 8]) == 4


def test_a_forward_without_reuse_is_committed_by_no_event(bench: Bench) -> None:
    bench.forward([1, 2, 3, 4], bypass="a reason")
    bench.forward([5, 6, 7, 8])
    bench.end()
    bench.begin()
    assert bench.num_hit([1, 2, 3, 4]) == 0
    assert bench.forward([1, 2, 3, 4]).start == 0


# Blocks


def test_a_call_that_does_not_fit_is_refused_before_anything_changes() -> None:
    bench = Bench(BlockStore(BLOCK_SIZE, 6))
    bench.forward([1, 2, 3, 4, 5])
    bench.begin(limits(22))
    with pytest.raises(OutOfBlocksError, match=r"this call \(1 row of up to 22 tokens\) may need 6"):
        bench.schedule([9] * 6)
    assert bench.call.state is CallState.IDLE
    assert bench.num_hit([1, 2, 3, 4]) == 4
    bench.begin(limits(20))
    bench.forward([9] * 6)
    bench.store.allocator.check()


def test_a_call_that_was_admitted_ends_whatever_others_ask_for() -> None:
    bench = Bench(BlockStore(BLOCK_SIZE, 9))
    bench.begin(limits(20, num_prompt=3))
    bench.forward([1, 2, 3])
    other = Bench(bench.store)
    with pytest.raises(OutOfBlocksError, match="4 are reserved for running calls"):
        other.forward([7] * 17)
    other.forward([7] * 12)
    for token in range(17):
        bench.forward([token])
    bench.end()


@pytest.mark.parametrize("event", ["reorder", "crop"])
def test_a_call_has_still_reserved_all_it_may_need_after_rows_gave_blocks_back(event: str) -> None:
    """Rows that continue as others, or drafts taken back, give blocks back that the call will need again."""
    bench = Bench(BlockStore(BLOCK_SIZE, 100))
    bench.begin(limits(20, num_prompt=3, num_rows=2))
    bench.forward([1, 2, 3], [1, 2, 3])
    bench.forward([4, 5, 6], [6, 5, 4])
    if event == "reorder":
        bench.call.reorder([0, 0])
    else:
        bench.call.crop(3)
    needed = num_blocks_to_take(bench.call.rows, bench.call.num_columns, 20, BLOCK_SIZE)
    assert bench.store.num_reserved_blocks(Bench(bench.store).call) >= needed


def test_a_reservation_ends_with_its_call() -> None:
    bench = Bench()
    other = Bench(bench.store).call
    bench.begin(limits(40))
    bench.forward([1, 2, 3, 4])
    assert bench.store.num_reserved_blocks(other) > 0
    bench.end()
    assert bench.store.num_reserved_blocks(other) == 0


def test_blocks_of_ended_rows_are_counted_and_given_back_by_the_next_call(bench: Bench) -> None:
    bench.forward(list(range(9)))
    assert bench.call.num_previous_blocks() == 0  # it may resume
    bench.end()
    assert bench.call.num_previous_blocks() == 3
    bench.begin()
    assert bench.call.num_previous_blocks() == 3
    bench.forward([50, 51])
    assert bench.store.allocator.num_blocks_in_use == 1
    assert bench.store.allocator.num_cached_blocks == 2


def test_a_call_that_fails_before_it_ran_anything_leaves_the_rows_before_it_as_they_were(bench: Bench) -> None:
    bench.forward([1, 2, 3, 4, 5, 6])
    bench.end()
    bench.begin()
    bench.end(failed=True)
    assert (bench.call.state, bench.tokens()) == (CallState.ENDED, [[1, 2, 3, 4, 5, 6]])
    bench.forward([7])
    assert bench.tokens() == [[1, 2, 3, 4, 5, 6, 7]]


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
        lambda call: schedule(call, [1]),
        begin,
        lambda call: call.drop_rows(),
    ],
    ids=["schedule", "begin", "drop"],
)
def test_a_call_with_a_forward_in_another_thread_is_busy_until_that_ends(
    bench: Bench, event: Callable[[Call], Any]
) -> None:
    forward = bench.schedule([1, 2, 3])
    error = in_forward(lambda: in_thread(lambda: event(bench.call)))
    assert isinstance(error, CacheBusyError)
    assert "PagedPrefixCache(cache.store)" in str(error)
    bench.write(forward)  # the forward is not disturbed
    bench.call.confirm()
    assert not isinstance(in_thread(lambda: event(bench.call)), Exception)


def test_a_forward_whose_thread_died_is_taken_back_by_whoever_comes_next(bench: Bench) -> None:
    in_thread(lambda: bench.schedule([1, 2, 3]))
    assert bench.call.forward is not None
    bench.forward([7, 8])
    assert bench.tokens() == [[7, 8]]


def test_a_call_is_running_inside_generate_and_while_a_forward_is_on_a_stack(bench: Bench) -> None:
    assert not bench.call.is_running
    bench.begin()
    assert bench.call.is_running
    bench.end()
    assert not bench.call.is_running
    bench.schedule([1])
    assert not bench.call.is_running  # it died
    assert in_forward(lambda: bench.call.is_running)
    assert in_forward(lambda: in_thread(lambda: bench.call.is_running))


# Admitted ahead of its schedule, while other processes are asked.


@pytest.mark.parametrize("in_generate", [True, False])
def test_what_was_admitted_is_there_when_it_is_scheduled(in_generate: bool) -> None:
    store = BlockStore(BLOCK_SIZE, 6)
    bench, other = Bench(store), Bench(store)
    if in_generate:
        bench.begin(limits(12, num_prompt=9))
    given = request([*range(9)])
    bench.call.prepare(given)
    bench.call.admit(given)
    with pytest.raises(OutOfBlocksError):
        other.forward([*range(20, 32)])
    bench.write(bench.call.schedule(given))
    bench.call.confirm()
    assert store.num_reserved_blocks(None) == 0  # nothing is left of it behind a plain forward, nor taken twice
    assert other.forward([*range(20, 27)]).start == 0


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_was_admitted_and_not_run_is_given_back(goes_on: bool) -> None:
    store = BlockStore(BLOCK_SIZE, 6)
    bench = Bench(store)
    if goes_on:
        bench.forward([1, 2, 3])
    given = request([*range(9)])
    bench.call.prepare(given)
    bench.call.admit(given)
    assert store.num_reserved_blocks(None) > 1
    bench.call.roll_back()
    assert store.num_reserved_blocks(None) == 0
    assert bench.tokens() == ([[1, 2, 3]] if goes_on else [])


def test_a_forward_starts_no_later_than_it_may_and_writes_what_it_does_not_know(bench: Bench) -> None:
    bench.begin()
    bench.forward([*range(10)])
    bench.begin()
    given = request([*range(12)])
    bench.call.prepare(given)
    forward = bench.call.schedule(given, latest_start=5)
    assert (forward.start, forward.stop) == (5, 12)
    bench.write(forward)
    bench.call.confirm()
    assert bench.call.counters.rows[0].stopped.endswith(
        "cached from 5 on, but computed again: another rank's hit is shorter"
    )
    bench.call.prepare(more := request([7, 8]))
    assert bench.call.schedule(more, latest_start=0).start == 12


# Out of memory


class NoMemory:
    """Wraps a function of a pool that has no memory any more, until `is_there`."""

    def __init__(self, patch: pytest.MonkeyPatch, pool: BlockPool, name: str) -> None:
        self.is_there, self._function = False, getattr(pool, name)
        patch.setattr(pool, name, self)

    def __call__(self, *args: Any) -> Any:
        if not self.is_there:
            raise torch.OutOfMemoryError("on purpose")
        return self._function(*args)


def run_in_generate(bench: Bench, tokens: list[int]) -> None:
    bench.begin(limits(len(tokens) + 4, len(tokens)))
    bench.forward(tokens)


def run_plainly(bench: Bench, tokens: list[int]) -> None:
    bench.forward(tokens)


def admit_among_ranks(bench: Bench, tokens: list[int]) -> None:
    bench.call.prepare(given := request(tokens))
    bench.call.admit(given)


@pytest.mark.parametrize("ask", [run_in_generate, run_plainly, admit_among_ranks])
def test_what_would_be_refused_where_memory_ran_out_lets_the_pool_grow_once_more(ask: Any) -> None:
    bench = Bench(BlockStore(BLOCK_SIZE, 1000))
    store = bench.store
    ask(bench, [*range(20)])
    bench.end()
    store.stop_growing()
    ask(bench, [*range(100, 140)])  # fits into what there is
    bench.end()
    assert (store.ran_out_of_memory, store.max_num_blocks) == (True, 64)
    ask(bench, [*range(1000, 1000 + 70 * BLOCK_SIZE)])
    assert (store.ran_out_of_memory, store.max_num_blocks) == (False, 1000)


def test_a_call_whose_memory_runs_out_as_it_begins_must_have_all_that_it_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it takes now is there, once cached blocks are evicted; what it takes later would not be."""
    # so that it holds no more at first than it manages
    bench = Bench(BlockStore(BLOCK_SIZE, 1000, lambda: torch.device("meta")))
    bench.forward([*range(50 * BLOCK_SIZE)])
    bench.call.drop_rows()
    assert bench.store.allocator.num_free_blocks == 13
    memory = NoMemory(monkeypatch, bench.store.pool.all, "ensure_capacity")
    prompt = [*range(1000, 1000 + 20 * BLOCK_SIZE)]
    for num_new, fits in ((80, False), (8, True)):
        bench.begin(limits(len(prompt) + num_new * BLOCK_SIZE, len(prompt)))
        if fits:
            bench.forward(prompt)
        else:
            with pytest.raises(OutOfBlocksError, match=r"this call .* of the 64 that there was memory for"):
                bench.schedule(prompt)
            bench.store.grow_anew()
        assert bench.store.ran_out_of_memory is fits
        bench.end()
    memory.is_there = True
    bench.store.allocator.check()


def test_where_not_one_forward_has_memory_all_is_given_back_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    bench.forward([1, 2, 3, 4, 5])
    bench.call.drop_rows()
    memory = NoMemory(monkeypatch, bench.store.pool, "write")
    forward = bench.schedule([1, 2, 3, 4, 6])
    with pytest.raises(OutOfBlocksError, match="out of memory in layer 0 of a forward of 1 rows up to column 5"):
        bench.write(forward)
    assert bench.store.ran_out_of_memory
    assert bench.store.pool.layer_indices == [0, 1]  # its rows hold blocks
    bench.call.roll_back()
    memory.is_there = True
    bench.call.prepare(request([1, 2, 3, 4, 6]))
    assert bench.store.pool.layer_indices == []
    assert not bench.store.ran_out_of_memory
    bench.call.roll_back()
    assert bench.forward([1, 2, 3, 4, 6]).start == 0
    bench.call.drop_rows()
    assert bench.forward([1, 2, 3, 4, 7]).start == 4  # once
