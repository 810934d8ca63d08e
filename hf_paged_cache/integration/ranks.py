"""Lets the processes over which a model is split (*ranks*) settle a forward, so that all run it alike or none does.

They settle once a prompt, before its first forward, and before each forward outside of `generate`. What one rank
refuses is refused on all, and so are forwards that differ where they must not.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as processes

from ..errors import CacheArgumentError, OutOfBlocksError, PagedCacheError
from ..model.fingerprint import Fingerprint
from ..rows.request import ForwardRequest
from ..store.block_store import BlockStore

# A rank's message has one length and one layout, whatever it is about: a rank that refuses does not know what the
# others are about to settle. [refusal, x and -x of each field, numbers]
_NUM_FIELDS = 6
_NUM_NUMBERS = 128  # numbers settled at once; where there are more, several share a place and get their least
_MOST = 2**62
_MAX_RANKS = 2**20
# A refusal is sent as its place in this list; where ranks refuse for different reasons, the first one counts.
_REFUSALS = (CacheArgumentError, OutOfBlocksError, PagedCacheError)


class Ranks:
    """`Ranks` settles things between the ranks that run the forwards of one cache."""

    def __init__(self, fingerprint: Fingerprint, store: BlockStore) -> None:
        self.is_settled = False  # True: the next forward needs no message, `generate` continues after its prompt
        self._fingerprint, self._store = fingerprint, store

    @property
    def may_run_more(self) -> bool:
        """True if forwards that follow from what is cached may run: only if all ranks can settle them."""
        groups = self._fingerprint.rank_groups
        return not groups or groups[-1].share_inputs

    def agree(self, what: str, same: Mapping[str, object], numbers: Sequence[int] = ()) -> list[int]:
        """Return for each number the least that a rank gives; where ranks have inputs of their own, the number given.

        Where ranks are passed the same tokens, `same` (4 names at most) must be the same on all, too. It raises what
        another rank has refused, or what differs. No lock may be held.
        """
        fields: dict[str, object] = {"what is run": what, "block_size": self._store.block_size, **same}
        places = [_MOST] * _NUM_NUMBERS
        for at, number in enumerate(numbers):
            places[at % _NUM_NUMBERS] = min(places[at % _NUM_NUMBERS], number)
        marks = [_mark(value) for value in fields.values()] + [0] * (_NUM_FIELDS - len(fields))
        _, *least = self._exchange([_MOST, *marks, *(-mark for mark in marks), *places], mine=None)
        lows, highs = least[:_NUM_FIELDS], [-low for low in least[_NUM_FIELDS : 2 * _NUM_FIELDS]]
        if lows != highs:
            num_alike = len(fields) if lows[0] == highs[0] else 2  # if not, the other fields mean different things
            differs = [
                f"{name} ({low} on one, {high} on another)" if isinstance(value, int) else name
                for (name, value), low, high in zip([*fields.items()][:num_alike], lows, highs, strict=False)
                if low != high
            ]
            raise _of_all_ranks(
                CacheArgumentError(
                    "the model is split over processes that must all be passed the same, and these are not the same on "
                    f"all: {', '.join(differs)}; nothing was run"
                )
            )
        places = least[2 * _NUM_FIELDS :]
        return [places[at % _NUM_NUMBERS] for at in range(len(numbers))]

    def settle(
        self, rows: Any, request: ForwardRequest, numbers: Sequence[int] = (), *, is_kept: bool = True
    ) -> Sequence[int]:
        """Settle a forward of rows, of which this rank knows `numbers` tokens; return how many every rank knows.

        Where it `is_kept`, it may reuse and keep something on this rank.
        """
        if not self._fingerprint.rank_groups:
            return numbers
        inputs, limits = request.rows, rows.state.limits
        same = {
            "the token ids": [row.token_ids.tobytes() for row in inputs],
            "the columns, padding or positions": [
                *(rows.n, request.num_new_columns),
                *((row.pad, row.first_position) for row in inputs),
            ],
            "the arguments of generate": [
                *(rows.in_generate, rows.state.is_in_step, sorted(limits.end_of_sequence)),
                *(limits.num_prompt_columns, limits.max_columns, limits.num_rows),
            ],
            "what is asked of the forward": [
                *(request.num_logits_needed, is_kept, request.keep_columns is None, request.may_alias),
            ],
        }
        least = self.agree("a forward", same, numbers)
        self.is_settled = True
        return least

    def settle_resumption(self, num_columns: int, num_new: int) -> None:
        """Settle that a `generate` goes on with rows of so many columns; see `agree`."""
        if self._fingerprint.rank_groups:
            self.agree("a generate that goes on", {"the columns of its rows": num_columns, "new columns": num_new})
            self.is_settled = True

    def tell_refusal(self, error: BaseException, *, always: bool = False) -> None:
        """Tell the other ranks, once, that this rank raises before its forward was settled, so that they raise, too.

        An interrupt is no refusal: it must not wait for anybody. `always`: what was settled is another call's.
        """
        if (self.is_settled and not always) or not isinstance(error, Exception):
            return
        if getattr(error, "is_of_all_ranks", False) or not self._fingerprint.rank_groups:
            return
        kind = next((at for at, each in enumerate(_REFUSALS) if isinstance(error, each)), len(_REFUSALS) - 1)
        _of_all_ranks(error)
        refusal = kind * _MAX_RANKS + processes.get_rank()
        self._exchange([refusal, *[_MOST] * (2 * _NUM_FIELDS + _NUM_NUMBERS)], mine=kind)

    def _exchange(self, sent: list[int], *, mine: int | None) -> list[int]:
        """Return the least of what all ranks send; but for refusals, only ranks that are passed the same tokens count.

        It waits for the other ranks. Where one has refused for another kind of reason than `mine`, it raises on all.
        """
        received = sent
        for ranks in self._fingerprint.rank_groups:
            least = torch.tensor(received, dtype=torch.int64, device=ranks.device)
            processes.all_reduce(least, op=processes.ReduceOp.MIN, group=ranks.group)
            received = least.tolist() if ranks.share_inputs else [int(least[0]), *received[1:]]
        kind, who = divmod(received[0], _MAX_RANKS)
        if received[0] < _MOST and kind != mine:
            raise _of_all_ranks(
                _REFUSALS[kind](f"rank {who} has refused this call, and so do all ranks; the reason stands there")
            )
        return received


def _of_all_ranks(error: Exception) -> Exception:
    """Mark an error that all ranks raise, so that none tells the others of it; return it."""
    error.is_of_all_ranks = True  # type: ignore[attr-defined]
    return error


def _mark(value: object) -> int:
    """Return a number that differs where values do; an integer stands for itself."""
    if isinstance(value, int):
        return int(value)
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "big") >> 2
