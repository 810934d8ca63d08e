"""What a block hash covers. Scenarios 1 to 7, 28 (nothing is hashed that nobody asked for)."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged_cache.blocks import hashing
from hf_paged_cache.blocks.hashing import HashChain, root_hash, token_array
from hf_paged_cache.errors import CacheArgumentError

ROOT = root_hash(b"model")


def chain_of(token_ids, block_size=2, extra_keys=None, root=ROOT):
    return HashChain(root, block_size, token_ids, extra_keys)


def digests_of(*arguments, **options):
    return [block_hash.digest for block_hash in chain_of(*arguments, **options).hashes()]


def test_a_digest_is_sha256_of_parent_tokens_and_extra_keys():
    first, second = chain_of([1, -2, 3, 4], extra_keys=lambda i: b"lora" if i else b"").hashes()
    assert first.token_bytes == struct.pack("<2q", 1, -2)
    assert first.digest == hashlib.sha256(ROOT + first.token_bytes).digest()
    extra = struct.pack("<Q", 4) + b"lora"
    assert second.digest == hashlib.sha256(first.digest + second.token_bytes + extra).digest()


def test_token_bytes_are_little_endian_on_a_big_endian_host(monkeypatch):
    monkeypatch.setattr(hashing, "_HOST_IS_BIG_ENDIAN", True)
    chain = chain_of([1, 2])
    assert chain.hashes_of(0, 1)[0].token_bytes == struct.pack(">2q" if sys.byteorder == "little" else "<2q", 1, 2)
    assert list(chain.token_ids) == [1, 2]  # the chain's own tokens are not swapped


def test_roots_isolate_chains_and_do_not_run_into_tokens():  # scenario 4
    assert digests_of([1, 2], root=root_hash(b"a")) != digests_of([1, 2], root=root_hash(b"b"))
    assert root_hash(b"ab", b"c") != root_hash(b"a", b"bc") != root_hash(b"abc")
    assert len(root_hash()) == 32


def test_hashes_are_the_same_in_another_process():  # scenario 4
    code = "from hf_paged_cache.blocks import *; c = HashChain(root_hash(b'model'), 2, [1, 2, 3, 4]);"
    code += "print([h.digest.hex() for h in c.hashes()])"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str([digest.hex() for digest in digests_of([1, 2, 3, 4])])


def test_nothing_is_hashed_before_it_is_asked_for_and_nothing_twice(monkeypatch):  # scenario 28
    hashed = []
    monkeypatch.setattr(hashing, "sha256", lambda data: hashed.append(len(data)) or hashlib.sha256(data))
    chain = chain_of(range(20))
    assert hashed == []
    hashes = chain.hashes()
    next(hashes)
    assert len(hashed) == 1
    next(hashes)
    assert len(hashed) <= 2 * 2  # at most as many ahead as were asked for
    assert len(list(chain.hashes(stop=5))) == 5
    assert len(hashed) == 5
    assert list(hashes) == list(chain.hashes())[2:]
    assert len(hashed) == 10


def test_two_iterators_of_one_chain_agree():
    chain = chain_of(range(20))
    one, two = chain.hashes(), chain.hashes()
    pairs = [(next(one), next(two)) for _ in range(5)] + [(next(two), next(one)) for _ in range(5)]
    assert [a for a, _ in pairs] == [b for _, b in pairs] == list(chain_of(range(20)).hashes())


def test_a_slice_of_hashes_is_that_of_all_whether_computed_or_not():
    assert list(chain_of(range(20)).hashes(3, 7)) == list(chain_of(range(20)).hashes())[3:7]
    assert list(chain_of(range(20)).hashes(8, 99)) == list(chain_of(range(20)).hashes())[8:]
    chain = chain_of(range(20))
    everything = list(chain.hashes())
    assert [list(chain.hashes(start, stop)) for start, stop in [(0, 4), (3, 7), (8, 99), (5, 5)]] == [
        everything[0:4],
        everything[3:7],
        everything[8:],
        [],
    ]


def test_hashes_are_right_across_the_portions_that_tokens_are_copied_in(monkeypatch):
    expected = digests_of(range(64))
    monkeypatch.setattr(hashing, "_PORTION_BYTES", 40)
    assert digests_of(range(64)) == expected


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
        assert list(chain.hashes()) == list(chain_of(tokens).hashes())
        assert list(chain.token_ids) == tokens


def test_a_chain_that_another_continues_stays_as_it_is():  # scenario 69, of the chain
    chain = chain_of([1, 2, 3, 4])
    list(chain.hashes())
    for tokens in ([1, 9, 9, 9], [1, 2, 9, 9, 9], [1, 2, 3, 4, 5, 6], [1, 2, 3], []):
        other = chain.continued(array("q", tokens))
        assert list(other.hashes()) == list(chain_of(tokens).hashes())
        other.token_ids.append(7)
        assert list(chain.token_ids) == [1, 2, 3, 4]
        assert list(chain.hashes()) == list(chain_of([1, 2, 3, 4]).hashes())


def test_what_is_no_token_is_refused():
    for wrong in ([2, 2**63], [2, "3"], [2, 1.5]):
        with pytest.raises(CacheArgumentError, match="64 bits"):
            token_array(wrong)
