"""A forward's arguments: what is read of them, what is not guessed, and how they are shortened."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_paged_cache import CacheArgumentError, PrefixStore
from hf_paged_cache.call.request import ForwardRequest, RowInput
from hf_paged_cache.integration.begin import RunningRow, RunningRows
from hf_paged_cache.integration.forward_arguments import ArgumentReader, for_cut
from hf_paged_cache.integration.opening import Cut
from hf_paged_cache.integration.side_forward import SideForwards

from ..conformance import image_zoo

IDS = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]])
MASK = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
POSITIONS = torch.tensor([[0, 0, 0, 1], [0, 1, 2, 3]])


def running(*rows: tuple[int, int], first_position: int = 0) -> RunningRows:
    """Rows of (padding, tokens) that have run, all of one number of columns."""
    return RunningRows(sum(rows[0]), [RunningRow(pad, first_position, number, 0) for pad, number in rows])


def read(
    arguments: dict[str, Any],
    rows: RunningRows | None = None,
    *,
    in_generate: bool = False,
    records_drafts: bool = False,
    by_default: Sequence[str] = (),
    config: Any = None,
    **options: Any,
) -> ForwardRequest:
    """What a reader of these options reads; without rows, of a first forward."""
    how: dict[str, Any] = {"in_generate": in_generate, "records_drafts": records_drafts, "by_default": by_default}
    return reader(config, **options).read(arguments, RunningRows(0, []) if rows is None else rows, **how)


def reader(config: Any = None, **options: Any) -> ArgumentReader:
    options = {"takes_positions": True, "takes_logits_to_keep": True, **options}
    options = {"defaults": {}, **options}
    return ArgumentReader(SimpleNamespace() if config is None else config, lambda: "sdpa", **options)


def tokens(given: ForwardRequest) -> list[list[int]]:
    return [list(row.token_ids) for row in given.rows]


def pads(given: ForwardRequest) -> list[int]:
    return [row.pad for row in given.rows]


def first_positions(given: ForwardRequest) -> list[int]:
    return [row.first_position for row in given.rows]


# Inputs besides ids


def test_what_a_cross_attention_reads_is_refused_before_anything_changes() -> None:
    arguments = {"input_ids": IDS, "a": None, "b": torch.zeros(2, 3, 4)}
    with pytest.raises(CacheArgumentError, match=r"^b was passed, and cross attention keeps keys and values"):
        read(arguments, in_generate=True, cross_inputs=("a", "b"))
    assert tokens(read({"input_ids": IDS}, in_generate=True, cross_inputs=("a", "b"))) == IDS.tolist()


def test_a_model_that_does_not_number_columns_needs_positions_to_reuse() -> None:
    given = read({"input_ids": IDS}, default_numbering=None)
    assert given.bypass == "without position_ids it is not known which positions this model gives its tokens"
    assert not given.may_alias
    counted = {"input_ids": IDS, "position_ids": torch.arange(4)[None]}
    assert read(counted, default_numbering=None).bypass is None


def test_where_a_model_numbers_tokens_padding_has_no_positions() -> None:
    given = read({"input_ids": IDS, "attention_mask": MASK}, default_numbering="tokens")
    assert (given.bypass, first_positions(given)) == (None, [0, 0])
    given = read({"input_ids": IDS, "attention_mask": MASK}, default_numbering="columns")
    assert (given.bypass, first_positions(given)) == (None, [2, 0])


# Ids and masks


def test_left_padding_is_taken_off_the_tokens() -> None:
    given = read({"input_ids": IDS, "attention_mask": MASK, "position_ids": POSITIONS, "logits_to_keep": 1})
    assert tokens(given) == [[5, 6], [1, 2, 3, 4]]
    assert (pads(given), first_positions(given), given.num_new_columns) == ([2, 0], [0, 0], 4)
    assert {row.root for row in given.rows} == {b""}  # the caller's to add
    assert (given.bypass, given.keep_columns, given.num_logits_needed, given.may_alias) == (None, None, 1, True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_a_mask_is_read_in_every_type(dtype: torch.dtype) -> None:
    assert pads(read({"input_ids": IDS, "attention_mask": MASK.to(dtype), "position_ids": POSITIONS})) == [2, 0]


def test_without_a_mask_nothing_is_padding() -> None:
    given = read({"input_ids": IDS})
    assert (pads(given), given.bypass) == ([0, 0], None)
    assert tokens(given) == IDS.tolist()


def test_a_mask_covers_the_columns_before_as_well() -> None:
    rows = running((2, 4), (0, 6))
    mask = torch.cat(
        (torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]), torch.ones(2, 4, dtype=torch.long)), dim=1
    )
    positions = torch.tensor([[4, 5, 6, 7], [6, 7, 8, 9]])
    given = read({"input_ids": IDS, "attention_mask": mask, "position_ids": positions}, rows)
    assert (pads(given), given.bypass) == ([2, 0], None)
    assert tokens(given) == IDS.tolist()


def test_padding_that_changes_while_a_row_runs_is_not_reused() -> None:
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    given = read({"input_ids": IDS, "attention_mask": mask}, running((0, 6), (0, 6)))
    assert (given.bypass, pads(given)) == ("the padding of a row has changed", [0, 0])


@pytest.mark.parametrize(("num_tokens", "pad"), [(0, 2), (0, 8), (1, 2)])
def test_only_a_row_of_nothing_but_padding_may_get_more_of_it(num_tokens: int, pad: int) -> None:
    rows = running((6, num_tokens))
    mask = torch.ones(1, rows.num_columns + 4, dtype=torch.long)
    mask[0, :pad] = 0
    arguments = {"input_ids": IDS[:1], "attention_mask": mask, "position_ids": torch.arange(4)[None]}
    if pad < 6:
        with pytest.raises(CacheArgumentError, match=f"shows column {pad} of row 0, which was padding"):
            read(arguments, rows)
    else:
        given = read(arguments, rows)
        assert (pads(given), tokens(given)) == ([8], [[5, 6]])


def test_what_the_mask_hides_of_embeddings_is_no_padding_of_theirs_but_counted() -> None:
    """Bypassed rows run all their columns."""
    given = read({"inputs_embeds": torch.zeros(2, 4, 8), "attention_mask": MASK})
    assert (pads(given), [row.num_hidden for row in given.rows]) == ([0, 0], [2, 0])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "a forward without input_ids and without inputs_embeds"),
        ({"input_ids": torch.arange(4)}, r"input_ids must be \[rows, tokens\], got \(4,\)"),
        ({"input_ids": IDS.float()}, r"input_ids must be integers, got a tensor of torch\.float32$"),
    ],
)
def test_a_forward_without_rows_of_ids_is_refused(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(CacheArgumentError, match=f"^{why}"):
        read(arguments)


@pytest.mark.parametrize("positions", [torch.full((3, 2, 4), 7), torch.tensor([7, 3]), torch.tensor([[7, 7, 0, 1]])])
@pytest.mark.parametrize("takes_positions", [True, False])
def test_the_largest_position_is_read_of_positions_of_any_shape(positions: torch.Tensor, takes_positions: bool) -> None:
    assert read({"input_ids": IDS, "position_ids": positions}, takes_positions=takes_positions).max_position == 7


# Positions


@pytest.mark.parametrize("first", [0, 7])
def test_positions_that_count_on_say_where_a_row_begins(first: int) -> None:
    positions = torch.arange(first, first + 4)[None]
    given = read({"input_ids": IDS, "position_ids": positions})
    assert (first_positions(given), given.bypass) == ([first, first], None)


def test_without_positions_columns_are_counted_whatever_the_padding() -> None:
    given = read({"input_ids": IDS, "attention_mask": MASK})
    assert (first_positions(given), given.bypass) == ([2, 0], None)


@pytest.mark.parametrize(
    ("positions", "why"),
    [
        (torch.tensor([[0, 1, 3, 4]]), "positions do not count up by one"),
        (torch.tensor([[0, 1, 2, 2]]), "positions do not count up by one"),
        (torch.tensor([[3, 2, 1, 0]]), "positions do not count up by one"),
        (torch.tensor([[0.5, 1.5, 2.5, 3.5]]), "positions are no integers"),
        (torch.zeros(3, 2, 4, dtype=torch.long), "positions are not one number a token"),
        (torch.tensor([[0, 1, 2]]), "positions of another length than the token ids"),
        ([0, 1, 2, 3], "positions are not one number a token"),
    ],
)
def test_other_positions_are_not_reused(positions: Any, why: str) -> None:
    given = read({"input_ids": IDS, "position_ids": positions})
    assert given.bypass == why
    assert not given.may_alias


def test_positions_of_a_model_that_takes_none_follow_from_the_columns() -> None:
    assert first_positions(read({"input_ids": IDS}, takes_positions=False)) == [0, 0]


def test_a_row_that_goes_on_behind_a_gap_is_not_reused() -> None:
    given = read({"input_ids": IDS[1:], "position_ids": torch.arange(9, 13)[None]}, running((0, 6)))
    assert given.bypass == "positions do not continue where the row stopped"


def test_a_row_that_begins_anew_on_a_cache_that_holds_it_is_refused() -> None:
    with pytest.raises(CacheArgumentError, match="row 0 resumes at position 0, but the cache holds 6 tokens of it"):
        read({"input_ids": IDS[1:], "position_ids": torch.arange(4)[None]}, running((0, 6)))


# Outputs


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions", "output_router_logits"])
@pytest.mark.parametrize("value", [True, 1, [0, 1]])
@pytest.mark.parametrize("where", ["argument", "config"])
def test_outputs_besides_logits_are_an_obstacle_in_a_prompt_and_in_a_step(name: str, value: Any, where: str) -> None:
    by_default, asked = ([name], {}) if where == "config" else ([], {name: value})
    why = f"{name} was asked for"
    assert read({"input_ids": IDS, "logits_to_keep": 1, **asked}, by_default=by_default).bypass == why
    arguments = {**step(**asked, attention_mask=None), "position_ids": None}
    assert read(arguments, running((0, 6), (0, 6)), by_default=by_default).bypass == why


def test_an_output_that_the_config_asks_for_and_the_call_does_not_is_not_given() -> None:
    arguments = {"input_ids": IDS, "logits_to_keep": 1, "output_hidden_states": False}
    given = read(arguments, by_default=["output_hidden_states"])
    assert (given.bypass, given.keep_columns) == (None, None)


@pytest.mark.parametrize(
    ("value", "needed"), [(1, 1), (3, 3), (9, 4), (0, None), (None, None), (True, None), (torch.tensor([0]), None)]
)
def test_as_many_columns_are_computed_as_logits_are_asked_for(value: Any, needed: int | None) -> None:
    given = read({"input_ids": IDS, "logits_to_keep": value})
    if needed is None:
        assert "the logits of all tokens were asked for" in str(given.keep_columns)
    else:
        assert (given.keep_columns, given.num_logits_needed) == (None, needed)
        assert given.bypass is None


@pytest.mark.parametrize(
    ("in_generate", "records_drafts", "why"),
    [
        (True, False, None),
        (True, True, "the model cannot say which logits it needs while drafts are verified"),
        (False, False, "the logits of all tokens were asked for"),
    ],
)
def test_a_model_that_cannot_leave_logits_out_is_shortened_in_generate_only(
    in_generate: bool, records_drafts: bool, why: str | None
) -> None:
    given = read({"input_ids": IDS}, in_generate=in_generate, records_drafts=records_drafts, takes_logits_to_keep=False)
    assert given.keep_columns == why


# Unknown arguments


@pytest.mark.parametrize("value", [torch.zeros(2), [1], {"a": 1}, object(), "query", 0.5, True, False, 3, 0])
def test_an_unknown_argument_that_may_condition_keys_is_named(value: Any) -> None:
    given = read({"input_ids": IDS, "token_type_ids": value})
    assert given.bypass == "the argument token_type_ids may condition keys and values"
    assert not given.may_alias


@pytest.mark.parametrize("value", [None, [], {}, ()])
def test_an_unknown_argument_of_nothing_is_no_obstacle(value: Any) -> None:
    assert read({"input_ids": IDS, "something": value}).bypass is None


@pytest.mark.parametrize("value", [True, False, 3, 0.5, "word"])
def test_an_unknown_argument_that_the_forward_takes_anyway_is_no_obstacle(value: Any) -> None:
    assert read({"input_ids": IDS, "something": value}, defaults={"something": value}).bypass is None
    for other in (1, 0, 2, "other"):  # 1 is not True
        given = read({"input_ids": IDS, "something": other}, defaults={"something": value})
        assert given.bypass == "the argument something may condition keys and values"


def test_cache_positions_that_number_the_columns_are_no_obstacle_and_others_are() -> None:
    arguments: dict[str, Any] = {"input_ids": IDS[1:], "position_ids": torch.arange(6, 10)[None]}
    for given, why in (
        (torch.arange(6, 10), None),
        (torch.arange(4), "cache_position does not number the columns that are passed"),
        (torch.arange(7, 11), "cache_position does not number the columns that are passed"),
        ([6, 7, 8, 9], "cache_position does not number the columns that are passed"),
    ):
        assert read({**arguments, "cache_position": given}, running((0, 6))).bypass == why


# One token a row inside generate

ROWS = running((2, 4), (0, 6))  # of a step


def step(**changes: Any) -> dict[str, Any]:
    """What `generate` passes in a step of `ROWS`."""
    return {
        "input_ids": torch.tensor([[8], [9]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]]),
        "position_ids": torch.tensor([[4], [6]]),
        "logits_to_keep": 1,
        **changes,
    }


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"logits_to_keep": None},
        {"mm_encoder_outputs": {}},
        {"use_cache": True, "past_key_values": object()},
    ],
    ids=lambda changes: " ".join(changes),
)
def test_a_step_is_read_as_a_forward_of_one_token(changes: dict[str, Any]) -> None:
    given = read(step(**changes), ROWS, in_generate=True)
    assert tokens(given) == [[8], [9]]
    assert (pads(given), first_positions(given), given.num_new_columns, given.bypass) == ([2, 0], [0, 0], 1, None)


@pytest.mark.parametrize("pad", [0, 2])
def test_a_step_whose_mask_hides_a_token_is_not_reused(pad: int) -> None:
    arguments = {"input_ids": torch.tensor([[8]]), "position_ids": torch.tensor([[6 - pad]])}
    arguments["attention_mask"] = (torch.arange(7) >= pad).long()[None]
    assert read(arguments, running((pad, 6 - pad))).bypass is None
    arguments["attention_mask"][0, 3] = 0
    why = "the attention mask of row 0 has zeros after its first one (right padding or holes)"
    assert read(arguments, running((pad, 6 - pad))).bypass == why


def test_of_several_rows_the_one_is_named_whose_mask_hides_a_token() -> None:
    arguments = step()
    arguments["attention_mask"][1, 3] = 0
    why = "the attention mask of row 1 has zeros after its first one (right padding or holes)"
    assert read(arguments, ROWS).bypass == why


@pytest.mark.parametrize("hidden", [None, (1, 3)])  # the mask then shows as many columns as the usual one
def test_a_step_whose_mask_shows_padding_is_refused(hidden: tuple[int, int] | None) -> None:
    arguments = step()
    arguments["attention_mask"][0, 1] = 1
    if hidden is not None:
        arguments["attention_mask"][hidden] = 0
    with pytest.raises(CacheArgumentError, match="shows column 1 of row 0, which was padding"):
        read(arguments, ROWS)


def test_a_step_without_a_mask_shows_the_padding_there_is() -> None:
    with pytest.raises(CacheArgumentError, match="shows column 0 of row 0, which was padding"):
        read(step(attention_mask=None), ROWS)
    given = read(step(attention_mask=None, position_ids=torch.tensor([[6], [6]])), running((0, 6), (0, 6)))
    assert (tokens(given), pads(given), given.bypass) == ([[8], [9]], [0, 0], None)


def test_a_step_without_positions_is_plain_where_the_model_numbers_the_rows_columns() -> None:
    given = read(step(position_ids=None, attention_mask=None), running((0, 6), (0, 6)))
    assert (tokens(given), first_positions(given), given.bypass) == ([[8], [9]], [0, 0], None)
    assert read(step(position_ids=None), ROWS).bypass == "positions were not passed for padded rows"


def test_one_row_of_positions_stands_for_all_rows_of_a_step() -> None:
    given = read(step(position_ids=torch.tensor([[6]]), attention_mask=None), running((0, 6), (0, 6)))
    assert (first_positions(given), given.bypass) == ([0, 0], None)
    given = read(step(position_ids=torch.tensor([[6]])), ROWS)
    assert given.bypass == "positions do not continue where the row stopped"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"token_type_ids": torch.zeros(2, 1)}, "the argument token_type_ids may condition keys and values"),
        ({"is_causal": False}, "the argument is_causal may condition keys and values"),
        ({"position_ids": torch.tensor([[4], [9]])}, "positions do not continue where the row stopped"),
        ({"position_ids": torch.tensor([[4, 5], [6, 7]])}, "positions of another length than the token ids"),
        ({"position_ids": torch.zeros(3, 2, 1, dtype=torch.long)}, "positions are not one number a token"),
        ({"position_ids": [[4], [6]]}, "positions are not one number a token"),
        (
            {"attention_mask": {"full": torch.tensor([[[[False, False, *[True] * 5]]], [[[True] * 7]]])}},
            "the attention mask is a dict, not [rows, columns]",
        ),
        (
            {"attention_mask": torch.tensor([[[[False, False, *[True] * 5]]], [[[True] * 7]]])},
            "the attention mask is a 4-D tensor, not [rows, columns]",
        ),
        ({"inputs_embeds": torch.zeros(2, 1, 8)}, "embeddings were passed instead of token ids"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(2, 1, 8)}, "embeddings were passed instead of token ids"),
    ],
)
def test_anything_unusual_in_a_step_is_seen(changes: dict[str, Any], why: str) -> None:
    assert read(step(**changes), ROWS, in_generate=True).bypass == why


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"input_ids": torch.tensor([[8, 8], [9, 9]])}, r"the attention mask is \(2, 7\); .* it must be \(2, 8\)"),
        ({"input_ids": torch.tensor([[8]])}, "the cache runs 2 rows, got 1"),
        ({"input_ids": torch.tensor([8, 9])}, r"input_ids must be \[rows, tokens\], got \(2,\)"),
        ({"attention_mask": torch.ones(2, 8)}, r"the attention mask is \(2, 8\); .* it must be \(2, 7\)"),
        ({"a": torch.zeros(2, 3, 4)}, "a was passed, and cross attention"),
        ({"position_ids": torch.tensor([[3], [6]])}, "row 0 resumes at position 3, but the cache holds 4 tokens"),
    ],
)
def test_a_step_that_does_not_continue_its_rows_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(CacheArgumentError, match=f"^{why}"):
        read(step(**changes), ROWS, in_generate=True, cross_inputs=("a",))


def test_positions_that_started_elsewhere_go_on_from_there_in_a_step() -> None:
    arguments = step(position_ids=torch.tensor([[16], [16]]), attention_mask=None)
    given = read(arguments, running((0, 6), (0, 6)))
    assert given.bypass == "positions do not continue where the row stopped"
    given = read(arguments, running((0, 6), (0, 6), first_position=10))
    assert (first_positions(given), given.bypass) == ([10, 10], None)


# Back to arguments


def test_ids_and_positions_lose_the_known_columns_and_the_mask_keeps_them() -> None:
    arguments = {
        "input_ids": IDS,
        "position_ids": POSITIONS,
        "attention_mask": MASK,
        "cache_position": torch.arange(4),
        "other": torch.zeros(2, 4),
    }
    changed = for_cut(arguments, Cut(3, (0, 1), None), 0)
    assert changed["input_ids"].tolist() == [[6], [4]]
    assert changed["position_ids"].tolist() == [[1], [3]]
    assert changed["cache_position"].tolist() == [3]
    assert changed["attention_mask"].equal(MASK)
    assert changed["other"].shape == (2, 4)  # never by shape
    assert arguments["input_ids"] is IDS  # the caller's are as they were


def test_columns_before_the_forward_are_not_taken_off_twice() -> None:
    changed = for_cut({"input_ids": IDS, "position_ids": POSITIONS + 6}, Cut(8, (0, 1), None), 6)
    assert changed["input_ids"].tolist() == [[5, 6], [3, 4]]


def test_only_the_rows_that_run_are_passed_on() -> None:
    arguments = {"input_ids": IDS[[0, 0, 1]], "position_ids": POSITIONS[[0, 0, 1]], "attention_mask": MASK[[0, 0, 1]]}
    changed = for_cut(arguments, Cut(0, (0, 2), (0, 0, 1)), 0)
    assert changed["input_ids"].equal(IDS)
    assert changed["position_ids"].equal(POSITIONS)
    assert changed["attention_mask"].equal(MASK)


def test_one_row_of_positions_stands_for_all() -> None:
    changed = for_cut({"input_ids": IDS[[0, 0, 1]], "position_ids": POSITIONS[1:]}, Cut(1, (0, 2), (0, 0, 1)), 0)
    assert changed["position_ids"].tolist() == [[1, 2, 3]]


def test_a_model_with_positions_of_several_dimensions_loses_the_last_ones_columns() -> None:
    positions = torch.arange(24).view(3, 2, 4)
    changed = for_cut({"input_ids": IDS, "position_ids": positions}, Cut(3, (0, 1), None), 0)
    assert changed["position_ids"].equal(positions[..., 3:])


@pytest.mark.parametrize("takes_positions", [True, False])
@pytest.mark.parametrize(
    ("before", "pads", "first_position"),
    [(0, (0, 0), 0), (0, (0, 0), 3), (5, (0, 0), 3), (0, (2, 2), 0), (5, (2, 2), 0), (0, (0, 2), 3), (5, (1, 6), 3)],
)
def test_forwards_that_we_run_ourselves_are_read_as_the_rows_that_they_are_of(
    before: int, pads: tuple[int, int], first_position: int, takes_positions: bool, tiny_llama: Any
) -> None:
    model_reader = PrefixStore(tiny_llama, num_blocks=4).argument_reader
    side = SideForwards(tiny_llama, model_reader)
    side.takes_positions = takes_positions
    stop = before + 3
    rows = [RowInput(array("q", [7, 8, 9])[: stop - max(before, pad)], pad, first_position) for pad in pads]
    arguments = side.arguments_of(rows, before, stop, num_held=before)
    assert ("position_ids" in arguments) == takes_positions
    held = [RunningRow(min(pad, before), first_position, max(0, before - pad), 0) for pad in pads] if before else []
    how: dict[str, Any] = {"in_generate": False, "records_drafts": False}
    given = replace(model_reader, takes_positions=takes_positions).read(arguments, RunningRows(before, held), **how)
    wanted = rows if takes_positions or before else [row._replace(first_position=0) for row in rows]
    assert (list(given.rows), given.num_new_columns, given.bypass) == (wanted, 3, None)


def test_whether_booleans_hide_is_asked_of_the_attention_of_the_text_model() -> None:
    model = image_zoo.build("llava")
    reader, before = PrefixStore(model).argument_reader, model.config._attn_implementation
    assert reader.attention() == before == "sdpa"
    model.set_attn_implementation({"text_config": "eager"})
    assert (reader.attention(), model.config._attn_implementation) == ("eager", "sdpa")
