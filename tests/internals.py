"""What tests reach inside the package, in one place: a rename there changes this file alone.

All else is asked as a user asks it: outputs against `DynamicCache`, `last_call`, `stats()` and `check()`.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_paged_cache import PagedPrefixCache, PrefixStore
from hf_paged_cache.ask.scoring import score_contexts as score_contexts
from hf_paged_cache.attention import backends, causal
from hf_paged_cache.blocks import HashChain, PrefixCachingBlockAllocator
from hf_paged_cache.call import keep as call_keep
from hf_paged_cache.integration import ambient, chunked_prompt, opening, shared_prefill
from hf_paged_cache.integration.calls import Calls
from hf_paged_cache.model.fingerprint import Fingerprint
from hf_paged_cache.model.rope import RopeRegime
from hf_paged_cache.rows import moves
from hf_paged_cache.rows import states as rows_states
from hf_paged_cache.rows.graphs import Arena
from hf_paged_cache.rows.ids import IdsStream
from hf_paged_cache.rows.layers import Group, RowsLayer, WindowLayer
from hf_paged_cache.rows.rows import Rows
from hf_paged_cache.store import memory_budget, tier_load
from hf_paged_cache.store.block_store import BlockStore
from hf_paged_cache.store.memory_budget import MemoryBudget, StateRules
from hf_paged_cache.tiers.saved_file import encoded
from hf_paged_cache.tiers.tiers import Tiers

# What a compiled graph meets of ours.
WRITE_OUTSIDE_GRAPHS = "_write_outside_graphs"


def tokens_of_rows(cache: PagedPrefixCache) -> list[list[int]]:
    """What ran in the rows of the last call."""
    rows = cache._current.rows
    return [] if rows is None else [tokens.tolist() for tokens in rows.token_ids()]


def are_bypassed(cache: PagedPrefixCache) -> bool:
    """Whether the rows of the last call run, from here on, on transformers' own layers."""
    rows = cache._current.rows
    return rows is not None and rows.why_bypassed is not None


def ran_on(output: Any, cache: PagedPrefixCache) -> bool:
    """Whether a `generate` ran on a cache: it returns that, or the rows of its call."""
    past = output.past_key_values
    handle = getattr(past, "handle", None)
    return past is cache or (handle is not None and handle() is cache)


def held_tensors(
    cache_or_store: PagedPrefixCache | PrefixStore, layers: Collection[int] | None = None
) -> Iterator[Tensor]:
    """The tensors of the pool: of each layer, or of some, its keys and its values."""
    for (layer_idx, _), held in _blocks(cache_or_store).pool.named().items():
        if layers is None or layer_idx in layers:
            yield held


def split_everywhere(patch: pytest.MonkeyPatch) -> None:
    """Rows read once what they share, and a forward is one causal square, wherever they can, whatever that costs."""
    patch.setattr(backends, "LAUNCH_BYTES", {})
    patch.setattr(backends, "_OTHER_LAUNCH_BYTES", 0)
    patch.setattr(backends, "_OTHER_FUSED_BYTES", 0)
    patch.setattr(causal, "MIN_COLUMNS", 0)
    patch.setattr(causal, "MIN_NEW", 0)


def capture_everywhere(patch: pytest.MonkeyPatch) -> None:
    """Whatever may be captured is, whatever that takes."""
    patch.setattr(Arena, "pays", lambda *_: True)


def note_served(patch: pytest.MonkeyPatch, module: ModuleType) -> list[bool]:
    """Of each attention that is asked of what a module of ours left lazy, whether it was served."""
    asked: list[bool] = []
    attend = module._LayerReads.attend

    def noting(*args: Any) -> Any:
        result = attend(*args)
        asked.append(result is not None)
        return result

    patch.setattr(module._LayerReads, "attend", noting)
    return asked


def zero_blocks(cache_or_store: PagedPrefixCache | PrefixStore, layers: Collection[int] | None = None) -> None:
    """Put zeros in place of all keys and values held, of rows too: whatever is reused from here on is zeros.

    What is computed from here on is stored and read as always, so a call that reuses nothing stays right.

    Args:
        layers: in these alone.
    """
    for tensor in held_tensors(cache_or_store, layers):
        tensor.zero_()
    for current in _blocks(cache_or_store).currents:
        rows = current.rows
        for layer in () if rows is None or rows.why_bypassed is not None else rows.layers:
            if layer.held is not None and (layers is None or layer.layer_idx in layers):
                for states in layer.held:
                    states.zero_()
        if rows is not None:
            for tensor, _ in () if rows.shared is None else (part for held in rows.shared.segments for part in held):
                tensor.zero_()
            rows.note_writes()


def zero_window_blocks(cache_or_store: PagedPrefixCache | PrefixStore) -> set[int]:
    """As `zero_blocks`, in the tensors of the windows' groups alone; the layers that these hold."""
    groups = _blocks(cache_or_store).pool.groups
    layers = {layer_idx for name, group in groups.items() if name != "blocks" for layer_idx, _ in group.named()}
    zero_blocks(cache_or_store, layers)
    return layers


