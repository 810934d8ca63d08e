"""A look at cached blocks themselves: recompute one and compare, for changes of a model that its digest cannot show.

Owns the turn: each call looks at another block of its hit. A weight that every token passes through is noticed at
once, one row of an embedding when a block that holds its token has its turn.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from ..blocks import BlockTable
from ..call.rows import Origin, Row, Rows
from ..call.scheduled_forward import RowInput
from ..errors import OutOfBlocksError
from ..kv.block_tables import read_source
from ..kv.slot_mapping import RowLayout
from ..kv.states import States
from ..kv.transfers import Transfer, read_together
from ..model.conditioning import Conditioning
from ..model.probing import eps_computed_in
from ..store.block_store import BlockStore
from .ranks import Ranks, tokens_as_bytes
from .side_forward import SideForwards

# Differences that other lengths and batch sizes make, as a share of the largest value; eps is that of the coarsest type
# computed in. In fp32 an unchanged model gives 1e-6, one optimizer step at learning rate 1e-6 gives 4e-4.
_MIN_TOLERANCE = 1e-5
_TOLERANCE_IN_EPS = 8

_Name = TypeVar("_Name")


class Verifier:
    """Recomputes one cached block of a call's hit, in turn.

    Args:
        blocks: where the blocks are.
        conditioning: the model, and whether a shorter forward computes the same.
        side: runs the forward that recomputes.
        ranks: the processes that must run it, too.
    """

    def __init__(self, blocks: BlockStore, conditioning: Conditioning, side: SideForwards, ranks: Ranks) -> None:
        self._blocks = blocks
        self._conditioning = conditioning
        self._side = side
        self._ranks = ranks
        self._turn = 0

    def verify(self, rows: Sequence[RowInput], digest: bytes, *, synced_gpus: bool) -> bool:
        """Whether the block whose turn it is holds what the model computes now; True when there is none to look at.

        None is looked at where processes with prompts of their own must run as many forwards as each other.
        Cost: a forward of one block's tokens, and one wait for its answer.

        Args:
            rows: of the forward that is about to run.
            digest: of the model, of which their roots are.
        """
        if synced_gpus or not self._ranks.may_run_more or self._conditioning.rope.depends_on_length:
            return True  # where rope depends on length, a shorter forward has other frequencies
        if self._ranks.are_several:
            return self._verify_on_all_ranks(rows, digest)
        for new in rows:
            if new.pad and not self._side.takes_positions:
                continue  # a forward without the padding numbers its tokens otherwise
            with ExitStack() as held:
                known = self._hold(held, new)
                spans = self._comparable(known)
                if spans:
                    span = spans[self._turn % len(spans)]
                    self._turn += 1
                    try:
                        return self._is_equal(held, new, known, span, digest)
                    except OutOfBlocksError:
                        return True  # no block is free to compute into
        return True

    def _verify_on_all_ranks(self, rows: Sequence[RowInput], digest: bytes) -> bool:
        """The same, of a block that all ranks have, in the turn that is least; one that disagrees speaks for all."""
        rows = [new for new in rows if self._side.takes_positions or not new.pad]
        same = {"the token ids": tokens_as_bytes([new.token_ids for new in rows])}
        with ExitStack() as held:
            tables = [self._hold(held, new) for new in rows]
            num_hit = [known.num_tokens // self._blocks.block_size for known in tables]
            turn, *num_hit = self._ranks.agree("a look at a cached block", same, [self._turn, *num_hit])
            number = next((number for number, num_blocks in enumerate(num_hit) if num_blocks), None)
            if number is None:
                return True
            self._turn = turn + 1
            try:
                size, index = self._blocks.block_size, turn % num_hit[number]
                span = range(index * size, (index + 1) * size)
                is_equal = self._is_equal(held, rows[number], tables[number], span, digest)
            except OutOfBlocksError:  # on all ranks
                return True
            return bool(self._ranks.agree("what a cached block shows", {}, [is_equal])[0])

    def _hold(self, held: ExitStack, new: RowInput) -> BlockTable:
        """The prefix hit of a row, until `held` is left."""
        with self._blocks.lock:
            table = self._blocks.new_table(new.root, new.salt)
            table.hold_prefix(new.token_ids)

        held.callback(self._free, table)
        return table

    def _free(self, table: BlockTable) -> None:
        with self._blocks.lock:
            table.free()

    def _comparable(self, known: BlockTable) -> list[range]:
        """Tokens of which every layer has what is before them, and what they are compared with; looked at again under the lock.

        One block each. Where layers carry states, it begins behind a snapshot; where they have nothing but states, it ends
        before the next one.
        """
        blocks = self._blocks
        size, states = blocks.block_size, blocks.states
        ends = range(0, known.num_tokens + 1, size)
        if not states:
            resumable = [known.num_resumable_tokens(num_tokens) == num_tokens for num_tokens in ends]
            return [
                range(ends[index], ends[index + 1])
                for index in range(len(ends) - 1)
                if resumable[index] and resumable[index + 1]
            ]
        with blocks.lock:
            places = [at for at in ends if not at or states.has(known.block_ids, at)]
        least = 2 if states.rules.clamps_one_token else 1
        if blocks.windows.layers:  # some have keys and values
            length = -(-least // size) * size
            starts = [at for at in places if known.num_resumable_tokens(at) == at]
            return [range(at, at + length) for at in starts if at + length <= known.num_tokens]
        return [range(*span) for span in pairwise(places) if len(range(*span)) >= least]

    def _is_equal(self, held: ExitStack, new: RowInput, known: BlockTable, span: range, digest: bytes) -> bool:
        """Whether these tokens of a row give what is stored."""
        blocks = self._blocks
        start, stop = span.start, span.stop
        with blocks.lock:
            if any(known.num_resumable_tokens(num_tokens) < num_tokens for num_tokens in (start, stop)):
                return True
            compared = known.fork()  # holds the block meanwhile, also where a window has passed it
            compared.truncate(stop)
            row = Row(known.fork(), 0, new.root, new.first_position)
            row.truncate(start)
            row.num_confirmed = start
            if blocks.states and start:
                if not blocks.states.has(known.block_ids, start):
                    return True
                row.origin = Origin(start, blocks.states.use(known.block_ids, start))
            stored_states: States = {}
            if blocks.states.has(known.block_ids, stop):
                stored_states = blocks.states.use(known.block_ids, stop)
        held.callback(self._free, compared)
        cache = held.enter_context(self._side.sibling(Rows([row], [0], start)))
        tokens = RowInput(new.token_ids[start:stop], 0, new.first_position)
        self._side.run(cache, [tokens], commits=False, digest=digest)
        stored = RowLayout(new.root, 0, known.token_ids, known.block_ids)
        computed = cache.call.rows.distinct[0].layout()
        eps = eps_computed_in(self._side.model)
        transfer, sources = Transfer(), {}
        with blocks.lock:
            layers, window_of = blocks.pool.layer_indices, blocks.windows.window_of
            for window in dict.fromkeys((None, *window_of.values())):
                placed = [blocks.pool.rows_in(window, [layout], start) for layout in (stored, computed)]
                sources[window] = [read_source(rows, start, stop, blocks.block_size, transfer) for rows in placed]
        agree = _agree(eps, stored_states, cache.call.states.live.read()) if stored_states else []
        for layer in layers:
            with blocks.lock:
                states = [blocks.pool.gather(layer, source) for source in sources[window_of.get(layer)]]
            agree += _agree(eps, *states)
        return all(answer == [1] for answer in read_together(agree))


def _agree(eps: float, stored: Mapping[_Name, Tensor], computed: Mapping[_Name, Tensor]) -> list[Tensor]:
    """Whether K/V of a layer, or states, are equal but for rounding; some may be held in a finer type than they were computed in.

    Returns:
        for each of its tensors a boolean, where the tensor is: they are read together.
    """
    eps = max(eps, *(torch.finfo(new.dtype).eps for new in computed.values()))
    tolerance = max(_MIN_TOLERANCE, _TOLERANCE_IN_EPS * eps)
    answers = []
    for name, old in stored.items():
        new = computed[name]
        scale, difference = new.abs().max(), (new - old).abs().max()
        answers.append(difference.float() <= tolerance * scale.float())  # a NaN disagrees, too
    return answers
