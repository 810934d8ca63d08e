"""`generate_all`: what `generate` gives for each prompt alone, what is reused, and what is kept when it ends early."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from hf_paged_cache import BatchResult, CacheArgumentError, PagedPrefixCache, PrefixStore, generate_all
from hf_paged_cache.jobs import job
from hf_paged_cache.jobs.calls import BatchCalls
from hf_paged_cache.jobs.journal import Journal, claimed, journal_of

from ..killed_jobs import few_shot_prompts, kill_again_and_again
from ..reference import zero_blocks
from ..tiny_models import CHARACTERS, build, character_tokenizer, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = few_shot_prompts(3, 20, 3)
NEW = 5
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"  # fmt: skip


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    made = character_tokenizer(CHARACTERS)
    made.chat_template = CHAT_TEMPLATE
    return made


def alone(model: Any, tokenizer: Any, prompt: str, **options: Any) -> str | list[str]:
    """What `generate` gives for one prompt, with `DynamicCache`."""
    if "stop_strings" in options:
        options["tokenizer"] = tokenizer
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, **{"max_new_tokens": NEW, "do_sample": False, **options})
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts if len(texts) > 1 else texts[0]


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def run(model: Any, tokenizer: Any, prompts: Any = PROMPTS, **options: Any) -> BatchResult:
    return generate_all(
        model, tokenizer, prompts, **{"max_new_tokens": NEW, "progress": False, "batch_size": 8, **options}
    )


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "an end of sequence": {"eos_token_id": [20, 50, 70, 80, 90]},
    "beams": {"num_beams": 3},
    "several beams returned": {"num_beams": 3, "num_return_sequences": 2},
    "a penalty on what is repeated": {"repetition_penalty": 1.8, "no_repeat_ngram_size": 2},
    "at least so many": {"eos_token_id": [20, 50, 70, 80, 90], "min_new_tokens": 3},
}


@pytest.mark.parametrize("how", OPTIONS)
def test_completions_are_those_of_each_prompt_alone(how: str, tokenizer: Any) -> None:
    model = tiny("llama")
    result = run(model, tokenizer, batch_size=6, **OPTIONS[how])
    assert result.completions == [alone(model, tokenizer, prompt, **OPTIONS[how]) for prompt in PROMPTS]
    num_lengths = len({len(prompt) for prompt in PROMPTS})
    sees_padding = "no_repeat_ngram_size" in OPTIONS[how]
    assert (result.summary.num_batches < num_lengths) is not sees_padding  # a letter is a token


@pytest.mark.parametrize("name", ["gpt2", "gemma3", "lfm2"])
def test_other_models_give_them_too(name: str, tokenizer: Any) -> None:
    model = tiny(name)
    assert run(model, tokenizer).completions == [alone(model, tokenizer, prompt) for prompt in PROMPTS]


def test_what_stops_at_a_string_ends_there(tokenizer: Any) -> None:
    model = tiny("llama")
    texts = [alone(model, tokenizer, prompt) for prompt in PROMPTS]
    stop = texts[0][1]
    result = run(model, tokenizer, stop_strings=[stop])
    assert result.completions == [alone(model, tokenizer, each, stop_strings=[stop]) for each in PROMPTS]


def test_wrong_blocks_would_show(tokenizer: Any) -> None:
    model = build("llama")
    cache = PagedPrefixCache(model)
    right = run(model, tokenizer, cache=cache).completions
    zero_blocks(cache)
    assert run(model, tokenizer, cache=cache).completions != right


def test_what_prompts_share_is_computed_once_even_in_a_pool_for_one_task(tokenizer: Any) -> None:
    model = tiny("llama")
    prompts = few_shot_prompts(8, 48, 6)
    lengths = [len(tokenizer(prompt).input_ids) for prompt in prompts]
    heads = {prompt.split("\n")[0]: len(prompt[: prompt.rindex("Q:")]) for prompt in prompts}
    tails = sum(lengths) - sum(len(prompt[: prompt.rindex("Q:")]) for prompt in prompts)
    num_blocks = 1 + 2 * max(lengths) // 16 + 6 * 6
    store = PrefixStore(model, num_blocks=num_blocks)
    summary = run(model, tokenizer, prompts, cache=store, batch_size=6).summary
    computed = summary.prompt_tokens - summary.reused_tokens
    assert summary.prompt_tokens == sum(lengths)
    assert computed < sum(heads.values()) + 3 * (tails + 16 * len(prompts))  # the prefixes, and padded tails
    given = PagedPrefixCache(PrefixStore(model, num_blocks=num_blocks))
    by_hand = 0
    for start in range(0, len(prompts), 6):
        inputs = tokenizer(prompts[start : start + 6], return_tensors="pt", padding=True, padding_side="left", return_token_type_ids=False)  # fmt: skip
        model.generate(**inputs, past_key_values=given, max_new_tokens=NEW, do_sample=False)
        by_hand += given.last_call.computed_tokens
    assert computed < by_hand


OF_A_NEW_CACHE: list[dict[str, Any]] = [
    {"block_size": 4, "num_blocks": 60},
    {"max_bytes": "1MB"},
    {"disk_folder": "here", "disk_bytes": "3 MB"},
]


@pytest.mark.parametrize("options", OF_A_NEW_CACHE)
def test_the_cache_of_a_job_is_of_the_sizes_that_are_given(
    options: dict[str, Any], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, made = tiny("llama"), []
    init = PagedPrefixCache.__init__

    def note(self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        made.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(PagedPrefixCache, "__init__", note)
        result = run(model, tokenizer, **options)
    assert result.completions == [alone(model, tokenizer, prompt) for prompt in PROMPTS]
    cache = made[0]
    assert cache.store.blocks.block_size == options.get("block_size", 16)
    if "num_blocks" in options:
        assert cache.stats().num_blocks == 60
    if "max_bytes" in options:
        assert cache.stats().num_blocks == PrefixStore(model, max_bytes=10**6).blocks.max_num_blocks
    if "disk_folder" in options:
        assert cache.stats().tiers[0].max_bytes == 3 * 10**6


def test_sizes_are_of_a_new_cache_alone(tokenizer: Any) -> None:
    model = build("llama")
    store = PrefixStore(model, num_blocks=60)
    with pytest.raises(CacheArgumentError, match="block_size: of the store, which is there already"):
        run(model, tokenizer, cache=store, block_size=8)
    assert run(model, tokenizer, PROMPTS[:2], cache=store).summary.num_prompts == 2
    with pytest.raises(CacheArgumentError, match="block_size and num_blocks: of the cache, which is there already"):
        run(model, tokenizer, cache=PagedPrefixCache(store), block_size=8, num_blocks=60)


def test_memory_that_runs_out_halves_the_batch(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = tiny("llama"), BatchCalls._run

    def run_small(self: BatchCalls, rows: list[int], *rest: Any) -> Any:
        if len(rows) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return calls(self, rows, *rest)

    monkeypatch.setattr(BatchCalls, "_run", run_small)
    assert run(model, tokenizer).completions == [alone(model, tokenizer, prompt) for prompt in PROMPTS]


def test_samples_follow_from_the_seed_and_leave_torchs_own_alone(tokenizer: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    torch.manual_seed(3)
    expected_draw = torch.rand(1)
    torch.manual_seed(3)
    one, again, other = (run(model, tokenizer, do_sample=True, seed=seed).completions for seed in (1, 1, 2))
    assert torch.equal(torch.rand(1), expected_draw)
    assert one == again != other


# Files


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return [{"id": number, "text": prompt, "é": [number, None]} for number, prompt in enumerate(PROMPTS)]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet", "jsonl.gz"])
def test_rows_of_a_file_get_a_completion(
    suffix: str, rows: list[dict[str, Any]], tokenizer: Any, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    if suffix == "csv":
        rows = [{**row, "id": f"0{row['id']}", "é": f"a,{row['id']}\n"} for row in rows]
    path, model = tmp_path / f"prompts.{suffix}", tiny("llama")
    table = datasets.Dataset.from_list(rows)
    {"jsonl": table.to_json, "csv": table.to_csv, "parquet": table.to_parquet}[suffix.partition(".")[0]](str(path))
    result = run(model, tokenizer, path, column="text", out=tmp_path / "out.jsonl")
    assert result.completions is None
    assert written(tmp_path / "out.jsonl") == [
        {**row, "completion": alone(model, tokenizer, row["text"])} for row in rows
    ]
    assert {each.name for each in tmp_path.iterdir()} == {path.name, "out.jsonl", "out.jsonl.done"}


def test_chats_go_through_the_template_without_what_a_table_has_filled_in(tokenizer: Any, tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    model, path = tiny("llama"), tmp_path / "chats.jsonl"
    chats = [
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": f"{n} and one?"}] for n in range(5)
    ]
    chats[2][1]["name"] = "Ann"
    path.write_text("\n".join(json.dumps({"prompt": chat}) for chat in chats), "utf-8")
    # the template shows no name
    texts = [f"system: Be short.\nuser: {number} and one?\nassistant: " for number in range(5)]
    wanted = [alone(model, tokenizer, text, max_new_tokens=3) for text in texts]
    run(model, tokenizer, path, out=tmp_path / "out.jsonl", max_new_tokens=3)
    assert [row["completion"] for row in written(tmp_path / "out.jsonl")] == wanted
    assert run(model, tokenizer, chats, max_new_tokens=3).completions == wanted


def interrupted(after: int, monkeypatch: pytest.MonkeyPatch, error: type[BaseException] = KeyboardInterrupt) -> None:
    """The job raises when so many batches are done."""
    calls, done = BatchCalls._run, 0

    def run_some(self: BatchCalls, *arguments: Any) -> Any:
        nonlocal done
        done += 1
        if done > after:
            raise error
        return calls(self, *arguments)

    monkeypatch.setattr(BatchCalls, "_run", run_some)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"order": "done"}])
def test_a_job_goes_on_where_it_was_interrupted(
    options: dict[str, Any], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = tiny("llama"), tmp_path / "out.jsonl"
    whole = run(model, tokenizer, out=tmp_path / "whole.jsonl", batch_size=4, **options).summary
    with monkeypatch.context() as patch:
        interrupted(2, patch)
        with pytest.raises(KeyboardInterrupt):
            run(model, tokenizer, out=out, batch_size=4, **options)
    done = {row for line in (tmp_path / "out.jsonl.journal").read_text().splitlines()[1:] for row in json.loads(line)["rows"]}  # fmt: skip
    ran: list[int] = []
    with monkeypatch.context() as patch:
        calls = BatchCalls._run
        patch.setattr(BatchCalls, "_run", lambda self, rows, *rest: ran.extend(rows) or calls(self, rows, *rest))
        summary = run(model, tokenizer, out=out, batch_size=4, **options).summary
    assert sorted([*ran, *done]) == [*range(len(PROMPTS))]
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert (summary.num_prompts, summary.prompt_tokens, summary.new_tokens) == (whole.num_prompts, whole.prompt_tokens, whole.new_tokens)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_new_tokens": 6}, "option max_new_tokens was 5 and is 6"),
        ({"prompts": [*PROMPTS[:-1], "another"]}, "other prompts[;.]"),
        ({"model": "other"}, "other model[;.]"),
        ({"template": "other"}, "other tokens of the prompts"),
        ({"do_sample": True}, "option do_sample"),
    ],
)
def test_a_job_that_has_changed_is_refused_and_says_how(
    change: dict[str, Any], said: str, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        interrupted(1, patch)
        with pytest.raises(KeyboardInterrupt):
            run(tiny("llama"), tokenizer, out=out)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    change = dict(change)
    model = tiny("llama", 1) if change.pop("model", None) else tiny("llama")
    if change.pop("template", None):
        tokenizer = character_tokenizer(CHARACTERS[::-1])
    with pytest.raises(CacheArgumentError, match=said):
        run(model, tokenizer, change.pop("prompts", PROMPTS), out=out, **change)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_overwrite_begins_an_interrupted_job_anew(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = tiny("llama"), tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        interrupted(2, patch)
        with pytest.raises(KeyboardInterrupt):
            run(model, tokenizer, out=out, batch_size=4)
    summary = run(model, tokenizer, PROMPTS[:3], out=out, overwrite=True).summary
    assert (summary.num_prompts, summary.num_done_before) == (3, 0)
    assert [row["prompt"] for row in written(out)] == PROMPTS[:3]


def test_what_another_job_is_writing_stays_also_with_overwrite(tokenizer: Any, tmp_path: Path) -> None:
    model, out = tiny("llama"), tmp_path / "out.jsonl"
    out.write_text("of a running job\n")
    journal_of(out).write_text("of a running job\n")
    with claimed(out), pytest.raises(CacheArgumentError, match="another process is working on"):
        run(model, tokenizer, out=out, overwrite=True)
    assert out.read_text() == journal_of(out).read_text() == "of a running job\n"


def test_an_output_that_is_finished_while_the_job_waits_to_begin_stays(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = tiny("llama"), tmp_path / "out.jsonl"
    first = job.opened

    def opened_later(*given: Any) -> Any:
        monkeypatch.setattr(job, "opened", first)
        with pytest.raises(CacheArgumentError, match="another process is working on"):
            run(model, tokenizer, out=out)
        return first(*given)

    monkeypatch.setattr(job, "opened", opened_later)
    run(model, tokenizer, PROMPTS[:2], out=out)
    assert [row["prompt"] for row in written(out)] == PROMPTS[:2]


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 3}, {"order": "done"}])
def test_a_finished_job_that_is_begun_again_has_nothing_to_do(
    options: dict[str, Any], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out = tiny("llama"), tmp_path / "out.jsonl"
    first = run(model, tokenizer, out=out, **options)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()}
    monkeypatch.setattr(BatchCalls, "_generate", lambda *_, **__: pytest.fail("it ran"))
    again = run(build("llama"), tokenizer, out=out, **options)  # the same weights
    assert again.completions is None
    assert again.summary == dataclasses.replace(first.summary, num_done_before=len(PROMPTS))
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_new_tokens": 6}, r"finished, and from another job \(option max_new_tokens was 5 and is 6\)"),
        ({"order": "done"}, 'order was "given" and is "done"'),
        ({"model": "other"}, "other model"),
    ],
)
def test_a_finished_output_of_another_job_stays(
    change: dict[str, Any], said: str, tokenizer: Any, tmp_path: Path
) -> None:
    out, change = tmp_path / "out.jsonl", dict(change)
    run(tiny("llama"), tokenizer, out=out)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    model = tiny("llama", 1) if change.pop("model", None) else tiny("llama")
    with pytest.raises(CacheArgumentError, match=said):
        run(model, tokenizer, out=out, **change)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_finished_job_runs_again_where_its_output_is_gone_or_is_to_go(tokenizer: Any, tmp_path: Path) -> None:
    model, out = tiny("llama"), tmp_path / "out.jsonl"
    run(model, tokenizer, out=out)
    whole = out.read_bytes()
    out.unlink()
    assert run(model, tokenizer, out=out).summary.num_done_before == 0
    assert run(model, tokenizer, out=out, overwrite=True).summary.num_done_before == 0
    assert out.read_bytes() == whole
    other = run(model, tokenizer, PROMPTS[:2], out=out, overwrite=True).summary
    assert other.num_prompts == 2
    assert run(model, tokenizer, PROMPTS[:2], out=out).summary.num_done_before == 2


@pytest.mark.parametrize("where", [(Journal, "remove"), (job, "note_finished")], ids=["after", "before"])
def test_a_job_that_dies_between_its_record_and_its_journal_is_done(
    where: tuple[Any, str], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or before its record is written."""
    model, out = tiny("llama"), tmp_path / "out.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(*where, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(model, tokenizer, out=out)
    whole = out.read_bytes()
    assert run(model, tokenizer, out=out).summary.num_done_before == len(PROMPTS)
    assert out.read_bytes() == whole
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", "out.jsonl.done"}


