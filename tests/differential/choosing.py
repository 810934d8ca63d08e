"""Which kinds can be played here: those that can be built, and that the library takes."""

from hf_paged_cache import PagedPrefixCache, UnsupportedModelError
from tests.differential.kinds import build


def supported(kinds: list[str]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Kinds with their attention implementations, and the reason why each other kind is left out."""
    chosen: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    for kind in kinds:
        for attention in ("eager", "sdpa"):
            try:
                model = build(kind, attention=attention)
            except ValueError as error:
                if attention == "eager":
                    left_out[kind] = f"not built: {error}"
                continue
            try:
                PagedPrefixCache(model).detach()
            except UnsupportedModelError as error:
                left_out[kind] = str(error)
            else:
                chosen.setdefault(kind, []).append(attention)
    return chosen, left_out
