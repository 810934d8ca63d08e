"""What a block hash covers. Scenarios 1 to 7, 28 (nothing is hashed that nobody asked for)."""

import hashlib
import struct
import subprocess
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged_cache.blocks import HashChain, common_prefix_length, hashing, root_hash
from hf_paged_cache.blocks.hashing import token_array
from hf_paged_cache.errors import CacheArgumentError

ROOT = root_hash(b"model")


def chain_of(token_ids, block_size=2, extra_keys=None, root=ROOT):
    return HashChain(root, block_size, token_ids, extra_keys)


def digests_of(*arguments, **options):
    return [block_hash.digest for block_hash in chain_of(*arguments, **options).hashes_of()]


def test_a_digest_is_sha256_of_parent_tokens_and_extra_keys():
    first, second = chain_of([1, -2, 3, 4], extra_keys=lambda i: b"lora" if i else b"").hashes_of()
    assert first.token_bytes == struct.pack("<2q", 1, -2)
    assert first.digest == hashlib.sha256(ROOT + first.token_bytes).digest()
    extra = struct.pack("<Q", 4) + b"lora"
    assert second.digest == hashlib.sha256(first.digest + second.token_bytes + extra).digest()


def test_roots_isolate_chains_and_do_not_run_into_tokens():  # scenario 4
    assert digests_of([1, 2], root=root_hash(b"a")) != digests_of([1, 2], root=root_hash(b"b"))
    assert root_hash(b"ab", b"c") != root_hash(b"a", b"bc") != root_hash(b"abc")
    assert len(root_hash()) == 32


def test_hashes_are_the_same_in_another_process():  # scenario 4
    code = "from hf_paged_cache.blocks import *; c = HashChain(root_hash(b'model'), 2, [1, 2, 3, 4]);"
    code += "print([h.digest.hex() for h in c.hashes_of()])"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str([digest.hex() for digest in digests_of([1, 2, 3, 4])])


def test_nothing_is_hashed_before_it_is_asked_for_and_nothing_twice(monkeypatch):  # scenario 28
    hashed = []
    monkeypatch.setattr(hashing, "sha256", lambda data: hashed.append(len(data)) or hashlib.sha256(data))
    chain = chain_of(range(20))
    assert hashed == []
    assert len(chain.hashes_of(0, 5)) == len(hashed) == 5
    everything = chain_of(range(20)).hashes_of()
    del hashed[:]
    for start, stop in ((0, 4), (3, 7), (8, None), (5, 5)):
        assert chain.hashes_of(start, stop) == everything[start:stop]
    assert len(hashed) == 5


@given(st.lists(st.one_of(st.integers(1, 5), st.integers(-4, -1)), max_size=12))
def test_a_chain_that_grows_and_is_cut_hashes_as_one_made_at_once(steps):
    chain, tokens = HashChain(ROOT, 2), []
    for step in steps:
        if step > 0:
            chain.token_ids.extend(tokens_added := [len(tokens) % 2 * step] * step)
            tokens += tokens_added
        else:
            tokens = tokens[: max(0, len(tokens) + step)]
            chain.truncate(len(tokens))
        assert chain.hashes_of() == chain_of(tokens).hashes_of()
        assert list(chain.token_ids) == tokens


def test_a_chain_that_another_continues_stays_as_it_is():  # scenario 69, of the chain
    chain = chain_of([1, 2, 3, 4])
    chain.hashes_of()
    for tokens in ([1, 9, 9, 9], [1, 2, 9, 9, 9], [1, 2, 3, 4, 5, 6], [1, 2, 3], []):
        other = chain.continued(array("q", tokens))
        assert other.hashes_of() == chain_of(tokens).hashes_of()
        other.token_ids.append(7)
        assert list(chain.token_ids) == [1, 2, 3, 4]
        assert chain.hashes_of() == chain_of([1, 2, 3, 4]).hashes_of()


def test_what_is_no_token_is_refused():
    for wrong in ([2, 2**63], [2, "3"], [2, 1.5]):
        with pytest.raises(CacheArgumentError, match="64 bits"):
            token_array(wrong)


# Few values, so that prefixes are long; the largest and smallest, so that every byte of a token takes part.
TOKENS = st.lists(st.sampled_from([0, 1, 256, -1, 2**63 - 1, -(2**63)]), max_size=300)


@given(TOKENS, TOKENS, TOKENS)
def test_the_length_of_a_common_prefix_is_what_counting_finds_in_either_order(prefix, left, right):
    a, b = array("q", prefix + left), array("q", prefix + right)
    counted = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix_length(a, b) == common_prefix_length(b, a) == counted


@pytest.mark.parametrize("at", [0, 1, 1023, 1024, 1025, 4095, 4096, 4097, 5999])
@pytest.mark.parametrize("bit", [0, 7, 8, 62])
def test_one_changed_bit_is_found_wherever_it_lies(at, bit):
    left = array("q", range(6000))
    right = left[:]
    right[at] ^= 1 << bit
    assert common_prefix_length(left, right) == at
