"""Other Python threads continue while the engine prefills a long prompt."""

import numpy as np

from helpers.models.tiny_models import save_tiny_model
from helpers.ticks import assert_ticks_go_on
from kvboost_edge import CPUPagedEngine

TOKENS = 2048


def test_a_python_thread_keeps_ticking_during_a_prefill(tmp_path):
    """Nearly all of the time is one call of the attention kernel. If it held the GIL, the gap would
    be as long.
    """
    heads = {"num_attention_heads": 64, "head_dim": 64, "num_hidden_layers": 1}
    directory = save_tiny_model("llama", tmp_path, max_position_embeddings=TOKENS + 1, **heads)
    prompt = np.random.default_rng(0).integers(0, 256, TOKENS)
    options = {
        "backend": "cpu",
        "num_threads": 1,
        "num_blocks": TOKENS // 16,
        "max_batch_tokens": TOKENS,
    }
    with CPUPagedEngine.from_pretrained(directory, **options) as engine:
        assert_ticks_go_on(lambda: engine.generate(prompt, 1, "baseline"))
