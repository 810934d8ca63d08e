"""A view against a naive model: whatever happened before, a forward reads what its rows' tokens say."""

from __future__ import annotations

import math
import random
import zlib
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.attention import buffers, group_columns
from hf_paged_cache.attention import view as view_module
from hf_paged_cache.attention.gradients import GradientPath
from hf_paged_cache.attention.group_columns import Forward
from hf_paged_cache.attention.view import View
from hf_paged_cache.blocks.sight import Window
from hf_paged_cache.kv.block_pool import BlockPool
from hf_paged_cache.kv.slot_mapping import ReadSource, RowLayout, SlotMapping

from ..reference import PROMPT, batch, run, zero_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK_SIZE = 4
HEADS = 2
SIZES = {"key": 3, "value": 2}
LAYERS = (0, 1)
WITH_COPIES, GATHER = partial(View, keeps_copies=True), partial(View, keeps_copies=False)
BOTH = pytest.mark.parametrize("make_view", [WITH_COPIES, GATHER], ids=["paged", "gather"])


class NaiveRow(NamedTuple):
    root: bytes
    pad: int
    tokens: tuple[int, ...]


def states_of(row: NaiveRow, layer_idx: int, name: str, start: int, stop: int) -> torch.Tensor:
    """[H, stop - start, D] of the row's tokens: each depends on root, layer, name and every token up to it."""
    digests = [zlib.crc32(repr((row.root, layer_idx, name, row.tokens[: i + 1])).encode()) for i in range(start, stop)]
    first = torch.tensor(digests, dtype=torch.float64)[None, :, None] % 9973
    return (first + torch.arange(HEADS)[:, None, None] * 0.5 + torch.arange(SIZES[name]) * 0.125).float()


