"""Jobs with images: each completion is that of its prompt alone, an image is computed once, and a job resumes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from hf_paged_cache import CacheArgumentError, PagedPrefixCache, generate_all

from ..conformance.image_zoo import tiny
from ..conformance.images import Towers
from ..promise.test_image_pipelines import chat, picture, processor

if TYPE_CHECKING:
    from pathlib import Path

NEW = 5
QUESTIONS = ("w1 w2 w3", "w4 w5", "w6 w7 w8 w9")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [str(tmp_path / f"{seed}.png") for seed in (1, 2)]
    for seed, path in enumerate(paths, 1):
        picture(seed).save(path)
    return paths


def alone(model: Any, words: Any, messages: list[dict[str, Any]]) -> str:
    inputs = words.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    ids = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return str(words.tokenizer.decode(ids, skip_special_tokens=True))


def asked(file: str, text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "path": file}, {"type": "text", "text": text}]}]


def test_a_column_of_image_files_is_answered_as_each_alone_and_each_image_is_computed_once(
    files: list[str], tmp_path: Path
) -> None:
    model, layout = tiny("llava")
    words = processor(model)
    rows = [{"prompt": text, "picture": file} for text in QUESTIONS for file in files]
    wanted = [alone(model, words, asked(row["picture"], row["prompt"])) for row in rows]
    with Towers(model) as towers:
        cache = PagedPrefixCache(model, block_size=8)
        how = {"image_column": "picture", "max_new_tokens": NEW, "cache": cache, "progress": False}
        found = generate_all(model, words, rows, **how)
        assert towers.num_runs == len(files)
    assert found.completions == wanted
    assert cache.store.stats().reused_tokens >= (len(rows) - len(files)) * layout.num_tokens
    out = tmp_path / "out.jsonl"
    for _ in range(2):  # the second finds all done
        generate_all(model, words, rows, out=out, **how)
        assert [json.loads(line)["completion"] for line in out.read_text().splitlines()] == wanted


def test_chats_with_pictures_in_memory_and_texts_stand_side_by_side() -> None:
    model, _ = tiny("llava")
    words = processor(model)
    prompts: list[Any] = [chat(picture(1), "w1 w2"), "w3 w4 w5", chat(picture(2), "w1 w2")]
    found = generate_all(model, words, prompts, max_new_tokens=NEW, progress=False, block_size=8).completions
    assert found is not None
    assert [found[0], found[2]] == [alone(model, words, prompts[number]) for number in (0, 2)]
    ids = words.tokenizer(prompts[1], return_tensors="pt")["input_ids"]
    assert found[1] == words.tokenizer.decode(
        model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :], skip_special_tokens=True
    )


def test_what_a_job_cannot_do_with_images_is_said_before_anything_runs(files: list[str], tmp_path: Path) -> None:
    model, _ = tiny("llava")
    words = processor(model)
    with pytest.raises(CacheArgumentError, match="give the model's processor"):
        generate_all(model, words.tokenizer, [asked(files[0], "w1")], progress=False)
    with pytest.raises(CacheArgumentError, match="run one row at a time; give batch_size=1"):
        generate_all(model, words, [asked(files[0], "w1")] * 2, batch_size=2, progress=False)
    with pytest.raises(CacheArgumentError, match=r"row 1, counted from 0.*cannot take its images"):
        generate_all(model, words, [asked(files[0], "w1"), asked(str(tmp_path / "none.png"), "w1")], progress=False)
    with pytest.raises(CacheArgumentError, match="placeholder of an image"):
        generate_all(model, words, ["<image> w1"], progress=False)
