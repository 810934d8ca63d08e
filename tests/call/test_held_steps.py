"""Held steps of a call without a model: what the view alone has, what is not read yet, and when either ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_paged_cache import CacheArgumentError, ForwardMismatchError, OutOfBlocksError, PoolArgumentError
from hf_paged_cache.attention.group_columns import Forward
from hf_paged_cache.call import held_steps
from hf_paged_cache.call.call import CallState
from hf_paged_cache.call.held_steps import UNREAD_TOKEN, PassedStep
from hf_paged_cache.call.rows import Row
from hf_paged_cache.store.block_store import BlockStore

from .bench import BLOCK_SIZE, LAYERS, Bench, limits, make_rows

PROMPT = range(1, 10)


def begun(
    *rows: Any,
    keeps_copies: bool = True,
    pads: list[int] | None = None,
    end: tuple[int, ...] = (),
    store: BlockStore | None = None,
) -> Bench:
    """A call inside `generate`, after the forward of its prompts."""
    bench = Bench(BlockStore(BLOCK_SIZE, 400) if store is None else store, keeps_copies=keeps_copies)
    bench.begin(limits(300, num_prompt=len(PROMPT), num_rows=len(rows) or 1, end=end))
    bench.forward(*(rows or (PROMPT,)), pads=pads, num_new=len(PROMPT))
    return bench


def passed(
    bench: Bench, *token_ids: int, shown: list[int] | None = None, positions: list[int] | None = None
) -> PassedStep:
    """The next step, unread; without `shown` a plain one without a mask, and so without `positions`."""
    return PassedStep(
        bench.call.num_columns,
        torch.tensor(token_ids)[:, None],
        None if shown is None else torch.tensor(shown),
        None if positions is None else torch.tensor(positions)[:, None],
    )


def step(bench: Bench, *token_ids: int, **given: Any) -> None:
    """A decode step whose token ids nobody reads now. What is written does not matter."""
    bench.call.schedule_step(passed(bench, *token_ids, **given))
    with torch.no_grad():
        for layer_idx in LAYERS:
            new = torch.ones(len(token_ids), 1, 1, 1)
            bench.call.write(layer_idx, {"key": new, "value": new})
    bench.call.confirm()


def in_pool(bench: Bench, layer_idx: int = 0) -> list[list[float]]:
    """The key of each token of each row, read from the pool's own tensor."""
    held = bench.store.pool.layer(layer_idx)["key"]
    return [
        [float(held[slot // BLOCK_SIZE, 0, slot % BLOCK_SIZE, 0]) for slot in row.table.slots(0, row.table.num_tokens)]
        for row in bench.call.rows.distinct
    ]


def make_view_anew(bench: Bench) -> None:
    """Whatever a forward reads from here on comes from the pool; `Bench.write` compares it."""
    bench.call.crop(1)
    bench.call.view.drop()


# In the view alone.


@pytest.mark.parametrize("num_steps", [1, 3, 4, 5, 140], ids=lambda number: f"{number} steps")
@pytest.mark.parametrize("rows", [(PROMPT,), (PROMPT, range(11, 17), range(20, 25))], ids=["1 row", "3 rows"])
def test_the_pool_gets_what_steps_have_written(rows: tuple[Any, ...], num_steps: int) -> None:
    """140 steps make the view grow."""
    bench = begun(*rows, pads=[len(PROMPT) - len(row) for row in rows])
    for number in range(num_steps):
        bench.step(*[100 * row + number for row in range(len(rows))])
    make_view_anew(bench)
    bench.step(*range(7, 7 + len(rows)))
    bench.end()
    assert bench.call.rows.distinct[0].held_from is None


def test_a_step_writes_nothing_to_the_pool_before_its_block_is_full() -> None:
    bench = begun()  # 9 tokens: the third block gets three more
    for number in range(3):
        bench.step(20 + number)
        assert in_pool(bench)[0][9:] == [0.0] * (number + 1)
    assert bench.call.rows.distinct[0].held_from == 9
    bench.step(30)
    assert 0.0 not in in_pool(bench)[0][:12]
    assert in_pool(bench)[0][12:] == [0.0]
    assert bench.num_hit([*PROMPT, 20, 21, 22]) == 12
    bench.end()
    assert 0.0 not in in_pool(bench)[0]


def test_a_gather_finds_each_step_in_the_pool() -> None:
    bench = begun(keeps_copies=False)
    bench.step(20)
    assert 0.0 not in in_pool(bench)[0]
    assert bench.call.rows.distinct[0].held_from is None


@pytest.mark.parametrize("last", [(1, 0), (0, 0), (1, 1)], ids=str)
def test_steps_of_rows_that_change_places_stay_in_the_view_until_a_block_is_full(last: tuple[int, int]) -> None:
    bench = begun(PROMPT, range(11, 20))  # 9 tokens each, in blocks of 4
    for number, sources in enumerate([(1, 0), last]):
        bench.step(20 + number, 30 + number)
        bench.call.reorder(sources)
        assert in_pool(bench)[0][-1] == in_pool(bench)[1][-1] == 0.0
    assert [row.held_from for row in bench.call.rows.distinct] == [9, 9]
    assert len({*bench.tokens()[0][:9], *bench.tokens()[1][:9]}) == 9 * len({*last})
    make_view_anew(bench)
    bench.step(40, 41)  # compares what the pool has got
    bench.step(42, 43)
    bench.call.reorder((1, 0))  # 12 tokens each
    assert bench.call.rows.distinct[0].held_from is None
    bench.end()
    assert 0.0 not in [*in_pool(bench)[0], *in_pool(bench)[1]]


def test_a_fork_gets_what_the_pool_has_of_its_block() -> None:
    bench = begun(PROMPT, range(11, 20))  # the last of 9 tokens is in the third block
    bench.step(20, 30)
    bench.call.reorder((1, 1))
    bench.step(21, 31)
    assert in_pool(bench)[0][8] == in_pool(bench)[1][8] != 0.0
    make_view_anew(bench)
    bench.step(40, 41)  # compares


def test_what_a_step_evicts_is_copied_out_before_the_pool_catches_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, done = begun(PROMPT, range(11, 20)), list[str]()
    bench.step(20, 30)
    bench.call.reorder((1, 1))
    view = bench.call.view
    start_forward = view.start_forward

    def ask_for_rows(forward: Forward) -> None:
        forward.layouts()
        start_forward(forward)

    def noted(name: str, function: Callable[..., None]) -> Callable[..., None]:
        return lambda *given, **options: done.append(name) or function(*given, **options)

    monkeypatch.setattr(view, "start_forward", ask_for_rows)
    for owner, name in ((bench.store, "make_copies"), (bench.store.pool, "write_blocks")):
        monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
    bench.step(21, 31)
    assert done[:2] == ["make_copies", "write_blocks"]


@pytest.mark.parametrize("keeps_copies", [True, False])
def test_copies_that_an_interrupted_step_owes_are_made_before_its_rows_go_on(
    keeps_copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = begun(PROMPT, range(11, 20), keeps_copies=keeps_copies)
    bench.step(20, 30)
    bench.call.reorder((1, 1))
    interrupt_copies(bench, monkeypatch, 21, 31)
    bench.call.roll_back()
    bench.step(22, 32)
    make_view_anew(bench)
    bench.step(40, 41)  # compares


def test_copies_that_another_call_owes_are_of_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlockStore(BLOCK_SIZE, 400)
    bench = begun(PROMPT, range(11, 20), store=store)
    other = begun(range(21, 29), range(31, 39), pads=[1, 1], store=store)  # their next token begins a block
    bench.step(51, 52)
    bench.step(53, 54)
    bench.call.crop(1)  # the pool has 10 tokens of these rows
    for each in (bench, other):
        each.step(41, 42)
        each.call.reorder((1, 1))
    interrupt_copies(bench, monkeypatch, 43, 44)
    other.step(45, 46)
    for each in (bench, other):
        each.call.roll_back()
        make_view_anew(each)
        each.step(47, 48)  # compares


def interrupt_copies(bench: Bench, monkeypatch: pytest.MonkeyPatch, *token_ids: int) -> None:
    """Interrupt a step where it copies blocks, and again where that is made up for."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bench.store.pool.all, "copy_blocks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bench.call.schedule_step(token_ids)


@pytest.mark.parametrize("pads", [[0, 0, 0], [0, 0, 1]], ids=["of one length", "padded"])
def test_the_pool_gets_steps_of_rows_that_forked_without_memory(
    pads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = begun(range(11, 20), PROMPT, range(30, 39 - pads[2]), pads=pads)
    bench.step(20, 30, 40)
    bench.step(21, 31, 41)
    bench.call.reorder((1, 1, 2))
    with monkeypatch.context() as patch:
        for name in ("index_select", "index_copy_"):
            patch.setattr(torch.Tensor, name, have_no_memory)
        bench.call.fork_rows().free()
    assert all(0.0 not in tokens for tokens in in_pool(bench))
    make_view_anew(bench)
    bench.step(50, 51, 52)  # compares


def have_no_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("on purpose")


@pytest.mark.parametrize("sources", [(1, 0, 2), (1, 1, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("num_moved", [0, 1, 3], ids=lambda number: f"{number} tensors have moved")
def test_where_memory_runs_out_as_rows_change_places_they_go_on_without_copies(
    num_moved: int, sources: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = begun(PROMPT, range(11, 20), range(30, 38), pads=[0, 0, 1])
    bench.step(20, 30, 40)
    whole, select = list[torch.Tensor](), torch.Tensor.index_select

    def have_memory_for_a_column(states: torch.Tensor, *args: Any) -> torch.Tensor:
        if states.dim() == 4 and states.shape[2] > 1:
            whole.append(states)
            if len(whole) > num_moved:
                raise torch.OutOfMemoryError("on purpose")
        return select(states, *args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_select", have_memory_for_a_column)
        bench.call.reorder(sources)
    assert len(whole) == 4  # keys and values of two layers
    bench.step(21, 31, 41)  # compares
    assert not bench.call.view.keeps_columns
    assert bench.call.view.num_bytes == 0
    assert all(0.0 not in tokens for tokens in in_pool(bench))
    bench.call.reorder((2, 0, 1))
    bench.step(22, 32, 42)
    bench.end()


def test_where_memory_runs_out_as_rows_change_places_the_call_ends_and_no_other_sees_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = begun(PROMPT, range(11, 20))
    bench.step(20, 30)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_select", have_no_memory)
        with pytest.raises(
            OutOfBlocksError, match="out of memory while 2 rows changed places, so they were dropped; ask for fewer"
        ):
            bench.call.reorder((1, 0))
    assert bench.call.state is CallState.IDLE
    bench.call.store.check()
    with pytest.raises(CacheArgumentError, match=r"the rows of this generate were dropped, .*; call generate again"):
        bench.schedule([21], [31])
    assert bench.num_hit([*PROMPT, 20, 21, 22, 23]) == 8


@pytest.mark.parametrize(
    "deed",
    [
        lambda bench: bench.call.crop(1),
        lambda bench: bench.call.reorder([0, 0]),
        lambda bench: bench.call.fork_rows(),
        lambda bench: bench.call.read_layer(0),
        lambda bench: bench.schedule([5, 6]),
        lambda bench: bench.end(failed=True),
        lambda bench: bench.begin(keep_rows=True),
    ],
    ids=["crop", "reorder", "fork", "read", "a forward of more", "a failed end", "another generate"],
)
def test_the_pool_has_all_columns_whatever_comes_behind_a_step(deed: Callable[[Bench], Any]) -> None:
    bench = begun()
    bench.step(20)
    bench.step(21)
    num_tokens = len(bench.call.rows.distinct[0].table.token_ids)
    deed(bench)
    assert 0.0 not in in_pool(bench)[0][: min(num_tokens, bench.call.rows.num_columns)]


@pytest.mark.parametrize("layers", [(), (0,), LAYERS], ids=["no layer", "one layer", "all layers"])
def test_a_step_that_dies_takes_none_before_it_along(layers: tuple[int, ...]) -> None:
    bench = begun()
    bench.step(20)
    bench.call.schedule_step([21])
    bench.write(bench.open_forward, layers)
    bench.call.roll_back()
    assert bench.tokens() == [[*PROMPT, 20]]
    bench.step(22)
    make_view_anew(bench)
    bench.step(23)


def test_a_layer_whose_type_changes_finds_all_columns_in_the_pool() -> None:
    """There the view is made again from the pool; the step itself is in the view alone."""
    bench = begun()
    bench.step(20)
    bench.call.schedule_step([21])
    with torch.no_grad():
        one = torch.ones(1, 1, 1, 1)
        bench.call.write(0, {"key": one, "value": one})
        read = bench.call.write(1, {"key": one.double(), "value": one.double()})
    bench.call.confirm()
    assert 0.0 not in read["key"].flatten().tolist()
    assert 0.0 not in in_pool(bench)[0][:10]
    bench.call.crop(0)
    assert in_pool(bench)[0][10] == 0.0
    bench.end()
    assert in_pool(bench)[0][10] == 1.0
    assert 0.0 not in in_pool(bench, 1)[0]


@pytest.mark.parametrize(
    ("shape", "error"),
    [
        ((1, 1, 1, 1), ForwardMismatchError),
        ((2, 1, 2, 1), ForwardMismatchError),
        ((2, 2, 1, 1), PoolArgumentError),
        ((2, 1, 1, 2), PoolArgumentError),
        ((2, 1, 1), PoolArgumentError),
        ((2, 1, 1, 1, 1), PoolArgumentError),
    ],
)
@pytest.mark.parametrize("keeps_copies", [True, False])
def test_states_of_another_shape_are_refused_in_a_step(
    shape: tuple[int, ...], error: type[Exception], *, keeps_copies: bool
) -> None:
    bench = begun(PROMPT, range(11, 20), keeps_copies=keeps_copies)
    bench.call.schedule_step([20, 21])
    right, wrong = torch.ones(2, 1, 1, 1), torch.ones(shape)
    for states in ({"key": wrong, "value": right}, {"key": right, "value": wrong}):
        with pytest.raises(error):
            bench.call.write(0, states)
    read = bench.call.write(0, {"key": right.requires_grad_(), "value": right})
    assert read["value"][:, 0, -1, 0].tolist() == [1.0, 1.0]


def test_a_forked_child_that_has_lost_the_calls_thread_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = begun()
    for number in range(2):
        bench.step(20 + number)
    bench.call.schedule_step([22])  # under way in that thread
    for name in ("write", "write_blocks"):
        monkeypatch.setattr(bench.store.pool, name, lambda *_: pytest.fail("a write in the child"))
    bench.call.lose_threads(frozenset([bench.call._thread]))
    assert len(bench.call.rows) == 0
    assert bench.num_hit([*PROMPT, 20, 21, 22]) == 8
    bench.store.allocator.check()


# Not read yet.


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each wait read."""
    counts: list[int] = []
    read = held_steps.read_together

    def counting(tensors: Any) -> Any:
        counts.append(len(tensors))
        return read(tensors)

    monkeypatch.setattr(held_steps, "read_together", counting)
    return counts


@pytest.mark.parametrize("keeps_copies", [True, False])
def test_steps_are_read_together_when_a_block_is_full(reads: list[int], *, keeps_copies: bool) -> None:
    bench = begun(keeps_copies=keeps_copies)
    for number in range(3):
        step(bench, 20 + number)
    assert bench.tokens() == [[*PROMPT, *[UNREAD_TOKEN] * 3]]
    assert bench.num_hit([*PROMPT, 20, 21, 22]) == 8
    assert reads == []
    step(bench, 23)
    assert reads == [3]
    assert bench.tokens() == [[*PROMPT, 20, 21, 22, UNREAD_TOKEN]]
    assert bench.num_hit([*PROMPT, 20, 21, 22]) == 12
    assert bench.call.catch_up(torch.tensor([[7, 8]])) == [7, 8]
    assert reads == [3, 2]
    assert bench.tokens() == [[*PROMPT, 20, 21, 22, 23]]
    bench.call.catch_up()
    assert reads == [3, 2]


@pytest.mark.parametrize(
    "deed",
    [lambda call: call.crop(1), lambda call: call.reorder([0, 0]), lambda call: call.fork_rows()],
    ids=["crop", "reorder", "fork"],
)
def test_who_changes_rows_reads_first(deed: Callable[[Any], Any], reads: list[int]) -> None:
    bench = begun()
    step(bench, 20)
    bench.call.crop(0)
    assert reads == []
    deed(bench.call)
    assert reads == [1]
    assert UNREAD_TOKEN not in bench.tokens()[0]


def test_a_step_that_died_is_not_read(reads: list[int]) -> None:
    bench = begun(keeps_copies=False)
    step(bench, 20)
    bench.call.schedule_step(passed(bench, 21))
    bench.call.roll_back()
    step(bench, 22)
    bench.call.catch_up()
    assert reads == [2]
    assert bench.tokens() == [[*PROMPT, 20, 22]]


@pytest.mark.parametrize("at", range(4))
def test_reading_that_is_interrupted_is_done_again(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = begun(PROMPT, range(11, 20))
    for number in range(2):
        step(bench, 20 + number, 30 + number)
    with monkeypatch.context() as patch:
        tables, done = [row.table for row in bench.call.rows.distinct], []
        replace = type(tables[0]).replace_token

        def interrupted(*given: Any) -> None:
            if len(done) == at:
                raise KeyboardInterrupt
            done.append(replace(*given))

        patch.setattr(type(tables[0]), "replace_token", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bench.call.catch_up()
    bench.call.catch_up()
    assert bench.tokens() == [[*PROMPT, 20, 21], [*range(11, 20), 30, 31]]
    bench.end()
    bench.store.allocator.check()


def test_rows_that_end_unread_are_found_up_to_there() -> None:
    """A `generate` that failed did not wait for the device."""
    bench = begun()
    for number in range(5):
        step(bench, 20 + number)
    bench.end(failed=True)
    bench.call.drop_rows()
    assert bench.num_hit([*PROMPT, 20, 21, 22, 23]) == 12
    assert bench.num_hit([*PROMPT, 20, 21, 22, UNREAD_TOKEN]) == 12
    again = begun()
    for number in range(3):
        step(again, 20 + number)
    again.end(failed=True)
    assert again.call.rows.distinct[0].true_token_ids.tolist() == [*PROMPT]
    again.begin(limits(300, num_prompt=12))
    again.forward([*PROMPT, 20, 21, 22])
    assert again.call.counters.rows[0].matched_tokens == 9
    assert again.num_hit([*PROMPT, UNREAD_TOKEN, UNREAD_TOKEN, UNREAD_TOKEN]) == 8


def test_rows_that_come_back_with_tokens_that_nobody_has_read_are_not_stored_from_there_on() -> None:
    """The call between ends before it runs anything."""
    bench = begun()
    for number in range(3):
        step(bench, 20 + number)
    bench.end()  # which does not wait
    bench.begin(limits(300))
    bench.end(failed=True)
    assert bench.tokens() == [[*PROMPT, *[UNREAD_TOKEN] * 3]]
    bench.begin(limits(300), keep_rows=True)
    for number in range(6):
        bench.call.schedule_step([30 + number])
        for layer_idx in LAYERS:
            bench.call.write(layer_idx, {"key": torch.ones(1, 1, 1, 1), "value": torch.ones(1, 1, 1, 1)})
        bench.call.confirm()
    bench.end()
    assert bench.num_hit([*PROMPT, *[UNREAD_TOKEN] * 3, *range(30, 36)]) == 8


@pytest.mark.parametrize(
    "given",
    [{"shown": [10]}, {"positions": [9]}, {"shown": [10], "positions": [9]}, {}],
    ids=["mask", "positions", "both", "neither"],
)
def test_a_plain_step_is_stored(given: dict[str, Any]) -> None:
    bench = begun(keeps_copies=False)
    step(bench, 20, **given)
    bench.call.catch_up()
    assert bench.call.rows.distinct[0].num_true_tokens == 10


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"shown": [9]}, None),
        ({"positions": [11]}, None),
        ({"shown": [9], "positions": [8]}, None),
        ({"shown": [11]}, "padding has no keys and values"),
        ({"positions": [8]}, "resumed at position 8, but the cache holds its first 9 tokens"),
    ],
    ids=["hides a token", "skips a position", "counts shown tokens", "shows padding", "falls back"],
)
def test_what_an_unusual_step_computed_is_not_stored_nor_what_follows(given: dict[str, Any], why: str | None) -> None:
    bench = begun(keeps_copies=False)
    step(bench, 19)
    later = {name: [numbers[0] + 1] for name, numbers in given.items()}
    step(bench, 20, **later)
    step(bench, 21)
    if why is None:
        bench.call.catch_up()
    else:
        with pytest.raises(
            CacheArgumentError, match=why.replace("position 8", "position 9").replace("first 9", "first 10")
        ):
            bench.call.catch_up()
    bench.call.catch_up()  # said once
    assert bench.tokens() == [[*PROMPT, 19, 20, 21]]
    assert bench.call.rows.distinct[0].num_true_tokens == 10


def test_what_follows_an_end_of_sequence_is_not_stored() -> None:
    bench = begun(PROMPT, range(11, 20), keeps_copies=False, end=(7,))
    for tokens in [(20, 30), (7, 31), (0, 32)]:
        step(bench, *tokens)
    bench.call.catch_up()
    assert [row.num_true_tokens for row in bench.call.rows.distinct] == [11, 12]


# What a step was passed.


def held(tensor: torch.Tensor, positions: torch.Tensor | None = None) -> PassedStep:
    made = PassedStep(9, tensor, None, positions)
    made.hold()
    return made


def test_writes_into_what_is_held_are_seen() -> None:
    ids, positions = torch.tensor([[1]]), torch.tensor([[2]])
    for written in (ids, positions):
        made = held(ids, positions)
        assert made.is_as_passed()
        assert made.tensors[0] is ids
        written += 1
        assert not made.is_as_passed()


def test_what_others_may_write_unseen_is_copied() -> None:
    """A part of another tensor, which would be held as a whole; and inference tensors, whose writes torch does not count."""
    whole = torch.tensor([[1, 2, 3]])
    made = held(whole[:, -1:], whole[:, :1])
    whole.zero_()
    assert made.is_as_passed()
    assert [tensor.tolist() for tensor in made.tensors] == [[[3]], [[1]]]
    with torch.inference_mode():
        ids = torch.tensor([[1]])
        made = held(ids)
        ids.zero_()
        assert made.is_as_passed()
        assert made.tensors[0].tolist() == [[1]]


def test_on_a_cpu_nothing_is_held() -> None:
    assert not PassedStep.may_be_held(torch.tensor([[1]]), None, None)


def test_positions_that_are_no_integers_are_not_held() -> None:
    ids, positions = torch.zeros(1, 1, dtype=torch.int64, device="meta"), torch.zeros(1, 1, device="meta")
    assert PassedStep.may_be_held(ids, None, None)
    assert not PassedStep.may_be_held(ids, None, positions)
    assert not PassedStep.may_be_held(ids, None, torch.zeros(1, 1, dtype=torch.int64))
    assert not PassedStep.may_be_held(ids, torch.ones(1, 9), None)


def test_a_row_says_nothing_of_what_is_held() -> None:
    row: Row = make_rows(Bench().store, range(8)).distinct[0]
    row.held_from = 5
    assert (row.num_true_tokens, row.true_token_ids.tolist()) == (5, [*range(5)])
    row.stop_commits(3)
    assert row.num_true_tokens == 3
    assert row.fork().held_from == 5
    row.truncate(5)
    assert row.held_from is None
