"""Documents computed alone: reused at other positions token by token, never with the primer they
were computed after.
"""

import numpy as np
import pytest

from helpers.engine.documents import BARE, BLEND, REUSE, SEAMS, document
from helpers.engine.fake_runner import (
    ROOT,
    Bench,
    assert_clean,
    checked,
    fake_engine,
    runner_of,
    token_logits,
)
from helpers.engine.hand_io_thread import DictTier
from kvboost_edge.engine.engine import CPUPagedEngine
from kvboost_edge.engine.handle import Handles
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.engine.request.terms import Terms
from kvboost_edge.errors import ConfigError, KVBoostError, RequestError
from kvboost_edge.kvcache.hashing import LoneRoot


def engine_of(num_blocks=96, **options):
    return fake_engine(
        num_blocks,
        **{"reuse_gate": "off", "recompute_strategy": "none", "primer_tokens": 64, **options},
    )


def test_documents_are_reused_at_other_positions():
    documents = [document(n, 50 + 7 * n) for n in range(1, 4)]
    with engine_of() as engine:
        warmed = engine.warm(documents=documents)
        assert (warmed.chunks_stored, warmed.token_count) == (3, sum(map(len, documents)))
        assert (warmed.chunk_size, warmed.partial_tail_tokens, warmed.chunk_boundary_aligned) == (
            71,
            0,
            True,
        )
        computed = runner_of(engine).computed
        prompt = document(0, 21) + documents[2] + documents[0] + documents[1] + document(9, 5)
        result = checked(engine, prompt, 12, mode=REUSE)
        # Whole blocks of computed tokens precede a document, so at most 15 tokens of it are
        # recomputed.
        assert warmed.token_count - 3 * 15 <= result.reused_span_tokens <= warmed.token_count
        assert result.reused_span_tokens + runner_of(engine).computed - computed == len(prompt) + 11
        assert (result.mode, result.gate) == (REUSE, "off")
        assert_clean(engine)


def test_the_context_of_warmed_documents_is_dropped():
    text = document(1, 60)
    with engine_of() as engine:
        engine.warm(documents=[text])
        documents = engine._documents
        primer = list(documents.lead(64))
        with engine._core.reading():
            manager = engine._parts.manager
            manager.check_invariants([])
            # Only the document's blocks are left, and no prompt finds them as its prefix.
            assert manager.published_block_count == 4
            assert manager.peek([*primer, *text, 0], engine._parts.root) == 0
            finder = engine._core.scheduler.sharing.finder
            assert finder.context_of(text, engine._parts.root) == 64
            assert finder.context_of(primer, engine._parts.root) is None
            assert finder.context_of(primer[:40], engine._parts.root) is None
        prompt = [*primer, *text, *document(9, 5)]
        result = checked(engine, prompt, 8, mode=REUSE)
        assert (result.exact_cached_tokens, result.reused_span_tokens) == (0, 60)
        assert result.cached_tokens == 60


def test_cached_documents_are_not_recomputed():
    one = document(1, 60)
    two = document(2, 60)
    with engine_of() as engine:
        engine.warm(documents=[one, one])
        computed = runner_of(engine).computed
        assert computed == 128  # once, with its last block filled up
        assert engine.warm(documents=[one]).chunks_stored == 1
        assert runner_of(engine).computed == computed
        assert engine.warm(documents=[one, two]).chunks_stored == 2
        assert runner_of(engine).computed == 2 * computed
        # Text that was served after enough other tokens is as good. Text with nothing before it is
        # not.
        three = document(3, 60)
        four = document(4, 60)
        engine.generate(document(8, 80) + three + [1] * 16, 1)
        engine.generate(four + [1] * 16, 1)
        computed = runner_of(engine).computed
        engine.warm(documents=[three])
        assert runner_of(engine).computed == computed
        engine.warm(documents=[four])
        assert runner_of(engine).computed == computed + 128


def test_documents_are_computed_after_a_primer():
    documents = [document(n, 40) for n in range(4)]
    with engine_of() as engine:
        read = engine._documents.read
        texts = [read(None, 0, documents[:count], Terms(), {}).texts for count in (4, 2, 1)]
        assert [text.tokens for text in texts[0]] == [tuple(one) for one in documents]
        assert texts[0][2].context == (*documents[0][-24:], *documents[1])
        assert texts[0][0].context == (*documents[2][-24:], *documents[3])
        assert texts[1][1].context[-40:] == tuple(documents[0])
        # If the others are too short, or there are none, the built-in primer precedes them.
        primer = texts[2][0].context
        assert len(primer) == 64
        assert texts[1][1].context[:24] == primer[-24:]
        engine.warm(documents=documents)
        assert runner_of(engine).computed == 4 * (64 + 48)  # the last block of each is filled up