def lose_window_blocks(cache: PagedPrefixCache, block_ids: Collection[int]) -> None:
    """Take the window blocks of blocks that nobody holds, as for another sequence."""
    for group in _blocks(cache).windows:
        group.drop(block_ids)


def held_states(cache_or_store: PagedPrefixCache | PrefixStore) -> Iterator[Tensor]:
    """The tensors of all snapshots, and of what layers carry of rows that run or have."""
    store = _blocks(cache_or_store)
    for states in store.snapshots._contents.values():
        yield from states.values()
    for current in store.currents:
        if current.rows is not None and current.rows.states is not None:
            yield from current.rows.states.read().values()


def zero_states(cache_or_store: PagedPrefixCache | PrefixStore) -> None:
    """Put zeros in place of all states held. Keys and values stay."""
    for tensor in held_states(cache_or_store):
        tensor.zero_()


def blocks_of_the_last_row(cache: PagedPrefixCache) -> list[int]:
    """The blocks that hold the tokens of the one row of the last call."""
    assert cache._current.rows is not None
    (tokens,), (prompt,) = cache._current.rows.token_ids(), cache._current.rows.prompts
    chain = HashChain(prompt.root, cache.store.blocks.block_size, tokens)
    return cache.store.blocks.allocator.match_prefix(chain.hashes_of(), cache.cache_salt)


def state_rules(store: PrefixStore) -> StateRules | None:
    """What a store heeds of states; None where layers carry none."""
    return store.blocks.rules if store.blocks.has_states else None


def num_blocks_in_use(store: PrefixStore) -> int:
    """As it is now: `stats()` first takes back what collected caches left."""
    return store.blocks.allocator.num_blocks_in_use


def _blocks(cache_or_store: PagedPrefixCache | PrefixStore) -> BlockStore:
    blocks: BlockStore = getattr(cache_or_store, "store", cache_or_store).blocks
    return blocks


def reused_of_chunks(num_tokens: int) -> int:
    """What a call in chunks reuses, of so many: before transformers 5.23 none, and the bits are the same."""
    return num_tokens if chunked_prompt.SLICES_CHUNKS else 0


def spoil_room_before_each_write(patch: pytest.MonkeyPatch, value: float, counts: list[int]) -> None:
    """Write `value` into all columns of a call's rows that hold nothing, layer by layer; gets how many numbers."""
    update = RowsLayer.update

    def spoiling(layer: RowsLayer, *states: Any, **more: Any) -> Any:
        for tensor in layer.held or ():
            empty = tensor.data[:, :, layer.n - layer.base :]  # torch counts no write of ours
            empty.fill_(value)
            counts.append(empty.numel())
        return update(layer, *states, **more)

    patch.setattr(RowsLayer, "update", spoiling)


def depends_on_length(model: nn.Module) -> bool:
    """Whether rotary frequencies do."""
    return RopeRegime(model.modules()).depends_on_length


def layer_write(cache: PagedPrefixCache) -> tuple[type, str]:
    """What every layer calls to store its keys and values."""
    have_windows = len(cache.store.fingerprint.windows) == len(cache.layers)
    return (WindowLayer if have_windows else RowsLayer), "update"


# Where a call is made to fail: functions of modules, and methods.
FAULT_POINTS: list[tuple[Any, str]] = [
    *((Calls, name) for name in ("begin", "open", "confirm", "close", "keep")),
    *((Calls, name) for name in ("read", "with_roots", "is_same")),
    *((opening, name) for name in ("run_ahead", "fill")),
    *((Rows, name) for name in ("before_forward", "after_forward", "begin", "note_look")),
    (moves, "apply"),
    (Group, "take"),
    (RowsLayer, "update"),
    (IdsStream, "note"),
    *((PrefixCachingBlockAllocator, name) for name in ("allocate", "allocate_immutable", "mark_computed", "free")),
    (MemoryBudget, "make_room"),
]

# Where a snapshot takes memory: a module, and the name of its function.
SNAPSHOT_COPIES = [(call_keep, "copied"), (rows_states, "copied"), (rows_states, "to_device")]


@contextmanager
def failing_layer(cache: PagedPrefixCache, layer_idx: int, error: BaseException) -> Iterator[None]:
    """Raise where that layer writes more than a decode step does."""

    def fail_in_rows(layer: RowsLayer, keys: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if layer.layer_idx == layer_idx and keys.shape[2] > 1:
            raise error
        return update(layer, keys, *args, **kwargs)

    kind = WindowLayer if layer_idx in cache.store.fingerprint.windows else RowsLayer
    update = kind.update
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "update", fail_in_rows)
        yield


