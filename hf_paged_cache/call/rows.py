"""The rows of a call: which sequence each runs, which rows are still equal, and the block tables that hold them.

Who changes rows tells the view. The store's lock is held by whoever calls a method here.
Blocks get their hashes in one place, `Rows.commit`; `Call` decides when.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from torch import Tensor

from ..blocks import Allocation, BlockHash, BlockTable
from ..blocks.block_table import forks_in_place_of
from ..blocks.tokens import TokenIds
from ..errors import CacheArgumentError
from ..kv.block_tables import read_source
from ..kv.slot_mapping import RowLayout
from ..kv.states import States
from ..store.block_store import BlockStore


class Origin(NamedTuple):
    """What layers carry after a row's first tokens: one row, never written."""

    num_tokens: int
    states: States


class Row:
    """One running sequence that no other row shares its table with.

    Positions: [0, num_known) found in the pool when the row began | [num_known, num_confirmed) computed by this call |
    [num_confirmed, table.num_tokens) scheduled, not confirmed. Before the first forward nothing is confirmed.
    Of those confirmed, the first `num_trusted` were computed under conditions that were read again and found unchanged.
    """

    __slots__ = (
        "_num_judged",
        "commit_end",
        "first_position",
        "held_from",
        "image_end",
        "index_positions",
        "last_kept",
        "num_confirmed",
        "num_known",
        "num_matched",
        "origin",
        "pad",
        "root",
        "shift",
        "table",
    )

    def __init__(
        self, table: BlockTable, pad: int, root: bytes, first_position: int = 0, shift: int | None = 0
    ) -> None:
        self.table = table
        self.first_position = first_position
        self.shift = shift  # how far images have moved the positions of what follows them; None: not known
        self.pad = pad  # columns of left padding
        self.root = root
        self.num_known = num_tokens = table.num_tokens
        self.num_matched = num_tokens  # that others have committed, held or not: there prompts part
        self.num_confirmed = 0  # what is known counts with the first forward that is confirmed
        self.commit_end: int | None = None  # tokens from here on are never committed; None: all may be
        self.held_from: int | None = None  # tokens from here on are held, and not committed meanwhile, see `HeldSteps`
        self._num_judged = 0
        self.image_end: int | None = None  # tokens up to the end of its last image, as long as that is not kept
        self.last_kept = 0  # tokens after which it got a snapshot, token by token
        self.index_positions: Tensor | None = None  # [3, columns]; by them one model weighs index keys
        self.origin: Origin | None = None  # of a row that does not run: where it may resume, if layers carry states

    def fork(self) -> "Row":
        """A row with the same tokens in the same blocks."""
        return self.forked(self.table.fork())

    def forked(self, table: BlockTable) -> "Row":
        """A row like this, with a fork of its table."""
        forked = Row(table, self.pad, self.root, self.first_position, self.shift)
        forked.num_known, forked.num_confirmed, forked.commit_end = self.num_known, self.num_confirmed, self.commit_end
        forked.num_matched, forked.index_positions = self.num_matched, self.index_positions
        forked._num_judged, forked.held_from, forked.origin = self._num_judged, self.held_from, self.origin
        return forked

    def with_new(self, tokens: TokenIds) -> TokenIds:
        """The row's tokens with a forward's new ones, some of which its table may have already."""
        return self.table.token_ids[: self.num_confirmed] + tokens

    def unseen(self, tokens: TokenIds) -> TokenIds:
        """Of a forward's new tokens, those that the row's table does not have yet."""
        num_held = self.table.num_tokens - self.num_confirmed
        return tokens[num_held:] if num_held else tokens

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens. Interrupted, it leaves tokens that do not count as confirmed."""
        self.num_confirmed = min(self.num_confirmed, num_tokens)
        self.num_known = min(self.num_known, num_tokens)
        self.num_matched = min(self.num_matched, num_tokens)
        self._num_judged = min(self._num_judged, num_tokens)
        if self.last_kept > num_tokens:
            self.last_kept = 0
        if self.origin is not None and self.origin.num_tokens > num_tokens:
            self.origin = None
        if num_tokens < self.table.num_tokens:
            self.table.truncate(num_tokens)
        if self.commit_end is not None and self.commit_end > num_tokens:
            self.commit_end = None
        if self.held_from is not None and self.held_from >= num_tokens:
            self.held_from = None
        if self.image_end is not None and self.image_end > num_tokens:
            self.image_end = None

    def stop_commits(self, position: int) -> None:
        """Tokens from `position` on will not be committed."""
        if self.commit_end is None or position < self.commit_end:
            self.commit_end = position

    @property
    def num_tokens(self) -> int:
        """Tokens that its table has."""
        return self.table.num_tokens

    @property
    def num_trusted(self) -> int:
        """Tokens that were known, or computed under conditions that held."""
        return max(self.num_known, self._num_judged)

    @property
    def may_commit(self) -> bool:
        """Whether tokens after those trusted may ever be committed."""
        return self.commit_end is None or self.commit_end > self.num_trusted

    def trust(self) -> None:
        """All confirmed tokens were computed under the conditions of the row's root."""
        self._num_judged = self.num_confirmed

    @property
    def num_true_tokens(self) -> int:
        """The confirmed tokens whose keys and values are what root and tokens say; they may be committed."""
        num_tokens = self.num_confirmed
        if self.commit_end is not None and self.commit_end < num_tokens:
            num_tokens = self.commit_end
        if self.held_from is not None and self.held_from < num_tokens:
            num_tokens = self.held_from
        return num_tokens

    @property
    def true_token_ids(self) -> TokenIds:
        """A copy of those tokens."""
        return self.table.token_ids[: self.num_true_tokens]

    def layout(self) -> RowLayout:
        """What a view must know."""
        return RowLayout(self.root, self.pad, self.table.token_ids, self.table.block_ids)


