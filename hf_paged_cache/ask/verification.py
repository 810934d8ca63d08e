"""Recomputes cached sequences as `DynamicCache` would (`cache.verify`), to find changes that no digest shows.

What is cached is read as a call reads it: rows of our own begin with it.
"""

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..blocks import BlockHash, RootFacts
from ..blocks.image_tokens import hold_images
from ..errors import UnsupportedModelError
from ..integration.side_rows import row_of
from ..kv.states import read_states
from ..kv.tensors import read_arrays
from ..model.layers import has_state, streams_of
from ..model.support import takes
from ..model.trial import dynamic_cache, eps_computed_in, input_device, run_columns
from .prompts import AskedCache

# Differences, as a share of the largest value, that other lengths and batch sizes may make; eps is that of the coarsest
# type that is computed in. In fp32 on a CPU, an unchanged model gives 1e-6, and one optimizer step at learning rate
# 1e-6 gives 4e-4. Kernels of an accelerator add up in another order for another length: on an H100 more than 1e-5 was
# seen. A recurrence rounds otherwise in chunks than step by step: with Qwen3-Next on a CPU 4e-5 was seen.
_MIN_TOLERANCE, _MIN_TOLERANCE_ELSEWHERE, _MIN_TOLERANCE_OF_STATES = 1e-5, 5e-5, 1e-4
_TOLERANCE_IN_EPS = 8
_MOST_TOKENS = 2048  # most tokens of a forward
_NUM_ADDED = 2  # tokens run after a sequence: rows begin with all of it, and any model continues after two


class Verified(NamedTuple):
    """`Verified` says what `cache.verify` has found.

    Attributes:
        num_blocks: number of blocks that were recomputed and compared.
        num_left: number of other cached blocks of this salt: of another state of the model, of rows whose padding,
            positions, adapters or images cannot be had here, and blocks to which layers with a window or a state no
            longer resume.
        differing: for each block that differs, how many tokens are before it, and its own tokens.
    """

    num_blocks: int
    num_left: int
    differing: tuple[tuple[int, tuple[int, ...]], ...]


def verify(cache: AskedCache) -> Verified:
    """Recompute cached blocks and say which differ; if one does, forget everything that is cached of this model.

    This is for weights that change unseen: a few values written through `.data` or numpy. Blocks of this cache's salt
    are looked at. Each sequence runs through the model from its first token on, so any change of a weight that one of
    its tokens passes through shows. Other calls may run meanwhile. If a block differs, no call finds the blocks of any
    tenant from then on, in lower tiers too.

    Cost: forwards of the tokens of each cached sequence, up to 2,048 at a time, and beside the pool the keys and values
    of two rows.

    Raises:
        UnsupportedModelError: nothing can be recomputed alone: rotary frequencies depend on length, a dropout is
            active, or other processes share the model.

    Examples:
        >>> cache.prefill(inputs["input_ids"]).num_tokens, cache.verify().num_blocks
        (80, 5)
        >>> weight = model.get_input_embeddings().weight.detach().numpy()
        >>> weight[int(inputs["input_ids"][0, 0])] *= 3  # counted by nobody; each block has that token
        >>> len(cache.verify().differing), cache.lookup(inputs["input_ids"]).num_tokens
        (5, 0)
    """
    store, why = cache.store, cache._calls.why_in_general()
    if store.fingerprint.rope.depends_on_length:
        why = "rotary frequencies of this model depend on length"
    elif store.fingerprint.rank_groups:
        why = "other processes share this model, and must run as many forwards"
    if why:
        raise UnsupportedModelError(f"no block can be recomputed alone, so none was: {why}; see reset_prefix_cache()")
    with store.blocks.lock:
        store.blocks.settle()
        hashes = [*store.blocks.allocator.hashes(cache.cache_salt).values()]
    root = store.fingerprint.roots.of(RootFacts(store.fingerprint.digest(), cache.cache_salt))
    seen = set[bytes]()
    differing = []
    for sequence in _sequences(hashes, root):
        for number, is_other in enumerate(_look(cache, sequence)):
            block = sequence[number]
            if is_other and block.digest not in seen:
                differing.append((number * store.blocks.block_size, tuple(array("q", block.token_bytes))))
            seen.add(block.digest)
    if differing:
        store.fingerprint.num_changes += 1
        with store.blocks.lock:
            store.blocks.forget_tiers()  # other processes are not to find what may have been wrong all along
    return Verified(len(seen), len(hashes) - len(seen), tuple(differing))


