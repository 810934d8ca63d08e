"""What a decode step, a first call and a pool cost a device, counted for `DynamicCache` and for a paged cache."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from transformers import DynamicCache, LogitsProcessor
from transformers.generation.utils import DeferredStopCheck

from hf_paged_cache import PagedPrefixCache
from tests.conftest import make_tiny_llama
from tests.tiny_models import build

from .log import Log, recorded
from .memory import memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

NUM_TOKENS = 20  # of a prompt
NUM_CHUNK_TOKENS = 250  # of a long prompt: attention over all of it at once takes seconds
NUM_STEPS = 20  # so that a block is completed on the way


def model_on(device: str = "sim", dtype: torch.dtype = torch.float32, num_layers: int = 2) -> PreTrainedModel:
    return make_tiny_llama(num_layers).to(dtype=dtype, device=device)


def plain_model(dtype: torch.dtype) -> PreTrainedModel:
    """Two layers that see all columns."""
    return model_on(dtype=dtype)


def windowed_model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Three layers, two of them with a window that ends within the steps."""
    return build("gemma3").to(dtype=dtype, device="sim")


def split_model(dtype: torch.dtype = torch.float32, num_layers: int = 2) -> PreTrainedModel:
    """The first half of its layers on the first device and the others on the second, by accelerate's hooks."""
    from accelerate import dispatch_model

    device_map: Any = dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "lm_head"), "sim:0")
    device_map |= {f"model.layers.{layer}": f"sim:{2 * layer // num_layers}" for layer in range(num_layers)}
    device_map["model.norm"] = "sim:1"
    return dispatch_model(make_tiny_llama(num_layers).to(dtype), device_map=device_map, force_hooks=True)


# name -> a model of two layers there, the same for all tests of a process, which must leave it as it was
PLACES: dict[str, Callable[[], PreTrainedModel]] = {
    "fp32 on a device": cache(partial(model_on, "sim")),
    "bf16 on the second device": cache(partial(model_on, "sim:1", torch.bfloat16)),  # an index that is not the default
    "fp32 on two devices": cache(split_model),
    "bf16 on two devices": cache(partial(split_model, torch.bfloat16)),
}


def prompt(num_rows: int = 1, num_tokens: int = NUM_TOKENS, *, shares: str = "") -> dict[str, torch.Tensor]:
    """Rows of random tokens; of several, each but the first is padded on the left by one token more.

    Args:
        shares: in place of that, the first 32 tokens of each row are those of the others, without padding ("bare") or
            behind it ("padded"), or of every second row ("every second").
    """
    made = torch.Generator().manual_seed(num_rows)
    ids = torch.randint(1, 128, (num_rows, num_tokens), generator=made)
    mask = torch.ones_like(ids)
    if shares != "bare":
        for row in range(num_rows):
            mask[row, : row % num_tokens] = 0
    if shares:
        known = torch.randint(1, 128, (2, 32), generator=made)
        first = known[[row % 2 if shares == "every second" else 0 for row in range(num_rows)]]
        ids, mask = torch.cat([first, ids], 1), torch.cat([torch.ones_like(first), mask], 1)
        order = torch.argsort(mask, dim=1, stable=True)  # padding is on the left
        ids, mask = ids.gather(1, order), mask.gather(1, order)
    return {"input_ids": (ids * mask).to("sim"), "attention_mask": mask.to("sim")}


