"""The digest of a model changes with all that changes keys and values, and with nothing else."""

from __future__ import annotations

import copy
import functools
import gc
import io
import threading
import types
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn.modules import module as everywhere
from tqdm.auto import tqdm
from transformers.integrations.neftune import activate_neftune, deactivate_neftune

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.model import fingerprint
from hf_paged_cache.model.conditioning import Conditioning
from hf_paged_cache.model.state_traits import StateTraits

from ..conformance import zoo
from .test_support import FROM_5_23

Model = Any


def first_weight(model: Model) -> nn.Parameter:
    return model.model.layers[0].self_attn.k_proj.weight


def optimizer_step(model: Model, **options: bool) -> None:
    """One step of AdamW at a small learning rate; the fused one changes no version."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **options)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def in_place(model: Model) -> None:
    with torch.no_grad():
        first_weight(model).add_(1e-3)


def replace_data(model: Model) -> None:
    first_weight(model).data = first_weight(model).data + 1e-3


def change_under_inference_mode(model: Model) -> None:
    with torch.inference_mode():
        first_weight(model).mul_(1.001)


ROW = 5  # of the embedding; none of its values is among the eight


def edit_row(model: Model) -> None:
    with torch.no_grad():
        model.model.embed_tokens.weight[ROW] *= 2


def edit_row_under_inference_mode(model: Model) -> None:
    with torch.inference_mode():
        edit_row(model)


def with_other_row(model: Model) -> torch.Tensor:
    """A new tensor, whose version is 0, with another row."""
    weight = model.model.embed_tokens.weight.detach()
    return torch.cat((weight[:ROW], weight[ROW : ROW + 1] * 2, weight[ROW + 1 :]))


def replace_embedding(model: Model) -> None:
    model.model.embed_tokens.weight = nn.Parameter(with_other_row(model))


def replace_data_of_embedding(model: Model) -> None:
    model.model.embed_tokens.weight.data = with_other_row(model)


def assign_embedding(model: Model) -> None:
    model.load_state_dict({"model.embed_tokens.weight": with_other_row(model)}, strict=False, assign=True)


def step_of_embedding(model: Model, make: Callable[..., torch.optim.Optimizer], **options: Any) -> None:
    """A step that changes the rows of one batch, as training of nothing but the embedding does."""
    model.requires_grad_(False)
    embedding = model.model.embed_tokens.requires_grad_(True)
    optimizer = make(embedding.parameters(), lr=0.1, **options)
    model(torch.tensor([[ROW, ROW + 2]]), labels=torch.tensor([[ROW, ROW + 2]])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def change_shape(model: Model) -> None:
    """The same memory and version, but fewer rows."""
    first_weight(model).data = first_weight(model).data[:-1]


def transpose(model: Model) -> None:
    """The same memory, size and version."""
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t()


def load_other_weights(model: Model) -> None:
    model.load_state_dict({name: tensor + 1e-3 for name, tensor in model.state_dict().items()})


def swap_parameter(model: Model) -> None:
    model.model.layers[0].self_attn.k_proj.weight = nn.Parameter(first_weight(model).detach() * 2)


def swap_module(model: Model) -> None:
    old = model.model.layers[0].self_attn.k_proj
    model.model.layers[0].self_attn.k_proj = nn.Sequential(old, nn.Identity())


def swap_layers(model: Model) -> None:
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]


def drop_layer(model: Model) -> None:
    model.model.layers = model.model.layers[:1]


def users_hook(module: nn.Module, args: Any, output: Any) -> Any:
    return output


def users_pre_hook(module: nn.Module, args: Any) -> Any:
    return None


class Steering:
    """Vectors added to a layer's output, as a user writes them: one function, several owners."""

    def __init__(self, strength: float) -> None:
        self.strength = strength

    def hook(self, module: nn.Module, args: Any, output: Any) -> Any:
        return output + self.strength


