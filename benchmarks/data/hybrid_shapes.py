"""Shapes of hybrid models: LFM2, Qwen3.5, Granite 4, Nemotron-H and Falcon-H1.

Hybrid models with experts are in mixture_shapes.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Self

import gguf

from benchmarks.data.shapes import Heads, Shape, Tensor

__all__ = [
    "HYBRID_SHAPES",
    "DenseTwin",
    "FalconShape",
    "GraniteShape",
    "LFM2Shape",
    "NemotronShape",
    "Qwen35Shape",
    "StateSpaceShape",
]


@dataclasses.dataclass(frozen=True)
class LFM2Shape(Shape):
    """LFM2: short convolutions, with attention in the layers of `attends`."""

    architecture = "lfm2"
    wide_ends = True
    epsilon = 1e-5
    last_norm = "token_embd_norm"

    attends: tuple[int, ...] = ()
    taps: int = 3

    @property
    def kv_counts(self) -> list[int]:
        return [self.kv_heads * (index in self.attends) for index in range(self.layers)]

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        writer.add_vocab_size(self.vocab)
        writer.add_shortconv_l_cache(self.taps)

    def layer(self, index: int) -> Iterator[Tensor]:
        yield "attn_norm.weight", (self.hidden,)
        if index in self.attends:
            yield from self.attention(norms=(self.head_dim, self.head_dim))
        else:
            yield "shortconv.conv.weight", (self.hidden, self.taps)
            yield "shortconv.in_proj.weight", (3 * self.hidden, self.hidden)
            yield "shortconv.out_proj.weight", (self.hidden, self.hidden)
        yield "ffn_norm.weight", (self.hidden,)
        yield from self.behind(index)


@dataclasses.dataclass(frozen=True)
class Qwen35Shape(Shape):
    """Qwen3.5: gated delta rule, with gated attention in every fourth layer.

    Attributes:
        has_head: Whether the file contains a multi-token prediction head after the layers.
    """

    architecture = "qwen35"
    wide_ends = True

    key_heads: int = 16
    value_heads: int = 16
    state_dim: int = 128
    taps: int = 4
    every: int = 4
    has_head: bool = False

    @property
    def num_blocks(self) -> int:
        return self.layers + self.has_head

    def describe_sizes(self, writer: gguf.GGUFWriter) -> None:
        super().describe_sizes(writer)
        if self.has_head:
            writer.add_nextn_predict_layers(1)
            kinds = [not self._attends(index) for index in range(self.layers + 1)]
            writer.add_array(f"{self.architecture}.attention.recurrent_layers", kinds)

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        if not self.has_head:
            return
        block = f"blk.{self.layers}."
        for name, dims in self.layer(self.layers):
            yield f"{block}{name}", dims
        for name in ("enorm", "hnorm", "shared_head_norm"):
            yield f"{block}nextn.{name}.weight", (self.hidden,)
        yield f"{block}nextn.eh_proj.weight", (self.hidden, 2 * self.hidden)

    def _attends(self, index: int) -> bool:
        """Return whether a layer, or the head after the layers, has attention."""
        return index == self.layers or (index + 1) % self.every == 0

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        pairs = (
            self.head_dim // 8
        )  # a quarter of a head is rotated, in three sections as for text, height and width
        third = -(-pairs // 3)
        writer.add_rope_dimension_sections([third, third, pairs - 2 * third, 0])
        writer.add_rope_dimension_count(2 * pairs)
        writer.add_ssm_conv_kernel(self.taps)
        writer.add_ssm_state_size(self.state_dim)
        writer.add_ssm_group_count(self.key_heads)
        writer.add_ssm_time_step_rank(self.value_heads)
        writer.add_ssm_inner_size(self.state_dim * self.value_heads)
        writer.add_full_attention_interval(self.every)

    def layer(self, index: int) -> Iterator[Tensor]:
        yield "attn_norm.weight", (self.hidden,)
        if self._attends(index):
            heads = Heads(self.heads, self.kv_heads, self.head_dim, each=2)
            yield from self.attention(norms=(self.head_dim, self.head_dim), heads=heads)
        else:
            values = self.value_heads * self.state_dim
            channels = 2 * self.key_heads * self.state_dim + values
            yield "attn_qkv.weight", (channels, self.hidden)
            yield "attn_gate.weight", (values, self.hidden)
            yield "ssm_conv1d.weight", (channels, self.taps)
            yield "ssm_dt.bias", (self.value_heads,)
            yield "ssm_a", (self.value_heads,)
            yield "ssm_alpha.weight", (self.value_heads, self.hidden)
            yield "ssm_beta.weight", (self.value_heads, self.hidden)
            yield "ssm_norm.weight", (self.state_dim,)
            yield "ssm_out.weight", (self.hidden, values)
        yield "post_attention_norm.weight", (self.hidden,)
        yield from self.behind(index)


@dataclasses.dataclass(frozen=True)
class StateSpaceShape(Shape):
    """Base of the models with Mamba2 layers."""

    wide_ends = True
    epsilon = 1e-5

    value_heads: int = 48
    value_dim: int = 64
    groups: int = 1
    state_dim: int = 128
    taps: int = 4

    def describe_states(self, writer: gguf.GGUFWriter) -> None:
        writer.add_ssm_conv_kernel(self.taps)
        writer.add_ssm_state_size(self.state_dim)
        writer.add_ssm_group_count(self.groups)
        writer.add_ssm_inner_size(self.value_heads * self.value_dim)
        writer.add_ssm_time_step_rank(self.value_heads)

    def mixer(self, *, has_norm: bool = True) -> Iterator[Tensor]:
        values = self.value_heads * self.value_dim
        channels = values + 2 * self.groups * self.state_dim
        yield "ssm_in.weight", (values + channels + self.value_heads, self.hidden)
        yield "ssm_conv1d.weight", (channels, self.taps)
        yield "ssm_conv1d.bias", (channels,)
        yield "ssm_dt.bias", (self.value_heads,)
        yield "ssm_a", (self.value_heads, 1)
        yield "ssm_d", (self.value_heads, 1)
        if has_norm:
            yield "ssm_norm.weight", (self.groups, values // self.groups)
        yield "ssm_out.weight", (self.hidden, values)


@dataclasses.dataclass(frozen=True)
class GraniteShape(StateSpaceShape):
    """Granite 4: Mamba2, with attention without RoPE in the layers of `attends`.

    `wide` is the width of the MLPs that all tokens use.
    """

    architecture = "granitehybrid"

    attends: tuple[int, ...] = (5, 15, 25, 35)
    logit_scale: float = 6.0

    @property
    def kv_counts(self) -> list[int]:
        return [self.kv_heads * (index in self.attends) for index in range(self.layers)]

    def describe(self, writer: gguf.GGUFWriter) -> None:
        # value that llama.cpp's converter writes for models without RoPE
        writer.add_context_length(2**20)
        writer.add_embedding_length(self.hidden)
        writer.add_block_count(self.layers)
        writer.add_feed_forward_length(self.wide)
        writer.add_expert_shared_feed_forward_length(self.wide)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_counts)
        writer.add_rope_dimension_count(self.head_dim)
        writer.add_rope_scaling_finetuned(False)
        writer.add_layer_norm_rms_eps(self.epsilon)
        writer.add_vocab_size(self.vocab)
        writer.add_attention_scale(1 / self.head_dim)
        writer.add_embedding_scale(12.0)
        writer.add_residual_scale(0.22)
        writer.add_logit_scale(self.logit_scale)
        self.describe_states(writer)

    def layer(self, index: int) -> Iterator[Tensor]:
        yield "attn_norm.weight", (self.hidden,)
        if index in self.attends:
            yield from self.attention()
        else:
            yield from self.mixer()
        yield "ffn_norm.weight", (self.hidden,)
        yield from self.behind(index)


@dataclasses.dataclass(frozen=True)
class NemotronShape(StateSpaceShape):
    """Nemotron-H: each layer is Mamba2, attention without RoPE, or an MLP without a gate.

    `kinds` lists the layers as "M", "*" or "-", like the original config.
    """

    architecture = "nemotron_h"
    tied = False

    kinds: str = ""

    @property
    def widths(self) -> list[int]:
        return [self.wide * (kind == "-") for kind in self.kinds[: self.layers]]

    @property
    def kv_counts(self) -> list[int]:
        return [self.kv_heads * (kind == "*") for kind in self.kinds[: self.layers]]

    def describe(self, writer: gguf.GGUFWriter) -> None:
        self.describe_sizes(writer)
        writer.add_vocab_size(self.vocab)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_layer_norm_eps(self.epsilon)
        writer.add_layer_norm_rms_eps(self.epsilon)
        writer.add_rope_dimension_count(
            self.hidden // self.heads
        )  # value that llama.cpp's converter writes for models without RoPE
        writer.add_rope_scaling_finetuned(False)
        self.describe_states(writer)

    def layer(self, index: int) -> Iterator[Tensor]:
        yield "attn_norm.weight", (self.hidden,)
        kind = self.kinds[index]
        if kind == "*":
            yield from self.attention()
        elif kind == "M":
            yield from self.mixer()
        else:
            yield "ffn_up.weight", (self.wide, self.hidden)
            yield "ffn_down.weight", (self.hidden, self.wide)


@dataclasses.dataclass(frozen=True)
class FalconShape(StateSpaceShape):
    """Falcon-H1: Mamba2 in parallel to attention in every layer.

    The multipliers of its config are part of the weights.
    """

    architecture = "falcon-h1"
    tied = False

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        writer.add_vocab_size(self.vocab)
        self.describe_states(writer)

    def layer(self, index: int) -> Iterator[Tensor]:
        yield "attn_norm.weight", (self.hidden,)
        yield from self.attention()
        yield from self.mixer(has_norm=False)
        yield "ffn_norm", (self.hidden,)  # only this model's files use the name
        yield from self.behind(index)


@dataclasses.dataclass(frozen=True)
class DenseTwin(Shape):
    """Dense model of a hybrid model's size, in which every layer attends."""

    in_float64 = False
    wide_ends = True

    @classmethod
    def of(cls, shape: Shape) -> Self:
        own = {field.name: getattr(shape, field.name) for field in dataclasses.fields(Shape)}
        return cls(**{**own, "own_head_dim": shape.head_dim})


