"""NaN in the keys and values of an early token ends its request alone, even where sliding windows hide that token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from helpers.models.tiny_models import build_tiny_model, save_tiny_model
from kvboost_edge import CPUPagedEngine
from kvboost_edge.errors import KVBoostError
from kvboost_edge.runners.torch.attention import PagedPass

BAD = 200  # the token whose embedding is broken
WINDOW = 24
GOOD_PROMPT = [i % 190 for i in range(150)]
BAD_PROMPT = [50, 60, BAD, *[(7 * i) % 190 for i in range(150)]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("mistral", tmp_path_factory.mktemp("mistral"))


@pytest.fixture(params=["cpu", "torch"])
def engine(directory: Path, request: pytest.FixtureRequest) -> Iterator[CPUPagedEngine]:
    options = {"backend": request.param, "num_threads": 1, "num_blocks": 64, "max_batch_tokens": 512}
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with CPUPagedEngine(broken_model(), tokenizer, debug_checks=True, **options) as engine:
        yield engine


def broken_model() -> PreTrainedModel:
    model = build_tiny_model("mistral")
    assert model.config.sliding_window == WINDOW
    with torch.no_grad():
        model.get_input_embeddings().weight[BAD] = float("nan")
    return model


@pytest.mark.parametrize("engine", ["cpu"], indirect=True)
def test_the_last_row_alone_does_not_show_it(engine: CPUPagedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three layers of a window of 24 look back 69 tokens. The torch backend weighs what a window hides with 0, and
    0 * NaN shows."""
    monkeypatch.setattr(PagedPass, "blank_broken", lambda self, logits, logit_rows: None)
    assert engine.generate(BAD_PROMPT, 1).finish_reason == "length"


def test_the_request_ends_alone_and_nothing_of_it_is_published(engine: CPUPagedEngine) -> None:
    alone = engine.generate(GOOD_PROMPT, 8, "baseline").output_token_ids
    published = engine.paged_stats()["loaded_chunks"]
    good, bad = (engine.submit(prompt, max_new_tokens=8) for prompt in (GOOD_PROMPT, BAD_PROMPT))
    with pytest.raises(KVBoostError, match="NaN or infinite logits near token 152"):
        bad.result()
    assert good.result().output_token_ids == alone
    stats = engine.paged_stats()
    assert (stats["loaded_chunks"], stats["used_blocks"]) == (published, 0)
    with pytest.raises(KVBoostError, match="NaN"):
        engine.logits(BAD_PROMPT)


def test_a_token_decoded_beside_it_is_unchanged(engine: CPUPagedEngine) -> None:
    """The pass holds a decode of one row and the broken prefill."""
    options = {"max_new_tokens": 100, "ignore_eos": True, "logit_bias": {BAD: -1e4}}
    alone = engine.generate(GOOD_PROMPT, mode="baseline", **options).output_token_ids
    running = engine.submit(GOOD_PROMPT, **options)
    next(running.events())
    with pytest.raises(KVBoostError, match="NaN"):
        engine.generate(BAD_PROMPT, 8)
    assert running.result().output_token_ids == alone
