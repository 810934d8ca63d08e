"""Between the hooks and a call: what a forward's arguments and the model's state mean for the rows.

Owns who may use the cache now (one `generate` at a time), the roots of rows, and the request that a forward becomes.
Knows nothing of blocks and of transformers' `Cache`.
"""

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ..blocks import root_hash
from ..call.call import Call
from ..call.call_state import Bracket
from ..call.scheduled_forward import ForwardRequest, RowInput
from ..errors import CacheArgumentError, CacheBusyError
from ..model.support import require_layer_adapters
from ..prefix_store import PrefixStore
from .forward_arguments import ForwardArguments, RunningRow, for_ticket
from .generate_arguments import GenerateArguments
from .shared_prefix import Prefiller
from .verification import Verifier

logger = logging.getLogger("hf_paged_cache")

_MAX_ROOTS = 256  # roots remembered, so that a decode step does not hash them again


class Session:
    """The forwards of one cache, as the hooks report them.

    Args:
        store: the model and its blocks.
        call: what the forwards are announced to.
        salt: part of every root.
        prefiller: computes first, and once, what rows of a forward share.
        verifier: looks at one cached block of a hit a call; None does not.
    """

    def __init__(
        self, store: PrefixStore, call: Call, salt: bytes, prefiller: Prefiller, verifier: Verifier | None
    ) -> None:
        self.records_drafts = False  # drafts will be verified in this call
        self._in_step = False  # with other processes, which run as many forwards
        self._prefiller = prefiller
        self.verifier = verifier
        self._store = store
        self._call = call
        self._salt = salt
        self._open: WeakSet[Bracket] = WeakSet()  # brackets of `generate`, one inside the other, all of one thread
        self._digest = b""  # of the model; read once a `generate`, or at every forward without one
        self._bypass: str | None = None
        self._adapters: list[str] | None = None
        self._roots: dict[tuple[Any, ...], bytes] = {}

    @property
    def is_open(self) -> bool:
        """Whether a `generate` runs on the cache."""
        return len(self._open) > 0

    @contextmanager
    def generating(self, model: Any, given: GenerateArguments) -> Iterator[None]:
        """The span of one `generate`.

        Raises:
            CacheBusyError: another one runs on this cache.
            CacheArgumentError: another model's, or one that asks for a cache of its own.
            UnsupportedModelError: adapters that do more than change layers have been put round the model.
        """
        bracket = Bracket()
        with self._store.blocks.lock:
            self._require_model(model)
            require_layer_adapters(model)
            if given.cache_implementation is not None:
                raise CacheArgumentError(
                    f"cache_implementation={given.cache_implementation!r} asks transformers for a cache of its own; "
                    "leave it out, or leave past_key_values out"
                )
            self._require_mine()
            if len(self._open) and self._call.num_announced:
                raise CacheBusyError(f"a generate call is running on this cache; {_ANOTHER_CACHE}")
            if given.only_new_tokens:
                self._require_fit(given)
            self._call.begin(bracket, given.limits, keep_rows=given.only_new_tokens)
            self._open.add(bracket)
        self.records_drafts, self._in_step = False, given.in_step
        self._digest = b""
        failed = True
        try:
            yield
            failed = False
        finally:
            with self._store.blocks.lock:
                self._open.discard(bracket)
                self._digest, self._in_step = b"", False
                self._call.end(failed=failed)
            self._log()

    def before_forward(self, model: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Announce a forward; returns the arguments that it is to run with."""
        self._require_model(model)
        self._require_mine()
        call, conditioning = self._call, self._store.conditioning
        call.check_not_busy()
        call.roll_back()
        if not self._digest or not self._open:
            self._read_conditions()
        before = call.rows.num_columns
        given = self._store.argument_reader.read(
            arguments,
            [RunningRow(row.pad, row.table.num_tokens, row.first_position) for row in call.rows.in_batch()],
            before,
            in_generate=len(self._open) > 0,
            records_drafts=self.records_drafts,
            is_behind_prompt=call.limits is not None and before >= call.limits.num_prompt_columns,
        )
        regime = b""
        if conditioning.rope.depends_on_length:
            regime = conditioning.rope.at(_max_position(arguments, before + given.num_new_columns))
        rows = self._rows(given, regime)
        bypass = given.bypass or self._bypass
        if self._adapters is not None and len(self._adapters) != len(rows):
            bypass = (
                bypass or f"{len(self._adapters)} adapter names were given for {len(rows)} rows; pass one for each row"
            )
        if self.verifier is not None and not before and bypass is None and self._adapters is None:
            if not self.verifier.verify(self._store, rows):
                conditioning.suspect()
                self._read_conditions()
                rows = self._rows(given, regime)
        request = ForwardRequest(
            rows=rows,
            num_new_columns=given.num_new_columns,
            num_logits_needed=given.num_logits_needed,
            bypass=bypass,
            keep_columns=given.keep_columns,
            may_alias=given.may_alias and bypass is None and self._adapters is None,
        )
        with self._prefiller.ahead_of(request, call, arguments, in_step=self._in_step) as prepared:
            ticket = call.announce(prepared)
        if ticket.start == before and ticket.copies is None:
            return dict(arguments)
        return for_ticket(arguments, ticket, before)

    def after_forward(self, output: Any) -> Any:
        """Confirm the forward; returns what its caller is to get, a row for each that it passed."""
        ticket = self._call.ticket
        self._call.confirm()
        if ticket is not None and ticket.copies is not None:
            copies = torch.tensor(ticket.copies, device=output.logits.device)
            output.logits = output.logits.index_select(0, copies)
        return output

    def root_of_prefix(self, num_tokens: int) -> bytes:
        """The root of a prompt of `num_tokens` tokens without padding, if it were run now. Disturbs no call.

        Raises:
            CacheBusyError: a call runs, and asking would change its rotary frequencies.
        """
        conditioning, regime = self._store.conditioning, b""
        digest = conditioning.digest()
        if conditioning.rope.depends_on_length:
            if any(call.is_running for call in self._store.blocks.holders()):
                raise CacheBusyError("rotary frequencies of this model depend on length; wait until no call is running")
            regime = conditioning.rope.peek(max(0, num_tokens - 1))
        return self._root(digest, 0, 0, regime, "")

    def _read_conditions(self) -> None:
        conditioning = self._store.conditioning
        with self._store.blocks.lock:  # what it remembers of the model is one for all caches
            self._digest = conditioning.digest()
            self._bypass = conditioning.bypass()
            self._adapters = conditioning.adapter_names()

    def _rows(self, given: ForwardArguments, regime: bytes) -> tuple[RowInput, ...]:
        """Each row with its root: what conditions the model, this cache, and where the row's positions start."""
        rows = []
        adapters = self._adapters
        for number, (tokens, pad, first) in enumerate(
            zip(given.token_ids, given.pads, given.first_positions, strict=True)
        ):
            counted_from = 0 if self._store.takes_positions else pad  # without positions, a model numbers its columns
            adapter = adapters[number] if adapters is not None and number < len(adapters) else ""
            root = self._root(self._digest, counted_from, first, regime, adapter)
            rows.append(RowInput(tokens, pad, first, root))
        return tuple(rows)

    def _root(self, digest: bytes, counted_from: int, first: int, regime: bytes, adapter: str) -> bytes:
        key = (digest, counted_from, first, regime, adapter)
        root = self._roots.get(key)
        if root is None:
            if len(self._roots) >= _MAX_ROOTS:
                self._roots.clear()
            root = root_hash(digest, self._salt, regime, adapter.encode(), f"{counted_from} {first}".encode())
            self._roots[key] = root
        return root

    def _require_model(self, model: Any) -> None:
        if model is not self._store.model:
            raise CacheArgumentError(
                f"this cache was built for another model ({type(self._store.model).__name__} elsewhere in memory); build "
                f"one for this {type(model).__name__}: PagedPrefixCache(model)"
            )

    def _require_fit(self, given: GenerateArguments) -> None:
        """Only new tokens must go on exactly where the rows stopped; a mask of ones never reaches the forward."""
        self._call.check_not_busy()
        self._call.roll_back()
        num_held = self._call.rows.num_columns
        if given.num_masked != num_held + given.num_given:
            raise CacheArgumentError(
                f"the attention mask has {given.num_masked} columns, the cache {num_held} and the ids {given.num_given}: pass "
                "the whole prompt, or ids that go on exactly where the rows stopped (the last token generated is not "
                "among them)"
            )

    def _require_mine(self) -> None:
        if any(bracket.thread != threading.get_ident() for bracket in self._open):
            raise CacheBusyError(f"a generate call is running on this cache in another thread; {_ANOTHER_CACHE}")

    def _log(self) -> None:
        if logger.isEnabledFor(logging.INFO):
            rows = [row.frozen() for row in self._call.counts.rows]
            logger.info(
                "reused %d of %d prompt tokens, computed %d: %s",
                sum(row.reused_tokens for row in rows),
                sum(row.prompt_tokens for row in rows),
                sum(row.computed_tokens for row in rows),
                "; ".join(f"row {number}: {row.stopped}" for number, row in enumerate(rows)),
            )


_ANOTHER_CACHE = "use another cache on the same store for this one: PagedPrefixCache(cache.store)"


def _max_position(arguments: Mapping[str, Any], num_columns: int) -> int:
    positions = arguments.get("position_ids")
    return int(positions.max()) if isinstance(positions, Tensor) else num_columns - 1
