"""A call that ends where nobody planned it: afterwards all blocks are accounted for and the next call is right."""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import gc
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import hf_paged_cache
from hf_paged_cache import PagedPrefixCache, PrefixStore

from ..internals import leave_all_with_blocks
from ..reference import AtStep, assert_same, batch, is_same, row, run
from ..tiny_models import tiny

OURS = str(Path(hf_paged_cache.__file__).parent)
PROMPTS = [row((1, 9)), row((1, 9), (2, 6)), row((1, 5), (3, 6)), row((4, 13))]

# name -> arguments of a call
CALLS: dict[str, dict[str, Any]] = {
    "greedy": batch(PROMPTS[1]),
    "padded": batch(PROMPTS[0], PROMPTS[2], PROMPTS[3]),
    "beams": {**batch(PROMPTS[2]), "num_beams": 3},
    "samples": {**batch(PROMPTS[1]), "do_sample": True, "num_return_sequences": 3},
    "chunks": {**batch(PROMPTS[3], PROMPTS[0]), "prefill_chunk_size": 4},
    "lookup": {**batch(PROMPTS[1] + PROMPTS[1]), "prompt_lookup_num_tokens": 2},
}


@pytest.fixture(scope="module")
def references() -> dict[str, Any]:
    return {name: run(tiny("llama"), max_new_tokens=4, **arguments) for name, arguments in CALLS.items()}


