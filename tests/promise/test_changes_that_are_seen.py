"""Whatever changes keys and values of a model that has a cache is seen, and nothing of before is found; nothing else is
a change.

Each is asked of `cache.lookup`, which says what a call would find. `test_conditions_of_reuse.py` makes the calls.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as everywhere
from transformers import GenerationConfig, PreTrainedConfig
from transformers.integrations.neftune import activate_neftune, deactivate_neftune

from hf_paged_cache import PagedPrefixCache

from ..reference import row
from ..tiny_models import build

Model = Any
PROMPT = row((1, 32))
ROW = 5  # of the embedding; none of its values is among the eight that are read of each weight


class Known:
    """A model, and a cache that knows the prompt."""

    def __init__(self, model: Model, **options: Any) -> None:
        self.model, self.cache = model, PagedPrefixCache(model, **options)
        self.renew()

    def renew(self) -> None:
        self.cache.prefill(PROMPT)
        assert self.finds_all()

    @property
    def stopped(self) -> str:
        return self.cache.lookup(PROMPT).stopped

    def finds_all(self) -> bool:
        return self.cache.lookup(PROMPT).num_tokens == 32

    def finds_nothing(self) -> bool:
        return self.cache.lookup(PROMPT).num_tokens == 0


@pytest.fixture
def known(tiny_llama: Model) -> Known:
    return Known(tiny_llama)


def first_weight(model: Model) -> nn.Parameter:
    return model.model.layers[0].self_attn.k_proj.weight


def edit_row(model: Model) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight[ROW] *= 2


def with_other_row(model: Model) -> torch.Tensor:
    """A new tensor, whose version is 0, with another row."""
    weight = model.model.embed_tokens.weight.detach()
    return torch.cat((weight[:ROW], weight[ROW : ROW + 1] * 2, weight[ROW + 1 :]))


def replace_embedding(model: Model) -> None:
    model.model.embed_tokens.weight = nn.Parameter(with_other_row(model))


def step_of_embedding(model: Model, make: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
    """A step that changes the rows of one batch, as training of nothing but the embedding does."""
    model.requires_grad_(False)
    embedding = model.model.embed_tokens.requires_grad_(True)
    optimizer = make(embedding.parameters(), lr=0.1, **options)
    model(torch.tensor([[ROW, ROW + 2]]), labels=torch.tensor([[ROW, ROW + 2]])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def beside_a_head(own: Any, **options: Any) -> torch.optim.Optimizer:
    """An optimizer that has weights of others, too, as where a value head is trained beside the model."""
    return torch.optim.SGD([*own, nn.Parameter(torch.ones(1))], **options)


def transpose(model: Model) -> None:
    """The same memory, size and version."""
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t()


def swap_layers(model: Model) -> None:
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]


def wrap_forward(model: Model) -> None:
    """As decorators do: the new function says that it is from where the old one is."""
    forward = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = functools.wraps(forward)(lambda states: forward(states) * 2)


def change_class(model: Model) -> None:
    class Louder(type(model.model.layers[0].mlp)):  # type: ignore[misc]
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return super().forward(states) * 2

    model.model.layers[1].mlp.__class__ = Louder


CHANGES: dict[str, Callable[[Model], Any]] = {
    "p.data = ...": lambda model: setattr(first_weight(model), "data", first_weight(model).data + 1e-3),
    "p.data.copy_": lambda model: first_weight(model).data.copy_(first_weight(model).data * 2),
    "load_state_dict": lambda model: model.load_state_dict(build("llama", 7).state_dict()),
    "a norm": lambda model: model.model.layers[0].input_layernorm.weight.data.mul_(1.3),
    "a module swapped": lambda model: setattr(model.model.layers[0], "mlp", build("llama", 7).model.layers[0].mlp),
    "another attention implementation": lambda model: model.set_attn_implementation("eager"),
    "a row in place": edit_row,
    "a row in inference mode": torch.inference_mode()(edit_row),
    "a row in a new parameter": replace_embedding,
    "a row in new data": lambda model: setattr(model.model.embed_tokens.weight, "data", with_other_row(model)),
    "a row assigned by load_state_dict": lambda model: model.load_state_dict(
        {"model.embed_tokens.weight": with_other_row(model)}, strict=False, assign=True
    ),
    "SGD on the embedding": lambda model: step_of_embedding(model, torch.optim.SGD),
    "SGD on the embedding, fused": lambda model: step_of_embedding(model, torch.optim.SGD, fused=True),
    "SGD on the embedding beside a head, fused": lambda model: step_of_embedding(model, beside_a_head, fused=True),
    "Adam on the embedding, foreach": lambda model: step_of_embedding(model, torch.optim.Adam, foreach=True),
    "Adam on the embedding, fused": lambda model: step_of_embedding(model, torch.optim.Adam, fused=True),
    "a weight sliced": lambda model: setattr(first_weight(model), "data", first_weight(model).data[:-1]),
    "a weight transposed": transpose,
    "layers in another order": swap_layers,
    "a layer dropped": lambda model: setattr(model.model, "layers", model.model.layers[:1]),
    "a module in another one": lambda model: setattr(
        model.model.layers[0].self_attn, "k_proj", nn.Sequential(model.model.layers[0].self_attn.k_proj, nn.Identity())
    ),
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "a forward wrapped": wrap_forward,
    "autocast round the forward": lambda model: setattr(
        model, "forward", torch.autocast("cpu", torch.bfloat16)(model.forward)
    ),
    "another class of a module": change_class,
    "a window in the config": lambda model: setattr(model.config, "sliding_window", 8),
    "fewer layers in the config": lambda model: setattr(model.config, "num_hidden_layers", 1),
    "a mapping in the config": lambda model: model.config.rope_parameters.update(llama_4_scaling_beta=0.5),
}


def test_a_config_within_the_config_is_part_of_it(tiny_llama: Model) -> None:
    new_config: Any = PreTrainedConfig
    tiny_llama.config.attn_config = new_config(clip_qkv=8.0)
    known = Known(tiny_llama)
    tiny_llama.config.attn_config.clip_qkv = 0.5
    assert known.finds_nothing()
    tiny_llama.config.attn_config.clip_qkv = 8.0
    assert known.finds_all()


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_of_before_is_found_after(change: str, known: Known) -> None:
    CHANGES[change](known.model)
    assert known.finds_nothing()


def test_every_value_that_changes_in_place_is_seen(known: Known) -> None:
    """Also one that is not among the eight of its tensor."""
    for parameter in known.model.parameters():
        with torch.no_grad():
            parameter.view(-1)[parameter.numel() // 2 + 1] += 1
        assert known.finds_nothing()
        known.renew()


def test_a_row_that_goes_there_and_back_in_new_parameters_is_a_change_each_time(known: Known) -> None:
    """Each parameter is new, so of version 0, may lie where an earlier one lay, and has the same eight values."""
    for _ in range(4):
        replace_embedding(known.model)
        assert known.finds_nothing()
        known.renew()
        edit_row(known.model)
        known.model.model.embed_tokens.weight = nn.Parameter(known.model.model.embed_tokens.weight.detach().clone())
        assert known.finds_nothing()
        known.renew()


def test_blocks_of_other_weights_take_no_room(known: Known) -> None:
    cached = known.cache.stats().num_cached_blocks
    for _ in range(3):
        edit_row(known.model)
        known.renew()
        assert known.cache.stats().num_cached_blocks == cached > 0


def test_what_torch_does_not_count_is_seen_in_eight_values_alone(known: Known) -> None:
    """docs/what_is_reused.md names these writes."""
    weight = known.model.model.embed_tokens.weight
    weight.data[ROW] *= 2
    weight.detach().numpy()[ROW] *= 2
    assert known.finds_all()
    weight.data *= 2
    assert known.finds_nothing()
    known.renew()
    weight.detach().numpy()[:] *= 2
    assert known.finds_nothing()


def test_autocast_and_its_type_count_as_long_as_they_are_on(known: Known) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            assert known.finds_nothing()
        assert known.finds_all()
    with torch.autocast("cpu", torch.bfloat16):
        known.renew()
        with torch.autocast("cpu", torch.float16):
            assert known.finds_nothing()


class Scaled(nn.Linear):
    """A projection scaled by a buffer that is saved with the model."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__(of.in_features, of.out_features, bias=False)
        self.weight = of.weight
        self.register_buffer("scale", torch.ones(8))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states) * self.scale[5]


