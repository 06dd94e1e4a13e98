"""Shapes of mixtures of experts: Qwen3, gpt-oss, Gemma 4, LFM2, Qwen3.5 and Granite 4.

The large ones are measured with only their first layers (`Shape.cut`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import gguf

from benchmarks.data.hybrid_shapes import GraniteShape, LFM2Shape, Qwen35Shape
from benchmarks.data.shapes import Gemma4Shape, Heads, Shape, Tensor

__all__ = [
    "MIXTURE_SHAPES",
    "Experts",
    "Gemma4MoeShape",
    "GptOssShape",
    "GraniteMoeShape",
    "LFM2MoeShape",
    "Qwen3MoeShape",
    "Qwen35MoeShape",
]


@dataclasses.dataclass(frozen=True)
class Experts:
    """Number of experts, experts per token, and width of an expert."""

    count: int
    used: int
    wide: int

    def describe(self, writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(self.count)
        writer.add_expert_used_count(self.used)
        writer.add_expert_feed_forward_length(self.wide)

    def tensors(self, hidden: int, *, biases: bool = False) -> Iterator[Tensor]:
        """Yield the matrices of the router and of all experts."""
        rows = {"gate": (self.wide, hidden), "up": (self.wide, hidden), "down": (hidden, self.wide)}
        yield "ffn_gate_inp.weight", (self.count, hidden)
        if biases:
            yield "ffn_gate_inp.bias", (self.count,)
        for name, dims in rows.items():
            yield f"ffn_{name}_exps.weight", (self.count, *dims)
            if biases:
                yield f"ffn_{name}_exps.bias", (self.count, dims[0])


@dataclasses.dataclass(frozen=True)
class Qwen3MoeShape(Shape):
    """Qwen3 with experts instead of MLPs."""

    architecture = "qwen3moe"
    tied = False
    wide_ends = True

    experts: Experts = Experts(128, 8, 768)

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        self.experts.describe(writer)

    def behind(self, index: int) -> Iterator[Tensor]:
        yield from self.experts.tensors(self.hidden)


@dataclasses.dataclass(frozen=True)
class GptOssShape(Shape):
    """gpt-oss: a window in every other layer, a sink per head, and biases everywhere.

    `wide` is the width of an expert.
    """

    architecture = "gpt-oss"
    tied = False
    wide_ends = True

    experts: Experts = Experts(32, 4, 2880)
    window: int = 128
    original_context: int = 4096

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        self.experts.describe(writer)
        writer.add_sliding_window(self.window)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(self.context / self.original_context)
        writer.add_rope_scaling_orig_ctx_len(self.original_context)

    def layer(self, index: int) -> Iterator[Tensor]:
        yield "attn_norm.weight", (self.hidden,)
        yield from self.attention(biases="qkvo")
        yield "attn_sinks.weight", (self.heads,)
        yield "post_attention_norm.weight", (self.hidden,)
        yield from self.experts.tensors(self.hidden, biases=True)


@dataclasses.dataclass(frozen=True)
class Gemma4MoeShape(Gemma4Shape):
    """Gemma 4 with experts in parallel to every MLP.

    Layers with full attention have `full_kv_heads` key heads, which also serve as values.
    """

    experts: Experts = Experts(128, 8, 704)
    full_kv_heads: int = 2

    def heads_of(self, index: int) -> Heads:
        heads = super().heads_of(index)
        return heads._replace(kv_count=self.full_kv_heads) if self.is_full(index) else heads

    def made(self, index: int) -> str:
        return "qk" if self.is_full(index) else "qkv"

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        self.experts.describe(writer)

    def behind(self, index: int) -> Iterator[Tensor]:
        yield from super().behind(index)
        yield "post_ffw_norm_1.weight", (self.hidden,)
        yield "pre_ffw_norm_2.weight", (self.hidden,)
        yield "ffn_gate_inp.scale", (self.hidden,)
        yield from self.experts.tensors(self.hidden)
        yield "ffn_down_exps.scale", (self.experts.count,)
        yield "post_ffw_norm_2.weight", (self.hidden,)


@dataclasses.dataclass(frozen=True)
class LFM2MoeShape(LFM2Shape):
    """LFM2 with experts after the first `dense` layers."""

    architecture = "lfm2moe"

    experts: Experts = Experts(32, 4, 1792)
    dense: int = 2

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        self.experts.describe(writer)
        writer.add_leading_dense_block_count(self.dense)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)

    def behind(self, index: int) -> Iterator[Tensor]:
        if index < self.dense:
            yield from super().behind(index)
        else:
            yield from self.experts.tensors(self.hidden)
            yield "exp_probs_b.bias", (self.experts.count,)


@dataclasses.dataclass(frozen=True)
class Qwen35MoeShape(Qwen35Shape):
    """Qwen3.5 with experts instead of MLPs, and a shared expert of width `wide`."""

    architecture = "qwen35moe"
    tied = False

    experts: Experts = Experts(256, 8, 512)

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        self.experts.describe(writer)
        writer.add_expert_shared_feed_forward_length(self.wide)

    def behind(self, index: int) -> Iterator[Tensor]:
        yield from self.experts.tensors(self.hidden)
        yield "ffn_gate_inp_shexp.weight", (self.hidden,)
        yield from self.mlp(self.wide, "_shexp")


@dataclasses.dataclass(frozen=True)
class GraniteMoeShape(GraniteShape):
    """Granite 4 with experts, and a shared expert of width `wide`.

    Its smallest model is called h-tiny.
    """

    experts: Experts = Experts(64, 6, 512)

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        writer.add_expert_count(self.experts.count)
        writer.add_expert_used_count(self.experts.used)
        writer.kv_data[0].pop(f"{writer.arch}.feed_forward_length")
        writer.add_feed_forward_length(self.experts.wide)

    def behind(self, index: int) -> Iterator[Tensor]:
        yield from self.experts.tensors(self.hidden)
        yield from self.mlp(self.wide, "_shexp")


MIXTURE_SHAPES: dict[str, Shape] = {
    "lfm2-8b-a1b": LFM2MoeShape(
        2048, 24, 32, 8, 7168, vocab=65536, context=128000, attends=(2, 6, 10, 14, 18, 21)
    ),
    "qwen3-30b-a3b": Qwen3MoeShape(2048, 48, 32, 4, 6144, context=40960, own_head_dim=128),
    "qwen3.6-35b-a3b": Qwen35MoeShape(
        2048,
        40,
        16,
        2,
        512,
        vocab=248320,
        context=262144,
        own_head_dim=256,
        theta=1e7,
        value_heads=32,
    ),
    "granite-4-h-7b-a1b": GraniteMoeShape(1536, 40, 12, 4, 1024, vocab=100352, context=131072),
    "gpt-oss-20b": GptOssShape(
        2880, 24, 64, 8, 2880, vocab=201088, context=131072, own_head_dim=64, theta=1.5e5
    ),
    "gemma-4-26b-a4b": Gemma4MoeShape(
        2816,
        30,
        16,
        8,
        2112,
        vocab=262144,
        context=262144,
        own_head_dim=512,
        window=1024,
        every=6,
        shared=0,
        per_layer=0,
    ),
    "lfm2-moe-tiny": LFM2MoeShape(
        256, 4, 4, 2, 512, vocab=1024, context=4096, attends=(1, 3), experts=Experts(8, 2, 128)
    ),
    "qwen3-moe-tiny": Qwen3MoeShape(
        256, 4, 4, 2, 512, vocab=1024, context=4096, own_head_dim=64, experts=Experts(8, 2, 128)
    ),
    "qwen3.5-moe-tiny": Qwen35MoeShape(
        256,
        4,
        4,
        2,
        128,
        vocab=1024,
        context=4096,
        own_head_dim=64,
        key_heads=2,
        value_heads=4,
        state_dim=32,
        experts=Experts(8, 2, 128),
    ),
    "granite-4-moe-tiny": GraniteMoeShape(
        256,
        4,
        4,
        2,
        128,
        vocab=1024,
        context=4096,
        attends=(1,),
        value_heads=8,
        state_dim=32,
        experts=Experts(8, 2, 128),
    ),
    "gpt-oss-tiny": GptOssShape(
        256,
        4,
        4,
        2,
        128,
        vocab=1024,
        context=4096,
        own_head_dim=64,
        experts=Experts(8, 2, 128),
        window=32,
        original_context=1024,
    ),
    "gemma-4-moe-tiny": Gemma4MoeShape(
        256,
        6,
        4,
        2,
        128,
        vocab=1024,
        context=4096,
        own_head_dim=128,
        local_head_dim=64,
        window=64,
        every=3,
        shared=0,
        per_layer=0,
        experts=Experts(8, 2, 128),
        full_kv_heads=1,
    ),
}
