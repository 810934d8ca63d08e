"""What a job says of itself at its end: counts, and an estimate of the time without a cache."""

from __future__ import annotations

import re

import pytest

from hf_paged_cache.jobs import progress
from hf_paged_cache.jobs.progress import progress_bar
from hf_paged_cache.jobs.summary import Tally


def counts(prompt_tokens: int, computed_tokens: int, prefill: float, step: float = 0.0) -> dict[str, float]:
    """Of a batch of one row."""
    return {
        "prompt_tokens": prompt_tokens,
        "computed_tokens": computed_tokens,
        "new_tokens": 3,
        "bypassed": 0,
        "seconds": prefill + 2 * step,
        "prefill_seconds": prefill,
        "decode_steps": 2 if step else 0,
    }


def test_the_estimate_adds_what_was_reused_at_the_price_of_a_token() -> None:
    done = Tally()
    done.add([0], counts(1000, 601, prefill=1.3, step=0.1))  # 2 ms a token, besides those that any step takes
    done.add([1], counts(1000, 11, prefill=0.5))  # 50 ms a token, which says nothing
    done.add([2], counts(1000, 301, prefill=1.2))  # 4 ms a token
    done.add([3], counts(1000, 1, prefill=0.1))
    summary = done.summary(4)
    assert summary.seconds == pytest.approx(3.3)
    assert summary.seconds_without == pytest.approx(3.3 + 3086 * 0.003)
    assert (summary.reused_tokens, summary.num_prompts, summary.num_done_before) == (3086, 4, 0)
    assert "3.3 s; without the cache about 12.6 s (3.8x)" in str(summary)


def test_a_device_that_computes_many_tokens_in_the_time_of_one_gains_nothing() -> None:
    done = Tally()
    done.add([0], counts(1000, 500, prefill=0.1, step=0.1))
    assert done.summary(1).seconds_without == done.summary(1).seconds


def test_where_all_was_known_there_is_no_estimate() -> None:
    done = Tally()
    done.add([0], counts(1000, 1, prefill=0.5))
    assert done.summary(1).seconds_without is None
    assert str(done.summary(1)).splitlines() == [
        "1 prompt in 1 batch: 1,000 prompt tokens, of which 999 were reused (100%); 3 new tokens",
        "0.5 s",
    ]


def lines(capsys: pytest.CaptureFixture[str], total: int, *, wanted: bool | None = None) -> list[str]:
    """What is shown of a job of batches of one, where stderr is no terminal."""
    with progress_bar(total, 0, wanted) as bar:
        for _ in range(total):
            bar.set_postfix_str("81% of prompt tokens reused", refresh=False)
            bar.update(1)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "\r" not in shown.err
    return shown.err.splitlines()


@pytest.mark.parametrize("wanted", [None, True])
def test_off_a_terminal_a_quick_job_shows_its_beginning_and_its_end(
    wanted: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    first, last = lines(capsys, 200, wanted=wanted)
    assert first == "0 of 200 prompts (0%) after 00:00"
    assert re.fullmatch(
        r"200 of 200 prompts \(100%\) after \d\d:\d\d, about 00:00 left, 81% of prompt tokens reused", last
    )


def test_off_a_terminal_a_long_job_shows_a_line_each_twentieth_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    assert [line.partition(" ")[0] for line in lines(capsys, 200)] == [*map(str, range(0, 201, 10))]


def test_nothing_is_shown_where_that_is_wanted_or_there_is_nothing_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert lines(capsys, 200, wanted=False) == []
    assert lines(capsys, 0) == []
