"""Sizes, metadata and tensors of the model shapes for random files.

Names and metadata are those of llama.cpp's converter. Only gguf is needed, so this runs in any
engine's environment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, NamedTuple, Self

import gguf

__all__ = [
    "SHAPES",
    "EmbeddingGemmaShape",
    "EmbeddingShape",
    "Gemma4Shape",
    "Heads",
    "Ministral3Shape",
    "Olmo3Shape",
    "Shape",
    "Tensor",
]

Tensor = tuple[str, tuple[int, ...]]
# Matrices that compute logits: the tied embedding and the LM head.
_ENDS = ("token_embd.weight", "output.weight")
# Suffixes of matrices with the same type in every file: convolutions, routers, expert biases (which
# have two dimensions), the layers after mean pooling, and a projection of Gemma 4 that is not
# quantized.
_OWN_TYPES = {
    ".conv.weight": "F32",
    ".ssm_conv1d.weight": "F32",
    ".ffn_gate_inp.weight": "F32",
    "_exps.bias": "F32",
    "dense_2.weight": "F32",
    "dense_3.weight": "F32",
    "per_layer_model_proj.weight": "BF16",
}


class Heads(NamedTuple):
    """Query heads, KV heads, head size, and the multiple of query rows for gates."""

    count: int
    kv_count: int
    dim: int
    each: int = 1


@dataclasses.dataclass(frozen=True)
class Shape:
    """Shape of a model: Qwen2, or Qwen3 (own head size, norms of queries and keys, no biases).

    Other families are subclasses, whose class attributes are common to all their models.

    Attributes:
        tied: Whether the embedding is also the LM head.
        wide_ends: Whether embedding and head have 8 bits in every file, as in public files.
        epsilon: Epsilon of the norms.
        last_norm: Name of the norm before the head.
    """

    tied: ClassVar[bool] = True
    wide_ends: ClassVar[bool] = False
    epsilon: ClassVar[float] = 1e-6
    last_norm: ClassVar[str] = "output_norm"

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    wide: int
    vocab: int = 151936
    context: int = 32768
    own_head_dim: int = 0
    theta: float = 1e6

    @property
    def head_dim(self) -> int:
        return self.own_head_dim or self.hidden // self.heads

    @property
    def architecture(self) -> str:
        """Architecture name in llama.cpp. Other families define it as an attribute."""
        return "qwen3" if self.own_head_dim else "qwen2"

    @property
    def in_float64(self) -> bool:
        """Whether float64_qwen.py supports the model."""
        return self.architecture in ("qwen2", "qwen3")

    @property
    def is_mixture(self) -> bool:
        """Whether a token reads only some of the weights."""
        return any("_exps." in name for name, _ in self.tensors())

    @property
    def keeps_states(self) -> bool:
        """Whether some layers have a recurrent state instead of KV."""
        return any(".shortconv." in name or ".ssm_" in name for name, _ in self.tensors())

    @property
    def widths(self) -> int | list[int]:
        """Width of the MLPs, for all layers or for each."""
        return self.wide

    @property
    def kv_counts(self) -> int | list[int]:
        """Number of KV heads, for all layers or for each."""
        return self.kv_heads

    @property
    def num_blocks(self) -> int:
        """Number of layers, including those after the language model's."""
        return self.layers

    def cut(self, layers: int) -> Self:
        """Return the shape with only the first layers."""
        return dataclasses.replace(self, layers=layers)

    def storage(self, name: str) -> str:
        """Return the type of a matrix that is the same in every file, or "" for other matrices."""
        if self.wide_ends and name in _ENDS:
            return "Q8_0"
        return next((kind for ending, kind in _OWN_TYPES.items() if name.endswith(ending)), "")

    def norm(self, name: str, size: int) -> float:
        """Return the weights of a norm."""
        return 1.0

    def describe(self, writer: gguf.GGUFWriter) -> None:
        """Write the metadata except name, file type and tokenizer."""
        self.describe_sizes(writer)
        if self.own_head_dim:
            writer.add_key_length(self.head_dim)
            writer.add_value_length(self.head_dim)
        writer.add_rope_freq_base(self.theta)
        writer.add_layer_norm_rms_eps(self.epsilon)

    def describe_sizes(self, writer: gguf.GGUFWriter) -> None:
        writer.add_context_length(self.context)
        writer.add_embedding_length(self.hidden)
        writer.add_block_count(self.num_blocks)
        writer.add_feed_forward_length(self.widths)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_counts)

    def tensors(self) -> Iterator[Tensor]:
        """Yield names and dimensions [rows, columns], in the order of the file."""
        yield "token_embd.weight", (self.vocab, self.hidden)
        yield f"{self.last_norm}.weight", (self.hidden,)
        for index in range(self.layers):
            yield from ((f"blk.{index}.{name}", dims) for name, dims in self.layer(index))
        if not self.tied:
            yield "output.weight", (self.vocab, self.hidden)

    def layer(self, index: int) -> Iterator[Tensor]:
        yield "attn_norm.weight", (self.hidden,)
        if self.architecture == "qwen2":
            yield from self.attention(biases="qkv")
        else:
            normed = self.head_dim if self.architecture.startswith("qwen3") else 0
            yield from self.attention(norms=(normed, normed))
        yield "ffn_norm.weight", (self.hidden,)
        yield from self.behind(index)

    def attention(
        self,
        *,
        norms: tuple[int, int] = (0, 0),
        biases: str = "",
        made: str = "qkv",
        heads: Heads | None = None,
    ) -> Iterator[Tensor]:
        """Yield the matrices of an attention layer.

        Args:
            norms: Sizes of the norms of queries and of keys, or 0 without norms.
            biases: Which of "qkvo" have a bias.
            made: Which of "qkv" the layer computes itself.
            heads: Heads, if they differ from the shape's.
        """
        count, kv_count, dim, each = heads or Heads(self.heads, self.kv_heads, self.head_dim)
        rows = {"q": each * count * dim, "k": kv_count * dim, "v": kv_count * dim}
        sizes = {"q": norms[0], "k": norms[1]}
        for name in made:
            yield f"attn_{name}.weight", (rows[name], self.hidden)
            if name in biases:
                yield f"attn_{name}.bias", (rows[name],)
            if sizes.get(name):
                yield f"attn_{name}_norm.weight", (sizes[name],)
        yield "attn_output.weight", (self.hidden, count * dim)
        if "o" in biases:
            yield "attn_output.bias", (self.hidden,)

    def behind(self, index: int) -> Iterator[Tensor]:
        """Yield the tensors after a layer's mixer and its norm."""
        yield from self.mlp(self.wide)

    def mlp(self, wide: int, ending: str = "") -> Iterator[Tensor]:
        yield f"ffn_gate{ending}.weight", (wide, self.hidden)
        yield f"ffn_up{ending}.weight", (wide, self.hidden)
        yield f"ffn_down{ending}.weight", (self.hidden, wide)


