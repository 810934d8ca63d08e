"""Steering by hooks, replaced forwards and layers of the user's own: what they hold may change between calls, as may what they record.

After each change tokens and logits are those of `DynamicCache` on the model as it is now, and what was cached under a value is found
again under that value.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from hf_paged_cache import PagedPrefixCache

from ..reference import IDS, assert_same, is_same, run

pytestmark = pytest.mark.usefixtures("one_thread")

Setter = Callable[[float], None]
strength = 0.0
settings: dict[str, Any] = {}
configuration: Any = ModuleType("configuration")


@dataclass
class Vector:
    """A steering vector as libraries have it."""

    by: float = 0.0
    apply: Callable[[Any, Any], Any] = operator.add


class Steering:
    """Hooks that are methods."""

    def __init__(self) -> None:
        self.vectors = {0: Vector(), 1: Vector()}
        self.seen: list[torch.Tensor] = []

    def __call__(self, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + self.vectors[0].by

    def hook(self, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        self.seen.append(output)
        return output + self.vectors[0].by


class Slots:
    __slots__ = ("by",)


class Steered(nn.Module):
    """A layer round a layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.vector = Vector()

    def forward(self, *args: Any) -> torch.Tensor:
        output: torch.Tensor = self.inner(*args) + self.vector.by
        return output


def by_closure(mlp: nn.Module) -> Setter:
    by = 0.0

    def change(to: float) -> None:
        nonlocal by
        by = to

    mlp.register_forward_hook(lambda module, args, output: output + by)
    return change


def by_global(mlp: nn.Module) -> Setter:
    def change(to: float) -> None:
        global strength
        strength = to

    change(0.0)
    mlp.register_forward_hook(lambda module, args, output: output + strength)
    return change


def by_dict_of_a_function_that_is_called(mlp: nn.Module) -> Setter:
    def steered(output: torch.Tensor) -> torch.Tensor:
        return output + settings.get("by", 0.0)

    mlp.register_forward_hook(lambda module, args, output: steered(output))
    return partial(settings.__setitem__, "by")


def by_object(mlp: nn.Module) -> Setter:
    steering = Steering()
    mlp.register_forward_hook(steering)
    return partial(setattr, steering.vectors[0], "by")


def by_method_that_records(mlp: nn.Module) -> Setter:
    steering = Steering()
    mlp.register_forward_hook(steering.hook)
    return partial(setattr, steering.vectors[0], "by")


def by_slots(mlp: nn.Module) -> Setter:
    slots = Slots()
    slots.by = 0.0  # type: ignore[attr-defined]
    mlp.register_forward_hook(lambda module, args, output: output + slots.by)  # type: ignore[attr-defined]
    return partial(setattr, slots, "by")


def by_tensor(mlp: nn.Module) -> Setter:
    vector = torch.zeros(1)
    mlp.register_forward_hook(lambda module, args, output, vector=vector: output + vector)
    return lambda to: vector.fill_(to) and None


def by_array(mlp: nn.Module) -> Setter:
    vector = np.zeros(1, np.float32)
    mlp.register_forward_hook(partial(lambda vector, module, args, output: output + torch.from_numpy(vector), vector))
    return partial(vector.fill)


def by_module_that_the_hook_holds(mlp: nn.Module) -> Setter:
    bias = nn.Linear(1, 1)
    by_tensor_ = bias.bias

    def change(to: float) -> None:
        with torch.no_grad():
            by_tensor_.fill_(to)

    change(0.0)
    mlp.register_forward_hook(lambda module, args, output: output + bias.bias)
    return change


def by_replaced_forward(mlp: nn.Module) -> Setter:
    theirs, by = mlp.forward, [0.0]
    mlp.forward = lambda *args: theirs(*args) + by[0]  # type: ignore[method-assign]
    return partial(by.__setitem__, 0)


def by_pre_hook(mlp: nn.Module) -> Setter:
    by = {"scale": np.float32(1)}
    mlp.register_forward_pre_hook(lambda module, args: (args[0] * float(by["scale"]), *args[1:]))
    return lambda to: by.update(scale=np.float32(1 + to))