def failing_forward(
    model: nn.Module, number: int, error: BaseException, *, in_any_layer: bool = False
) -> AbstractContextManager[None]:
    """Raise where the forward of that number, counted from 1, comes to the middle layer.

    Args:
        in_any_layer: the number counts layers of forwards instead, each as often as one comes to it.
    """
    lists = [part for part in model.modules() if isinstance(part, nn.ModuleList) and len(part)]
    layers = next(
        (part for part in lists if _is_decoder(model, part)), lists[0]
    )  # layers that run in turns are in several
    return failing_modules(layers if in_any_layer else [layers[len(layers) // 2]], number, error)


@contextmanager
def failing_modules(modules: Iterable[nn.Module], number: int, error: BaseException) -> Iterator[None]:
    """Raise at the call of that number, counted from 1, of any of these modules.

    No hook, which would be another condition of keys and values: the call of the module's type is replaced.
    """
    targets, countdown = {id(module): type(module) for module in modules}, [number]

    def failing(call: Any) -> Any:
        def failing_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if id(module) in targets:
                countdown[0] -= 1
                if not countdown[0]:
                    raise error
            return call(module, *args, **kwargs)

        return failing_call

    with pytest.MonkeyPatch.context() as patch:
        for kind in set(targets.values()):
            patch.setattr(kind, "__call__", failing(kind.__call__))
        yield


def _is_decoder(model: Any, layers: nn.ModuleList) -> bool:
    config = model.config.get_text_config(decoder=True)
    return len(layers) == config.num_hidden_layers and any(hasattr(m, "layer_idx") for m in layers[0].modules())


def begin_chunks_at_the_first_column(patch: pytest.MonkeyPatch) -> None:
    """Transformers is taken for one before 5.23, where rows are to resume."""
    patch.setattr(chunked_prompt, "SLICES_CHUNKS", False)


def read_zeros(patch: pytest.MonkeyPatch) -> None:
    """Attention gets zeros in place of all keys and values from here on."""
    update = RowsLayer.update
    patch.setattr(RowsLayer, "update", lambda *given, **more: tuple(held * 0 for held in update(*given, **more)))


def see_no_change_of_the_model(patch: pytest.MonkeyPatch) -> None:
    """Blocks of other weights are found from here on."""
    patch.setattr(Fingerprint, "digest", lambda self, **_: b"the same for ever")
    patch.setattr(Fingerprint, "bypass", lambda self: None)


def make_pools_grow(patch: pytest.MonkeyPatch) -> None:
    """A store begins with four blocks."""
    patch.setattr(memory_budget, "_FIRST_NUM_BLOCKS", 4)


def make_forwards_cheap(patch: pytest.MonkeyPatch) -> None:
    """Prompts of tests are short: a forward more costs as much as four tokens, so rows that share little share it."""
    cost_everywhere(patch, 4)


def cost_everywhere(patch: pytest.MonkeyPatch, num_tokens: int = shared_prefill.FORWARD_COST_ON_HOST) -> None:
    """A forward more costs as much as so many tokens, on an accelerator as on a CPU."""
    for name in ("FORWARD_COST_ON_HOST", "FORWARD_COST_ON_ACCELERATOR"):
        patch.setattr(shared_prefill, name, num_tokens)


def make_snapshots_frequent(patch: pytest.MonkeyPatch) -> None:
    """A snapshot is worth its place where it saves one token."""
    patch.setattr(shared_prefill, "_LEAST_GAIN", 1)


def leave_all_with_blocks() -> None:
    """As if every `with cache:` had been left: one whose entry was interrupted never is."""
    ambient._open = ()
    ambient._here.set(())


def zero_tiers(cache_or_store: PagedPrefixCache | PrefixStore) -> None:
    """Put zeros in place of all that lower tiers have, in memory and in files. The pool's content stays."""
    tiers = tiers_of(cache_or_store)
    tiers.writer.submit(int).result()
    for run in tiers.runs:
        for _, _, rows in (run.rows or {}).values():
            for row in rows:
                for of_part in row:
                    of_part.zero_()
        if run.file is not None:  # with checksums that are right
            rows_of = {}
            for kind, parts, numbers, _ in run.file.contents:
                zeros = [torch.zeros((len(numbers), part.num_bytes), dtype=torch.uint8) for part in parts]
                rows_of[kind] = parts, [run.file.blocks[number] for number in numbers], zeros
            run.file, data = encoded(run.path, run.file.model, run.file.roots, rows_of)
            run.path.write_bytes(data)


def tiers_of(cache_or_store: PagedPrefixCache | PrefixStore) -> Tiers:
    tiers = _blocks(cache_or_store).tiers
    assert tiers is not None
    return tiers


def fail_to_bring_up(patch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    """Raise where what a lower tier has is to be written into the pool."""

    def failing(*args: Any, **kwargs: Any) -> None:
        raise error

    patch.setattr(tier_load, "write_blocks", failing)


def num_waiting(cache_or_store: PagedPrefixCache | PrefixStore) -> int:
    """Evicted contents that have not been copied out of the pool."""
    return sum(map(len, _blocks(cache_or_store).contents.evicted.values()))
