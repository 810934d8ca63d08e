"""Every way to generate gives what it gives with `DynamicCache`, logits included, and reuses.

`OPTIONS` says for every option of `generate` where it is played: in a scene here, in one of conformance/scenes.py, or
in a test that shows that transformers itself refuses it.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    WatermarkingConfig,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.configuration_utils import GenerationMode

from hf_paged_cache import PagedPrefixCache

from ..conformance import scenes
from ..conformance.player import Measured, Player, setting
from ..internals import WRITE_OUTSIDE_GRAPHS
from ..reference import IDS, PROMPT, Forwards, assert_near, assert_right, assert_same, batch, row, run
from ..tiny_models import CHARACTERS, VOCABULARY, build, character_tokenizer, tiny
from . import test_attaching, test_bad_input, test_paths, test_ranks

MODELS = ("llama", "gpt2", "gemma3")
TEXT = [3 + token % len(CHARACTERS) for token in PROMPT]  # a prompt that the tokenizer can write
UNWRITTEN = list(range(3 + len(CHARACTERS), VOCABULARY))  # tokens that it cannot


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    return character_tokenizer(CHARACTERS)


@cache
def other_tokenizer() -> PreTrainedTokenizerBase:
    """Other ids for the same characters, and some more: transformers 5.23 cannot take fewer."""
    return character_tokenizer((*reversed(CHARACTERS), *"äöü"))


@cache
def other_assistant(samples: bool) -> PreTrainedModel:
    """A smaller model that speaks the other tokenizer. The first call that samples changes its head for good."""
    helper = build("llama", 3, num_hidden_layers=1, vocab_size=3 + len(CHARACTERS) + 3)
    helper.generation_config.num_assistant_tokens_schedule = "constant"  # by default it remembers how calls went
    if samples:
        speaks = {"tokenizer": tokenizer(), "assistant_tokenizer": other_tokenizer()}
        run(tiny("llama"), **batch(TEXT), assistant_model=helper, **speaks, do_sample=True)
    return helper


class WholeResults(Player):
    """Compares all that a call was asked for: scores, too."""

    always: ClassVar[dict[str, Any]] = {"max_new_tokens": 6}

    def _require_same(self, reference: Any, output: Any, arguments: dict[str, Any]) -> None:
        assert_same(reference, output)


def play(scene: Callable[[Player], None], model: PreTrainedModel) -> None:
    """Play a scene, again with zeros in place of what each hit reuses, and on a pool of one block."""
    measured, reused = Measured(), list[int]()
    for zeroed in (False, True):
        scene(WholeResults("", model, measured, reused, zeroed=zeroed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setting, "most_blocks", 2)
        scene(WholeResults("", model, measured, reused, zeroed=False))


def constrained(play: Player) -> None:
    def allowed(number: int, tokens: torch.Tensor) -> list[int]:
        return [token for token in range(VOCABULARY) if (token + int(tokens[-1])) % 5 == 0]

    play.call(**batch(PROMPT), prefix_allowed_tokens_fn=allowed)
    output = play.hit(**batch(row((1, 40), (2, 10))), prefix_allowed_tokens_fn=allowed, reused=40)
    assert all(sum(pair) % 5 == 0 for pair in output.sequences[0, 49:].unfold(0, 2, 1).tolist())
    play.hit(**batch(PROMPT), prefix_allowed_tokens_fn=allowed, num_beams=3, at_least=2 * 50 + 40)


def bad_words(play: Player) -> None:
    said = play.call(**batch(PROMPT)).sequences[0, 50:].tolist()
    bad = [[token] for token in said[:2]] + [said[2:4]]
    output = play.hit(**batch(PROMPT), bad_words_ids=bad, reused=49)
    assert not set(said[:2]) & set(output.sequences[0, 50:].tolist())
    play.hit(**batch(PROMPT), bad_words_ids=bad, num_beams=3, at_least=149)


def processors(play: Player) -> None:
    options = {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "encoder_repetition_penalty": 1.1,
        "encoder_no_repeat_ngram_size": 3,
        "min_new_tokens": 3,
        "min_length": 52,
        "sequence_bias": [[[5], 2.0]],
        "suppress_tokens": [1, 2],
        "begin_suppress_tokens": [7],
        "exponential_decay_length_penalty": (2, 1.1),
        "forced_bos_token_id": 4,
        "forced_eos_token_id": 9,
        "eos_token_id": 9,
        "bos_token_id": 4,
        "remove_invalid_values": True,
        "renormalize_logits": True,
    }
    play.call(**batch(PROMPT), **options, output_scores=True)
    play.hit(**batch(row((1, 40), (2, 10))), **options, output_scores=True, reused=40)
    marks = WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")
    play.hit(**batch(row((1, 40), (2, 10))), watermarking_config=marks, output_scores=True, reused=49)


def warpers(play: Player) -> None:
    options = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.001,
        "typical_p": 0.95,
        "epsilon_cutoff": 1e-4,
        "eta_cutoff": 1e-4,
        "output_scores": True,
    }
    play.call(**batch(PROMPT), **options)
    play.hit(**batch(PROMPT), **options, seed=1, reused=49)
    play.hit(**batch(PROMPT), do_sample=True, top_h=0.5, seed=2, reused=49)


def ends(play: Player) -> None:
    play.call(**batch(PROMPT), max_new_tokens=None, max_length=56)
    play.hit(**batch(PROMPT), max_time=600.0, reused=49)
    assert len(play.hit(**batch(PROMPT), max_time=1e-9, reused=49).logits) == 1
    three = [lambda ids, scores, **_: torch.full((len(ids),), ids.shape[1] >= 53, device=ids.device)]
    output = play.hit(**batch(PROMPT), stopping_criteria=three, reused=49)
    assert len(output.logits) == 3
    third = int(output.sequences[0, 52])
    rows = batch(PROMPT, row((1, 48), (2, 2)))
    play.hit(**rows, eos_token_id=[third], pad_token_id=0, at_least=96)
    play.hit(**rows, eos_token_id=third, num_beams=3, early_stopping=True, length_penalty=0.5, at_least=96)


def stopping_strings(play: Player) -> None:
    said = play.call(**batch(TEXT), suppress_tokens=UNWRITTEN, max_new_tokens=10)
    stop = {"stop_strings": [tokenizer().decode(said.sequences[0, 53:55])], "tokenizer": tokenizer()}
    output = play.hit(**batch(TEXT), suppress_tokens=UNWRITTEN, max_new_tokens=10, **stop, reused=49)
    assert len(output.logits) <= 5
    rows = batch(TEXT, [*TEXT[:40], 9, 9])
    play.hit(**rows, suppress_tokens=UNWRITTEN, max_new_tokens=8, **stop, at_least=2 * 40 - 8)
    play.hit(**batch(TEXT), suppress_tokens=UNWRITTEN, num_beams=3, **stop, at_least=149)


def scores(play: Player) -> None:
    play.call(**batch(PROMPT), output_scores=True)
    play.hit(**batch(row((1, 45), (2, 5))), output_scores=True, reused=45)
    sampled = {"do_sample": True, "num_return_sequences": 3}
    play.hit(**batch(PROMPT), output_scores=True, **sampled, seed=1, at_least=140)
    play.hit(**batch(PROMPT), output_scores=True, num_beams=3, num_return_sequences=2, at_least=140)


def assisted(play: Player) -> None:
    helper = {"assistant_model": tiny("llama", 1), "max_new_tokens": 8, "num_assistant_tokens": 3}
    play.call(**batch(PROMPT), **helper, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0)
    play.hit(**batch(PROMPT), **helper, num_assistant_tokens_schedule="heuristic", at_least=32)
    play.hit(**batch(row((1, 45), (2, 5))), **helper, do_sample=True, at_least=32)
    play.hit(**batch(PROMPT), **helper, assistant_ensemble_weight=0.9, at_least=32)
    assert "generate" not in vars(helper["assistant_model"])  # it ran on the cache that transformers gives it


def universal_assisted(play: Player) -> None:
    helper = {
        "tokenizer": tokenizer(),
        "assistant_tokenizer": other_tokenizer(),
        "target_lookbehind": 12,
        "assistant_lookbehind": 12,
        "max_new_tokens": 8,
        "suppress_tokens": UNWRITTEN,
    }
    play.call(**batch(TEXT), **helper, assistant_model=other_assistant(samples=False))
    play.hit(**batch(TEXT), **helper, assistant_model=other_assistant(samples=False), at_least=32)
    sampling = {"assistant_model": other_assistant(samples=True), "do_sample": True}
    play.hit(**batch([*TEXT[:45], 9, 9]), **helper, **sampling, at_least=32)


def guidance(play: Player) -> None:
    play.call(**batch(PROMPT), guidance_scale=1.5, output_scores=True)
    play.hit(**batch(PROMPT), guidance_scale=1.5, output_scores=True, reused=49)
    against = {"negative_prompt_ids": torch.tensor([row((5, 9))])}
    play.hit(**batch(row((1, 40), (2, 9))), guidance_scale=2.0, **against, output_scores=True, at_least=32)
    against = {"negative_prompt_ids": torch.tensor([row((5, 9)), row((6, 9))])}
    against["negative_prompt_attention_mask"] = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
    play.hit(**batch(PROMPT, row((1, 48), (3, 4))), guidance_scale=2.0, **against, output_scores=True, at_least=90)


def compile_options(play: Player) -> None:
    play.call(**batch(PROMPT), compile_config=CompileConfig())  # for caches of a fixed size; ours grows
    play.hit(**batch(PROMPT), disable_compile=True, reused=49)


def chunks_of_padding(play: Player) -> None:
    """The first chunks of the second row hold no token of it."""
    play.call(**batch(row((1, 50)), row((4, 16))), prefill_chunk_size=13)
    play.call(**batch(row((1, 48), (2, 2)), row((4, 16))), prefill_chunk_size=13)
    play.call(**batch(row((1, 48), (2, 2)), row((4, 16)), row((4, 16))), prefill_chunk_size=8, num_beams=2)


def many_turns(play: Player) -> None:
    """Rows come and go: what memory holds of earlier rows is never read."""
    play.call(**batch(PROMPT))
    play.hit(**batch(row((1, 20)), row((1, 33), (2, 8))), at_least=1)
    play.hit(**batch(row((1, 33), (2, 3))), num_beams=3, at_least=36)
    play.call(**batch(row((9, 70))))
    play.hit(**batch(row((1, 33), (2, 8), (3, 5))), at_least=32)


class Listener:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.tokens += tokens.flatten().tolist()

    def end(self) -> None:
        pass


def streamer(play: Player) -> None:
    play.call(**batch(PROMPT))
    listener = Listener()
    output = play.hit(**batch(row((1, 40), (2, 9))), streamer=listener, reused=40)
    assert play.zeroed or listener.tokens[-55:] == output.sequences[0].tolist()


# A loop of the user's own: group beams are one of those that transformers moved to repositories.


def result(ids: torch.Tensor, logits: list[torch.Tensor], kept: Any) -> GenerateDecoderOnlyOutput:
    return GenerateDecoderOnlyOutput(sequences=ids, logits=tuple(logits), past_key_values=kept)


def group_beams_loop(model: Any, input_ids: torch.Tensor, generation_config: Any, **kwargs: Any) -> Any:
    """Two groups of two beams; the second is kept from the tokens that the first has just chosen."""
    beams, logits, kept = input_ids.repeat(4, 1), [], kwargs["past_key_values"]
    totals = torch.tensor([0.0, -1e9, 0.0, -1e9], device=input_ids.device)
    new = beams
    while beams.shape[1] < generation_config.max_length:
        output = model(new, past_key_values=kept, use_cache=True, logits_to_keep=1)
        logits.append(output.logits[:, -1])
        sums = logits[-1].log_softmax(-1) + totals[:, None]
        sums[2:, sums[:2].flatten().topk(2).indices % VOCABULARY] -= 5.0
        best = [sums[start : start + 2].flatten().topk(2) for start in (0, 2)]
        totals = torch.cat([each.values for each in best])
        rows = torch.cat([each.indices // VOCABULARY + start for each, start in zip(best, (0, 2), strict=True)])
        new = torch.cat([each.indices % VOCABULARY for each in best])[:, None]
        kept.reorder_cache(rows)
        beams = torch.cat((beams[rows], new), dim=1)
    return result(beams, logits, kept)


def group_beams(play: Player) -> None:
    play.call(**batch(PROMPT), custom_generate=group_beams_loop, reused=3 * 50)
    output = play.hit(**batch(PROMPT), custom_generate=group_beams_loop, reused=4 * 50 - 1)
    assert len({tuple(beam.tolist()) for beam in output.sequences}) > 2
    play.hit(**batch(output.sequences[0].tolist() + row((2, 3))), custom_generate=group_beams_loop, at_least=180)


SCENES = (
    constrained,
    bad_words,
    processors,
    warpers,
    ends,
    stopping_strings,
    scores,
    assisted,
    universal_assisted,
    guidance,
    group_beams,
    chunks_of_padding,
    many_turns,
    streamer,
)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_every_way_gives_what_it_gives_with_dynamic_cache(scene: Callable[[Player], None], name: str) -> None:
    play(scene, tiny(name))


def test_options_about_compiling_change_nothing() -> None:
    play(compile_options, tiny("llama"))


@pytest.mark.parametrize("how", [{"num_beams": 4}, {"do_sample": True, "num_return_sequences": 4}, {}])
def test_equal_rows_of_a_prompt_are_computed_once(how: dict[str, Any], model: PreTrainedModel) -> None:
    rows = [PROMPT] if how else [PROMPT] * 4
    cache = PagedPrefixCache(model)
    with Forwards(model) as shapes:
        output = run(model, cache, **batch(*rows), **how)
    assert shapes == [(1, 50), *[(4, 1)] * 5]
    assert_same(run(model, **batch(*rows), **how), output)


@pytest.mark.parametrize(("length", "in_block"), [(1, False), (16, True), (47, False)])
def test_token_healing_runs_a_call_of_its_own(model: PreTrainedModel, length: int, in_block: bool) -> None:
    """Before the first forward, `generate` regenerates each row's last token, on no cache of the caller's."""
    healer = character_tokenizer((*CHARACTERS, *(f"{end}{more}" for end in "abc" for more in "xyz")))
    healer.bos_token = "<eos>"
    texts = ["A text to be healed, whose last letter could be the start of more: " + end for end in ("b", "and a", "c")]
    given = {**healer(texts, return_tensors="pt", padding=True, padding_side="left"), "tokenizer": healer}
    given = {**given, "token_healing": True, "suppress_tokens": UNWRITTEN, "generation_config": None}
    given["input_ids"], given["attention_mask"] = given["input_ids"][:, -length:], given["attention_mask"][:, -length:]
    given.pop("token_type_ids", None)
    reference = run(model, **given)
    cache = PagedPrefixCache(model)
    for _ in range(2):
        if in_block:
            with cache:
                assert_same(reference, run(model, **given))
        else:
            assert_same(reference, run(model, cache, **given))
        cache.check()


@pytest.mark.parametrize("in_block", [False, True])
def test_a_loop_may_generate_something_else_first(
    model: PreTrainedModel, cache: PagedPrefixCache, in_block: bool
) -> None:
    """What it generates on no cache of its own must not become the rows that it continues with."""

    def loop(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        model.generate(input_ids[:, 5:25], max_new_tokens=2)
        return model._sample(input_ids, **kwargs)

    reference = run(model, input_ids=IDS)
    for turn in range(2):
        if in_block:
            with cache:
                assert_same(reference, run(model, input_ids=IDS, custom_generate=loop))
        else:
            assert_same(reference, run(model, cache, input_ids=IDS, custom_generate=loop))
        assert cache.last_call.reused_tokens == (0, 49 - in_block)[turn]
        cache.check()


MOVED = {
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "low"},
    "num_beam_groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "diversity_penalty": {"num_beams": 4, "num_beam_groups": 4, "diversity_penalty": 0.5},
    "force_words_ids": {"num_beams": 4, "force_words_ids": [[5]]},
    "constraints": {"num_beams": 4, "constraints": [object()]},
    "use_mtp": {"use_mtp": True},  # drafts of layers that the model lacks
}


@pytest.mark.parametrize("option", MOVED)
def test_what_transformers_moved_to_repositories_or_the_model_lacks_it_refuses_itself(
    model: PreTrainedModel, cache: PagedPrefixCache, option: str
) -> None:
    run(model, cache, input_ids=IDS)
    for given in (None, cache):
        with pytest.raises(ValueError, match="num_mtp_layers" if option == "use_mtp" else "trust_remote_code"):
            run(model, given, input_ids=IDS, **MOVED[option])
    assert_right(model, cache, reused=49, input_ids=IDS)


@pytest.mark.slow
def test_a_compiled_model_meets_nothing_of_ours_but_the_writes_and_reuses() -> None:
    two = ["sliding_attention", "full_attention"]  # compiling takes as long as there are layers
    model = build("gemma3", layer_types=two, num_hidden_layers=2)
    prompts = [torch.tensor([row((1, 40), (seed, 6))]) for seed in (2, 3)]
    references = [run(model, input_ids=ids) for ids in prompts]
    graphs: list[Any] = []
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.compile(backend=lambda graph, _: graphs.append(graph) or graph, dynamic=True)
    cache = PagedPrefixCache(model)
    num_graphs = []
    for _ in range(3):
        for ids, reference in zip(prompts, references, strict=True):
            assert_same(reference, run(model, cache, input_ids=ids))
            assert cache.last_call.reused_tokens == (40 if num_graphs else 0)
            num_graphs.append(len(graphs))
    breaks = list(torch._dynamo.utils.counters["graph_break"])
    torch._dynamo.reset()
    assert num_graphs[0] > 0
    assert num_graphs[1:] == [num_graphs[1]] * 5, "steps are compiled again and again"
    # What writes keys and values is the one thing of ours that a graph meets; the hooks and their cache are outside.
    assert all(WRITE_OUTSIDE_GRAPHS in reason for reason in breaks), breaks
    cache.check()


def test_what_torch_compile_returns_is_run_as_the_model_inside() -> None:
    """Its `generate` is the model's; its own calls run compiled, with our hooks."""
    model, plain = (build("llama", num_hidden_layers=1) for _ in range(2))
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", dynamic=True)
    cache = PagedPrefixCache(compiled)
    assert cache.store.model is model
    for _ in range(2):
        for seed in (2, 3):
            ids = torch.tensor([row((1, 40), (seed, 6))])
            reference = DynamicCache(config=plain.config)
            with torch.no_grad():
                for new in (ids[:, :-1], ids[:, -1:]):
                    wanted = plain(new, past_key_values=reference, logits_to_keep=1).logits
                    got = compiled(new, past_key_values=cache, logits_to_keep=1).logits
                    assert_near(got, wanted)
            cache.reset()
            assert_same(run(plain, input_ids=ids), run(compiled, cache, input_ids=ids))
            assert cache.last_call.reused_tokens == 32
            cache.reset()
    torch._dynamo.reset()
    cache.check()


