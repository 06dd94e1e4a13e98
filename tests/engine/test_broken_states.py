"""A state that overflows ends the request whose tokens it took in, and no other; its slot is another one's then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from helpers.models.tiny_models import save_tiny_model
from kvboost_edge import CPUPagedEngine
from kvboost_edge.errors import KVBoostError

BAD = 200  # the only token with something in channel 0, with which inputs of a mixer are large
GOOD = [i % 190 for i in range(40)]
OPTIONS = {"max_new_tokens": 8, "ignore_eos": True, "logit_bias": {BAD: -1e4}}
# Of each family the projection into a mixer of the first layer, rows of it whose products overflow in its state, and
# how large they are. Products of a convolution, of B and x of Mamba2; values of the delta rule are infinite before.
LARGE = {
    "lfm2": ("layers.0.conv.in_proj.weight", (5, 2 * 64 + 5), 1e20),
    "granitemoehybrid-h": ("layers.0.mamba.in_proj.weight", (128 + 5, 2 * 128 + 3), 1e25),
    "qwen3_5_text": ("layers.0.linear_attn.in_proj_qkv.weight", (2 * 32 + 5,), 3e38),
}
# What adds to the hidden state, of which channel 0 stays as the embedding has it.
WAYS_OUT = ("out_proj.weight", "o_proj.weight", "w2.weight", "down_proj.weight", "output_linear.weight")


@pytest.fixture(scope="module", params=[(family, weights) for family in LARGE for weights in ("f32", "bf16")], ids=str)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CPUPagedEngine]:
    family, weights = request.param
    directory = _overflowing(family, tmp_path_factory.mktemp(family))
    sizes = {"num_blocks": 64, "max_num_seqs": 3, "max_batch_tokens": 24, "num_threads": 2}
    with CPUPagedEngine.from_pretrained(directory, weights=weights, debug_checks=True, **sizes) as engine:
        yield engine


def _overflowing(family: str, directory: Path) -> Path:
    """A tiny model, all of whose weights are finite."""
    model, (name, rows, size) = save_tiny_model(family, directory), LARGE[family]
    tensors = load_file(model / "model.safetensors")
    for key, values in tensors.items():
        if key.endswith("embed_tokens.weight"):
            values[:, 0] = 0
            values[BAD, 0] = 3
        elif key.endswith(WAYS_OUT):
            values[0] = 0
        elif key.endswith(name):
            values[list(rows), 0] = size
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize("bad", [[7, 9, BAD, 31, 8], [*GOOD[:36], BAD, *range(60)], [*range(90, 150), BAD]], ids=len)
def test_the_request_ends_alone(engine: CPUPagedEngine, bad: list[int]) -> None:
    """In its first pass, inside a later one, and with its last token."""
    others = [GOOD, [9, 8, 7], [*GOOD[:20], 4]]
    alone = [engine.generate(prompt, mode="baseline", **OPTIONS).output_token_ids for prompt in others]
    engine.reset_cache()
    doomed, *handles = [engine.submit(prompt, **OPTIONS) for prompt in (bad, *others)]
    with pytest.raises(KVBoostError, match="NaN or infinite logits"):
        doomed.result()
    assert [handle.result().output_token_ids for handle in handles] == alone
    stats = engine.paged_stats()
    assert stats["state_slots_used"] == sum(stats["state_snapshots"].values())
    with pytest.raises(KVBoostError, match="NaN or infinite logits"):
        engine.generate(bad, **OPTIONS)
    for prompt, expected in [*zip(others, alone, strict=True)] * 3:
        assert engine.generate(prompt, **OPTIONS).output_token_ids == expected