@dataclasses.dataclass(frozen=True)
class Ministral3Shape(Shape):
    """Ministral 3: YaRN, and queries scaled by position."""

    architecture = "mistral3"

    original_context: int = 16384

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        writer.add_vocab_size(self.vocab)
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(self.context / self.original_context)
        writer.add_rope_scaling_orig_ctx_len(self.original_context)
        writer.add_rope_scaling_yarn_beta_fast(32.0)
        writer.add_rope_scaling_yarn_beta_slow(1.0)
        writer.add_rope_scaling_yarn_log_mul(1.0)
        writer.add_attn_temperature_scale(0.1)


@dataclasses.dataclass(frozen=True)
class Olmo3Shape(Shape):
    """OLMo 3: norms after the blocks, a window in three of four layers, and an untied head."""

    architecture = "olmo2"
    tied = False

    window: int = 4096

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        writer.add_sliding_window(self.window)
        writer.add_sliding_window_pattern([(index + 1) % 4 != 0 for index in range(self.layers)])

    def layer(self, index: int) -> Iterator[Tensor]:
        yield from self.attention(norms=(self.heads * self.head_dim, self.kv_heads * self.head_dim))
        yield "post_attention_norm.weight", (self.hidden,)
        yield from self.mlp(self.wide)
        yield "post_ffw_norm.weight", (self.hidden,)


