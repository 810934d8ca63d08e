"""What rows and the pool hold: after every kind of reuse, the keys and values of each row are those of one plain forward.

Results can be right although a wrong key or value lies in a row or a block, for whoever reads it next. So every layer is read
from the rows' memory, and through a block table from the pool's own tensors, and compared with what a plain forward over
the row's tokens hands to its cache.
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
from hf_paged_cache.rows import memory
from hf_paged_cache.rows.rows import Rows

from ..internals import blocks_of_the_last_row, tensor_and_block, tokens_of_rows
from ..promise import test_generate_equivalence as scenes
from ..reference import PROMPT, batch, row, run, zero_blocks
from ..scenes import Player
from ..tiny_models import SETTINGS, build

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

pytestmark = pytest.mark.usefixtures("one_thread")

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


def held_by_row(cache: PagedPrefixCache, number: int) -> dict[int, dict[str, Tensor]]:
    """What a row of the last call has of its tokens: layer -> name -> [tokens, heads, head size].

    Infinity where a layer with a window has passed a token; it has each that the next token sees.
    """
    rows = cache._rows
    assert rows is not None
    pad, stop = rows.prompts[number].pad, rows.n
    made = memory.make(memory.shapes_of_rows(rows.all_memory()), 1, stop - pad)
    rows.copy_columns(number, pad, stop, made, 0, 0)
    parts = [(stream, part[0]) for held, names in made for stream, part in zip(names, held, strict=True)]
    for sight in rows.windows.sights if rows.windows is not None else ():
        held_by_layers, base = rows.windows.of(sight)
        assert base <= max(pad, stop - sight.size + 1)
        for held, names in held_by_layers:
            for stream, of_layer in zip(names, held[:, number], strict=True):
                part = of_layer.new_full((of_layer.shape[0], stop - pad, of_layer.shape[2]), torch.inf)
                first = max(pad, base)
                part[:, first - pad :] = of_layer[:, first - base : stop - base]
                parts.append((stream, part))
    found: dict[int, dict[str, Tensor]] = {}
    for (layer, name), part in parts:
        found.setdefault(layer, {})[name] = part.transpose(0, 1)
    return found


def assert_rows_hold_what_a_plain_forward_gives(cache: PagedPrefixCache) -> None:
    """Of every row of the last call, all columns."""
    rows = cache._rows
    assert rows is not None
    assert rows.prompts
    for number, tokens in enumerate(rows.ids.rows([prompt.pad for prompt in rows.prompts], rows.n)):
        assert tokens
        assert_equal(held_by_row(cache, number), plain(cache.store.model, tokens))


def end(cache: PagedPrefixCache) -> list[tuple[bytes, array[int]]]:
    """End the rows of the last call; returns their roots and tokens."""
    rows = cache._rows
    assert rows is not None
    ended = [(prompt.root, tokens) for prompt, tokens in zip(rows.prompts, rows.token_ids(), strict=True)]
    cache.reset()
    return ended


def assert_found_blocks_hold_what_a_plain_forward_gives(
    cache: PagedPrefixCache, ended: Sequence[tuple[bytes, array[int]]]
) -> None:
    """Of what a later call would find of each row in the store."""
    assert ended
    for root, tokens in ended:
        with cache.store.blocks.new_table(root, b"") as table:
            assert table.hold_prefix(tokens) > 0
            assert_equal(stored(cache, table), plain(cache.store.model, tokens[: table.num_tokens]))


class PoolPlayer(Player):
    """Looks at the rows after each call of a scene."""

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
    theirs = Rows.crop

    def crop_and_note(rows: Rows, count: int) -> None:
        cropped.append(count)
        theirs(rows, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rows, "crop", crop_and_note)
        run(model, cache, **inputs, **lookup)
    assert min(cropped) < 0, "no draft was taken back"
    assert cache.last_call.reused_tokens >= 40


def a_copy_goes_on_otherwise(play: PoolPlayer) -> None:
    """Two rows part within a block; both stay what they are."""
    cache, model = play.cache, play.model
    with torch.no_grad():
        model(torch.tensor([row((1, 43))]), past_key_values=cache)
        copied = copy.deepcopy(cache)
        for held, seed in ((copied, 2), (cache, 3)):
            model(torch.tensor([row((seed, 9))]), past_key_values=held)
    assert tokens_of_rows(copied) == [row((1, 43), (2, 9))]
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
    a_copy_goes_on_otherwise,
)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_rows_and_the_pool_hold_the_keys_and_values_of_a_plain_forward(
    built: PreTrainedModel, scene: Callable[[PoolPlayer], None]
) -> None:
    player = PoolPlayer(model=built, references=[])
    scene(player)
    assert_rows_hold_what_a_plain_forward_gives(player.cache)
    assert_found_blocks_hold_what_a_plain_forward_gives(player.cache, end(player.cache))
    player.cache.check()


def test_zeros_in_place_of_reused_blocks_are_seen(built: PreTrainedModel) -> None:
    cache = PagedPrefixCache(built)
    run(built, cache, **batch(PROMPT))
    ended = end(cache)
    zero_blocks(cache)
    with pytest.raises(AssertionError, match="layer 0, key"):
        assert_found_blocks_hold_what_a_plain_forward_gives(cache, ended)
    run(built, cache, **batch(row((1, 40), (2, 9))))
    assert cache.last_call.reused_tokens > 0
    with pytest.raises(AssertionError, match="layer 0, key"):
        assert_rows_hold_what_a_plain_forward_gives(cache)


def test_one_number_that_is_off_by_little_is_seen_in_a_row(built: PreTrainedModel) -> None:
    cache = PagedPrefixCache(built)
    run(built, cache, **batch(PROMPT))
    layers = [layer for layer in cache._rows.layers if layer.held is not None]
    assert layers
    for layer in layers:
        for name, tensor in layer.named():
            place = (0, -1, layer.n - layer.base - 4, -1)
            before = tensor[place].clone()
            tensor[place] += 1e-4 * tensor.abs().max()
            with pytest.raises(AssertionError, match=f"layer {layer.layer_idx}, {name}"):
                assert_rows_hold_what_a_plain_forward_gives(cache)
            tensor[place] = before
    assert_rows_hold_what_a_plain_forward_gives(cache)


def test_one_number_that_is_off_by_little_is_seen_in_a_block(built: PreTrainedModel) -> None:
    cache = PagedPrefixCache(built)
    run(built, cache, **batch(PROMPT))
    block_id, ended = blocks_of_the_last_row(cache)[-1], end(cache)
    store = cache.store.blocks
    assert store.pool.layer_indices
    for layer in store.pool.layer_indices:
        for name in NAMES:
            found = tensor_and_block(store, layer, name, block_id)
            assert found is not None
            tensor, block = found
            place = (block, -1, 3, -1)
            before = tensor[place].clone()
            tensor[place] += 1e-4 * tensor.abs().max()
            with pytest.raises(AssertionError, match=f"layer {layer}, {name}"):
                assert_found_blocks_hold_what_a_plain_forward_gives(cache, ended)
            tensor[place] = before
    assert_found_blocks_hold_what_a_plain_forward_gives(cache, ended)
