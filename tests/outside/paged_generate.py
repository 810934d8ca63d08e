"""A pytest plugin: every `generate` of somebody else's tests runs beside itself on a `PagedPrefixCache` where that is
legal, and both are compared.

In a checkout of transformers, of the version that is installed, with `tests/outside` of this repository on
`PYTHONPATH`:

    python -m pytest -p paged_generate --paged -m generate -k 'not compil' tests/models/llama

Without `--paged` it does nothing. The test gets the result of the paged cache. A test that fails is run once more
without one. If it fails then, too, it is reported as skipped, and counted: it is transformers' own. What `EXPECTED`
lists is an xfail. At the end it prints how many calls were compared, how many tokens were reused, and why other calls
ran as ever. Tests of compilation are left out, because transformers compiles `generate` only with a cache of its own
that is made for it.
"""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.runner import runtestprotocol
from torch import Tensor
from transformers import GenerationMixin

from hf_paged_cache import CacheArgumentError, PagedPrefixCache, PrefixStore, UnsupportedModelError

FAILS_WITHOUT = "fails without a PagedPrefixCache, too"
# of the largest number
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
COMPARED = ("logits", "scores", "sequences_scores", "hidden_states", "attentions")

# a pattern of ids, as of `fnmatch` -> why it does not count that the test fails
_MINIMAX = "the test asks for MiniMaxCache itself, or compares with it; it does not reorder its states with the beams"
EXPECTED = {
    "*/models/minimax/*::test_*_generate_dict_outputs_use_cache": _MINIMAX,
    "*/models/minimax/*::test_generate_continue_from_*": _MINIMAX,
    "*/models/minimax/*::test_beam_*": _MINIMAX,
    "*/models/kosmos2/*::test_generate_continue_from_past_key_values": (
        "a row holds the id of padding, whose position Kosmos-2 counts otherwise in a whole prompt than token by token"
    ),
    "*/models/zaya/*::test_*_generate_dict_outputs_use_cache": "the test asks for the very class of each layer",
}

_CACHES = ("past_key_values", "cache_params")
_CROSS = ("encoder_hidden_states", "encoder_outputs", "cross_attention_states")
_DECODING = ("_sample", "_beam_search", "_assisted_decoding")
_NUM_MODELS = 4  # whose stores are kept; a suite makes thousands of models


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--paged", action="store_true", help="compare each generate with the same on a PagedPrefixCache")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--paged"):
        config.pluginmanager.register(Plugin(), "paged_generate_plugin")


class Plugin:
    """The hooks of one session."""

    def __init__(self) -> None:
        self.beside = Beside()
        self.num_failing_without = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for pattern, reason in EXPECTED.items():
                if fnmatchcase(item.nodeid, pattern):
                    item.add_marker(pytest.mark.xfail(reason=reason, strict=False))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        with replaced_generate(self.beside):
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
        failed = [report for report in reports if report.failed]
        if failed and fails_without(item, nextitem):
            self.num_failing_without += 1
            path, line, _ = item.location
            for report in failed:
                report.outcome, report.longrepr = "skipped", (path, (line or 0) + 1, f"Skipped: {FAILS_WITHOUT}")
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        beside, write = self.beside, terminalreporter.write_line
        terminalreporter.write_sep("=", "paged_generate")
        write(f"{beside.num_compared} calls of generate compared with those on a PagedPrefixCache")
        write(f"{beside.num_reused} of {beside.num_prompt_tokens} prompt tokens reused")
        for reason, count in beside.refused.most_common():
            write(f"{count} calls as ever: {reason}")
        write(f"{self.num_failing_without} tests fail without a PagedPrefixCache, too")


