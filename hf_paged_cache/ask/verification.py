"""Recomputes cached blocks as `DynamicCache` would (`cache.verify`), to find changes that no digest of a model shows.

Owns which blocks are looked at, and what counts as equal. Takes no block and changes no rows; blocks are held while
they are looked at.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..blocks import BlockHash, HashChain, resumable
from ..blocks.arguments import int_of_at_least
from ..blocks.hashing import digest_behind, tokens_of
from ..blocks.image_tokens import hold_images
from ..blocks.roots import RootFacts
from ..blocks.tokens import TokenIds
from ..errors import UnsupportedModelError
from ..integration.ranks import Ranks
from ..kv.states import LiveStates, States, copied
from ..kv.transfers import read_together
from ..model.layer_streams import streams_of
from ..model.probing import dynamic_cache, eps_computed_in, input_device, run_columns
from ..model.support import has_state, takes
from ..prefix_store import PrefixStore
from .asked import AskedCache
from .stored import put_rows, read_blocks

# Differences, as a share of the largest value, that other lengths and batch sizes may make; eps is that of the coarsest
# type that is computed in. In fp32 on a CPU, an unchanged model gives 1e-6, and one optimizer step at learning rate 1e-6
# gives 4e-4. Kernels of an accelerator add up in another order for another length: on an H100 more than 1e-5 was seen. A
# recurrence rounds otherwise in chunks than step by step: with Qwen3-Next on a CPU 4e-5 was seen.
_MIN_TOLERANCE, _MIN_TOLERANCE_ELSEWHERE, _MIN_TOLERANCE_OF_STATES = 1e-5, 5e-5, 1e-4
_TOLERANCE_IN_EPS = 8
_MOST_TOKENS = 2048  # most tokens of a forward
_END = 1 << 61  # a number larger than that of any name


class Verified(NamedTuple):
    """`Verified` says what `cache.verify` has found.

    Attributes:
        num_blocks: number of blocks that were recomputed and compared.
        num_left: number of other cached blocks that calls find: blocks beyond the number wanted, blocks of rows whose
            padding, adapters or images cannot be had here, and blocks to which layers with a window or a state no
            longer resume.
        differing: for each block that differs, how many tokens are before it, and its own tokens.

    Examples:
        >>> cache.prefill(inputs["input_ids"]).num_tokens
        80
        >>> cache.verify()
        Verified(num_blocks=5, num_left=0, differing=())
    """

    num_blocks: int
    num_left: int
    differing: tuple[tuple[int, tuple[int, ...]], ...]


def verify(cache: AskedCache, num_blocks: int | None = None) -> Verified:
    """Recompute cached blocks and say which differ; if one does, forget everything that is cached of this model.

    This is for weights that change unseen. Calls see torch's counts of writes and optimizer steps, and eight values of
    each tensor; they do not see a few values written through `.data` or numpy. Blocks of this cache's salt are
    looked at. The tokens of each block's sequence run through the model, so any change of a weight that one of them
    passes through shows. Other calls may run meanwhile. Processes that are passed the same tokens (tensor parallelism)
    call `verify` together, and look at blocks that all of them have.

    Effects: none on rows. If a block differs, no call finds the blocks of any tenant from then on, in lower tiers too.

    Cost: a forward of each block's tokens, up to 2,048 at a time, and beside the pool the keys and values of one row.

    Args:
        num_blocks: number of blocks to look at, besides blocks that a window or a state needs before or after them. The
            next look is at the next blocks, until all have had their turn. None: all blocks.

    Raises:
        CacheArgumentError: `num_blocks` is no number of blocks.
        UnsupportedModelError: nothing can be recomputed alone: rotary frequencies depend on length, a dropout is
            active, or processes with prompts of their own share the model.

    Examples:
        >>> cache.prefill(inputs["input_ids"]).num_tokens, cache.verify(2).num_left
        (80, 3)
        >>> weight = model.get_input_embeddings().weight.detach().numpy()
        >>> weight[int(inputs["input_ids"][0, 0])] *= 3  # counted by nobody; each block has that token
        >>> len(cache.verify().differing), cache.lookup(inputs["input_ids"]).num_tokens
        (5, 0)
    """
    if num_blocks is not None:
        int_of_at_least("num_blocks", num_blocks, 1, "blocks, or None for all")
    store, ranks = cache.store, cache._ranks
    digest = store.conditioning.digest()
    _require_comparable(cache)
    known, num_others = _known_blocks(store, digest, cache.cache_salt)
    known = _on_all_ranks(ranks, known, num_blocks)
    look, names = Look(store, cache.cache_salt, known), [*known]
    if num_blocks is not None and num_blocks < len(known):
        first = cache._num_looks % len(known)
        names = (names + names)[first : first + num_blocks]
        cache._num_looks += num_blocks
    with torch.no_grad():
        look.run({*names})
    is_equal = not look.differing
    if ranks.are_several:
        is_equal = bool(ranks.agree("what cached blocks show", {}, [is_equal])[0])
    if not is_equal:
        store.conditioning.suspect()
        with store.blocks.lock:
            store.blocks.tiers.forget_files()
    return Verified(len(look.seen), len(known) - len(look.seen) + num_others, tuple(look.differing))


def _require_comparable(cache: AskedCache) -> None:
    why = cache._calls.opening.asking.why_in_general()
    if cache.store.conditioning.rope.depends_on_length:
        why = "rotary frequencies of this model depend on length"
    elif not cache._ranks.may_run_more:
        why = "processes with prompts of their own share this model, and must run as many forwards"
    if why:
        raise UnsupportedModelError(f"no block can be recomputed alone, so none was: {why}; see reset_prefix_cache()")


class _Known(NamedTuple):
    """`_Known` is a cached block that can be recomputed from its tokens."""

    block_hash: BlockHash
    parent: bytes  # name of the block before it, or of the root
    root: bytes
    first_position: int


def _known_blocks(store: PrefixStore, digest: bytes, salt: bytes) -> tuple[dict[bytes, _Known], int]:
    """Return the blocks that can be recomputed, name -> block, parents first; and how many other blocks calls find.

    Names are the same in all processes; digests are not.
    """
    blocks, roots = store.blocks, store.conditioning.roots
    with blocks.lock:
        blocks.settle()
        hashes = [*blocks.allocator.hashes(salt).values()]
    children: dict[bytes, list[BlockHash]] = {}
    for block_hash in hashes:
        children.setdefault(block_hash.parent, []).append(block_hash)
    known: dict[bytes, _Known] = {}
    num_others = 0
    for root in children.keys() - {block_hash.digest for block_hash in hashes}:
        facts = roots.facts_of(root)
        if facts is None or facts.digest != digest:
            continue  # no call finds blocks of this root
        is_plain = facts == RootFacts(digest, salt, first_position=facts.first_position)
        waiting = [(facts._replace(digest=b"").root() if is_plain else b"", root)]
        while waiting:
            parent, of_parent = waiting.pop()
            for block_hash in children.get(of_parent, ()):
                name = b""
                is_text = not hold_images(tokens_of(block_hash.token_bytes))
                if parent and is_text and digest_behind(of_parent, block_hash.token_bytes) == block_hash.digest:
                    name = digest_behind(parent, block_hash.token_bytes)
                    known[name] = _Known(block_hash, parent, root, facts.first_position)
                else:
                    num_others += 1  # the block, or a block before it, depends on more than tokens
                waiting.append((name, block_hash.digest))
    return known, num_others


def _on_all_ranks(ranks: Ranks, known: dict[bytes, _Known], num_blocks: int | None) -> dict[bytes, _Known]:
    """Return the blocks that every rank has, in one order."""
    if not ranks.are_several:
        return known
    same, waiting = {"the number of blocks": num_blocks or 0}, sorted(known, reverse=True)
    common: list[bytes] = []
    while True:
        mine = int.from_bytes(waiting[-1][:8], "big") >> 3 if waiting else _END
        least, most = ranks.agree("a look at cached blocks", same, [mine, -mine])
        if -most == _END:
            return {name: known[name] for name in common}
        if mine == least < -most:
            waiting.pop()
        elif least == -most:
            common.append(waiting.pop())


class _Sequence(NamedTuple):
    """`_Sequence` is a sequence whose blocks are held."""

    block_ids: Sequence[int]
    token_ids: TokenIds
    first_position: int


class Look:
    """`Look` recomputes blocks, one sequence after the other.

    Each sequence starts at the last place before its wanted blocks where all layers can resume.

    Attributes:
        seen: names of the blocks that were compared.
        differing: see `Verified`.
    """

    def __init__(self, store: PrefixStore, salt: bytes, known: dict[bytes, _Known]) -> None:
        self.seen: set[bytes] = set()
        self.differing: list[tuple[int, tuple[int, ...]]] = []
        self._model = store.model
        self._blocks = store.blocks
        self._salt = salt
        self._known = known
        self._eps = eps_computed_in(store.model)
        self._options = {"logits_to_keep": 1} if takes(store.model, "logits_to_keep") else {}
        most = min([_MOST_TOKENS, *(sight.size - 1 for sight in store.conditioning.sights().values())])
        self._most_tokens = max(self._blocks.block_size, most)  # a window keeps no more tokens of a forward

    def run(self, wanted: set[bytes]) -> None:
        """Recompute and compare these blocks, as far as calls find them."""
        parents = {each.parent for each in self._known.values()}
        for last in [name for name in self._known if name not in parents]:
            path = [last]
            while path[-1] in self._known:
                path.append(self._known[path[-1]].parent)
            path = path[-2::-1]
            if not (wanted - self.seen).isdisjoint(path):
                with self._held(path) as row:
                    self._recompute(row, path, wanted)

    @contextmanager
    def _held(self, path: Sequence[bytes]) -> Iterator[_Sequence]:
        """Hold what calls find of a sequence now: nobody can evict it until the `with` block is left."""
        blocks, first = self._blocks, self._known[path[0]]
        tokens = tokens_of(b"".join(self._known[name].block_hash.token_bytes for name in path))
        chain = HashChain(first.root, blocks.block_size)
        chain.extend(tokens)
        with blocks.lock:
            lease = blocks.leases.take(chain.hashes_of(0, chain.num_full_blocks), self._salt)
            blocks.pool.join_streams()
        try:
            held = len(lease.block_ids) * blocks.block_size
            yield _Sequence(lease.block_ids, tokens[:held], first.first_position)
        finally:
            with blocks.lock:
                blocks.leases.give_back(lease)

    def _recompute(self, row: _Sequence, path: Sequence[bytes], wanted: set[bytes]) -> None:
        size, least = self._blocks.block_size, 2 if self._blocks.states.rules.clamps_one_token else 1
        with self._blocks.lock:
            places = [at for at in range(0, len(row.token_ids) + 1, size) if self._goes_on(row, at)]
        missing = [number * size for number, name in enumerate(path) if name in wanted and name not in self.seen]
        start = max(at for at in places if at <= missing[0])
        end = next((at for at in places if at > missing[-1]), places[-1])
        dynamic, inputs = self._loaded(row, start), self._inputs(row)
        while dynamic is not None and (ahead := [at for at in places if start + least <= at <= end]):
            stop = max([at for at in ahead if at <= start + self._most_tokens], default=ahead[0])
            run_columns(self._model, inputs, dynamic, start, stop, **self._options)
            differ = self._compare(row, dynamic, start, stop)
            if differ is None:
                return
            for at, name, is_other in zip(range(start, stop, size), path[start // size :], differ, strict=False):
                if is_other and name not in self.seen:
                    self.differing.append((at, tuple(row.token_ids[at : at + size])))
                self.seen.add(name)
            start = stop

    def _goes_on(self, row: _Sequence, num_tokens: int) -> bool:
        """Return whether all layers can resume a sequence after `num_tokens` tokens. The store's lock is held."""
        return resumable(self._blocks.groups, row.block_ids, num_tokens) == num_tokens

    def _inputs(self, row: _Sequence) -> dict[str, Tensor]:
        ids = torch.tensor(row.token_ids, dtype=torch.int64, device=input_device(self._model))[None]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if takes(self._model, "position_ids"):
            inputs["position_ids"] = torch.arange(ids.shape[1], device=ids.device)[None] + row.first_position
        return inputs

    def _loaded(self, row: _Sequence, num_tokens: int) -> Any:
        """Make a cache of transformers with the first tokens of a row as stored; None: they are no longer there."""
        stored, dynamic = self._stored(row, 0, num_tokens), dynamic_cache(self._model)
        if stored is None:
            return None
        layers: list[Any] = dynamic.layers
        put_rows(layers, *stored, num_tokens)
        for layer in layers:
            if getattr(layer, "sliding_window", None) == 1:
                layer.record_past = True  # without it, transformers' layer shows all columns, not the newest one
            if getattr(layer, "indexer_keys", None) is not None:
                columns = torch.arange(num_tokens, device=layer.indexer_keys.device)
                layer.indexer_position_ids = (columns + row.first_position).expand(3, 1, -1)
        return dynamic

    def _stored(self, row: _Sequence, start: int, stop: int) -> tuple[dict[int, dict[str, Tensor]], States] | None:
        """Return what layers hold of the tokens `[start, stop)` of a row, and the states after these tokens.

        None: they are no longer there.
        """
        blocks = self._blocks
        with blocks.lock:
            if not self._goes_on(row, stop):
                return None
            if not stop:
                return {}, {}
            held = read_blocks(blocks, row.block_ids, start, stop)
            return held, copied(blocks.states.use(row.block_ids, stop)) if blocks.states else {}

    def _compare(self, row: _Sequence, dynamic: Any, start: int, stop: int) -> list[bool] | None:
        """Return for each block of `[start, stop)` whether it differs; None: a block is no longer there."""
        stored, size, answers = self._stored(row, start, stop), self._blocks.block_size, []
        if stored is None:
            return None
        for index, held in stored[0].items():
            computed = streams_of(dynamic.layers[index])
            for name, old in held.items():
                new = computed[name]
                if num_kept := old.shape[2]:  # a window of 1 shows nothing that is cached
                    answers.append(self._differ(old, new[:, :, -num_kept:], size))
        carried = LiveStates({i: layer for i, layer in enumerate(dynamic.layers) if has_state(layer)}).read()
        for key, states in stored[1].items():
            answers.append(self._differ(states.reshape(1, 1, 1, -1), carried[key].reshape(1, 1, 1, -1), 1))
        differ = [False] * ((stop - start) // size)
        for answer in read_together(answers):  # of a layer with a window, answers are of the last blocks alone
            for number, is_other in enumerate(answer, len(differ) - len(answer)):
                differ[number] = differ[number] or bool(is_other)
        return differ if any(stored) else [True] * len(differ)  # blocks that hold nothing differ

    def _differ(self, stored: Tensor, computed: Tensor, size: int) -> Tensor:
        """Return for each `size` columns of [1, H, columns, D] whether they differ by more than rounding.

        The first group may have fewer columns. Columns may be held in a finer type than they were computed in.
        """
        tolerance = 0.0  # tolerance of integers: token ids that a layer carries
        if computed.is_floating_point():
            least = _MIN_TOLERANCE if computed.is_cpu else _MIN_TOLERANCE_ELSEWHERE
            least = _MIN_TOLERANCE_OF_STATES if self._blocks.states else least
            tolerance = max(least, _TOLERANCE_IN_EPS * max(self._eps, torch.finfo(computed.dtype).eps))
        of_column = torch.stack([(computed - stored).abs().amax((0, 1, 3)), computed.abs().amax((0, 1, 3))]).float()
        difference, scale = (
            torch.nn.functional.pad(of_column, (-of_column.shape[1] % size, 0)).view(2, -1, size).amax(2)
        )
        is_equal: Tensor = difference <= tolerance * scale  # a NaN differs, too
        return ~is_equal