def _sequences(hashes: Sequence[BlockHash], root: bytes) -> list[list[BlockHash]]:
    """Return the longest cached sequences of text that begin with this root, as their blocks."""
    known = {block.digest: block for block in hashes if not hold_images(array("q", block.token_bytes))}
    parents = {block.parent for block in known.values()}
    sequences = []
    for digest in known.keys() - parents:
        blocks = [known[digest]]
        while blocks[-1].parent in known:
            blocks.append(known[blocks[-1].parent])
        if blocks[-1].parent == root:
            sequences.append(blocks[::-1])
    return sorted(sequences)


@torch.no_grad()
def _look(cache: AskedCache, sequence: Sequence[BlockHash]) -> list[bool]:
    """Return for each block of a sequence, up to the last one that a call finds, whether it differs."""
    tokens = array("q", b"".join(block.token_bytes for block in sequence))
    tokens.extend(tokens[-1:] * _NUM_ADDED)
    side, size = cache._side_rows, cache.store.blocks.block_size
    rows = side.begin("verify")
    side.run(rows, [row_of(tokens)])
    rows.keep_less(0)
    rows.calls.close(rows)
    num_found = min(rows.state.counts[0].reused_tokens, len(tokens) - _NUM_ADDED)
    if rows.why_bypassed is not None or not num_found:
        return []
    recomputed = _recomputed(cache.store.model, tokens, num_found)
    pairs = []  # what is held, what was computed: [1, H, columns, D] each, and columns of a block
    num_more = len(tokens) - num_found
    for held, layer in zip(rows.layers, recomputed.layers, strict=False):
        computed = streams_of(layer)
        for name, old in streams_of(held).items():
            num_shown = min(old.shape[2], computed[name].shape[2])  # of a layer with a window, the last ones
            if num_shown > num_more:
                shown = slice(-num_shown, -num_more)
                pairs.append((old[:, :, shown], computed[name][:, :, shown], size))
    if rows.states is not None:
        layers = {i: layer for i, layer in enumerate(recomputed.layers) if has_state(layer)}
        carried = read_states(layers)
        states = rows.states.read().items()
        pairs += [(state.reshape(1, 1, 1, -1), carried[key].reshape(1, 1, 1, -1), 1) for key, state in states]
    eps, least = eps_computed_in(cache.store.model), _MIN_TOLERANCE if rows.states is None else _MIN_TOLERANCE_OF_STATES
    answers = [_differ(*pair, eps, least) for pair in pairs]
    differ = [False] * (num_found // size)
    for answer in read_arrays(answers):
        for number, is_other in enumerate(answer, len(differ) - len(answer)):
            differ[number] = differ[number] or bool(is_other)
    return differ


def _recomputed(model: Any, tokens: Sequence[int], num_found: int) -> Any:
    """Return a cache of transformers after these tokens; those after `num_found` run together, as they did in rows."""
    ids = torch.tensor(tokens, dtype=torch.int64, device=input_device(model))[None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if takes(model, "position_ids"):
        inputs["position_ids"] = torch.arange(ids.shape[1], device=ids.device)[None]
    options = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}
    recomputed: Any = dynamic_cache(model)
    for layer in recomputed.layers:
        if getattr(layer, "sliding_window", None) == 1:
            layer.record_past = True  # without it, such a layer of transformers shows all columns
    for start, stop in pairwise([*range(0, num_found, _MOST_TOKENS), num_found, len(tokens)]):
        run_columns(model, inputs, recomputed, start, stop, **options)
    return recomputed


def _differ(stored: Tensor, computed: Tensor, size: int, eps: float, least: float) -> Tensor:
    """Return for each `size` columns, fewer in the first group, of [1, H, columns, D] whether they differ by more than
    rounding. Columns may be held in a finer type than they were computed in.
    """
    tolerance = 0.0  # tolerance of integers: token ids that a layer carries
    if computed.is_floating_point():
        least = least if computed.is_cpu else max(least, _MIN_TOLERANCE_ELSEWHERE)
        tolerance = max(least, _TOLERANCE_IN_EPS * max(eps, torch.finfo(computed.dtype).eps))
    of_column = torch.stack([(computed - stored).abs().amax((0, 1, 3)), computed.abs().amax((0, 1, 3))]).float()
    padded = torch.nn.functional.pad(of_column, (-of_column.shape[1] % size, 0))
    difference, scale = padded.view(2, -1, size).amax(2)
    is_equal: Tensor = difference <= tolerance * scale  # a NaN differs, too
    return ~is_equal
