"""Rows of a call go on rightly whatever was done to them: cropped, copied, run past the hooks, from other threads."""

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_paged_cache import CacheArgumentError, CacheBusyError, ForwardMismatchError, PagedPrefixCache, PrefixStore
from hf_paged_cache.call import keep
from hf_paged_cache.rows import memory

from ..conformance import zoo
from ..internals import failing_forward, split_everywhere
from ..reference import FROM_5_23, AtStep, assert_near, assert_same, at_once, batch, is_same, row, run, zero_blocks
from ..tiny_models import build, tiny

PROMPT = torch.tensor([row((1, 20))])
NEW = torch.tensor([row((9, 90))])


def ids_of(*runs: tuple[int, int]) -> Tensor:
    return torch.tensor([row(*runs)])


def forward(model: Any, ids: Tensor, past: Any, **more: Any) -> Tensor:
    with torch.no_grad():
        output = model(ids, past_key_values=past, **more)
    logits: Tensor = output[0]
    return logits[:, -1]


@pytest.mark.parametrize("inner", [lambda model: model.model, lambda model: model.forward], ids=["inside", "no hooks"])
def test_forwards_that_tell_no_hook_go_on_as_with_a_dynamic_cache(
    inner: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    split_everywhere(monkeypatch)
    model, cache = tiny("llama"), PagedPrefixCache(tiny("llama"), block_size=4)
    num_rows = 3
    prompts = PROMPT.repeat(num_rows, 1)
    prompts[:, 16:] += torch.arange(num_rows)[:, None]
    for _ in range(2):
        run(model, cache, input_ids=prompts)
    pasts = [run(model, each, input_ids=prompts).past_key_values for each in (None, cache)]
    for step in range(3):
        new = NEW[:, 3 * step : 3 * step + 3].repeat(num_rows, 1)
        wanted, got = (forward(inner(model), new, past) for past in pasts)
        assert_near(got, wanted)
    wanted, got = (forward(model, NEW[:, :1].repeat(num_rows, 1), past) for past in pasts)
    assert_near(got, wanted)
    reference = run(model, input_ids=prompts)
    assert_same(reference, run(model, cache, input_ids=prompts))  # nothing of it was kept under a name
    cache.check()


def loop(model: Any, past: Any, between: Callable[[], None] = lambda: None) -> Tensor:
    forward(model, PROMPT, past, logits_to_keep=1)
    logits = []
    for step in range(3):
        if step == 1:
            between()
        logits.append(forward(model, NEW[:, step : step + 1], past))
    return torch.stack(logits)


@pytest.mark.parametrize("has_begun", [False, True], ids=["in the loop", "round its beginning"])
def test_a_loop_goes_on_whatever_generate_runs_in_another_thread(has_begun: bool) -> None:
    model, other = tiny("llama"), ids_of((2, 20))
    wanted, reference = loop(model, DynamicCache()), run(model, input_ids=other)
    cache, started, may_end = PagedPrefixCache(model), threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def stand() -> None:
        started.set()
        assert may_end.wait(60)

    def generate() -> None:
        try:
            assert_same(reference, run(model, cache, input_ids=other, logits_processor=[AtStep(1, stand)]))
        except BaseException as error:  # noqa: BLE001  # told to the main thread
            errors.append(error)

    thread = threading.Thread(target=generate)

    def end() -> None:
        if not has_begun:
            thread.start()
        may_end.set()
        thread.join()

    if has_begun:
        thread.start()
        assert started.wait(60)
    assert_near(loop(model, cache, end), wanted)
    assert not errors
    cache.reset()
    assert cache.lookup(other).num_tokens >= 16
    assert cache.lookup(torch.cat([PROMPT, NEW[:, :3]], dim=1)).num_tokens >= 16


def test_a_cache_that_is_collected_while_blocks_are_written_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    store = PrefixStore(model, block_size=16)
    caches, writes = [PagedPrefixCache(store) for _ in range(2)], keep.memory.write_blocks
    left: Any = PagedPrefixCache(store)
    forward(model, ids_of((5, 20)), left, logits_to_keep=1)
    left.itself = left  # a cycle, as of an exception's traceback
    del left
    is_writing, may_collect = threading.Event(), threading.Event()

    def write(*arguments: Any) -> None:
        if not is_writing.is_set():
            is_writing.set()
            assert may_collect.wait(60)
            gc.collect()
        writes(*arguments)

    monkeypatch.setattr(keep.memory, "write_blocks", write)
    prompts = [ids_of((3, 40)), ids_of((4, 40))]

    def second() -> None:
        assert is_writing.wait(60)
        threading.Timer(0.5, may_collect.set).start()  # while the other one waits to write
        run(model, caches[1], input_ids=prompts[1])

    at_once(lambda: run(model, caches[0], input_ids=prompts[0]), second)
    asks = PagedPrefixCache(store)
    assert asks.lookup(ids_of((5, 20))).num_tokens == 16  # what the collected one had computed


def test_rows_in_another_dtype_than_known_blocks_read_them_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    split_everywhere(monkeypatch)
    model = build("llama")
    cache, prompts = PagedPrefixCache(model, block_size=16), torch.cat([PROMPT.repeat(4, 2), NEW[:, :32].view(4, 8)], 1)
    run(model, cache, input_ids=ids_of((2, 40)))  # blocks in fp32
    model.to(torch.bfloat16)
    run(model, cache, input_ids=prompts[:1])
    got, wanted = run(model, cache, input_ids=prompts), run(model, input_ids=prompts)
    assert cache.last_call.reused_tokens >= 4 * 32
    torch.testing.assert_close(got.logits[0], wanted.logits[0], rtol=0, atol=0.05 * float(wanted.logits[0].abs().max()))


def test_an_index_goes_on_where_rows_have_less_in_common_with_the_call_before_than_blocks_know() -> None:
    model = zoo.build("glm_moe_dsa")
    cache, prompts = PagedPrefixCache(model, block_size=16), [ids_of((1, 64), (2, 3)), ids_of((1, 40), (3, 3))]
    for prompt in prompts:
        generate: Any = model.generate  # its output holds no rows, so the next call may take their memory
        generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, past_key_values=cache)
    prompt = ids_of((1, 64), (4, 3))
    assert_same(run(model, input_ids=prompt), run(model, cache, input_ids=prompt))
    assert cache.last_call.reused_tokens == 64


