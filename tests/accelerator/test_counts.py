"""How often a call waits for its device, transfers and launches, and how much it holds there, beside `DynamicCache`.

`python -m tests.accelerator` prints the same counts as a table.
"""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import LogitsProcessor

from hf_paged_cache import PagedPrefixCache

from .counts import COUNTS, Count, Counter, Steps, limit_of, model_on, plain_model, prompt
from .log import Log, recorded

pytestmark = pytest.mark.usefixtures("one_thread")

OF_DYNAMIC_CACHE = {
    "waits, decode step, 1 row": 1,
    "waits, decode step, 4 padded rows": 2,
    "waits, decode step, 4 beams": 1,
    "waits, decode step, deferred stop check": 0,
    "KiB held by 1 row of 4,000 tokens": 4000 * 0.5,  # 2 layers, keys and values, 2 heads of 16 numbers of 4 bytes
}


IN_BF16 = (
    "transfers, decode step, 4 padded rows",
    "launches, decode step, 2 layers, 1 row",
    "KiB held by 1 row of 4,000 tokens",
)


@pytest.mark.parametrize("count", [count for count in COUNTS if count.what in OF_DYNAMIC_CACHE], ids=str)
def test_what_is_compared_with_counts_as_ever(count: Count) -> None:
    assert count.plain is not None
    assert count.plain(Counter(is_paged=False)) == OF_DYNAMIC_CACHE[count.what]


@pytest.mark.parametrize("count", [count for count in COUNTS if count.what.startswith("transfers")], ids=str)
def test_dynamic_cache_transfers_nothing_in_a_decode_step(count: Count) -> None:
    assert count.plain is not None
    assert count.plain(Counter(is_paged=False)) == 0


BOUNDED = [  # in bf16 what converts would be seen
    (count, dtype)
    for count in COUNTS
    for dtype in (torch.float32, torch.bfloat16)
    if dtype == torch.float32 or count.what in IN_BF16
]


@pytest.mark.parametrize(("count", "dtype"), BOUNDED, ids=str)
def test_a_paged_cache_counts_at_most(count: Count, dtype: torch.dtype) -> None:
    counter = Counter(is_paged=True, dtype=dtype)
    limit = limit_of(count, dtype)
    number = count.paged(counter)
    assert number <= limit, f"{number}, at most {limit}:\n" + "\n".join(counter.shown)


@pytest.mark.parametrize("kind", ["wait", "transfer"])
@pytest.mark.parametrize("how", ["1 row", "4 padded rows", "4 beams"])
def test_a_step_that_completes_a_block_waits_twice_more_and_sends_two_transfers_at_most(how: str, kind: str) -> None:
    """For its token ids, and for a look at the weights."""
    count = next(count for count in COUNTS if count.what == f"{kind}s, decode step, {how}")
    counter = Counter(is_paged=True)
    count.paged(counter)
    worst = max(counter.steps, key=lambda log: len(log.of(kind)))
    most = limit_of(count, torch.float32) + 2 if kind == "wait" else 2
    assert len(worst.of(kind)) <= most, worst.lines(kind)


@pytest.mark.parametrize("how", [{"num_rows": 1}, {"num_rows": 4}, {"num_beams": 4}], ids=str)
def test_no_transfer_of_a_step_blocks(how: dict[str, int]) -> None:
    counter = Counter(is_paged=True)
    counter.step("transfer", **how)
    blocking = Log([entry for log in counter.steps for entry in log.transfers if entry.is_blocking])
    assert not blocking.entries, blocking.lines("transfer")


def test_while_another_thread_lives_nobody_waits_for_a_prompts_forward_before_its_logits_are_asked_for() -> None:
    """That thread may change the model, so there is a look at it; what lies on the device is looked at when the call ends."""
    model, ended, waits = plain_model(torch.float32), threading.Event(), []
    cache = PagedPrefixCache(model)
    thread = threading.Thread(target=ended.wait)
    model.generate(**prompt(), past_key_values=cache, max_new_tokens=1, do_sample=False)
    for start in (lambda: None, thread.start):
        start()
        cache.reset_prefix_cache()
        with recorded() as log:
            steps = Steps(log)
            model.generate(
                **prompt(), past_key_values=cache, max_new_tokens=1, do_sample=False, logits_processor=[steps]
            )
        waits.append((len(steps.prompt().waits), len(log.waits)))
    ended.set()
    thread.join()
    (to_logits, of_all), (to_logits_beside, of_all_beside) = waits
    assert to_logits_beside == to_logits
    assert of_all_beside == of_all + 1


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("num_new", [1, 4])
def test_weights_that_have_changed_unseen_since_the_prompts_forward_are_seen_before_it_is_kept(
    num_new: int, changes: bool
) -> None:
    """By their values on the device: nothing says it of what is written where torch does not count."""
    model, ended = model_on(), threading.Event()
    cache, weight = PagedPrefixCache(model), model.model.layers[0].self_attn.k_proj.weight.data._data

    class Change(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if changes and input_ids.shape[1] == prompt()["input_ids"].shape[1]:
                weight.mul_(2)
            return scores

    thread = threading.Thread(target=ended.wait)
    thread.start()
    given = {"max_new_tokens": num_new, "do_sample": False, "logits_processor": [Change()]}
    model.generate(**prompt(), past_key_values=cache, **given)
    ended.set()
    thread.join()
    if changes:
        weight.mul_(0.5)
    cache.reset()
    assert cache.lookup(prompt()["input_ids"]).num_tokens == (0 if changes else 16)
