"""What a module of this folder sees of the cache that is asked: the first argument of its functions, which are that cache's methods."""

from typing import Protocol

from ..call.counters import PromptCounters
from ..integration.calls import Calls
from ..integration.current import Current
from ..integration.ranks import Ranks
from ..integration.side_rows import SideRows
from ..prefix_store import PrefixStore
from ..stats import CacheStats


class AskedCache(Protocol):
    """A `PagedPrefixCache`.

    Attributes:
        store: its blocks, and their model.
        cache_salt: the namespace of its blocks; b"": none.
        _counters: of its calls.
        _calls: opens them.
        _current: the rows of the last one.
        _ranks: the processes that share its model.
        _side_rows: runs forwards on rows of their own, so that its rows stay as they are.
        _num_looks: blocks that `verify` has looked at in turn.
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
