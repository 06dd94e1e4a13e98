"""Seeded random model of a real shape as a GGUF file, on which every engine is timed.

It has a small tokenizer. Weights are normally distributed and never zero. Only numpy and gguf are
needed, so this runs in any engine's environment.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from benchmarks.data.k_blocks import (
    BLOCK,
    FEW_BITS,
    NARROW,
    more_bits,
    random_few_bits,
    random_mxfp4,
    random_narrow,
    random_nvfp4,
    random_q4_0,
    random_q4_k,
    random_q6_k,
    random_q8_0,
)
from benchmarks.data.shapes import Shape

__all__ = ["QUANTS", "add_tokenizer", "kept_gguf", "write_gguf"]

_Type = gguf.GGMLQuantizationType
_FILES = {"Q3_K": "Q3_K_S", "IQ2_S": "IQ2_M"}  # names of files whose matrices have the type
QUANTS = {
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_K_M": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "MXFP4": gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
    "NVFP4": gguf.LlamaFileType.MOSTLY_NVFP4,
    **{name: narrow.file_type for name, narrow in NARROW.items()},
    **{name: gguf.LlamaFileType[f"MOSTLY_{_FILES.get(name, name)}"] for name in FEW_BITS},
}


# Vectors that some files store as matrices.
_VECTORS = ("ssm_a", "ssm_d", "ssm_norm.weight")


def write_gguf(
    path: Path,
    shape: Shape,
    quant: str,
    *,
    tokenizer: Callable[[gguf.GGUFWriter, int], None] | None = None,
    taught: Callable[[str, npt.NDArray[np.float32]], None] | None = None,
) -> None:
    """Write the model, with all matrices in `quant` and norms and biases in float32.

    Q4_K_M is the usual mixture of Q6_K (embedding and `more_bits`) and Q4_K. MXFP4 applies only to
    experts, and the other matrices are Q8_0. With TQ1_0, TQ2_0, NVFP4 and the types in FEW_BITS,
    head and embedding are Q6_K.

    Args:
        path: File to write.
        shape: Shape of the model.
        quant: Key of `QUANTS`. It also applies to head and embedding.
        tokenizer: Adds a tokenizer with a number of tokens, instead of `add_tokenizer`.
        taught: Changes a matrix, given by name, before it is quantized.
    """
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(f"random {quant}")
    shape.describe(writer)
    writer.add_file_type(QUANTS[quant])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    (tokenizer or add_tokenizer)(writer, shape.vocab)
    rng = np.random.default_rng(0)
    for name, dims in shape.tensors():
        if len(dims) == 1 or name.endswith(_VECTORS):
            writer.add_tensor(name, _vector(rng, name, math.prod(dims), shape).reshape(dims))
        else:
            kind = _type_of(name, quant, shape)
            if kind is None:
                _add_narrow(writer, name, rng, dims, quant)
                continue
            teach = functools.partial(taught, name) if taught is not None else None
            writer.add_tensor(
                name,
                _matrix(rng, dims, kind, as_blocks=not shape.in_float64, taught=teach),
                raw_dtype=kind,
            )
    partial = path.with_suffix(".partial")
    writer.write_header_to_file(partial)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def kept_gguf(path: Path, shape: Shape, quant: str) -> Path:
    """Return the model's file, which is written if it does not exist."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"writing {path} ...", file=sys.stderr)
        write_gguf(path, shape, quant)
    return path


def _type_of(name: str, quant: str, shape: Shape) -> _Type | None:
    """Return the storage type of a matrix in a file of this kind; None for a type in NARROW."""
    own = shape.storage(name)
    is_end = name.startswith(("token_embd", "output."))
    if quant in NARROW and not own:
        return _Type.Q6_K if is_end and quant.startswith("TQ") else None
    if (quant in FEW_BITS or quant == "NVFP4") and is_end and not own:
        return _Type.Q6_K
    if own or quant not in ("Q4_K_M", "MXFP4"):
        return _Type[own or quant]
    if quant == "MXFP4":
        return _Type.MXFP4 if "_exps." in name else _Type.Q8_0
    if name.startswith("token_embd"):
        return _Type.Q6_K
    layer = int(name.split(".")[1])
    wide = name.endswith(("attn_v.weight", "ffn_down.weight"))
    return _Type.Q6_K if wide and more_bits(layer, shape.layers) else _Type.Q4_K