HYBRID_SHAPES = {
    "lfm2-1.2b": LFM2Shape(
        2048, 16, 32, 8, 8192, vocab=65536, context=128000, attends=(2, 5, 8, 10, 12, 14)
    ),
    "lfm2-tiny": LFM2Shape(256, 4, 4, 2, 512, vocab=1024, context=4096, attends=(1, 3)),
    "qwen3.5-0.8b": Qwen35Shape(
        1024, 24, 8, 2, 3584, vocab=248320, context=262144, own_head_dim=256, theta=1e7
    ),
    "qwen3.5-4b": Qwen35Shape(
        2560,
        32,
        16,
        4,
        9216,
        vocab=248320,
        context=262144,
        own_head_dim=256,
        theta=1e7,
        value_heads=32,
    ),
    "qwen3.5-4b-head": Qwen35Shape(
        2560,
        32,
        16,
        4,
        9216,
        vocab=248320,
        context=262144,
        own_head_dim=256,
        theta=1e7,
        value_heads=32,
        has_head=True,
    ),
    "qwen3.5-tiny": Qwen35Shape(
        256,
        4,
        4,
        2,
        512,
        vocab=1024,
        context=4096,
        own_head_dim=64,
        key_heads=2,
        value_heads=4,
        state_dim=32,
    ),
    "qwen3.5-head-tiny": Qwen35Shape(
        256,
        4,
        4,
        2,
        512,
        vocab=1024,
        context=4096,
        own_head_dim=64,
        key_heads=2,
        value_heads=4,
        state_dim=32,
        has_head=True,
    ),
    "granite-4-h-1b": GraniteShape(1536, 40, 12, 4, 4096, vocab=100352, context=131072),
    "granite-4-h-micro": GraniteShape(
        2048, 40, 32, 8, 8192, vocab=100352, context=131072, value_heads=64, logit_scale=8.0
    ),
    "granite-4-tiny": GraniteShape(
        256,
        4,
        4,
        2,
        512,
        vocab=1024,
        context=4096,
        attends=(1,),
        value_heads=8,
        state_dim=32,
        groups=2,
    ),
    "nemotron-3-nano-4b": NemotronShape(
        3136,
        42,
        40,
        8,
        12544,
        vocab=131072,
        context=262144,
        own_head_dim=128,
        value_heads=96,
        value_dim=80,
        groups=8,
        kinds="M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
    ),
    "nemotron-h-tiny": NemotronShape(
        256,
        5,
        4,
        2,
        512,
        vocab=1024,
        context=4096,
        own_head_dim=64,
        value_heads=8,
        state_dim=32,
        groups=2,
        kinds="M-*M-",
    ),
    "falcon-h1-1.5b": FalconShape(
        2048,
        24,
        8,
        2,
        4608,
        vocab=65537,
        context=131072,
        own_head_dim=128,
        theta=1e11,
        state_dim=256,
    ),
    "falcon-h1-tiny": FalconShape(
        256,
        4,
        4,
        2,
        512,
        vocab=1024,
        context=4096,
        own_head_dim=64,
        value_heads=8,
        state_dim=32,
        groups=2,
    ),
}
