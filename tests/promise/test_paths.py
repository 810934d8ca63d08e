"""Every path by which a call can reach the cache: it gives what a fresh `DynamicCache` gives, or an error that says why
not.
"""

from __future__ import annotations

import copy
import pickle
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel, TextIteratorStreamer

from hf_paged_cache import (
    CacheArgumentError,
    CacheBusyError,
    ForwardMismatchError,
    PagedPrefixCache,
    PrefixStore,
    UnsupportedModelError,
)

from ..internals import begin_chunks_at_the_first_column
from ..reference import IDS, PROMPT, TOLERANCE, AtStep, Forwards, assert_right, assert_same, batch, row, run
from ..tiny_models import build, without_logits_to_keep

pytestmark = pytest.mark.usefixtures("one_thread")


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((got - wanted).abs().max() <= TOLERANCE * wanted.abs().max())


def whole(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits of all tokens without any cache."""
    with torch.no_grad():
        return model(ids, use_cache=False).logits


# Resuming.


def test_rows_do_not_resume_in_chunks_where_transformers_begins_these_at_the_first_column(
    model: PreTrainedModel, cache: PagedPrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before 5.23, where a `DynamicCache` gives other tokens."""
    said = torch.cat([run(model, cache, input_ids=IDS).sequences, torch.tensor([row((2, 7))])], 1)
    given = {"input_ids": said[:, cache.get_seq_length() :], "attention_mask": torch.ones_like(said)}
    with monkeypatch.context() as patch:
        begin_chunks_at_the_first_column(patch)
        with pytest.raises(CacheArgumentError, match="leave prefill_chunk_size out"):
            run(model, cache, **given, prefill_chunk_size=4)
    assert_same(run(model, input_ids=said), run(model, cache, **given))


def test_a_mask_that_fits_neither_the_ids_nor_rows_and_ids_is_refused(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    first = run(model, cache, input_ids=IDS)
    new = torch.tensor([row((2, 7))])  # one too few: the last token generated is missing in the rows
    mask = torch.ones(1, first.sequences.shape[1] + 7, dtype=torch.long)
    with pytest.raises(CacheArgumentError, match="continue exactly where the rows stopped"):
        run(model, cache, input_ids=new, attention_mask=mask)
    cache.check()
    assert_right(model, cache, input_ids=IDS)


# Two calls at once.


def test_a_nested_generate_on_the_same_cache_is_right_and_the_first_call_stays_right(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    other = torch.tensor([row((9, 30))])
    num_nested = 0

    def nested() -> None:
        nonlocal num_nested
        assert_right(model, cache, input_ids=other)
        num_nested += 1

    reference = run(model, input_ids=IDS)
    assert_same(reference, run(model, cache, input_ids=IDS, logits_processor=[AtStep(2, nested)]))
    assert num_nested == 1
    cache.check()
    assert_right(model, cache, input_ids=other)


# Round the bracket.


def test_an_instance_s_generate_of_somebody_else_is_wrapped_and_put_back(model: PreTrainedModel) -> None:
    calls: list[int] = []

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(kwargs))
        return type(model).generate(model, *args, **kwargs)

    model.generate = theirs
    cache = PagedPrefixCache(model)
    for _ in range(2):
        assert_right(model, cache, input_ids=IDS)
    assert len(calls) == 4
    assert cache.last_call.reused_tokens == 48  # of blocks
    cache.detach()
    assert model.generate is theirs
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_padding_that_grows_over_plain_forwards_without_positions_is_computed(model: PreTrainedModel) -> None:
    ids = torch.cat([IDS[:, :8], IDS[:, 4:12]])
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    outputs = []
    for cache in (DynamicCache(config=model.config), PagedPrefixCache(model)):
        with torch.no_grad():
            model(ids[:, :4], attention_mask=mask[:, :4], past_key_values=cache)
            outputs.append(model(ids[:, 4:], attention_mask=mask, past_key_values=cache).logits)
    reference, ours = (logits[:, 1:] for logits in outputs)  # column 4 of row 0 is padding: nobody reads its logits
    assert (reference - ours).abs().max() <= 1e-4 * reference.abs().max()


def test_resetting_the_store_never_ends_a_conversation_by_hand(model: PreTrainedModel) -> None:
    cache = PagedPrefixCache(PrefixStore(model, block_size=2))
    other = PagedPrefixCache(cache.store)
    with torch.no_grad():
        reference = model(IDS, use_cache=False).logits
        model(IDS[:, :10], past_key_values=cache)
        with pytest.raises(CacheBusyError, match=r"cache's reset\(\)"):
            other.reset_prefix_cache()
        ours = model(IDS[:, 10:], past_key_values=cache).logits
    assert (reference[:, 10:] - ours).abs().max() <= 1e-4 * reference.abs().max()
    cache.reset()
    other.reset_prefix_cache()
    assert cache.stats().num_cached_blocks == 0


def test_one_cache_on_two_models_of_one_architecture_is_refused(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    other = build("llama", seed=1)
    run(model, cache, input_ids=IDS)
    with pytest.raises(ForwardMismatchError, match="run the model that the cache was built for"):
        run(other, cache, input_ids=IDS)  # nothing is attached to it
    PagedPrefixCache(other)
    with pytest.raises(CacheArgumentError, match="was built for another model"):
        run(other, cache, input_ids=IDS)
    with pytest.raises(CacheArgumentError, match="another model"):
        other(IDS, past_key_values=cache)
    cache.check()
    assert_right(model, cache, input_ids=IDS)
    own = PagedPrefixCache(other)
    assert_right(other, own, reused=0, input_ids=IDS)


def test_a_hub_style_custom_generate_works(model: PreTrainedModel, cache: PagedPrefixCache, tmp_path: Path) -> None:
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text(
        "def generate(model, **kwargs):\n    kwargs.pop('custom_generate', None)\n    return model.generate(**kwargs)\n"
    )
    how = {"custom_generate": str(tmp_path), "trust_remote_code": True}
    for _ in range(2):
        assert_same(run(model, input_ids=IDS), run(model, cache, input_ids=IDS, **how))
    assert cache.last_call.reused_tokens == 49


# What generate may be asked for.


@pytest.mark.parametrize("takes_logits_to_keep", [True, False])
def test_prompt_lookup_works_at_every_length_with_and_without_logits_to_keep(
    model: PreTrainedModel, takes_logits_to_keep: bool
) -> None:
    if not takes_logits_to_keep:
        model = without_logits_to_keep(model)
    cache = PagedPrefixCache(model)
    for length in (30, 33, 38, 43):
        ids = torch.tensor([row((1, 10), (1, 10), (1, 10), (1, length - 30))])  # repeats itself
        reference = run(model, input_ids=ids, prompt_lookup_num_tokens=3)
        for _ in range(2):
            assert_same(reference, run(model, cache, input_ids=ids, prompt_lookup_num_tokens=3))
    assert cache.last_call.reused_tokens == (42 if takes_logits_to_keep else 0)
    run(model, cache, input_ids=ids)
    assert cache.last_call.reused_tokens == 42
    cache.check()


@pytest.mark.parametrize("in_block", [False, True])
def test_assistant_early_exit_is_right(model: PreTrainedModel, cache: PagedPrefixCache, in_block: bool) -> None:
    """The assistant is the model itself with fewer layers: it shares the weights, and must not get our cache."""
    for _ in range(2):
        reference = run(model, input_ids=IDS, assistant_early_exit=1)
        if in_block:
            with cache:
                output = run(model, input_ids=IDS, assistant_early_exit=1)
        else:
            output = run(model, cache, input_ids=IDS, assistant_early_exit=1)
        assert_same(reference, output)
        cache.check()


@pytest.mark.parametrize("flag", [[0], True])
def test_any_truthy_output_hidden_states_computes_all_tokens(
    model: PreTrainedModel, cache: PagedPrefixCache, flag: Any
) -> None:
    with torch.no_grad():
        with Forwards(model) as shapes:
            for _ in range(2):
                cache.reset()
                output = model(IDS, past_key_values=cache, output_hidden_states=flag, logits_to_keep=1)
        assert shapes == [(1, 50), (1, 50)]
        wanted = model(IDS, output_hidden_states=True, use_cache=False).hidden_states
    if flag is True:
        for mine, theirs in zip(output.hidden_states, wanted, strict=True):
            assert close(mine, theirs)


def test_small_chunks_under_a_mask_with_a_hole_are_right_and_not_committed() -> None:
    model = build("bloom")
    cache = PagedPrefixCache(model, block_size=2)
    inputs = batch(row((1, 11)))
    holed = {**inputs, "attention_mask": inputs["attention_mask"].clone()}
    holed["attention_mask"][0, 4] = 0
    for size in (1, 2):
        reference = run(model, **holed, prefill_chunk_size=size)
        assert_same(reference, run(model, cache, **holed, prefill_chunk_size=size))
        assert_right(model, cache, **inputs)
        cache.reset_prefix_cache()


@pytest.mark.usefixtures("switching")
def test_a_streamer_in_a_thread_works(model: PreTrainedModel, cache: PagedPrefixCache, tiny_tokenizer: Any) -> None:
    ids = torch.tensor([[min(token, 98) for token in PROMPT]])
    reference = run(model, input_ids=ids, max_new_tokens=12).sequences
    wanted = tiny_tokenizer.decode(reference[0, 50:], skip_special_tokens=True)
    for _ in range(2):
        streamer = TextIteratorStreamer(tiny_tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
        arguments = {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "past_key_values": cache,
            "max_new_tokens": 12,
            "do_sample": False,
            "streamer": streamer,
        }
        thread = threading.Thread(target=model.generate, kwargs=arguments)
        thread.start()
        text = "".join(streamer)
        thread.join(timeout=300)
        assert text == wanted
    assert cache.last_call.reused_tokens == 49


# Plain forwards.


@pytest.mark.parametrize("kept", [None, 0, 1, 3, 50])
def test_a_plain_forward_is_right_and_skips_only_what_nobody_reads(
    model: PreTrainedModel, cache: PagedPrefixCache, kept: int | None
) -> None:
    wanted = whole(model, IDS)
    arguments = {} if kept is None else {"logits_to_keep": kept}
    with Forwards(model) as shapes, torch.inference_mode():
        for _ in range(2):
            got = model(IDS, past_key_values=cache, **arguments).logits
            assert got.shape[1] == (kept or 50)
            assert close(got, wanted[:, -got.shape[1] :])
            cache.reset()
    assert shapes == [(1, 50), (1, 50 if not kept else max(kept, 2))]
    cache.check()


def test_positional_arguments_are_seen(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    wanted = whole(model, IDS)
    with torch.no_grad():
        for _ in range(2):
            got = model(IDS, torch.ones_like(IDS), torch.arange(50)[None], cache, None, None, True, 1).logits
            assert got.shape[1] == 1
            assert close(got, wanted[:, -1:])
            cache.reset()
    assert cache.last_call.reused_tokens == 48
    positional = model.generate(IDS, attention_mask=torch.ones_like(IDS), past_key_values=cache, max_new_tokens=6)
    assert positional.tolist() == run(model, input_ids=IDS).sequences.tolist()


def test_a_plain_forward_without_positions_and_generate_hit_each_other(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    with torch.no_grad():
        model(IDS, past_key_values=cache)
    assert_right(model, cache, reused=49, input_ids=IDS)
    cache.reset()
    with torch.no_grad():
        got = model(IDS, past_key_values=cache, logits_to_keep=1).logits
    assert close(got, whole(model, IDS)[:, -1:])
    assert cache.last_call.reused_tokens == 48


# Recipes of the documentation.


def test_prefill_by_hand_then_deepcopy_then_generate(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    prefix = torch.tensor([row((1, 43))])
    with torch.no_grad():
        cache = model(prefix, past_key_values=cache).past_key_values
    for question in (2, 3, 4):
        ids = torch.cat([prefix, torch.tensor([row((question, 7))])], 1)
        twin = copy.deepcopy(cache)
        assert_right(model, twin, reused=43, input_ids=ids)
        assert cache.get_seq_length() == 43
    cache.check()


# Copies of the model.


def dumped_by_pickle(model: PreTrainedModel) -> PreTrainedModel:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, dumped_by_pickle])
def test_a_copy_of_an_attached_model_caches_too_and_is_another_model(
    model: PreTrainedModel, cache: PagedPrefixCache, copied: Callable[[PreTrainedModel], PreTrainedModel]
) -> None:
    reference = run(model, input_ids=IDS)
    with cache:
        twin = copied(model)
        assert_same(reference, run(twin, input_ids=IDS))  # on no cache: the block is the first model's
        assert cache.get_seq_length() == 0
    assert "generate" in vars(twin)
    with torch.no_grad():
        twin.lm_head.weight.neg_()  # so that nobody confuses the two
    assert run(twin, input_ids=IDS).sequences.tolist() != reference.sequences.tolist()
    other = PagedPrefixCache(twin)
    for _ in range(2):
        assert_right(twin, other, input_ids=IDS)
        assert_same(reference, run(model, cache, input_ids=IDS))
    assert other.last_call.reused_tokens == cache.last_call.reused_tokens == 49
    assert len(twin._forward_hooks) == len(twin._forward_pre_hooks) == 1
    other.detach()
    assert not twin._forward_hooks
    assert not twin._forward_pre_hooks
    assert len(model._forward_hooks) == 1
    assert_same(reference, run(model, cache, input_ids=IDS))


def test_save_pretrained_of_an_attached_model_works(
    model: PreTrainedModel, cache: PagedPrefixCache, tmp_path: Path
) -> None:
    run(model, cache, input_ids=IDS)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert "generate" not in vars(loaded)
    other = PagedPrefixCache(loaded)
    reference = run(model, input_ids=IDS)
    for _ in range(2):
        assert_same(reference, run(loaded, other, input_ids=IDS))
    assert other.last_call.reused_tokens == 49


# Masks that ask the cache.


def test_a_cache_without_rows_is_truthy_and_not_initialized(model: PreTrainedModel, cache: PagedPrefixCache) -> None:
    assert cache
    assert not cache.is_initialized
    run(model, cache, input_ids=IDS)
    assert cache.is_initialized
    seen: list[bool] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["past_key_values"].is_initialized), with_kwargs=True
    )
    run(model, cache, input_ids=IDS, max_new_tokens=2)
    # False in the first forward of a call, although a prefix of it is reused: what a bidirectional prefix hangs on
    assert seen[1:] == [True]


def test_tokens_behind_a_row_s_end_of_sequence_are_not_committed(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    inputs = batch(row((1, 20)), row((2, 20)))
    free = run(model, **inputs, max_new_tokens=40)
    first_ends = free.sequences[0, 21].item()  # the second token generated in row 0
    reference = run(model, **inputs, max_new_tokens=40, eos_token_id=first_ends)
    assert_same(reference, run(model, cache, **inputs, max_new_tokens=40, eos_token_id=first_ends))
    generated = reference.sequences.shape[1]
    cache.reset()
    other = (generated - 1) // 16 if first_ends not in reference.sequences[1, 20:-1] else None
    assert cache.stats().num_cached_blocks <= 22 // 16 + (other if other is not None else generated // 16)


# Several processes.


def _rank(rank: int, port: int, results: Any) -> None:
    """One of two processes: FSDP gathers weights in every forward, so both must run as many.

    One knows a prompt's prefix that the other has to compute; scoring, too, must run as many forwards whatever is
    known, and looking at cached blocks (`verify`) is refused.
    """
    import os
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    try:
        model = build("llama")
        prompts = [torch.tensor([row((1, 40), (2 + turn, 5 + rank))]) for turn in range(3)]
        references = [run(model, input_ids=ids, max_new_tokens=5) for ids in prompts]
        context = row((1, 40)) if rank == 1 else row((8, 50))
        continuations = [row((2, 3)), row((2, 3), (3, 4 + rank)), row((4, 2))]
        scores = PagedPrefixCache(copy.deepcopy(model)).score(context, continuations)
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        cache = PagedPrefixCache(model)
        if rank == 1:  # what this rank knows, the other one has to compute, in as many forwards
            run(model, cache, input_ids=prompts[0], max_new_tokens=1, synced_gpus=False)
        else:
            run(model, cache, input_ids=torch.tensor([row((9, 30))]), max_new_tokens=1, synced_gpus=False)
        for ids, reference in zip(prompts, references, strict=True):
            assert_same(reference, run(model, cache, input_ids=ids, max_new_tokens=5, synced_gpus=True))
        with pytest.raises(UnsupportedModelError, match="other processes share this model"):
            cache.verify()
        for score, reference in zip(cache.score(context, continuations), scores, strict=True):
            assert score.log_probs == pytest.approx(reference.log_probs, abs=1e-4)
        cache.check()
        results.put((rank, "right", cache.stats().reused_tokens))
        dist.barrier()
    except BaseException as error:
        results.put((rank, repr(error), 0))
        raise
    finally:
        dist.destroy_process_group()


def test_two_processes_that_shard_the_model_run_the_same_number_of_forwards() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = torch.multiprocessing.get_context("fork")  # which has imported everything
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, port, results), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        said = sorted(results.get(timeout=300) for _ in ranks)
    finally:
        for process in ranks:
            process.join(timeout=300)
            if process.is_alive():
                process.terminate()
    assert [(rank, word) for rank, word, _ in said] == [(0, "right"), (1, "right")]
    assert all(reused >= 64 for *_, reused in said)