def test_rows_that_a_function_of_the_caller_has_given_away_stay_as_they_are() -> None:
    model, prompt, kept = tiny("llama"), ids_of((1, 40)), []

    def custom(model: PreTrainedModel, input_ids: Tensor, **given: Any) -> Tensor:
        forward(model, input_ids, given["past_key_values"], logits_to_keep=1)
        kept.append(given["past_key_values"])
        return input_ids

    cache, logits = PagedPrefixCache(model), []
    run(model, cache, input_ids=ids_of((8, 33)))
    cache.reset()
    for past in ({}, {"past_key_values": cache}):
        generate: Any = model.generate
        generate(prompt, attention_mask=torch.ones_like(prompt), custom_generate=custom, max_new_tokens=20, **past)
        if past:
            run(model, cache, input_ids=torch.cat([prompt[:, :38], NEW[:, :2]], dim=1))
        logits.append(forward(model, NEW[:, 5:6], kept[-1]))
    assert_near(logits[1], logits[0])


def test_however_many_tokens_a_call_may_generate_memory_is_made_as_they_come() -> None:
    model, cache = tiny("llama"), PagedPrefixCache(tiny("llama"))
    given: dict[str, Any] = {"input_ids": PROMPT, "max_new_tokens": 10**10}
    given["stopping_criteria"] = [lambda ids, scores, **_: torch.full((len(ids),), ids.shape[1] >= 24)]
    reference = run(model, **given)
    run(model, cache, input_ids=ids_of((2, 64)))
    cache.reset()
    for _ in range(2):
        assert_same(reference, run(model, cache, **given))
    assert cache.lookup(ids_of((2, 64))).num_tokens == 64  # nothing made way


def test_the_rows_of_the_call_before_are_gone_while_a_call_runs() -> None:
    model, cache = tiny("llama"), PagedPrefixCache(tiny("llama"))
    before, seen = weakref.ref(run(model, cache, input_ids=PROMPT).past_key_values), list[bool]()

    def look() -> None:
        gc.collect()
        seen.append(before() is not None)

    run(model, cache, input_ids=PROMPT, logits_processor=[AtStep(1, look), AtStep(3, look)])
    assert seen == [False] * 2


def test_idle_caches_do_not_hold_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    split_everywhere(monkeypatch)
    model = tiny("llama")
    store, idle = PrefixStore(model, block_size=16, num_blocks=40), []
    for number in range(1, 6):
        idle.append(PagedPrefixCache(store))
        prompts = ids_of((number, 80)).repeat(3, 1)
        prompts[:, 72:] += torch.arange(3)[:, None]
        for rows in (prompts[:1], prompts):
            assert_same(run(model, input_ids=rows), run(model, idle[-1], input_ids=rows))
    assert store.stats().num_blocks_in_use <= 25
    for cache in idle:  # each may go on with its rows
        assert cache.get_seq_length() == 80 + 5