# The scene or test that plays options of `generate` -> their names.
PLAYED = {
    "ends": (
        "max_length max_new_tokens max_time eos_token_id pad_token_id early_stopping length_penalty stopping_criteria"
    ),
    "stopping_strings": "stop_strings",
    "samples": "do_sample num_return_sequences",
    "beams": "num_beams",
    "test_without_use_cache_the_result_is_right_and_a_warning_says_that_nothing_is_reused": "use_cache",
    "test_what_is_refused_leaves_the_next_call_right": "cache_implementation",
    "warpers": "temperature top_k top_p min_p top_h typical_p epsilon_cutoff eta_cutoff",
    "bad_words": "bad_words_ids",
    "constrained": "prefix_allowed_tokens_fn",
    "processors": (
        "repetition_penalty no_repeat_ngram_size encoder_repetition_penalty encoder_no_repeat_ngram_size "
        "min_new_tokens min_length sequence_bias suppress_tokens begin_suppress_tokens "
        "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id bos_token_id "
        "remove_invalid_values renormalize_logits watermarking_config"
    ),
    "guidance": "guidance_scale negative_prompt_ids negative_prompt_attention_mask",
    "test_token_healing_runs_a_call_of_its_own": "token_healing",
    "scores": "output_scores output_logits return_dict_in_generate",
    "outputs_then_none": "output_attentions output_hidden_states",
    "assisted": (
        "assistant_model is_assistant num_assistant_tokens num_assistant_tokens_schedule "
        "assistant_confidence_threshold assistant_ensemble_weight"
    ),
    "test_assistant_early_exit_is_right": "assistant_early_exit",
    "universal_assisted": "assistant_lookbehind target_lookbehind",
    "prompt_lookup": "prompt_lookup_num_tokens max_matching_ngram_size",
    "chunked_prefill": "prefill_chunk_size",
    "compile_options": "compile_config disable_compile",
    "streamer": "streamer",
    "test_ranks_with_prompts_of_their_own_settle_nothing": "synced_gpus",
    "group_beams": "custom_generate",
    "test_a_processor_that_rewrites_a_token_that_ran": "logits_processor",
    "test_a_detached_model_can_be_attached_again": "inputs",
    "test_a_hub_style_custom_generate_works": "generation_config trust_remote_code",
}
# Of caches that others build, of `generate_batch`, of encoder-decoders, and of what has moved.
OF_OTHER_CACHES = (
    "cache_config max_cache_len speculation_type continuous_batching_config decoder_start_token_id "
    "transformers_version low_memory"
)
OPTIONS: dict[str, str | None] = {
    **{option: where for where, options in PLAYED.items() for option in options.split()},
    **dict.fromkeys(OF_OTHER_CACHES.split()),
    **dict.fromkeys(MOVED, "test_what_transformers_moved_to_repositories_or_the_model_lacks_it_refuses_itself"),
}


def test_no_option_of_generate_is_forgotten() -> None:
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    known |= set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
    assert known <= set(OPTIONS), f"played nowhere: {sorted(known - set(OPTIONS))}"
    modules = (test_attaching, test_bad_input, test_paths, test_ranks, scenes)
    for option, where in OPTIONS.items():
        found = where is None or where in globals() or any(hasattr(module, where) for module in modules)
        assert found, f"{option}: there is no {where}"


def test_no_mode_of_generate_is_forgotten() -> None:
    played = {"greedy_search", "sample", "assisted_generation", "beam_search", "beam_sample"}
    moved = {"contrastive_search", "dola_generation", "constrained_beam_search", "group_beam_search"}
    assert {mode.value for mode in GenerationMode} == played | moved
