"""Owns `PrefixStore`: the long-lived blocks of one model, and what is read of that model once for all its caches."""

import math
from array import array
from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import Literal, NoReturn, Unpack

from torch import Tensor
from transformers import PreTrainedModel

from .blocks.arguments import file_mode
from .errors import CacheArgumentError
from .integration.calls import bytes_of_rows, forget
from .integration.forward_arguments import ArgumentReader
from .integration.hooks import attach
from .integration.images import ImageInputs
from .integration.token_input import are_several, one_sequence
from .model.fingerprint import Fingerprint
from .model.layers import cache_layers, has_keys, has_state, states_of
from .model.support import (
    StateTraits,
    leaves_doubt,
    other_version,
    require_supported,
    unwrapped,
)
from .model.trial import (
    input_device,
    layers_after_a_token,
    measure_bytes_per_token,
    require_continuable,
)
from .rows.graphs import Arena
from .rows.shared import Looks
from .stats import CacheStats
from .store.block_store import BlockStore
from .store.memory_budget import SHARE_OF_A_BUDGET, StateRules
from .store.saved import Loaded, Model, Saved, load_blocks, save_blocks
from .store_options import StoreOptions, StoreSizes, given_sizes, store_options
from .tiers.folder import folder_of, writable_folder
from .tiers.tiers import Tiers