class Bench:
    """A pool that holds rows, each in scattered blocks of its own, and the view that is tried on it."""

    def __init__(
        self,
        make_view: Any,
        seed: int = 0,
        *,
        in_parts: bool = False,
        windows: Mapping[int, int] | None = None,
        layers: Sequence[int] = LAYERS,
    ) -> None:
        self.in_parts = in_parts  # a layer reads each of its tensors by itself
        self.num_appended = 0  # steps of layers
        self.pool = BlockPool(BLOCK_SIZE)
        self.pool.all.ensure_capacity(400)
        self.windows = windows or {}  # layer index -> its window
        self.layers = layers
        sights = {layer_idx: Window(window) for layer_idx, window in self.windows.items()}
        self.view: View = make_view(self.pool, sights)
        if seed % 2:  # then rows that are multiplied are copied, and not made anew
            self.view._shared.look()
        self.rows: list[NaiveRow] = []
        self.num_columns = 0
        self.dtype = torch.float32  # of what the layers write; the pool is float32
        self.held_from: int | None = None  # columns from here on are of steps, which the pool may not have
        self.gathers: list[tuple[int, int]] = []  # (layer, columns of all rows) of each call of the pool's `gather`
        gather = self.pool.gather

        def counted(layer_idx: int, source: ReadSource, *args: Any) -> dict[str, torch.Tensor]:
            self.gathers.append((layer_idx, source.num_rows * source.num_columns))
            return gather(layer_idx, source, *args)

        self.pool.gather = counted  # type: ignore[method-assign]
        self._random = random.Random(seed)

    def layouts(self, rows: Sequence[NaiveRow]) -> list[RowLayout]:
        """The rows in blocks that hold their tokens: others each time, so that no view can go by block ids."""
        free = self._random.sample(range(1, 400), 399)
        return [RowLayout(row.root, row.pad, array("q", row.tokens), self._put(row, free)) for row in rows]

    def _put(self, row: NaiveRow, free: list[int]) -> list[int]:
        block_ids = [free.pop() for _ in range(-(-len(row.tokens) // BLOCK_SIZE))]
        slots = [block_ids[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(len(row.tokens))]
        for layer_idx in self.layers:
            states = {name: states_of(row, layer_idx, name, 0, len(row.tokens))[None] for name in SIZES}
            self.pool.write(layer_idx, states, SlotMapping(slots))
        return block_ids

    def new_states(self, layer_idx: int, start: int, stop: int) -> dict[str, torch.Tensor]:
        """name -> [R, H, stop - start, D], as a model would compute it; its padding is anything finite."""
        new = {}
        for name, size in SIZES.items():
            new[name] = torch.full((len(self.rows), HEADS, stop - start, size), -7.0)
            for i, row in enumerate(self.rows):
                first = max(start, row.pad)
                if first < stop:
                    new[name][i, :, first - start :] = states_of(row, layer_idx, name, first - row.pad, stop - row.pad)
        return {name: states.to(self.dtype) for name, states in new.items()}

    def start(self, rows: list[NaiveRow], *, max_rows: int = 1, max_columns: float = math.inf) -> None:
        """Other rows run from here on."""
        self.rows, self.num_columns, self.held_from = rows, 0, None
        stop = rows[0].pad + len(rows[0].tokens)
        self.view.start_rows(self.layouts(rows), stop, max_rows=max_rows, max_columns=max_columns)

    def forward(self, start: int, layers: Sequence[int] | None = None, without: Sequence[int] = ()) -> None:
        """A forward of the columns `[start, all)`, of which only `layers` come to be read; checks what they read.

        Args:
            without: layers at which memory runs out.
        """
        stop = self.rows[0].pad + len(self.rows[0].tokens)
        layouts: list[list[RowLayout]] = []  # once, if at all: other blocks may lie where these do

        def ask() -> list[RowLayout]:
            if not layouts:
                layouts.append(self.layouts(self.rows))
            return layouts[0]

        self.view.start_forward(Forward(ask, len(self.rows), start, stop))
        if not self._goes_on_by_a_step(start, stop):
            self.held_from = None
        self.require_held(start)
        for layer_idx in self.layers if layers is None else layers:
            new = self.new_states(layer_idx, start, stop)
            if layer_idx in without:
                self.view.do_without_copies()
                self.held_from = None
            steps = None if self.in_parts else self.view.steps.get(layer_idx)
            appended = None if steps is None else steps.append(new["key"], new["value"])
            if appended is not None:
                self.num_appended += 1
                got = dict(zip(("key", "value"), appended, strict=True))
            elif self.in_parts:
                got = {name: self.view.read(layer_idx, {name: new[name]})[name] for name in new}
            else:
                got = self.view.read(layer_idx, new)
            self._require(got, layer_idx, start, stop)
            self.require_held(start)
        if self._goes_on_by_a_step(start, stop):
            self.held_from = start if self.held_from is None else max(self.held_from, stop - BLOCK_SIZE)
        self.num_columns = stop
        if layers is None:
            self.require_held(stop)
        self._require_bytes()

    def _goes_on_by_a_step(self, start: int, stop: int) -> bool:
        return stop - start == 1 and start == self.num_columns > 0

    def _require(self, got: Mapping[str, torch.Tensor], layer_idx: int, start: int, stop: int) -> None:
        """What a layer read is what its window shows of the rows."""
        first = first_of(self.windows.get(layer_idx), start)
        for name, size in SIZES.items():
            assert got[name].shape == (len(self.rows), HEADS, stop - first, size)
            assert got[name].dtype == self.dtype
            assert got[name].isfinite().all()
            for i, row in enumerate(self.rows):
                expected = states_of(row, layer_idx, name, max(0, first - row.pad), len(row.tokens)).to(self.dtype)
                assert got[name][i, :, max(0, row.pad - first) :].equal(expected), (layer_idx, name, i)

    def require_held(self, stop: int) -> None:
        """Columns of up to a block of steps, as they were written: the pool may not have them."""
        if not self.view.keeps_columns or self.held_from is None or self.held_from == stop:
            return
        start = self.held_from
        found = dict(self.view.columns(start, stop))
        assert sorted(found) == sorted(self.layers)
        for layer_idx, states in found.items():
            for name in SIZES:
                for i, row in enumerate(self.rows):
                    first = max(start, row.pad)
                    expected = states_of(row, layer_idx, name, first - row.pad, stop - row.pad).to(self.dtype)
                    assert states[name][i, :, first - start :].equal(expected), (layer_idx, name, i, start, stop)

    def _require_bytes(self) -> None:
        held = sum(tensor.nbytes for tensor in buffers_of(self.view))
        assert self.view.num_bytes == held + self.view._memory.num_bytes

    def extend(self, tokens: Sequence[Sequence[int]]) -> None:
        """Each row gets further tokens."""
        self.rows = [row._replace(tokens=(*row.tokens, *new)) for row, new in zip(self.rows, tokens, strict=True)]

    def num_gathered(self) -> int:
        """Slots gathered of layer 0 since the last question."""
        number = sum(slots for layer_idx, slots in self.gathers if layer_idx == 0)
        self.gathers.clear()
        return number


def first_of(window: int | None, start: int) -> int:
    """The first column that a token at `start` sees: itself, and `window - 1` before it."""
    return 0 if window is None else max(0, start + 1 - window)


def buffers_of(view: View) -> list[torch.Tensor]:
    """All tensors that hold copies of columns."""
    return [held.states for group in view._groups for layer in group.buffers.values() for held in layer.values()]


def row_of(num_tokens: int, pad: int = 0, root: bytes = b"root", first: int = 0) -> NaiveRow:
    return NaiveRow(root, pad, tuple(range(first, first + num_tokens)))


# Random sequences


SOME_WINDOWS = (2, 3, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 1, 100)


def some_windows(chance: random.Random) -> tuple[dict[int, int], tuple[int, ...]]:
    """Windows, and the layers: in some a window, or two that differ; or in all."""
    first, second = chance.choice(SOME_WINDOWS), chance.choice((1, *SOME_WINDOWS))
    return chance.choice(
        [
            ({1: first}, (0, 1)),
            ({1: first, 2: second}, (0, 1, 2)),
            ({0: first, 2: first}, (0, 1, 2)),
            ({0: first, 1: first}, (0, 1)),
            ({0: first, 1: second}, (0, 1)),
        ]
    )


@pytest.fixture(params=["in place", "exact"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of buffers: to which columns are appended in place, as on a host, or which are joined with them, as on an accelerator."""
    for module in (buffers, group_columns):
        monkeypatch.setattr(module, "is_exact_on", lambda device: request.param == "exact")
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: "the only one")
    return str(request.param)


def played(bench: Bench, chance: random.Random, kind: str) -> None:
    if kind == "exact":
        bench.pool.accelerators.add(torch.device("cpu"))
    play_random_events(bench, chance)
    may_append = bench.view.most_copies and not bench.in_parts
    assert (bench.num_appended > 0) == may_append
    if kind == "exact" and may_append:
        layers = [layer for group in bench.view._groups for layer in group.buffers.values()]
        assert {held.is_exact for layer in layers for held in layer.values()} <= {True}


@BOTH
@pytest.mark.parametrize("seed", range(12))
def test_a_forward_reads_what_its_rows_hold_whatever_came_before_it(make_view: Any, seed: int, kind: str) -> None:
    played(Bench(make_view, seed, in_parts=seed % 3 == 0), random.Random(seed), kind)


@BOTH
@pytest.mark.parametrize("seed", range(36))
def test_a_layer_with_a_window_reads_the_window_whatever_came_before_it(make_view: Any, seed: int, kind: str) -> None:
    chance = random.Random(seed)
    windows, layers = some_windows(chance)
    played(Bench(make_view, seed, in_parts=seed % 3 == 0, windows=windows, layers=layers), chance, kind)


def play_random_events(bench: Bench, chance: random.Random) -> None:
    """60 of what happens to rows, in any order."""

    def new_rows() -> list[NaiveRow]:
        """Rows of one number of columns, often resuming like the rows before."""
        stop = chance.randint(4, 20)
        rows = []
        for i in range(chance.randint(1, 3)):
            pad = chance.choice([0, 0, 1, 3])
            tokens = [chance.randint(0, 1) for _ in range(stop - pad)]
            if i < len(bench.rows) and chance.random() < 0.7:
                before = bench.rows[i]
                pad = before.pad if before.pad < stop else 0
                common = chance.randint(0, min(len(before.tokens), stop - pad))
                tokens = [*before.tokens[:common], *(chance.randint(0, 1) for _ in range(stop - pad - common))]
            rows.append(NaiveRow(chance.choice([b"a", b"a", b"b"]), pad, tuple(tokens)))
        return rows

    def start_again() -> None:
        if chance.random() < 0.7:
            kept = [row._replace(tokens=row.tokens[: chance.choice([len(row.tokens), 5])]) for row in bench.rows]
            bench.view.keep(bench.layouts(kept))
        rows = new_rows()
        stop = rows[0].pad + len(rows[0].tokens)
        bench.start(rows, max_rows=chance.randint(1, 6), max_columns=chance.choice([math.inf, 24, stop]))
        bench.forward(chance.randint(0, bench.rows[0].pad + len(bench.rows[0].tokens) - 1))

    bench.start(new_rows())
    bench.forward(0)
    for _ in range(60):
        events = ["again", "steps", "extend", "extend", "extend", "reorder", "expand", "crop", "drop", "fault"]
        event = chance.choice([*events, "type", "without"])
        if event not in ("extend", "steps"):  # the pool catches up first
            bench.held_from = None
        if event == "again" or len(bench.rows[0].tokens) > 50:
            start_again()
        elif event == "steps":
            for _ in range(chance.randint(1, 2 * BLOCK_SIZE)):
                bench.extend([[chance.randint(0, 1)] for _ in bench.rows])
                bench.forward(bench.num_columns)
        elif event == "extend":
            num_new = chance.choice([1, 1, 3, 2 * BLOCK_SIZE + 3])
            bench.extend([[chance.randint(0, 1) for _ in range(num_new)] for _ in bench.rows])
            more_known = chance.choice([0, 0, num_new - 1])  # a later chunk of a prompt may be known, too
            bench.forward(bench.num_columns + more_known)
        elif event == "reorder":
            sources = [chance.randrange(len(bench.rows)) for _ in bench.rows]
            if any(bench.rows[source].pad != row.pad for source, row in zip(sources, bench.rows, strict=True)):
                continue  # beams of one prompt have its padding
            pairs = [(bench.rows[source], row) for source, row in zip(sources, bench.rows, strict=True)]
            shared = min(
                next(
                    (i for i, (a, b) in enumerate(zip(old.tokens, new.tokens, strict=True)) if a != b), len(new.tokens)
                )
                + new.pad
                if old.root == new.root
                else 0
                for old, new in pairs
            )
            index = chance.choice([None, torch.tensor(sources)])
            bench.view.select(sources, chance.choice([0, shared]), index)
            bench.rows = [bench.rows[source] for source in sources]
        elif event == "expand" and len(bench.rows) < 4:
            sources = [chance.randrange(len(bench.rows)) for _ in range(chance.randint(1, 5))]
            if chance.random() < 0.6:  # equal rows that part: a row is never left of the one that it resumes from
                sources = [min(source, i) for i, source in enumerate(sorted(sources))]
            bench.view.select(sources)
            bench.rows = [bench.rows[source] for source in sources]
        elif event == "crop":
            num_columns = chance.randint(max(row.pad for row in bench.rows) + 1, bench.num_columns)
            bench.view.crop(num_columns, bench.num_columns)
            bench.rows = [row._replace(tokens=row.tokens[: num_columns - row.pad]) for row in bench.rows]
            bench.num_columns = num_columns
        elif event == "drop":
            bench.view.drop()
        elif event == "type":
            bench.dtype = chance.choice([torch.float32, torch.bfloat16])
        elif event == "without":
            bench.extend([[chance.randint(0, 1)] for _ in bench.rows])
            bench.forward(bench.num_columns, without=chance.sample(bench.layers, 2))
            start_again()  # what ran without copies does so to the end of its rows
        elif event == "fault":  # a forward of which only some layers ran is taken back
            before, columns = bench.rows, bench.num_columns
            bench.extend([[chance.randint(0, 1)] for _ in bench.rows])
            bench.forward(columns, layers=[chance.choice(bench.layers)])
            bench.view.drop()
            bench.rows, bench.num_columns = before, columns


# What a view with copies keeps


def test_a_view_with_copies_gathers_nothing_while_rows_go_on() -> None:
    bench = Bench(WITH_COPIES)
    bench.start([row_of(9), row_of(7, pad=2, first=50)])
    bench.forward(0)
    for token in range(5):
        bench.extend([[token], [token + 1]])
        bench.forward(bench.num_columns)
    bench.view.select([1, 1], 0)
    bench.rows = [bench.rows[1], bench.rows[1]]
    bench.extend([[1], [2]])
    bench.forward(bench.num_columns)
    assert bench.num_gathered() == 0


@pytest.mark.parametrize("pad", [0, 2])
@pytest.mark.parametrize("common", [0, 1, 5, 9])
def test_a_view_with_copies_gathers_of_the_next_row_only_what_it_has_not_in_common_with_the_last(
    common: int, pad: int
) -> None:
    bench = Bench(WITH_COPIES)
    bench.start([row_of(9, pad)])
    bench.forward(0)
    bench.view.keep(bench.layouts(bench.rows))
    bench.start([NaiveRow(b"root", pad, (*range(common), *range(100, 112)))])
    bench.forward(pad + 11)
    assert bench.num_gathered() == 11 - common


def test_a_view_with_copies_keeps_nothing_of_rows_that_ran_before_the_last() -> None:
    bench = Bench(WITH_COPIES)
    bench.start([row_of(9)])
    bench.forward(0)
    bench.view.keep(bench.layouts(bench.rows))
    bench.start([row_of(9, first=50)])
    bench.forward(0)
    bench.start([row_of(9)])
    bench.forward(8)
    assert bench.num_gathered() == 8


@pytest.mark.parametrize("other", [row_of(12, root=b"other"), row_of(11, pad=1)], ids=["root", "padding"])
def test_a_view_with_copies_keeps_nothing_for_a_row_of_another_root_or_padding(other: NaiveRow) -> None:
    bench = Bench(WITH_COPIES)
    bench.start([row_of(9)])
    bench.forward(0)
    bench.view.keep(bench.layouts(bench.rows))
    bench.start([other])
    bench.forward(11)
    assert bench.num_gathered() == 11  # the padding, too: what lay there may not be finite


@pytest.mark.parametrize("when", ["before keep", "after keep"])
def test_a_view_with_copies_keeps_nothing_that_was_dropped(when: str) -> None:
    """Rows that were rolled back or chosen among live on in the pool alone."""
    bench = Bench(WITH_COPIES)
    bench.start([row_of(9)])
    bench.forward(0)
    if when == "before keep":
        bench.view.drop()
    bench.view.keep(bench.layouts(bench.rows))
    if when == "after keep":
        bench.view.drop()
    bench.start([row_of(9)])
    bench.forward(8)
    assert bench.num_gathered() == 8


def test_a_view_with_copies_keeps_no_columns_that_were_taken_back() -> None:
    bench = Bench(WITH_COPIES)
    bench.start([row_of(9)])
    bench.forward(0)
    bench.view.crop(4, bench.num_columns)
    bench.view.keep(bench.layouts([row_of(4)]))
    bench.start([NaiveRow(b"root", 0, (0, 1, 2, 3, 70, 71, 72))])
    bench.forward(6)
    assert bench.num_gathered() == 2


def test_a_view_with_copies_gathers_once_for_all_layers_what_a_column_lacks_and_never_again() -> None:
    bench = Bench(WITH_COPIES)
    bench.start([row_of(9), row_of(9, first=50)])
    bench.forward(8)
    assert sorted(bench.gathers) == [(0, 8), (0, 8), (1, 8), (1, 8)]
    bench.gathers.clear()
    bench.extend([[1], [2]])
    bench.forward(9)
    assert bench.gathers == []


@pytest.mark.parametrize("end", ["pause", "drop"])
def test_a_gathering_view_gives_the_memory_of_its_copies_back(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged_cache.kv.recycled_memory._MIN_RECYCLED_BYTES", 1)
    bench = Bench(GATHER)
    bench.start([row_of(9)])
    with torch.no_grad():
        bench.forward(8)
    assert bench.view.num_bytes > 0
    getattr(bench.view, end)()
    assert bench.view.num_bytes == 0


def test_a_gathering_view_keeps_no_bytes_and_a_view_with_copies_says_how_many_it_holds() -> None:
    for make_view, holds in ((GATHER, False), (WITH_COPIES, True)):
        bench = Bench(make_view)
        bench.start([row_of(9)])
        assert bench.view.num_bytes == 0
        bench.forward(0)
        assert (bench.view.num_bytes > 0) == holds
        bench.view.drop()
        assert bench.view.num_bytes == 0


def test_a_view_with_copies_that_knows_how_far_its_rows_go_is_made_no_larger_and_does_not_move() -> None:
    bench = Bench(WITH_COPIES)
    bench.start([row_of(9)], max_rows=1, max_columns=12)
    bench.forward(0)
    expected = len(LAYERS) * HEADS * sum(SIZES.values()) * 12 * 4
    assert bench.view.num_bytes == expected
    for _ in range(3):
        bench.extend([[1]])
        bench.forward(bench.num_columns)
    assert bench.view.num_bytes == expected
    bench.extend([[1]])  # further than was said
    bench.forward(12)


def test_nothing_is_kept_of_a_forward_that_computes_all_that_its_call_reads() -> None:
    bench = Bench(WITH_COPIES, windows={1: 4})
    bench.start([row_of(9)], max_columns=9)
    bench.forward(0)
    assert bench.view.num_bytes == 0
    for _ in range(3):  # the rows may resume all the same
        bench.extend([[1]])
        bench.forward(bench.num_columns)
    assert bench.view.num_bytes > 0


def test_a_view_with_copies_far_larger_than_what_comes_is_given_up() -> None:
    bench = Bench(WITH_COPIES)
    bench.start([row_of(1000)], max_rows=1, max_columns=1100)
    bench.forward(0)
    large = bench.view.num_bytes
    bench.start([row_of(9)], max_rows=1, max_columns=20)
    bench.forward(0)
    assert bench.view.num_bytes < large / 10


# What attention gets


def attended(bench: Bench, new: dict[str, torch.Tensor], start: int) -> dict[str, torch.Tensor]:
    """What attention gets of layer 0: with gradients on, `GradientPath` puts `new` itself into what the view gave."""
    return GradientPath().join(0, new, bench.view.read(0, new), start)


@BOTH
@pytest.mark.parametrize("start", [0, 5])
def test_gradients_flow_to_the_new_states_and_the_past_is_constant(make_view: Any, start: int) -> None:
    bench = Bench(make_view)
    bench.start([row_of(9)])
    bench.view.start_forward(Forward(lambda: bench.layouts(bench.rows), len(bench.rows), start, 9))
    new = {name: tensor.requires_grad_() for name, tensor in bench.new_states(0, start, 9).items()}
    got = attended(bench, new, start)
    for name in SIZES:
        assert got[name].detach()[0].equal(states_of(bench.rows[0], 0, name, 0, 9))
        got[name].sum().backward()
        gradient = new[name].grad
        assert gradient is not None
        assert gradient.equal(torch.ones_like(gradient))


def test_what_a_view_with_copies_gave_with_gradients_is_not_changed_by_the_next_forward() -> None:
    """Autograd saved it: an in-place write would make `backward` fail or, worse, wrong."""
    bench = Bench(WITH_COPIES)
    bench.start([row_of(9)])
    bench.view.start_forward(Forward(lambda: bench.layouts(bench.rows), len(bench.rows), 5, 9))
    new = {name: tensor.requires_grad_() for name, tensor in bench.new_states(0, 5, 9).items()}
    got = attended(bench, new, 5)
    loss = (got["key"] ** 2).sum()
    bench.extend([[1]])
    bench.forward(9, layers=[0])
    loss.backward()
    assert new["key"].grad is not None
    assert new["key"].grad.equal(2 * new["key"].detach())


@BOTH
def test_a_later_forward_sends_no_gradient_into_states_that_were_copied_before(make_view: Any) -> None:
    bench = Bench(make_view)
    bench.start([row_of(9)])
    given = []
    for start, stop in ((0, 8), (8, 9)):
        bench.view.start_forward(Forward(lambda: bench.layouts(bench.rows), 1, start, stop))
        given.append({name: tensor.requires_grad_() for name, tensor in bench.new_states(0, start, stop).items()})
        got = attended(bench, given[-1], start)
    sum(tensor.sum() for tensor in got.values()).backward()
    assert all(tensor.grad is None for tensor in given[0].values())
    assert all(tensor.grad is not None for tensor in given[1].values())


@pytest.mark.parametrize(("make_view", "gradients"), [(WITH_COPIES, True), (GATHER, True), (GATHER, False)])
def test_what_a_first_forward_reads_is_contiguous_as_a_dynamic_cache_leaves_it(make_view: Any, gradients: bool) -> None:
    bench = Bench(make_view)
    bench.start([row_of(9)])
    bench.view.start_forward(Forward(lambda: bench.layouts(bench.rows), 1, 0, 9))
    new = {
        name: states.transpose(1, 2).contiguous().transpose(1, 2) for name, states in bench.new_states(0, 0, 9).items()
    }
    with torch.set_grad_enabled(gradients):
        got = attended(bench, new, 0)
    for name, states in new.items():
        assert not states.is_contiguous()
        assert got[name].is_contiguous()
        assert got[name].equal(states)


@BOTH
@pytest.mark.parametrize("gradients", [True, False])
def test_a_view_gives_the_type_of_what_is_new_whatever_the_pool_holds(make_view: Any, gradients: bool) -> None:
    bench = Bench(make_view)  # its pool is float32
    bench.start([row_of(9)])
    for start, dtype in ((8, torch.bfloat16), (0, torch.bfloat16), (7, torch.float32), (8, torch.float16)):
        bench.view.start_forward(Forward(lambda: bench.layouts(bench.rows), len(bench.rows), start, 9))
        new = {name: tensor.to(dtype) for name, tensor in bench.new_states(0, start, 9).items()}
        with torch.set_grad_enabled(gradients):
            got = attended(bench, new, start)
        for name in SIZES:
            assert got[name].dtype == dtype
            assert got[name][0].equal(states_of(bench.rows[0], 0, name, 0, 9).to(dtype))  # rounded once, from the pool


@pytest.mark.parametrize("attention", ["paged", "gather"])
def test_a_model_whose_type_changes_between_calls_computes_what_it_would_without_a_cache(
    attention: str, model: PreTrainedModel
) -> None:
    """The pool keeps the widest type that it has held."""
    cache = PagedPrefixCache(model, attention=attention)
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
        model.to(dtype)
        for tokens in (PROMPT, [*PROMPT[:45], 7, 8]):
            wanted, got = (run(model, held, **batch(tokens), max_new_tokens=2).logits[0] for held in (None, cache))
            assert got.dtype == wanted.dtype
            # processors round otherwise: up to 9.4 of these were seen
            assert (got - wanted).abs().max() <= 16 * torch.finfo(dtype).eps * wanted.abs().max()
        assert cache.last_call.reused_tokens >= 45
    zero_blocks(cache)
    got = run(model, cache, **batch([*PROMPT[:45], 7, 8])).logits[0]
    assert (got - wanted).abs().max() > 0.2 * wanted.abs().max()
    cache.check()


@BOTH
def test_a_view_works_across_the_border_of_inference_mode(make_view: Any) -> None:
    bench = Bench(make_view)
    with torch.inference_mode():
        bench.start([row_of(9)])
        bench.forward(4)
    for inside in (False, True, False):
        bench.extend([[1]])
        with torch.inference_mode(inside):
            bench.forward(bench.num_columns)
        bench.view.select([0], 0)


def test_what_somebody_keeps_of_a_layer_is_not_overwritten_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hf_paged_cache.kv.recycled_memory._MIN_RECYCLED_BYTES", 1)  # small memory, too
    bench = Bench(GATHER)
    bench.start([row_of(40)])
    bench.forward(0)
    bench.view.start_forward(Forward(lambda: bench.layouts(bench.rows), 1, 39, 40))
    with torch.no_grad():
        kept = bench.view.read(0, bench.new_states(0, 39, 40))
        before = {name: states.clone() for name, states in kept.items()}
        for layer_idx in (1, 1):
            bench.view.read(layer_idx, bench.new_states(layer_idx, 39, 40))
    for name, states in kept.items():
        assert states.any()
        assert states.equal(before[name])


def test_windows_that_an_interrupt_kept_from_being_followed_leave_those_of_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, made = Bench(WITH_COPIES, windows={1: 4}), list[Any]()
    bench.start([row_of(9)])
    bench.forward(0)

    class Interrupted(group_columns.GroupColumns):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)
            if len(made) == 2:
                raise KeyboardInterrupt

    monkeypatch.setattr(view_module, "GroupColumns", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench.view.follow({1: Window(5)}, "sdpa")
    bench.view.follow({1: Window(4)}, "sdpa")
    bench.extend([[1]])
    bench.forward(9)  # compares
