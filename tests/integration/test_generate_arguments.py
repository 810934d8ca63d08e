"""What is read of a call of `generate`, against how far that call really goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.call.limits import UNLIMITED
from hf_paged_cache.integration.generate_arguments import read_generate

from ..model.test_support import FROM_5_23

IDS = torch.arange(1, 13).view(2, 6)
REPEATED = torch.tensor([[5, 7] * 8])

# keyword arguments, options of a config that is given, options of the model's own
LENGTHS: dict[str, tuple[dict[str, int], dict[str, int] | None, dict[str, int]]] = {
    "nothing": ({}, None, {}),
    "keyword, new": ({"max_new_tokens": 3}, None, {}),
    "keyword, all": ({"max_length": 11}, None, {}),
    "given, new": ({}, {"max_new_tokens": 3}, {}),
    "given, all": ({}, {"max_length": 11}, {}),
    "model's, new": ({}, None, {"max_new_tokens": 3}),
    "model's, all": ({}, None, {"max_length": 11}),
    "keyword before given": ({"max_new_tokens": 2}, {"max_new_tokens": 5}, {}),
    "keyword before model's": ({"max_new_tokens": 2}, None, {"max_new_tokens": 5}),
    "given before model's": ({}, {"max_new_tokens": 2}, {"max_new_tokens": 5}),
    "new before all": ({"max_new_tokens": 2, "max_length": 30}, None, {}),
    "new of the config before all of the keyword": ({"max_length": 9}, {"max_new_tokens": 5}, {}),
    "new of the model's before all of the keyword": ({"max_length": 9}, None, {"max_new_tokens": 5}),
    "all of the model's with another config": ({}, {"top_k": 3}, {"max_length": 11}),
    "a length of the prompt": ({"max_length": 7}, None, {}),
}


@pytest.mark.parametrize(("keywords", "given", "own"), LENGTHS.values(), ids=LENGTHS)
def test_the_most_columns_are_those_that_generate_fills(
    keywords: dict[str, int], given: dict[str, int] | None, own: dict[str, int], tiny_llama: Any
) -> None:
    for name, value in own.items():
        setattr(tiny_llama.generation_config, name, value)
    options: dict[str, Any] = dict(keywords)
    if given is not None:
        options["generation_config"] = GenerationConfig(**given)
    read = read_generate(tiny_llama, (IDS,), options)
    cache = PagedPrefixCache(tiny_llama)
    output = tiny_llama.generate(IDS, past_key_values=cache, do_sample=False, **options)
    assert read.limits.max_columns == output.shape[1] - 1 == cache.get_seq_length()
    assert read.limits.num_prompt_columns == 6
    assert not read.only_new_tokens


@pytest.mark.parametrize("options", [{"max_new_tokens": 4}, {"max_length": 9}, {}], ids=["new", "all", "neither"])
def test_where_only_new_tokens_are_passed_the_rows_before_them_count(options: dict[str, int], tiny_llama: Any) -> None:
    cache = PagedPrefixCache(tiny_llama)
    tiny_llama.generate(IDS, past_key_values=cache, max_new_tokens=5, do_sample=False)
    arguments = {"attention_mask": torch.ones(2, cache.get_seq_length() + 3, dtype=torch.long), **options}
    read = read_generate(tiny_llama, (), {"input_ids": IDS[:, :3], **arguments})
    assert read.only_new_tokens
    tiny_llama.generate(IDS[:, :3], past_key_values=cache, do_sample=False, **arguments)
    assert read.limits.num_prompt_columns == 13
    assert read.limits is not UNLIMITED
    assert read.limits.max_columns >= cache.get_seq_length()  # its memory has room for so many


@pytest.mark.parametrize(
    ("options", "num_rows"),
    [
        ({}, 2),
        ({"num_beams": 3}, 6),
        ({"num_return_sequences": 2, "do_sample": True}, 4),
        ({"num_beams": 4, "num_return_sequences": 2}, 8),
    ],
)
def test_rows_are_counted_as_generate_expands_them(options: dict[str, Any], num_rows: int, tiny_llama: Any) -> None:
    read = read_generate(tiny_llama, (), {"inputs": IDS, **options})
    assert read.limits.num_rows == num_rows
    seen = []
    handle = tiny_llama.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    tiny_llama.generate(IDS, max_new_tokens=2, **options)
    handle.remove()
    assert max(seen) == num_rows


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, set()),
        (7, {7}),
        ([7, 8], {7, 8}),
        ((7,), {7}),
        (torch.tensor(7), {7}),
        (torch.tensor([7, 8]), {7, 8}),
        (0, {0}),
    ],
)
def test_tokens_that_end_a_row_are_read_in_every_form(value: Any, expected: set[int], tiny_llama: Any) -> None:
    read = read_generate(tiny_llama, (IDS,), {"eos_token_id": value})
    assert read.limits.end_of_sequence == expected


@pytest.mark.parametrize("where", ["first", "inputs", "input_ids"])
def test_the_ids_are_found_wherever_they_are_passed(where: str, tiny_llama: Any) -> None:
    args, kwargs = ((IDS,), {}) if where == "first" else ((), {where: IDS})
    read = read_generate(tiny_llama, args, {**kwargs, "max_new_tokens": 2})
    assert (read.limits.num_prompt_columns, read.limits.max_columns) == (6, 7)


def test_a_config_is_found_as_the_second_argument_too(tiny_llama: Any) -> None:
    read = read_generate(tiny_llama, (IDS, GenerationConfig(max_new_tokens=2)), {})
    assert read.limits.max_columns == 7


@pytest.mark.parametrize("kwargs", [{}, {"inputs": torch.arange(3)}])
def test_without_ids_of_rows_nothing_is_known(kwargs: dict[str, Any], tiny_llama: Any) -> None:
    read = read_generate(tiny_llama, (), kwargs)
    assert read.limits is UNLIMITED
    assert not read.only_new_tokens


@pytest.mark.parametrize("with_ids", [False, pytest.param(True, marks=FROM_5_23)])  # before, a mask is made of the ids
def test_embeddings_are_the_prompt_whatever_ids_come_with_them(with_ids: bool, tiny_llama: Any) -> None:
    """Ids that are passed with embeddings only begin the output."""
    embeddings = tiny_llama.get_input_embeddings()(IDS[:, :4]).detach()
    options: dict[str, Any] = {"inputs_embeds": embeddings, "max_new_tokens": 3}
    if with_ids:
        options["input_ids"] = IDS
    read = read_generate(tiny_llama, (), options)
    cache = PagedPrefixCache(tiny_llama)
    tiny_llama.generate(**options, past_key_values=cache, do_sample=False)
    assert (read.limits.num_prompt_columns, read.limits.num_rows, read.only_new_tokens) == (4, 2, False)
    assert read.limits.max_columns >= cache.get_seq_length() == 6


@pytest.mark.parametrize("mask", [None, torch.ones(2, 6), torch.ones(2, 1, 6, 6)], ids=["none", "as long", "4-D"])
def test_a_mask_no_longer_than_the_ids_means_a_whole_prompt(mask: Any, tiny_llama: Any) -> None:
    assert not read_generate(tiny_llama, (IDS,), {"attention_mask": mask}).only_new_tokens


def test_reading_changes_nothing(tiny_llama: Any) -> None:
    config = GenerationConfig(max_new_tokens=2)
    before = (config.to_dict(), tiny_llama.generation_config.to_dict())
    kwargs = {"input_ids": IDS, "generation_config": config}
    read_generate(tiny_llama, (), kwargs)
    assert (config.to_dict(), tiny_llama.generation_config.to_dict()) == before
    assert kwargs == {"input_ids": IDS, "generation_config": config}
