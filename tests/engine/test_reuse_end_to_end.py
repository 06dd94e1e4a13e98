"""Non-prefix reuse on the bundled model: its quality test, documents computed alone, and their
reuse.
"""

import numpy as np
import pytest

from kvboost_edge import CPUPagedEngine, GenerationMode
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.errors import RequestError
from kvboost_edge.reuse.builtin_texts import INTRODUCTION, PASSAGES, QUESTIONS

REUSE = GenerationMode.CHUNK_KV_REUSE


@pytest.fixture(scope="module", params=[16, 8], ids=["kv16", "kv8"])
def engine(request):
    with CPUPagedEngine.from_pretrained(
        "kvboost-edge/demo", num_blocks=320, kv_cache_bits=request.param
    ) as made:
        yield made


def prompt_of(engine, order, question=QUESTIONS[0]):
    encode = engine.tokenizer.encode
    parts = [encode(PASSAGES[number], False) for number in order]
    return [
        *encode(INTRODUCTION),
        *(token for part in parts for token in part),
        *encode(question, False),
    ]


def test_the_bundled_model_passes_the_quality_gate(engine):
    repair = engine._reuse.own_repair()
    verdict = engine._gate.verdict(repair)
    assert verdict.passed
    assert 0 < verdict.kl_reuse < verdict.kl_order
    assert verdict.num_tokens >= 48
    assert 0.5 < verdict.reused_share < 0.9
    assert engine.paged_stats()["cached_blocks"] == 0


@pytest.mark.some(2, 1)
def test_documents_are_reused_in_any_order(engine):
    assert engine.check_reuse().passed
    engine.reset_cache()
    warmed = engine.warm(documents=list(PASSAGES))
    assert (warmed.chunks_stored, warmed.partial_tail_tokens) == (8, 0)
    for order in ([5, 1, 7, 2], [2, 6, 0]):
        prompt = prompt_of(engine, order)
        result = engine.generate(prompt, 4, mode=REUSE)
        total = sum(len(engine.tokenizer.encode(PASSAGES[number], False)) for number in order)
        assert result.reused_span_tokens + result.recomputed_tokens == total
        assert total / 2 < result.reused_span_tokens < total
        assert (result.mode, result.gate) == (REUSE, "passed")


def test_a_document_after_its_own_primer_is_exact(engine):
    """A text that was warmed for its own place has the KV of the prompt, since nothing moves and
    nothing else precedes it. Its logits are equal as well.
    """
    engine.reset_cache()
    lead = engine._documents.lead(77)
    text = engine.tokenizer.encode(PASSAGES[3], False)
    prompt = [*lead, *text, *engine.tokenizer.encode(QUESTIONS[2], False)]
    answer = (1, 2, 3)
    engine.warm(text, position_offset=77)
    repair = engine._reuse.own_repair({"recompute_strategy": "none"})
    with engine._gate.privately() as whose:
        _, full = engine._gate.logits(prompt, answer, whose.full)
    result, reused = engine._gate.logits(prompt, answer, Terms(), repair)
    assert result.reused_span_tokens >= len(text) - 15
    scale = np.abs(full).max()
    bound = (
        5e-3 if engine.config.kv_cache_bits == 16 else 0.1
    )  # blocks are quantized whole, here with other boundaries
    assert np.abs(full - reused).max() < bound * scale
    moved, _ = engine._gate.logits(
        [*lead[:20], *text, *prompt[len(lead) + len(text) :]], answer, Terms(), repair
    )
    assert moved.reused_span_tokens > 0


@pytest.mark.some(2)
def test_verify_reports_how_far_answers_change(engine):
    engine.reset_cache()
    engine.warm(documents=list(PASSAGES))
    report = engine.verify_correctness([prompt_of(engine, [4, 1, 6])], max_new_tokens=8, mode=REUSE)
    assert bool(report) == (report.text_agreement == 1), str(report)
    assert report.kl_limit is not None
    assert 0 < report.mean_kl < report.kl_limit
    assert all(0.3 < check.agreement <= 1 for check in report.checks)


@pytest.mark.some(2, 1)
def test_reuse_is_refused_if_it_changes_more_than_reordering(engine, monkeypatch):
    """Without a reordering for comparison, no change is acceptable."""
    from kvboost_edge.reuse.quality_verdict import QualityPrompts

    in_order = QualityPrompts.prompts
    monkeypatch.setattr(QualityPrompts, "prompts", lambda self, *, reordered=False: in_order(self))
    # No other test uses this strategy and overlap, since verdicts are stored.
    repair = {"recompute_strategy": "selective", "recompute_overlap": 17}
    assert not engine.check_reuse(**repair).passed
    with pytest.raises(RequestError, match="refused for this model"):
        engine.generate(prompt_of(engine, [1, 2]), 1, mode=REUSE, **repair)
