"""docs/options.md names every option of the public calls and of the command, with the default that it has."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from hf_paged_cache import PagedPrefixCache, generate_all, generate_all_on_ray
from hf_paged_cache.cli.commands import app
from hf_paged_cache.store_options import StoreOptions

PAGE = (Path(__file__).parents[1] / "docs" / "options.md").read_text("utf-8")
SECTIONS = PAGE.split("## The command")
CALLS: list[Callable[..., Any]] = [PagedPrefixCache, StoreOptions, generate_all, generate_all_on_ray]


def rows(text: str) -> dict[str, str]:
    """Option -> the rest of its row, of all tables."""
    found = {}
    for line in text.splitlines():
        names, _, rest = line.removeprefix("| ").partition(" | ")
        for name in re.findall(r"`([^`]+)`", names) if line.startswith("| ") else ():
            found.setdefault(name, rest)
    return found


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_every_argument_with_a_default_is_there_with_it(call: Callable[..., Any]) -> None:
    told = rows(SECTIONS[0])
    for name, parameter in inspect.signature(call).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY or call is StoreOptions:
            assert name in told, name
            if isinstance(parameter.default, bool | int | str):
                default = f'"{parameter.default}"' if isinstance(parameter.default, str) else str(parameter.default)
                assert re.match(rf"`?{re.escape(default)}\b|`{re.escape(default)}`", told[name]), (name, told[name])


COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_of_a_command_is_there_and_so_is_the_command(command: str) -> None:
    told = rows(PAGE)
    assert command in told
    options = {max(each.opts, key=len) for each in COMMANDS[command].params if each.opts[0].startswith("--")} - {
        "--help"
    }
    if command == "generate":
        options = {each for each in options if each.removeprefix("--").replace("-", "_") not in told}
    assert options <= set(told)
    for option in options & {"--seconds", "--max-new-tokens", "--questions", "--shots", "--column"}:
        default = next(each.default for each in COMMANDS[command].params if option in each.opts)
        assert re.search(rf"\b{default:g}\b" if isinstance(default, int | float) else default, told[option])


def test_no_option_is_there_that_does_not_exist() -> None:
    known = {opt for command in COMMANDS.values() for each in command.params for opt in each.opts}
    assert {name for name in rows(SECTIONS[1]) if name.startswith("--")} <= known
    arguments = {name for call in CALLS for name in inspect.signature(call).parameters}
    assert set(rows(SECTIONS[0])) - {"generate"} <= arguments