class Steps(LogitsProcessor):
    """Tells the steps of a `generate` apart: a step ends where its logits are."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._ends: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._ends.append(len(self._log.entries))
        return scores

    def prompt(self) -> Log:
        """Of what came before the first logits."""
        return Log(self._log.entries[: self._ends[0]])

    def logs(self) -> list[Log]:
        """Of each decode step."""
        ends = self._ends
        return [Log(self._log.entries[start:end]) for start, end in itertools.pairwise(ends)]


def decode_steps(
    model: PreTrainedModel, cache: Any, num_rows: int = 1, shares: str = "", **arguments: Any
) -> list[Log]:
    """What each decode step of a call did. The call before it filled the cache and digested the weights.

    Args:
        shares: see `prompt`; it is read once, though it is short.
    """
    inputs = prompt(num_rows, shares=shares)
    arguments = {"do_sample": False, **arguments}
    if isinstance(cache, PagedPrefixCache):
        if shares:
            cache.store.looks.weighs_launches = False
        model.generate(**inputs, past_key_values=cache, max_new_tokens=2, **arguments)
    with recorded() as log:
        steps = Steps(log)
        model.generate(
            **inputs, past_key_values=cache, max_new_tokens=NUM_STEPS + 1, logits_processor=[steps], **arguments
        )
    if shares and isinstance(cache, PagedPrefixCache):
        assert cache.last_call.read_once_tokens >= 32
    return steps.logs()


@contextlib.contextmanager
def deferred_stop_check() -> Iterator[None]:
    """`generate` defers its stop check, as it does on MPS."""
    supported = DeferredStopCheck.is_supported

    def on_mps(device: torch.device, *args: Any, **kwargs: Any) -> bool:
        return supported(torch.device("mps"), *args, **kwargs)

    with mock.patch.object(DeferredStopCheck, "is_supported", staticmethod(on_mps)):
        yield


@dataclass
class Count:
    """A row of the table."""

    what: str
    limit: float | Callable[[torch.dtype], float]  # of a paged cache; or what says it by dtype
    plain: Callable[[Counter], float] | None  # with `DynamicCache`
    paged: Callable[[Counter], float]

    def __str__(self) -> str:
        return self.what


@dataclass
class Counter:
    """Counts with one kind of cache.

    Args:
        is_paged: of ours; else of `DynamicCache`.
    """

    is_paged: bool
    dtype: torch.dtype = torch.float32
    shown: list[str] = field(default_factory=list)  # which lines the last count counted
    steps: list[Log] = field(default_factory=list)  # of the last count of decode steps

    def cache(self, model: PreTrainedModel, **sizes: Any) -> Any:
        return PagedPrefixCache(model, **sizes) if self.is_paged else DynamicCache(config=model.config)

    def step(
        self,
        kind: str,
        num_rows: int = 1,
        *,
        make_model: Callable[[torch.dtype], PreTrainedModel] = plain_model,
        deferred: bool = False,
        **arguments: Any,
    ) -> int:
        """Entries of a kind in the usual decode step, which completes no block: in the median one."""
        model = make_model(self.dtype)
        with deferred_stop_check() if deferred else contextlib.nullcontext():
            logs = decode_steps(model, self.cache(model), num_rows, **arguments)
        usual = sorted(logs, key=lambda log: len(log.of(kind)))[len(logs) // 2]
        self.shown, self.steps = [usual.lines(kind)], logs
        return len(usual.of(kind))

    def first_call(self) -> int:
        """Waits of a first call of 64 padded rows."""
        model, inputs = model_on(dtype=self.dtype), prompt(64)
        cache = self.cache(model)
        with recorded() as log:
            model.generate(**inputs, past_key_values=cache, max_new_tokens=1, do_sample=False)
        self.shown = [log.lines("wait")]
        return len(log.waits)

    def verifying(self, number: int) -> int:
        """Waits of a look at block `number` of a prompt."""
        model, inputs = model_on(dtype=self.dtype), prompt(1, 40)
        cache = self.cache(model)
        model.generate(**inputs, past_key_values=cache, max_new_tokens=1, do_sample=False)
        for _ in range(1 + number):
            with recorded() as log:
                assert not cache.verify(1).differing
        self.shown = [log.lines("wait")]
        return len(log.waits)

    def held_kib(self, num_tokens: int = 4000) -> float:
        """KiB held by the cache of a row of `num_tokens` tokens."""
        model = model_on(dtype=self.dtype)
        cache = self.cache(model)
        inputs = prompt(1, num_tokens)
        gc.collect()
        before = memory("sim").allocated
        model.generate(
            **inputs, past_key_values=cache, max_new_tokens=1, do_sample=False, prefill_chunk_size=NUM_CHUNK_TOKENS
        )
        gc.collect()
        return (memory("sim").allocated - before) / 1024

    def held_blocks(self) -> float:
        """Blocks whose memory is taken after a short prompt, of the many that the cache may have."""
        model = model_on(dtype=self.dtype)
        cache = self.cache(model, num_blocks=20_000)
        inputs = prompt()
        gc.collect()
        before = memory("sim").allocated
        model.generate(**inputs, past_key_values=cache, max_new_tokens=1, do_sample=False)
        cache.reset()
        gc.collect()
        return (memory("sim").allocated - before) / cache.store.blocks.pool.all.bytes_per_block

    def growth_peak(self) -> float:
        """What growing by half takes at its peak beyond the new size, as a part of the old one."""
        model = model_on(dtype=self.dtype, num_layers=8)
        cache = self.cache(model, num_blocks=20_000)
        model.generate(**prompt(1, 200), past_key_values=cache, max_new_tokens=1, do_sample=False)
        pool = cache.store.blocks.pool
        gc.collect()
        old = pool.pool_bytes
        memory("sim").reset_peak()
        pool.all.ensure_capacity(pool.all.capacity * 3 // 2)
        gc.collect()
        return (memory("sim").peak - memory("sim").allocated) / old


def _steps(kind: str, **arguments: Any) -> Callable[[Counter], float]:
    return lambda counter: counter.step(kind, **arguments)


def _both(what: str, limit: float | Callable[[torch.dtype], float], count: Callable[[Counter], float]) -> Count:
    return Count(what, limit, count, count)


def _launches(make_model: Callable[[torch.dtype], PreTrainedModel], more: int = 0) -> Callable[[torch.dtype], float]:
    """As many as with `DynamicCache`, and some."""
    return lambda dtype: _steps("launch", make_model=make_model)(Counter(is_paged=False, dtype=dtype)) + more


def _kib(dtype: torch.dtype) -> float:
    return 4400 * dtype.itemsize / 4


_BEAMS: dict[str, Any] = {"num_beams": 4}

COUNTS = [
    _both("waits, decode step, 1 row", 1, _steps("wait")),
    _both("waits, decode step, 4 padded rows", 2, _steps("wait", num_rows=4)),
    _both("waits, decode step, 4 beams", 2, _steps("wait", **_BEAMS)),
    _both("waits, decode step, deferred stop check", 0, _steps("wait", deferred=True)),
    _both("transfers, decode step, 1 row", 0, _steps("transfer")),
    _both("transfers, decode step, 4 padded rows", 0, _steps("transfer", num_rows=4)),
    _both("transfers, decode step, 4 beams", 0, _steps("transfer", **_BEAMS)),
    _both(
        "transfers, decode step, 4 beams on two devices",
        0,
        _steps("transfer", make_model=split_model, **_BEAMS),
    ),
    *(
        _both(f"{kind}s, decode step, 4 rows that share a prefix, {how}", limit, _steps(kind, num_rows=4, shares=how))
        for kind, how, limit in (
            ("wait", "bare", 1),
            ("wait", "padded", 3),  # one more than without: whether a mask hides what is shared
            ("wait", "every second", 3),
            ("transfer", "bare", 1),
            ("transfer", "padded", 1),
            ("transfer", "every second", 1),
        )
    ),
    _both("waits, decode step, windows", 1, _steps("wait", make_model=windowed_model)),
    _both(
        "transfers, decode step, 4 padded rows, windows",
        0,
        _steps("transfer", num_rows=4, make_model=windowed_model),
    ),
    Count(
        "waits, first call of 64 padded rows, beyond DynamicCache's",
        3,
        lambda counter: 0,
        lambda counter: counter.first_call() - Counter(is_paged=False, dtype=counter.dtype).first_call(),
    ),
    # transformers looks whether a mask hides anything, where no columns are before it
    Count("waits, verify looks at a first block", 3, None, lambda counter: counter.verifying(0)),
    Count("waits, verify looks at another block", 2, None, lambda counter: counter.verifying(1)),
    # rows of a call note which token ran
    _both("launches, decode step, 2 layers, 1 row", _launches(plain_model, 1), _steps("launch")),
    _both(
        "launches, decode step, 3 layers, windows",
        _launches(windowed_model, 1),
        _steps("launch", make_model=windowed_model),
    ),
    Count("blocks held after a prompt of 20 tokens, num_blocks=20000", 64, None, Counter.held_blocks),
    Count(
        "peak of growing by half, beyond the new size, x the old",
        1,  # streams of a shape that were made together are copied as one
        None,
        Counter.growth_peak,
    ),
    _both("KiB held by 1 row of 4,000 tokens", _kib, Counter.held_kib),
]


def limit_of(count: Count, dtype: torch.dtype) -> float:
    """The most that a paged cache may count."""
    return count.limit(dtype) if callable(count.limit) else count.limit
