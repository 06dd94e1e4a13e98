"""Structured output: a finished answer matches its schema for any logits. Drafts, batches and
preemptions do not change it.
"""

import dataclasses
import json
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jsonschema_rs
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from helpers.engine.fake_runner import (
    CONTEXT,
    EOS_ID,
    VOCAB_SIZE,
    Bench,
    fake_engine,
    fake_parts,
    fake_tokenizer,
    runner_of,
)
from helpers.engine.schemas_made import made_schema
from kvboost_edge.config import EngineConfig
from kvboost_edge.engine.engine import CPUPagedEngine
from kvboost_edge.engine.grammar.compiler import GrammarCompiler, fits_schema
from kvboost_edge.engine.request.requested_grammar import Grammar
from kvboost_edge.errors import BackendUnavailable, KVBoostError, RequestError
from kvboost_edge.text.tokenizer import Tokenizer
from kvboost_edge.text.turns.lark import JSON_OPTIONS

COUNT = 320
MOST = CONTEXT - 20


@pytest.fixture(scope="module")
def engine():
    with fake_engine(num_blocks=512, debug_checks=False) as engine:
        yield engine


def prompt(number):
    return [number % 250, 1, 2 + number // 250]


@pytest.mark.parametrize("part", range(4))
@pytest.mark.some(4)
def test_answers_of_random_logits_fit_their_schemas(engine, part):
    """The fake runner's logits are noise, so only the grammar can make the answers valid."""
    seeds = range(part * COUNT // 4, (part + 1) * COUNT // 4)
    schemas = {seed: made_schema(seed) for seed in seeds}
    handles = {
        seed: engine.submit(
            prompt(seed), max_new_tokens=MOST, temperature=1.0, seed=seed, json_schema=schema
        )
        for seed, schema in schemas.items()
    }
    finished = 0
    for seed, handle in handles.items():
        result = handle.result(60)
        if result.finish_reason == "stop":
            finished += 1
            value = json.loads(result.output_text)
            jsonschema_rs.validate(schemas[seed], value)
        else:
            assert result.finish_reason == "length"
    assert finished >= 0.9 * len(schemas), "answers with bounded values must end"


FITTED = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "pattern": "^x+$"},
        "b": {"type": "array", "items": {"$ref": "#/$defs/pair"}, "maxItems": 2},
        "c": {"anyOf": [{"$ref": "#/$defs/pair"}, {"enum": [1, "ä", None]}]},
        "e": {"type": "object", "required": ["y"]},
    },
    "required": ["a"],
    "additionalProperties": False,
    "$defs": {
        "pair": {
            "type": "object",
            "properties": {"p": {"type": "integer", "maximum": 9}, "q": {"type": "boolean"}},
            "required": ["p", "q"],
            "additionalProperties": False,
        }
    },
}
PAIR = {"q": True, "p": 3}


@pytest.mark.parametrize(
    "value",
    [
        {"a": "x"},
        {"c": PAIR, "b": [PAIR, PAIR], "a": "xx"},
        {"b": [], "c": None, "a": "x"},
        {"a": "x", "c": "ä"},
        {"a": "y"},
        {"a": "x", "d": 1},
        {"b": []},
        {"a": "x", "b": [PAIR, PAIR, PAIR]},
        {"a": "x", "b": [{**PAIR, "p": 10}]},
        {"a": "x", "c": {"p": 1}},
        {"a": "x", "c": 2},
        {"a": "x", "e": {"z": 1, "y": 2}},
        [],
        "x",
    ],
)
def test_schema_validation_ignores_member_order(value):
    assert fits_schema(FITTED, value) == jsonschema_rs.is_valid(FITTED, value)


NUMBERS = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 1},
        "small": {"type": "number", "minimum": 0, "maximum": 1},
        "one": {"const": 1},
        "half": {"enum": [1e-7, 2.0, True]},
        "pair": {"enum": [{"a": 1, "b": [2]}, "x"]},
        "list": {
            "type": "array",
            "items": {"anyOf": [{"const": {"p": 0, "q": 1}}, {"type": "null"}]},
        },
    },
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "value",
    [
        {"n": 5.0},
        {"n": 5.5},
        {"n": 0.0},
        {"n": 1e18},
        {"small": 1e-07},
        {"small": 1.5e-300},
        {"small": -1e-07},
        {"one": 1.0},
        {"one": True},
        {"one": 2},
        {"half": 1e-7, "small": 1e-7},
        {"half": 2},
        {"small": float("inf")},
        {"small": float("nan")},
        {"half": 1},
        {"half": True},
        {"pair": {"b": [2.0], "a": 1}},
        {"pair": {"b": [3], "a": 1}},
        {"pair": {"b": [2], "a": True}},
        {"list": [{"q": 1, "p": 0.0}, None]},
        {"list": [{"q": 1}]},
    ],
    ids=str,
)
def test_schema_validation_ignores_how_equal_values_are_written(value):
    assert fits_schema(NUMBERS, value) == jsonschema_rs.is_valid(NUMBERS, value)