class Rows:
    """The rows of one call, in the order of the batch. Equal rows of a prompt are *aliases*: one `Row` stands for them.

    Attributes:
        distinct: the rows that run.
        alias: batch row -> index into `distinct`; the first rows of each come in order.
        num_columns: confirmed columns, padding included.
        group: batch row -> prompt row it was forked from; equal for rows that share their first `shared_columns`.
        committed: hashes of blocks that were committed, or got a snapshot, before anybody looked whether the conditions had held.
        leaving: rows whose blocks are being given back; some are left where an interrupt ended that.
    """

    __slots__ = ("alias", "committed", "distinct", "group", "leaving", "num_columns", "shared_columns")

    def __init__(self, distinct: list[Row], alias: list[int], num_columns: int) -> None:
        self.distinct = distinct
        self.alias = alias
        self.num_columns = num_columns
        self.group = list(alias)
        self.shared_columns = 0
        self.committed: list[BlockHash] = []
        self.leaving: list[Row] = []

    def __len__(self) -> int:
        """Rows of the batch."""
        return len(self.alias)

    def allocations(self) -> list[Allocation]:
        """Who holds the rows' blocks."""
        return [row.table.allocation for row in self.distinct]

    def block_ids(self) -> set[int]:
        """The blocks that the rows hold."""
        return {block_id for row in self.distinct for block_id in row.table.block_ids}

    @property
    def is_aliased(self) -> bool:
        """Whether a `Row` stands for more than one row of the batch."""
        return len(self.distinct) < len(self.alias)

    def in_batch(self) -> list[Row]:
        """Batch row -> the `Row` that stands for it."""
        return [*map(self.distinct.__getitem__, self.alias)]

    def end(self) -> None:
        """Commit what is full and give all blocks back, without a call: its cache is gone.

        Where the cyclic collector found it, allocations count as collected before the cache's finalizer runs: then the
        allocator has taken these blocks back already.
        """
        self.distinct = [row for row in self.distinct if not row.table.allocation.is_freed]
        self.roll_back()
        self.distrust()
        self.commit()
        self.free()

    def layouts(self) -> list[RowLayout]:
        """What a view must know, of the rows that run."""
        return [row.layout() for row in self.distinct]

    def known_columns(self) -> list[int]:
        """Running row -> leading columns that are padding, or in the pool."""
        return [row.pad + row.table.num_tokens for row in self.distinct]

    def members(self) -> list[int]:
        """Running row -> the first batch row it stands for."""
        if len(self.distinct) == len(self.alias):
            return [*range(len(self.alias))]
        return [self.alias.index(number) for number in range(len(self.distinct))]

    def extend(self, other: "Rows") -> None:
        """More rows, that stand at the same column. No aliases."""
        self.distinct = [*self.distinct, *other.distinct]
        self.alias = self.group = list(range(len(self.distinct)))
        self.shared_columns = 0

    def select(self, sources: Sequence[int], alias: Sequence[int] | None = None) -> tuple[list[int], int]:
        """Running row `i` continues as batch row `sources[i]`, in a fork where that row resumes elsewhere, too; others are freed.

        Args:
            alias: of each batch row, which of these rows runs for it from here on; None: each runs for itself.

        Returns:
            new running row -> old running row, and how many leading columns it shares at least with what was in its place.
        """
        if self.is_aliased:
            self.group, self.shared_columns = list(self.alias), self.num_columns
        chosen = range(len(self.alias)) if alias is not None else sources
        group = [self.group[source] for source in chosen]
        origins, old, taken = [self.alias[source] for source in sources], self.distinct, set[int]()
        distinct, repeated = [old[origin] for origin in origins], []
        for number, origin in enumerate(origins):
            if origin in taken:
                repeated.append(number)
            taken.add(origin)
        freed = [row.table for number, row in enumerate(old) if number not in taken]
        shared_columns = self.shared_columns if group == self.group else 0
        new_alias = list(range(len(sources)) if alias is None else alias)
        with forks_in_place_of([distinct[number].table for number in repeated], freed) as tables:
            for number, table in zip(repeated, tables, strict=True):
                distinct[number] = distinct[number].forked(table)
            self.distinct, self.alias, self.group = distinct, new_alias, group
        return origins, shared_columns

    def crop(self, num_columns: int) -> None:
        """Keep the first `num_columns` columns."""
        for row in self.distinct:
            row.truncate(max(0, num_columns - row.pad))
            row.pad = min(row.pad, num_columns)
        self.num_columns = min(self.num_columns, num_columns)
        self.shared_columns = min(self.shared_columns, num_columns)

    def roll_back(self) -> None:
        """Take scheduled tokens, and columns of padding, back."""
        for row in self.distinct:
            row.truncate(max(0, self.num_columns - row.pad))
            row.pad = min(row.pad, self.num_columns)

    def confirm(self, num_columns: int) -> None:
        """All columns up to `num_columns` are written. Interrupted, it leaves what `roll_back` takes back."""
        for row in self.distinct:
            row.num_confirmed = num_columns - row.pad
        self.num_columns = num_columns

    def release_passed(self) -> None:
        """A forward of several columns is over: what only that had to read may go, where layers have windows."""
        for row in self.distinct:
            row.table.release_passed()

    def require_resumable(self, num_columns: int) -> None:
        """Raises CacheArgumentError unless every layer has what it must read to resume from `num_columns` columns."""
        for row in self.distinct:
            num_tokens = max(0, num_columns - row.pad)
            if row.table.num_resumable_tokens(num_tokens) < num_tokens:
                raise CacheArgumentError(
                    f"cannot crop to {num_columns} columns: layers with a window no longer hold what is before them. After "
                    "activate_past_recording() what the last forward appended can be taken back; else reset()"
                )

    def commit(self) -> None:
        """Give every full block of confirmed tokens its hash: when the next forward is scheduled, rows fork, or their call ends.

        So a draft that `crop` takes back was never found by anybody. A decode step commits where a block is full.
        """
        for row in self.distinct:
            num_tokens = row.num_true_tokens
            hashes = row.table.commit_full_blocks(num_tokens)
            if hashes and row.num_trusted < num_tokens:
                self.committed += hashes

    @property
    def are_trusted(self) -> bool:
        """Whether nothing confirmed waits for a look at its conditions."""
        return not self.committed and all(
            row.num_trusted >= row.num_confirmed or not row.may_commit for row in self.distinct
        )

    @property
    def may_commit(self) -> bool:
        """Whether it matters if the conditions hold for what is computed: some of it may be committed, or was."""
        return bool(self.committed) or any(row.may_commit for row in self.distinct)

    def trust(self) -> None:
        """The conditions have held for all that is confirmed."""
        for row in self.distinct:
            row.trust()
        self.committed = []

    def distrust(self) -> None:
        """They have not, for what is not trusted: it is not committed. What was, the caller lets the store forget."""
        for row in self.distinct:
            if row.num_trusted < row.num_confirmed:
                row.stop_commits(row.num_trusted)
        self.committed = []

    def free(self) -> None:
        """Give all blocks back. Interrupted, it goes on when it is called again."""
        self.alias = []
        self.leaving += self.distinct
        self.distinct = []  # from here on nobody uses the rows
        while self.leaving:
            table = self.leaving[-1].table
            if not table.allocation.is_freed:
                table.free()
            self.leaving.pop()  # last: nobody else knows the table

    def fork(self) -> "Rows":
        """The same rows with forked tables."""
        forked = Rows([row.fork() for row in self.distinct], list(self.alias), self.num_columns)
        forked.group, forked.shared_columns = list(self.group), self.shared_columns
        return forked