class PrefixStore:
    """`PrefixStore` holds the blocks of one model, shared by any number of caches.

    Args:
        model: a decoder of transformers; bracket and hooks are attached to it. Eleven short forwards try it, once,
            where its structure leaves a doubt (it takes no `position_ids`, for example, or routes tokens to experts),
            or transformers is not the tested version.
        block_size: tokens of a block, at least 1. Prefixes are shared in whole blocks.
        num_blocks: most blocks, one of which is reserved. Layers with a window have as many blocks of their own.
        max_bytes: instead of `num_blocks`, the most bytes of keys, values, snapshots and static rows, as a number or as
            "4GB" or "4GiB". Without either, blocks take at most half of the memory that is free on each device with
            layers of the model (on a host: available, or left of the container's limit), less what other stores of this
            process may still take; that is read after the first forward.
        host_bytes: bytes of pinned host memory, into which evicted blocks go and from which they come back; for models
            on an accelerator.
        disk_folder: folder for evicted blocks that host memory does not keep; in shared memory (/dev/shm), it is host
            memory for a model on a CPU. Blocks with a salt are not written. See docs/save_and_load.md.
        disk_bytes: most bytes of files there, also of other processes' files; None: half of what is free when the store
            is made.
        trust_hooks: True if hooks and wrappers on the model's modules that are neither its own nor a known library's
            treat each token alike, whatever its call. Without it, a call of a model with such hooks reuses and keeps
            nothing.

    Raises:
        UnsupportedModelError: the model's cache cannot be held right; the message names what is in the way.
        CacheArgumentError: a size is no size or is out of range, or both sizes are given.

    Examples:
        >>> store = PrefixStore(model, num_blocks=64)
        >>> teacher, pupil = PagedPrefixCache(store), PagedPrefixCache(store)
        >>> _ = teacher.prefill(inputs["input_ids"])
        >>> pupil.lookup(inputs["input_ids"]).num_tokens
        80
    """

    is_paged_prefix_cache = True  # so that a call that is given the store instead of a cache is refused by name

    def __init__(self, model: PreTrainedModel, **sizes: Unpack[StoreSizes]) -> None:
        options = store_options(**sizes)
        model = unwrapped(model)
        require_supported(model)
        in_doubt = leaves_doubt(model)
        traits = None
        if in_doubt or other_version():
            traits = require_continuable(model, if_it_runs=not in_doubt)
        self.fingerprint = fingerprint = Fingerprint(model, traits, trusts_hooks=options.trust_hooks)
        window_of = {} if fingerprint.rank_groups else fingerprint.windows  # no windows with ranks: see `Ranks`
        layers = {index for index, layer in enumerate(cache_layers(model)) if has_keys(layer)}
        num_blocks, window_share = options.num_blocks, 1.0 if options.num_blocks is not None else SHARE_OF_A_BUDGET
        states, bytes_per_block = _state_rules(model, fingerprint.state_traits), 0
        if states is not None or options.max_bytes is not None:
            shares = dict.fromkeys(window_of, window_share if layers - window_of.keys() else 1.0)
            bytes_per_block = math.ceil(measure_bytes_per_token(model, shares) * options.block_size)
        if options.max_bytes is not None:
            num_bytes = bytes_per_block
            if states is not None:  # as many bytes for snapshots
                num_bytes += states.bytes_beside(num_bytes)
            num_blocks = options.max_bytes // num_bytes
            if num_blocks < 2:
                raise CacheArgumentError(
                    f"max_bytes is {sizes['max_bytes']}, but two blocks of {options.block_size} tokens need "
                    f"{2 * num_bytes} bytes ({math.ceil(2 * num_bytes / 1e5) / 10}MB)"
                )
        self.model = model
        self.blocks = BlockStore(
            options.block_size,
            num_blocks,
            lambda: input_device(model),
            window_of,
            layers,
            window_share,
            states,
            bytes_per_block,
            has_max_bytes=options.max_bytes is not None,
            tiers=_tiers(model, fingerprint, options),
        )
        self.image_inputs = ImageInputs(model)
        self.argument_reader = ArgumentReader(model, carries_states=states is not None, sees_columns=bool(layers))
        self.looks = Looks()
        self.arena = arena = Arena()
        if options.max_bytes is not None:
            arena.most_bytes = partial(self.blocks.budget.bytes_left_of, options.max_bytes)
            self.blocks.budget.bytes_of_static_rows = lambda: arena.num_bytes
        attach(model)

    def reset_prefix_cache(self) -> None:
        """Forget every cached block, also pinned ones, and the rows of calls that are over, on all caches of the store.

        Raises:
            CacheBusyError: a `generate` is running, or rows of plain forwards may resume; nothing has changed.
        """
        forget(self.blocks, None)

    def save(
        self,
        folder: str | PathLike[str],
        prefixes: "Literal['pinned'] | Sequence[int] | Tensor | Sequence[list[int] | Tensor] | None" = None,
        *,
        mode: int | None = None,
    ) -> Saved:
        """Write cached blocks into a folder, from which any process with the same model `load`s them.

        What the folder has is not written again; damaged files are removed. Files hold token ids of prompts, and what
        was computed from them: see docs/security.md. Blocks with a salt are not written, nor blocks that only a lower
        tier has. Calls may run meanwhile.

        Cost: the first time, SHA-256 over all weights, 1 to 3 s a GB; then a copy of the blocks.

        Args:
            folder: folder of the files; it is made if it is not there.
            prefixes: token ids, a list or tensor of [T] or [1, T], or several of them in a list, whose whole cached
                blocks are written; "pinned": blocks that pins hold; None: all blocks.
            mode: permissions of the files, and of the folder if it is made: 0o660 for a group, each of whose members is
                to give it; None: 0o600, the user's own processes.

        Raises:
            NotPortableError: what the model computes cannot be named for another process, such as under a hook.
            CacheArgumentError: `prefixes` are not the token ids of sequences, or `mode` does not name permissions.
            OSError: the folder cannot be written, or is full; files written before are whole.
        """
        wanted = None
        if isinstance(prefixes, str) and prefixes != "pinned":
            which = "token ids of prefixes, such as tokenizer(text).input_ids, 'pinned', or None for all"
            raise CacheArgumentError(f"prefixes is {prefixes[:40]!r}; give {which}")
        if prefixes is not None and not isinstance(prefixes, str):
            given = prefixes if are_several(prefixes) else [prefixes]
            wanted = [array("q", one_sequence(f"prefix {number}", each)) for number, each in enumerate(given)]
        permissions, is_pinned = file_mode("mode", mode), isinstance(prefixes, str)
        return save_blocks(self.blocks, self._model(), folder_of(folder), wanted, pinned=is_pinned, mode=permissions)

    def load(self, folder: str | PathLike[str]) -> Loaded:
        """Read what `save` has written, so that the next call finds it.

        Only blocks are read that a model with the same weights, dtype, settings and code has computed, under the same
        versions of transformers and torch. All of them are checked first. Cost: that of `save`.

        Raises:
            NotPortableError: see `save`.
            CacheArgumentError: there is no such folder.

        Examples:
            >>> cache.prefill(inputs["input_ids"]).num_tokens, cache.store.save(folder).num_blocks
            (80, 5)
            >>> cache.store.reset_prefix_cache()
            >>> cache.store.load(folder).num_blocks, cache.lookup(inputs["input_ids"]).num_tokens
            (5, 80)
        """
        if not folder_of(folder).is_dir():
            raise CacheArgumentError(f"there is no folder {folder_of(folder)}; give one that `save` has written")
        return load_blocks(self.blocks, self._model(), folder_of(folder))

    def _model(self) -> Model:
        """Return the model as it is now, for files."""
        of_model = self.fingerprint
        return Model(identity=of_model.identity(), digest=of_model.digest(), roots=of_model.roots)

    def stats(self) -> CacheStats:
        """Return counts of all calls on this store, of all tenants and collected caches too, and of all blocks now."""
        blocks = self.blocks
        with blocks.lock:
            blocks.settle()
            of_rows = bytes_of_rows([each.rows for each in [*blocks.currents]], [*blocks.running])
            return blocks.stats(blocks.call_totals, b"", self.arena.num_bytes, of_rows, None)

    def check(self) -> None:
        """Prove the invariants of the blocks, or raise BlockStateError with the whole state."""
        with self.blocks.lock:
            self.blocks.settle()
            self.blocks.check()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PrefixStore cannot be copied or pickled: its blocks are shared; build a new one")


