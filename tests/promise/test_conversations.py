"""Random conversations of two users on one store: each call gives what `DynamicCache` gives, or is refused for good reason.

Prompts are made of few stems over few tokens, so that they share prefixes of every length.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hf_paged_cache import OutOfBlocksError, PagedPrefixCache, PrefixStore

from ..internals import blocks_of_rows
from ..reference import assert_same, batch, row, run
from ..tiny_models import tiny

NEW_TOKENS = 5

prompts = st.builds(
    lambda seed, length, tail: row((seed, length)) + tail,
    st.integers(1, 3),
    st.integers(0, 14),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
)
ways = st.sampled_from(
    [
        {},
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"prefill_chunk_size": 4},
        {"prefill_chunk_size": 3, "num_beams": 2},
        {"prompt_lookup_num_tokens": 3},
    ]
)
tails = st.lists(st.integers(1, 3), min_size=1, max_size=6)
turns = st.one_of(
    st.tuples(st.just("ask"), st.lists(prompts, min_size=1, max_size=3), ways),
    st.tuples(st.just("ask"), st.lists(prompts, min_size=1, max_size=1), ways),
    st.tuples(st.just("go on"), tails, ways),
    st.tuples(st.just("go on with new tokens only"), tails),
    st.tuples(st.just("reset")),
    st.tuples(st.just("forget everything")),
    st.tuples(st.just("other user")),
)


class Conversation:
    """Two caches on one store, and what the last call of each gave."""

    def __init__(self, block_size: int, num_blocks: int | None, attention: str) -> None:
        self.model, self.block_size, self.num_blocks = tiny("llama"), block_size, num_blocks
        self.store = PrefixStore(self.model, block_size=block_size, num_blocks=num_blocks)
        self.caches = [PagedPrefixCache(self.store, attention=attention) for _ in range(2)]
        self.last: list[dict[str, Any] | None] = [None, None]  # whole sequences and their mask
        self.rows_go_on = [False, False]  # the rows are those of the sequences
        self.user = 0
        self.num_reused = 0

    def play(self, turn: tuple[Any, ...]) -> None:
        cache, last = self.caches[self.user], self.last[self.user]
        if turn[0] == "ask":
            self.call(batch(*turn[1]), turn[2])
        elif turn[0] == "go on" and last is not None:
            self.call(longer(last, turn[1]), turn[2])
        elif turn[0] == "go on with new tokens only" and last is not None and self.rows_go_on[self.user]:
            self.call(longer(last, turn[1]), {}, only_from=cache.get_seq_length())
        elif turn[0] == "reset":
            cache.reset()
            self.rows_go_on[self.user] = False
        elif turn[0] == "forget everything":
            self.store.reset_prefix_cache()
            self.rows_go_on = [False, False]
        elif turn[0] == "other user":
            self.user = 1 - self.user
        cache.check()

    def call(self, prompt: dict[str, torch.Tensor], way: dict[str, Any], only_from: int = 0) -> None:
        cache = self.caches[self.user]
        if "prompt_lookup_num_tokens" in way:
            prompt = {name: tensor[:1] for name, tensor in prompt.items()}
        reference = run(self.model, **prompt, **way, max_new_tokens=NEW_TOKENS)
        given_ids = {**prompt, "input_ids": prompt["input_ids"][:, only_from:]}
        available = self.num_blocks_others_leave()
        try:
            output = run(self.model, cache, **given_ids, **way, max_new_tokens=NEW_TOKENS)
        except OutOfBlocksError:
            assert self.most_blocks(prompt, way) > available
            self.last[self.user], self.rows_go_on[self.user] = None, False
            return
        assert_same(reference, output)
        self.num_reused += cache.last_call.reused_tokens
        mask = prompt["attention_mask"].repeat_interleave(len(reference.sequences) // len(prompt["input_ids"]), 0)
        num_new = reference.sequences.shape[1] - mask.shape[1]
        mask = torch.cat((mask, mask.new_ones(len(mask), num_new)), dim=1)
        self.last[self.user] = {"input_ids": reference.sequences, "attention_mask": mask}
        self.rows_go_on[self.user] = "num_beams" not in way

    def most_blocks(self, prompt: dict[str, torch.Tensor], way: dict[str, Any]) -> int:
        """What the call may need if nothing is shared and each row copies a block once."""
        expanded = max(way.get("num_beams", 1), way.get("num_return_sequences", 1))
        lengths = prompt["attention_mask"].sum(dim=1) + NEW_TOKENS - 1
        return int((-(-lengths // self.block_size) + 1).sum()) * expanded

    def num_blocks_others_leave(self) -> float:
        if self.num_blocks is None:
            return float("inf")
        return self.num_blocks - 1 - len(blocks_of_rows(self.caches[1 - self.user]))

    def end(self) -> None:
        """All blocks are accounted for."""
        for cache in self.caches:
            cache.reset()
        assert self.caches[0].stats().num_blocks_in_use == 0
        self.store.reset_prefix_cache()
        stats = self.caches[0].stats()
        assert stats.num_blocks is None or stats.num_free_blocks == stats.num_blocks - 1
        self.caches[0].check()


def longer(last: dict[str, torch.Tensor], tail: list[int]) -> dict[str, torch.Tensor]:
    """The same rows, and as many new tokens in each: the tail, in each row one token on."""
    num_rows = len(last["input_ids"])
    new = torch.tensor([[(token + number) % 4 + 1 for token in tail] for number in range(num_rows)])
    return {
        "input_ids": torch.cat((last["input_ids"], new), dim=1),
        "attention_mask": torch.cat((last["attention_mask"], torch.ones_like(new)), dim=1),
    }


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    block_size=st.sampled_from([1, 2, 4, 5]),
    num_blocks=st.one_of(st.none(), st.integers(8, 60)),
    attention=st.sampled_from(["contiguous", "gather"]),
    conversation=st.lists(turns, min_size=2, max_size=10),
)
@example(
    block_size=4,
    num_blocks=None,
    attention="contiguous",
    conversation=[
        ("ask", [row((1, 9)), row((2, 5))], {"num_beams": 3}),
        ("other user",),
        ("ask", [row((1, 9)), row((2, 4))], {}),
        ("go on with new tokens only", [1, 2]),
        ("go on", [3], {"do_sample": True, "num_return_sequences": 3}),
        ("go on with new tokens only", [1]),
    ],
)
def test_any_conversation_gives_what_dynamic_cache_gives(
    block_size: int, num_blocks: int | None, attention: str, conversation: list[tuple[Any, ...]]
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        talk = Conversation(block_size, num_blocks, attention)
        for turn in conversation:
            talk.play(turn)
        talk.end()
    finally:
        torch.set_num_threads(threads)