class Groups(NamedTuple):
    """Rows put together by equality; group numbers follow the order of first members, so `members[g] >= g`."""

    members: list[int]  # group -> its first row
    group_of: list[int]  # row -> its group


def group_equal(keys: Sequence[Hashable]) -> Groups:
    """Group rows with equal keys.

    Examples:
        >>> group_equal(["a", "b", "a"])
        Groups(members=[0, 1], group_of=[0, 1, 0])
    """
    numbers: dict[Hashable, int] = {}
    members: list[int] = []
    group_of: list[int] = []
    for row, key in enumerate(keys):
        number = numbers.setdefault(key, len(members))
        if number == len(members):
            members.append(row)
        group_of.append(number)
    return Groups(members, group_of)


def gather_rows(store: BlockStore, layer_idx: int, rows: Rows, start: int = 0) -> dict[str, Tensor]:
    """name -> [R, H, columns, D], contiguous: a copy of what the pool holds of a layer's rows, in the order of the batch.

    All columns from `start` on, or in a layer with a window those of them that the next token sees.
    """
    pool, sight, stop = store.pool, store.windows.sight_of.get(layer_idx), rows.num_columns
    start = start if sight is None else max(start, sight.handed_from(stop))
    layouts = pool.rows_in(sight, [row.layout() for row in rows.in_batch()], start)
    gathered = pool.gather(layer_idx, read_source(layouts, start, stop, pool.block_size))
    return {name: states.contiguous() for name, states in gathered.items()}