@pytest.mark.parametrize("how", ["itself", "symbolic link", "hard link"])
def test_the_prompts_file_is_no_output(how: str, tokenizer: Any, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(json.dumps({"prompt": "a"}) + "\n")
    if how == "itself":
        out = prompts
    elif how == "symbolic link":
        out.symlink_to(prompts)
    else:
        os.link(prompts, out)
    with pytest.raises(CacheArgumentError, match="holds the prompts themselves"):
        run(tiny("llama"), tokenizer, prompts, out=out, overwrite=True)
    assert json.loads(prompts.read_text()) == {"prompt": "a"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with a name here")
def test_an_output_that_is_no_file_stays(tokenizer: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CacheArgumentError, match="is no regular file"):
        run(tiny("llama"), tokenizer, out=tmp_path / "pipe", overwrite=True)
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(("attention", "num_batches"), [("sdpa", 1), ("eager", 3)])
def test_batches_are_larger_behind_a_prefix_where_the_model_reads_it_once(
    attention: str, num_batches: int, tokenizer: Any
) -> None:
    model = build("llama", attn_implementation=attention)
    prompts = ["x" * 200 + f"{number:02}" for number in range(20)]
    result = run(model, tokenizer, prompts, batch_size=None)
    assert result.summary.num_batches == num_batches
    assert result.completions == run(model, tokenizer, prompts, batch_size=4).completions
    apart = [f"{number:02}" + "x" * 200 for number in range(20)]
    assert run(model, tokenizer, apart, batch_size=None).summary.num_batches == 3


def test_jobs_in_several_threads_on_one_model_do_not_take_it_from_each_other(tokenizer: Any) -> None:
    model = build("llama")
    sizes = [4, 18, 10]
    expected = [alone(model, tokenizer, prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(3) as threads:
        results = [*threads.map(lambda size: run(model, tokenizer, PROMPTS[:size], batch_size=2).completions, sizes)]
    assert results == [expected[:size] for size in sizes]
    assert "generate" not in model.__dict__


def test_a_job_warns_of_nothing(tokenizer: Any) -> None:
    prompts = ["x" * 60, "y" * 20, "z" * 12, "x" * 60]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(tiny("llama"), tokenizer, prompts, batch_size=1).completions is not None


def test_after_a_job_its_cache_holds_no_rows_and_another_models_is_refused(tokenizer: Any) -> None:
    cache = PagedPrefixCache(build("llama"))
    run(cache.store.model, tokenizer, cache=cache)
    assert cache.stats().num_blocks_in_use == 0
    with pytest.raises(CacheArgumentError, match="cache is of another model"):
        run(tiny("llama"), tokenizer, cache=cache)
    with pytest.raises(CacheArgumentError, match="cache is of type str; give a PagedPrefixCache or a PrefixStore"):
        run(tiny("llama"), tokenizer, cache="x")


def test_counts_are_of_prompts_and_of_what_was_generated(tokenizer: Any) -> None:
    model = tiny("llama")
    texts = [alone(model, tokenizer, prompt) for prompt in PROMPTS]
    stop = str(texts[0])[1]
    summary = run(model, tokenizer, stop_strings=[stop]).summary
    assert summary.new_tokens == sum(str(text).find(stop) + 1 or NEW for text in texts)
    beams = run(model, tokenizer, ["abc", "b"], num_beams=4).summary
    assert beams.prompt_tokens == 4
    assert beams.reused_tokens >= 0


def test_a_prompt_may_be_as_long_as_the_rotary_embedding_is_stretched(tokenizer: Any) -> None:
    stretched = build("llama", max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 8.0, "rope_theta": 1e4})  # fmt: skip
    longest = 512 + 1 - NEW  # the last new token takes no position
    for prompt in ("x" * 62, "x" * longest):
        assert run(stretched, tokenizer, [prompt]).completions == [alone(stretched, tokenizer, prompt)]
    with pytest.raises(CacheArgumentError, match="need more than the model's 512 positions"):
        run(stretched, tokenizer, ["x" * (longest + 1)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_job_that_is_killed_twenty_times_has_the_same_output(tokenizer: Any, tmp_path: Path) -> None:
    model, prompts = tiny("llama"), few_shot_prompts(3, 90, 3)

    def start(out: Path) -> int:
        process = os.fork()
        if process:
            return process
        status = 1
        try:
            run(model, tokenizer, prompts, out=out)
            status = 0
        finally:
            os._exit(status)

    assert kill_again_and_again(start, tmp_path, times=20, seed=0, longest=0.2) >= 1


# What is refused


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (["a", ""], {}, "row 1, counted from 0: 'prompt' is empty"),
    (["a", 3], {}, "row 1, counted from 0: 'prompt' is of type int"),
    ([{"text": "a"}], {}, "no column 'prompt'; there are 'text'"),
    (
        [{"prompt": "a"}, {"prompt": "a", "completion": "b"}],
        {"out": "out.jsonl"},
        "row 1, counted from 0: it has a column 'completion' already",
    ),
    (
        ["a", "x" * 600],
        {},
        "row 1, counted from 0: its 600 tokens and 5 new tokens need more than the model's 512 positions: ",
    ),
    (["a"], {"batch_size": 0}, "batch_size is 0"),
    (["a"], {"max_bytes": "4 gigs"}, "max_bytes is '4 gigs'; give a number of bytes, or one with a unit"),
    (["a"], {"max_bytes": 0}, "max_bytes is 0"),
    (["a"], {"num_blocks": 1}, "num_blocks is 1"),
    (["a"], {"block_size": 0}, "block_size is 0"),
    (["a"], {"disk_bytes": "1GB"}, "disk_bytes is 1GB without disk_folder"),
    (["a"], {"overwrite": "no"}, "overwrite is 'no'; give True or False"),
    (["a"], {"progress": "yes"}, "progress is 'yes'; give True or False"),
    (["a"], {"column": 3}, "column is 3; give the name of a column"),
    (["a"], {"out": 5}, "out is 5; give a file's path"),
    (["a"], {"out": "a\0b"}, "give a file's path"),
    (["a"], {"order": "random"}, "order is 'random'"),
    (["a"], {"tempreature": 1.0}, "tempreature is no option of generate; did you mean temperature?"),
    (["a"], {"batchsize": 2}, "batchsize is no option of generate; did you mean batch_size?"),
    (["a"], {"num_beams": 2, "num_return_sequences": 3}, "generate cannot run so"),
    (["a"], {"out": "nowhere/out.jsonl"}, "there is no folder nowhere"),
    (["a"], {"out": "out.csv"}, "what is written are plain JSON lines"),
    (["a"], {"out": "out.jsonl.gz"}, "what is written are plain JSON lines"),
    (["a\ud800"], {}, "row 0, counted from 0: its prompt is no text"),
    ([3], {}, "row 0, counted from 0: 'prompt' is of type int"),
    ("prompts.txt", {}, "there is no file 'prompts.txt'; prompts themselves are given as a list"),
    ("prompts.jsonl", {}, "there is no file 'prompts.jsonl'; prompts themselves"),
]


@pytest.mark.parametrize(("prompts", "options", "said"), BAD)
def test_bad_input_is_refused_before_anything_runs(
    prompts: Any,
    options: dict[str, Any],
    said: str,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BatchCalls, "_run", lambda *_: pytest.fail("it ran"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CacheArgumentError, match=said):
        run(tiny("llama"), tokenizer, prompts, **options)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("template", ["{{ raise_exception('no such role') }}", "{{ messages[0].content.text }}", "{{"])
def test_a_chat_that_its_template_refuses_is_refused_with_its_row(template: str, tokenizer: Any) -> None:
    tokenizer.chat_template = template
    with pytest.raises(
        CacheArgumentError, match=r"^row 1, counted from 0: the chat template cannot be filled with it"
    ) as raised:
        run(tiny("llama"), tokenizer, ["a", [{"role": "user"}]])
    assert "\n" not in str(raised.value)


def test_without_a_tokenizer_nothing_runs() -> None:
    with pytest.raises(CacheArgumentError, match=r"^tokenizer is of type NoneType; give the model's$"):
        run(tiny("llama"), None)


def test_a_disk_that_is_full_is_named_and_the_job_goes_on_afterwards(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out, sync = tiny("llama"), tmp_path / "out.jsonl", os.fsync
    num_synced = 0

    def fail(file: int) -> None:
        nonlocal num_synced
        num_synced += 1
        if num_synced == 3:
            raise OSError(28, "No space left on device")
        sync(file)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"No space left on device: '.*out\.jsonl\.journal'"):
        run(model, tokenizer, out=out)
    run(model, tokenizer, out=out)
    assert [row["completion"] for row in written(out)] == run(model, tokenizer).completions


def test_samples_go_on_only_on_as_many_workers(tokenizer: Any, tmp_path: Path) -> None:
    model, out = tiny("llama"), tmp_path / "out.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        interrupted(1, patch)
        with pytest.raises(KeyboardInterrupt):
            run(model, tokenizer, out=out, do_sample=True, batch_size=4)
        patch.setattr(job.Crew, "num_workers", 2)
        with pytest.raises(CacheArgumentError, match="option num_workers was 1 and is 2"):
            run(model, tokenizer, out=out, do_sample=True, batch_size=4)


def test_no_prompts_are_no_job(tokenizer: Any) -> None:
    result = run(tiny("llama"), tokenizer, [])
    assert result.completions == []
    assert result.summary.num_batches == 0


def test_a_job_that_brings_no_cache_leaves_the_model_as_it_was(tokenizer: Any) -> None:
    model = build("llama")
    run(model, tokenizer, PROMPTS[:3])
    assert "generate" not in model.__dict__
    assert not model._forward_pre_hooks
    cache = PagedPrefixCache(model)
    run(model, tokenizer, PROMPTS[:3])
    assert "generate" in model.__dict__
    assert cache.stats().num_calls == 0
