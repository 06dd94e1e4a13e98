"""Initial weights of the demo model: its first two layers start as an induction circuit.

From random weights, a small model spends most of its training on a plateau before it can look a
name up in its context. The circuit that forms at the end of that plateau is known, so the initial
weights contain it. Layer 0: head h attends to the token h + 1 places back, whatever the tokens
are, and passes on its embedding. Layer 1: each head compares two of the last tokens with two
tokens before every earlier position, and copies the token at that position. All weights are
trained; the others start as the library initializes them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

CONSTANT = 0.5  # a component that all embeddings share; read by heads that depend on position alone
PLACE_PAIRS = 8  # rotary pairs (the fastest) that position heads use
# Rotary pairs from here on turn so slowly that content can be compared at any distance.
CONTENT_FROM = 16
# For each query head of layer 1, the offsets of the tokens that the query reads (two features). The
# key reads one token further back.
QUERY_OFFSETS = ((1, 2), (1, 2), (0, 1), (0, 1))


def _orthonormal(rows: int, columns: int) -> Tensor:
    """Return random orthonormal rows."""
    return torch.linalg.qr(torch.randn(columns, rows)).Q.T


def _place_heads(model: LlamaForCausalLM, sharpness: float = 5.0) -> tuple[Tensor, list[Tensor]]:
    """Make layer 0's heads attend 1, 2, 3 and 4 tokens back.

    Returns:
        Their common value map, and their output maps.
    """
    config = model.config
    attention = model.model.layers[0].self_attn
    size = config.head_dim
    half = config.head_dim // 2
    speeds = model.model.rotary_emb.inv_freq[:PLACE_PAIRS]
    shared = CONSTANT * math.sqrt(config.hidden_size) / math.sqrt(1 + CONSTANT**2)
    gain = math.sqrt(sharpness * math.sqrt(size)) / shared
    value = _orthonormal(size, config.hidden_size)
    outputs = [_orthonormal(size, config.hidden_size).T for _ in range(config.num_attention_heads)]
    for head in range(config.num_key_value_heads):
        attention.k_proj.weight[head * size : head * size + PLACE_PAIRS, 0] = gain
        attention.v_proj.weight[head * size : (head + 1) * size] = value * 0.3
    for head, output in enumerate(outputs):
        start = head * size
        back = head + 1
        attention.q_proj.weight[start : start + PLACE_PAIRS, 0] = gain * torch.cos(speeds * back)
        attention.q_proj.weight[start + half : start + half + PLACE_PAIRS, 0] = -gain * torch.sin(
            speeds * back
        )
        attention.o_proj.weight[:, start : start + size] = output * 0.3
    return value, outputs


def _content_heads(
    model: LlamaForCausalLM, value: Tensor, outputs: list[Tensor], gain: float
) -> None:
    """Make layer 1's heads find the earlier position after the same tokens, and copy its token."""
    config = model.config
    attention = model.model.layers[1].self_attn
    size = config.head_dim
    half = config.head_dim // 2
    middle = (CONTENT_FROM + half) // 2
    features = [
        [*range(CONTENT_FROM, middle), *range(half + CONTENT_FROM, half + middle)],
        [*range(middle, half), *range(half + middle, size)],
    ]
    groups = config.num_attention_heads // config.num_key_value_heads
    mixers = [_orthonormal(len(feature), size) for feature in features]

    def read(back: int) -> Tensor:
        """Return the map from the residual stream to the embedding `back` tokens before."""
        return value if back == 0 else outputs[back - 1].T

    for head, offsets in enumerate(QUERY_OFFSETS):
        for feature, mixer, back in zip(features, mixers, offsets, strict=True):
            rows = torch.tensor(feature)
            attention.q_proj.weight[head * size + rows] += gain * mixer @ read(back)
            if head % groups == 0:
                attention.k_proj.weight[head // groups * size + rows] += (
                    gain * mixer @ read(back + 1)
                )
    copies = _orthonormal(size * config.num_key_value_heads, config.hidden_size)
    attention.v_proj.weight.copy_(copies * 0.4)
    for head in range(config.num_attention_heads):
        part = copies[head // groups * size : (head // groups + 1) * size]
        attention.o_proj.weight[:, head * size : (head + 1) * size] = part.T * 0.4


@torch.no_grad()
def initialise(model: LlamaForCausalLM, gain: float = 3.0) -> None:
    """Set the initial weights; others keep the library's random ones."""
    embeddings = model.model.embed_tokens.weight
    torch.nn.init.normal_(embeddings, std=1 / math.sqrt(model.config.hidden_size))
    embeddings[:, 0] = CONSTANT
    value, outputs = _place_heads(model)
    _content_heads(model, value, outputs, gain)
