"""Answers enter the next turn with the token ids they were generated with, only for their tenant,
and in bounded memory.
"""

import pytest

from helpers.engine.fake_runner import fake_tokenizer
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.request.answer_ids import AnswerStore
from kvboost_edge.text.rendered_chat import encode_with_answers

A = b"a" * 32
B = b"b" * 32


def test_the_store_keeps_the_latest_answer_of_each_root():
    store = AnswerStore()
    store.keep(A, A, "uti", [316, 89])
    store.keep(A, A, "uti", [42507])
    assert (store.find(A, "uti"), store.find(B, "uti"), store.find(A, "ut")) == (
        [42507],
        None,
        None,
    )
    store.keep(A, A, "x" * (1 << 20), [1])
    assert store.find(A, "x" * (1 << 20)) is None, "an answer above the limit must not be stored"
    for text, ids in (("", [1]), ("y", [])):
        store.keep(A, A, text, ids)
        assert store.find(A, text) is None
    store.keep(A, B, "uti", [1])
    store.forget(A)
    assert (store.find(A, "uti"), store.find(B, "uti")) == (None, [1])


class Pairs:
    """Tokenizer of characters with one id (1000 + code) for a doubled one. Single ids decode to the
    same text.
    """

    def encode(self, text, add_special_tokens=True):
        ids = []
        i = 0
        while i < len(text):
            doubled = text[i : i + 2] == text[i] * 2
            ids.append(ord(text[i]) + 1000 * doubled)
            i += 1 + doubled
        return ids

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(i - 1000) * 2 if i >= 1000 else chr(i) for i in ids)


@pytest.mark.parametrize(
    ("text", "answers", "kept", "wanted"),
    [
        ("u:hi a:loop u:", ["loop"], {"loop": "l o o p"}, "u : h i _ a : l o o p _ u :"),
        ("u:hi a:loop u:", ["loop"], {}, "u : h i _ a : l oo p _ u :"),
        ("u:loop a:loop", ["loop"], {"loop": "l o o p"}, "u : l oo p _ a : l oo p"),
        ("u:hi a:loop", ["loop"], {"loop": "l o o l"}, "u : h i _ a : l oo p"),
        (
            "u:hi a:loo a:pool",
            ["loo", "pool"],
            {"loo": "l o o", "pool": "p o o l"},
            "u : h i _ a : l o o _ a : p o o l",
        ),
        ("loop", ["loop"], {"loop": "l o o p"}, "l o o p"),
        ("u:hi", ["away"], {"away": "a w a y"}, "u : h i"),
    ],
)
def test_stored_ids_replace_an_answer_that_occurs_once(text, answers, kept, wanted):
    def ids(spaced):
        return [Pairs().encode(part.replace("_", " "))[0] for part in spaced.split()]

    found = {name: ids(value) for name, value in kept.items()}.get
    tokenizer = Pairs()
    assert encode_with_answers(text, answers, tokenizer, found) == ids(wanted)


def test_without_answers_the_tokenizer_is_used():
    tokenizer = fake_tokenizer()
    assert encode_with_answers("hello", ["el"], tokenizer, lambda text: None) == tokenizer.encode(
        "hello"
    )


def test_the_next_turn_of_a_chat_hits_the_whole_last_turn():
    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", num_blocks=200, seed=1) as engine:
        missed = 0
        special = dict.fromkeys(
            engine._parts.eos_token_ids, -100.0
        )  # such as an answer's text does not show
        for number in range(6):
            chat = [{"role": "user", "content": f"Tell me of {number}."}]
            first = engine.generate(chat, 60, temperature=1.5, logit_bias=special, tenant="a")
            chat += [
                {"role": "assistant", "content": first.output_text},
                {"role": "user", "content": "And then?"},
            ]
            kept = engine.kept_answers(tenant="a").find(first.output_text)
            assert kept == list(first.output_token_ids)
            assert engine.kept_answers().find(first.output_text) is None, (
                "an answer must not be found by another tenant"
            )
            size = engine.config.block_size
            full = (first.prompt_tokens + first.generated_tokens - 1) // size * size
            other = engine.generate(chat, 1, tenant="b")
            again = engine.generate(chat, 1, tenant="a")
            if again.prompt_tokens != other.prompt_tokens:
                missed += 1
                assert again.cached_tokens == full
        assert missed, "no answer differs from its tokenization: the test shows nothing"


def test_many_salts_do_not_evict_another_tenants_answers():
    with CPUPagedEngine.from_pretrained("kvboost-edge/demo", num_blocks=200, seed=1) as engine:
        chat = [{"role": "user", "content": "Tell me of it."}]
        text = engine.generate(chat, 20, tenant="a").output_text
        kept = engine.kept_answers(tenant="a").find(text)
        for number in range(90):
            engine.kept_answers(tenant="b", cache_salt=str(number)).keep("text", range(200_000))
        assert engine.kept_answers(tenant="b", cache_salt="89").find("text") is not None
        assert engine.kept_answers(tenant="b", cache_salt="0").find("text") is None, (
            "the salts of a tenant must share one limit"
        )
        assert kept is not None
        assert engine.kept_answers(tenant="a").find(text) == kept
