"""Says what the modules of this folder see of a cache: it is the first argument of their functions, its methods."""

from typing import Protocol

from ..call.counters import PromptCounters
from ..integration.calls import Calls
from ..integration.current import Current
from ..integration.ranks import Ranks
from ..integration.side_rows import SideRows
from ..prefix_store import PrefixStore
from ..stats import CacheStats


class AskedCache(Protocol):
    """`AskedCache` is what the modules of this folder see of a `PagedPrefixCache`.

    Attributes:
        store: the cache's blocks, and their model.
        cache_salt: namespace of the cache's blocks; b"": none.
        _counters: counts of the cache's calls.
        _calls: opens the cache's calls.
        _current: rows of the cache's last call.
        _ranks: processes that share the model.
        _side_rows: runs forwards on rows of their own, so that the cache's rows stay as they are.
        _num_looks: number of blocks that `verify` has looked at in turn.
    """

    store: PrefixStore
    cache_salt: bytes
    _counters: PromptCounters
    _calls: Calls
    _current: Current
    _ranks: Ranks
    _side_rows: SideRows
    _num_looks: int

    def stats(self) -> CacheStats: ...