def test_position_offset_sets_the_position_of_a_text():
    text = document(1, 70)
    with engine_of() as engine:
        warmed = engine.warm(text, position_offset=37)
        assert (warmed.chunks_stored, warmed.token_count, warmed.partial_tail_tokens) == (1, 70, 0)
        with engine._core.reading():
            assert engine._core.scheduler.sharing.finder.context_of(text, engine._parts.root) == 37
        prompt = document(0, 37) + text + [5]
        result = checked(engine, prompt, 8, mode=REUSE)
        assert result.reused_span_tokens >= 70 - 15


def test_documents_are_encoded_without_bos():
    with engine_of() as engine:
        text = "The bridge at Corran was paid for with tolls on salt, says a letter."
        assert engine.warm(documents=[text]).token_count == len(text.encode())
        ids = engine.tokenizer.encode(text, add_special_tokens=False)
        prompt = document(0, 20) + ids + [7]
        assert engine.generate(prompt, 4, mode=REUSE).reused_span_tokens >= len(ids) - 15


@pytest.mark.parametrize(
    ("options", "chunks"),
    [
        ({"chunk_size": 48}, 3),
        ({"chunk_size": 48, "overlap_k": 16, "sink_tokens": 4}, 3),
        ({"chunk_strategy": "fixed", "chunk_size": 64}, 2),
        ({"chunk_size": 48, "chunk_strategy": "document"}, 1),
        ({"chunk_size": 48, "chunk_boundary_window": 8}, 3),
        ({"primer_tokens": 0}, 1),
        ({"primer_tokens": 100}, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("engine_wide", [True, False], ids=["engine", "call"])
def test_documents_are_chunked_as_requested(options, chunks, engine_wide):
    text = document(1, 128)
    with engine_of(**(options if engine_wide else {})) as engine:
        warmed = engine.warm(documents=[text], **({} if engine_wide else options))
        assert warmed.chunks_stored == chunks
        assert warmed.partial_tail_tokens == 0
        prompt = document(0, 20) + text + document(9, 3)
        result = checked(engine, prompt, 12, mode=REUSE)
        assert result.reused_span_tokens >= 128 - 16 * (chunks + 1)
        assert_clean(engine)


def test_partial_chunks_are_counted():
    with engine_of() as engine:
        warmed = engine.warm(documents=[document(1, 60), document(2, 31), document(3, 10)])
        assert (warmed.chunks_stored, warmed.token_count, warmed.partial_tail_tokens) == (
            1,
            101,
            41,
        )
        assert not warmed.chunk_boundary_aligned
        assert warmed.alignment_warning is not None
        assert "min_chunk_tokens=32" in warmed.alignment_warning
        assert runner_of(engine).computed == 128
    with engine_of(num_blocks=24) as engine:
        warmed = engine.warm(documents=[document(n, 96) for n in range(8)])
        assert 0 < warmed.chunks_stored < 8
        assert warmed.partial_tail_tokens == 96 * (8 - warmed.chunks_stored)


def test_documents_are_restored_from_a_tier():
    tier = DictTier()
    texts = [document(n, 96) for n in (1, 2)]
    with engine_of(tiers=[tier]) as engine:
        engine.warm(documents=texts)
    assert len(tier.blocks) == 2 * (4 + 6)
    with engine_of(tiers=[tier]) as engine:
        assert engine.warm(documents=texts).chunks_stored == 2
        assert runner_of(engine).computed == 2  # the last token of each is never served
        prompt = document(0, 20) + texts[1] + texts[0] + [7]
        result = checked(engine, prompt, 12, mode=REUSE)
        assert result.reused_span_tokens >= 2 * (96 - 15)


def test_documents_are_isolated_between_tenants():
    text = document(1, 80)
    with engine_of() as engine:
        engine.warm(documents=[text], tenant="a", cache_salt="s")
        prompt = document(0, 20) + text + [7]
        whose = [{}, {"tenant": "b"}, {"tenant": "a"}, {"tenant": "b", "cache_salt": "s"}]
        assert [
            engine.generate(prompt, 1, mode=REUSE, **one).reused_span_tokens for one in whose
        ] == [0] * 4
        assert (
            engine.generate(prompt, 1, mode=REUSE, tenant="a", cache_salt="s").reused_span_tokens
            >= 65
        )


def test_evicted_documents_can_be_warmed_again():
    with engine_of(num_blocks=40) as engine:
        text = document(1, 96)
        assert engine.warm(documents=[text]).chunks_stored == 1
        for number in range(10, 20):
            engine.generate(document(number, 200), 1)
        with engine._core.reading():
            assert (
                engine._core.scheduler.sharing.finder.context_of(text, engine._parts.root) is None
            )
            engine._parts.manager.check_invariants([])
        assert engine.warm(documents=[text]).chunks_stored == 1
        assert_clean(engine)


@pytest.mark.parametrize("task", ["warm", "rows"])
def test_a_request_waits_for_few_of_many_inputs(task):
    """A request that arrives after the inputs is served before most of them."""
    inputs = [document(number, 64) for number in range(40)]
    handles = []
    seen = {}
    with engine_of(max_num_seqs=2, max_batch_tokens=64, primer_tokens=0) as engine:

        def look(batch):
            if "request" not in seen:
                seen["request"] = engine.submit([5, 6, 7], max_new_tokens=1)
            elif seen["request"].done:
                seen.setdefault("submitted", len(handles))

        runner_of(engine).on_forward = look
        if task == "warm":
            engine.warm(documents=inputs, handles=handles)
        else:
            requests = [
                engine._builder.make(ids, Terms(), SamplingParams(), logits_start=63)
                for ids in inputs
            ]
            assert len(list(engine._calls.rows(requests, handles, 4))) == 40
        assert len(handles) == 40
        assert all(handle.result(0).finish_reason == "length" for handle in handles)
        assert seen["submitted"] < 12
        assert_clean(engine)


@pytest.mark.parametrize("how", ["cancel", "error"])
def test_no_further_documents_are_computed_after_one_ended_early(how):
    documents = [document(number, 64) for number in range(40)]
    handles = Handles()
    with engine_of(max_num_seqs=2, max_batch_tokens=64, primer_tokens=0) as engine:
        runner = runner_of(engine)
        if how == "cancel":
            runner.on_forward = lambda batch: handles.stop()
            assert engine.warm(documents=documents, handles=handles).chunks_stored < 8
        else:
            runner.nan_for = {documents[3][-1]}
            with pytest.raises(KVBoostError, match="NaN"):
                engine.warm(documents=documents, handles=handles)
        assert len(handles) < 12
        assert all(handle.done for handle in handles)
        assert_clean(engine)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"documents": []}, "documents is an empty list"),
        ({"documents": ["words", ""]}, "document 1 is empty"),
        ({"documents": [[]]}, "document 0 is empty"),
        ({"documents": "words"}, "documents must be a list"),
        ({"documents": [3]}, "document 0 must be a string or a list of token ids, not int"),
        ({"documents": [[1, 260]]}, "token 1 of document 0 is 260"),
        ({"documents": [[1.5]]}, "token 0 of document 0=1.5 must be an integer"),
        ({"documents": ["\ud800"]}, "document 0 contains a lone surrogate"),
        (
            {"documents": [[1] * 350]},
            r"document 0: 350 tokens after 64 .* context of 400; lower primer_tokens=64",
        ),
        ({"documents": [[1] * 401], "primer_tokens": 0}, "401 tokens after 0 tokens of header"),
        ({"documents": [[1]], "position_offset": 3}, "give either a text"),
        ({"documents": [[1]], "text": "words"}, "give either a text"),
        ({}, "give either a text"),
        ({"documents": [[1]], "pin": True}, "pin=True pins prompt prefixes"),
        ({"documents": [[1]], "overlap_k": -1}, "overlap_k=-1"),
        ({"documents": [[1]], "primer_tokens": -1}, "primer_tokens=-1"),
        ({"documents": [[1]], "primer_tokens": "many"}, "primer_tokens='many'"),
        (
            {"documents": [[1]], "chunk_size": 8},
            "chunk_size=8 must be an integer of at least block_size=16",
        ),
        (
            {"documents": [[1]], "chunk_strategy": "document", "overlap_k": 4},
            "overlap_k=4.* chunk_strategy='document'",
        ),
        (
            {"documents": [[1]], "chunk_strategy": "fixed", "chunk_boundary_window": 4},
            "chunk_boundary_window=4",
        ),
        ({"documents": [[1]], "chunk_strategy": "left"}, "chunk_strategy='left'"),
        ({"documents": [[1]], "chunk_tokens": 4}, "unknown option 'chunk_tokens' of warm"),
        ({"text": "words", "chunk_size": 64}, "chunk_size= applies to documents"),
        ({"text": "words", "position_offset": -1}, "position_offset=-1"),
        (
            {"text": "words", "position_offset": 396},
            r"position_offset=396 .* 5 tokens .* context of 400",
        ),
        ({"text": "words", "position_offset": 1.5}, "position_offset=1.5 must be an integer"),
        (
            {"text": "words", "position_offset": 3, "chunk_size": 64},
            "chunk_size= applies to documents",
        ),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused_by_name(arguments, words):
    with engine_of() as engine:
        with pytest.raises(RequestError, match=words):
            engine.warm(**arguments)
        assert runner_of(engine).computed == 0
        assert_clean(engine)


def test_documents_are_refused_without_span_reuse():
    with engine_of() as engine:
        runner_of(engine).moved_keys_refusal = "it has no keys"
        for arguments in ({"documents": [[1] * 40]}, {"text": [1] * 40, "position_offset": 8}):
            with pytest.raises(
                RequestError, match="mode='chunk_kv_reuse' is refused: it has no keys"
            ):
                engine.warm(**arguments)
        assert engine.warm([1] * 140).chunks_stored == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"overlap_k": -1}, "overlap_k=-1"),
        ({"chunk_size": 4}, "chunk_size=4"),
        (
            {"chunk_strategy": "document", "sink_tokens": 4},
            "sink_tokens=4 are not supported with chunk_strategy='document'",
        ),
        ({"chunk_strategy": 3}, "chunk_strategy=3"),
        ({"primer_tokens": -1}, "primer_tokens=-1"),
        ({"primer_tokens": 10**9}, r"primer_tokens=1000000000 must be in 0\.\.65536"),
        ({"reuse_gate": "on"}, "reuse_gate='on'"),
    ],
    ids=str,
)
def test_contradictory_engine_options_are_refused_before_loading(options, words):
    with pytest.raises(ConfigError, match=words):
        CPUPagedEngine.from_pretrained("no such model", **options)