@functools.cache
def where_no_signal_comes(code: CodeType) -> frozenset[int]:
    """Offsets of instructions at which a line may begin, and before which the interpreter lets no signal through.

    The end of a `with` block, where `__exit__` is not yet called; and what does nothing, as `try:`, which need not be
    under the handlers of the blocks around it.
    """
    instructions = list(dis.get_instructions(code))
    offsets = {each.offset for each in instructions if each.opname == "NOP"}
    instructions = [each for each in instructions if each.opname not in ("NOP", "PRECALL")]
    for at, instruction in enumerate(instructions):
        after = [(each.opname, each.argval) for each in instructions[at : at + 5]]
        if after[0][0] == "SWAP":  # what is returned waits below
            del after[0]
        is_normal = after[:3] == [("LOAD_CONST", None)] * 3 and after[3:4] == [("CALL", 2)]
        is_raised = [name for name, _ in after[:2]] == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]
        if is_normal or is_raised:
            offsets.add(instruction.offset)
    return frozenset(offsets)


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line of this package that this thread runs; 0 only counts.

    Loops over a model's weights are left out, which change nothing: each would have as many lines as all else. So is
    `where_no_signal_comes`, where a tracer would leave a lock held for ever.

    Args:
        again: it raises once more so many lines later; 0: it does not.
        names: of functions, whose lines alone count; empty: of all.
    """

    def __init__(self, at_line: int = 0, *, again: int = 0, names: tuple[str, ...] = ()) -> None:
        self.num_lines = 0
        self.place = ""
        self._at_line, self._again, self._names = at_line, again, names

    def __enter__(self) -> Interrupter:
        self._before = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _enter_frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code.co_name.startswith("<") and Path(code.co_filename).parent.name == "model":
            return None
        is_asked = not self._names or code.co_name in self._names
        return self._line if is_asked and code.co_filename.startswith(OURS) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and frame.f_lasti not in where_no_signal_comes(frame.f_code):
            self.num_lines += 1
            if self.num_lines == self._at_line:
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                self._at_line, self._again = (self.num_lines + self._again if self._again else 0), 0
                raise KeyboardInterrupt
        return self._line


def prepared() -> PagedPrefixCache:
    """A cache that has made two calls, on a store so small that the third one evicts."""
    cache = PagedPrefixCache(PrefixStore(tiny("llama"), block_size=4, num_blocks=26))
    run(tiny("llama"), cache, max_new_tokens=4, **CALLS["greedy"])
    run(tiny("llama"), cache, max_new_tokens=4, **CALLS["beams"])
    return cache


def assert_all_accounted_for(cache: PagedPrefixCache) -> None:
    cache.check()
    cache.reset()
    gc.collect()
    cache.check()
    stats = cache.stats()
    assert stats.num_blocks_in_use == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks - 1


def pin_and_unpin(cache: PagedPrefixCache) -> None:
    tokens = CALLS["greedy"]["input_ids"][0]
    for length in (8, len(tokens)):
        cache.pin(tokens[:length])
    cache.pin(tokens)
    cache.unpin(tokens[:8])
    cache.unpin()


def test_pins_are_there_or_not_and_no_block_is_lost_wherever_pinning_is_interrupted(references: dict[str, Any]) -> None:
    cache = prepared()
    held = cache.stats().num_blocks_in_use  # by rows
    with Interrupter() as counter:
        pin_and_unpin(cache)
    assert counter.num_lines > 100
    for at_line in range(1, counter.num_lines + 1, 23):
        with Interrupter(at_line) as interrupter, contextlib.suppress(KeyboardInterrupt):
            pin_and_unpin(cache)
        cache.check()
        cache.unpin()
        assert cache.stats().num_blocks_in_use == held, interrupter.place
        assert cache.stats().num_pinned_blocks == 0, interrupter.place
    assert_same(references["greedy"], run(tiny("llama"), cache, max_new_tokens=4, **CALLS["greedy"]))
    assert_all_accounted_for(cache)


@pytest.mark.parametrize("num_blocks", [4, 26], ids=["no room for it", "room"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt inside a finalizer
def test_a_call_interrupted_at_any_line_leaves_the_cache_right(num_blocks: int, references: dict[str, Any]) -> None:
    """One cache for all; every other call is interrupted a second time while it is being left."""
    model, rng = tiny("llama"), random.Random(0)
    for name, given in CALLS.items():
        cache = PagedPrefixCache(model, block_size=4, num_blocks=num_blocks)
        with Interrupter() as counter:
            run(model, cache, max_new_tokens=4, **given)
        for again in (0, rng.randint(1, 40), 0, rng.randint(1, 40)):
            at_line = rng.randint(1, counter.num_lines)
            with Interrupter(at_line, again=again) as interrupter, contextlib.suppress(KeyboardInterrupt):
                run(model, cache, max_new_tokens=4, **given)
            for after in (rng.choice(list(CALLS)), name):
                output = run(model, cache, max_new_tokens=4, **CALLS[after])
                assert is_same(references[after], output), (name, after, interrupter.place)
        assert_all_accounted_for(cache)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_wherever_the_end_of_generate_is_interrupted_the_store_can_be_reset() -> None:
    model, names = tiny("llama"), ("end", "close")
    with Interrupter(names=names) as counter:
        run(model, prepared(), max_new_tokens=2, **CALLS["greedy"])
    assert counter.num_lines > 10
    for at_line in range(1, counter.num_lines + 1):
        cache = prepared()
        with Interrupter(at_line, names=names), contextlib.suppress(KeyboardInterrupt):
            run(model, cache, max_new_tokens=2, **CALLS["greedy"])
        cache.store.reset_prefix_cache()
        assert_all_accounted_for(cache)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_wherever_rows_that_grow_are_interrupted_what_is_kept_is_what_ran(references: dict[str, Any]) -> None:
    """In an empty store layers make memory of their own in the first forward, which becomes that of the rows."""
    model = tiny("llama")
    names = ("after_forward", "_append_elsewhere", "lie_apart", "lie_in", "_gather", "gather", "take", "note_writes")
    with Interrupter(names=names) as counter:
        run(model, PagedPrefixCache(model, block_size=4), max_new_tokens=4, **CALLS["greedy"])
    assert counter.num_lines > 100
    for at_line in range(1, counter.num_lines + 1):
        cache = PagedPrefixCache(model, block_size=4)
        with Interrupter(at_line, names=names) as interrupter, contextlib.suppress(KeyboardInterrupt):
            run(model, cache, max_new_tokens=4, **CALLS["greedy"])
        cache.reset()
        output = run(model, cache, max_new_tokens=4, **CALLS["greedy"])
        assert is_same(references["greedy"], output), interrupter.place
        assert_all_accounted_for(cache)


@pytest.mark.parametrize(("num_known", "num_blocks"), [(0, 2), (20, None)], ids=["first", "further"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_wherever_the_end_of_a_forward_is_interrupted_it_has_happened_or_not(
    num_known: int, num_blocks: int | None
) -> None:
    """The length that the cache then says is where one has to resume."""
    model, ids = tiny("llama"), torch.tensor([row((1, 30)), row((2, 30))])
    with torch.no_grad():
        wanted = model(ids, use_cache=False).logits[:, -1]

    def forward(cache: PagedPrefixCache, start: int, stop: int) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(ids[:, start:stop], past_key_values=cache).logits
        return logits

    def begun() -> PagedPrefixCache:
        cache = PagedPrefixCache(model, num_blocks=num_blocks)
        if num_known:
            forward(cache, 0, num_known)
        return cache

    for _ in range(2):  # the first one also learns what is learned of a model once
        cache = begun()
        with Interrupter() as counter:
            forward(cache, num_known, 25)
    lengths = set()
    for at_line in range(1, counter.num_lines + 1, counter.num_lines // 30):
        cache = begun()
        with Interrupter(at_line) as interrupter, contextlib.suppress(KeyboardInterrupt):
            forward(cache, num_known, 25)
        length = cache.get_seq_length()
        lengths.add(length)
        logits = forward(cache, length, 30)
        assert cache.get_seq_length() == 30, interrupter.place
        assert (logits[:, -1] - wanted).abs().max() <= 1e-4 * wanted.abs().max(), interrupter.place
        assert_all_accounted_for(cache)
    assert lengths == {num_known, 25}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("deed", ["reset", "crop", "reorder", "deepcopy", "reset_prefix_cache", "with"])
def test_what_a_user_does_between_calls_may_be_interrupted(deed: str, references: dict[str, Any]) -> None:
    deeds: dict[str, Callable[[PagedPrefixCache], Any]] = {
        "reset": lambda cache: cache.reset(),
        "crop": lambda cache: cache.crop(-6),
        "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 2, 0])),
        "deepcopy": copy.deepcopy,
        "reset_prefix_cache": lambda cache: cache.reset_prefix_cache(),
        "with": lambda cache: (cache.__enter__(), cache.__exit__(None, None, None)),
    }
    cache = prepared()
    with Interrupter() as counter:
        deeds[deed](cache)
    step = max(1, counter.num_lines // 6)
    for at_line in range(1, counter.num_lines + 1, step):
        cache = prepared()
        with Interrupter(at_line) as interrupter, contextlib.suppress(KeyboardInterrupt):
            deeds[deed](cache)
        model = tiny("llama")
        leave_all_with_blocks()
        try:
            cache.check()
            for name in ("padded", "beams"):
                assert_same(references[name], run(model, cache, max_new_tokens=4, **CALLS[name]))
            assert_all_accounted_for(cache)
        except BaseException as error:
            error.add_note(f"{deed} interrupted at {interrupter.place}")
            raise


class StopError(Exception):
    """Raised on purpose."""


def stop() -> None:
    raise StopError


def test_a_generator_round_generate_dropped_half_way_frees_the_cache(references: dict[str, Any]) -> None:
    """The bracket itself may be open when its generator is dropped: closing it ends the call."""
    model = tiny("llama")
    cache = prepared()

    def custom(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> Iterator[int]:
        """A decoding loop that yields, as one of a server would."""
        inputs = input_ids
        while True:
            with torch.no_grad():
                logits = model(inputs, past_key_values=kwargs["past_key_values"], logits_to_keep=1).logits
            inputs = logits[:, -1:].argmax(-1)
            yield int(inputs)

    tokens = model.generate(
        torch.tensor([PROMPTS[1]]),
        attention_mask=torch.ones(1, len(PROMPTS[1])),
        past_key_values=cache,
        custom_generate=custom,
    )
    wanted = references["greedy"].sequences[0, len(PROMPTS[1]) :].tolist()
    assert [next(tokens) for _ in range(2)] == wanted[:2]
    tokens.close()
    del tokens
    assert_same(references["padded"], run(model, cache, max_new_tokens=4, **CALLS["padded"]))
    assert_all_accounted_for(cache)


def test_a_cache_that_goes_with_its_failed_call_leaves_nothing_behind(references: dict[str, Any]) -> None:
    model = tiny("llama")
    store = PrefixStore(model, block_size=4, num_blocks=26)
    for _ in range(3):
        cache = PagedPrefixCache(store)
        held = weakref.ref(cache)
        with pytest.raises(StopError):
            run(model, cache, max_new_tokens=4, logits_processor=[AtStep(2, stop)], **CALLS["beams"])
        ring: list[Any] = [cache]
        ring.append(ring)  # the cyclic collector finds it
        del cache, ring
        gc.collect()
        assert held() is None
    other = PagedPrefixCache(store)
    for name in CALLS:
        assert_same(references[name], run(model, other, max_new_tokens=4, **CALLS[name]))
    assert_all_accounted_for(other)
