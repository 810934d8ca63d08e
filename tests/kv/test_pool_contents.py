"""What the pool holds: after every kind of reuse, the keys and values of each row are those of one plain forward.

Results can be right although a wrong key or value lies in the pool, for whoever reads it next. So every layer is read
through the row's block table, from the pool's own tensors, and compared with what a plain forward over the row's tokens
hands to its cache.
"""

from __future__ import annotations

import copy
from array import array
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import DynamicCache

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.blocks import BlockTable

from ..internals import tensor_and_block
from ..promise import test_generate_equivalence as scenes
from ..reference import PROMPT, batch, row, run, zero_blocks
from ..scenes import Player
from ..tiny_models import SETTINGS, build

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

# of calls in the pool, whose rows have block tables
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.way("pool")]

TOLERANCE = 1e-5  # of the largest number of the tensor

_LLAMA = SETTINGS["llama"][2]
_LATENT = {
    **{name: value for name, value in _LLAMA.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
# Kinds of keys and values that no model of the other tests has.
FURTHER: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v3": (  # latent attention: keys and values of other sizes; experts
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **_LATENT,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma3n_text": (  # the last two layers read keys and values of others
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            **_LLAMA,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 24,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": 128,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "gpt_bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", {**SETTINGS["gpt2"][2], "multi_query": True}),
}
NAMES = ("key", "value")
MODELS = ("llama", "gpt2", "mistral", "gemma3", *FURTHER)


@pytest.fixture(scope="module", params=MODELS)
def built(request: pytest.FixtureRequest) -> PreTrainedModel:
    with pytest.MonkeyPatch.context() as patch:
        for name, settings in FURTHER.items():
            patch.setitem(SETTINGS, name, settings)
        return build(request.param)


class Recorder(DynamicCache):
    """Keeps what every layer hands over: layer -> name -> [tokens, heads, head size]."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(config=model.config)
        self.written: dict[int, dict[str, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        states = {"key": key_states, "value": value_states}
        self.written[layer_idx] = {name: each[0].transpose(0, 1) for name, each in states.items()}
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def plain(model: PreTrainedModel, tokens: Sequence[int]) -> dict[int, dict[str, Tensor]]:
    """What one plain forward over these tokens, without padding, hands to its cache."""
    recorder, ids = Recorder(model), torch.tensor([list(tokens)])
    with torch.no_grad():
        model(ids, attention_mask=torch.ones_like(ids), past_key_values=recorder, use_cache=True)
    return recorder.written


def stored(cache: PagedPrefixCache, table: BlockTable) -> dict[int, dict[str, Tensor]]:
    """What the pool's tensors have in the slots of a table's tokens: layer -> name -> [tokens, heads, head size].

    Infinity where a layer with a window has no block for a token; it has one for each that the next token sees.
    """
    store, size, num_tokens = cache.store.blocks, cache.store.blocks.block_size, table.num_tokens
    found: dict[int, dict[str, Tensor]] = {}
    for layer in store.pool.layer_indices:
        seen = num_tokens if (sight := store.windows.sight_of.get(layer)) is None else sight.size - 1
        for name in NAMES:
            places = [tensor_and_block(store, layer, name, block_id) for block_id in table.block_ids]
            held = [position for position in range(num_tokens) if places[position // size] is not None]
            assert {*range(max(0, num_tokens - seen), num_tokens)} <= {*held}
            tensor = next(place for place in places if place is not None)[0]
            vectors = tensor.new_full((num_tokens, tensor.shape[1], tensor.shape[3]), torch.inf)
            blocks = [place[1] for position in held if (place := places[position // size]) is not None]
            vectors[held] = tensor[blocks, :, [position % size for position in held]]
            found.setdefault(layer, {})[name] = vectors
    return found


def assert_equal(got: dict[int, dict[str, Tensor]], wanted: dict[int, dict[str, Tensor]]) -> None:
    assert sorted(got) == sorted(wanted)
    for layer, tensors in wanted.items():
        for name, tensor in tensors.items():
            is_held = ~got[layer][name].isinf().flatten(1).any(1)
            torch.testing.assert_close(
                got[layer][name][is_held],
                tensor[is_held],
                rtol=0,
                atol=TOLERANCE * float(tensor.abs().max()),
                msg=lambda why, where=f"layer {layer}, {name}": f"{where}: {why}",
            )


def assert_rows_hold_what_a_plain_forward_gives(cache: PagedPrefixCache) -> None:
    """Of every row, through its table, and through `read_layer`."""
    rows = cache.call.rows.in_batch()
    assert rows
    for number, each in enumerate(rows):
        assert each.table.num_tokens
        in_pool = stored(cache, each.table)
        assert_equal(in_pool, plain(cache.store.model, each.table.token_ids))
        for layer, tensors in in_pool.items():
            for name, tensor in tensors.items():
                read = cache.call.read_layer(layer)[name][number].transpose(0, 1)[-len(tensor) :]
                assert torch.equal(read, tensor[len(tensor) - len(read) :])


def assert_found_blocks_hold_what_a_plain_forward_gives(cache: PagedPrefixCache) -> None:
    """Of what a later call would find of each row in the store."""
    ended = [(each.root, list(each.table.token_ids)) for each in cache.call.rows.distinct]
    cache.reset()
    for root, tokens in ended:
        with cache.store.blocks.new_table(root, b"") as table:
            assert table.hold_prefix(array("q", tokens)) > 0
            assert_equal(stored(cache, table), plain(cache.store.model, tokens[: table.num_tokens]))


class PoolPlayer(Player):
    """Looks at the pool after each call of a scene."""

    def call(self, **arguments: Any) -> Any:
        output = super().call(**arguments)
        assert_rows_hold_what_a_plain_forward_gives(self.cache)
        return output


def crop(play: PoolPlayer) -> None:
    cache, model = play.cache, play.model
    lookup = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 12}
    inputs = batch(row((1, 20), (1, 20), (1, 9)))
    run(model, cache, **inputs, **lookup)
    cropped: list[int] = []
    theirs = cache.crop
    cache.crop = lambda count: (cropped.append(count), theirs(count))  # type: ignore[method-assign]
    run(model, cache, **inputs, **lookup)
    assert min(cropped) < 0, "no draft was taken back"
    assert cache.last_call.reused_tokens >= 40


def copy_on_write(play: PoolPlayer) -> None:
    """Two rows of one partial block part; both stay what they are."""
    cache, model = play.cache, play.model
    with torch.no_grad():
        model(torch.tensor([row((1, 43))]), past_key_values=cache)
        copied = copy.deepcopy(cache)
        copies = cache.stats().num_copies_on_write
        for held, seed in ((copied, 2), (cache, 3)):
            model(torch.tensor([row((seed, 9))]), past_key_values=held)
        assert cache.stats().num_copies_on_write == copies + 1
        assert_rows_hold_what_a_plain_forward_gives(copied)


def chunked_prefill(play: PoolPlayer) -> None:
    play.call(**batch(PROMPT), prefill_chunk_size=16)
    play.cache.reset()
    play.call(**batch(row((1, 50), (2, 13))), prefill_chunk_size=16, reused=3 * 16)


SCENES = (
    scenes.partial_hit(40),
    scenes.padded_batch,
    scenes.known_and_unknown_rows,
    scenes.beams,
    scenes.samples,
    scenes.blocks_of_one_token,
    chunked_prefill,
    crop,
    copy_on_write,
)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_pool_holds_the_keys_and_values_of_a_plain_forward(
    built: PreTrainedModel, scene: Callable[[PoolPlayer], None]
) -> None:
    for attention in ("paged", "gather"):
        player = PoolPlayer(built, attention, [])
        scene(player)
        assert_rows_hold_what_a_plain_forward_gives(player.cache)
        assert_found_blocks_hold_what_a_plain_forward_gives(player.cache)
        player.cache.check()


def test_zeros_in_place_of_reused_blocks_are_seen(built: PreTrainedModel) -> None:
    cache = PagedPrefixCache(built)
    run(built, cache, **batch(PROMPT))
    zero_blocks(cache)
    run(built, cache, **batch(row((1, 40), (2, 9))))
    with pytest.raises(AssertionError, match="layer 0, key"):
        assert_rows_hold_what_a_plain_forward_gives(cache)


def test_one_number_that_is_off_by_little_is_seen(built: PreTrainedModel) -> None:
    cache = PagedPrefixCache(built)
    run(built, cache, **batch(PROMPT))
    store = cache.store.blocks
    for layer in store.pool.layer_indices:
        for name in NAMES:
            table = cache.call.rows.distinct[0].table
            found = tensor_and_block(store, layer, name, table.block_ids[-2])
            assert found is not None
            tensor, block = found
            place = (block, -1, 3, -1)
            before = tensor[place].clone()
            tensor[place] += 1e-4 * tensor.abs().max()
            with pytest.raises(AssertionError, match=f"layer {layer}, {name}"):
                assert_rows_hold_what_a_plain_forward_gives(cache)
            tensor[place] = before
    assert_rows_hold_what_a_plain_forward_gives(cache)
