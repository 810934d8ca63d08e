"""What changes keys and values for the same tokens loses the hits, and nothing else does.

Each change is made between two calls on one cache; then tokens and logits must be those of a fresh cache on the model
as it is now.
"""

import copy
import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_paged_cache import (
    CacheArgumentError,
    ForwardMismatchError,
    PagedPrefixCache,
    PrefixStore,
    UnsupportedModelError,
)

from ..conformance.zoo import build as build_type
from ..reference import IDS, PROMPT, assert_near, assert_right, assert_same, batch, is_same, row, run
from ..tiny_models import build


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    for _ in range(2):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def add_hook(model: PreTrainedModel) -> Any:
    """Activation steering."""

    def steer(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0.5

    return model.model.layers[0].mlp.register_forward_hook(steer)


def replace_forward(model: PreTrainedModel) -> None:
    mlp = model.model.layers[0].mlp
    theirs = mlp.forward
    mlp.forward = lambda hidden: theirs(hidden) * 2


CHANGES: dict[str, Callable[[PreTrainedModel], Any]] = {
    "AdamW, fused, a learning rate of 1e-6": lambda model: train(
        model, torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ),
    "a forward hook": add_hook,
    "a forward pre-hook": lambda model: model.model.layers[0].mlp.register_forward_pre_hook(
        lambda module, args: (args[0] * 1.5, *args[1:])
    ),
    "a forward replaced": replace_forward,
    "rotary frequencies, in place": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
    "a rotary embedding of another scale": lambda model: setattr(model.model.rotary_emb, "attention_scaling", 1.5),
    "a column of a matrix": lambda model: model.model.layers[0].self_attn.o_proj.weight.data[:, 16:48].zero_(),
}
OF_OTHERS = ("a forward hook", "a forward pre-hook", "a forward replaced")


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_reuses_nothing_of_before(model: PreTrainedModel, cache: PagedPrefixCache, change: str) -> None:
    before = run(model, cache, input_ids=IDS)
    CHANGES[change](model)
    reference = run(model, input_ids=IDS)
    if "1e-6" not in change:
        assert not is_same(before, reference), "the change changes nothing; the test would not see a thing"
    assert_same(reference, run(model, cache, input_ids=IDS))
    assert cache.last_call.reused_tokens == 0
    assert_same(reference, run(model, cache, input_ids=IDS))
    if change in OF_OTHERS:  # of which nobody knows what they heed
        assert "hooks or replaces the forward" in str(cache.last_call)
        return
    assert cache.last_call.reused_tokens == 49  # what is computed now is reused as ever


@pytest.mark.parametrize("change", OF_OTHERS)
def test_what_somebody_trusts_on_the_model_is_a_condition_like_others(model: PreTrainedModel, change: str) -> None:
    cache = PagedPrefixCache(model, trust_hooks=True)
    run(model, cache, input_ids=IDS)
    CHANGES[change](model)
    reference = run(model, input_ids=IDS)
    for reused in (0, 49):
        assert_same(reference, run(model, cache, input_ids=IDS))
        assert cache.last_call.reused_tokens == reused


def test_a_layer_of_others_is_not_trusted_unless_somebody_says_so(model: PreTrainedModel) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner, self.scale = inner, 2.0

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return self.inner(states) * self.scale

    layer = model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp)
    cache = PagedPrefixCache(model)
    for scale in (2.0, 2.0, 3.0):
        layer.scale = scale
        assert_right(model, cache, reused=0, input_ids=IDS)
    assert "Scaled" in str(cache.last_call)


