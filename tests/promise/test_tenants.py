"""What a tenant, a salt on a shared store, sees and does: its own, and nothing from which others follow."""

import copy
import gc
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_paged_cache import BlockStateError, CacheArgumentError, PagedPrefixCache, PrefixStore

from ..internals import held_tensors
from ..reference import AtStep, assert_same, batch, row, run
from ..tiny_models import tiny

BLOCK_SIZE = 4
MODEL = tiny("llama")
SECRET = row((1, 41))
OTHER = row((2, 41))
STORES_OWN = ("num_blocks", "num_free_blocks", "num_evictions", "pool_bytes", "static_bytes")


@pytest.fixture
def store() -> PrefixStore:
    return PrefixStore(MODEL, block_size=BLOCK_SIZE, num_blocks=200)


def ask(cache: PagedPrefixCache, tokens: list[int], **arguments: Any) -> Any:
    """One call that gives what `DynamicCache` gives; its rows stay."""
    ids = torch.tensor([tokens])
    output = run(cache.store.model, cache, input_ids=ids, **arguments)
    assert_same(run(cache.store.model, input_ids=ids, **arguments), output)
    return output


def message(error: type[Exception], act: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        act()
    assert caught.value.__cause__ is caught.value.__context__ is None  # they would be printed, too
    return str(caught.value)


def pin(cache: PagedPrefixCache, tokens: list[int]) -> int | str:
    """Tokens pinned, or why none were."""
    try:
        return cache.pin(tokens)
    except CacheArgumentError as refused:
        return str(refused)


def view(cache: PagedPrefixCache, guess: list[int]) -> list[Any]:
    """Every public number and message of a tenant that tries a guess."""
    seen: list[Any] = []

    def look() -> None:
        stats = cache.stats()
        seen.append((stats, str(stats), cache.last_call, str(cache.last_call), cache.get_seq_length()))

    look()
    seen.append((pin(cache, guess), cache.unpin(guess), cache.unpin()))
    for tokens in (guess, guess[:-1], guess + row((5, 9))):
        seen.append(run(cache.store.model, cache, input_ids=torch.tensor([tokens])).sequences.tolist())
        look()
    seen.append([each.log_probs for each in cache.score(guess, [[5, 6], [5, 7]])])
    look()
    run(cache.store.model, cache, **batch(guess, guess, row((6, 20))), num_beams=2)
    seen.append((pin(cache, guess), pin(cache, guess[:8])))
    look()
    seen.append(run(cache.store.model, cache, input_ids=torch.tensor([guess]), max_new_tokens=100).sequences.tolist())
    look()
    seen.append((copy.deepcopy(cache).stats(), cache.sibling().stats(), cache.check()))
    cache.reset()
    look()
    seen.append((cache.reset_prefix_cache(), pin(cache, guess)))
    look()
    return seen


def nothing(cache: PagedPrefixCache) -> None:
    """The other tenant is not there."""


def asks(cache: PagedPrefixCache) -> None:
    ask(cache, SECRET)


def asks_much_and_pins(cache: PagedPrefixCache) -> None:
    for number in range(3):
        ask(cache, row((number, 70)), num_beams=2)
    cache.reset()
    assert cache.pin(row((1, 70))) > 0


def goes_on_by_plain_forwards(cache: PagedPrefixCache) -> None:
    with torch.no_grad():
        cache.store.model(torch.tensor([SECRET]), past_key_values=cache)


@pytest.mark.parametrize("others", [asks, asks_much_and_pins, goes_on_by_plain_forwards], ids=lambda f: f.__name__)
def test_a_tenant_sees_the_same_whatever_others_have_asked(
    others: Callable[[PagedPrefixCache], None], caplog: pytest.LogCaptureFixture
) -> None:
    views, logs = [], []
    for deed in (nothing, others):
        store = PrefixStore(MODEL, block_size=BLOCK_SIZE, num_blocks=200)
        alice, bob = (PagedPrefixCache(store, cache_salt=salt) for salt in ("alice", "bob"))
        deed(alice)
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="hf_paged_cache"):
            views.append(view(bob, SECRET))
        logs.append([*caplog.messages])
    assert views[0] == views[1]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("runs", [False, True], ids=["between calls", "while it runs"])