def replace_forward(model: Model) -> None:
    layer = model.model.layers[0].mlp
    forward = layer.forward
    layer.forward = lambda states: forward(states) * 2


def wrap_forward(model: Model) -> None:
    """As decorators do: the new function says that it is from where the old one is."""
    layer = model.model.layers[0].mlp
    forward = layer.forward

    @functools.wraps(forward)
    def doubled(states: torch.Tensor) -> torch.Tensor:
        return forward(states) * 2

    layer.forward = doubled


def decorate_with_autocast(model: Model) -> None:
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)


CHANGES: dict[str, Callable[[Model], Any]] = {
    "in place": in_place,
    ".data.copy_": lambda model: first_weight(model).data.copy_(first_weight(model).data * 2),
    "p.data = ...": replace_data,
    "in inference mode": change_under_inference_mode,
    "a row in place": edit_row,
    "a row in inference mode": edit_row_under_inference_mode,
    "a row in a new parameter": replace_embedding,
    "a row in new data": replace_data_of_embedding,
    "a row assigned by load_state_dict": assign_embedding,
    "SGD on the embedding": lambda model: step_of_embedding(model, torch.optim.SGD),
    "SGD on the embedding, fused": lambda model: step_of_embedding(model, torch.optim.SGD, fused=True),
    "Adam on the embedding": lambda model: step_of_embedding(model, torch.optim.Adam, foreach=False),
    "Adam on the embedding, foreach": lambda model: step_of_embedding(model, torch.optim.Adam, foreach=True),
    "Adam on the embedding, fused": lambda model: step_of_embedding(model, torch.optim.Adam, fused=True),
    "a weight sliced": change_shape,
    "a weight transposed": transpose,
    "the same weights loaded": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict())),
    "AdamW fused": lambda model: optimizer_step(model, fused=True),
    "AdamW foreach": lambda model: optimizer_step(model, foreach=True),
    "AdamW for loop": lambda model: optimizer_step(model, foreach=False),
    "load_state_dict": load_other_weights,
    "parameter swapped": swap_parameter,
    "module swapped": swap_module,
    "layers in another order": swap_layers,
    "layer dropped": drop_layer,
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "forward hook": lambda model: model.model.layers[0].register_forward_hook(users_hook),
    "forward pre-hook": lambda model: model.model.layers[1].mlp.register_forward_pre_hook(users_pre_hook),
    "partial as hook": lambda model: model.model.layers[0].register_forward_hook(functools.partial(users_hook)),
    "method as hook": lambda model: model.model.layers[0].mlp.register_forward_hook(Steering(1.0).hook),
    "forward replaced": replace_forward,
    "forward wrapped": wrap_forward,
    "autocast round the forward": decorate_with_autocast,
    "setting of the config": lambda model: setattr(model.config, "sliding_window", 8),
    "fewer layers by the config": lambda model: setattr(model.config, "num_hidden_layers", 1),
    "attention implementation": lambda model: model.set_attn_implementation("eager"),
    "rotary frequencies": lambda model: model.model.rotary_emb.inv_freq.mul_(0.5),
    "scale of rotary embeddings": lambda model: setattr(model.model.rotary_emb, "attention_scaling", 1.5),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_digest_changes_with(change: Callable[[Model], Any], tiny_llama: Model) -> None:
    """And with every weight that is written later: the list of tensors that was made before hides none."""
    conditioning = Conditioning(tiny_llama)
    before = conditioning.digest()
    assert conditioning.digest() == before
    change(tiny_llama)
    after = conditioning.digest()
    assert after != before
    assert conditioning.digest() == after
    for parameter in list(tiny_llama.parameters()):
        with torch.no_grad():
            parameter.mul_(1.01)
        before, after = after, conditioning.digest()
        assert after != before


def test_a_fused_step_of_an_optimizer_that_has_weights_of_others_too_is_seen(tiny_llama: Model) -> None:
    """As where a value head is trained beside the model. The step changes no version, and few rows."""
    conditioning = Conditioning(tiny_llama)
    before = conditioning.digest()
    head = torch.nn.Parameter(torch.ones(1))
    step_of_embedding(tiny_llama, lambda own, **options: torch.optim.SGD([*own, head], **options), fused=True)
    assert conditioning.digest() != before


