"""Random trees of rows that share blocks, read once, against eager attention over what each row's tokens say."""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import ref

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_paged_cache.attention import backends, shared, shared_reads
from hf_paged_cache.attention.group_columns import Forward
from hf_paged_cache.attention.lazy import LazyStates, as_dense
from hf_paged_cache.attention.segments import Plan, Segment
from hf_paged_cache.attention.view import View
from hf_paged_cache.kv.block_pool import BlockPool
from hf_paged_cache.kv.slot_mapping import RowLayout, SlotMapping

from ..internals import split_everywhere

LAYERS = (0, 1)
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Row(NamedTuple):
    pad: int
    tokens: tuple[int, ...]


class Bench:
    """A pool in which equal prefixes lie in the same blocks, a view that reads once, and rows that a forward appends to."""

    def __init__(self, seed: int, *, keeps_copies: bool = True) -> None:
        self.random = random.Random(seed)
        self.size = self.random.choice([2, 4, 8])
        self.heads = self.random.choice([1, 2, 3])
        self.groups = self.random.choice([1, 2, 3, 5])
        self.head_dim = self.random.choice([8, 16, 24])
        self.dtype = self.random.choice([torch.float32] * 3 + [torch.float64, torch.float16, torch.bfloat16])
        self.table = torch.randn(997, self.heads, 2, self.head_dim, generator=torch.Generator().manual_seed(seed))
        self.pool = BlockPool(self.size)
        self.pool.all.ensure_capacity(4000)
        self.view = View(self.pool, {}, keeps_copies=keeps_copies)
        self.rows: list[Row] = []
        self.num_columns = 0
        self.num_read_once = 0
        self._block_of: dict[tuple[int, ...], int] = {}
        self._num_blocks = 0

    def states(self, tokens: Sequence[int], layer_idx: int, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [H, tokens, D], of the tokens from `first` on: each depends on all up to it."""
        digests = [*accumulate(tokens, lambda before, token: zlib.crc32(bytes([token]), before), initial=layer_idx)]
        found = self.table[[digest % 997 for digest in digests[first + 1 :]]].permute(2, 1, 0, 3).to(self.dtype)
        return found[0], found[1]

    def layouts(self) -> list[RowLayout]:
        """The rows in their blocks: full ones are shared by all rows that have the tokens up to their ends."""
        found = []
        for row in self.rows:
            ids = []
            for first in range(0, len(row.tokens), self.size):
                upto = row.tokens[: first + self.size]
                is_full = len(upto) == first + self.size
                block = self._block_of.get(upto) if is_full else None
                if block is None:
                    self._num_blocks += 1
                    block = self._num_blocks
                    if is_full:
                        self._block_of[upto] = block
                    for layer_idx in LAYERS:
                        key, value = self.states(upto, layer_idx, first)
                        slots = [block * self.size + i for i in range(len(upto) - first)]
                        self.pool.write(layer_idx, {"key": key[None], "value": value[None]}, SlotMapping(slots))
                ids.append(block)
            found.append(RowLayout(b"", row.pad, array("q", row.tokens), ids))
        return found

    def start(self, rows: list[Row]) -> None:
        self.rows, self.num_columns = rows, 0
        stop = rows[0].pad + len(rows[0].tokens)
        self.view.start_rows(self.layouts(), stop, max_rows=len(rows), max_columns=float("inf"))

    def forward(self, start: int, *, looks: bool = False) -> None:
        """The columns `[start, all)` of the rows, whose attention must be what eager attention gives.

        Args:
            looks: the model does something else with what it reads.
        """
        stop = self.rows[0].pad + len(self.rows[0].tokens)
        with torch.no_grad():
            self.view.start_forward(Forward(self.layouts, len(self.rows), start, stop))
        mask = self._mask(start, stop)
        for layer_idx in LAYERS:
            whole = [self._whole(row, layer_idx, stop) for row in self.rows]
            key, value = torch.stack([k for k, _ in whole]), torch.stack([v for _, v in whole])
            new = {"key": key[:, :, start:].contiguous(), "value": value[:, :, start:].contiguous()}
            with torch.no_grad():
                read = self.view.read(layer_idx, new)
            query = torch.randn(len(self.rows), self.heads * self.groups, stop - start, self.head_dim).to(self.dtype)
            if looks:
                torch.testing.assert_close(read["key"] * 1, key, rtol=0, atol=0)
                torch.testing.assert_close(read["value"] * 1, value, rtol=0, atol=0)
            else:
                self.num_read_once += self._require(query, key, value, read, mask, start)
        self.num_columns = stop

    def _whole(self, row: Row, layer_idx: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        padding = torch.zeros(self.heads, row.pad, self.head_dim, dtype=self.dtype)
        key, value = self.states(row.tokens, layer_idx, 0)
        return torch.cat([padding, key], 1)[:, :stop], torch.cat([padding, value], 1)[:, :stop]

    def _mask(self, start: int, stop: int) -> torch.Tensor:
        columns, queries = torch.arange(stop), torch.arange(start, stop)[:, None]
        return torch.stack([(columns <= queries) & (columns >= row.pad) for row in self.rows])[:, None]

    def _require(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        read: dict[str, torch.Tensor],
        mask: torch.Tensor,
        start: int,
    ) -> bool:
        """Attention over what was read gives what eager attention gives; returns whether it was read once."""
        is_lazy = isinstance(read["key"], LazyStates)
        is_read_once = is_lazy and isinstance(read["key"]._reads, shared_reads._LayerReads)
        exact = [states.repeat_interleave(self.groups, 1).double() for states in (key, value)]
        scores = (query.double() @ exact[0].transpose(2, 3) / self.head_dim**0.5).masked_fill(~mask, -float("inf"))
        wanted = scores.softmax(-1) @ exact[1]
        given: torch.Tensor | None = mask
        kind = self.random.choice(["bool", "float", "packed", "repeated"])
        if kind == "float":
            given = torch.zeros(mask.shape, dtype=self.dtype).masked_fill(~mask, torch.finfo(self.dtype).min)
        if query.shape[2] == 1 and not any(row.pad for row in self.rows) and self.random.random() < 0.5:
            given = None
        with torch.no_grad():
            if kind == "packed" and query.shape[2] == 1:
                packed = query.view(len(self.rows), self.heads, self.groups, -1)
                got = scaled_dot_product_attention(packed, read["key"], read["value"], attn_mask=given).reshape(
                    query.shape
                )
            elif kind == "repeated":
                shape = (*key.shape[:2], self.groups, *key.shape[2:])
                repeated = [
                    states[:, :, None, :, :].expand(shape).reshape(shape[0], -1, *shape[3:]).contiguous()
                    for states in (read["key"], read["value"])
                ]
                assert all(isinstance(states, LazyStates) for states in repeated) == is_lazy
                got = scaled_dot_product_attention(query, *repeated, attn_mask=given)
            else:
                got = scaled_dot_product_attention(
                    query, read["key"], read["value"], attn_mask=given, enable_gqa=self.groups > 1
                )
        are_tokens = mask.any(-1).expand(query.shape[:3])
        assert got.dtype == query.dtype
        assert bool(got.isfinite().all()) or not is_read_once
        tolerance = TOLERANCE[self.dtype] * max(1.0, float(wanted[are_tokens].abs().max()))
        torch.testing.assert_close(got.double()[are_tokens], wanted[are_tokens], rtol=0, atol=tolerance)
        return is_read_once

    def append(self, num: int) -> None:
        """Tokens to all rows; few words, so that rows resume sharing here and there."""
        self.rows = [row._replace(tokens=row.tokens + self.words(num)) for row in self.rows]

    def words(self, num: int) -> tuple[int, ...]:
        return tuple(self.random.choices(range(3), k=num))


def a_tree(bench: Bench) -> list[Row]:
    """Rows of one length with padding: prefixes of prefixes, each with a text of its own, in any order; one may share nothing."""
    draw = bench.random
    trunk = bench.words(draw.randrange(0, 40))
    texts = []
    for _ in range(draw.randrange(1, 4)):
        branch = trunk + bench.words(draw.randrange(0, 20))
        texts += [branch + bench.words(draw.randrange(1, 9)) for _ in range(draw.randrange(1, 5))]
    if draw.random() < 0.3:
        texts.append((9, *bench.words(draw.randrange(1, 60))))
    draw.shuffle(texts)
    columns = max(map(len, texts)) + draw.choice([0, 0, 3])
    return [Row(columns - len(text), text) for text in texts]


def play(seed: int) -> Bench:
    """Some calls, with everything that happens between two forwards."""
    bench = Bench(seed, keeps_copies=seed % 3 > 0)
    draw = bench.random
    for _ in range(3):
        bench.start(a_tree(bench))
        columns = bench.rows[0].pad + len(bench.rows[0].tokens)
        start = draw.choice([columns - 1, draw.randrange(columns)])
        bench.forward(start)
        for _ in range(draw.randrange(1, 8)):
            happens = draw.choice(["step", "step", "step", "several", "crop", "reorder", "multiply", "fewer"])
            if happens == "crop":
                kept = draw.randrange(max(row.pad for row in bench.rows), bench.num_columns)
                bench.rows = [row._replace(tokens=row.tokens[: max(0, kept - row.pad)]) for row in bench.rows]
                bench.view.crop(kept, bench.num_columns)
                bench.num_columns = kept
            elif happens == "reorder":
                sources = draw.choices(range(len(bench.rows)), k=len(bench.rows))
                bench.rows = [bench.rows[source] for source in sources]
                bench.view.select(sources)
            elif happens == "multiply":
                sources = sorted([*range(len(bench.rows)), draw.randrange(len(bench.rows))])
                bench.rows = [bench.rows[source] for source in sources]
                bench.view.select(sources)
            elif happens == "fewer":
                bench.rows = bench.rows[: max(1, len(bench.rows) - 1)]
                bench.view.drop()
            bench.append(draw.randrange(2, 6) if happens == "several" else 1)
            bench.forward(bench.num_columns)
        bench.view.keep([])
    return bench


def play_all(seeds: Iterable[int]) -> int:
    """How many layers were read once in all of them."""
    return sum(play(seed).num_read_once for seed in seeds)


@pytest.fixture(autouse=True)
def one_block_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    split_everywhere(monkeypatch)


def test_random_trees_of_rows_are_read_as_eager_attention_reads_them() -> None:
    assert play_all(range(40)) > 200


def _shifted(found: Plan | None) -> Plan | None:
    """Each segment's first block is another."""
    if found is None:
        return None
    return found._replace(
        segments=tuple(s._replace(block_ids=(s.block_ids[0] + 1, *s.block_ids[1:])) for s in found.segments)
    )


def _without_the_last_row(found: Plan | None) -> Plan | None:
    if found is None:
        return None
    return found._replace(segments=tuple(Segment(s.rows[:-1] or s.rows, s.start, s.block_ids) for s in found.segments))


def _one_off(found: Plan | None) -> Plan | None:
    return None if found is None else found._replace(ends=tuple(end + 1 for end in found.ends))


def _changed(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda made: lambda *args: change(made(*args))


def _all_hidden(made: Any) -> Any:
    """Every tail's first row sees nothing of it."""

    def look(*args: Any) -> tuple[bool, torch.Tensor | None]:
        fits, mask = made(*args)
        if mask is not None:
            mask[0] = -float("inf")
        return fits, mask

    return look


BREAKS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "a shifted table": (shared_reads, "find_segments", _changed(_shifted)),
    "a row that lacks its segment": (shared_reads, "find_segments", _changed(_without_the_last_row)),
    "a mask one off": (shared_reads, "find_segments", _changed(_one_off)),
    "a row whose tail is hidden": (shared.SharedForward, "_look", _all_hidden),
    "a merge by halves": (
        shared,
        "merge",
        lambda _: lambda a, b: ((a[0] + b[0]) / 2, torch.logaddexp(a[1], b[1])),
    ),
    "a merge that forgets how much it weighs": (shared, "merge", lambda made: lambda a, b: (made(a, b)[0], a[1])),
    "an lse to base 2": (
        shared,
        "attend",
        lambda made: lambda *args: (made(*args)[0], made(*args)[1] * 1.4427),
    ),
    "zeros in segments": (
        shared_reads.SharedReads,
        "_held",
        lambda made: lambda *args: [states * 0 for states in made(*args)],
    ),
    "a plan of rows that ran before": (
        shared_reads.SharedReads,
        "require_of",
        lambda made: lambda *args: None,
    ),
    "queries of the wrong rows": (
        shared,
        "_take",
        lambda made: lambda states, rows, _: made(states, rows, torch.zeros(len(rows), dtype=torch.int64)),
    ),
}


@pytest.mark.parametrize("broken", [*BREAKS])
def test_random_trees_show_what_is_wrong(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake on one seed of a few at least."""
    owner, name, change = BREAKS[broken]
    monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    with pytest.raises(AssertionError):
        play_all(range(25))


def test_a_model_that_looks_gets_what_the_rows_say_and_is_read_row_by_row_from_then_on() -> None:
    bench = Bench(1)
    prefix = bench.words(40)
    bench.start([Row(0, (*prefix, *bench.words(5))) for _ in range(4)])
    bench.forward(42, looks=True)
    bench.append(1)
    bench.forward(45)
    assert bench.num_read_once == 0
    assert bench.view._shared.num_bytes == 0
    bench.start([Row(0, (*prefix, *bench.words(5))) for _ in range(4)])
    bench.forward(42)
    assert bench.num_read_once == 0


@pytest.mark.parametrize("what", ["dropout", "a mask of heads", "a mask that hides a token", "a mask of the future"])
def test_a_call_that_asks_for_more_is_dense_until_other_rows_run(what: str) -> None:
    bench = Bench(3)
    bench.dtype = torch.float32
    prefix = bench.words(40)
    rows = [Row(0, (*prefix, *bench.words(5))) for _ in range(4)]
    bench.start(rows)
    start, stop = 42, 45
    with torch.no_grad():
        bench.view.start_forward(Forward(bench.layouts, 4, start, stop))
    whole = [bench._whole(row, 0, stop) for row in rows]
    key, value = torch.stack([k for k, _ in whole]), torch.stack([v for _, v in whole])
    query = torch.randn(4, bench.heads, stop - start, bench.head_dim)
    mask, given = bench._mask(start, stop), {}
    if what == "dropout":
        given = {"dropout_p": 1.0}
    elif what == "a mask of heads":
        mask = mask.expand(4, bench.heads, -1, -1)
    elif what == "a mask that hides a token":
        mask = mask.clone()
        mask[2, :, :, 7] = False
    else:
        mask = mask.clone()
        mask[:, :, 0, stop - 1] = True
    with torch.no_grad():
        read = bench.view.read(0, {"key": key[:, :, start:], "value": value[:, :, start:]})
        assert isinstance(read["key"], LazyStates)
        got = scaled_dot_product_attention(query, read["key"], read["value"], attn_mask=mask, **given)
        wanted = scaled_dot_product_attention(query, key, value, attn_mask=mask, **given)
    torch.testing.assert_close(got, wanted)
    if what != "a mask of the future":  # of its own tail a row may see what it is shown
        bench.rows, bench.num_columns = rows, stop
        bench.append(1)
        bench.forward(stop)
        assert bench.num_read_once == 0
    bench.start([Row(0, (*prefix, *bench.words(5))) for _ in range(4)])
    bench.forward(42)
    assert bench.num_read_once > 0


def test_with_gradients_on_what_is_read_is_dense() -> None:
    bench = Bench(5)
    rows = [Row(0, (*bench.words(40), 1, 2))] * 3
    bench.start(rows)
    with torch.no_grad():
        bench.view.start_forward(Forward(bench.layouts, 3, 40, 42))
    whole = [bench._whole(row, 0, 42) for row in rows]
    key = torch.stack([k for k, _ in whole])
    read = bench.view.read(0, {"key": key[:, :, 40:], "value": key[:, :, 40:]})
    assert not isinstance(read["key"], LazyStates)
    torch.testing.assert_close(read["key"], key)


def test_a_segment_whose_blocks_follow_one_another_is_read_where_it_lies_also_after_the_pool_has_grown() -> None:
    bench = Bench(2)
    bench.dtype = torch.float32
    prefix = bench.words(40)
    bench.start([Row(0, (*prefix, *bench.words(5))) for _ in range(4)])
    bench.forward(42)
    before = ref(bench.pool.layer(0)["key"])
    bench.pool.all.ensure_capacity(5000)
    assert before() is None
    bench.append(1)
    bench.forward(45)
    assert bench.num_read_once == 2 * len(LAYERS)
    assert bench.view._shared.num_bytes == 0


def test_a_row_alone_is_never_split() -> None:
    bench = Bench(4)
    bench.start([Row(0, bench.words(60))])
    bench.forward(50)
    bench.append(1)
    bench.forward(60)
    assert bench.num_read_once == 0


def test_what_is_kept_beside_the_pool_is_one_copy_of_the_shared_run_and_tails() -> None:
    bench = Bench(6)
    bench.heads, bench.dtype = 2, torch.float32
    bench.table = torch.randn(997, 2, 2, bench.head_dim)
    prefix = bench.words(64 * bench.size)
    rows = [Row(0, (*prefix, *bench.words(3))) for _ in range(8)]
    bench.start(rows)
    bench.view._max_columns = len(prefix) + 8
    bench.forward(len(prefix))
    token = 2 * len(LAYERS) * bench.heads * bench.head_dim * 4
    assert bench.view.num_bytes <= (len(prefix) + 8 * 8) * token + bench.view._memory.num_bytes


def test_parts_are_the_same_by_every_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    for groups, length, key_length in ((1, 1, 7), (3, 1, 40), (2, 5, 33)):
        query = torch.randn(2, 2 * groups, length, 16)
        mask = torch.zeros(2, 1, length, key_length).masked_fill(torch.rand(2, 1, length, key_length) < 0.3, -1e30)
        part = backends.Part(torch.randn(2, 2, key_length, 16), torch.randn(2, 2, key_length, 16), mask)
        for scale in (None, 0.3):
            flash, plain = backends.by_flash_of_cpu(query, part, scale), backends.by_operators(query, part, scale)
            torch.testing.assert_close(flash, plain)
            with monkeypatch.context() as patch:
                patch.setattr(backends, "_MOST_SCORES", 2 * 4 * groups * key_length)  # two queries at a time
                torch.testing.assert_close(backends.by_operators(query, part, scale), plain)
            left = backends.Part(part.key[:, :, :3], part.value[:, :, :3])
            right = backends.Part(part.key[:, :, 3:], part.value[:, :, 3:])
            whole = backends.attend(query, part._replace(mask=None), scale)
            merged = backends.merge(backends.attend(query, left, scale), backends.attend(query, right, scale))
            torch.testing.assert_close(merged, whole)


class FusedOfCuda:
    """Torch's fused kernels for CUDA, on a CPU: called as their schemas say, and held to what they take."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        for name in ("flash", "efficient"):
            packet = f"_scaled_dot_product_{name}_attention"
            schema = getattr(torch.ops.aten, packet).default._schema
            patch.setattr(torch.ops.aten, packet, partial(self._compute, name, schema), raising=False)
        patch.setattr(backends, "_has_flash", lambda device: True)

    def _compute(self, name: str, schema: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, None]:
        names = [argument.name for argument in schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        assert given.keys() <= {*names}
        query, key, value, mask = (given.get(each) for each in ("query", "key", "value", "attn_bias"))
        assert query.shape[:2] == key.shape[:2]
        assert query.shape[3] % 8 == 0
        assert given.get("dropout_p", 0.0) == 0.0
        assert not given.get("is_causal", False)
        self.asked.append(name)
        if name == "flash":
            assert query.dtype in (torch.float16, torch.bfloat16)
            assert query.shape[3] <= 256
        else:
            assert given["compute_log_sumexp"]
        if mask is not None:
            assert (mask.shape, mask.dtype) == ((*query.shape[:3], key.shape[2]), query.dtype)
            rows = [mask[:, head : head + 1] for head in range(key.shape[1])]  # heads of a part share its mask
            assert all(row.equal(rows[0]) for row in rows)
            mask = rows[0]
        out, lse = backends.by_operators(query, backends.Part(key, value, mask), given.get("scale"))
        filled = torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=torch.nan) if name == "efficient" else lse
        return out, filled, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 20, 264])