def test_in_a_pool_too_small_for_both_a_right_guess_shows_no_more_than_a_wrong_one(runs: bool) -> None:
    """What is evicted of a tenant tells that others use memory, and not what they ask."""
    views: list[list[Any]] = []
    for secret in (SECRET, OTHER):
        store = PrefixStore(MODEL, block_size=BLOCK_SIZE, num_blocks=26)
        alice, bob = (PagedPrefixCache(store, cache_salt=salt) for salt in ("alice", "bob"))
        seen: list[Any] = []

        def probe(bob: PagedPrefixCache = bob, seen: list[Any] = seen) -> bool:
            ids = torch.tensor([SECRET])
            for num_new in (1, 2, 4 * 14):
                run(MODEL, bob, input_ids=ids, max_new_tokens=num_new)
                seen.append((bob.stats(), bob.last_call))
                bob.reset()
            seen.append(pin(bob, SECRET))
            seen.append((bob.stats(), bob.unpin()))
            return True

        for _ in range(2):
            run(MODEL, alice, input_ids=torch.tensor([secret]), logits_processor=[AtStep(1, probe)] if runs else [])
            alice.reset()
            probe()
            bob.reset()
        views.append(seen)
        assert store.stats().num_evictions > 0
    assert views[0] == views[1]


def test_a_tenant_counts_its_own_blocks_and_calls_and_the_store_counts_all(store: PrefixStore) -> None:
    alice, bob = (PagedPrefixCache(store, cache_salt=salt) for salt in ("alice", "bob"))
    again, owner = PagedPrefixCache(store, cache_salt="bob"), PagedPrefixCache(store)
    ask(alice, SECRET)
    ask(bob, row((3, 22)))
    ask(again, row((3, 22)))
    own = bob.stats()
    assert (own.prompt_tokens, own.num_calls, own.num_cached_blocks) == (22, 1, (22 + 5) // BLOCK_SIZE)
    assert own.num_blocks_in_use == again.stats().num_blocks_in_use == 0  # rows hold none
    assert [getattr(own, name) for name in STORES_OWN] == [None] * len(STORES_OWN)
    assert bob.pin(row((3, 22))) == 20
    bob.reset()
    again.reset()
    own = bob.stats()
    assert (own.num_blocks_in_use, own.num_cached_blocks, own.num_pinned_blocks, own.kv_bytes) == (
        5,
        1,
        5,
        5 * store.blocks.pool.all.bytes_per_block,
    )
    assert alice.stats().num_pinned_blocks == 0
    everything = store.stats()
    assert (everything.num_calls, everything.prompt_tokens, everything.num_pinned_blocks) == (3, 41 + 44, 5)
    assert everything.num_blocks_in_use == alice.stats().num_blocks_in_use + 5
    assert everything.num_free_blocks + everything.num_cached_blocks + everything.num_blocks_in_use == 199
    shown, wanted = owner.stats(), everything
    assert (shown.num_calls, shown.num_blocks_in_use) == (0, wanted.num_blocks_in_use)
    assert (shown.num_free_blocks, shown.num_evictions) == (wanted.num_free_blocks, 0)
    store.check()


def test_the_store_counts_collected_caches_and_each_score_and_shared_prefix_once(store: PrefixStore) -> None:
    shared = row((7, 80))
    prompts = [shared + row((8, 9)), shared + row((9, 9))]
    for make in (lambda: store, lambda: PagedPrefixCache(store).store):
        cache = PagedPrefixCache(make(), cache_salt="alice")
        run(MODEL, cache, **batch(*prompts))
        cache.score(SECRET, [[1, 2], [3]])
        assert not cache.verify().differing
    del cache
    gc.collect()
    both = store.stats()
    assert both.num_calls == 4
    assert both.prompt_tokens == 2 * (2 * 89 + 41 * 2 + 1)  # the last token of a continuation is not run
    assert both.computed_tokens < both.prompt_tokens / 2
    assert both.num_blocks_in_use == 0
    assert both.num_cached_blocks > 20
    assert both.peak_kv_bytes is None


def test_what_is_not_told_is_shown_as_not_known(store: PrefixStore) -> None:
    lines = str(PagedPrefixCache(store, cache_salt="alice").stats()).splitlines()
    assert [line.split()[0] for line in lines if line.endswith("not known")] == list(STORES_OWN)
    (peak,) = [line for line in str(store.stats()).splitlines() if line.startswith("peak_kv_bytes")]
    assert peak.endswith("not known")


@pytest.mark.parametrize("empty", ["", b""])
def test_an_empty_salt_is_refused(store: PrefixStore, empty: str | bytes) -> None:
    """It would be the owner's view, for whoever has no name."""
    with pytest.raises(CacheArgumentError, match="cache_salt is empty"):
        PagedPrefixCache(store, cache_salt=empty)


def test_a_broken_store_is_shown_to_its_owner_alone(store: PrefixStore) -> None:
    alice = PagedPrefixCache(store, cache_salt="alice")
    ask(alice, SECRET)
    bob = PagedPrefixCache(store, cache_salt="bob")
    bob.check()
    store.blocks.allocator._states.ref_counts[1] += 1
    told = message(BlockStateError, bob.check)
    assert told == "the store's blocks are not as they must be; store.check() tells its owner how"
    for whole in (store.check, PagedPrefixCache(store).check):
        with pytest.raises(BlockStateError, match="ref counts"):
            whole()
    store.blocks.allocator._states.ref_counts[1] -= 1
    store.check()


def test_a_reset_drops_what_is_of_its_salt_and_no_more(store: PrefixStore) -> None:
    caches = {salt: PagedPrefixCache(store, cache_salt=salt) for salt in ("alice", "bob", None)}
    for cache in caches.values():
        ask(cache, SECRET)
        assert cache.pin(SECRET) == 40
    again = PagedPrefixCache(store, cache_salt="bob")
    ask(again, OTHER)
    before = {salt: cache.stats() for salt, cache in caches.items()}
    caches["bob"].reset_prefix_cache()
    after = caches["bob"].stats()
    assert (after.num_cached_blocks, after.num_blocks_in_use, after.num_pinned_blocks, after.kv_bytes) == (0, 0, 0, 0)
    assert again.get_seq_length() == 0
    assert caches["alice"].stats() == before["alice"]
    assert caches["alice"].get_seq_length() == 41 + 5
    for salt, num_reused in (("alice", 40), (None, 40), ("bob", 0)):
        ask(caches[salt], SECRET)
        assert caches[salt].last_call.reused_tokens == num_reused, salt
    caches[None].reset_prefix_cache()
    assert caches["alice"].stats().num_pinned_blocks == 10
    ask(caches[None], SECRET)
    assert caches[None].last_call.reused_tokens == 0
    ask(caches["alice"], SECRET)
    assert caches["alice"].last_call.reused_tokens == 40
    assert caches["bob"].unpin() == 0
    store.check()
    for cache in caches.values():
        cache.reset()
    store.reset_prefix_cache()
    assert store.stats().num_free_blocks == 199
    assert store.stats().pool_bytes == 0


def test_a_reset_while_a_generate_runs_leaves_nothing_of_it(store: PrefixStore) -> None:
    alice, bob = (PagedPrefixCache(store, cache_salt=salt) for salt in ("alice", "bob"))
    ids = torch.tensor([SECRET])
    for of, num_reused in ((alice, 0), (bob, 46), (store, 0)):
        step = AtStep(1, of.reset_prefix_cache)
        output = run(MODEL, alice, input_ids=ids, logits_processor=[step])
        assert_same(run(MODEL, input_ids=ids), output)
        ask(alice, output.sequences[0].tolist())
        assert alice.last_call.reused_tokens == num_reused
        alice.reset_prefix_cache()
    store.check()


@pytest.mark.parametrize("leaves", ["is evicted", "resets"])
def test_what_a_tenant_left_in_a_block_never_reaches_another(leaves: str) -> None:
    """NaN in what one tenant wrote: a single read of it by another's attention would show in all logits."""
    store = PrefixStore(MODEL, block_size=BLOCK_SIZE, num_blocks=41)
    alice, bob = (PagedPrefixCache(store, cache_salt=salt) for salt in ("alice", "bob"))
    ask(bob, row((6, 5)))  # so that the pool is not given back
    ask(alice, row((3, 100)))
    alice.reset()
    bob.reset()
    cached = alice.stats().num_cached_blocks
    if leaves == "resets":
        alice.reset_prefix_cache()
        cached = 0
    for tensor in held_tensors(store):
        tensor.fill_(torch.nan)  # all blocks: those that were alice's among them
        tensor[0] = 0  # the null block, which nobody writes
    bob.reset_prefix_cache()
    for prompts in ([row((8, 70)), row((9, 50))], [row((7, 90))]):
        reference, output = (run(MODEL, each, **batch(*prompts)) for each in (None, bob))
        assert_same(reference, output)
        bob.reset()
    assert alice.stats().num_cached_blocks < cached or leaves == "resets"
    store.check()