def test_weights_that_are_written_again_are_a_change_also_with_the_same_values(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    """What lies between the eight values that are read is not compared, so it may have changed."""
    weights = copy.deepcopy(model.state_dict())
    run(model, cache, input_ids=IDS)
    for reused in (0, 49):
        if not reused:
            model.load_state_dict(weights)
        assert_right(model, cache, reused=reused, input_ids=IDS)


def test_a_model_built_under_inference_mode_is_watched_all_the_same() -> None:
    with torch.inference_mode():
        model = build("llama")
        cache = PagedPrefixCache(model)
        for number in range(3):
            assert_right(model, cache, reused=0, input_ids=IDS)
            assert_right(model, cache, reused=49, input_ids=IDS)
            model.model.layers[0].mlp.up_proj.weight.mul_(2 + number)
    assert_right(model, cache, reused=0, input_ids=IDS)


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_prompts_short_and_long_are_right_under_ropes_that_depend_on_length(kind: str) -> None:
    """Short, beyond the first 64 positions, farther, and short again; a prompt that crosses while it generates."""
    model = build("llama", rope_parameters=ROPES[kind], max_position_embeddings=64 if kind == "dynamic" else 256)
    cache = PagedPrefixCache(model, block_size=8)
    for length in (40, 90, 40, 61, 100, 62, 90, 40):
        ids = torch.tensor([row((1, length))])
        # dynamic frequencies stay at the longest sequence seen until a short one comes, so the model has a state
        reference = run(copy.deepcopy(model), input_ids=ids, max_new_tokens=8)
        assert_same(reference, run(model, cache, input_ids=ids, max_new_tokens=8))
    assert cache.stats().reused_tokens > 100
    short = torch.tensor([row((1, 40))])
    run(model, cache, input_ids=short)
    run(model, cache, input_ids=short)
    assert cache.last_call.reused_tokens == 39


def test_frequencies_follow_the_largest_position_of_a_forward_and_not_its_columns() -> None:
    """Of 70 columns of padded rows no token stands beyond position 63; but what numbers its padding may."""
    model = build("llama", rope_parameters=ROPES["longrope"], max_position_embeddings=256)
    store = PrefixStore(model, block_size=8)
    padded = batch(row((1, 60)), row((2, 56)), row((3, 70)))
    ids, mask = padded["input_ids"][:2], padded["attention_mask"][:2]
    references = []
    for of_padding in (0, 100):
        positions = torch.where(mask == 1, mask.cumsum(1) - 1, of_padding)
        given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "use_cache": True}
        with torch.no_grad():
            references.append(model(**given, past_key_values=DynamicCache(config=model.config)).logits[:, -1])
            for is_known in (False, True):
                cache = PagedPrefixCache(store)
                logits = model(**given, past_key_values=cache, logits_to_keep=1).logits[:, -1]
                assert (cache.last_call.reused_tokens > 0) is (is_known and not of_padding)
                assert_near(logits, references[-1])
    assert float((references[0] - references[1]).abs().max()) > 0.1  # other frequencies


def test_phi3_drops_the_cache_where_its_rope_changes_and_the_result_is_right() -> None:
    """Beyond its first 48 positions `generate` leaves the cache out from the first forward on."""
    model = build_type("phi3@longrope")
    cache = PagedPrefixCache(model, block_size=8)
    for length in (42, 42, 60, 44):
        ids = torch.tensor([row((1, length))])
        reference = run(model, input_ids=ids, max_new_tokens=12)
        assert_same(reference, run(model, cache, input_ids=ids, max_new_tokens=12))
        if length == 60:
            (counted,) = cache.last_call.rows
            assert (counted.prompt_tokens, counted.computed_tokens, counted.reused_tokens) == (60, 60, 0)
            assert counted.stopped.startswith("generate ran no forward with the cache")
            assert cache.stats().num_bypassed_calls == 1
    assert cache.stats().reused_tokens > 0
    run(model, cache, **batch(row((1, 80)), row((2, 70))), num_beams=3, max_new_tokens=2)
    assert [counted.prompt_tokens for counted in cache.last_call.rows] == [80] * 6  # with padding
    assert cache.get_seq_length() == 0  # not the rows of the call before