def test_only_tokens_after_the_primer_are_offered():
    bench = Bench()
    primer = document(5, 48)
    text = document(1, 64)
    lone = LoneRoot.of(ROOT, 3)
    assert lone == LoneRoot.of(ROOT, 3) != LoneRoot.of(ROOT, 2)
    bench.ask(primer + text, 1, terms={"root": lone})
    content = bench.manager.content
    finder = bench.scheduler.sharing.finder
    assert (len(content.under(lone)), len(content.under(ROOT))) == (3, 4)
    assert finder.context_of(text, ROOT) == 48
    assert finder.context_of(text, lone) is None
    assert [finder.context_of(primer, root) for root in (ROOT, lone)] == [None, None]
    assert bench.manager.peek(primer + text, ROOT) == 0
    # Blocks stay shared when those before them are evicted, and when these return.
    assert bench.manager.reset(content.under(lone)) == 3
    bench.check()
    assert finder.context_of(text, ROOT) == 48
    bench.ask(primer + text, 1, terms={"root": lone})
    assert (len(content.under(lone)), len(content.under(ROOT))) == (3, 8)
    assert finder.context_of(text, ROOT) == 48
    prompt = document(0, 20) + text + document(9, 9)
    handle = bench.submit(prompt, 20, REUSE, repair=BARE)
    assert bench.manager.reset(content.under(ROOT)) == 8
    bench.run()
    bench.answer(handle)
    assert not handle.result(0).approximate


@pytest.mark.parametrize("repair", [BARE, SEAMS, BLEND], ids=lambda repair: repair.strategy.value)
@pytest.mark.parametrize("start", [75, 99, 120, 130])
def test_logits_after_reused_spans_are_computed(repair, start):
    """Reuse ends before the first row whose logits are requested."""
    bench = Bench()
    text = document(1, 90)
    bench.ask(document(0, 32) + text, 1)
    ids = document(3, 20) + text + document(9, 21)
    before = bench.manager.published_block_count
    handle, rows = bench.submit_logits(ids, start, terms={"mode": REUSE, "repair": repair})
    bench.run()
    logits = np.concatenate(rows)
    assert np.array_equal(
        logits, np.stack([token_logits(ids[: i + 1]) for i in range(start, len(ids))])
    )
    assert handle.result(0).reused_span_tokens > 0
    assert bench.manager.published_block_count == before
    assert bench.manager.used_block_count == 0
