"""Block tables on a device are those of the rows, whatever the rows did; and a read finds its columns through them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest
import torch

from hf_paged_cache.kv.block_tables import BlockTables, read_source
from hf_paged_cache.kv.slot_mapping import ReadSource, RowLayout
from hf_paged_cache.kv.transfers import Transfer

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def row_of(pad: int, *block_ids: int) -> RowLayout:
    return RowLayout(b"", pad, array("q"), list(block_ids))


def slots_of(row: RowLayout, start: int, stop: int) -> list[int]:
    """Of columns that are tokens; -1 for padding."""
    positions = [column - row.pad for column in range(start, stop)]
    return [row.block_ids[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE if i >= 0 else -1 for i in positions]


def read(source: ReadSource) -> list[list[int]]:
    """The slots that a source takes, [R, C]."""
    index = source.index_for(1, BLOCK_SIZE, CPU).view(source.num_rows, -1)
    if not source.by_block:
        return index.tolist()
    slots = (index[..., None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1)
    assert slots.shape[1] == source.num_slots(BLOCK_SIZE)
    return slots[:, source.skipped : source.skipped + source.num_columns].tolist()


def check(source: ReadSource, rows: Sequence[RowLayout], start: int, stop: int) -> None:
    assert (source.num_rows, source.num_columns) == (len(rows), stop - start)
    for found, row in zip(read(source), rows, strict=True):
        expected = slots_of(row, start, stop)
        assert [slot if slot_there >= 0 else -1 for slot, slot_there in zip(found, expected, strict=True)] == expected
        # the null block
        assert all(slot < BLOCK_SIZE for slot, wanted in zip(found, expected, strict=True) if wanted < 0)


@pytest.mark.parametrize(
    ("pads", "by_block"),
    [((0,), True), ((3,), True), ((0, 0), True), ((2, 6), True), ((0, 2), False), ((7, 7, 3), True), ((1, 4), False)],
)
def test_columns_are_read_by_block_where_all_rows_agree_and_as_slots_are_either_way(
    pads: tuple[int, ...], by_block: bool
) -> None:
    rows = [row_of(pad, 5 * n + 1, 5 * n + 4, 5 * n + 2, 5 * n + 3) for n, pad in enumerate(pads)]
    last = min(pads) + 4 * BLOCK_SIZE
    for stop in range(max(pads) + 1, last + 1):
        for start in range(stop):
            source = read_source(rows, start, stop, BLOCK_SIZE)
            assert source.by_block == by_block
            check(source, rows, start, stop)


@pytest.mark.parametrize("pads", [(0, 3), (3, 4), (4, 8), (9, 9)])
def test_a_row_of_padding_alone_reads_the_null_block(pads: tuple[int, int]) -> None:
    rows = [row_of(pad, *([7] if pad == 0 else [])) for pad in pads]
    check(read_source(rows, 0, 3, BLOCK_SIZE), rows, 0, 3)


class Counting(Transfer):
    """Knows how much it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def add(self, numbers: Sequence[int]) -> int:
        self.sizes.append(len(numbers))
        return super().add(numbers)


@pytest.mark.parametrize("pads", [(0,), (0, 0, 8), (0, 1, 6)])
@pytest.mark.parametrize("seed", range(6))
def test_tables_are_those_of_the_rows_whatever_they_did(pads: tuple[int, ...], seed: int) -> None:
    chance = random.Random(seed)
    tables, num_columns = BlockTables(BLOCK_SIZE), max(pads) + 1
    rows = [row_of(pad) for pad in pads]

    def grow() -> None:
        for row in rows:
            while len(row.block_ids) * BLOCK_SIZE < num_columns - row.pad:
                row.block_ids.append(chance.randrange(1, 1000))

    grow()
    for _ in range(120):
        event = chance.choice(["step", "step", "step", "leap", "copy", "reorder", "commit", "crop", "pad", "drop"])
        if event in ("step", "leap"):
            num_columns += 1 if event == "step" else 70
        elif event == "copy":
            for row in rows:
                row.block_ids[-1] = chance.randrange(1, 1000)
        elif event == "reorder":
            chosen = [list(chance.choice(rows).block_ids) for _ in rows]
            rows = [row._replace(block_ids=block_ids) for row, block_ids in zip(rows, chosen, strict=True)]
        elif event == "commit":
            block_ids = chance.choice(rows).block_ids
            block_ids[chance.randrange(len(block_ids))] = chance.randrange(1, 1000)
        elif event == "crop":
            num_columns = max(max(pads) + 1, num_columns - chance.randrange(20))
            for row in rows:
                del row.block_ids[-(-(num_columns - row.pad) // BLOCK_SIZE) :]
        elif event == "pad":
            number = chance.randrange(len(rows))
            rows[number] = rows[number]._replace(pad=chance.choice(pads))
        elif event == "drop":
            tables.drop()
        grow()
        tables.update(rows, Transfer())
        if chance.random() < 0.8:  # else this device does not ask this time
            check(tables.columns(0, num_columns), rows, 0, num_columns)


def test_what_is_new_goes_to_a_device_and_nothing_else() -> None:
    tables = BlockTables(BLOCK_SIZE)
    rows = [row_of(0, *range(1, 40)), row_of(8, *range(101, 138)), row_of(0, *range(201, 240))]

    def sent() -> list[int]:
        transfer = Counting()
        tables.update(rows, transfer)
        check(tables.columns(0, 39 * BLOCK_SIZE), rows, 0, 39 * BLOCK_SIZE)
        return transfer.sizes

    assert sent() == [3 * 40, 3]  # entries, one for what comes before the first column among them; and padding
    assert sent() == []
    for row in rows:
        row.block_ids.append(300)
    assert sent() == [3, 3]  # places and block ids
    rows[1].block_ids[-2:] = [301, 302]
    assert sent() == []  # two go along with launches
    rows[0] = rows[0]._replace(pad=4)
    assert sent() == [3 * 42, 3]


def test_a_row_alone_sends_its_table_once() -> None:
    tables, row = BlockTables(BLOCK_SIZE), row_of(5, 1)
    for block_id in range(2, 100):
        transfer = Counting()
        tables.update([row], transfer)
        num_columns = row.pad + len(row.block_ids) * BLOCK_SIZE
        check(tables.columns(0, num_columns), [row], 0, num_columns)
        assert (transfer.sizes == []) == (block_id > 2)
        row.block_ids.append(block_id)


@pytest.mark.parametrize("second", [[4], [1, 2]])
def test_tables_that_were_made_in_inference_mode_are_written_outside_of_it(second: list[int]) -> None:
    tables, row = BlockTables(BLOCK_SIZE), row_of(0, 1)
    for block_ids, is_inference in [([1], True), (second, False), ([5, 2, 3], True), ([4, 5, 6], False)]:
        row.block_ids[:] = block_ids
        with torch.inference_mode(is_inference):
            tables.update([row], Transfer())
            num_columns = len(block_ids) * BLOCK_SIZE
            check(tables.columns(0, num_columns), [row], 0, num_columns)