@pytest.mark.parametrize("name", ["whisper", "trocr"])
def test_a_cross_attention_with_something_to_attend_to_runs_without_the_cache_and_is_right(name: str) -> None:
    model = build_type(name)
    cache = PagedPrefixCache(model)
    ids, size = torch.tensor([PROMPT]), model.config.hidden_size
    states = torch.randn(1, 7, size, generator=torch.Generator().manual_seed(0))
    attended = {"encoder_outputs": (states,)} if name == "whisper" else {"encoder_hidden_states": states}
    if name == "whisper":
        reference = run(model, input_ids=ids, **attended)
        with pytest.warns(
            UserWarning, match="encoder_outputs: cross attention keeps keys and values that are no tokens"
        ):
            assert_same(reference, run(model, cache, input_ids=ids, **attended))
        with pytest.raises(AssertionError):
            assert_same(reference, run(model, input_ids=ids))
        with cache:
            assert_same(reference, run(model, input_ids=ids, **attended))
    with pytest.raises(CacheArgumentError, match="was passed, and cross attention keeps"):
        model(input_ids=ids, past_key_values=cache, **attended)
    assert_right(model, cache, input_ids=ids)


def test_hooks_that_are_gone_are_not_kept_and_never_taken_for_one_another() -> None:
    model = build("llama")
    cache = PagedPrefixCache(model, trust_hooks=True)
    run(model, cache, input_ids=IDS)
    for factor in (1.0, 2.0, 0.5):
        tensor = torch.full((1,), factor)
        captured = ref(tensor)
        handle = model.model.layers[0].mlp.register_forward_hook(
            lambda module, args, output, tensor=tensor: output * tensor  # each of them may lie where the last one lay
        )
        reference = run(model, input_ids=IDS)
        assert_same(reference, run(model, cache, input_ids=IDS))
        assert cache.last_call.reused_tokens == 0
        assert_same(reference, run(model, cache, input_ids=IDS))
        assert cache.last_call.reused_tokens > 0
        handle.remove()
        del tensor, handle
        gc.collect()
        assert captured() is None


def test_equal_rows_get_dropouts_of_their_own() -> None:
    model = build("gpt2", attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3)
    model.train()
    rows = IDS.repeat(3, 1)
    reference = run(model, input_ids=rows, seed=3)
    assert len({tuple(row) for row in reference.logits[0].tolist()}) == 3
    assert_same(reference, run(model, PagedPrefixCache(model), input_ids=rows, seed=3))


def test_an_attention_that_gets_no_mask_is_refused_or_if_chosen_later_reuses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "mine", attend)
    with pytest.raises(UnsupportedModelError, match="its logits differ"):
        PagedPrefixCache(build("llama", attn_implementation="mine"))
    model, call = build("llama"), batch(row((1, 40), (2, 60)))
    run(model, cache := PagedPrefixCache(model), **batch(row((1, 40))))
    model.set_attn_implementation("mine")
    for _ in range(2):
        assert_right(model, cache, reused=0, **call)
    assert "attention 'mine' was chosen after the cache was built" in str(cache.last_call)
    model.set_attn_implementation("sdpa")
    assert_right(model, cache, **call)
    assert cache.last_call.reused_tokens > 0


def test_checkpoints_that_drop_the_cache_are_named_also_where_a_prefix_is_known(
    model: PreTrainedModel, cache: PagedPrefixCache
) -> None:
    known, other = torch.tensor([row((1, 50))]), torch.tensor([row((1, 33), (2, 20))])
    run(model, cache, input_ids=known)
    model.gradient_checkpointing_enable()
    model.train()
    for ids in (known, other):
        with pytest.raises(ForwardMismatchError, match="gradient checkpointing drops the cache"):
            run(model, cache, input_ids=ids)
    model.eval()
    assert_right(model, cache, input_ids=other)
    assert cache.last_call.reused_tokens >= 32
    model.train()
    model.gradient_checkpointing_disable()
    assert_right(model, cache, input_ids=other)


def test_rows_of_older_weights_that_end_leave_what_newer_weights_computed() -> None:
    model = build("llama")
    store, ids = PrefixStore(model, block_size=4), torch.tensor([row((1, 40))])
    before, after = PagedPrefixCache(store), PagedPrefixCache(store)
    run(model, before, input_ids=ids)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    run(model, after, input_ids=ids)
    after.reset()
    before.reset()
    assert after.lookup(ids).num_tokens == 40
    assert store.stats().num_cached_blocks == 11