@dataclasses.dataclass(frozen=True)
class Gemma4Shape(Shape):
    """Gemma 4: two kinds of layers, and a second embedding for each layer.

    The last layers share KV and have MLPs of twice the width. The second embedding has `per_layer`
    values per layer, or 0 without one. `head_dim` is that of the layers with full attention.
    """

    architecture = "gemma4"
    wide_ends = True

    local_head_dim: int = 256
    window: int = 512
    every: int = 5
    shared: int = 20
    per_layer: int = 256

    @property
    def widths(self) -> list[int]:
        return [self.wide_of(index) for index in range(self.layers)]

    @property
    def kv_counts(self) -> list[int]:
        return [self.heads_of(index).kv_count for index in range(self.layers)]

    def norm(self, name: str, size: int) -> float:
        # Scores are not divided by sqrt(head_dim), so the weights are scaled instead, as in trained
        # models.
        return size**-0.5 if name.endswith("attn_q_norm.weight") else 1.0

    def is_full(self, index: int) -> bool:
        return (index + 1) % self.every == 0

    def is_shared(self, index: int) -> bool:
        return index >= self.layers - self.shared

    def heads_of(self, index: int) -> Heads:
        return Heads(
            self.heads, self.kv_heads, self.head_dim if self.is_full(index) else self.local_head_dim
        )

    def made(self, index: int) -> str:
        return "q" if self.is_shared(index) else "qkv"

    def cut(self, layers: int) -> Self:
        if layers % self.every:
            raise ValueError(
                f"layers={layers} must be a multiple of {self.every}, so that the last "
                "layer has full attention"
            )
        # KV is shared from another layer of the same kind.
        shared = min(self.shared * layers // self.layers, layers - self.every)
        return dataclasses.replace(self, layers=layers, shared=shared)

    def wide_of(self, index: int) -> int:
        return self.wide * (1 + self.is_shared(index))

    def describe(self, writer: gguf.GGUFWriter) -> None:
        self.describe_sizes(writer)
        writer.add_rope_freq_base(self.theta)
        writer.add_rope_freq_base_swa(1e4)
        writer.add_layer_norm_rms_eps(self.epsilon)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_key_length_swa(self.local_head_dim)
        writer.add_value_length_swa(self.local_head_dim)
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_rope_dimension_count_swa(self.local_head_dim)
        writer.add_sliding_window(self.window)
        writer.add_sliding_window_pattern([not self.is_full(index) for index in range(self.layers)])
        writer.add_shared_kv_layers(self.shared)
        writer.add_embedding_length_per_layer_input(self.per_layer)
        writer.add_final_logit_softcapping(30.0)

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        yield "rope_freqs.weight", (self.head_dim // 2,)
        if not self.per_layer:
            return
        yield "per_layer_token_embd.weight", (self.vocab, self.layers * self.per_layer)
        yield "per_layer_model_proj.weight", (self.layers * self.per_layer, self.hidden)
        yield "per_layer_proj_norm.weight", (self.per_layer,)

    def layer(self, index: int) -> Iterator[Tensor]:
        heads = self.heads_of(index)
        yield "attn_norm.weight", (self.hidden,)
        yield from self.attention(norms=(heads.dim, heads.dim), made=self.made(index), heads=heads)
        yield "post_attention_norm.weight", (self.hidden,)
        yield "ffn_norm.weight", (self.hidden,)
        yield from self.behind(index)
        yield "post_ffw_norm.weight", (self.hidden,)
        if self.per_layer:
            yield "inp_gate.weight", (self.per_layer, self.hidden)
            yield "proj.weight", (self.hidden, self.per_layer)
            yield "post_norm.weight", (self.hidden,)
        yield "layer_output_scale.weight", (1,)

    def behind(self, index: int) -> Iterator[Tensor]:
        yield from self.mlp(self.wide_of(index))


@dataclasses.dataclass(frozen=True)
class EmbeddingShape(Shape):
    """A model for text embeddings. `pooling` is 1 for the mean or 3 for the last token."""

    pooling: int = 3

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        writer.add_pooling_type(gguf.PoolingType(self.pooling))


@dataclasses.dataclass(frozen=True)
class EmbeddingGemmaShape(EmbeddingShape):
    """EmbeddingGemma: bidirectional, five of six layers with a window, two final matrices."""

    architecture = "gemma-embedding"

    window: int = 512
    dense_width: int = 3072

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        writer.add_sliding_window(self.window)
        writer.add_dense_features_dims("dense_2", self.hidden, self.dense_width)
        writer.add_dense_features_dims("dense_3", self.dense_width, self.hidden)

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        yield "dense_2.weight", (self.dense_width, self.hidden)
        yield "dense_3.weight", (self.hidden, self.dense_width)

    def layer(self, index: int) -> Iterator[Tensor]:
        yield "attn_norm.weight", (self.hidden,)
        yield from self.attention(norms=(self.head_dim, self.head_dim))
        yield "post_attention_norm.weight", (self.hidden,)
        yield "ffn_norm.weight", (self.hidden,)
        yield from self.mlp(self.wide)
        yield "post_ffw_norm.weight", (self.hidden,)


SHAPES = {
    "0.5b": Shape(896, 24, 14, 2, 4864),
    "1.5b": Shape(1536, 28, 12, 2, 8960),
    "4b": Shape(2560, 36, 32, 8, 9728, own_head_dim=128),
    "tiny": Shape(256, 4, 4, 2, 512, vocab=1024, context=4096),
    "ministral-3-3b": Ministral3Shape(
        3072, 26, 32, 8, 9216, vocab=131072, context=262144, own_head_dim=128
    ),
    "olmo-3-7b": Olmo3Shape(
        4096, 32, 32, 32, 11008, vocab=100278, context=65536, own_head_dim=128, theta=5e5
    ),
    "qwen3-embedding-0.6b": EmbeddingShape(1024, 28, 16, 8, 3072, vocab=151669, own_head_dim=128),
    "embeddinggemma-300m": EmbeddingGemmaShape(
        768, 24, 3, 1, 1152, vocab=262144, context=2048, own_head_dim=256, pooling=1
    ),
    "embedding-tiny": EmbeddingShape(256, 4, 4, 2, 512, vocab=1024, context=4096, own_head_dim=128),
    "embeddinggemma-tiny": EmbeddingGemmaShape(
        256,
        6,
        2,
        1,
        512,
        vocab=1024,
        context=2048,
        own_head_dim=128,
        pooling=1,
        window=64,
        dense_width=512,
    ),
    "gemma-4-e2b": Gemma4Shape(
        1536, 35, 8, 1, 6144, vocab=262144, context=131072, own_head_dim=512
    ),
    "gemma-4-tiny": Gemma4Shape(
        256,
        10,
        4,
        1,
        512,
        vocab=1024,
        context=4096,
        own_head_dim=128,
        local_head_dim=64,
        window=64,
        shared=5,
        per_layer=32,
    ),
}
