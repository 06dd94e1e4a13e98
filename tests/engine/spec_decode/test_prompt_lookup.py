"""Prompt lookup: the proposed continuation of a text, and the texts of its tenant that it is taken
from.
"""

import pytest

from helpers.engine.fake_runner import fake_engine, runner_of
from helpers.random_ids import random_ids
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.spec_decode.prompt_lookup import PromptLookup, TenantHistory
from kvboost_edge.errors import ConfigError, RequestError
from kvboost_edge.kernels.ngram_cache import append_entry, find_entry, new_ring
from kvboost_edge.kernels.suffix_automaton import automaton_bytes, extend_entry

SAID = list(range(100, 140))


def proposed(text, most=8, memory=None, tenant=b"a"):
    draft = PromptLookup(tenant, memory or TenantHistory()).propose(text, most)
    return None if draft is None else draft.token_ids


def test_prompt_lookup_proposes_what_followed_the_longest_match():
    assert proposed([*SAID, 7, *SAID[:5]]) == SAID[5:13]
    assert proposed([*SAID, 7, *SAID[:5]], most=2) == SAID[5:7]
    assert proposed([1, *SAID[:5], 50, 2, *SAID[1:5], 60, 3, *SAID[:5]])[:1] == [50], (
        "the longer match must win over the later one"
    )
    assert proposed([*SAID[:4], 50, 2, *SAID[:4], 60, 3, *SAID[:4]])[:1] == [60], (
        "of equal matches, the later one must win"
    )


def test_prompt_lookup_continues_a_repetition():
    assert proposed([5, 6, 7] * 4, most=7) == [5, 6, 7, 5, 6, 7, 5]
    assert proposed([9] * 10, most=4) == [9] * 4


def test_prompt_lookup_resumes_after_a_replaced_word():
    drafter = PromptLookup(b"a", TenantHistory())
    text = [*SAID, 7, *SAID[:5]]
    assert drafter.propose(text, 4).token_ids == SAID[5:9]
    text += [SAID[5], 999]  # where SAID has SAID[6]
    assert drafter.propose(text, 4).token_ids == SAID[7:11]
    for _ in range(3):
        drafter.learn(4, 0)
    assert drafter.propose([*text, 998], 4) is None, (
        "no draft may be proposed after several rejections"
    )
    assert drafter.propose([*text, 998, *SAID[20:24]], 4).token_ids == SAID[24:28]


@pytest.mark.parametrize("text", [[1], [1, 2, 3, 4, 5], [*SAID, 7, *SAID[:2]]])
def test_a_short_match_proposes_nothing(text):
    assert proposed(text) is None


