"""Which prefills pay: the plan is compared with a naive search over all columns, on a store of token prefixes."""

from __future__ import annotations

from array import array
from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged_cache.call.schedule import Prefill, PrefillPlan, SharingRow, plan_prefills

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
        self.rows = [
            SharingRow(root, self.stop - len(tokens), array("q", tokens), self.store.num_known(root, tuple(tokens)))
            for root, tokens in rows
        ]

    def cost(self, prefills: list[Prefill], forward_cost: int, num_needed: int) -> int:
        """What it costs, in tokens, to run these and then the forward over all rows."""
        store = self.store.copy()
        total = 0
        for number, num_tokens in prefills:
            total += forward_cost + store.compute(
                self.rows[number].root, tuple(self.rows[number].token_ids[:num_tokens])
            )
        known = [row.pad + store.num_known(row.root, tuple(row.token_ids)) for row in self.rows]
        return total + len(self.rows) * (self.stop - min(self.stop - num_needed, *known))

    def _is_part_of(self, one: Prefill, other: Prefill) -> bool:
        """Whether another prefill computes all that one does, and more."""
        mine, theirs = self.rows[one.row], self.rows[other.row]
        tokens = mine.token_ids[: one.num_tokens]
        return (
            one.num_tokens < other.num_tokens
            and mine.root == theirs.root
            and tokens == theirs.token_ids[: one.num_tokens]
        )

    def least_cost(self, forward_cost: int, num_needed: int) -> int:
        """Of all columns at which the forward over all rows could start, prefills computing what lies before it."""
        costs = [self.cost([], forward_cost, num_needed)]
        for column in range(self.stop - num_needed + 1):
            prefills, store = [], self.store.copy()
            for number in sorted(
                range(len(self.rows)), key=lambda i: (self.rows[i].root, self.rows[i].token_ids.tobytes())
            ):
                row = self.rows[number]
                num_tokens = -(-(column - row.pad) // BLOCK_SIZE) * BLOCK_SIZE
                num_tokens = min(num_tokens, len(row.token_ids) // BLOCK_SIZE * BLOCK_SIZE)
                if num_tokens > row.num_known and store.compute(row.root, tuple(row.token_ids[:num_tokens])):
                    prefills.append(Prefill(number, num_tokens))
            needed = [one for one in prefills if not any(self._is_part_of(one, other) for other in prefills)]
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
    plan = plan_prefills(
        batch.rows, start=0, stop=batch.stop, num_needed=num_needed, block_size=BLOCK_SIZE, forward_cost=forward_cost
    )
    return batch.cost(list(plan.prefills), forward_cost, num_needed) - batch.least_cost(forward_cost, num_needed)


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
    plan = plan_prefills(
        batch.rows, start=0, stop=batch.stop, num_needed=1, block_size=BLOCK_SIZE, forward_cost=forward_cost
    )
    store = batch.store.copy()
    for number, num_tokens in plan.prefills:
        store.compute(batch.rows[number].root, tuple(batch.rows[number].token_ids[:num_tokens]))
    held = [
        (row.root, tuple(row.token_ids[:end]))
        for row in batch.rows
        for end in range(row.num_known + BLOCK_SIZE, store.num_known(row.root, tuple(row.token_ids)) + 1, BLOCK_SIZE)
    ]
    assert plan.num_shared_blocks <= len(held) - len(set(held))  # never more, or a call that cannot fit is begun


def rows_of(*rows: list[int]) -> list[SharingRow]:
    stop = max(map(len, rows))
    return [SharingRow(b"", stop - len(tokens), array("q", tokens), 0) for tokens in rows]


def plan_of(rows: list[SharingRow], forward_cost: int = 4) -> PrefillPlan:
    stop = max(row.pad + len(row.token_ids) for row in rows)
    return plan_prefills(rows, start=0, stop=stop, num_needed=1, block_size=BLOCK_SIZE, forward_cost=forward_cost)


def test_nested_prefixes_are_computed_once_each() -> None:
    a, b, c = [1] * 20, [2] * 20, [3] * 20
    plan = plan_of(rows_of([*a, *b, 5, 5], [*a, *b, 6, 6], [*a, *c, 7, 7]))
    assert plan.prefills == (Prefill(0, 40), Prefill(2, 40))


def test_a_row_that_knows_less_than_its_neighbours_is_computed_alone() -> None:
    known = [row._replace(num_known=40) for row in rows_of([*[1] * 40, 5, 5], [*[1] * 40, 6, 6])]
    unknown = rows_of([*[2] * 40, 7, 7])
    assert plan_of(known + unknown).prefills == (Prefill(2, 40),)


def test_what_is_short_is_not_worth_a_forward() -> None:
    rows = rows_of([1, 1, 1, 1, 5, 5], [1, 1, 1, 1, 6, 6])
    assert plan_of(rows, forward_cost=4).prefills == ()
    assert plan_of(rows, forward_cost=3).prefills == (Prefill(0, 4),)


def test_rows_under_other_roots_share_nothing() -> None:
    rows = rows_of([*[1] * 40, 5, 5], [*[1] * 40, 6, 6])
    assert plan_of(rows).prefills
    assert not plan_of([rows[0], rows[1]._replace(root=b"other")]).prefills
