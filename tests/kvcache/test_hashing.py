"""The hash chain: its inputs, and the identities it separates."""

import hashlib
import itertools
import struct

import pytest

from kvboost_edge.errors import RequestError
from kvboost_edge.kvcache.hashing import (
    STATE_MASK,
    STATE_WORD,
    chain_hash,
    encode_tokens,
    root_hash,
    state_hash,
)

FIELDS = ["model_fingerprint", "kv_format", "rope", "adapter", "tenant"]


def test_tokens_are_little_endian_u32():
    ids = [0, 1, 255, 256, 65_536, 2**31, 2**32 - 1]
    assert encode_tokens(ids) == struct.pack("<7I", *ids)
    assert encode_tokens([]) == b""
    assert encode_tokens(range(3)) == struct.pack("<3I", 0, 1, 2)


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["a"], [None], [1, [2]]])
def test_invalid_token_ids_are_refused(bad):
    with pytest.raises(RequestError, match="token ids"):
        encode_tokens(bad)


def test_a_link_is_sha256_of_parent_and_tokens():
    parent = b"p" * 32
    tokens = encode_tokens(range(16))
    assert chain_hash(parent, tokens) == hashlib.sha256(parent + tokens).digest()


def test_state_hashes_depend_on_every_word_of_the_block_hash():
    block = chain_hash(b"p" * 32, encode_tokens(range(16)))
    words = struct.unpack("<4Q", state_hash(block))
    assert words == tuple((word ^ STATE_WORD) & STATE_MASK for word in struct.unpack("<4Q", block))
    assert not any(word % 256 for word in words)
    many = [chain_hash(bytes([number]) * 32, b"") for number in range(200)]
    assert len({*many, *map(state_hash, many)}) == 400


def test_state_hashes_equal_stored_ones():
    """Tiers of other versions and machines look states up by this hash, so it must never change."""
    assert (
        state_hash(bytes(range(32))).hex()
        == "00dd451379de755100d54d1b71d67d5900cd550369ce654100c55d0b61c66d49"
    )


def test_root_fields_are_unambiguous():
    base = dict.fromkeys(FIELDS, "ab")
    roots = {root_hash(**base)}
    roots |= {
        root_hash(**{**base, field: value})
        for field in FIELDS
        for value in ("abc", "a", "", "AB", "b")
    }
    # Cut one text between two fields at every place: the same bytes with another meaning.
    for left, right in itertools.combinations(FIELDS, 2):
        roots |= {
            root_hash(**{**base, left: "xyzw"[:cut], right: "xyzw"[cut:]}) for cut in range(5)
        }
    assert len(roots) == 1 + len(FIELDS) * 5 + 10 * 5
    assert all(len(root) == 32 for root in roots)


def test_a_tenant_of_undecodable_bytes_has_its_own_root():
    tenants = [raw.decode("utf-8", "surrogateescape") for raw in (b"\xff", b"\xfe", b"?", b"")]
    assert (
        len({root_hash(model_fingerprint="m", kv_format="k", tenant=tenant) for tenant in tenants})
        == 4
    )
