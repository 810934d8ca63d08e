"""A prefix cache for `model.generate`: `PagedPrefixCache` keeps the keys and values of what was generated before and reuses them.

Owns the public names, and nothing else. They are resolved when they are first used (PEP 562), so `import hf_paged_cache` imports
neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .cache import PagedPrefixCache
    from .errors import (
        BlockStateError,
        CacheArgumentError,
        CacheBusyError,
        ForwardMismatchError,
        OutOfBlocksError,
        PagedCacheError,
        PoolArgumentError,
        UnsupportedModelError,
    )
    from .model_check import ModelReport, check_model
    from .prefix_store import PrefixStore
    from .scoring import Score
    from .stats import CacheStats, CallStats, RowStats

_HOME = {  # public name -> the module that defines it; all others are errors
    "PagedPrefixCache": ".cache",
    "PrefixStore": ".prefix_store",
    "check_model": ".model_check",
    "ModelReport": ".model_check",
    "Score": ".scoring",
    "CacheStats": ".stats",
    "CallStats": ".stats",
    "RowStats": ".stats",
}

__all__ = [
    "BlockStateError",
    "CacheArgumentError",
    "CacheBusyError",
    "CacheStats",
    "CallStats",
    "ModelReport",
    "OutOfBlocksError",
    "PagedCacheError",
    "PagedPrefixCache",
    "PoolArgumentError",
    "PrefixStore",
    "RowStats",
    "Score",
    "ForwardMismatchError",
    "UnsupportedModelError",
    "__version__",
    "check_model",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME.get(name, ".errors"), __name__), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