def test_a_lone_surrogate_matches_no_schema():
    assert not fits_schema({"type": "object"}, {"a": "\ud800"})


@pytest.mark.parametrize(
    "pattern",
    [
        r"[a-z]{3,8}@[a-z]{2,5}\.(com|org)",
        r"(\+|-)?[0-9]{1,3}(\.[0-9]{1,2})?",
        r"ä{2}🙂?ß",
        r"(ab|cd){2,3}",
    ],
)
def test_answers_match_their_regular_expression(engine, pattern):
    for seed in range(6):
        result = engine.generate(
            prompt(seed), max_new_tokens=60, temperature=1.0, seed=seed, regex=pattern
        )
        assert result.finish_reason == "stop"
        assert re.fullmatch(pattern, result.output_text)


def test_answers_are_among_the_choices(engine):
    choice = ["yes", "no", "yes, but later", 'a "quoted" one']
    found = {
        engine.generate(
            prompt(s), max_new_tokens=40, temperature=1.0, seed=s, choice=choice
        ).output_text
        for s in range(12)
    }
    assert found <= set(choice)
    assert len(found) > 1


@pytest.mark.parametrize(
    ("grammar", "form"),
    [
        ('start: "(" inner ")"\ninner: /[a-c]{2}/ | start', r"\(+[a-c]{2}\)+"),
        ('root ::= "x" digits "y"\ndigits ::= [0-9] | [0-9] [0-9]', r"x[0-9]{1,2}y"),
    ],
    ids=["lark", "gbnf"],
)
def test_answers_fit_their_grammar(engine, grammar, form):
    result = engine.generate(
        prompt(1), max_new_tokens=200, temperature=1.0, seed=1, grammar=grammar
    )
    if result.finish_reason == "stop":
        assert re.fullmatch(form, result.output_text)
    else:
        assert re.match(form.split("[", maxsplit=1)[0], result.output_text)


@pytest.mark.parametrize("way", ["off", "on"])
def test_answers_are_the_same_with_and_without_drafts(way, scale):
    """Tokens that the schema forces are drafted, in addition to those of prompt lookup."""
    with fake_engine(num_blocks=256, speculation=way) as engine:
        results = [
            engine.generate(
                prompt(s),
                max_new_tokens=MOST,
                temperature=1.0,
                seed=s,
                json_schema=made_schema(s),
                logprobs=1,
            )
            for s in range(scale(12, 24))
        ]
    with fake_engine(num_blocks=256) as plain:
        for number, result in enumerate(results):
            alone = plain.generate(
                prompt(number),
                max_new_tokens=MOST,
                temperature=1.0,
                seed=number,
                json_schema=made_schema(number),
                logprobs=1,
            )
            assert result.output_token_ids == alone.output_token_ids
            assert result.logprobs == alone.logprobs
    assert (sum(result.drafted_tokens for result in results) > 0) == (way == "on")
    if way == "on":
        assert sum(result.accepted_tokens for result in results) > 50


def test_batches_and_preemption_do_not_change_answers():
    alone = []
    for number in range(5):
        with fake_engine(num_blocks=64) as engine:
            result = engine.generate(
                prompt(number),
                max_new_tokens=100,
                temperature=1.0,
                top_p=1.0,
                min_p=0.0,
                seed=3,
                regex="[a-z ]{90}",
            )
            alone.append(list(result.output_token_ids))
    bench = Bench(num_blocks=10, max_num_seqs=5)
    handles = [
        bench.submit(
            prompt(number),
            100,
            temperature=1.0,
            seed=3,
            stop_ids=frozenset({EOS_ID}),
            terms={"grammar": Grammar("regex", "[a-z ]{90}")},
        )
        for number in range(5)
    ]
    while not all(handle.done for handle in handles):
        bench.step()
    assert bench.scheduler.num_preemptions > 0
    assert [list(handle.result(0).output_token_ids) for handle in handles] == alone