def fails_without(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test once more, as it is."""
    if hasattr(item, "_initrequest"):
        item._initrequest()  # its fixtures are made anew
    return any(report.failed for report in runtestprotocol(item, nextitem=nextitem, log=False))


@contextmanager
def replaced_generate(beside: Beside) -> Iterator[None]:
    """Inside the block each call of `generate` is looked at."""
    original = GenerationMixin.generate

    @functools.wraps(original)
    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        return beside.run(model, functools.partial(original, model), args, kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationMixin, "generate", generate)
        yield


class Beside:
    """Runs calls beside themselves on caches of one store a model.

    Attributes:
        num_compared: calls that ran on a cache of ours, too.
        num_prompt_tokens, num_reused: theirs.
        refused: why the others ran as ever -> how many.
    """

    def __init__(self) -> None:
        self.num_compared = self.num_prompt_tokens = self.num_reused = 0
        self.refused: Counter[str] = Counter()
        self._is_second = False  # whether the second of two calls runs, on a cache of ours
        self._stores: OrderedDict[int, PrefixStore] = OrderedDict()  # id of a model, which its store holds -> store

    def run(self, model: Any, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call; the second result, after a comparison.

        Args:
            original: `generate` as it was, bound to the model.
        """
        if self._is_second:
            return original(*args, **kwargs)
        why = why_as_ever(model, args, kwargs)
        try:
            cache = None if why else PagedPrefixCache(self._store_of(model))
        except UnsupportedModelError as error:
            cache, why = None, "not supported: " + str(error).removeprefix(type(model).__name__).lstrip(": ")[:100]
        if cache is None:
            self.refused[str(why)] += 1
            return original(*args, **kwargs)
        try:
            return self._both(model, original, cache, args, kwargs)
        except CacheArgumentError as error:  # ids that are drawn at random may ask for an image that is not there
            if "is the placeholder of" not in str(error):
                raise
            self.refused["ids have a placeholder that nothing fills"] += 1
            return original(*args, **kwargs)

    def _both(self, model: Any, original: Any, cache: PagedPrefixCache, args: Any, kwargs: dict[str, Any]) -> Any:
        everything = {"return_dict_in_generate": True, "output_logits": True} if has_usual_result(model) else {}
        put_back, wanted, failed = repeatable(kwargs), None, None
        try:
            wanted = original(*args, **{**kwargs, **everything})
        except Exception as error:  # noqa: BLE001  # whatever it is, the second call is to raise, too
            failed = error
        put_back()
        self._is_second = True
        try:
            got = model.generate(*args, **{**kwargs, **everything}, past_key_values=cache)
        except Exception as error:
            if failed is None:
                raise
            raise failed from error
        finally:
            self._is_second = False
        if failed is not None:
            raise AssertionError(f"this call fails without a PagedPrefixCache, and returns with one: {failed!r}")
        assert_same(wanted, got)
        self.num_compared += 1
        self.num_prompt_tokens += cache.last_call.prompt_tokens
        self.num_reused += cache.last_call.reused_tokens
        return as_asked(got, model, args, kwargs) if everything else got

    def _store_of(self, model: Any) -> PrefixStore:
        if id(model) not in self._stores:
            self._stores[id(model)] = PrefixStore(model, block_size=4, num_blocks=2048)  # prompts of tests are short
        self._stores.move_to_end(id(model))
        if len(self._stores) > _NUM_MODELS:
            self._stores.popitem(last=False)
        return self._stores[id(model)]


def option(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """An option's value where transformers looks for it: keyword, the config given, the model's own."""
    given = args[1] if len(args) > 1 else kwargs.get("generation_config")
    values = [kwargs.get(name), getattr(given, name, None), getattr(model.generation_config, name, None)]
    return next((value for value in values if value is not None), None)


def why_as_ever(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why no cache of ours may take part; None if one may."""
    crosses = [*_CROSS]
    if getattr(model.config.get_text_config(decoder=True), "cross_attention_layers", None):
        crosses.append("pixel_values")
    own = "generate" in vars(type(model)) or type(model).generate.__qualname__ != "GenerationMixin.generate"
    reasons = {
        "it brings a cache": any(kwargs.get(name) is not None for name in _CACHES),
        "it asks for a cache_implementation": option(model, args, kwargs, "cache_implementation")
        not in (None, "hybrid"),
        "use_cache is False": option(model, args, kwargs, "use_cache") is False,
        "it drafts for another call": bool(option(model, args, kwargs, "is_assistant")),
        "custom_generate is another function": kwargs.get("custom_generate") is not None,
        "the model has a generate of its own": own,
        "keys and values of a cross attention are no tokens'": any(kwargs.get(name) is not None for name in crosses),
        "a streamer would be fed twice": kwargs.get("streamer") is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def has_usual_result(model: Any) -> bool:
    """Whether a call that asks for no `ModelOutput` gets the sequences of the one that it would get."""
    return all(getattr(type(model), name, None) is getattr(GenerationMixin, name, None) for name in _DECODING)


def as_asked(output: Any, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A result without what the test has not asked for."""
    if not option(model, args, kwargs, "return_dict_in_generate"):
        return output.sequences
    if option(model, args, kwargs, "output_logits"):
        return output
    return type(output)(**{name: value for name, value in output.items() if name != "logits"})


def repeatable(kwargs: dict[str, Any]) -> Callable[[], None]:
    """What puts back what a call leaves changed: random numbers, and how many tokens an assistant drafts."""
    numbers, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    assistant = kwargs.get("assistant_model")
    config = copy.deepcopy(getattr(assistant, "generation_config", None))

    def put_back() -> None:
        torch.set_rng_state(numbers)
        random.setstate(python)
        np.random.set_state(numpy)
        if assistant is not None and config is not None:
            assistant.generation_config = config

    return put_back


def assert_same(wanted: Any, got: Any) -> None:
    """Equal tokens, and logits, scores, hidden states and attentions within the tolerance of their scale.

    Where rows part at two tokens that the wanted logits hold for equal, within the tolerance, what is compared ends
    there: rounding has decided. Results that are no `ModelOutput` are tensors, and equal.
    """
    if not hasattr(wanted, "sequences"):
        _assert_close("the result", wanted, got)
    elif wanted.sequences.equal(got.sequences):
        for name in COMPARED:
            _assert_close(name, getattr(wanted, name, None), getattr(got, name, None))
    else:
        _assert_parted_by_rounding(wanted, got)


def _assert_parted_by_rounding(wanted: Any, got: Any) -> None:
    """Up to the step at which tokens part, logits are the same, and there the tokens' are equal."""
    others = f"the tokens are others: {got.sequences.tolist()}, not {wanted.sequences.tolist()}"
    assert wanted.logits is not None, others
    assert getattr(wanted, "beam_indices", None) is None, others
    columns = wanted.sequences.shape[1] - len(wanted.logits)
    for step, (theirs, mine) in enumerate(zip(wanted.logits, got.logits, strict=False)):
        _assert_close(f"{others}; logits[{step}]", theirs, mine)
        tokens, of_ours = wanted.sequences[:, columns + step], got.sequences[:, columns + step]
        rows = (tokens != of_ours).nonzero().flatten()
        if len(rows):
            gap = theirs[rows].gather(1, tokens[rows, None]) - theirs[rows].gather(1, of_ours[rows, None])
            assert float(gap.abs().max()) <= 2 * _tolerance(theirs), others
            return
    raise AssertionError(others)


def _assert_close(name: str, wanted: Any, got: Any) -> None:
    """Tensors, or tuples of them."""
    if isinstance(wanted, Tensor) and isinstance(got, Tensor):
        most = {"rtol": 0, "atol": _tolerance(wanted), "equal_nan": True}
        torch.testing.assert_close(got.float(), wanted.float(), **most, msg=lambda why: f"{name}: {why}")
    elif isinstance(wanted, tuple) and isinstance(got, tuple):
        assert len(got) == len(wanted), f"{name}: {len(got)} of them, not {len(wanted)}"
        for number, (theirs, mine) in enumerate(zip(wanted, got, strict=True)):
            _assert_close(f"{name}[{number}]", theirs, mine)
    else:
        assert wanted is None, f"{name}: a {type(got).__name__}, not a {type(wanted).__name__}"
        assert got is None, f"{name}: a {type(got).__name__}, which nobody asked for"


def _tolerance(wanted: Tensor) -> float:
    """The largest difference allowed between numbers."""
    finite = wanted[wanted.isfinite() & (wanted.abs() < 1e30)]  # what a processor forbids is the least number there is
    return TOLERANCE.get(wanted.dtype, 0.0) * (float(finite.abs().max()) if finite.numel() else 0.0)
