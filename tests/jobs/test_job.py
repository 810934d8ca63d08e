"""`generate_all`: what `generate` gives for each prompt alone, what is reused, and what is refused first."""

import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from hf_paged_cache import (
    BatchResult,
    CacheArgumentError,
    PagedPrefixCache,
    PrefixStore,
    UnsupportedModelError,
    generate_all,
)
from hf_paged_cache.jobs import calls, job
from hf_paged_cache.jobs.calls import BatchCalls

from ..reference import zero_blocks
from ..tiny_models import CHARACTERS, build, character_tokenizer, tiny

NEW = 5
WORDS = ("red", "blue", "green", "one", "two", "six", "sun", "moon", "star", "tree", "leaf", "bird", "fish", "cat")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def few_shot_prompts(num_tasks: int, num_prompts: int, num_shots: int) -> list[str]:
    """Prompts of several tasks in random order, each task with shots of its own."""
    random_ = random.Random(0)

    def words(least: int, most: int) -> str:
        return " ".join(random_.choices(WORDS, k=random_.randint(least, most)))

    heads = [f"Task {n}.\n" + f"Q: {words(4, 4)}\nA: {words(1, 1)}\n" * num_shots for n in range(num_tasks)]
    prompts = [f"{heads[number % num_tasks]}Q: {words(2, 8)}\nA:" for number in range(num_prompts)]
    random_.shuffle(prompts)
    return prompts


PROMPTS = few_shot_prompts(3, 20, 3)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    made = character_tokenizer(CHARACTERS)
    made.chat_template = CHAT_TEMPLATE
    return made


def alone(model: Any, tokenizer: Any, prompt: str, **options: Any) -> str | list[str]:
    """What `generate` gives for one prompt, with `DynamicCache`."""
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    given = {"max_new_tokens": NEW, "do_sample": False, "tokenizer": tokenizer, **options}
    output = model.generate(**inputs, **given)
    ids = output if isinstance(output, torch.Tensor) else output.sequences
    texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts if len(texts) > 1 else texts[0]


def run(model: Any, tokenizer: Any, prompts: Any = PROMPTS, **options: Any) -> BatchResult:
    return generate_all(
        model, tokenizer, prompts, **{"max_new_tokens": NEW, "progress": False, "batch_size": 8, **options}
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "several beams returned": {"num_beams": 3, "num_return_sequences": 2},
}


@pytest.mark.parametrize("how", OPTIONS)
def test_completions_are_those_of_each_prompt_alone(how: str, tokenizer: Any) -> None:
    model = tiny("llama")
    result = run(model, tokenizer, batch_size=6, **OPTIONS[how])
    assert result.completions == [alone(model, tokenizer, prompt, **OPTIONS[how]) for prompt in PROMPTS]
    assert result.summary.num_batches < len({len(prompt) for prompt in PROMPTS})  # a letter is a token


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "lfm2"])
def test_other_models_give_them_too(name: str, tokenizer: Any) -> None:
    model = tiny(name)
    assert run(model, tokenizer).completions == [alone(model, tokenizer, prompt) for prompt in PROMPTS]


def test_what_stops_at_a_string_ends_there_and_counts_so(tokenizer: Any) -> None:
    model = tiny("llama")
    stop = str(alone(model, tokenizer, PROMPTS[0]))[1]
    result = run(model, tokenizer, stop_strings=[stop])
    assert result.completions == [alone(model, tokenizer, each, stop_strings=[stop]) for each in PROMPTS]
    assert result.summary.new_tokens < NEW * len(PROMPTS)  # what comes after an end is not counted


def test_wrong_blocks_would_show(tokenizer: Any) -> None:
    cache = PagedPrefixCache(build("llama"))
    right = run(cache.store.model, tokenizer, cache=cache).completions
    zero_blocks(cache)
    assert run(cache.store.model, tokenizer, cache=cache).completions != right


