"""Computes once what rows of a forward share, or what one lacks and its neighbours have, ahead of that forward.

Owns when that may be done, and holds what was computed until the rows have it. Refuses nothing: where it may not be
done, does not pay or does not fit, rows are computed as they are.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ..blocks.tokens import TokenIds
from ..call.admission import would_fit
from ..call.call import Call
from ..call.rows import Row, Rows
from ..call.schedule import (
    FORWARD_COST_ON_ACCELERATOR,
    FORWARD_COST_ON_HOST,
    NOTHING_SHARED,
    SharedPrefixPlan,
    plan_shared_prefixes,
)
from ..call.scheduled_forward import ForwardRequest, RowInput
from ..errors import OutOfBlocksError
from ..model.conditioning import Conditioning
from ..store.block_store import BlockStore
from .ranks import Ranks
from .side_forward import SideForwards


class SharedPrefixes:
    """Plans and runs the shared prefixes of one cache's forwards.

    Args:
        blocks: where they are stored.
        conditioning: the model, and whether rows of other lengths may share.
        side: runs their forwards.
        ranks: the processes that must run as many.
    """

    def __init__(self, blocks: BlockStore, conditioning: Conditioning, side: SideForwards, ranks: Ranks) -> None:
        self._blocks = blocks
        self._conditioning = conditioning
        self._side = side
        self._ranks = ranks

    def plan(self, request: ForwardRequest, call: Call, *, synced_gpus: bool) -> SharedPrefixPlan:
        """The shared prefixes that pay, of the rows that the call has prepared; the store's lock is held.

        None where the call would not fit even so, so that it is refused before anything is computed.

        Args:
            synced_gpus: `generate` was told that other processes run as many forwards.
        """
        if not self.may_run(request, call, synced_gpus=synced_gpus):
            return NOTHING_SHARED
        plan = self.weigh(request, call, [row.table.num_tokens for row in call.rows.distinct])
        stop = call.rows.num_columns + request.num_new_columns
        fits = would_fit(call, stop, plan.num_shared_blocks, len(plan.prefixes))
        return plan if fits else NOTHING_SHARED

    def weigh(self, request: ForwardRequest, call: Call, num_known: Sequence[int]) -> SharedPrefixPlan:
        """The shared prefixes that pay, where they fit. Follows from the request and `num_known`, tokens of each running row."""
        rows, pool = call.rows, self._blocks.pool
        stop = rows.num_columns + request.num_new_columns
        inputs = _inputs(request, rows)
        numbers: dict[bytes, int] = {}  # roots by number: their order is another in each process
        for row in inputs:
            numbers.setdefault(row.root, len(numbers))
        return plan_shared_prefixes(
            [row._replace(root=numbers[row.root].to_bytes(4, "big")) for row in inputs],
            num_known,
            start=rows.num_columns,
            stop=stop,
            num_needed=request.num_logits_needed,
            block_size=self._blocks.block_size,
            forward_cost=FORWARD_COST_ON_HOST if pool.is_on_host else FORWARD_COST_ON_ACCELERATOR,
        )

    @contextmanager
    def computed(
        self, plan: SharedPrefixPlan, request: ForwardRequest, call: Call, arguments: Mapping[str, Any]
    ) -> Iterator[dict[int, int]]:
        """Run the plan; until the block is left, nothing of it can be evicted.

        Args:
            arguments: of the forward, by name.

        Yields:
            row of the batch -> tokens computed for it. Fewer than planned where the pool has no room.
        """
        inputs, members = _inputs(request, call.rows), call.rows.members()
        options = {name: value for name, value in arguments.items() if isinstance(value, bool | int | float | str)}
        num_computed: dict[int, int] = {}
        with ExitStack() as held:
            for number, num_tokens in plan.prefixes:
                row = inputs[number]
                try:
                    computed = self._compute(held, row, row.token_ids[:num_tokens], options)
                except OutOfBlocksError:
                    break
                if computed:
                    num_computed[members[number]] = computed
            yield num_computed

    def may_run(self, request: ForwardRequest, call: Call, *, synced_gpus: bool) -> bool:
        """Whether rows may share at all; never where other processes have prompts of their own."""
        if len(call.rows.distinct) == 1 or synced_gpus or not self._ranks.may_run_more:
            return False
        if request.num_new_columns <= self._blocks.block_size or not request.may_alias:
            return False
        if request.bypass is not None or request.keep_columns is not None:
            return False
        return not self._conditioning.rope.depends_on_length  # a shorter forward has other frequencies

    def _compute(self, held: ExitStack, new: RowInput, tokens: TokenIds, options: Mapping[str, Any]) -> int:
        """Compute leading tokens of a row, less what is known of them, on a sibling cache; says how many."""
        pad = 0 if self._side.takes_positions else new.pad
        if self._ranks.are_several:  # each knows another part of them; what is passed must be the same
            cache = held.enter_context(self._side.sibling())
            self._side.run(cache, [tokens], pad=pad, first_position=new.first_position, options=options)
            return sum(count.computed_tokens for count in cache.call.counters.rows)
        with self._blocks.lock:
            table = self._blocks.new_table(new.root, new.salt)
            row = Row(table, pad, new.root, new.first_position)
            known = row.num_known = row.num_confirmed = row.table.hold_prefix(tokens)
        cache = held.enter_context(self._side.sibling(Rows([row], [0], pad + known) if known else None))
        if known < len(tokens):
            self._side.run(cache, [tokens[known:]], pad=pad, first_position=new.first_position, options=options)
        return len(tokens) - known


def _inputs(request: ForwardRequest, rows: Rows) -> list[RowInput]:
    """Each running row with all of its tokens, those of the forward included."""
    inputs = []
    for row, member in zip(rows.distinct, rows.members(), strict=True):
        new = request.rows[member]
        inputs.append(new._replace(token_ids=row.with_new(new.token_ids)))
    return inputs