def test_rows_cropped_to_nothing_begin_anew() -> None:
    model = tiny("llama")
    cache = PagedPrefixCache(model, block_size=4)
    for number, pad in enumerate((5, 10, 2)):
        prompts = batch(row((1, 30)), row((2 + number, 30 - pad)))
        mask = prompts["attention_mask"]
        given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        got = forward(model, prompts["input_ids"], cache, **given)
        assert_near(got, forward(model, prompts["input_ids"], DynamicCache(), **given))
        cache.crop(-cache.get_seq_length())
        assert cache.get_seq_length() == 0
    assert not cache.verify().differing


@pytest.mark.parametrize(
    "edit",
    [lambda states: states.mul_(0), lambda states: states.data.mul_(0), lambda states: states.numpy().fill(0)],
    ids=["counted", "in data", "in numpy"],
)
def test_keys_and_values_that_are_edited_are_heeded_and_never_kept(edit: Callable[[Tensor], Any]) -> None:
    model, first, second = tiny("llama"), ids_of((1, 48)), ids_of((2, 20))
    cache, plain = PagedPrefixCache(model), DynamicCache()
    for past in (cache, plain):
        forward(model, first, past)
        for layer in past.layers:
            edit(layer.values)
    assert_near(forward(model, second, cache), forward(model, second, plain))
    cache.reset()
    whole = torch.cat([first, second], dim=1)
    assert_same(run(model, input_ids=whole), run(model, cache, input_ids=whole))
    assert cache.last_call.reused_tokens == 48
    for layer in cache.layers:
        edit(layer.values)
    assert_same(run(model, input_ids=whole), run(model, cache, input_ids=whole))
    assert not cache.verify().differing


def test_keys_and_values_that_are_put_in_by_hand_count() -> None:
    model = tiny("llama")
    pasts = [run(model, each, input_ids=PROMPT).past_key_values for each in (None, PagedPrefixCache(model))]
    new = torch.randn(2, 2, 1, 2, 3, 16, generator=torch.Generator().manual_seed(0))
    for past in pasts:
        for layer_idx, (keys, values) in enumerate(new):
            past.update(keys, values, layer_idx)
    assert pasts[0].get_seq_length() == pasts[1].get_seq_length()
    assert_near(*(forward(model, NEW[:, :1], past) for past in reversed(pasts)))


def test_rows_are_reset_with_all_that_they_were_about_to_do() -> None:
    model = tiny("llama")
    past = run(model, PagedPrefixCache(model), input_ids=PROMPT).past_key_values
    past.reset()
    prompts, plain = PROMPT.repeat(4, 1), DynamicCache()
    prompts[3] += 1
    for new in (prompts, NEW[:, :4].T):
        got, wanted = (forward(model, new, each, logits_to_keep=1) for each in (past, plain))
        assert got.shape == wanted.shape
        assert_near(got, wanted)


def test_beams_go_on_where_the_cache_is_detached_meanwhile() -> None:
    model = build("llama")
    cache, reference = PagedPrefixCache(model), run(model, input_ids=PROMPT, num_beams=2)
    assert_same(reference, run(model, cache, input_ids=PROMPT, num_beams=2, logits_processor=[AtStep(1, cache.detach)]))


def test_two_threads_that_run_forwards_on_the_same_rows_at_once_are_told() -> None:
    model, plain, told = build("llama"), DynamicCache(), []
    cache = PagedPrefixCache(model)
    forward(model, PROMPT, cache)

    def intrude(*_: Any) -> None:
        hook.remove()
        with pytest.raises(CacheBusyError, match="another thread"):
            at_once(lambda: forward(model, NEW[:, :1], cache))
        told.append(True)

    forward(model, PROMPT, plain)
    wanted = forward(model, NEW[:, :1], plain)
    hook = model.model.layers[1].register_forward_pre_hook(intrude)
    assert_near(forward(model, NEW[:, :1], cache), wanted)
    assert told


def test_new_tokens_alone_are_refused_where_the_rows_are_gone_whoever_calls_generate() -> None:
    model, cache = tiny("llama"), PagedPrefixCache(tiny("llama"))
    said = run(model, cache, input_ids=PROMPT).sequences
    run(model, cache, input_ids=ids_of((9, 30)))
    whole = torch.cat([said, NEW[:, :5]], dim=1)
    generate: Any = type(model).generate
    given = {"attention_mask": torch.ones_like(whole), "max_new_tokens": 4, "past_key_values": cache}
    with pytest.raises(CacheArgumentError, match="attention mask"):
        generate(model, whole[:, said.shape[1] - 1 :], **given)
    assert_same(run(model, input_ids=whole), run(model, cache, input_ids=whole))


