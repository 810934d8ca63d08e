"""Runs the prefills that `sharing` plans: forwards of one row each, on further caches of the same store.

Owns when that may be done, and holds what was computed until the rows have found it. Refuses nothing: where prefills
may not be run, do not pay or do not fit, rows are computed as they are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..blocks import BlockTable
from ..blocks.tokens import TokenIds
from ..call.call import Call
from ..call.plan import Groups, group_equal
from ..call.prefix_match import PreviousRows, match_row
from ..call.rows import Row, Rows
from ..call.schedule import (
    FORWARD_COST_ON_ACCELERATOR,
    FORWARD_COST_ON_HOST,
    NOTHING_TO_PREFILL,
    PrefillPlan,
    SharingRow,
    plan_prefills,
)
from ..call.scheduled_forward import ForwardRequest, RowInput
from ..errors import OutOfBlocksError
from ..model.distributed import ranks_must_match
from ..prefix_store import PrefixStore


class Prefiller:
    """Computes once what rows of a forward share, or what one lacks and its neighbours have.

    Args:
        store: the model and its blocks.
        make_cache: a further cache on the store, with the same salt.
    """

    def __init__(self, store: PrefixStore, make_cache: Callable[[], Any]) -> None:
        self._store = store
        self._make_cache = make_cache

    @contextmanager
    def ahead_of(
        self, request: ForwardRequest, call: Call, arguments: Mapping[str, Any], *, in_step: bool
    ) -> Iterator[ForwardRequest]:
        """Run the prefills that pay; until the block is left, nothing of them and of what rows know can be evicted.

        Args:
            arguments: of the forward, by name.
            in_step: `generate` was told that other processes run as many forwards.
        Yields:
            the request, with what was computed for each of its rows.
        """
        if not self._may_run(request, in_step=in_step):
            yield request
            return
        with ExitStack() as held:
            with self._store.blocks.lock:
                self._store.blocks.settle()
                call.rows.commit()
                groups = _group(request, call)
                plan = NOTHING_TO_PREFILL
                if len(groups.members) > 1:
                    rows = self._hold_known(request, call, groups, held)
                    plan = self._plan(rows, request, call, groups)
            if plan.prefills:
                computed = self._run(plan, rows, request, groups.members, arguments, held)
                request = replace(request, prefilled=tuple(computed.get(i, 0) for i in range(len(request.rows))))
            yield request

    def _may_run(self, request: ForwardRequest, *, in_step: bool) -> bool:
        if len(request.rows) == 1 or request.num_new_columns <= self._store.blocks.block_size or not request.may_alias:
            return False
        if request.bypass is not None or request.keep_columns is not None or torch.is_grad_enabled():
            return False
        if self._store.conditioning.rope.depends_on_length:  # a shorter forward has other frequencies
            return False
        return not in_step and not ranks_must_match(self._store.model)

    def _hold_known(self, request: ForwardRequest, call: Call, groups: Groups, held: ExitStack) -> list[SharingRow]:
        """What is known of each distinct row, and held until `held` is left."""
        store, running = self._store.blocks, call.rows.in_batch()
        rows, ended = [], PreviousRows(call.ended)
        for member in groups.members:
            new = request.rows[member]
            before = running[member].table if running else None
            if before is None or not before.num_tokens:
                tokens, table = new.token_ids, match_row(store, new, ended).table
                num_known = table.num_tokens
            else:
                tokens, table = before.token_ids + new.token_ids, BlockTable(store.allocator, new.root)
                num_known = max(table.hold_prefix(tokens), before.num_tokens)
            table.truncate(
                table.num_tokens // store.block_size * store.block_size
            )  # whoever writes the rest need not copy
            held.callback(self._free, table)
            rows.append(SharingRow(new.root, new.pad, tokens, num_known))
        return rows

    def _plan(self, rows: Sequence[SharingRow], request: ForwardRequest, call: Call, groups: Groups) -> PrefillPlan:
        """The prefills that pay; none where the call would not fit after them, so that it is refused at once."""
        store, start = self._store.blocks, call.rows.num_columns
        on_host = store.pool.is_on_host if store.pool.layer_indices else self._store.model.device.type == "cpu"
        stop = start + request.num_new_columns
        plan = plan_prefills(
            rows,
            start=start,
            stop=stop,
            num_needed=request.num_logits_needed,
            block_size=store.block_size,
            forward_cost=FORWARD_COST_ON_HOST if on_host else FORWARD_COST_ON_ACCELERATOR,
        )
        if not plan.prefills or call.limits is None or call.limits.max_columns is None:
            return plan
        needed = -plan.num_shared_blocks
        for number, row in enumerate(rows):
            num_blocks = -(-(max(stop, call.limits.max_columns) - row.pad) // store.block_size)
            num_own = num_blocks - len(row.token_ids) // store.block_size  # of each row equal to this one
            needed += num_blocks - row.num_known // store.block_size + (groups.group_of.count(number) - 1) * num_own
        return plan if needed <= store.num_obtainable_blocks(call) else NOTHING_TO_PREFILL

    def _run(
        self,
        plan: PrefillPlan,
        rows: Sequence[SharingRow],
        request: ForwardRequest,
        members: Sequence[int],
        arguments: Mapping[str, Any],
        held: ExitStack,
    ) -> dict[int, int]:
        """Batch row -> tokens computed for it. Ends early, with nothing lost, where the pool has no room."""
        computed: dict[int, int] = {}
        for number, num_tokens in plan.prefills:
            member = members[number]
            cache = self._make_cache()
            held.callback(cache.reset)
            try:
                tokens = rows[number].token_ids[:num_tokens]
                computed[member] = self._prefill(cache, request.rows[member], tokens, arguments)
            except OutOfBlocksError:
                break
        return computed

    def _prefill(self, cache: Any, new: RowInput, tokens: TokenIds, arguments: Mapping[str, Any]) -> int:
        """Compute a row's leading `tokens`, less what is known of them, on a cache without rows; says how many."""
        blocks, model = self._store.blocks, self._store.model
        pad = 0 if self._store.takes_positions else new.pad  # without positions, a model numbers its columns
        with blocks.lock:
            table = BlockTable(blocks.allocator, new.root)
            known = table.hold_prefix(tokens)
            if known:
                row = Row(table, pad, new.root, new.first_position)
                row.num_confirmed = known
                cache.call.take_over(Rows([row], [0], pad + known))
        if known == len(tokens):
            return 0
        device = arguments["input_ids"].device
        passed_on: dict[str, Any] = {
            name: value for name, value in arguments.items() if isinstance(value, bool | int | float | str)
        }
        ids = [*([0] * pad if not known else ()), *tokens[known:]]
        passed_on |= {"input_ids": torch.tensor([ids], device=device), "past_key_values": cache, "use_cache": True}
        if isinstance(arguments.get("attention_mask"), Tensor):
            mask = torch.tensor([[0] * pad + [1] * len(tokens)], device=device)
            passed_on["attention_mask"] = mask.to(arguments["attention_mask"].dtype)
        if self._store.takes_positions:
            passed_on["position_ids"] = torch.arange(known, len(tokens), device=device)[None] + new.first_position
        if self._store.argument_reader.takes_logits_to_keep:
            passed_on["logits_to_keep"] = 1
        model(**passed_on)
        cache.call.end()
        return len(tokens) - known

    def _free(self, table: BlockTable) -> None:
        with self._store.blocks.lock:
            table.free()


def _group(request: ForwardRequest, call: Call) -> Groups:
    """Rows that are equal so far and in what they bring."""
    alias = call.rows.alias or [0] * len(request.rows)
    return group_equal([(alias[i], new.root, new.pad, new.token_ids.tobytes()) for i, new in enumerate(request.rows)])
