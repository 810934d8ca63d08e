"""Owns the errors of this package: every one of them is a `PagedCacheError`. Refuses to know any other module."""

from __future__ import annotations


class PagedCacheError(Exception):
    """`PagedCacheError` is the base of every error raised here on purpose; catch it to tell our refusals from a defect.

    Examples:
        >>> try:
        ...     PagedPrefixCache("no model")
        ... except PagedCacheError as error:
        ...     print(type(error).__name__)
        UnsupportedModelError
    """


class UnsupportedModelError(PagedCacheError):
    """`UnsupportedModelError` is raised when a cache is built for a model or layer type that we cannot hold right.

    Use `DynamicCache` for such a model.

    Examples:
        >>> from transformers import MambaConfig, MambaForCausalLM
        >>> other = MambaForCausalLM(MambaConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1))
        >>> try:
        ...     PagedPrefixCache(other)
        ... except UnsupportedModelError:
        ...     print(check_model(other).is_supported)
        False
    """


class OutOfBlocksError(PagedCacheError):
    """`OutOfBlocksError` is raised when blocks run out, before anything has changed.

    Free tables, ask for less, or give the pool more blocks.

    Examples:
        >>> small = PagedPrefixCache(model, num_blocks=4)
        >>> try:
        ...     small.prefill(list(range(64)))
        ... except OutOfBlocksError:
        ...     print(small.stats().num_cached_blocks)
        0
    """


class CacheBusyError(PagedCacheError):
    """`CacheBusyError` is raised when rows that run, or may resume, are in the way of what is asked, such as a reset.

    It is also raised when two threads run one cache where each must wait.

    Examples:
        >>> import torch
        >>> with torch.no_grad():
        ...     _ = model(inputs["input_ids"], past_key_values=cache)
        >>> try:
        ...     cache.reset_prefix_cache()
        ... except CacheBusyError:
        ...     print("busy")
        busy
    """


class BlockStateError(PagedCacheError):
    """`BlockStateError` is raised when a block is not in the state that an operation needs, such as at a double free.

    The caller then has a defect.

    Examples:
        >>> from hf_paged_cache.blocks.allocator import PrefixCachingBlockAllocator
        >>> allocator = PrefixCachingBlockAllocator(num_blocks=4, block_size=16)
        >>> held = allocator.allocate(num_mutable_blocks=1)
        >>> allocator.free(held)
        >>> try:
        ...     allocator.free(held)
        ... except BlockStateError as error:
        ...     print(error)
        Allocation(num_blocks=0, num_prefix_blocks=0) has ref_count 0: it was freed, or is another allocator's
    """


class CacheArgumentError(PagedCacheError, ValueError):
    """`CacheArgumentError` is raised when an argument is outside what its description allows.

    The message says what was given and what is allowed.

    Examples:
        >>> PagedPrefixCache(model, eviction="fifo")
        Traceback (most recent call last):
        hf_paged_cache.errors.CacheArgumentError: eviction is 'fifo'; give 'reuse' or 'lru'
    """


class NotPortableError(PagedCacheError):
    """`NotPortableError` is raised when keys and values cannot leave their process.

    They depend on something that has no name elsewhere, such as a hook.

    Examples:
        >>> _ = cache.prefill(inputs["input_ids"])
        >>> hook = model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: None)
        >>> try:
        ...     cache.store.save(folder)
        ... except NotPortableError as error:
        ...     print(error)
        __main__.<lambda> hooks or replaces the forward of a LlamaMLP, and what it does cannot be named for another process; take it off
        >>> hook.remove()
    """


class SavedBlocksError(PagedCacheError):
    """`SavedBlocksError` is raised when a file of blocks is damaged, or is not one of ours.

    The message names the file and says what is wrong.

    Examples:
        >>> from pathlib import Path
        >>> from hf_paged_cache.tiers.saved_file import read_saved_file
        >>> path = Path(f"{folder}.safetensors")
        >>> path.write_bytes(b"not one of ours")
        15
        >>> try:
        ...     read_saved_file(path)
        ... except SavedBlocksError as error:
        ...     print(error.args[0].replace(str(path), "PATH"))
        PATH ...
    """


class ForwardMismatchError(PagedCacheError):
    """`ForwardMismatchError` is raised when a forward writes without being announced, or otherwise than announced.

    Run the model through its `__call__`.

    Examples:
        >>> try:
        ...     model.forward(**inputs, past_key_values=cache)
        ... except ForwardMismatchError:
        ...     print("hooks run in model(...) alone")
        hooks run in model(...) alone
    """
