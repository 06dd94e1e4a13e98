"""Shapes of models with layers that keep a state, and of mixtures of experts: LFM2, LFM2-MoE, Qwen3.5, Qwen3-MoE."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import gguf

from peers.shapes import Shape, Tensor

__all__ = ["HYBRID_SHAPES", "LFM2MoeShape", "LFM2Shape", "Qwen3MoeShape", "Qwen35Shape"]


@dataclasses.dataclass(frozen=True)
class LFM2Shape(Shape):
    """LFM2: short convolutions, attention in the layers of `attends`."""

    attends: tuple[int, ...] = ()
    taps: int = 3

    @property
    def architecture(self) -> str:
        return "lfm2"

    @property
    def in_float64(self) -> bool:
        return False

    def storage(self, name: str) -> str:
        return "F32" if name.endswith(("shortconv.conv.weight", "ffn_gate_inp.weight")) else ""

    def describe(self, writer: gguf.GGUFWriter) -> None:
        writer.add_context_length(self.context)
        writer.add_embedding_length(self.hidden)
        writer.add_block_count(self.layers)
        writer.add_feed_forward_length(self.wide)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv([self.kv_heads * (index in self.attends) for index in range(self.layers)])
        writer.add_rope_freq_base(self.theta)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(self.vocab)
        writer.add_shortconv_l_cache(self.taps)

    def tensors(self) -> Iterator[Tensor]:
        yield "token_embd.weight", (self.vocab, self.hidden)
        yield "token_embd_norm.weight", (self.hidden,)
        for index in range(self.layers):
            yield from ((f"blk.{index}.{name}", dims) for name, dims in self.layer(index))

    def layer(self, index: int) -> Iterator[Tensor]:
        yield "attn_norm.weight", (self.hidden,)
        if index in self.attends:
            q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
            for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                yield f"attn_{name}.weight", (rows, self.hidden)
                if name != "v":
                    yield f"attn_{name}_norm.weight", (self.head_dim,)
            yield "attn_output.weight", (self.hidden, q_rows)
        else:
            yield "shortconv.conv.weight", (self.hidden, self.taps)
            yield "shortconv.in_proj.weight", (3 * self.hidden, self.hidden)
            yield "shortconv.out_proj.weight", (self.hidden, self.hidden)
        yield "ffn_norm.weight", (self.hidden,)
        yield from self.behind(index)

    def behind(self, index: int) -> Iterator[Tensor]:
        """What stands behind the mixer."""
        yield from self.mlp(self.wide)


@dataclasses.dataclass(frozen=True)
class LFM2MoeShape(LFM2Shape):
    """The same with experts behind the first layers; routers are in float32."""

    experts: int = 32
    used: int = 4
    expert_wide: int = 1792
    dense: int = 2

    @property
    def architecture(self) -> str:
        return "lfm2moe"

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        writer.add_expert_count(self.experts)
        writer.add_expert_used_count(self.used)
        writer.add_expert_feed_forward_length(self.expert_wide)
        writer.add_leading_dense_block_count(self.dense)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)

    def behind(self, index: int) -> Iterator[Tensor]:
        if index < self.dense:
            yield from self.mlp(self.wide)
        else:
            yield from _experts(self, self.experts, self.expert_wide)
            yield "exp_probs_b.bias", (self.experts,)


@dataclasses.dataclass(frozen=True)
class Qwen3MoeShape(Shape):
    """Qwen3 with experts in the place of MLPs."""

    experts: int = 128
    used: int = 8
    expert_wide: int = 768

    @property
    def architecture(self) -> str:
        return "qwen3moe"

    @property
    def in_float64(self) -> bool:
        return False

    def storage(self, name: str) -> str:
        return "F32" if name.endswith("ffn_gate_inp.weight") else ""

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        writer.add_expert_count(self.experts)
        writer.add_expert_used_count(self.used)
        writer.add_expert_feed_forward_length(self.expert_wide)

    def tensors(self) -> Iterator[Tensor]:
        yield from super().tensors()
        yield "output.weight", (self.vocab, self.hidden)

    def layer(self, index: int) -> Iterator[Tensor]:
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "attn_norm.weight", (self.hidden,)
        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            yield f"attn_{name}.weight", (rows, self.hidden)
            if name != "v":
                yield f"attn_{name}_norm.weight", (self.head_dim,)
        yield "attn_output.weight", (self.hidden, q_rows)
        yield "ffn_norm.weight", (self.hidden,)
        yield from _experts(self, self.experts, self.expert_wide)


@dataclasses.dataclass(frozen=True)
class Qwen35Shape(Shape):
    """Qwen3.5: the gated delta rule in all layers but every fourth, which attend through a gate."""

    key_heads: int = 16
    value_heads: int = 16
    state_dim: int = 128
    taps: int = 4
    every: int = 4

    @property
    def architecture(self) -> str:
        return "qwen35"

    @property
    def in_float64(self) -> bool:
        return False

    def storage(self, name: str) -> str:
        return "F32" if name.endswith("ssm_conv1d.weight") else ""

    def describe(self, writer: gguf.GGUFWriter) -> None:
        super().describe(writer)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_rope_dimension_count(self.head_dim // 4)
        writer.add_ssm_conv_kernel(self.taps)
        writer.add_ssm_state_size(self.state_dim)
        writer.add_ssm_group_count(self.key_heads)
        writer.add_ssm_time_step_rank(self.value_heads)
        writer.add_ssm_inner_size(self.state_dim * self.value_heads)
        writer.add_full_attention_interval(self.every)

    def layer(self, index: int) -> Iterator[Tensor]:
        yield "attn_norm.weight", (self.hidden,)
        if (index + 1) % self.every == 0:
            q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
            for name, rows in (("q", 2 * q_rows), ("k", kv_rows), ("v", kv_rows)):
                yield f"attn_{name}.weight", (rows, self.hidden)
                if name != "v":
                    yield f"attn_{name}_norm.weight", (self.head_dim,)
            yield "attn_output.weight", (self.hidden, q_rows)
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
        yield from self.mlp(self.wide)


def _experts(shape: Shape, count: int, wide: int) -> Iterator[Tensor]:
    yield "ffn_gate_inp.weight", (count, shape.hidden)
    yield "ffn_gate_exps.weight", (count, wide, shape.hidden)
    yield "ffn_up_exps.weight", (count, wide, shape.hidden)
    yield "ffn_down_exps.weight", (count, shape.hidden, wide)


HYBRID_SHAPES = {
    "lfm2-1.2b": LFM2Shape(
        2048, 16, 32, 8, 8192, vocab=65536, context=128000, own_head_dim=64, attends=(2, 5, 8, 10, 12, 14)
    ),
    "lfm2-tiny": LFM2Shape(256, 4, 4, 2, 512, vocab=1024, context=4096, own_head_dim=64, attends=(1, 3)),
    "lfm2-8b-a1b": LFM2MoeShape(
        2048, 24, 32, 8, 7168, vocab=65536, context=128000, own_head_dim=64, attends=(2, 6, 10, 14, 18, 21)
    ),
    "qwen3.5-0.8b": Qwen35Shape(1024, 24, 8, 2, 3584, vocab=248320, context=262144, own_head_dim=256, theta=1e7),
    "qwen3.5-4b": Qwen35Shape(
        2560, 32, 16, 4, 9216, vocab=248320, context=262144, own_head_dim=256, theta=1e7, value_heads=32
    ),
    "qwen3-30b-a3b-8l": Qwen3MoeShape(2048, 8, 32, 4, 6144, context=40960, own_head_dim=128),
}  # fmt: skip