def test_a_buffer_that_is_saved_with_the_model_is_a_weight(tiny_llama: Model) -> None:
    attention = tiny_llama.model.layers[0].self_attn
    attention.k_proj = Scaled(attention.k_proj)
    known = Known(tiny_llama, trust_hooks=True)
    attention.k_proj.scale.data[5] = 2
    assert known.finds_nothing()
    known.renew()
    attention.k_proj.scale = torch.full((8,), 3.0)
    assert known.finds_nothing()


@pytest.mark.parametrize("change", ["a row", "a row of its base", "all values through .data"])
def test_a_weight_that_is_a_view_with_gaps_is_seen_changing(tiny_llama: Model, change: str) -> None:
    projection = tiny_llama.model.layers[0].self_attn.k_proj
    whole = torch.cat((projection.weight.detach(), torch.zeros(projection.out_features, 3)), dim=1)
    projection.weight = nn.Parameter(whole[:, :-3])
    assert not projection.weight.is_contiguous()
    known = Known(tiny_llama)
    if change == "a row":
        with torch.no_grad():
            projection.weight[1, :5] += 1
    elif change == "a row of its base":
        whole[1, :5] += 1
    else:
        projection.weight.data.mul_(2)
    assert known.finds_nothing()


def test_a_class_whose_forward_is_another_for_a_while_is_another_model_meanwhile(
    known: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(known.model.model.layers[0].mlp)
    forward = kind.forward
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", lambda self, states: forward(self, states) * 2)
        assert known.finds_nothing()
        known.renew()
    assert known.finds_nothing()


def test_a_hook_of_all_modules_counts_as_long_as_it_is_there(known: Known) -> None:
    for register in (everywhere.register_module_forward_hook, everywhere.register_module_forward_pre_hook):
        handle = register(lambda *_: None)
        try:
            assert known.finds_nothing()
        finally:
            handle.remove()
        assert known.finds_all()


def test_a_trusted_hook_that_is_moved_to_another_owner_is_another_one(tiny_llama: Model) -> None:
    class Steering:
        def __init__(self, strength: float) -> None:
            self.strength = strength

        def hook(self, module: nn.Module, args: Any, output: Any) -> Any:
            return output + self.strength

    known, weak, strong = Known(tiny_llama, trust_hooks=True), Steering(0.1), Steering(9.0)
    handle = tiny_llama.model.layers[0].mlp.register_forward_hook(weak.hook)
    assert known.finds_nothing()
    known.renew()
    handle.remove()
    assert known.finds_all()
    handle = tiny_llama.model.layers[0].mlp.register_forward_hook(strong.hook)
    assert known.finds_nothing()
    handle.remove()
    assert known.finds_all()


def forward(model: Model, **options: Any) -> None:
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), **options)


