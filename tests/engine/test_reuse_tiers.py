"""Spans at other positions whose blocks were evicted from the pool and restored from a tier."""

import pytest

from helpers.engine.documents import BARE, REUSE, document
from helpers.engine.fake_runner import Bench, checked, expected_tokens, fake_engine
from helpers.engine.hand_io_thread import DictTier
from kvboost_edge import CPUPagedEngine
from kvboost_edge.config import GenerationMode

NUM_BLOCKS = 24


HEAD = document(0, 20)
ONE = document(1, 70)
TWO = document(2, 70)
SERVED = [*HEAD, *ONE, *TWO]
ASKED = [*document(3, 20), *TWO, *document(4, 5), *ONE, 7, 8]


def flush(bench, first=100):
    """Evict all blocks with other prompts."""
    for number in range(first, first + 2):
        bench.ask(document(number, 16 * (NUM_BLOCKS - 2)), 1)


def reusing(*tiers, **options):
    """Build a bench that had a request with reuse. Afterwards it indexes the text of all requests."""
    bench = Bench(NUM_BLOCKS, tiers=tiers)
    bench.submit([1] * 40, 1, REUSE, repair=BARE, **options)
    return bench


def served(*tiers):
    """Build a bench that has served the prompt, with a request about it, and evicted its blocks
    since.
    """
    bench = reusing(*tiers)
    bench.ask(SERVED, 1)
    flush(bench)
    assert bench.manager.peek(SERVED, bench.parts.root) == 0
    return bench


def asked(bench, prompt=ASKED, **options):
    handle = bench.submit(prompt, 12, REUSE, repair=BARE, **options)
    bench.run()
    result = handle.result(0)
    assert list(result.output_token_ids) == expected_tokens(prompt, 12)
    assert bench.manager.used_block_count == 0
    bench.manager.check_invariants([])
    return result


def test_evicted_spans_are_found_and_restored():
    tier = DictTier()
    bench = served(tier)
    read = tier.num_read
    result = asked(bench)
    assert result.approximate
    assert result.reused_span_tokens > 100
    assert tier.num_read - read == len(SERVED) // 16
    assert result.hit_tokens == {"pool": 0}, "restored spans must not count as prefix hits"
    assert result.load_ms > 0
    read = tier.num_read
    assert asked(bench, [*document(5, 17), *TWO, *ONE, 9]).reused_span_tokens > 100
    assert tier.num_read == read, "spans in the pool must not be read again"


def test_without_a_tier_evicted_spans_are_forgotten():
    bench = served()
    assert bench.scheduler.sharing.finder._remembered is None
    assert not asked(bench).approximate


def test_lost_blocks_do_not_change_the_answer():
    tier = DictTier()
    bench = served(tier)
    tier.blocks.clear()
    assert not asked(bench).approximate
    for losses in (0.2, 0.5):
        shaky = DictTier("shaky", knows=False, losses=losses, seed=3)
        asked(served(shaky))


def test_only_evicted_blocks_are_read():
    """Chains lose their ends first, so only these are read from the tier."""
    tier = DictTier()
    bench = reusing(tier)
    bench.ask(SERVED, 1)
    bench.ask(document(50, 16 * (NUM_BLOCKS - 6)), 1)
    kept = bench.manager.peek(SERVED, bench.parts.root) // 16
    assert 0 < kept < len(SERVED) // 16
    read = tier.num_read
    assert asked(bench).reused_span_tokens > 100
    assert tier.num_read - read == len(SERVED) // 16 - kept


def test_spans_of_several_texts_are_restored_in_turn():
    tier = DictTier()
    bench = reusing(tier)
    for text in (ONE, TWO):
        bench.submit([*text, *document(9, 12)], 1)
    bench.run()
    flush(bench)
    assert asked(bench).reused_span_tokens > 90


def test_evicted_spans_are_isolated_between_tenants():
    tier = DictTier()
    bench = reusing(tier, tenant="a")
    bench.ask(SERVED, 1, tenant="a")
    flush(bench)
    read = tier.num_read
    assert not asked(bench, tenant="b").approximate
    assert tier.num_read == read
    assert asked(bench, tenant="a").approximate


def test_an_exact_request_restores_no_spans():
    tier = DictTier()
    bench = served(tier)
    read = tier.num_read
    result = bench.ask(ASKED, 4)
    assert (result.mode, tier.num_read) == (GenerationMode.PREFIX_CACHE, read)


def test_spans_that_do_not_fit_are_not_restored():
    tier = DictTier()
    bench = reusing(tier)
    long = [*document(20, 16 * 15), *TWO, *document(21, 16)]
    bench.ask(long, 1)
    flush(bench)
    read = tier.num_read
    result = asked(bench, [*document(22, 40), *TWO, *document(23, 16 * 5), 1])
    assert (result.approximate, tier.num_read) == (False, read)


def test_the_memory_of_evicted_spans_is_bounded():
    tier = DictTier()
    bench = served(tier)
    for round_number in range(8):
        flush(bench, 200 + 10 * round_number)
    remembered = bench.scheduler.sharing.finder._remembered
    assert len(remembered._places) == 4 * NUM_BLOCKS
    remembered.index.check()
    read = tier.num_read
    assert not asked(bench).approximate
    assert tier.num_read == read


@pytest.fixture
def small_engine():
    tier = DictTier()
    with fake_engine(48, tiers=[tier], primer_tokens=32, recompute_strategy="none") as engine:
        yield engine, tier


def test_warmed_documents_are_restored(small_engine):
    engine, tier = small_engine
    documents = [document(number, 64) for number in range(30, 33)]
    engine.generate([1] * 40, 1, mode=REUSE)
    engine.warm(documents=documents)
    prompt = [*document(3, 20), *documents[2], *documents[0], 7]
    for number in range(8):
        engine.generate(document(300 + number, 350), 1)
    assert engine._parts.manager.peek(documents[0], engine._parts.root) == 0
    read = tier.num_read
    result = checked(engine, prompt, 6, mode=REUSE)
    assert result.reused_span_tokens > 90
    assert tier.num_read > read


@pytest.mark.parametrize("bits", [16, 8])
def test_spans_restored_from_disk_are_bit_equal(bits, tmp_path):
    texts = [
        f"Doc {number}.\n" + f"The owner of boat {number} is Dibel. Its colour is {colour}. " * 5
        for number, colour in enumerate(("blue", "red", "green"))
    ]
    options = {"num_blocks": 64, "kv_cache_bits": bits, "reuse_gate": "off", "debug_checks": True}

    def ask(engine):
        return engine.generate(
            texts[2] + texts[1] + "What is red?", 8, mode=REUSE, logprobs=3, temperature=0
        )

    results = []
    for directory in ("off", tmp_path):
        with CPUPagedEngine.from_pretrained(
            "kvboost-edge/demo", disk_cache_dir=directory, **options
        ) as engine:
            engine.generate("Nothing is known of this yet.", 1, mode=REUSE)
            served = "".join(texts)
            engine.warm(served)
            if directory != "off":
                for number in range(2):
                    engine.generate([50 + number] * 900, 1)
                ids = engine.tokenizer.encode(served)
                assert engine._parts.manager.peek(ids, engine._parts.root) == 0
            results.append(ask(engine))
    assert results[0].reused_span_tokens > 64
    assert results[1].load_ms > 0
    for name in ("output_token_ids", "logprobs", "reused_span_tokens", "recomputed_tokens"):
        assert getattr(results[0], name) == getattr(results[1], name), name