@pytest.mark.parametrize("copied", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("keeps", [False, True])
def test_the_match_length_counts_last_tokens_that_occur_earlier_in_the_sequence(copied, keeps):
    """A match in another request does not count."""
    memory = TenantHistory()
    tail = [900, 901, 902, *SAID[:copied]]
    if keeps:
        memory.keep(b"a", tail)
    drafter = PromptLookup(b"a", memory)
    drafter.propose([*SAID, 7], 4)
    assert drafter.match_length == 0
    drafter.propose([*SAID, 7, *tail], 4)
    assert drafter.match_length == copied


def test_the_automaton_grows_with_its_text():
    drafter = PromptLookup(b"a", TenantHistory())
    text = random_ids(5000, 0, 0, 10**6)
    for length in (10, 1000, 1025, 4097, 5000):
        assert drafter.propose(text[:length], 4) is None
    assert drafter.propose([*text, *text[70:90]], 4).token_ids == text[90:94]


def test_earlier_answers_are_proposed_to_their_tenant_only():
    memory = TenantHistory()
    memory.keep(b"a", SAID)
    assert proposed([1, 2, *SAID[:10]], memory=memory) == SAID[10:18]
    assert proposed([1, 2, *SAID[:10]], memory=memory, tenant=b"b") is None
    assert proposed([1, 2, *SAID[:7]], memory=memory) is None, (
        "a match in the history must have at least eight tokens"
    )
    memory.forget()
    assert proposed([1, 2, *SAID[:10]], memory=memory) is None


def test_the_longest_match_of_text_and_history_wins():
    memory = TenantHistory()
    memory.keep(b"a", [*SAID[:20], 1000, 1001])
    assert proposed([*SAID[5:20], 2000, 3, *SAID[:20]], memory=memory)[:1] == [1000]
    assert proposed([*SAID[:20], 2000, 3, *SAID[:20]], memory=memory)[:1] == [2000], (
        "of equal matches, the one in the text itself must win"
    )


def test_requests_that_bypass_the_cache_read_no_history():
    memory = TenantHistory()
    memory.keep(b"a", [*SAID[:20], 1000, 1001])
    drafter = PromptLookup(b"a", memory, reads_history=False)
    assert drafter.propose([1, 2, *SAID[:10]], 4) is None
    assert drafter.propose([*SAID[5:20], 2000, 3, *SAID[:20]], 1).token_ids == [2000]


def test_the_history_is_bounded_for_many_tenants():
    memory = TenantHistory()
    for number in range(40):
        memory.keep(bytes([number]), SAID)
    assert memory.nbytes <= 32 * 1.6e6
    assert proposed([1, 2, *SAID[:10]], memory=memory, tenant=bytes([0])) is None
    assert proposed([1, 2, *SAID[:10]], memory=memory, tenant=bytes([39])) == SAID[10:18]


def test_rejected_drafts_lower_the_chance_until_retried():
    drafter = PromptLookup(b"a", TenantHistory())
    text = [*SAID, 7, *SAID[:5]]

    def chance():
        draft = drafter.propose(text, 8)
        return draft.chances[0]

    first = chance()
    for _ in range(6):
        drafter.learn(3, 0)
    low = chance()
    assert low < first / 2
    for _ in range(60):
        drafter.learn(0, 0)
    assert low < chance() <= first
    for _ in range(6):
        drafter.learn(8, 8)
    assert chance() > first


@pytest.fixture(scope="module")
def engines():
    found = {
        way: CPUPagedEngine.from_pretrained("kvboost-edge/demo", num_blocks=256, speculation=way)
        for way in ("off", "auto", "on")
    }
    yield found
    for engine in found.values():
        engine.close()


QUESTION = "Key 17 is 4711. Key 17 is 4711. Key 17 is 4711. Key"


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 0.7, "seed": 3, "top_p": 0.9}], ids=str
)
def test_answers_are_equal_with_every_setting(engines, options):
    results = {
        way: engine.generate(QUESTION, max_new_tokens=80, ignore_eos=True, logprobs=2, **options)
        for way, engine in engines.items()
    }
    assert results["off"].drafted_tokens == 0
    assert results["on"].drafted_tokens > 0
    for result in results.values():
        assert result.output_token_ids == results["off"].output_token_ids
        assert result.logprobs == results["off"].logprobs
        assert result.output_text == results["off"].output_text
        assert 0 <= result.accepted_tokens <= result.drafted_tokens


def test_a_request_overrides_the_engines_speculation(engines):
    ask = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    assert engines["on"].generate(QUESTION, speculation="off", **ask).drafted_tokens == 0
    assert engines["off"].generate(QUESTION, speculation="on", **ask).drafted_tokens > 0
    before = engines["on"].paged_stats()
    result = engines["on"].generate(QUESTION, max_draft_tokens=1, **ask)
    after = engines["on"].paged_stats()
    assert after["drafted_tokens"] - before["drafted_tokens"] == result.drafted_tokens > 0
    assert after["accepted_tokens"] - before["accepted_tokens"] == result.accepted_tokens


def test_one_tenants_answers_are_not_drafted_for_another(engines):
    engine = engines["on"]
    engine.reset_cache()
    memory = engine._scheduler.speculation.memory
    engine.generate(QUESTION, max_new_tokens=40, tenant="a")
    roots = set(memory._rings._roots)
    engine.generate(QUESTION, max_new_tokens=40, tenant="a", cache_salt="s")
    assert len(set(memory._rings._roots) - roots) == 1, "another salt must have a separate history"
    engine.generate(QUESTION, max_new_tokens=40, tenant="b", mode="baseline")
    assert len(memory._rings._roots) == 2, "a request that bypasses the cache must not be stored"
    assert engine.reset_cache() >= 0
    assert not memory._rings._roots


