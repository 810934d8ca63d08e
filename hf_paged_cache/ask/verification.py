"""Recomputes cached blocks as `DynamicCache` would (`cache.verify`), to find changes that no digest of a model shows.

Owns which blocks are looked at, and what counts as equal. Takes no block and changes no rows; blocks are held while
they are looked at.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..blocks import Allocation, BlockHash, resumable
from ..blocks.arguments import int_of_at_least
from ..blocks.hashing import digest_behind, tokens_of
from ..blocks.image_tokens import hold_images
from ..blocks.roots import RootFacts
from ..errors import UnsupportedModelError
from ..kv.states import LiveStates, copied
from ..kv.transfers import read_together
from ..model.layers import has_state, streams_of
from ..model.support import takes
from ..model.trial import dynamic_cache, eps_computed_in, input_device, run_columns
from ..prefix_store import PrefixStore
from .asked import AskedCache
from .stored import read_blocks

# Differences, as a share of the largest value, that other lengths and batch sizes may make; eps is that of the coarsest
# type that is computed in. In fp32 on a CPU, an unchanged model gives 1e-6, and one optimizer step at learning rate
# 1e-6 gives 4e-4. Kernels of an accelerator add up in another order for another length: on an H100 more than 1e-5 was
# seen. A recurrence rounds otherwise in chunks than step by step: with Qwen3-Next on a CPU 4e-5 was seen.
_MIN_TOLERANCE, _MIN_TOLERANCE_ELSEWHERE, _MIN_TOLERANCE_OF_STATES = 1e-5, 5e-5, 1e-4
_TOLERANCE_IN_EPS = 8
_MOST_TOKENS = 2048  # most tokens of a forward


class Verified(NamedTuple):
    """`Verified` says what `cache.verify` has found.

    Attributes:
        num_blocks: number of blocks that were recomputed and compared.
        num_left: number of other cached blocks that calls find: blocks beyond the number wanted, blocks of rows whose
            padding, positions, adapters or images cannot be had here, and blocks to which layers with a window or a
            state no longer resume.
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
    looked at. Each block's sequence runs through the model from its first token on, so any change of a weight that one
    of these tokens passes through shows. Other calls may run meanwhile.

    Effects: none on rows. If a block differs, no call finds the blocks of any tenant from then on, in lower tiers too.

    Cost: forwards of the tokens of each cached sequence, up to 2,048 at a time, and beside the pool the keys and values
    of one row.

    Args:
        num_blocks: number of blocks to look at; those before them run, too. The next look is at the next blocks, until
            all have had their turn. None: all blocks.

    Raises:
        CacheArgumentError: `num_blocks` is no number of blocks.
        UnsupportedModelError: nothing can be recomputed alone: rotary frequencies depend on length, a dropout is
            active, or other processes share the model.

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
    store = cache.store
    digest = store.fingerprint.digest()
    _require_comparable(cache)
    known, num_others = _known_blocks(store, digest, cache.cache_salt)
    wanted = [*known]
    if num_blocks is not None and num_blocks < len(known):
        first = cache._num_looks % len(known)
        wanted = (wanted + wanted)[first : first + num_blocks]
        cache._num_looks += num_blocks
    look = Look(store, cache.cache_salt, {*wanted})
    parents = {known[digest].parent for digest in known}
    with torch.no_grad():
        for last in [digest for digest in known if digest not in parents]:
            path = [known[last]]
            while path[-1].parent in known:
                path.append(known[path[-1].parent])
            look.run(path[::-1])
    if look.differing:
        store.fingerprint.suspect()
        with store.blocks.lock:
            store.blocks.tiers.forget_files()
    return Verified(len(look.seen), len(known) - len(look.seen) + num_others, tuple(look.differing))


def _require_comparable(cache: AskedCache) -> None:
    why = cache._calls.opening.asking.why_in_general()
    if cache.store.fingerprint.rope.depends_on_length:
        why = "rotary frequencies of this model depend on length"
    elif cache._ranks.are_several:
        why = "other processes share this model, and must run as many forwards"
    if why:
        raise UnsupportedModelError(f"no block can be recomputed alone, so none was: {why}; see reset_prefix_cache()")


def _known_blocks(store: PrefixStore, digest: bytes, salt: bytes) -> tuple[dict[bytes, BlockHash], int]:
    """Return the blocks that can be recomputed, by digest, parents first; and how many other blocks calls find."""
    blocks = store.blocks
    with blocks.lock:
        blocks.settle()
        hashes = blocks.allocator.hashes(salt).values()
    children: dict[bytes, list[BlockHash]] = {}
    for block_hash in hashes:
        children.setdefault(block_hash.parent, []).append(block_hash)
    known: dict[bytes, BlockHash] = {}
    num_others = 0
    for root in children.keys() - {block_hash.digest for block_hash in hashes}:
        facts = store.fingerprint.roots.facts_of(root)
        if facts is None or facts.digest != digest:
            continue  # no call finds blocks of this root
        is_plain = facts == RootFacts(digest, salt)
        waiting = [root]
        while waiting:
            parent = waiting.pop()
            for block_hash in children.get(parent, ()):
                waiting.append(block_hash.digest)
                is_text = not hold_images(tokens_of(block_hash.token_bytes))
                is_of_tokens = is_text and digest_behind(parent, block_hash.token_bytes) == block_hash.digest
                if is_plain and is_of_tokens and (parent == root or parent in known):
                    known[block_hash.digest] = block_hash
                else:
                    num_others += 1  # the block, or a block before it, depends on more than tokens
    return known, num_others


