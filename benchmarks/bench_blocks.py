"""What the bookkeeping costs, per block and per token, without a model: `python benchmarks/bench_blocks.py`.

Beside each number, in the same run: a dict probe with keys like our digests over as many entries, a bare hashlib loop
over the same bytes, and the block allocator of transformers' continuous batching, where it is installed.

Hardest case for caches: ids, digests and sequences are in random order, and what is looked up is equal to what is
stored but another object. Sequences have 64 blocks of 16 tokens. The cyclic garbage collector is off while timing,
unless --gc. Bars, checked at the end: at the largest size each operation costs at most 8 dict probes a block; hashing
at most 2 bare loops; matching 100,000 cached tokens, hashing included, at most 1.6 times hashing them.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from array import array
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import harness

from hf_paged_cache.blocks import BlockHash, BlockTable, HashChain, PrefixCachingBlockAllocator, root_hash

BLOCK_SIZE = 16
BLOCKS_PER_SEQUENCE = 64
TOKEN_BYTES = 8 * BLOCK_SIZE
OPERATIONS = ("allocate", "commit", "fork", "free fork", "free", "match", "allocate hit", "free hit", "evict")


class Stopwatch:
    """Seconds per block of each operation over all sequences, in the order in which they are given."""

    def __init__(self, num_blocks: int, gc_enabled: bool) -> None:
        self.num_blocks = num_blocks
        self.gc_enabled = gc_enabled
        self.seconds: dict[str, float] = {}

    def run(self, name: str, operation: Callable[[int], object], order: list[int]) -> list:
        with harness.garbage_collection(self.gc_enabled):
            start = time.perf_counter()
            results = [operation(sequence) for sequence in order]
            self.seconds[name] = (time.perf_counter() - start) / self.num_blocks
        return results


def random_hashes(num_blocks: int, rng: random.Random) -> tuple[list[BlockHash], list[BlockHash]]:
    """The same hashes twice, as different objects, both in one order that is not that of memory."""
    stored = [BlockHash(rng.randbytes(32), rng.randbytes(TOKEN_BYTES)) for _ in range(num_blocks)]
    asked = [BlockHash(bytes(bytearray(digest)), bytes(bytearray(tokens))) for digest, tokens, _ in stored]
    order = rng.sample(range(num_blocks), num_blocks)
    return [stored[i] for i in order], [asked[i] for i in order]


def probe_dict(watch: Stopwatch, stored: list[BlockHash], asked_of: list[list[BlockHash]], order: list[int]) -> None:
    blocks = {block_hash.digest: i for i, block_hash in enumerate(stored)}
    keys_of = [[block_hash.digest for block_hash in hashes] for hashes in asked_of]
    watch.run("dict probe", lambda i: [blocks[key] for key in keys_of[i]], order)


def our_round(num_blocks: int, rng: random.Random, gc_enabled: bool) -> dict[str, float]:
    """One cycle of all operations over `num_blocks` blocks, and the dict probe."""
    stored, asked = random_hashes(num_blocks, rng)
    per_sequence = min(BLOCKS_PER_SEQUENCE, num_blocks)
    num_sequences = num_blocks // per_sequence
    num_blocks = num_sequences * per_sequence
    parts = [slice(i * per_sequence, (i + 1) * per_sequence) for i in range(num_sequences)]
    stored_of, asked_of = [stored[part] for part in parts], [asked[part] for part in parts]

    def order() -> list[int]:
        return rng.sample(range(num_sequences), num_sequences)

    watch = Stopwatch(num_blocks, gc_enabled)
    probe_dict(watch, stored, asked_of, order())
    allocator = PrefixCachingBlockAllocator(num_blocks + 1, BLOCK_SIZE)
    ids = rng.sample(range(1, num_blocks + 1), num_blocks)
    allocator._states.free = ids  # as after a long life: in no order
    held = watch.run("allocate", lambda _: allocator.allocate((), per_sequence), order())
    watch.run("commit", lambda i: allocator.commit_many(held[i], 0, stored_of[i]), order())
    forks = watch.run("fork", lambda i: allocator.fork(held[i]), order())
    watch.run("free fork", lambda i: forks[i].free(), order())
    watch.run("free", lambda i: held[i].free(), order())
    assert allocator.num_cached_blocks == num_blocks
    matched = watch.run("match", lambda i: allocator.match_prefix(asked_of[i]), order())
    assert sum(map(len, matched)) == num_blocks
    held = watch.run("allocate hit", lambda i: allocator.allocate(asked_of[i]), order())
    assert allocator.num_blocks_in_use == num_blocks
    watch.run("free hit", lambda i: held[i].free(), order())
    held = watch.run("evict", lambda _: allocator.allocate((), per_sequence), order())
    assert allocator.num_evictions == num_blocks
    return watch.seconds


def transformers_round(num_blocks: int, rng: random.Random, gc_enabled: bool) -> dict[str, float]:
    """The same cycle on transformers' allocator, as far as it has the operations; its commit and match hash, too.

    Built without its tensors. It evicts all cached blocks at once, so that is not compared.
    """
    from transformers.generation.continuous_batching.cache_allocators.cache_allocator import BlockLedger
    from transformers.generation.continuous_batching.cache_allocators.cache_pool import CachePool
    from transformers.generation.continuous_batching.cache_allocators.full_attention import FullAttentionCacheAllocator

    per_sequence = min(BLOCKS_PER_SEQUENCE, num_blocks)
    num_sequences = num_blocks // per_sequence
    num_blocks = num_sequences * per_sequence
    allocator = object.__new__(FullAttentionCacheAllocator)
    allocator.index, allocator.tokens_per_page, allocator.use_block_sharing = 0, BLOCK_SIZE, True
    allocator.block_table, allocator.ledger = {}, BlockLedger()
    allocator.pool = CachePool(num_sectors=num_sequences, num_allocators=1)
    allocator.pool.set_blocks_per_sector(0, per_sequence)
    for _ in range(num_sequences):
        allocator.pool.allocate_sector(0)
    ids = allocator.pool.get_free_blocks(0, num_blocks)
    rng.shuffle(ids)
    allocator.pool.free_blocks(0, ids)
    num_tokens = per_sequence * BLOCK_SIZE
    tokens_of = [list(rng.randbytes(num_tokens)) for _ in range(num_sequences)]
    names = [f"request {i}" for i in range(num_sequences)]
    twins = [f"fork {i}" for i in range(num_sequences)]

    def order() -> list[int]:
        return rng.sample(range(num_sequences), num_sequences)

    watch = Stopwatch(num_blocks, gc_enabled)
    watch.run("allocate", lambda i: allocator.allocate_cache_to_request(names[i], 0, num_tokens), order())
    watch.run("commit", lambda i: allocator.mark_complete_blocks(names[i], tokens_of[i], per_sequence), order())
    watch.run("fork", lambda i: allocator.fork_blocks(names[i], twins[i], num_tokens), order())
    watch.run("free fork", lambda i: allocator.free_blocks(twins[i]), order())
    watch.run("free", lambda i: allocator.free_blocks(names[i]), order())
    matched = watch.run("match", lambda i: allocator.match_prefix_blocks([*tokens_of[i], 0]), order())
    assert sum(map(len, matched)) == num_blocks
    return watch.seconds


def medians(rounds: list[dict[str, float]], factor: float = 1e9) -> dict[str, harness.Timing]:
    """Nanoseconds by operation."""
    return {name: harness.Timing.of([one[name] for one in rounds]).scaled(factor) for name in rounds[0]}


def bench_blocks(
    max_exponent: int, num_rounds: int, gc_enabled: bool
) -> dict[str, dict[str, dict[str, harness.Timing]]]:
    """Nanoseconds per block: size -> whose -> operation."""
    results = {}
    for exponent in range(2, max_exponent + 1):
        num_blocks = 10**exponent
        repetitions = num_rounds if exponent == 6 else max(num_rounds, 5)
        ours, theirs = [], []
        for number in range(repetitions):
            ours.append(our_round(num_blocks, random.Random(number), gc_enabled))
            try:
                theirs.append(transformers_round(num_blocks, random.Random(number), gc_enabled))
            except (ImportError, AttributeError, TypeError) as error:  # not installed, or changed since 5.23
                if number == 0:
                    print(f"transformers' allocator not measured: {error}", file=sys.stderr)
        results[str(num_blocks)] = {"ours": medians(ours), "transformers": medians(theirs) if theirs else {}}
    return results


def bench_tokens(num_tokens: int, num_rounds: int, gc_enabled: bool) -> dict[str, harness.Timing]:
    """Nanoseconds per token: hashing a whole prompt, matching it fully cached, and appending one token."""
    token_ids = array("q", random.Random(0).choices(range(50_000), k=num_tokens))
    root, data = root_hash(b"model"), token_ids.tobytes()
    data = data[: len(data) // TOKEN_BYTES * TOKEN_BYTES]
    allocator = PrefixCachingBlockAllocator(num_tokens // BLOCK_SIZE + 2, BLOCK_SIZE)
    table = BlockTable(allocator, root)
    table.allocate(token_ids)
    table.commit_full_blocks(num_tokens)

    def bare_loop() -> bytes:
        digest = root
        for offset in range(0, len(data), TOKEN_BYTES):
            digest = sha256(digest + data[offset : offset + TOKEN_BYTES]).digest()
        return digest

    def new_chain() -> HashChain:
        return HashChain(root, BLOCK_SIZE, token_ids)

    def hashing() -> HashChain:
        chain = new_chain()
        for _ in chain.hashes_of():
            pass
        return chain

    def matching() -> HashChain:
        chain = new_chain()
        assert len(allocator.match_prefix(chain.hashes_of())) == num_tokens // BLOCK_SIZE
        return chain

    wide = PrefixCachingBlockAllocator(2, num_tokens + 1)

    def appending() -> BlockTable:
        table = BlockTable(wide, root)
        table.append_tokens([0])
        for token in range(num_tokens):
            table.append_tokens([token])
        return table

    assert hashing().hashes_of(0, num_tokens // BLOCK_SIZE)[-1].digest == bare_loop()
    cases = {"bare hashlib loop": bare_loop, "hashing": hashing, "matching, with hashing": matching}
    timings = harness.interleave(cases, rounds=max(9, 3 * num_rounds), gc_enabled=gc_enabled)
    timings |= harness.interleave({"appending one token": appending}, rounds=num_rounds, gc_enabled=gc_enabled)
    return {name: timing.scaled(1e9 / num_tokens) for name, timing in timings.items()}


def bars(blocks: dict, tokens: dict[str, harness.Timing]) -> list[tuple[str, float, float]]:
    """(what, ratio measured, ratio allowed)."""
    size, largest = max(blocks.items(), key=lambda item: int(item[0]))
    ours = largest["ours"]
    rows = [
        (f"{name} / dict probe at {size}", ours[name].median / ours["dict probe"].median, 8.0) for name in OPERATIONS
    ]
    hashing = tokens["hashing"].median
    rows.append(("hashing / bare hashlib loop", hashing / tokens["bare hashlib loop"].median, 2.0))
    rows.append(("matching / hashing", tokens["matching, with hashing"].median / hashing, 1.6))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--max-exponent", type=int, default=6, choices=range(2, 7), help="up to 10^this blocks")
    parser.add_argument("--rounds", type=int, default=3, help="rounds at 10^6 blocks; at least 5 below")
    parser.add_argument("--gc", action="store_true", help="leave the cyclic garbage collector on")
    parser.add_argument(
        "--json", type=Path, default=None, help="where to write; default benchmarks/results/blocks.json"
    )
    options = parser.parse_args()

    tokens = bench_tokens(100_000, options.rounds, options.gc)
    print(
        f"garbage collector {'on' if options.gc else 'off'}; median [least, greatest]\n\nnanoseconds per token, 100,000"
    )
    for name, timing in tokens.items():
        print(f"  {name:24}{timing.median:8.1f} [{timing.minimum:.1f}, {timing.maximum:.1f}]")
    blocks = bench_blocks(options.max_exponent, options.rounds, options.gc)
    print("\nnanoseconds per block")
    print(f"  {'':24}" + "".join(f"{int(size):>12,}" for size in blocks))
    for whose, names in (("ours", ("dict probe", *OPERATIONS)), ("transformers", OPERATIONS[:6])):
        for name in names:
            cells = [of[whose].get(name) for of in blocks.values()]
            label = f"{'' if whose == 'ours' else 'transformers '}{name}"
            print(f"  {label:24}" + "".join(f"{cell.median:12.0f}" if cell else f"{'-':>12}" for cell in cells))
    print("  (transformers' commit and match hash the tokens, ours are given the hashes)\n")
    rows = bars(blocks, tokens)
    for what, ratio, allowed in rows:
        print(f"  {'holds' if ratio <= allowed else 'FAILS'}  {what}: {ratio:.2f}, at most {allowed}")
    results = {
        "garbage_collector": "on" if options.gc else "off",
        "block_size": BLOCK_SIZE,
        "nanoseconds_per_token": tokens,
        "nanoseconds_per_block": blocks,
        "bars": [{"what": what, "ratio": ratio, "at_most": allowed} for what, ratio, allowed in rows],
    }
    harness.write_results("blocks", results, options.json)
    return int(any(ratio > allowed for _, ratio, allowed in rows))


if __name__ == "__main__":
    sys.exit(main())