def by_decorated(mlp: nn.Module) -> Setter:
    by = [0.0]

    @torch.no_grad()
    def steer(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + by[0]

    mlp.register_forward_hook(steer)
    return partial(by.__setitem__, 0)


def by_another_function(mlp: nn.Module) -> Setter:
    edits: dict[tuple[str, int], Callable[[Any], Any]] = {}
    by_value = {
        0.0: lambda output: output,
        0.5: lambda output: output + 0.5,
        0.7: lambda output: output * 0.7,
    }
    mlp.register_forward_hook(lambda module, args, output: edits["mlp", 0](output))
    return lambda to: edits.update({("mlp", 0): by_value[to]})


def by_operator(mlp: nn.Module) -> Setter:
    vector = Vector()
    by_value = {0.0: operator.add, 0.5: operator.mul, 0.7: operator.sub}
    mlp.register_forward_hook(lambda module, args, output: vector.apply(output, 0.5))
    return lambda to: setattr(vector, "apply", by_value[to])


def by_set(mlp: nn.Module) -> Setter:
    strengths: set[float] = set()
    mlp.register_forward_hook(lambda module, args, output: output + sum(strengths))

    def change(to: float) -> None:
        strengths.clear()
        strengths.add(to)

    return change


def by_class(mlp: nn.Module) -> Setter:
    class Settings:
        by = 0.0

    mlp.register_forward_hook(lambda module, args, output: output + Settings.by)
    return partial(setattr, Settings, "by")


class CalledWithAGlobal:
    """Holds nothing itself."""

    def __call__(self, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + strength


def by_global_of_an_object_that_is_called(mlp: nn.Module) -> Setter:
    mlp.register_forward_hook(CalledWithAGlobal())
    return partial(globals().__setitem__, "strength")


def by_attribute_of_a_module(mlp: nn.Module) -> Setter:
    mlp.register_forward_hook(lambda module, args, output: output + configuration.strength)
    return partial(setattr, configuration, "strength")


HOLDERS: list[Callable[[nn.Module], Setter]] = [
    by_closure,
    by_global,
    by_dict_of_a_function_that_is_called,
    by_object,
    by_method_that_records,
    by_slots,
    by_tensor,
    by_array,
    by_module_that_the_hook_holds,
    by_replaced_forward,
    by_pre_hook,
    by_decorated,
    by_another_function,
    by_operator,
    by_set,
    by_class,
    by_global_of_an_object_that_is_called,
    by_attribute_of_a_module,
]


def check_each_value(model: PreTrainedModel, change: Setter, *, comes_back: bool = True) -> None:
    """With one cache: each value gives its own keys and values, and finds them again, but for what a tensor's writes hide."""
    cache = PagedPrefixCache(model)
    known: set[float] = set()
    for value in (0.0, 0.5, 0.0, 0.7):
        change(value)
        wanted = run(model, input_ids=IDS)
        assert_same(wanted, run(model, cache, input_ids=IDS))
        assert bool(cache.last_call.reused_tokens) == (comes_back and value in known)
        assert_same(wanted, run(model, cache, input_ids=IDS))
        assert cache.last_call.reused_tokens
        known.add(value)
    change(0.0)
    assert not is_same(wanted, run(model, input_ids=IDS))  # the last value was heeded


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_changed_coefficient_finds_nothing_of_before(model: PreTrainedModel, holder: Any) -> None:
    is_counted = holder in (by_tensor, by_module_that_the_hook_holds)  # a write is a change
    check_each_value(model, holder(model.model.layers[0].mlp), comes_back=not is_counted)


def test_a_layer_round_a_layer_is_looked_at(model: PreTrainedModel) -> None:
    steered = Steered(model.model.layers[0].mlp)
    model.model.layers[0].mlp = steered
    check_each_value(model, partial(setattr, steered.vector, "by"))


def test_what_hooks_count_and_record_costs_no_reuse(model: PreTrainedModel) -> None:
    """Also with a coefficient beside it, which may change, and where each call has a list of its own."""

    @dataclass
    class Recorder:
        by: float = 0.0
        num_calls: int = 0
        outputs: list[torch.Tensor] = field(default_factory=list)
        last: dict[str, torch.Tensor] = field(default_factory=dict)

    recorder = Recorder()

    def record(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        recorder.num_calls += 1
        recorder.outputs.append(output)
        recorder.last[type(module).__name__] = output
        return output + recorder.by

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(record)
    check_each_value(model, partial(setattr, recorder, "by"))
    cache = PagedPrefixCache(model)
    for number in range(3):
        run(model, cache, input_ids=IDS)
        assert bool(cache.last_call.reused_tokens) == bool(number)
    assert recorder.num_calls > 20
    assert len(recorder.last) == 1


def test_what_hooks_record_of_generated_tokens_alone_costs_no_reuse(model: PreTrainedModel) -> None:
    """The forward of the prompt changes nothing."""
    outputs: list[torch.Tensor] = []
    by_step: dict[str, torch.Tensor] = {}

    def record(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.shape[1] == 1:
            outputs.append(output)
            by_step[f"step {len(outputs)}"] = output

    model.model.layers[0].mlp.register_forward_hook(record)
    wanted, cache = run(model, input_ids=IDS, max_new_tokens=20), PagedPrefixCache(model)
    for number in range(4):
        assert_same(wanted, run(model, cache, input_ids=IDS, max_new_tokens=20))
        assert bool(cache.last_call.reused_tokens) == bool(number)


def test_a_coefficient_that_a_callback_changes_between_steps_is_kept_for_nobody(model: PreTrainedModel) -> None:
    by = [0.0]
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output + by[0])

    class Rises(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            by[0] += 0.25
            return scores

    cache = PagedPrefixCache(model)
    how: dict[str, Any] = {"input_ids": IDS, "max_new_tokens": 24}
    for _ in range(2):
        by[0] = 0.0
        wanted = run(model, logits_processor=LogitsProcessorList([Rises()]), **how)
        by[0] = 0.0
        got = run(model, cache, logits_processor=LogitsProcessorList([Rises()]), **how)
        assert_same(wanted, got)
        by[0] = 0.0
        follow_up = {"input_ids": wanted.sequences, "max_new_tokens": 4}
        assert_same(run(model, **follow_up), run(model, cache, **follow_up))