def test_what_prompts_share_is_computed_once_even_in_a_pool_for_one_task(tokenizer: Any) -> None:
    model = tiny("llama")
    prompts = few_shot_prompts(8, 48, 6)
    lengths = [len(tokenizer(prompt).input_ids) for prompt in prompts]
    heads = {prompt.split("\n")[0]: len(prompt[: prompt.rindex("Q:")]) for prompt in prompts}
    tails = sum(lengths) - sum(len(prompt[: prompt.rindex("Q:")]) for prompt in prompts)
    store = PrefixStore(model, num_blocks=1 + 2 * max(lengths) // 16 + 6 * 6)
    summary = run(model, tokenizer, prompts, cache=store, batch_size=6).summary
    assert summary.prompt_tokens == sum(lengths)
    computed = summary.prompt_tokens - summary.reused_tokens
    assert computed < sum(heads.values()) + 3 * (tails + 16 * len(prompts))  # the prefixes, and padded tails
    assert f"{summary.reused_tokens:,} reused" in str(summary)


def test_the_cache_of_a_job_is_of_the_sizes_that_are_given(tokenizer: Any, tmp_path: Path) -> None:
    model, options = tiny("llama"), {"block_size": 4, "max_bytes": "1MB", "disk_folder": tmp_path / "blocks"}
    result = run(model, tokenizer, **options)
    assert result.completions == [alone(model, tokenizer, prompt) for prompt in PROMPTS]
    store = PrefixStore(build("llama"), num_blocks=60)
    with pytest.raises(CacheArgumentError, match="block_size: of the store, which is there already"):
        run(store.model, tokenizer, cache=store, block_size=8)
    assert run(store.model, tokenizer, PROMPTS[:2], cache=store).summary.num_prompts == 2
    with pytest.raises(CacheArgumentError, match="block_size and num_blocks: of the cache, which is there already"):
        run(store.model, tokenizer, cache=PagedPrefixCache(store), block_size=8, num_blocks=60)


def test_memory_that_runs_out_halves_the_batch(tokenizer: Any) -> None:
    model, generate = build("llama"), type(tiny("llama")).generate

    def generate_few(input_ids: Any, **options: Any) -> Any:
        if len(input_ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(model, input_ids=input_ids, **options)

    model.generate = generate_few
    found = run(model, tokenizer)
    assert found.completions == [alone(tiny("llama"), tokenizer, prompt) for prompt in PROMPTS]
    assert found.summary.num_batches > len(PROMPTS) / 4


def test_samples_follow_from_the_seed_and_leave_torchs_own_alone(tokenizer: Any) -> None:
    model = tiny("llama")
    torch.manual_seed(3)
    expected_draw = torch.rand(1)
    torch.manual_seed(3)
    one, again, other = (run(model, tokenizer, do_sample=True, seed=seed).completions for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected_draw)
    assert one == again != other


def test_a_batch_is_as_large_as_memory_allows(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    prompts = ["x" * 200 + f"{number:02}" for number in range(20)]
    assert run(model, tokenizer, prompts, batch_size=None).summary.num_batches == 1
    of_a_token = calls.measure_bytes_per_token(model)
    monkeypatch.setattr(calls, "free_bytes", lambda device: 4 * of_a_token * 4 * (202 + NEW))  # for 4 rows
    result = run(model, tokenizer, prompts, batch_size=None)
    assert result.summary.num_batches == 5
    assert result.completions == run(model, tokenizer, prompts, batch_size=4).completions


def test_chats_go_through_the_template(tokenizer: Any) -> None:
    model = tiny("llama")
    chats = [
        [{"role": "system", "content": "Be short.", "name": None}, {"role": "user", "content": f"{n}?"}]
        for n in range(5)
    ]
    wanted = [alone(model, tokenizer, f"system: Be short.\nuser: {number}?\nassistant: ") for number in range(5)]
    assert run(model, tokenizer, chats).completions == wanted
    tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(
        CacheArgumentError, match=r"^row 1, counted from 0: the tokenizer cannot take its 'prompt' \(.*no such role"
    ) as raised:
        run(model, tokenizer, ["a", chats[0]])
    assert "\n" not in str(raised.value)


def test_a_prompt_may_be_as_long_as_the_rotary_embedding_is_stretched(tokenizer: Any) -> None:
    stretched = build(
        "llama", max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4}
    )
    longest = 512 + 1 - NEW  # the last new token takes no position
    for prompt in ("x" * 62, "x" * longest):
        assert run(stretched, tokenizer, [prompt]).completions == [alone(stretched, tokenizer, prompt)]


def test_jobs_in_several_threads_on_one_model_do_not_take_it_from_each_other(tokenizer: Any) -> None:
    model = build("llama")
    sizes = [4, 18, 10]
    expected = [alone(model, tokenizer, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(3) as threads:
        results = [*threads.map(lambda size: run(model, tokenizer, PROMPTS[:size], batch_size=2).completions, sizes)]
    assert results == [expected[:size] for size in sizes]
    assert "generate" not in model.__dict__


def test_a_job_warns_of_nothing_and_leaves_the_model_as_it_was(
    tokenizer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    model = build("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(model, tokenizer, ["x" * 60, "y" * 20, "z" * 12, "x" * 60], batch_size=1).completions
    assert capfd.readouterr().err == ""
    assert "generate" not in model.__dict__
    assert not model._forward_pre_hooks


def test_progress_ends_once_and_a_job_that_reuses_nothing_says_so(
    tokenizer: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama")
    model.model.layers[0].register_forward_hook(lambda *_: None)
    monkeypatch.setattr(job, "_SECONDS_BETWEEN_LINES", 0)
    summary = run(model, tokenizer, progress=None, batch_size=4).summary
    shown = capfd.readouterr().err
    assert "20/20" in shown
    assert shown.endswith("\n")
    assert summary.num_bypassed == 20
    assert str(summary).endswith("20 prompts reused and kept nothing")


def test_after_a_job_its_cache_holds_no_rows_and_another_models_is_refused(tokenizer: Any) -> None:
    cache = PagedPrefixCache(build("llama"))
    run(cache.store.model, tokenizer, cache=cache)
    assert cache.stats().num_blocks_in_use == 0
    with pytest.raises(CacheArgumentError, match="cache is of another model"):
        run(tiny("llama"), tokenizer, cache=cache)
    with pytest.raises(UnsupportedModelError, match="str"):
        run(tiny("llama"), tokenizer, cache="x")


PICTURE = [{"role": "user", "content": [{"type": "image", "path": "a.png"}, {"type": "text", "text": "What is it?"}]}]
BAD: list[tuple[Any, dict[str, Any], str]] = [
    (["a", ""], {}, "row 1, counted from 0: 'prompt' is empty"),
    (["a", 3], {}, "row 1, counted from 0: 'prompt' is of type int"),
    ([{"text": "a"}], {}, "no column 'prompt'; there are 'text'"),
    ([{"prompt": "a", "completion": "b"}], {"out": "out.jsonl"}, "it has a column 'completion' already"),
    ([{"prompt": "a", "index": 3}], {"out": "out.jsonl"}, "it has a column 'index' already, which would be lost"),
    (["a", "x" * 600], {}, "row 1, counted from 0: its 600 tokens and 5 new tokens need more than the model's 512"),
    (["a", PICTURE], {}, "row 1, counted from 0: message 0 of 'prompt' is not of text alone; give such chats to gene"),
    (["a"], {"order": "done"}, "order is no option of generate that a job takes"),
    (["a"], {"batch_size": 0}, "batch_size is 0"),
    (["a"], {"max_bytes": "4 gigs"}, "max_bytes is '4 gigs'; give a number of bytes, or one with a unit"),
    (["a"], {"overwrite": "no"}, "overwrite is 'no'; give True or False"),
    (["a"], {"progress": "yes"}, "progress is 'yes'; give True or False"),
    (["a"], {"tempreature": 1.0}, "tempreature is no option of generate that a job takes; did you mean temperature?"),
    (["a"], {"batchsize": 2}, "batchsize is no option of generate that a job takes; did you mean batch_size?"),
    (["a"], {"num_beams": 2, "num_return_sequences": 3}, "generate cannot run with"),
    (["a"], {"out": "nowhere/out.jsonl"}, "nowhere/out.jsonl cannot be written: there is no folder nowhere"),
    (["a"], {"out": "."}, "is no regular file; give a file"),
    (["a\ud800"], {}, "row 0, counted from 0: the tokenizer cannot take its 'prompt'"),
    ({"prompt": ["a"]}, {}, "prompts is of type dict; give a file, or a list of rows"),
    (3, {}, "prompts is of type int; give a file, or a list of rows"),
    ("prompts.txt", {}, "there is no file prompts.txt; prompts themselves are given as a list"),
]


@pytest.mark.parametrize(("prompts", "options", "said"), BAD)
def test_bad_input_is_refused_before_anything_runs(
    prompts: Any, options: dict[str, Any], said: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchCalls, "run", lambda *_: pytest.fail("it ran"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CacheArgumentError, match=said):
        run(tiny("llama"), tokenizer, prompts, **options)
    assert not [*tmp_path.iterdir()]


def test_without_a_tokenizer_nothing_runs() -> None:
    with pytest.raises(CacheArgumentError, match=r"^tokenizer is of type NoneType; give the model's$"):
        run(tiny("llama"), None)


def test_no_prompts_are_no_job(tokenizer: Any, tmp_path: Path) -> None:
    result = run(tiny("llama"), tokenizer, [])
    assert result.completions == []
    assert result.summary.num_batches == 0
    assert run(tiny("llama"), tokenizer, [], out=tmp_path / "out.jsonl").completions is None
