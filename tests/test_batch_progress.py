"""What a job says of itself at its end: counts, and an estimate of the time without a cache."""

from __future__ import annotations

import pytest

from hf_paged_cache.batch.journal import Record
from hf_paged_cache.batch_progress import Progress


def record(row: int, prompt_tokens: int, computed_tokens: int, prefill: float, decode: float = 0.0) -> Record:
    counts = {
        "prompt_tokens": prompt_tokens,
        "computed_tokens": computed_tokens,
        "new_tokens": 2,
        "bypassed": 0,
        "seconds": prefill + decode,
        "prefill_seconds": prefill,
    }
    return Record([row], [""], counts)


def test_the_estimate_takes_the_rate_of_calls_that_computed_their_prompts() -> None:
    done = Progress(3, None, None)
    done.add(record(0, 1000, 1000, prefill=1.0, decode=0.5))
    done.add(record(1, 1000, 10, prefill=0.5, decode=0.5))  # 20 tokens a second, which says nothing
    done.add(record(2, 1000, 500, prefill=0.25))  # 2,000 tokens a second
    summary = done.summary()
    assert summary.seconds_without == pytest.approx(3000 / 2000 + 1.0)
    assert (summary.reused_tokens, summary.num_prompts, summary.num_done_before) == (1490, 3, 0)
    assert "2.8 s; without the cache about 2.5 s (0.9x)" in str(summary)


def test_where_nearly_all_was_known_there_is_no_estimate() -> None:
    done = Progress(1, None, None)
    done.add(record(0, 1000, 10, prefill=0.5))
    assert done.summary().seconds_without is None
    assert str(done.summary()).splitlines() == [
        "1 prompt in 1 batch: 1,000 prompt tokens, of which 990 were reused (99%); 2 new tokens",
        "0.5 s",
    ]
