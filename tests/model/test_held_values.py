"""What hooks and layers of others hold: what is found, what is left out, and what counts as their own work."""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import proxy

import numpy as np
import pytest
import torch
from torch import nn

from hf_paged_cache import NotPortableError
from hf_paged_cache.model.conditioning import Conditioning
from hf_paged_cache.model.held_values import HeldTensor, HeldValues

from ..tiny_models import build


class Held:
    """An object of this package."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Slot:
    """Its attribute has another name than it is written by."""

    __slots__ = "__value"

    def __init__(self, value: Any) -> None:
        self.__value = value


class Raises:
    """Nothing of it can be looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class Layer(nn.Module):
    """One without a weight."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states * self.value


def held_by(value: Any, *watched: nn.Module) -> list[object]:
    """What a function holds that closes over a value, besides code and the names of classes."""
    held = HeldValues(number_of=id).read({"hook": lambda: value}, watched)
    return [found for place, found in held if not place.endswith((".code", ".class"))]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (2, [2]),
        (True, [True]),
        (None, [None]),
        ("layers.3", ["layers.3"]),
        (torch.bfloat16, ["torch.bfloat16"]),
        (np.float32(0.5), [repr(np.float32(0.5))]),
        ((1, [5, {"a": 3}]), [1, 5, 3, 2]),  # the list with its length
        (Held({1: Held(4)}), [4]),
        (argparse.Namespace(by=6), [6]),
        (partial(Held(2).__init__, value=3), [2, 3]),  # type: ignore[misc]
        (Layer(7), [True, 7]),  # it trains
        (json.JSONDecoder(), []),  # an object of another package
        (json, []),
        (Held, [f"{__name__}.Held"]),
        (json.JSONDecoder, ["json.decoder.JSONDecoder"]),
        ({object(): 1, (2, 3): 4}, [1, 4]),
        ({3, 5}, [3, 5]),
        (range(3), ["range(0, 3)"]),
        (deque([5]), [5, 1]),
        (Slot(4), [4]),
        (2**70, [hex(2**70)]),
        (Namespace(by=2), [2]),
        (len, ["builtins.len"]),
        (Held(Held(Held(1))), [1]),
        (Held(Held(Held(Held(1)))), []),  # deeper than is looked
    ],
)
def test_what_is_found(value: Any, found: list[object]) -> None:
    assert held_by(value) == found


def test_a_thing_that_holds_itself_is_read_once() -> None:
    loop = Held(1)
    loop.itself = loop  # type: ignore[attr-defined]
    assert held_by(loop) == [1]


def test_a_tensor_is_told_by_its_writes_and_an_array_by_its_values() -> None:
    tensor, array = torch.zeros(2), np.zeros(2)
    (before,) = held_by(tensor)
    assert isinstance(before, HeldTensor)
    tensor.add_(1)
    assert held_by(tensor) == [HeldTensor(before.number, before.version + 1)]
    with torch.inference_mode():
        assert held_by(torch.zeros(2))  # it has no version
    (before,) = held_by(array)
    array[0] = 1
    assert held_by(array) != [before]
    array[0] = 0
    assert held_by(array) == [before]


def test_a_model_that_a_hook_holds_is_not_entered() -> None:
    model = build("llama")
    assert held_by(model, *model.modules()) == []
    assert len(held_by(model.lm_head)) > 1  # somebody else's


@pytest.mark.parametrize("num_before", [0, 3])
def test_what_changes_in_a_forward_counts_as_it_was(num_before: int) -> None:
    seen, state = [1.0] * num_before, {"by": 2.0, "calls": 0}

    def hook() -> None:
        seen.append(2.0)
        state["calls"] += 1
        state[f"output {state['calls']}"] = 1.0

    held = HeldValues(number_of=id)
    look: Callable[..., Any] = partial(held.read, {"hook": hook})
    before = look()
    hook()
    assert look(after_forward=True) == before
    hook()
    del seen[1:]
    assert look() != before  # an output more, between two looks of which the second follows no forward
    assert look(after_forward=True) != before
    state["by"] = 3.0
    assert look() != before


def test_what_does_not_let_itself_be_looked_at_holds_nothing() -> None:
    assert held_by(Raises()) == []
    assert held_by(proxy(Held(1))) == []  # its object is gone


def test_a_tensor_of_a_class_that_computes_nothing_is_told_by_its_writes() -> None:
    class Refuses(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, *_: Any) -> Any:
            raise NotImplementedError(function)

    (found,) = held_by(torch.zeros(1).as_subclass(Refuses))
    assert isinstance(found, HeldTensor)


def test_what_a_gone_holder_did_is_said_of_no_other() -> None:
    """Of a layer at the same place, and of a hook that came in a forward."""
    held = HeldValues(number_of=id)
    one, other = Layer(1.0), Layer(2.0)
    held.read({"layer 3": one})
    one.value = 1.5
    held.read({"layer 3": one}, after_forward=True)
    before = held.read({"layer 3": other}, after_forward=True)
    other.value = 3.0
    assert held.read({"layer 3": other}) != before


def test_a_length_that_is_an_attribute_is_no_list_s() -> None:
    thing = Held(1.0)
    thing.length = 0  # type: ignore[attr-defined]
    look: Callable[..., Any] = partial(HeldValues(number_of=id).read, {"hook": lambda: thing})
    before = look()
    thing.length = 1  # type: ignore[attr-defined]
    assert look(after_forward=True) == before
    thing.value = 2.0
    assert look() != before


def test_no_number_that_became_one_in_a_forward_stays_what_it_was() -> None:
    state = {"by": float("nan")}
    look: Callable[..., Any] = partial(HeldValues(number_of=id).read, {"hook": lambda: state})
    look()
    before = look(after_forward=True)
    state["by"] = 1.0
    assert look() != before


def test_attributes_of_classes_count_also_of_a_base_and_of_two_with_one_name() -> None:
    def new_kind() -> Any:
        class Base:
            by = 1.0

        class Kind(Base):
            pass

        return Kind

    one, other = new_kind(), new_kind()
    look: Callable[..., Any] = partial(HeldValues(number_of=id).read, {"hook": lambda: (one, other)})
    told = [look()]
    for kind in (one, other):
        kind.__base__.by = 2.0
        told.append(look())
    assert told[0] != told[1] != told[2]


def test_hooks_that_are_gone_make_no_look_longer() -> None:
    held = HeldValues(number_of=id)
    hooks = [Held([]) for _ in range(1100)]
    for number, hook in enumerate(hooks):
        held.read({f"hook {number}": hook})
        hook.value.append(1)
        held.read({f"hook {number}": hook}, after_forward=True)
    assert len(held._own) <= 1024


def test_a_layer_of_somebody_s_own_is_told_to_other_processes_by_its_numbers_unless_it_holds_a_tensor() -> None:
    model = build("llama")
    model.model.layers[0].mlp = nn.Sequential(model.model.layers[0].mlp, Layer(1.0))
    conditioning = Conditioning(model)
    steering = model.model.layers[0].mlp[1]
    one = conditioning.identity()
    steering.value = 2.0
    other = conditioning.identity()
    assert one.digest != other.digest
    steering.value = torch.zeros(1)
    with pytest.raises(NotPortableError, match="is a tensor that is not a weight"):
        conditioning.identity()
