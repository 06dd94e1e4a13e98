"""The header of a record identifies its block. A damaged header is rejected."""

import random

import pytest

from kvboost_edge.kvcache.hashing import BlockAddress
from kvboost_edge.tiers.record import (
    ALIGNMENT,
    decode_header,
    encode_header,
    header_bytes,
    is_intact,
)

SPACE = bytes(range(32))
PAYLOAD = memoryview(random.Random(0).randbytes(4096))


def address(num_tokens):
    draw = random.Random(num_tokens)
    return BlockAddress(draw.randbytes(32), draw.randbytes(32), draw.randbytes(4 * num_tokens))


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 32, 64, 256])
def test_records_round_trip(num_tokens):
    written = address(num_tokens)
    data = encode_header(SPACE, written, PAYLOAD)
    assert len(data) == header_bytes(num_tokens)
    assert len(data) % ALIGNMENT == 0
    header = decode_header(data + b"what follows")
    assert (header.space, header.address, header.header_bytes) == (SPACE, written, len(data))
    assert is_intact(header, PAYLOAD)


def test_header_size_for_16_and_64_tokens():
    assert header_bytes(16) == 256
    assert header_bytes(64) <= 512


def test_any_flipped_header_bit_is_detected():
    data = encode_header(SPACE, address(16), PAYLOAD)
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        assert decode_header(bytes(damaged)) is None


def test_a_truncated_header_is_rejected():
    data = encode_header(SPACE, address(16), PAYLOAD)
    assert all(decode_header(data[:length]) is None for length in range(len(data)))


def test_a_changed_or_truncated_payload_is_detected():
    header = decode_header(encode_header(SPACE, address(16), PAYLOAD))
    assert header is not None
    damaged = bytearray(PAYLOAD)
    damaged[1000] ^= 1
    assert not is_intact(header, memoryview(damaged))
    assert not is_intact(header, PAYLOAD[:-1])
