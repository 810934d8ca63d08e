"""For the documentation's build: what takes `**sizes: Unpack[StoreSizes]` shows each option."""

from __future__ import annotations

from typing import Any

import griffe


class StoreOptions(griffe.Extension):
    """Puts the options of a store, with their defaults, in place of `**sizes`."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        options = pkg["store_options"]
        defaults = {name: member.value for name, member in options["StoreOptions"].attributes.items()}
        self._show(pkg, options["StoreSizes"], defaults)

    def _show(self, held: Any, sizes: Any, defaults: dict[str, Any]) -> None:
        for member in held.members.values():
            if member.is_alias:
                continue
            if not member.is_function:
                self._show(member, sizes, defaults)
            elif "sizes" in member.parameters and "StoreSizes" in str(member.parameters["sizes"].annotation):
                at = [*member.parameters].index(member.parameters["sizes"])
                before, after = [*member.parameters][:at], [*member.parameters][at + 1 :]
                shown = [
                    griffe.Parameter(
                        name,
                        annotation=sizes[name].annotation,
                        kind=griffe.ParameterKind.keyword_only,
                        default=default,
                    )
                    for name, default in defaults.items()
                ]
                member.parameters = griffe.Parameters(*before, *shown, *after)
