"""A seeded random model of a real shape as a GGUF file, with a small tokenizer: what every engine is timed on.

Weights are normal numbers, never zeros. Needs numpy and gguf only, so that it runs in any engine's environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from peers.k_blocks import BLOCK, more_bits, random_q4_k, random_q6_k

__all__ = ["QUANTS", "SHAPES", "Shape", "add_tokenizer", "tensors_of", "write_gguf"]

_Type = gguf.GGMLQuantizationType
QUANTS = {
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_K_M": gguf.LlamaFileType.MOSTLY_Q4_K_M,
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model with tied embeddings: Qwen2, or Qwen3 (heads of a size of their own, norms of queries and keys,
    no biases)."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    wide: int
    vocab: int = 151936
    context: int = 32768
    own_head_dim: int = 0

    @property
    def head_dim(self) -> int:
        return self.own_head_dim or self.hidden // self.heads

    @property
    def architecture(self) -> str:
        return "qwen3" if self.own_head_dim else "qwen2"


SHAPES = {
    "0.5b": Shape(896, 24, 14, 2, 4864),
    "1.5b": Shape(1536, 28, 12, 2, 8960),
    "4b": Shape(2560, 36, 32, 8, 9728, own_head_dim=128),
    "tiny": Shape(256, 4, 4, 2, 512, vocab=1024, context=4096),
}


def write_gguf(path: Path, shape: Shape, quant: str) -> None:
    """Write the model; matrices in `quant` of `QUANTS`, head and embedding too, norms and biases in float32.

    Q4_K_M is the usual mixture: Q6_K for the embedding and for `more_bits`, else Q4_K.
    """
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(f"random {quant}")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.wide)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    if shape.own_head_dim:
        writer.add_key_length(shape.head_dim)
        writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_file_type(QUANTS[quant])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_tokenizer(writer, shape.vocab)
    rng = np.random.default_rng(0)
    for name, dims in tensors_of(shape):
        if len(dims) == 1:
            values = np.ones(dims, np.float32) if "norm" in name else 0.1 * rng.standard_normal(dims, np.float32)
            writer.add_tensor(name, values)
        else:
            kind = _type_of(name, quant, shape)
            writer.add_tensor(name, _matrix(rng, dims, kind), raw_dtype=kind)
    partial = path.with_suffix(".partial")
    writer.write_header_to_file(partial)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(path)


def _type_of(name: str, quant: str, shape: Shape) -> _Type:
    """The storage type of a matrix in a file of this kind."""
    if quant != "Q4_K_M":
        return _Type[quant]
    if name.startswith("token_embd"):
        return _Type.Q6_K
    layer, wide = int(name.split(".")[1]), name.endswith(("attn_v.weight", "ffn_down.weight"))
    return _Type.Q6_K if wide and more_bits(layer, shape.layers) else _Type.Q4_K


def _matrix(rng: np.random.Generator, dims: tuple[int, int], kind: _Type) -> npt.NDArray[np.uint8]:
    """A random matrix [rows, width] whose products keep the size of what goes in."""
    rows, width = dims
    if kind in _RANDOM_BLOCKS:
        assert width % BLOCK == 0, f"rows of {width} are no whole blocks of {BLOCK}"
        return _RANDOM_BLOCKS[kind](rng, rows, width, width**-0.5)
    values = rng.standard_normal(dims, np.float32) * np.float32(width**-0.5)
    return np.asarray(gguf.quants.quantize(values, kind))


_RANDOM_BLOCKS = {_Type.Q4_K: random_q4_k, _Type.Q6_K: random_q6_k}


def tensors_of(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", (shape.vocab, shape.hidden)
    yield "output_norm.weight", (shape.hidden,)
    for index in range(shape.layers):
        at = f"blk.{index}."
        yield f"{at}attn_norm.weight", (shape.hidden,)
        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            yield f"{at}attn_{name}.weight", (rows, shape.hidden)
            if shape.architecture == "qwen2":
                yield f"{at}attn_{name}.bias", (rows,)
            elif name != "v":
                yield f"{at}attn_{name}_norm.weight", (shape.head_dim,)
        yield f"{at}attn_output.weight", (shape.hidden, q_rows)
        yield f"{at}ffn_norm.weight", (shape.hidden,)
        yield f"{at}ffn_gate.weight", (shape.wide, shape.hidden)
        yield f"{at}ffn_up.weight", (shape.wide, shape.hidden)
        yield f"{at}ffn_down.weight", (shape.hidden, shape.wide)


def add_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """Byte-level BPE of 256 bytes and one merge, padded to the vocabulary with tokens no text contains."""
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