def test_rows_that_go_on_with_new_tokens_are_nobody_elses_meanwhile(model: PreTrainedModel) -> None:
    """A call that begins inside of theirs has the same prefix, and would go on in their memory."""
    cache, prompt = PagedPrefixCache(model), row((1, 60))
    for _ in range(2):  # the second one knows how keys and values look
        said = model.generate(torch.tensor([prompt]), past_key_values=cache, max_new_tokens=4, do_sample=False)
    turn = torch.cat([said, torch.tensor([row((2, 5))])], 1)
    other = torch.tensor([prompt + row((3, 30))])
    new = {"input_ids": turn[:, cache.get_seq_length() :], "attention_mask": torch.ones_like(turn)}
    wanted = run(model, input_ids=turn, max_new_tokens=12)
    nested = AtStep(3, lambda: run(model, cache, input_ids=other))
    assert_same(wanted, run(model, cache, **new, max_new_tokens=12, logits_processor=[nested]))


# Each of these gave other logits than a `DynamicCache`, in silence.


@pytest.mark.parametrize("move", ["reorder_cache", "batch_select_indices"])
def test_rows_of_beams_change_places_whole_once_their_call_is_over(move: str, model: PreTrainedModel) -> None:
    prompts, found = batch(row((1, 12)), row((2, 9))), []
    for cache in (DynamicCache(config=model.config), PagedPrefixCache(model, block_size=4)):
        run(model, cache, **prompts, num_beams=2, num_return_sequences=2)
        getattr(cache, move)(torch.tensor([2, 3, 0, 1]))
        mask = torch.tensor([[0] * 3 + [1] * 15] * 2 + [[1] * 18] * 2)
        with torch.no_grad():
            given = {"attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}
            found.append(model(torch.tensor([[5]] * 4), **given, past_key_values=cache).logits)
    assert_near(found[1], found[0])


def test_a_cache_goes_on_with_the_rows_that_were_passed_on(model: PreTrainedModel) -> None:
    ids, found = torch.tensor([row((1, 20))]), []
    for cache in (DynamicCache(config=model.config), PagedPrefixCache(model)):
        first = run(model, cache, input_ids=ids)
        run(model, first.past_key_values, input_ids=torch.cat([first.sequences, ids[:, :3]], 1))
        with torch.no_grad():
            found.append((cache.get_seq_length(), model(ids[:, :1], past_key_values=cache).logits))
    assert found[0][0] == found[1][0]
    assert_near(found[1][1], found[0][1])


def test_layers_that_are_trimmed_by_hand_are_the_rows(model: PreTrainedModel) -> None:
    ids, found = torch.tensor([row((1, 17))]), []
    for cache in (DynamicCache(config=model.config), PagedPrefixCache(model)):
        with torch.no_grad():
            model(ids[:, :16], past_key_values=cache)
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys[:, :, :10], layer.values[:, :, :10]
            assert cache.get_seq_length() == 10
            found.append(model(ids[:, 16:], past_key_values=cache).logits)
    assert_near(found[1], found[0])


def test_a_copy_of_edited_rows_is_not_kept(model: PreTrainedModel) -> None:
    cache, ids = PagedPrefixCache(model, block_size=4), torch.tensor([row((1, 24))])
    with torch.no_grad():
        model(ids[:, :16], past_key_values=cache, logits_to_keep=1)
    cache.layers[0].keys.zero_()
    copied = copy.deepcopy(cache)
    del cache
    copied.reset()
    assert_same(run(model, input_ids=ids), run(model, copied, input_ids=ids))


def test_positions_that_a_custom_generate_gives_its_steps_are_read(model: PreTrainedModel) -> None:
    def generate(model: Any, input_ids: torch.Tensor, **given: Any) -> torch.Tensor:
        rows = given["past_key_values"]
        logits = model(input_ids, past_key_values=rows, logits_to_keep=1).logits
        for number in range(9):
            token = logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, token], 1)
            at = torch.tensor([[40 + number]])
            logits = model(input_ids=token, past_key_values=rows, position_ids=at, logits_to_keep=1).logits
        return input_ids

    cache = PagedPrefixCache(model, block_size=4)
    said = model.generate(torch.tensor([row((1, 24))]), custom_generate=generate, past_key_values=cache)
    assert_same(run(model, input_ids=said), run(model, cache, input_ids=said))


