"""What of a forward is computed where: equal rows once, shared prefixes first, and all rows from one column on.

The plan of shared prefixes is compared with a naive search over all columns, on a store of token prefixes.
"""

from __future__ import annotations

import random
from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged_cache.call.schedule import (
    NOTHING_SHARED,
    Groups,
    SharedPrefix,
    SharedPrefixPlan,
    each_alone,
    group_equal,
    plan_shared_prefixes,
    start_column,
)
from hf_paged_cache.call.scheduled_forward import RowInput

from .bench import new_row

# Equal rows


@given(st.lists(st.integers(0, 3), max_size=8))
def test_rows_are_in_one_group_exactly_when_their_keys_are_equal(keys: list[int]) -> None:
    groups = group_equal(keys)
    for i, left in enumerate(keys):
        for j, right in enumerate(keys):
            assert (groups.group_of[i] == groups.group_of[j]) == (left == right)
    assert groups.members == [groups.group_of.index(number) for number in range(len(groups.members))]


@given(st.lists(st.integers(0, 3), max_size=8))
def test_a_groups_first_row_is_never_left_of_its_number(keys: list[int]) -> None:  # rows can be moved in place
    assert all(member >= number for number, member in enumerate(group_equal(keys).members))


def test_no_rows_are_no_groups() -> None:
    assert group_equal([]) == Groups(members=[], group_of=[])


@given(st.integers(0, 5))
def test_rows_alone_are_groups_of_their_own_as_rows_that_all_differ_are(num_rows: int) -> None:
    assert each_alone(num_rows) == group_equal(range(num_rows)) == (list(range(num_rows)), list(range(num_rows)))


# One column for all


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 12)), min_size=1, max_size=4),
    st.integers(0, 6),
    st.integers(1, 20),
    st.data(),
)
def test_the_forward_starts_at_the_last_column_that_all_rows_allow(
    rows: list[tuple[int, int]], start: int, num_new: int, data: st.DataObject
) -> None:
    """Rows of padding and known tokens."""
    stop = start + num_new
    num_needed = data.draw(st.integers(1, num_new))

    def allowed(column: int) -> bool:
        known = all(position < pad + num_known for pad, num_known in rows for position in range(start, column))
        return known and stop - column >= num_needed

    expected = max(column for column in range(start, stop) if allowed(column))
    columns = [pad + num_known for pad, num_known in rows]
    assert start_column(columns, start=start, stop=stop, num_needed=num_needed) == expected


def test_the_order_of_rows_changes_nothing() -> None:
    shuffler = random.Random(0)
    columns = [48, 10 + 32, 3 + 57]
    for _ in range(5):
        shuffler.shuffle(columns)
        assert start_column(columns, start=0, stop=60, num_needed=1) == 42


def test_a_whole_prompt_that_is_known_still_computes_its_last_column() -> None:
    assert start_column([60], start=0, stop=60, num_needed=1) == 59


# Shared prefixes

BLOCK_SIZE = 2
# Of few pieces, so that rows share much, part in the middle of it, and go on for long.
PIECES = st.lists(st.sampled_from([[0] * 4, [1] * 4, [0] * 16, [1] * 9]), max_size=4)
RESTS = st.lists(st.integers(0, 1), min_size=1, max_size=3)
TOKENS = st.builds(lambda pieces, rest: [*chain.from_iterable(pieces), *rest], PIECES, RESTS)
ROOTS = st.sampled_from([b"one", b"another"])


class NaiveStore:
    """The blocks that prefixes of (root, tokens) stand for."""

    def __init__(self) -> None:
        self.blocks: set[tuple[bytes, tuple[int, ...]]] = set()

    def num_known(self, root: bytes, tokens: tuple[int, ...]) -> int:
        known = 0
        while known + BLOCK_SIZE <= len(tokens) and (root, tokens[: known + BLOCK_SIZE]) in self.blocks:
            known += BLOCK_SIZE
        return known

    def compute(self, root: bytes, tokens: tuple[int, ...]) -> int:
        """Make all full blocks of `tokens` known; says how many tokens that computes."""
        known = self.num_known(root, tokens)
        for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
            self.blocks.add((root, tokens[:end]))
        return len(tokens) - known

    def copy(self) -> NaiveStore:
        twin = NaiveStore()
        twin.blocks = set(self.blocks)
        return twin