def step_on_a_copy(model: Model) -> None:
    step_of_embedding(copy.deepcopy(model), torch.optim.Adam, fused=True)


HARMLESS: dict[str, Callable[[Model], Any]] = {
    "a forward with gradients": lambda model: model(torch.tensor([[1, 2]])).logits.sum().backward(),
    "output_hidden_states for the first time": lambda model: forward(model, output_hidden_states=True),
    "output_hidden_states in the config": lambda model: setattr(model.config, "output_hidden_states", True),
    "use_cache in the config": lambda model: setattr(model.config, "use_cache", False),
    "state_dict": lambda model: model.state_dict(),
    "a new generation config": lambda model: setattr(model, "generation_config", GenerationConfig(pad_token_id=0)),
    "requires_grad_(False)": lambda model: model.requires_grad_(False).zero_grad(),
    "a cache of another store": lambda model: PagedPrefixCache(model).prefill(PROMPT),
    "train mode without dropout": lambda model: model.train(),
    "a forward in inference mode": torch.inference_mode()(lambda model: model(torch.tensor([PROMPT]))),
    "torch.compile of the forward": lambda model: setattr(
        model, "forward", torch.compile(model.forward, backend="eager")
    ),
    "gradients set": lambda model: setattr(first_weight(model), "grad", torch.ones_like(first_weight(model))),
    "gradients clipped": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "ties tied again": lambda model: model.tie_weights(),
    "a step on a copy of the model": step_on_a_copy,
}


@pytest.mark.parametrize("harmless", HARMLESS)
def test_all_is_found_after(harmless: str, known: Known) -> None:
    HARMLESS[harmless](known.model)
    assert known.finds_all() or "output_hidden_states" in known.stopped  # which a call is told while the config asks


@pytest.mark.parametrize("name", ["attention_dropout", "router_jitter_noise", "moe_jitter_eps", "resid_pdrop"])
def test_while_anything_random_is_on_nothing_is_reused_and_it_is_said_why(name: str, tiny_llama: Model) -> None:
    setattr(tiny_llama.model.layers[1].self_attn, name, 0.1)
    known = Known(tiny_llama.eval())
    tiny_llama.model.layers[1].self_attn.train()  # only the part that drops needs to be training
    assert (known.finds_nothing(), known.stopped) == (True, "a dropout or noise is active; call model.eval()")
    tiny_llama.eval()
    assert known.finds_all()


def test_a_dropout_module_counts_wherever_it_is_put_and_one_of_zero_does_not(tiny_llama: Model) -> None:
    dropout = nn.Dropout(0.0)
    tiny_llama.model.layers[0].mlp.act_fn = nn.Sequential(dropout, nn.SiLU())
    known = Known(tiny_llama.train(), trust_hooks=True)
    dropout.p = 0.1
    assert known.finds_nothing()
    tiny_llama.eval()
    assert known.finds_all()


@pytest.mark.parametrize("alpha", [5, 5.0])
def test_noise_on_embeddings_counts_while_it_is_added(alpha: float, known: Known) -> None:
    known.model.train()
    hook = activate_neftune(known.model, alpha)
    assert (known.finds_nothing(), known.stopped) == (True, "a dropout or noise is active; call model.eval()")
    deactivate_neftune(known.model, hook)
    assert known.finds_all()


def test_attention_in_both_directions_is_said(known: Known) -> None:
    known.model.config.is_causal = False
    assert known.stopped == "keys and values depend on what follows them (config.is_causal is False)"
