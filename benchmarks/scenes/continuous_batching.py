"""transformers' continuous batching on the same requests, with its own prefix sharing on and its manager warm."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from .workbench import Bench

PAGE_TOKENS = 256  # its default
SIZES = (1, 4, 16)  # requests of a batch that are tried on a CPU; a GPU's size it finds by itself


@dataclass(frozen=True)
class Served:
    """What a run gave.

    Attributes:
        seconds: of the first request, and of all others.
        tokens: generated, a request a list.
        kv_bytes: of the pages taken at their most, those that hold a finished prefix included.
        requests_per_batch: the size that was used; None where it finds its own.
    """

    seconds: tuple[float, float]
    tokens: list[list[int]]
    kv_bytes: int
    requests_per_batch: int | None


def serve(bench: Bench, prompts: Sequence[list[int]], warmup: Sequence[list[int]]) -> Served | None:
    """One new token for each prompt: the first alone, so that the others find its prefix, then all others at once.

    Args:
        warmup: prompts of the same lengths with another prefix; the size of a batch that serves them fastest is used.
    Returns:
        None where transformers is older than 5.23 and has another interface.
    """
    if "page_size" not in {field.name for field in fields(ContinuousBatchingConfig)}:
        return None
    sizes: Sequence[int | None] = SIZES if bench.model.device.type == "cpu" else (None,)
    best = min(sizes, key=lambda size: _serve(bench, [], warmup, size).seconds[1]) if len(sizes) > 1 else sizes[0]
    return _serve(bench, prompts, warmup, best)


def _serve(bench: Bench, prompts: Sequence[list[int]], warmup: Sequence[list[int]], size: int | None) -> Served:
    """Without prompts: what the warm-up itself takes."""
    longest = max(map(len, [*prompts, *warmup]))
    num_pages = -(-longest // PAGE_TOKENS) + 1
    config = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=None if size is None else num_pages * (size + 2) + len(prompts) + len(warmup),
        max_batch_tokens=None if size is None else longest,  # its mask has so many rows
        max_requests_per_batch=size,
        max_memory_percent=0.5,  # where it counts blocks by memory; the rest is for ours
        allow_block_sharing=True,
    )
    generation = GenerationConfig(max_new_tokens=1, do_sample=False, eos_token_id=-1, pad_token_id=0)
    tokens: list[list[int]] = []

    def run(requests: Sequence[list[int]]) -> float:
        def call() -> None:
            served = bench.model.generate_batch(
                list(requests),
                generation_config=generation,
                continuous_batching_config=config,
                persistent_manager=True,
            )
            tokens.extend(output.generated_tokens for output in served.values())

        return bench.clock.time(call)[0]

    with _quiet():
        try:
            seconds = [run(warmup[:1]), run(warmup[1:])]
            pages = PagesInUse(bench.model)
            if prompts:
                tokens.clear()
                seconds = [run(prompts[:1]), run(prompts[1:])]
        finally:
            bench.model.destroy_cached_continuous_batching_manager()
    return Served((seconds[0], seconds[1]), tokens, pages.peak_bytes, size)


class PagesInUse:
    """Bytes of the pages that hold something, at their most from here on; what the warm-up left there is forgotten."""

    def __init__(self, model: PreTrainedModel) -> None:
        cache = model._cached_continuous_batching_manager.batch_processor.cache
        cache.reset()
        self._pool, self._allocators = cache.pool, list(cache.cache_allocators.values())
        self._take, self.peak_bytes = cache.pool.get_free_blocks, 0
        cache.pool.get_free_blocks = self.get_free_blocks

    def get_free_blocks(self, index: int, num_blocks: int) -> list[int]:
        """The pool's own, and a look at what is taken."""
        taken = self._take(index, num_blocks)
        pool = self._pool
        num_sectors = pool.num_sectors - pool.num_free_sectors
        held = [
            (num_sectors * of.blocks_per_sector - pool.count_free_blocks(of.index)) * of.bytes_per_block
            for of in self._allocators
        ]
        self.peak_bytes = max(self.peak_bytes, max(held))
        return taken


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Its notes on what we ask for on purpose are not shown."""
    logger = logging.getLogger("ContinuousBatchingLogger")
    before, logger.level = logger.level, logging.ERROR
    try:
        yield
    finally:
        logger.setLevel(before)
