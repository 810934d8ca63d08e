"""What a module of this folder sees of the cache that is asked: the first argument of its functions, which are that cache's methods."""

from typing import Protocol

from ..call.call import Call
from ..integration.current import Current
from ..integration.ranks import Ranks
from ..integration.session import Session
from ..integration.side_rows import SideRows
from ..prefix_store import PrefixStore
from ..stats import CacheStats


class AskedCache(Protocol):
    """A `PagedPrefixCache`.

    Attributes:
        store: its blocks, and their model.
        call: its rows.
        _current: its rows, where calls run on rows of their own.
        _session: what a forward would mean for them now.
        _ranks: the processes that share its model.
        _side_rows: runs forwards on rows of their own, so that its rows stay as they are.
        _num_looks: blocks that `verify` has looked at in turn.
    """

    store: PrefixStore
    call: Call
    cache_salt: bytes
    _session: Session
    _current: Current
    _ranks: Ranks
    _side_rows: SideRows
    _num_looks: int

    def stats(self) -> CacheStats: ...
