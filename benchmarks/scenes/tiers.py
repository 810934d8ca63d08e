"""Chats in turns on a pool that does not hold them all: computed again, or read back from shared memory."""

from __future__ import annotations

import tempfile
from itertools import count
from pathlib import Path

import torch

from hf_paged_cache import PagedPrefixCache

from .line import BASELINE, ONE_TIER, OURS
from .registry import Lines, Repeat, scene
from .ways import Way, from_scratch, measure_rounds, on_ours, share_not_computed
from .workbench import NEW_TOKENS, QUESTION_TOKENS, Bench

_NUM_CHATS, _NUM_FIT = 8, 3
_SHARED_MEMORY = Path("/dev/shm")


@scene("Tiers", minutes=2)
def tiers(bench: Bench, repeat: Repeat) -> Lines:
    """8 chats of 2,048 tokens take turns on a pool for 3: with a disk tier in shared memory, and without one."""
    length = 2 * bench.sizes.shared
    chats = [bench.tokens(1, length) for _ in range(_NUM_CHATS)]
    num_blocks = 1 + _NUM_FIT * -(-(length + QUESTION_TOKENS + NEW_TOKENS) // 16)
    parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    turn = count()
    with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as folder:
        with_tier = PagedPrefixCache(bench.model, num_blocks=num_blocks, disk_folder=folder)
        without = PagedPrefixCache(bench.model, num_blocks=num_blocks)
        for ids in (*chats, *chats):
            bench.generate(ids, past_key_values=with_tier)

        def prepare() -> dict[str, Way]:
            chat = chats[next(turn) % _NUM_CHATS]
            ids, given = torch.cat((chat, bench.tokens(1, QUESTION_TOKENS)), dim=1), {"new_tokens": NEW_TOKENS}
            return {
                BASELINE: from_scratch(bench, ids, **given),
                ONE_TIER: on_ours(bench, without, ids, **given),
                OURS: on_ours(bench, with_tier, ids, **given),
            }

        measured = measure_rounds(
            bench, prepare, rounds=repeat(_NUM_CHATS), warmups=min(1, bench.warmups), baseline_every=4
        )
        measured.hit_rate = share_not_computed(with_tier.last_call)
        (tier,) = with_tier.stats().tiers
        details = {"bytes": tier.num_bytes}
        yield (
            "tiers",
            measured.line(
                f"{_NUM_CHATS} chats of {length:,} tokens in turns on a pool for {_NUM_FIT}: "
                "a turn with a tier, against one without",
                against=ONE_TIER,
                at_least=bench.bar(4.0),
                details=details,
            ),
        )
        with_tier.reset_prefix_cache()