def _add_narrow(
    writer: gguf.GGUFWriter,
    name: str,
    rng: np.random.Generator,
    dims: tuple[int, ...],
    quant: str,
) -> None:
    """Add a random matrix of a type in NARROW, of which the package knows only some."""
    width = dims[-1]
    blocks = random_narrow(rng, math.prod(dims[:-1]), width, width**-0.5, quant)
    blocks = blocks.reshape(*dims[:-1], -1)
    writer.add_tensor(name, blocks, raw_dtype=_Type.I8)
    info = writer.tensors[-1][name]
    info.shape = dims
    info.dtype = NARROW[quant].number


def _vector(
    rng: np.random.Generator, name: str, count: int, shape: Shape
) -> npt.NDArray[np.float32]:
    """Return a vector: scales are 1, norms about 1, and biases small.

    A quarter of rope_freqs rotates, as in Gemma 4.
    """
    if name == "rope_freqs.weight":
        return np.where(np.arange(count) < count // 4, 1, 1e30).astype(np.float32)
    if name.endswith("ssm_a"):  # decay rate of the state heads: -exp(A_log)
        return -np.geomspace(0.05, 8.0, count).astype(np.float32)
    if "norm" in name or "scale" in name:
        return np.full(count, shape.norm(name, count), np.float32)
    return 0.1 * rng.standard_normal(count, np.float32)


def _matrix(
    rng: np.random.Generator,
    dims: tuple[int, ...],
    kind: _Type,
    *,
    as_blocks: bool,
    taught: Callable[[npt.NDArray[np.float32]], None] | None = None,
) -> npt.NDArray[np.uint8]:
    """Return one or several random matrices [rows, width] that preserve the size of their input.

    `as_blocks` generates random codes instead of quantizing normal numbers, which would take a
    minute per billion weights.
    """
    if len(dims) == 3:
        rows = dims[0] * dims[1]
        width = dims[2]
        every = _matrix(rng, (rows, width), kind, as_blocks=as_blocks, taught=taught)
        return every.reshape(dims[0], dims[1], -1)
    rows, width = dims
    if kind in _RANDOM_BLOCKS:
        assert width % BLOCK == 0, f"rows of {width} are no whole blocks of {BLOCK}"
        return _RANDOM_BLOCKS[kind](rng, rows, width, width**-0.5)
    if as_blocks and kind in _PLAIN_BLOCKS:
        return _PLAIN_BLOCKS[kind](rng, rows, width, width**-0.5)
    values = rng.standard_normal(dims, np.float32) * np.float32(width**-0.5)
    if taught is not None:
        taught(values)
    return np.asarray(gguf.quants.quantize(values, kind))


_RANDOM_BLOCKS = {
    _Type.Q4_K: random_q4_k,
    _Type.Q6_K: random_q6_k,
    _Type.NVFP4: random_nvfp4,
    **{_Type[kind]: functools.partial(random_few_bits, kind=kind) for kind in FEW_BITS},
}
_PLAIN_BLOCKS = {_Type.Q4_0: random_q4_0, _Type.Q8_0: random_q8_0, _Type.MXFP4: random_mxfp4}


def add_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """Add byte-level BPE with 256 bytes and one merge.

    The vocabulary is padded with tokens that no text contains.
    """
    shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    others = [b for b in range(256) if b not in shown]
    alphabet = [chr(b) for b in shown] + [chr(256 + i) for i in range(len(others))]
    tokens = [*alphabet, "th", "<|endoftext|>"]
    kinds = [gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL]
    eos = 257
    tokens += [f"<unused{i}>" for i in range(vocab - len(tokens))]
    kinds += [gguf.TokenType.UNUSED] * (vocab - len(kinds))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(eos)
    writer.add_eos_token_id(eos)
    writer.add_pad_token_id(eos)
    writer.add_add_bos_token(False)