def test_fused_kernels_of_cuda_are_asked_for_what_they_compute(
    head_dim: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    fused = FusedOfCuda(monkeypatch)
    for groups, length, columns in ((1, 1, 7), (3, 1, 40), (2, 5, 33)):
        query = torch.randn(2, 2 * groups, length, head_dim).to(dtype)
        hidden = (torch.rand(2, 1, length, columns) < 0.3) & (torch.arange(columns) > 0)
        for mask in (None, torch.zeros(2, 1, length, columns, dtype=dtype).masked_fill(hidden, -torch.inf)):
            key, value = torch.randn(2, 2, 2, columns, head_dim).to(dtype)
            part = backends.Part(key, value, mask)
            for scale in (None, 0.3):
                fused.asked.clear()
                got, wanted = backends.by_fused_of_cuda(query, part, scale), backends.by_operators(query, part, scale)
                torch.testing.assert_close(got, wanted)
                flash = dtype == torch.bfloat16 and mask is None and head_dim == 16
                assert fused.asked == ([] if head_dim % 8 else ["flash" if flash else "efficient"])


def test_where_torch_is_told_to_use_no_fused_kernel_none_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name in ("by_flash_of_cpu", "by_operators"):
        compute = getattr(backends, name)

        def note(*args: Any, name: str = name, compute: Any = compute) -> Any:
            asked.append(name)
            return compute(*args)

        note.__name__ = name
        monkeypatch.setattr(backends, name, note)
    monkeypatch.setattr(backends, "_OF_DEVICE", {"cpu": backends.by_flash_of_cpu})
    query, part = torch.randn(1, 4, 1, 8), backends.Part(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))
    fused = backends.attend(query, part)
    with sdpa_kernel(SDPBackend.MATH):
        assert backends.name_of("cpu") == "operators"
        torch.testing.assert_close(backends.attend(query, part), fused)
    assert asked == ["by_flash_of_cpu", "by_operators"]
    assert backends.name_of("cpu") == "flash_of_cpu"


