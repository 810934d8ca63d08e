"""A pytest plugin: every `generate` of somebody else's tests runs on a `PagedPrefixCache` where that is legal.

In a checkout of transformers, with `tests/outside` of this repository on `PYTHONPATH`:

    python -m pytest -p paged_generate --paged-mode=beside -m generate tests/models/llama

Without `--paged-mode` it does nothing. A test that fails is run once more without these caches. If it fails then, too, the
caches are not to blame: it is reported as skipped, and counted. What `expected.py` lists is an xfail, and strict where chance has no part in it.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.runner import runtestprotocol
from transformers import GenerationMixin

from hf_paged_cache.integration.hooks import GenerateBracket

from .calls import CACHE_ARGUMENTS
from .expected import EXPECTED
from .modes import MODES, Mode

if TYPE_CHECKING:
    from collections.abc import Iterator

FAILS_WITHOUT = "fails without a PagedPrefixCache, too"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("paged_generate")
    modes = "; ".join(f"{name}: {' '.join((mode.__doc__ or '').split())}" for name, mode in MODES.items())
    group.addoption("--paged-mode", choices=[*MODES], help=f"run calls of generate on a PagedPrefixCache. {modes}")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--paged-mode") is not None:
        plugin = Plugin(config.getoption("--paged-mode"))
        config.pluginmanager.register(plugin, "paged_generate_plugin")


class Plugin:
    """The hooks of one session.

    Args:
        mode: a name of `MODES`.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.runner = MODES[mode]()
        self.num_failing_without = 0

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for expected in EXPECTED:
                if expected.is_of(self.mode) and fnmatchcase(item.nodeid, expected.test):
                    item.add_marker(pytest.mark.xfail(reason=expected.reason, strict=not expected.by_chance))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        num_before = self.runner.num_replaced
        with replaced_generate(self.runner):
            reports = runtestprotocol(item, nextitem=nextitem, log=False)
        failed = [report for report in reports if report.failed]
        is_listed = item.get_closest_marker("xfail") is not None
        if failed and not is_listed and (self.runner.num_replaced == num_before or fails_without(item, nextitem)):
            self.num_failing_without += 1
            path, line, _ = item.location
            for report in failed:
                report.outcome, report.longrepr = "skipped", (path, (line or 0) + 1, f"Skipped: {FAILS_WITHOUT}")
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        runner, write = self.runner, terminalreporter.write_line
        terminalreporter.write_sep("=", f"paged_generate: {self.mode}")
        write(f"{runner.num_replaced} calls of generate on a PagedPrefixCache")
        write(f"{runner.num_reused} of {runner.num_prompt_tokens} prompt tokens reused")
        for reason, count in runner.refused.most_common():
            write(f"{count} calls as ever: {reason}")
        write(f"{self.num_failing_without} tests fail without a PagedPrefixCache, too")


def fails_without(item: pytest.Item, nextitem: pytest.Item | None) -> bool:
    """Run a test once more, as it is."""
    if hasattr(item, "_initrequest"):
        item._initrequest()  # its fixtures are made anew
    return any(report.failed for report in runtestprotocol(item, nextitem=nextitem, log=False))


@contextmanager
def replaced_generate(mode: Mode) -> Iterator[None]:
    """Inside the block, a mode decides of each call of `generate` how it runs."""
    original, open_bracket = GenerationMixin.generate, GenerateBracket.__call__

    @functools.wraps(original)
    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        return mode.run(model, functools.partial(original, model), args, kwargs)

    def call_bracket(bracket: GenerateBracket, *args: Any, **kwargs: Any) -> Any:
        if any(mode.has_begun(kwargs.get(name)) for name in CACHE_ARGUMENTS):
            return generate(bracket.model, *args, **kwargs)
        return open_bracket(bracket, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationMixin, "generate", generate)
        patch.setattr(GenerateBracket, "__call__", call_bracket)
        yield