@FROM_5_23
def test_a_window_is_kept_where_prompts_part_that_it_no_longer_shows() -> None:
    model = build("mistral", sliding_window=64, max_position_embeddings=1024)
    cache, reused, shared = PagedPrefixCache(model), [], row((1, 320))
    for question in range(2, 5):
        prompt = batch([*shared, *row((question, 150))])
        assert_same(run(model, **prompt), run(model, cache, **prompt))
        reused.append(cache.last_call.reused_tokens)
    assert reused[2] == 320
    cache.check()
    zero_blocks(cache)
    prompt = batch([*shared, *row((5, 30))])  # its last token still sees what is before
    assert not is_same(run(model, **prompt), run(model, cache, **prompt))


def test_more_than_a_window_lets_take_back_is_refused_before_anything_changes() -> None:
    model = zoo.build("mistral")
    cache, prompt = PagedPrefixCache(model, block_size=4), torch.tensor([row((1, 40))])
    forward(model, prompt, cache, logits_to_keep=1)
    steps = [step % 90 + 1 for step in range(150)]
    for step in steps:
        forward(model, torch.tensor([[step]]), cache)
    with pytest.raises(CacheArgumentError, match="cannot take back 120 tokens: layers with a window"):
        cache.crop(-120)
    plain = DynamicCache(config=model.config)
    forward(model, torch.cat([prompt, torch.tensor([steps])], dim=1), plain)
    assert_near(forward(model, prompt[:, :1], cache), forward(model, prompt[:, :1], plain))


def test_a_forward_that_died_while_windows_moved_leaves_nothing_wrong() -> None:
    """The first layer has moved its columns then, and the second has not."""
    model, steps = zoo.build("mistral"), torch.tensor([row((1, 40), (2, 160))])
    cache, plain = PagedPrefixCache(model, block_size=4), DynamicCache(config=model.config)
    for past in (cache, plain):
        forward(model, steps[:, :40], past, logits_to_keep=1)
    num_lost = 0
    for at in range(40, 200):
        new = steps[:, at : at + 1]
        with failing_forward(model, 1, KeyError("planted")), pytest.raises(KeyError):
            forward(model, new, cache)
        wanted = forward(model, new, plain)
        try:
            got = forward(model, new, cache)
        except ForwardMismatchError:
            num_lost += 1
            cache.reset()
            assert not cache.verify().differing
            got = forward(model, steps[:, : at + 1], cache, logits_to_keep=1)
        assert_near(got, wanted)
    cache.reset()
    assert not cache.verify().differing
    assert num_lost


def test_a_bypassed_call_goes_on_where_the_rows_were() -> None:
    model, prompt, logits = zoo.build("gemma3_text"), torch.tensor([row((1, 60))]), []
    for past in (DynamicCache(config=model.config), PagedPrefixCache(model, block_size=4)):
        forward(model, prompt, past, logits_to_keep=1)
        embeddings = model.get_input_embeddings()(prompt[:, :2])
        with torch.no_grad():
            logits.append(model(inputs_embeds=embeddings, past_key_values=past).logits[:, -1])
        logits.append(forward(model, prompt[:, :1], past))
    assert_near(logits[2], logits[0])
    assert_near(logits[3], logits[1])


@pytest.mark.parametrize(
    ("name", "error"), [("write_blocks", torch.OutOfMemoryError), ("load_blocks", KeyboardInterrupt)]
)
def test_a_fault_while_windows_are_kept_or_loaded_leaves_nothing_wrong_behind(
    name: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each time that it is called."""
    model, given = zoo.build("gemma3_text"), batch(row((1, 34), (2, 9)), row((1, 34), (3, 20)))
    reference, number, num_calls = run(model, **given), 0, [0]
    act = getattr(memory, name)

    def failing(*arguments: Any, **more: Any) -> Any:
        num_calls[0] += 1
        if num_calls[0] == number:
            raise error("in the middle")
        return act(*arguments, **more)

    while num_calls[0] >= number:
        number, num_calls[0] = number + 1, 0
        cache = PagedPrefixCache(model, block_size=4, num_blocks=60)
        run(model, cache, **batch(row((1, 34))), max_new_tokens=1)
        cache.reset()
        with monkeypatch.context() as patch:
            patch.setattr(memory, name, failing)
            try:
                assert_same(reference, run(model, cache, **given))
            except error:
                assert error is KeyboardInterrupt or name == "load_blocks"
        cache.check()
        assert_same(reference, run(model, cache, **given))
        cache.check()
    assert number > 2