class Look:
    """`Look` recomputes blocks, one sequence after the other, each from its first token on.

    Attributes:
        seen: digests of the wanted blocks that were compared.
        differing: see `Verified`.
    """

    def __init__(self, store: PrefixStore, salt: bytes, wanted: set[bytes]) -> None:
        self.seen: set[bytes] = set()
        self.differing: list[tuple[int, tuple[int, ...]]] = []
        self._blocks, self._model = store.blocks, store.model
        self._salt, self._wanted = salt, wanted
        self._eps = eps_computed_in(store.model)
        self._options = {"logits_to_keep": 1} if takes(store.model, "logits_to_keep") else {}
        most = min([_MOST_TOKENS, *(window.size - 1 for window in store.fingerprint.windows.values())])
        self._most_tokens = max(self._blocks.block_size, most)  # a window keeps no more tokens of a forward

    def run(self, path: Sequence[BlockHash]) -> None:
        """Recompute a sequence up to its last wanted block, and compare what calls find of it."""
        missing = [n for n, each in enumerate(path) if each.digest in self._wanted and each.digest not in self.seen]
        if not missing:
            return
        size, least = self._blocks.block_size, 2 if self._blocks.states.rules.clamps_one_token else 1
        with self._held(path) as lease:
            places = self._places(lease)
            end = next((at for at in places if at > missing[-1] * size), max(places, default=0))
            dynamic, inputs, start = self._cache(), self._inputs(path), 0
            while ahead := [at for at in places if start + least <= at <= end]:
                stop = max([at for at in ahead if at <= start + self._most_tokens], default=ahead[0])
                run_columns(self._model, inputs, dynamic, start, stop, **self._options)
                differ = self._compare(lease, dynamic, start, stop)
                for number, is_other in enumerate(differ, start // size):
                    self._note(path[number], number * size, is_other=is_other)
                start = stop

    def _note(self, block: BlockHash, num_before: int, *, is_other: bool) -> None:
        if block.digest in self._wanted and block.digest not in self.seen:
            self.seen.add(block.digest)
            if is_other:
                self.differing.append((num_before, tuple(tokens_of(block.token_bytes))))

    @contextmanager
    def _held(self, path: Sequence[BlockHash]) -> Iterator[Allocation]:
        """Hold what calls find of a sequence now: nobody can evict it until the `with` block is left."""
        blocks = self._blocks
        with blocks.lock:
            lease = blocks.leases.take(path, self._salt)
            blocks.pool.join_streams()
        try:
            yield lease
        finally:
            with blocks.lock:
                blocks.leases.give_back(lease)

    def _places(self, lease: Allocation) -> list[int]:
        """Return the numbers of tokens, in order, after which all layers can resume the sequence."""
        size, groups, block_ids = self._blocks.block_size, self._blocks.groups, lease.block_ids
        with self._blocks.lock:
            ends = [number * size for number in range(1, len(block_ids) + 1)]
            return [at for at in ends if resumable(groups, block_ids, at) == at]

    def _cache(self) -> Any:
        """Return a new cache of transformers. Without `record_past`, its windows of one column show all columns."""
        dynamic = dynamic_cache(self._model)
        layers: list[Any] = dynamic.layers
        for layer in layers:
            if getattr(layer, "sliding_window", None) == 1:
                layer.record_past = True
        return dynamic

    def _inputs(self, path: Sequence[BlockHash]) -> dict[str, Tensor]:
        tokens = tokens_of(b"".join(block.token_bytes for block in path))
        ids = torch.tensor(tokens, dtype=torch.int64, device=input_device(self._model))[None]
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if takes(self._model, "position_ids"):
            inputs["position_ids"] = torch.arange(ids.shape[1], device=ids.device)[None]
        return inputs

    def _compare(self, lease: Allocation, dynamic: Any, start: int, stop: int) -> list[bool]:
        """Return for each block of `[start, stop)` whether it differs; nothing if layers no longer resume there."""
        blocks, size, answers = self._blocks, self._blocks.block_size, []
        with blocks.lock:
            if resumable(blocks.groups, lease.block_ids, stop) != stop:
                return []
            held = read_blocks(blocks, lease.block_ids, start, stop)
            states = copied(blocks.states.use(lease.block_ids, stop)) if blocks.states else {}
        for index, of_layer in held.items():
            computed = streams_of(dynamic.layers[index])
            for name, old in of_layer.items():
                if num_kept := old.shape[2]:  # a window of 1 shows nothing that is cached
                    answers.append(self._differ(old, computed[name][:, :, -num_kept:], size))
        carried = LiveStates({i: layer for i, layer in enumerate(dynamic.layers) if has_state(layer)}).read()
        for key, state in states.items():
            answers.append(self._differ(state.reshape(1, 1, 1, -1), carried[key].reshape(1, 1, 1, -1), 1))
        differ = [not held and not states] * ((stop - start) // size)  # blocks that hold nothing differ
        for answer in read_together(answers):  # of a layer with a window, answers are of the last blocks alone
            for number, is_other in enumerate(answer, len(differ) - len(answer)):
                differ[number] = differ[number] or bool(is_other)
        return differ

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
