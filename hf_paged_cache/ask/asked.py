"""Says what the modules of this folder see of a cache: it is the first argument of their functions, its methods."""

from typing import Protocol

from ..call.counters import PromptCounters
from ..integration.calls import Calls
from ..integration.current import Current
from ..integration.ranks import Ranks
from ..integration.side_rows import SideRows
from ..prefix_store import PrefixStore


class AskedCache(Protocol):
    """`AskedCache` is what the modules of this folder see of a `PagedPrefixCache`, which they must not import."""

    store: PrefixStore
    cache_salt: bytes
    _counters: PromptCounters
    _calls: Calls
    _current: Current
    _ranks: Ranks
    _side_rows: SideRows
    _num_looks: int  # number of blocks that `verify` has looked at in turn
