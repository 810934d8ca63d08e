"""On an accelerator of this machine every scene gives what `DynamicCache` gives there: `pytest -m accelerator`."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import accelerate
import pytest
import torch
from transformers import DynamicCache

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.attention import backends

from ..conformance import scenes
from ..internals import capture_everywhere
from ..reference import Forced, assert_same, row, run
from ..tiny_models import build
from .test_ways_to_generate import SCENES, play

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="this machine has no accelerator"),
]


@pytest.mark.parametrize("scene", [*scenes.SCENES.values(), *SCENES], ids=lambda scene: scene.__name__)
def test_a_scene_is_the_same_on_an_accelerator(scene: Any) -> None:
    play(scene, build("llama").to(torch.accelerator.current_accelerator()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 64, 128, 288])
def test_a_part_is_attended_to_as_by_operators_in_fp32(head_dim: int, dtype: torch.dtype) -> None:
    """What the device computes parts with: one token and several, with a mask and without, any number of columns."""
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for rows, heads, groups, length, columns in (
        (1, 2, 1, 24, 33),
        (8, 2, 3, 1, 17),
        (3, 1, 4, 5, 160),
        (2, 2, 2, 1, 1),
    ):
        query = torch.randn(rows, heads * groups, length, head_dim, device=device)
        key, value = torch.randn(2, rows, heads, 2 * columns, head_dim, device=device)[:, :, :, :columns]
        hidden = torch.rand(rows, 1, length, columns, device=device) < 0.3
        hidden[..., 0] = False
        for mask in (None, torch.zeros(hidden.shape, device=device).masked_fill(hidden, -torch.inf)):
            part = backends.Part(key.to(dtype), value.to(dtype), None if mask is None else mask.to(dtype))
            for scale in (None, 0.3):
                out, lse = backends.attend(query.to(dtype), part, scale)
                scores = query.to(dtype).float().unflatten(1, (heads, groups)) @ part.key.float()[:, :, None].mT
                scores = scores * (head_dim**-0.5 if scale is None else scale)
                scores = scores if mask is None else scores + mask[:, :, None]
                wanted = (scores.softmax(-1) @ part.value.float()[:, :, None]).flatten(1, 2)
                wanted_lse = scores.logsumexp(-1).flatten(1, 2)
                assert (out.dtype, lse.dtype) == (dtype, torch.float32)
                torch.testing.assert_close(out.float(), wanted, rtol=0, atol=tolerance * float(wanted.abs().max()))
                torch.testing.assert_close(lse, wanted_lse, rtol=tolerance, atol=tolerance)


def known_and(seed: int, num_rows: int = 1) -> torch.Tensor:
    """Prompts of 100 known tokens and 9 others."""
    return torch.tensor([row((1, 100), (10 * seed + number, 9)) for number in range(num_rows)])


def test_threads_on_one_cache_are_right_whoever_has_the_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_everywhere(monkeypatch)
    model = build("llama").to(torch.accelerator.current_accelerator())
    cache = PagedPrefixCache(model, capture="auto")
    references = [run(model, input_ids=known_and(seed), max_new_tokens=20) for seed in range(40)]
    run(model, cache, input_ids=known_and(99), max_new_tokens=20)

    def call(seed: int) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            output = run(model, cache, input_ids=known_and(seed), max_new_tokens=20)
            torch.cuda.current_stream().synchronize()
            return output

    with ThreadPoolExecutor(4) as threads:
        for reference, output in zip(references, threads.map(call, range(40)), strict=True):
            assert_same(reference, output)
    cache.check()


def test_where_the_device_has_no_memory_for_static_rows_a_call_runs_without(monkeypatch: pytest.MonkeyPatch) -> None:
    capture_everywhere(monkeypatch)
    wide = {"num_hidden_layers": 8, "num_key_value_heads": 4, "head_dim": 64}  # 16 kB a column: 67 MB of 8 rows
    model = build("llama", **wide).to(torch.accelerator.current_accelerator())
    cache = PagedPrefixCache(model, capture="auto")
    reference = run(model, input_ids=known_and(1, 8), max_new_tokens=20)
    run(model, cache, input_ids=known_and(0), max_new_tokens=20)
    cache.release()
    torch.cuda.empty_cache()
    taken = torch.empty(torch.cuda.mem_get_info()[0] - 96 * 2**20, dtype=torch.uint8, device=model.device)
    assert_same(reference, run(model, cache, input_ids=known_and(1, 8), max_new_tokens=20))
    assert "8 rows of 512 columns are more than the arena may take" in cache.last_call.captured
    del taken
    cache.check()


def offloaded(model: Any) -> Any:
    return accelerate.cpu_offload(model, execution_device=torch.accelerator.current_accelerator())


def hooked(model: Any) -> Any:
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 1.01)
    return model


@pytest.mark.parametrize(("change", "said"), [(offloaded, ""), (hooked, "code of others runs in the forward")])
def test_what_cannot_be_captured_is_right_and_says_why(change: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capture_everywhere(monkeypatch)
    model = build("llama")
    model = change(model if change is offloaded else model.to(torch.accelerator.current_accelerator()))
    cache = PagedPrefixCache(model, capture="auto", trust_hooks=True)
    for seed in (1, 2, 2):
        ids = known_and(seed)
        assert_same(run(model, input_ids=ids), run(model, cache, input_ids=ids))
    assert cache.last_call.captured.partition(":")[0] == said


def test_below_fp32_a_graph_is_no_farther_from_fp32_than_a_dynamic_cache_continued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capture_everywhere(monkeypatch)
    device, settings = torch.accelerator.current_accelerator(), {"num_hidden_layers": 16, "hidden_size": 512}
    exact = build("llama", **settings).to(device)
    model = build("llama", **settings).to(device, torch.bfloat16)
    cache, apart = PagedPrefixCache(model, capture="auto"), {"ours": 0.0, "theirs": 0.0}
    run(model, cache, input_ids=known_and(0), max_new_tokens=20)
    for seed in range(1, 9):
        ids, tokens = known_and(seed), row((100 + seed, 20))

        def forced(of: Any, used: Any, ids: torch.Tensor = ids, tokens: Any = tokens) -> torch.Tensor:
            output = run(of, used, input_ids=ids, max_new_tokens=20, logits_processor=[Forced([*tokens])])
            return torch.stack([step.float() for step in output.logits])

        continued = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :100].to(device), past_key_values=continued)
        wanted = forced(exact, None)
        for name, logits in (("ours", forced(model, cache)), ("theirs", forced(model, continued))):
            apart[name] += float((logits - wanted).abs().mean())
    assert cache.last_call.captured.startswith("20 of 20 forwards were captured")
    assert apart["ours"] <= 1.05 * apart["theirs"]
