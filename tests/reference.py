"""The promise, as a check: the same `generate` call with the cache that transformers makes and with ours, logits
included.

Equal tokens alone prove little, since many wrong keys and values give the same ones. So every step's raw logits are
compared, and every check with a hit is shown to fail with zeros in place of what is reused (`zero_blocks`).
"""

import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import transformers
from packaging import version
from transformers import LogitsProcessor, PreTrainedModel

from hf_paged_cache import PagedPrefixCache
from hf_paged_cache.model.trial import input_device

from .internals import zero_blocks as zero_blocks  # what every check of a hit is proved with

TOLERANCE = 1e-4  # of the largest logit of the reference
BEFORE_5_23 = version.parse(transformers.__version__) < version.parse("5.23")
FROM_5_23 = pytest.mark.skipif(BEFORE_5_23, reason="earlier versions compute it otherwise")


def run(model: PreTrainedModel, cache: PagedPrefixCache | None = None, *, seed: int = 0, **arguments: Any) -> Any:
    """One seeded `generate` call on the model's device; without a cache on the one that transformers makes.

    Without a mask all ids count as tokens: `generate` would otherwise guess padding from the ids.
    """
    device = input_device(model)
    arguments = {
        name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()
    }
    ids = arguments.get("input_ids")
    if ids is not None and "attention_mask" not in arguments:
        arguments["attention_mask"] = torch.ones_like(ids)
    arguments = {"max_new_tokens": 6, "do_sample": False, **arguments}
    if cache is not None:
        arguments["past_key_values"] = cache
    torch.manual_seed(seed)
    return model.generate(**arguments, return_dict_in_generate=True, output_logits=True)


def assert_same(reference: Any, output: Any) -> None:
    """Equal generated tokens, every step's raw logits within `TOLERANCE`, and so whatever else the call was asked for.

    The sequences may start with other prompts: a call that resumes passes only its new tokens.
    """
    assert len(output.logits) == len(reference.logits), f"{len(output.logits)} steps, not {len(reference.logits)}"
    # no steps: older versions stop prompt lookup at once after a prompt that ends in an end of sequence
    scale = max((float(step.abs().max()) for step in reference.logits), default=0.0)
    for number, (wanted, got) in enumerate(zip(reference.logits, output.logits, strict=True)):
        assert got.shape == wanted.shape
        distance = float((got - wanted).abs().max())
        assert distance <= TOLERANCE * scale, f"step {number}: logits differ by {distance / scale:.1e} of their scale"
    for name in ("scores", "sequences_scores", "hidden_states", "attentions"):
        _assert_close(name, getattr(reference, name, None), getattr(output, name, None))
    num_generated = min(reference.sequences.shape[1], output.sequences.shape[1], len(reference.logits))
    torch.testing.assert_close(output.sequences[:, -num_generated:], reference.sequences[:, -num_generated:])


def _assert_close(name: str, wanted: Any, got: Any) -> None:
    """Tensors or tuples of them, of equal shapes and within `TOLERANCE` of the largest number; infinities are equal."""
    if wanted is None:
        assert got is None
    elif isinstance(wanted, tuple):
        assert len(got) == len(wanted), f"{name}: {len(got)}, not {len(wanted)}"
        for number, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
            _assert_close(f"{name}[{number}]", theirs, mine)
    else:
        scale = float(wanted[wanted.isfinite()].abs().max())
        torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE * scale, msg=lambda why: f"{name}: {why}")


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """What a forward gives is within `TOLERANCE` of the largest number that is wanted."""
    torch.testing.assert_close(got, wanted, rtol=0, atol=TOLERANCE * float(wanted.detach().abs().max()))


def assert_right(
    model: PreTrainedModel, cache: PagedPrefixCache, *, reused: int | None = None, **arguments: Any
) -> Any:
    """A call gives with a cache what it gives without, and reuses so many tokens. Returns its output."""
    reference = run(model, **arguments)
    output = run(model, cache, **arguments)
    assert_same(reference, output)
    if reused is not None:
        assert cache.last_call.reused_tokens == reused, cache.last_call
    return output


def is_same(reference: Any, output: Any) -> bool:
    """Whether `assert_same` passes."""
    try:
        assert_same(reference, output)
    except AssertionError:
        return False
    return True


class _Noise(LogitsProcessor):
    """Moves scores as much as rounding does."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 1e-6 * scores.abs().max() * torch.randn(scores.shape, generator=self.generator)


def is_tie(model: PreTrainedModel, reference: Any, seed: int, given: dict[str, Any]) -> bool:
    """Whether the reference gives other tokens once its scores move by a rounding error."""
    for trial in range(8):
        noisy = run(
            model, seed=seed, **{**given, "logits_processor": [_Noise(trial), *given.get("logits_processor", ())]}
        )
        if not noisy.sequences.equal(reference.sequences):
            return True
    return False


class AtStep(LogitsProcessor):
    """Does something at one step of `generate`, counted from 1, and changes no score."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        self.countdown = step
        self.act = act

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.countdown -= 1
        if self.countdown == 0:
            self.act()
        return scores


class Forced(LogitsProcessor):
    """Lets `generate` choose given tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = iter(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, next(self._tokens)] = 0
        return chosen


class Forwards:
    """Rows and tokens of every forward that a model runs until the block is left.

    No hook, which would be another condition of keys and values: the call of the embeddings' type is replaced.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.shapes: list[tuple[int, int]] = []
        self._embeddings = model.get_input_embeddings()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> list[tuple[int, int]]:
        kind = type(self._embeddings)
        self._patch.setattr(kind, "__call__", self._noting(kind.__call__))
        return self.shapes

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def _noting(self, call: Any) -> Any:
        def noting_call(module: torch.nn.Module, ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if module is self._embeddings:
                self.shapes.append((ids.shape[0], ids.shape[1]))
            return call(module, ids, *args, **kwargs)

        return noting_call


def at_once(*acts: Callable[[], Any]) -> list[Any]:
    """What functions return that run at once, each in a thread; what one of them raises is raised."""
    made = [Future[Any]() for _ in acts]

    def run_one(future: Future[Any], act: Callable[[], Any]) -> None:
        try:
            future.set_result(act())
        except BaseException as error:  # noqa: BLE001  # raised below
            future.set_exception(error)

    for given in zip(made, acts, strict=True):
        threading.Thread(target=run_one, args=given, daemon=True).start()
    return [future.result(timeout=300) for future in made]


def forked(work: Callable[[], Any]) -> int:
    """Let a forked process, which has everything loaded, do this; its id. It exits with 0 if nothing is raised."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001  # its exit code says so
            traceback.print_exc()
            os._exit(1)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def row(*parts: tuple[int, int], pad: int = 0) -> list[int]:
    """Token ids: for each (seed, length) that many tokens that depend on the seed alone, after `pad` pads (id 0)."""
    tokens: list[int] = []
    for seed, length in parts:
        generator = torch.Generator().manual_seed(seed)
        tokens += torch.randint(1, 128, (length,), generator=generator).tolist()
    return [0] * pad + tokens


def batch(*rows: list[int]) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of rows, padded on the left to the longest."""
    columns = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[0] * (columns - len(tokens)) + tokens for tokens in rows]),
        "attention_mask": torch.tensor([[0] * (columns - len(tokens)) + [1] * len(tokens) for tokens in rows]),
    }


# What most tests ask: three full blocks of 16 and two tokens.
PROMPT = row((1, 50))
IDS = torch.tensor([PROMPT])