def test_what_gets_past_the_functions_of_torch_becomes_dense_as_well() -> None:
    class Held:
        def dense(self, name: str) -> torch.Tensor:
            return torch.ones(2, 2, 3, 4)

        def refuse(self) -> None: ...

        def attend(self, *_: Any) -> None: ...

    make = partial(LazyStates, Held(), "key", (2, 2, 3, 4), torch.float32, torch.device("cpu"))
    with torch._C.DisableTorchFunctionSubclass():
        assert float(torch.add(make(), 1).sum()) == 96
    assert float((make() + 1).sum()) == 96
    assert make().shape == (2, 2, 3, 4)
    assert make().transpose(1, 2).shape == (2, 3, 2, 4)
    assert make().repeat_interleave(3, dim=1).shape == (2, 6, 3, 4)
    repeated = make()[:, :, None].expand(2, 2, 3, 3, 4)
    assert isinstance(repeated, LazyStates)
    assert as_dense(repeated.reshape(2, 6, 3, 4)).shape == (2, 6, 3, 4)
    assert not isinstance(repeated.reshape(4, 3, 3, 4), LazyStates)
    assert repeated.reshape(4, 3, 3, 4).shape == (4, 3, 3, 4)
    assert not isinstance(make()[:, :, 1:], LazyStates)


@pytest.mark.parametrize(
    ("dtype", "pad", "is_split"),
    [(torch.bfloat16, 0, False), (torch.bfloat16, 3, True), (torch.float32, 0, True)],
    ids=["fused", "under a mask", "fp32"],
)
def test_on_an_accelerator_rows_that_a_fused_kernel_reads_quickly_are_read_each_by_itself(
    dtype: torch.dtype, pad: int, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_reads, "LAUNCH_BYTES", {})  # of none but other devices
    monkeypatch.setattr(shared_reads, "_OTHER_FUSED_BYTES", 2**32)  # the others are 0 in these tests
    bench = Bench(1)
    bench.dtype = dtype
    prefix = bench.words(40)
    bench.start([Row(number * pad, (*prefix, *bench.words(10 - number * pad))) for number in range(2)])
    bench.forward(48)
    assert (bench.view._shared.plan is not None) == is_split