def test_max_new_tokens_cuts_a_constrained_answer(engine):
    result = engine.generate(
        prompt(1), max_new_tokens=5, temperature=0, json_schema={"const": "a long text to write"}
    )
    assert (result.finish_reason, result.output_text) == ("length", '"a lo')


def test_white_space_in_json_is_bounded(engine):
    """JSON allows any amount of white space, and small models tend to produce it."""
    likely = dict.fromkeys(engine.tokenizer.encode(" \n\t"), 100.0)
    schema = {"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3}
    result = engine.generate(
        prompt(1), max_new_tokens=MOST, temperature=0, json_schema=schema, logit_bias=likely
    )
    assert result.finish_reason == "stop"
    assert json.loads(result.output_text) == [1, 1, 1]
    assert len(result.output_text) > 20, "the answer has little white space: the test shows nothing"


EIGHTS = int("8" * 16)


@pytest.mark.parametrize(
    ("schema", "longest"),
    [
        ({"type": "integer"}, EIGHTS),
        ({"type": "integer", "minimum": 1}, EIGHTS),
        ({"type": ["integer", "null"], "multipleOf": 8}, EIGHTS),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, EIGHTS),
        ({"allOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": {"type": "integer"}}}, EIGHTS),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 1}, [EIGHTS]),
        ({"type": "integer", "not": {"const": 5}}, EIGHTS),
        ({"type": "integer", "maximum": 999}, 888),
        ({"type": "integer", "maximum": 10**17}, EIGHTS * 10 + 8),
        ({"type": "integer", "enum": [10**17]}, 10**17),
        ({"allOf": [{"type": "integer"}, {"const": 10**17}]}, 10**17),
    ],
    ids=str,
)
def test_integers_are_limited_to_16_digits_if_the_schema_sets_no_bound(engine, schema, longest):
    """Small models sometimes never stop writing digits."""
    likely = dict.fromkeys(engine.tokenizer.encode("8"), 100.0)
    result = engine.generate(
        prompt(1), max_new_tokens=60, temperature=0, json_schema=schema, logit_bias=likely
    )
    assert result.finish_reason == "stop"
    assert json.loads(result.output_text) == longest


def test_negative_integers_are_limited_to_16_digits(engine):
    likely = dict.fromkeys(engine.tokenizer.encode("-8"), 100.0)
    result = engine.generate(
        prompt(1),
        max_new_tokens=60,
        temperature=0,
        json_schema={"type": "integer", "maximum": -1},
        logit_bias=likely,
    )
    assert (result.finish_reason, result.output_text) == ("stop", f"-{EIGHTS}")


def test_the_limit_of_integers_does_not_apply_to_validation():
    assert fits_schema({"type": "integer"}, 10**20)


def test_a_stop_string_ends_inside_a_grammar(engine):
    result = engine.generate(
        prompt(1), max_new_tokens=40, temperature=0, choice=["one, two, three"], stop=", t"
    )
    assert (result.finish_reason, result.output_text) == ("stop", "one")


def test_logprobs_are_those_before_masking(engine):
    free = engine.generate(prompt(1), max_new_tokens=1, temperature=0, logprobs=0)
    fitted = engine.generate(prompt(1), max_new_tokens=1, temperature=0, logprobs=0, choice=["z"])
    assert fitted.logprobs[0].logprob < free.logprobs[0].logprob < 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"json_schema": [1]}, "json_schema must be an object"),
        ({"json_schema": "{"}, "json_schema is not valid JSON"),
        ({"json_schema": {"type": "object", "not": {}}}, "json_schema is not supported: .*not"),
        ({"json_schema": {"type": "strange"}}, "the schema is invalid: Invalid type: strange"),
        ({"json_schema": {"properties": 3}}, "the schema is invalid: properties must be"),
        ({"json_schema": {"type": "integer", "minimum": "a"}}, "the schema is invalid: Expected"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "the schema is invalid: Pointer '/nowhere'"),
        ({"json_schema": {"$ref": "https://example.com/a.json"}}, "json_schema is not supported"),
        (
            {"json_schema": {"description": "x" * (5 << 20)}},
            "json_schema has 52[0-9]+ bytes; at most",
        ),
        (
            {"json_schema": {"type": "array", "items": {"enum": [float("nan")]}}},
            "json_schema is not valid JSON",
        ),
        ({"regex": "(a"}, "regex is not supported: .*parse error: unclosed group$"),
        ({"regex": "a(?=b)"}, "parse error: look-around, .* is not supported$"),
        ({"regex": ""}, "regex must be a string with at least one character"),
        ({"regex": 3}, "regex must be a string"),
        ({"regex": "a" * 70_000}, "regex has 70000 bytes"),
        ({"regex": "a\ud800"}, r"regex contains the lone surrogate '\\ud800' at position 1"),
        ({"grammar": 'start: "\udfff"'}, "grammar contains the lone surrogate"),
        ({"json_schema": {"enum": ["\ud800"]}}, "json_schema is not valid: .* hex escape"),
        ({"grammar": "start: nowhere"}, "grammar is not supported"),
        ({"choice": []}, "choice has 0 entries"),
        ({"choice": "yes"}, "choice must be a list"),
        ({"choice": ["a", ""]}, "choice holds ''"),
        ({"choice": ["a", 1]}, "choice holds 1"),
        ({"regex": "a", "choice": ["b"]}, "choice= and regex= are both given"),
        ({"regex": "a", "max_new_tokens": 0}, "regex needs generated text"),
    ],
    ids=str,
)
def test_invalid_constraints_are_refused_by_name(engine, options, match):
    with pytest.raises(RequestError, match=match):
        engine.generate("x", **options)
    assert engine.paged_stats()["used_blocks"] == 0