def _state_rules(model: PreTrainedModel, traits: StateTraits) -> StateRules | None:
    """Return what the store must know of the states that layers carry; None if no layer carries one."""
    if not any(map(has_state, cache_layers(model))):
        return None
    carriers = [layer for layer in layers_after_a_token(model) if has_state(layer)]
    inputs = [state for layer in carriers for state in states_of(layer, "conv_states")]
    others = [state for layer in carriers for state in states_of(layer, "recurrent_states")]
    return StateRules(
        sum(state.nbytes for state in inputs + others),
        traits.chunk,
        max([traits.num_pads_that_show, *(state.shape[-1] for state in inputs)]),
        traits.clamps_one_token,
        not others,
    )


def _tiers(model: PreTrainedModel, fingerprint: Fingerprint, options: StoreOptions) -> Tiers | None:
    """Make the tiers below the pool, if there are to be any."""
    host_bytes, disk_folder = options.host_bytes, options.disk_folder
    if not host_bytes and disk_folder is None:
        return None
    if fingerprint.rank_groups:
        raise CacheArgumentError(
            "host_bytes or disk_folder is given, and other processes share this model: each would load other blocks; "
            "leave them out"
        )
    if host_bytes and input_device(model).type == "cpu":
        raise CacheArgumentError(
            f"host_bytes is {host_bytes}, but the model is on a CPU, so its blocks lie in host memory already: give "
            "the store a larger max_bytes; or give disk_folder, for a tier on a disk or in shared memory"
        )
    folder = None if disk_folder is None else writable_folder(disk_folder, options.disk_bytes)
    fingerprint.is_shared = folder is not None
    return Tiers(fingerprint.roots, fingerprint.identities, host_bytes, folder)


def store_of(model_or_store: PreTrainedModel | PrefixStore, sizes: StoreSizes) -> PrefixStore:
    """Return the store that is given, or make one of these sizes for the model."""
    if not isinstance(model_or_store, PrefixStore):
        return PrefixStore(model_or_store, **sizes)
    if given := given_sizes(sizes):
        raise CacheArgumentError(f"{' and '.join(given)}: of the store, which is there already; give it to PrefixStore")
    return model_or_store