def test_a_baseline_answer_does_not_depend_on_earlier_answers(engines):
    engine = engines["on"]
    engine.reset_cache()
    ask = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    first = engine.generate(QUESTION, mode="baseline", **ask).drafted_tokens
    engine.generate(QUESTION, **ask)
    recalled = engine.generate(QUESTION, **ask).drafted_tokens
    assert engine.generate(QUESTION, mode="baseline", **ask).drafted_tokens == first != recalled


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"speculation": "maybe"}, "speculation='maybe'"),
        ({"speculation": True}, "speculation=True"),
        ({"max_draft_tokens": 0}, "max_draft_tokens=0"),
        ({"max_draft_tokens": 64}, "max_draft_tokens=64"),
        ({"max_draft_tokens": 1.5}, "max_draft_tokens=1.5"),
    ],
    ids=str,
)
def test_invalid_options_are_refused_by_name(engines, options, match):
    with pytest.raises(ConfigError, match=match):
        CPUPagedEngine.from_pretrained("kvboost-edge/demo", **options)
    with pytest.raises(RequestError, match=match):
        engines["on"].generate("x", **options)


def test_draft_kernels_are_compiled_before_the_first_draft(engines):
    assert engines["on"].generate(QUESTION, max_new_tokens=4).generated_tokens
    assert all(entry.is_ready for entry in (extend_entry, append_entry, find_entry))


def test_an_automaton_is_bounded_by_its_sequence():
    memory = TenantHistory()
    drafter = PromptLookup(b"a", memory, max_tokens=5000)
    for count in (10, 1025, 4097, 5000):
        drafter.propose(list(range(count)), 4)
        assert memory.nbytes <= automaton_bytes(8192), (
            "the automaton must be sized for the sequence's maximum length"
        )
    drafter.release()
    assert memory.nbytes == 0


def test_automata_are_bounded_in_total():
    memory = TenantHistory(most_automata_bytes=automaton_bytes(2048))
    first = PromptLookup(b"a", memory, 2048)
    second = PromptLookup(b"a", memory, 2048)
    text = [*range(30), *range(30)]
    assert first.propose(text + text * 10, 4) is not None
    assert first.propose(text * 20, 4) is not None
    assert memory.nbytes == automaton_bytes(2048)
    assert second.propose(text, 4) is None
    memory.keep(b"a", [*range(30), 77, 78])
    draft = second.propose(list(range(30)), 2)
    assert draft.token_ids == [77, 78]
    first.release()
    assert second.propose(text, 4) is not None
    second.release()
    assert memory.nbytes == new_ring(1 << 17).nbytes


def test_draft_bytes_are_reported_while_requests_run():
    with fake_engine(num_blocks=64, speculation="on") as engine:
        seen = list[int]()
        runner_of(engine).on_forward = lambda batch: seen.append(
            engine._scheduler.speculation.memory.nbytes
        )
        assert engine.paged_stats()["draft_bytes"] == 0
        engine.generate([1, 2, 3], max_new_tokens=20, temperature=0, ignore_eos=True)
        assert max(seen) == automaton_bytes(1024), (
            "the automaton must be counted while the request runs"
        )
        rings = engine._scheduler.speculation.memory._rings.num_bytes
        assert engine.paged_stats()["draft_bytes"] == rings > 0, (
            "a finished request must release its automaton"
        )
        engine.reset_cache()
        handle = engine.submit([1, 2, 3], max_new_tokens=300, temperature=0, ignore_eos=True)
        next(iter(handle))
        handle.cancel()
        handle.result(60)
        assert engine.paged_stats()["draft_bytes"] == 0, (
            "a cancelled request must release its automaton"
        )
