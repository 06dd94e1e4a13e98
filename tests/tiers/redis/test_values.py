"""A sealed value opens only for its own block, and its chunks are of bounded length."""

import random
import re

import pytest

from helpers.tiers.redis_cases import SECRET, SPACE, chain
from kvboost_edge.tiers.redis.values import (
    PIECE_BYTES,
    Seal,
    piece_lengths,
    pieces_of,
    stored_bytes,
    value_bytes_at,
)

OTHER_SPACE = bytes(32)


def opens(seal, value, block, payload_bytes):
    """Return the payload, or None if the value is refused; then no byte may be written."""
    into = bytearray(b"\x5a" * payload_bytes)
    if seal.open(value, block, memoryview(into)):
        return bytes(into)
    assert bytes(into) == b"\x5a" * payload_bytes
    return None


@pytest.mark.parametrize("secret", [SECRET, None])
@pytest.mark.parametrize("payload_bytes", [0, 1, 1000])
def test_a_value_opens_for_its_own_block(secret, payload_bytes):
    blocks, payloads = chain(2, payload_bytes)
    seal = Seal(SPACE, secret)
    value = seal.value(blocks[0], payloads[0])
    assert len(value) == stored_bytes(seal, blocks[0], payload_bytes)
    assert opens(seal, value, blocks[0], payload_bytes) == payloads[0]
    assert opens(seal, value, blocks[1], payload_bytes) is None, (
        "the value of another block must be rejected"
    )
    assert opens(Seal(OTHER_SPACE, secret), value, blocks[0], payload_bytes) is None, (
        "a value of another model must be rejected"
    )
    assert opens(seal, value, blocks[0]._replace(tokens=bytes(64)), payload_bytes) is None
    assert opens(seal, value, blocks[0]._replace(parent_hash=bytes(32)), payload_bytes) is None


def test_any_flipped_bit_is_detected(scale):
    blocks, payloads = chain(1, 200)
    seal = Seal(SPACE, SECRET)
    value = seal.value(blocks[0], payloads[0])
    for bit in random.Random(0).sample(range(8 * len(value)), scale(1000, 8 * len(value))):
        damaged = bytearray(value)
        damaged[bit // 8] ^= 1 << bit % 8
        assert opens(seal, bytes(damaged), blocks[0], 200) is None


def test_truncation_and_extension_are_detected():
    blocks, payloads = chain(1, 200)
    seal = Seal(SPACE, SECRET)
    value = seal.value(blocks[0], payloads[0])
    assert all(opens(seal, value[:length], blocks[0], 200) is None for length in range(len(value)))
    assert opens(seal, value + b"\0", blocks[0], 200) is None


def test_values_cannot_be_forged_without_the_secret():
    blocks, payloads = chain(1)
    seal = Seal(SPACE, SECRET)
    trusting = Seal(SPACE, None).value(blocks[0], payloads[0])
    for forged in (
        Seal(SPACE, SECRET + "!").value(blocks[0], payloads[0]),
        trusting,
        trusting + bytes(seal.mac_bytes),
    ):
        assert opens(seal, forged, blocks[0], 1000) is None
    assert opens(Seal(SPACE, None), seal.value(blocks[0], payloads[0]), blocks[0], 1000) is None


@pytest.mark.parametrize(
    "length", [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES - 1, 7_654_321]
)
def test_pieces_of_half_to_one_mebibyte_form_the_value(length):
    value = random.Random(length).randbytes(length)
    pieces = pieces_of(value)
    assert b"".join(pieces) == value
    assert [len(piece) for piece in pieces] == piece_lengths(length)
    assert len(Seal(SPACE, SECRET).keys(bytes(32), length)) == len(pieces)
    assert len(pieces) == 1 or all(
        PIECE_BYTES // 2 <= len(piece) <= PIECE_BYTES for piece in pieces
    )


def test_keys_name_space_secret_block_and_piece():
    keys = Seal(SPACE, None).keys(b"\xab" * 32, 2 * PIECE_BYTES + 1)
    first = f"kvb:0001020304050607:open:{'ab' * 32}"
    assert keys == [first, f"{first}:1", f"{first}:2"]
    ids = [Seal(SPACE, secret).keys(bytes(32), 1)[0].split(":")[2] for secret in (SECRET, "other")]
    assert all(re.fullmatch("[0-9a-f]{8}", one) for one in ids)
    assert len({*ids}) == 2
    assert Seal(OTHER_SPACE, SECRET).keys(bytes(32), 1)[0].split(":")[2] == ids[0]


def test_an_absurd_length_is_rejected():
    blocks, payloads = chain(1, 5000)
    seal = Seal(SPACE, SECRET)
    value = seal.value(blocks[0], payloads[0])
    assert value_bytes_at(seal, value[8:24]) == len(value)
    assert value_bytes_at(seal, value[8:23]) == 0
    assert value_bytes_at(seal, b"\xff" * 16) == 0
