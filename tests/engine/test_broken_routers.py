"""A router's NaN ends the request whose token it is, and no other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers.models.gpt_oss_files import save_gpt_oss
from kvboost_edge import CPUPagedEngine
from kvboost_edge.errors import KVBoostError
from kvboost_edge.models.packed import stream
from kvboost_edge.models.weights import safetensors_check

BAD = 200  # the token whose embedding is broken: its row of every router is NaN
GOOD_PROMPT = [i % 190 for i in range(60)]
BAD_PROMPT = [50, 60, BAD, *[(7 * i) % 190 for i in range(60)]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CPUPagedEngine]:
    directory = save_gpt_oss(tmp_path_factory.mktemp("broken"))
    tensors = load_file(directory / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD] = np.nan
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    options = {"weights": "f32", "backend": "cpu", "num_blocks": 64, "num_threads": 2, "debug_checks": True}
    with pytest.MonkeyPatch.context() as patch:
        # What looks for NaN in files would refuse this one.
        patch.setattr(safetensors_check, "_check_finite", lambda *_: None)
        patch.setattr(stream, "_checked", lambda source, tensor, start, stop, kind: source.rows(tensor, start, stop))
        engine = CPUPagedEngine.from_pretrained(str(directory), **options)
    with engine:
        yield engine


def test_the_request_ends_alone(engine: CPUPagedEngine) -> None:
    alone = engine.generate(GOOD_PROMPT, 8, "baseline", logit_bias={BAD: -100}).output_token_ids
    good, bad = (
        engine.submit(prompt, max_new_tokens=8, logit_bias={BAD: -100}) for prompt in (GOOD_PROMPT, BAD_PROMPT)
    )
    with pytest.raises(KVBoostError, match="NaN or infinite logits"):
        bad.result()
    assert good.result().output_token_ids == alone
    with pytest.raises(KVBoostError, match="NaN"):
        engine.logits([BAD])
    assert engine.generate(GOOD_PROMPT, 8, logit_bias={BAD: -100}).output_token_ids == alone
