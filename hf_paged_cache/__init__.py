"""A prefix cache for `model.generate`: `PagedPrefixCache` keeps the keys and values of earlier calls and reuses them.

This module owns the public names, and nothing else. A name is resolved when it is first used (PEP 562), so
`import hf_paged_cache` imports neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .ask.explanation import Explanation, Lookup
    from .ask.model_check import ModelReport, check_model
    from .ask.prefixes import Prefilled
    from .ask.saved_files import SavedFileReport, saved_report
    from .ask.scoring import Score
    from .ask.verification import Verified
    from .cache import PagedPrefixCache
    from .errors import (
        BlockStateError,
        CacheArgumentError,
        CacheBusyError,
        ForwardMismatchError,
        NotPortableError,
        OutOfBlocksError,
        PagedCacheError,
        SavedBlocksError,
        UnsupportedModelError,
    )
    from .every_generate import cache_every_generate
    from .jobs.job import BatchResult, BatchSummary, WorkersLostError, generate_all, generate_all_on_ray
    from .prefix_store import PrefixStore
    from .stats import CacheStats, CallStats, RowStats, TierStats
    from .store.saved import Loaded, Saved

# Modules that have all public names; the first two import no torch.
_HOMES = [".errors", ".stats", ".cache", ".prefix_store", ".ask.explanation", ".ask.model_check", ".ask.prefixes"]
_HOMES += [".ask.saved_files", ".ask.scoring", ".ask.verification"]
_HOMES += [".jobs.job", ".every_generate"]

__all__ = ["PagedPrefixCache", "PrefixStore", "__version__"]
__all__ += ["CacheStats", "CallStats", "RowStats", "TierStats"]
__all__ += ["Explanation", "Loaded", "Lookup", "Prefilled", "Saved", "Score", "Verified"]
__all__ += ["ModelReport", "SavedFileReport", "check_model", "saved_report"]
__all__ += ["cache_every_generate"]
__all__ += ["BatchResult", "BatchSummary", "generate_all", "generate_all_on_ray"]
__all__ += ["BlockStateError", "CacheArgumentError", "CacheBusyError", "ForwardMismatchError", "NotPortableError"]
__all__ += ["OutOfBlocksError", "PagedCacheError", "SavedBlocksError", "UnsupportedModelError", "WorkersLostError"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    homes = (import_module(home, __name__) for home in _HOMES)
    value = next(getattr(home, name) for home in homes if hasattr(home, name))
    globals()[name] = value  # the name is found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