def test_a_hook_moved_to_another_owner_or_taken_off_is_seen(tiny_llama: Model) -> None:
    conditioning, layer = Conditioning(tiny_llama), tiny_llama.model.layers[0].mlp
    weak, strong = Steering(0.1), Steering(9.0)
    plain = conditioning.digest()
    handle = layer.register_forward_hook(weak.hook)
    with_weak = conditioning.digest()
    handle.remove()
    assert conditioning.digest() == plain
    handle = layer.register_forward_hook(strong.hook)
    assert len({plain, with_weak, conditioning.digest()}) == 3
    handle.remove()
    layer.register_forward_hook(weak.hook)
    assert conditioning.digest() == with_weak


def test_every_value_that_changes_in_place_is_seen(tiny_llama: Model) -> None:
    """Also one that is not among the eight of its tensor."""
    conditioning = Conditioning(tiny_llama)
    seen = {conditioning.digest()}
    for parameter in tiny_llama.parameters():
        for index in (1, parameter.numel() // 2 + 1, parameter.numel() - 1):
            with torch.no_grad():
                parameter.view(-1)[index] += 1
            seen.add(conditioning.digest())
    assert len(seen) == 1 + 3 * len(list(tiny_llama.parameters()))


def test_a_row_that_goes_there_and_back_in_new_parameters_has_a_digest_of_its_own_each_time(tiny_llama: Model) -> None:
    """Each parameter is new, so of version 0, may lie where an earlier one lay, and has the same eight values."""
    conditioning = Conditioning(tiny_llama)
    seen = {conditioning.digest()}
    for number in range(1, 6):
        replace_embedding(tiny_llama)
        seen.add(conditioning.digest())
        edit_row(tiny_llama)
        tiny_llama.model.embed_tokens.weight = nn.Parameter(tiny_llama.model.embed_tokens.weight.detach().clone())
        seen.add(conditioning.digest())
        assert len(seen) == 1 + 2 * number


def test_what_torch_does_not_count_is_seen_in_eight_values_alone(tiny_llama: Model) -> None:
    """docs/what_is_reused.md names these writes."""
    conditioning, weight = Conditioning(tiny_llama), tiny_llama.model.embed_tokens.weight
    before = conditioning.digest()
    weight.data[ROW] *= 2
    weight.detach().numpy()[ROW] *= 2
    assert conditioning.digest() == before
    weight.data *= 2
    changed = conditioning.digest()
    assert changed != before
    weight.detach().numpy()[:] *= 2
    assert conditioning.digest() not in (before, changed)


def test_weights_of_a_dtype_that_cannot_be_compared_count_as_changed_when_they_move(tiny_llama: Model) -> None:
    packed = torch.zeros((8, 8), dtype=torch.uint8)
    tiny_llama.packed = nn.Parameter(packed.view(torch.float4_e2m1fn_x2), requires_grad=False)
    conditioning = Conditioning(tiny_llama)
    before = conditioning.digest()
    tiny_llama.packed.data = packed.clone().view(torch.float4_e2m1fn_x2)
    assert conditioning.digest() != before


def test_a_step_on_other_weights_changes_no_digest_and_one_on_these_does(tiny_llama: Model) -> None:
    conditioning, other = Conditioning(tiny_llama), copy.deepcopy(tiny_llama)
    before = conditioning.digest()
    step_of_embedding(other, torch.optim.Adam, fused=True)
    assert conditioning.digest() == before
    step_of_embedding(tiny_llama, torch.optim.Adam, fused=True)
    assert conditioning.digest() != before


def test_the_hook_after_optimizer_steps_keeps_no_model(tiny_llama: Model) -> None:
    conditioning = Conditioning(tiny_llama)
    known = ref(conditioning._weights)
    assert known in fingerprint._watching
    del conditioning
    gc.collect()
    assert known() is None
    assert known not in fingerprint._watching
    optimizer_step(tiny_llama)


class Scaled(nn.Linear):
    """A projection scaled by a buffer that is saved with the model."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__(of.in_features, of.out_features, bias=False)
        self.weight = of.weight
        self.register_buffer("scale", torch.ones(8))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return super().forward(states) * self.scale[5]


@pytest.mark.parametrize("through_data", [True, False])
def test_a_buffer_that_is_saved_with_the_model_is_a_weight(tiny_llama: Model, through_data: bool) -> None:
    attention = tiny_llama.model.layers[0].self_attn
    attention.k_proj = Scaled(attention.k_proj)
    conditioning = Conditioning(tiny_llama)
    before = conditioning.digest()
    scale = attention.k_proj.scale
    (scale.data if through_data else scale)[5] = 2
    changed = conditioning.digest()
    assert changed != before
    attention.k_proj.scale = torch.full((8,), 3.0)
    assert conditioning.digest() not in (before, changed)


@pytest.mark.parametrize("change", ["a row", "a row of its base", "all values through .data"])
def test_a_weight_that_is_a_view_with_gaps_is_seen_changing(tiny_llama: Model, change: str) -> None:
    attention = tiny_llama.model.layers[0].self_attn
    projection = attention.k_proj
    whole = torch.cat((projection.weight.detach(), torch.zeros(projection.out_features, 3)), dim=1)
    projection.weight = nn.Parameter(whole[:, :-3])
    assert not projection.weight.is_contiguous()
    conditioning = Conditioning(tiny_llama)
    before = conditioning.digest()
    if change == "a row":
        with torch.no_grad():
            projection.weight[1, :5] += 1
    elif change == "a row of its base":
        whole[1, :5] += 1
    else:
        projection.weight.data.mul_(2)
    assert conditioning.digest() != before


def test_autocast_and_its_type_are_seen(tiny_llama: Model) -> None:
    conditioning = Conditioning(tiny_llama)
    plain = conditioning.digest()
    with torch.autocast("cpu", torch.bfloat16):
        bfloat = conditioning.digest()
    with torch.autocast("cpu", torch.float16):
        half = conditioning.digest()
    assert len({plain, bfloat, half}) == 3
    assert conditioning.digest() == plain


def forward(model: Model, **options: Any) -> None:
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), **options)


def change_generation_config(model: Model) -> None:
    model.generation_config.max_new_tokens = 3
    model.generation_config.do_sample = True


HARMLESS: dict[str, Callable[[Model], Any]] = {
    "a forward": forward,
    "a forward with gradients": lambda model: model(torch.tensor([[1, 2]])).logits.sum().backward(),
    "eval() again": lambda model: model.eval(),
    "output_hidden_states for the first time": lambda model: forward(model, output_hidden_states=True),
    "output_attentions": lambda model: forward(model, output_attentions=True),
    "generation_config": change_generation_config,
    "generate": lambda model: model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False),
    "state_dict": lambda model: model.state_dict(),
    "gradients switched off": lambda model: model.requires_grad_(False),
    "torch.compile of the forward": lambda model: setattr(model, "forward", torch.compile(model.forward)),
    "train() and eval()": lambda model: model.train().eval(),
    "gradients set": lambda model: setattr(first_weight(model), "grad", torch.ones_like(first_weight(model))),
    "gradients clipped": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "moved to where it is": lambda model: model.to("cpu", torch.float32),
    "moved to shared memory": lambda model: model.share_memory(),
    "ties tied again": lambda model: model.tie_weights(),
    "the same values in other memory": lambda model: setattr(
        first_weight(model), "data", first_weight(model).data.clone()
    ),
    "the same weights assigned": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
    "a copy of the model": copy.deepcopy,
}


@pytest.mark.parametrize("harmless", HARMLESS.values(), ids=HARMLESS)
def test_the_digest_does_not_change_with(harmless: Callable[[Model], Any], tiny_llama: Model) -> None:
    conditioning = Conditioning(tiny_llama)
    before = conditioning.digest()
    harmless(tiny_llama)
    assert conditioning.digest() == before


def written_in(module: str) -> Callable[..., Any]:
    """A hook that a module of that name defines."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return output

    return types.FunctionType(hook.__code__, {"__name__": module})


def test_what_a_package_of_transformers_kind_attaches_does_not_change_the_digest(tiny_llama: Model) -> None:
    conditioning = Conditioning(tiny_llama)
    before = conditioning.digest()
    tiny_llama.model.layers[0].register_forward_hook(written_in("accelerate.hooks"))
    assert conditioning.digest() == before
    tiny_llama.model.layers[0].register_forward_hook(written_in("accelerated_by_me.hooks"))
    assert conditioning.digest() != before


def test_a_forward_that_claims_to_be_the_one_it_wraps_is_seen(tiny_llama: Model) -> None:
    """`functools.wraps` copies the name of the module, and a package may wrap what a user has replaced."""
    conditioning, mlp = Conditioning(tiny_llama), tiny_llama.model.layers[0].mlp
    before = conditioning.digest()
    forward = mlp.forward

    @functools.wraps(forward)
    def doubled(states: torch.Tensor) -> torch.Tensor:
        return forward(states) * 2

    mlp.forward = doubled
    changed = conditioning.digest()
    assert changed != before
    mlp.forward = functools.update_wrapper(functools.partial(written_in("accelerate.hooks"), mlp), doubled)
    assert conditioning.digest() not in (before, changed)
    mlp.forward = functools.update_wrapper(functools.partial(written_in("accelerate.hooks"), mlp), forward)
    assert conditioning.digest() == before


def test_a_model_made_under_inference_mode_has_a_digest_too(tiny_llama: Model) -> None:
    with torch.inference_mode():
        model = copy.deepcopy(tiny_llama)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        conditioning = Conditioning(model)
        before = conditioning.digest()
        first_weight(model).data.mul_(2)
        assert conditioning.digest() != before


def test_a_class_that_gets_another_forward_is_seen(tiny_llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    conditioning, kind = Conditioning(tiny_llama), type(tiny_llama.model.layers[0].mlp)
    before, forward = conditioning.digest(), kind.forward
    with monkeypatch.context() as patching:
        patching.setattr(kind, "forward", lambda self, states: forward(self, states) * 2)
        assert conditioning.digest() != before
    assert conditioning.digest() == before


def test_a_module_that_gets_another_class_is_seen(tiny_llama: Model) -> None:
    class Louder(type(tiny_llama.model.layers[0].mlp)):
        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return super().forward(states) * 2

    conditioning = Conditioning(tiny_llama)
    before = conditioning.digest()
    tiny_llama.model.layers[1].mlp.__class__ = Louder
    assert conditioning.digest() != before


# What makes a forward unfit for reuse


def bypass(conditioning: Conditioning) -> str | None:
    conditioning.digest()
    return conditioning.bypass()


def test_a_dropout_module_is_seen_wherever_it_is_put_and_one_of_zero_is_not(tiny_llama: Model) -> None:
    conditioning = Conditioning(tiny_llama.train())
    assert bypass(conditioning) is None
    tiny_llama.model.layers[0].mlp.act_fn = nn.Sequential(nn.Dropout(0.0), nn.SiLU())
    assert bypass(conditioning) is None
    tiny_llama.model.layers[0].mlp.act_fn = nn.Sequential(nn.Dropout(0.1), nn.SiLU())
    assert bypass(conditioning) is not None


def test_only_the_part_that_drops_needs_to_be_training(tiny_llama: Model) -> None:
    tiny_llama.model.layers[1].self_attn.attention_dropout = 0.1
    conditioning = Conditioning(tiny_llama.eval())
    tiny_llama.model.layers[1].self_attn.train()
    assert bypass(conditioning) is not None


@pytest.mark.parametrize("name", ["attention_dropout", "router_jitter_noise", "moe_jitter_eps", "resid_pdrop"])
def test_whatever_is_random_in_training_makes_forwards_unfit_for_reuse(name: str, tiny_llama: Model) -> None:
    setattr(tiny_llama.model.layers[0].mlp, name, 0.1)
    conditioning = Conditioning(tiny_llama.eval())
    assert bypass(conditioning) is None
    tiny_llama.train()
    assert bypass(conditioning) == "a dropout or noise is active; call model.eval()"
    tiny_llama.eval()
    assert bypass(conditioning) is None


def test_noise_on_embeddings_makes_forwards_unfit_for_reuse_from_when_on_it_is_added(tiny_llama: Model) -> None:
    conditioning = Conditioning(tiny_llama.train())
    assert bypass(conditioning) is None
    hook = activate_neftune(tiny_llama, 5.0)
    assert bypass(conditioning) == "NEFTune adds noise to embeddings; call model.eval()"
    tiny_llama.eval()
    assert bypass(conditioning) is None
    tiny_llama.train()
    deactivate_neftune(tiny_llama, hook)
    assert bypass(conditioning) is None


def test_attention_in_both_directions_makes_forwards_unfit_for_reuse(tiny_llama: Model) -> None:
    conditioning = Conditioning(tiny_llama)
    assert bypass(conditioning) is None
    tiny_llama.config.is_causal = False
    assert bypass(conditioning) == "keys and values depend on what follows them (config.is_causal is False)"


def test_settings_of_outputs_change_no_digest(tiny_llama: Model) -> None:
    conditioning = Conditioning(tiny_llama)
    before = conditioning.digest()
    tiny_llama.config.use_cache = not tiny_llama.config.use_cache
    tiny_llama.config.output_hidden_states = True
    assert conditioning.digest() == before


def test_settings_of_the_text_inside_a_config_are_read(tiny_llama: Model) -> None:
    text = copy.deepcopy(tiny_llama.config)
    tiny_llama.config.get_text_config = lambda decoder=False: text
    conditioning = Conditioning(tiny_llama)
    before = conditioning.digest()
    text.sliding_window = 8
    assert conditioning.digest() != before


def test_after_a_suspicion_the_digest_is_another(tiny_llama: Model) -> None:
    conditioning = Conditioning(tiny_llama)
    before = conditioning.digest()
    conditioning.suspect()
    assert conditioning.digest() != before


def test_a_hook_of_all_modules_changes_the_digest_as_long_as_it_is_there(tiny_llama: Model) -> None:
    conditioning = Conditioning(tiny_llama)
    before = conditioning.digest()
    for register in (everywhere.register_module_forward_hook, everywhere.register_module_forward_pre_hook):
        handle = register(lambda *_: None)
        try:
            assert conditioning.digest() != before
        finally:
            handle.remove()
        assert conditioning.digest() == before


def test_a_listing_that_was_interrupted_is_made_again(tiny_llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    conditioning = Conditioning(tiny_llama)
    weights_of = fingerprint._weights_of
    for number in range(1, 4):
        seen: list[nn.Module] = []

        def interrupted(module: nn.Module, number: int = number, seen: list[nn.Module] = seen) -> Any:
            seen.append(module)
            if len(seen) == number:
                raise KeyboardInterrupt
            return weights_of(module)

        tiny_llama.model.layers[0].mlp = copy.deepcopy(tiny_llama.model.layers[0].mlp)  # so that it is listed again
        with monkeypatch.context() as patch:
            patch.setattr(fingerprint, "_weights_of", interrupted)
            with pytest.raises(KeyboardInterrupt):
                conditioning.digest()
        for weight in (tiny_llama.model.layers[0].mlp.up_proj.weight, tiny_llama.lm_head.weight):  # new, and the last
            before = conditioning.digest()
            with torch.no_grad():
                weight.add_(0.5)
            assert conditioning.digest() != before


# Whether to look again


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no other thread runs; under the tests' runner there may be some."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "add",
    [
        lambda model: model.model.layers[1].register_forward_hook(print),
        lambda model: model.lm_head.register_forward_pre_hook(print),
        lambda model: setattr(model.lm_head, "forward", functools.partial(print)),
    ],
    ids=["hook", "pre-hook", "forward"],
)
def test_a_model_may_change_in_a_forward_where_functions_run_that_are_not_its_own(
    add: Callable[[Model], Any], tiny_llama: Model
) -> None:
    conditioning = Conditioning(tiny_llama)
    conditioning.digest()
    assert not conditioning.may_change_in_a_forward()
    add(tiny_llama)
    conditioning.digest()
    assert conditioning.may_change_in_a_forward()


def test_a_model_may_change_in_a_forward_where_another_thread_runs_that_draws_no_bars(
    tiny_llama: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tqdm(total=1, file=io.StringIO()):
        monitor = tqdm.monitor
    assert monitor.is_alive()  # as a model leaves it that was loaded with a bar
    threads = [threading.current_thread(), monitor]
    monkeypatch.setattr(threading, "active_count", lambda: len(threads))
    monkeypatch.setattr(threading, "enumerate", lambda: threads)
    conditioning = Conditioning(tiny_llama)
    conditioning.digest()
    assert not conditioning.may_change_in_a_forward()
    threads.append(threading.Thread())
    assert conditioning.may_change_in_a_forward()


@pytest.mark.usefixtures("alone")
def test_a_model_may_change_in_a_forward_where_a_hook_is_for_all_modules(tiny_llama: Model) -> None:
    conditioning, handle = Conditioning(tiny_llama), everywhere.register_module_forward_hook(lambda *given: None)
    try:
        conditioning.digest()
    finally:
        handle.remove()
    assert conditioning.may_change_in_a_forward()


def test_a_model_may_change_in_a_forward_while_another_thread_lives(tiny_llama: Model) -> None:
    conditioning, ends = Conditioning(tiny_llama), threading.Event()
    conditioning.digest()
    thread = threading.Thread(target=ends.wait, daemon=True)
    thread.start()
    assert conditioning.may_change_in_a_forward()
    ends.set()
    thread.join()


@pytest.mark.usefixtures("alone")
def test_a_call_alone_reads_the_conditions_once(tiny_llama: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    digest = Conditioning.digest
    monkeypatch.setattr(Conditioning, "digest", lambda self, **how: read.append(digest(self, **how)) or read[-1])
    cache, ids = PagedPrefixCache(tiny_llama), torch.arange(1, 40)[None]
    read.clear()
    tiny_llama.generate(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=1)
    assert len(read) == 1
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.Thread(), threading.Thread()])
    tiny_llama.generate(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=1)
    assert len(read) == 3
    assert cache.last_call.reused_tokens == 38


@FROM_5_23
def test_traits_of_states_are_what_was_tried_and_what_modules_say_now() -> None:
    model_class, config = zoo.configuration("lfm2")
    config.conv_bias = True
    model = zoo.instantiate(model_class, config, 0)
    assert Conditioning(model).state_traits == StateTraits()
    tried = Conditioning(model, StateTraits(clamps_one_token=True))
    before = tried.digest()
    assert tried.state_traits == StateTraits(clamps_one_token=True, num_pads_that_show=2)
    for module in model.modules():
        if hasattr(module, "in_proj"):
            module.in_proj.bias = None
            module.out_proj.bias = None
    assert tried.digest() != before
    assert tried.state_traits == StateTraits(clamps_one_token=True)


@FROM_5_23
def test_a_model_without_states_has_no_traits_whatever_its_modules_are() -> None:
    conditioning = Conditioning(zoo.build("qwen3_next"))
    conditioning.digest()
    assert conditioning.state_traits == StateTraits()