def test_a_recursive_schema_ends_at_the_token_limit(engine):
    schema = {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}},
    }
    result = engine.generate(prompt(2), max_new_tokens=50, temperature=0, json_schema=schema)
    assert result.finish_reason == "length"
    assert set(result.output_text) <= set("[ \n\t\r")


def test_a_missing_package_is_named_in_the_error(engine, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(
        BackendUnavailable, match=r"regex= needs the package llguidance.*\[structured\]"
    ):
        engine.generate("x", regex="a")
    assert engine.generate("x", max_new_tokens=1).generated_tokens == 1


def tokenizer_with_spaces():
    """Return a tokenizer of bytes that also has tokens of white space and punctuation, as large
    vocabularies do, and its number of tokens. The last token ends an answer.
    """
    spaces = {"\n" * lines + " " * count for lines in range(9) for count in range(65)}
    texts = {space + mark for space in spaces for mark in ("", '"', ",", "}")}
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = {level.pre_tokenize_str(text)[0][0] for text in texts - {""}}
    vocabulary = [*sorted({*level.alphabet(), *words}), "<|end|>"]
    raw = tokenizers.Tokenizer(
        models.BPE({word: number for number, word in enumerate(vocabulary)}, [])
    )
    raw.pre_tokenizer = level
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|end|>"])
    return Tokenizer.from_transformers(raw), len(vocabulary)


@pytest.mark.parametrize("count", [6, 200])
@pytest.mark.parametrize("form", ["schema", "schema in a grammar"])
def test_many_optional_properties_are_allowed(count, form):
    """The parser follows each property after each amount of white space that a token has."""
    properties = {f"p{number}": {"type": "string"} for number in range(count)}
    schema = json.dumps({"type": "object", "properties": properties})
    tokenizer, size = tokenizer_with_spaces()
    compiler = GrammarCompiler(tokenizer, size, frozenset({size - 1}))
    grammar = Grammar("json_schema", schema)
    if form == "schema in a grammar":
        options = json.dumps({**json.loads(schema), "x-guidance": JSON_OPTIONS})
        grammar = Grammar("grammar", f"start: %json {options}")
    constraint = compiler.make(grammar)
    logits = np.zeros(size, np.float32)
    try:
        for token_id in tokenizer.encode('{"p1": "x",\n  "p3": "y"}'):
            assert constraint.masked(logits)[token_id] == 0
            constraint.advance(token_id)
        assert constraint.masked(logits)[size - 1] == 0
    finally:
        compiler.close()


def test_a_model_without_an_end_token_is_refused():
    structures = GrammarCompiler(fake_tokenizer(), VOCAB_SIZE, frozenset())
    with pytest.raises(RequestError, match="the tokenizer has none of those"):
        structures.make(Grammar("regex", "a"))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("samplers", [None, ["top_k"]])
def test_a_grammar_that_requires_a_suppressed_token_fails_only_its_request(temperature, samplers):
    with CPUPagedEngine._built_by(
        lambda _: dataclasses.replace(fake_parts(), suppressed=(257,)), EngineConfig()
    ) as engine:
        options = {"temperature": temperature, "samplers": samplers, "max_new_tokens": 5}
        with pytest.raises(RequestError, match="allows only token 257, which"):
            engine.generate("x", grammar='start: "a" <[257]>', **options)
        either = 'start: "a" (<[257]> | "b")'
        assert engine.generate("x", grammar=either, **options).output_text == "ab"


@pytest.mark.parametrize(
    "decoder",
    [decoders.Metaspace(), decoders.WordPiece(), decoders.BPEDecoder(), None],
    ids=["Metaspace", "WordPiece", "BPEDecoder", "none"],
)
def test_a_tokenizer_whose_bytes_cannot_be_read_is_refused(decoder, monkeypatch):
    """The vocabulary is read once, because each attempt takes a second of the GIL."""
    raw = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    if decoder is not None:
        raw.decoder = decoder
    raw.add_special_tokens(["<|end|>"])
    reads = []
    read = GrammarCompiler._read
    monkeypatch.setattr(GrammarCompiler, "_read", lambda self: [reads.append(self), read(self)][1])
    structures = GrammarCompiler(Tokenizer.from_transformers(raw), 3, frozenset({2}))
    monkeypatch.setattr(threading, "excepthook", reads.append)
    structures.read_ahead()
    structures.close()
    for _ in range(2):
        with pytest.raises(RequestError, match=r"needs the bytes of all tokens.*decoder type"):
            structures.make(Grammar("regex", "a"))
    assert reads == [structures]


def test_nan_fails_only_its_request(engine):
    runner = runner_of(engine)
    runner.nan_for = set(engine.tokenizer.encode("b"))
    try:
        with pytest.raises(KVBoostError, match="NaN"):
            engine.generate("b", max_new_tokens=5, temperature=0, regex="a{3}")
    finally:
        runner.nan_for = set()
    assert engine.generate("c", max_new_tokens=5, temperature=0, regex="a{3}").output_text == "aaa"


def test_the_vocabulary_is_read_ahead_and_closing_waits_for_it(monkeypatch):
    began = threading.Event()
    go = threading.Event()
    threads = list[str]()
    read = GrammarCompiler._read

    def slow(self):
        threads.append(threading.current_thread().name)
        began.set()
        assert go.wait(60)
        return read(self)

    monkeypatch.setattr(GrammarCompiler, "_read", slow)
    engine = fake_engine()
    engine.read_ahead()
    assert began.wait(60)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(engine.generate, prompt(1), max_new_tokens=9, regex="a{3}")
        # The caller waits for the grammar; the engine does not.
        assert engine.generate(prompt(2), max_new_tokens=3, temperature=0).generated_tokens == 3
        go.set()
        assert waiting.result(60).output_text == "aaa"
    engine.close()
    assert threads == ["kvboost-vocabulary"]
    assert {"kvboost-vocabulary", "kvboost-grammar"}.isdisjoint(
        thread.name for thread in threading.enumerate()
    )


def test_closing_while_the_vocabulary_is_read_leaves_no_thread():
    engine = fake_engine()
    engine.read_ahead()
    engine.close()
    assert "kvboost-vocabulary" not in {thread.name for thread in threading.enumerate()}


def test_grammars_are_compiled_in_another_thread(engine, monkeypatch):
    compile_one = GrammarCompiler._compile
    threads = list[str]()

    def noting(self, *given):
        threads.append(threading.current_thread().name)
        return compile_one(self, *given)

    monkeypatch.setattr(GrammarCompiler, "_compile", noting)
    engine.generate(prompt(1), max_new_tokens=9, regex="a{3}")
    assert threads == ["kvboost-grammar"]


def test_a_forced_text_is_tokenized_once():
    """A long forced text that the model would tokenize differently is not tokenized again, because
    each attempt takes time in proportion to the text.
    """
    structures = GrammarCompiler(fake_tokenizer(), VOCAB_SIZE, frozenset({EOS_ID}))
    structure = structures.make(Grammar("choice", json.dumps(["x" * 300])))
    first = structure.forced()
    assert len(first) >= 290
    structure.advance(first[0])
    assert structure.forced() == first[1:]
    assert structure._matcher.validate_tokens(first[1:10]) == 9
    short = structures.make(Grammar("regex", "abc(d|e)xyz"))
    tokens = short.forced()
    for token in tokens:
        short.advance(token)
    assert not short.forced()
    short.advance(fake_tokenizer().encode("d")[0])
    assert short.forced()