class Batch:
    """Rows of a first forward, padded on the left, some of whose prefixes a store knows."""

    def __init__(self, rows: list[tuple[bytes, list[int]]], known: list[tuple[bytes, list[int]]]) -> None:
        self.store = NaiveStore()
        for root, tokens in known:
            self.store.compute(root, tuple(tokens[: len(tokens) // BLOCK_SIZE * BLOCK_SIZE]))
        self.stop = max(len(tokens) for _, tokens in rows)
        self.rows = [new_row(tokens, self.stop - len(tokens), root=root) for root, tokens in rows]
        self.num_known = [self.store.num_known(root, tuple(tokens)) for root, tokens in rows]

    def plan(self, forward_cost: int, num_needed: int) -> SharedPrefixPlan:
        return plan_of(self.rows, self.num_known, forward_cost=forward_cost, num_needed=num_needed)

    def cost(self, prefixes: list[SharedPrefix], forward_cost: int, num_needed: int) -> int:
        """What it costs, in tokens, to run these and then the forward over all rows."""
        store = self.store.copy()
        total = 0
        for number, num_tokens in prefixes:
            total += forward_cost + store.compute(
                self.rows[number].root, tuple(self.rows[number].token_ids[:num_tokens])
            )
        known = [row.pad + store.num_known(row.root, tuple(row.token_ids)) for row in self.rows]
        return total + len(self.rows) * (self.stop - min(self.stop - num_needed, *known))

    def _is_part_of(self, one: SharedPrefix, other: SharedPrefix) -> bool:
        """Whether another prefix holds all that one does, and more."""
        mine, theirs = self.rows[one.row], self.rows[other.row]
        tokens = mine.token_ids[: one.num_tokens]
        return (
            one.num_tokens < other.num_tokens
            and mine.root == theirs.root
            and tokens == theirs.token_ids[: one.num_tokens]
        )

    def least_cost(self, forward_cost: int, num_needed: int) -> int:
        """Of all columns at which the forward over all rows could start, prefixes computing what lies before it."""
        costs = [self.cost([], forward_cost, num_needed)]
        for column in range(self.stop - num_needed + 1):
            prefixes, store = [], self.store.copy()
            for number in sorted(
                range(len(self.rows)), key=lambda i: (self.rows[i].root, self.rows[i].token_ids.tobytes())
            ):
                row = self.rows[number]
                num_tokens = -(-(column - row.pad) // BLOCK_SIZE) * BLOCK_SIZE
                num_tokens = min(num_tokens, len(row.token_ids) // BLOCK_SIZE * BLOCK_SIZE)
                if num_tokens > self.num_known[number] and store.compute(row.root, tuple(row.token_ids[:num_tokens])):
                    prefixes.append(SharedPrefix(number, num_tokens))
            needed = [one for one in prefixes if not any(self._is_part_of(one, other) for other in prefixes)]
            costs.append(self.cost(needed, forward_cost, num_needed))
        return min(costs)


@st.composite
def batches(draw: st.DrawFn, *, aligned: bool = False) -> Batch:
    """Batches; `aligned` ones have paddings that differ by whole blocks."""
    rows = draw(st.lists(st.tuples(ROOTS, TOKENS), min_size=2, max_size=5))
    if aligned:
        rest = draw(st.integers(1, BLOCK_SIZE))
        rows = [(root, (tokens * BLOCK_SIZE)[: len(tokens) // BLOCK_SIZE * BLOCK_SIZE + rest]) for root, tokens in rows]
    known = draw(st.lists(st.tuples(st.sampled_from(rows), st.integers(1, 40)), max_size=2))
    return Batch(rows, [(root, tokens[:length]) for (root, tokens), length in known])


def excess_of_the_plan(batch: Batch, forward_cost: int, num_needed: int) -> int:
    """By how many tokens the plan costs more than the best column to start at."""
    num_needed = min(num_needed, batch.stop)
    plan = batch.plan(forward_cost, num_needed)
    return batch.cost(list(plan.prefixes), forward_cost, num_needed) - batch.least_cost(forward_cost, num_needed)


@settings(max_examples=500)  # what each kind of column is worth is seen in few batches
@given(batches(aligned=True), st.integers(0, 4), st.integers(1, 2))
def test_no_column_to_start_at_costs_less_than_the_plan(batch: Batch, forward_cost: int, num_needed: int) -> None:
    assert excess_of_the_plan(batch, forward_cost, num_needed) == 0


@given(batches(), st.integers(0, 4), st.integers(1, 2))
def test_where_blocks_of_rows_end_at_different_columns_the_plan_costs_less_than_a_block_a_row_more(
    batch: Batch, forward_cost: int, num_needed: int
) -> None:
    assert 0 <= excess_of_the_plan(batch, forward_cost, num_needed) < BLOCK_SIZE * len(batch.rows)


@given(batches(), st.integers(0, 2))
def test_blocks_that_rows_hold_of_each_other_are_counted_once(batch: Batch, forward_cost: int) -> None:
    plan = batch.plan(forward_cost, 1)
    store = batch.store.copy()
    for number, num_tokens in plan.prefixes:
        store.compute(batch.rows[number].root, tuple(batch.rows[number].token_ids[:num_tokens]))
    held = [
        (row.root, tuple(row.token_ids[:end]))
        for row, known in zip(batch.rows, batch.num_known, strict=True)
        for end in range(known + BLOCK_SIZE, store.num_known(row.root, tuple(row.token_ids)) + 1, BLOCK_SIZE)
    ]
    assert plan.num_shared_blocks <= len(held) - len(set(held))  # never more, or a call that cannot fit is begun


def rows_of(*rows: list[int]) -> list[RowInput]:
    stop = max(map(len, rows))
    return [new_row(tokens, stop - len(tokens)) for tokens in rows]


def plan_of(
    rows: list[RowInput], num_known: list[int] | None = None, *, forward_cost: int = 4, num_needed: int = 1
) -> SharedPrefixPlan:
    return plan_shared_prefixes(
        rows,
        [0] * len(rows) if num_known is None else num_known,
        start=0,
        stop=max(row.pad + len(row.token_ids) for row in rows),
        num_needed=num_needed,
        block_size=BLOCK_SIZE,
        forward_cost=forward_cost,
    )


def test_nested_prefixes_are_computed_once_each() -> None:
    a, b, c = [1] * 20, [2] * 20, [3] * 20
    plan = plan_of(rows_of([*a, *b, 5, 5], [*a, *b, 6, 6], [*a, *c, 7, 7]))
    assert plan.prefixes == (SharedPrefix(0, 40), SharedPrefix(2, 40))


def test_a_row_that_knows_less_than_its_neighbours_is_computed_alone() -> None:
    rows = rows_of([*[1] * 40, 5, 5], [*[1] * 40, 6, 6], [*[2] * 40, 7, 7])
    assert plan_of(rows, [40, 40, 0]).prefixes == (SharedPrefix(2, 40),)


def test_what_is_short_is_not_worth_a_forward() -> None:
    rows = rows_of([1, 1, 1, 1, 5, 5], [1, 1, 1, 1, 6, 6])
    assert plan_of(rows, forward_cost=4) == NOTHING_SHARED
    assert plan_of(rows, forward_cost=3).prefixes == (SharedPrefix(0, 4),)


def test_rows_under_other_roots_share_nothing() -> None:
    rows = rows_of([*[1] * 40, 5, 5], [*[1] * 40, 6, 6])
    assert plan_of(rows) == SharedPrefixPlan((SharedPrefix(0, 40),), 20)
    assert plan_of([rows[0], rows[1]._replace(root=b"other")]) == NOTHING_SHARED
