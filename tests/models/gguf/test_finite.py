"""NaN and infinity in GGUF files are found on disk, in every block format and at every position."""

import pytest

from helpers.gguf.writer import WIDE, save_gguf
from kvboost_edge.errors import ModelFormatError
from kvboost_edge.models.checkpoint import Checkpoint
from kvboost_edge.models.gguf.blocks import BLOCKS
from kvboost_edge.models.gguf.file import read_gguf
from kvboost_edge.models.gguf.source import GgufSource


def _quantized(directory, kind):
    """Write a file with this block format and return it with one of its tensors."""
    path = save_gguf("llama", directory, WIDE, kind=kind)
    with GgufSource(read_gguf(path)) as source:
        return path, source._tensor("model.layers.0.mlp.up_proj.weight")


# Positions of a block's floating-point numbers, by the definitions in ggml-common.h.
NUMBERS = {
    "F32": (0,),
    "F16": (0,),
    "BF16": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ1_S": (0,),
    "IQ1_M": ((49, 51, 53, 55),),  # bytes whose high nibbles hold the number
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "Q1_0": (0,),
    "Q2_0": (0,),
    "Q2_0_g128": (0,),
    "NVFP4": (0, 1, 2, 3),
}
# Little endian. Each kind of number has two NaNs, the second with the fewest bits set, and both
# infinities.
NOT_FINITE = {
    "F32": ("ffffffff", "0100807f", "0000807f", "000080ff"),
    "BF16": ("ffff", "817f", "807f", "80ff"),
    "half": ("ffff", "017c", "007c", "00fc"),
    "NVFP4": ("7f", "ff"),
}
LARGEST = {"half": b"\xff\x7b", "NVFP4": b"\x7e"}


def _put(data, start, at, number):
    """Write a number into the block at `start`."""
    if isinstance(at, int):
        data[start + at : start + at + len(number)] = number
        return
    for index, byte in enumerate(at):
        nibble = number[index // 2] >> 4 * (index % 2) & 15
        data[start + byte] = data[start + byte] & 15 | nibble << 4


def test_every_type_is_checked():
    assert set(NUMBERS) == set(BLOCKS)


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_single_non_finite_number_is_found(kind, tmp_path):
    """The number is found in the first, an inner and the last block. Codes with all bits set are
    not mistaken for one.
    """
    path, tensor = _quantized(tmp_path, kind)
    assert tensor.type == kind
    nbytes = BLOCKS[kind].nbytes
    sound = path.read_bytes()
    last = (tensor.stop - tensor.start) // nbytes - 1
    named = rf"m\.gguf: tensor 'blk\.0\.ffn_up\.weight' \({kind}\) holds NaN or infinity"
    for block in (0, 300, last):
        for at in NUMBERS[kind]:
            for number in map(bytes.fromhex, NOT_FINITE.get(kind, NOT_FINITE["half"])):
                place = tensor.start + block * nbytes
                damaged = bytearray(sound)
                _put(damaged, place, at, number)
                path.write_bytes(damaged)
                with pytest.raises(ModelFormatError, match=f"{named}.* in block {block} "):
                    Checkpoint.open(path).summary()
    data = bytearray(sound)
    if BLOCKS[kind].kind is not None:
        first = data[tensor.start : tensor.start + nbytes]
        for index in range(nbytes):
            first[index] = 255
        for at in NUMBERS[kind]:
            _put(first, 0, at, LARGEST.get(kind, LARGEST["half"]))
        data[tensor.start : tensor.start + nbytes] = first
    path.write_bytes(data)
    Checkpoint.open(path).summary()
