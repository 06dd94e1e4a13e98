"""GBNF grammars accept the same texts as in llama.cpp, which matches them character by character."""

import gc
import itertools
import random
import sys
import tracemalloc

import pytest
from llguidance import LLMatcher, LLTokenizer

from helpers.engine.fake_runner import EOS_ID, fake_engine
from helpers.text.gbnf_matcher import GbnfMatcher
from kvboost_edge.engine.grammar import gbnf_lexemes
from kvboost_edge.engine.grammar.compiler import check_grammar
from kvboost_edge.engine.grammar.gbnf_lexemes import lark_of_gbnf
from kvboost_edge.engine.request.requested_grammar import Grammar
from kvboost_edge.errors import RequestError

BYTES = LLTokenizer("byte")

ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws   # a name
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""root ::= object
value ::= object | array | string | number | ("true" | "null") ws
object ::= "{" ws (
    string ":" ws value ("," ws string ":" ws value)*
  )? "}" ws
array ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
MEMBERS = r"""root ::= "{" space a "," space b ("," space c)? "}" space
a ::= "\"alpha\"" space ":" space value
b ::= "\"beta\"" space ":" space string
c ::= "\"gamma\"" space ":" space object
value ::= object | array | string | "null" space
object ::= "{" space ( string ":" space value ("," space string ":" space value)* )? "}" space
array ::= "[" space ( value ("," space value)* )? "]" space
string ::= "\"" ([^"\\] | "\\" ["\\n])* "\"" space
space ::= | " " | "\n"{1,2} [ \t]{0,20}
"""
CODE = r"""root ::= (statement)*
statement ::= type name ws "=" ws sum ";" | name ws "=" ws sum ";" | "while" "(" sum ")" block |
  "return" ws sum ";" | "//" [^\n]* "\n" | "/*" ( [^*] | ("*" [^/]) )* "*/"
block ::= "{" statement* "}"
type ::= "int" ws | "float" ws
name ::= [a-zA-Z_] [a-zA-Z_0-9]*
sum ::= factor (("+" | "<" | "<=") factor)*
factor ::= name | [0-9]+ | name "(" (sum ("," ws sum)*)? ")" | "(" ws sum ws ")"
ws ::= ([ \t\n]+)
"""
CHESS = r"""root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move ::= (pawn | piece | "O-O" "-O"?) [+#]?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
"""
MARKUP = r"""root ::= element
element ::= "<" name ">" (text | element)* "</" name ">"
name ::= [a-z]+
text ::= [^<]+
"""
KANA = r"""root ::= kana+ ([ \t\n] kana+)* "\u3002" root?
kana ::= [\u3041-\u309F] | [\u30A1-\u30FF]
"""
LIST = r"""root ::= item+
item ::= "- " [^\r\n\x0b\x0c\x85\u2028\u2029]+ "\n"
"""
ENDED = 'root ::= expr "end"\nexpr ::= word | "(" expr ")"\nword ::= [a-z ]+'
TEXTS = {
    ARITHMETIC: ["a+1=2\n", "x_1*(y - 2) = z\n\n\nb=1\n", "a=b", "a = \n", "(a=1\n"],
    JSON: [
        '{"a": -1.5e3, "b": [true, null, {"c": "\\u00e9\\n"}]}',
        '{"a":\n  "é"}',
        '{"a": 01}',
        '{"a": "\n"}',
        "{",
    ],
    MEMBERS: [
        '{"alpha": ["x", {"beta": null}], "beta": "y", "gamma": {"gamma": "z"}}',
        '{"alpha": "alpha","beta":"" }',
        '{"beta": "x"}',
    ],
    CODE: [
        "int count = f(a, 2)+integer;while(count<=12){count = count+1;}//done\nreturn count;",
        "int = 1;/* a\n * b */",
        "return = 5;",
        "intx = 1;",
        "int x=1;",
        "while = 1;whil = 2;",
        "returnx = 1",
    ],
    CHESS: ["1. e4 e5\n2. Nf3 Nc6\n", "1. e4 e5\n2. O-O O-O-O+\n12. exd8=Q# Kxa1\n", "1. e4 e9\n"],
    MARKUP: ["<a>some text<b></b> more\n</a>", "<a></b>", "<a>x<a>"],
    KANA: ["ひらがな カタカナ。\u3042。", "ひ ", "a。"],
    LIST: ["- a\n- b, c\n", "- a\u2028\n", "-a\n"],
    ENDED: ["foo end", "(foo end)end", "end", "endend"],
}


class Texts:
    """The texts that a grammar accepts after its conversion."""

    def __init__(self, grammar):
        lark = LLMatcher.grammar_from_lark(lark_of_gbnf(grammar).text)
        self._matcher = LLMatcher(BYTES, lark, log_level=0)
        assert not self._matcher.is_error(), self._matcher.get_error() + grammar

    def takes(self, text):
        self._matcher.reset()
        data = [*text.encode()]
        is_whole = self._matcher.try_consume_tokens(data) == len(data)
        return is_whole and self._matcher.is_accepting()


@pytest.mark.parametrize("grammar", TEXTS, ids=lambda grammar: grammar.split()[2])
def test_common_grammars_accept_what_a_slow_matcher_accepts(grammar):
    slow = GbnfMatcher(grammar)
    texts = Texts(grammar)
    found = {text: texts.takes(text) for text in TEXTS[grammar]}
    assert found == {text: slow.takes(text) for text in TEXTS[grammar]}
    assert found[TEXTS[grammar][0]]


@pytest.mark.parametrize("begin", ["ab", "aa", "bc"])
def test_a_last_literal_may_be_longer_than_an_automaton(begin):
    grammar = f'root ::= "a" rest | big\nrest ::= "(" rest ")" | "b"\nbig ::= "{begin}{"c" * 500}"'
    slow = GbnfMatcher(grammar)
    texts = Texts(grammar)
    tried = ["ab", "a(b)", begin, f"{begin}{'c' * 500}", f"{begin}{'c' * 499}", "a((b)"]
    found = {text: texts.takes(text) for text in tried}
    assert found == {text: slow.takes(text) for text in tried}


def test_alternatives_in_a_split_repetition_may_be_one_lexeme():
    grammar = 'root ::= ("a" | [c]*)+ "ac" root?'
    slow = GbnfMatcher(grammar)
    texts = Texts(grammar)
    tried = ["".join(chars) for n in range(7) for chars in itertools.product("abc", repeat=n)]
    assert [*filter(texts.takes, tried)] == [*filter(slow.takes, tried)]


def made_grammar(seed):
    choose = random.Random(seed)
    letters = "abé" if seed % 4 == 0 else "abc"
    num_rules = choose.randint(1, 4)

    def leaf():
        way = choose.random()
        if way < 0.35:
            return f'"{"".join(choose.choices(letters, k=choose.choice([0, 1, 1, 2, 3])))}"'
        if way < 0.65:
            return choose.choice(["[ab]", "[^a]", "[a-b]", "[é-ü]", "[b]", "[abc]", "."])
        return f"r{choose.randrange(num_rules)}"

    def expression(depth):
        way = choose.random()
        if not depth or way < 0.3:
            return leaf()
        parts = [expression(depth - 1) for _ in range(choose.randint(2, 3))]
        if way < 0.55:
            return " ".join(parts)
        if way < 0.75:
            return f"({' | '.join(parts)})"
        return f"({parts[0]}){choose.choice(['*', '+', '?', '{2}', '{0,2}', '{1,}', '{2,3}'])}"

    rules = [f"r{i} ::= {expression(2)}" for i in range(num_rules)]
    return "\n".join([f"root ::= {expression(3)}", *rules]), letters


@pytest.fixture
def spend(monkeypatch):
    """Return a function that sets the work that an analysis may take."""

    def spend(work):
        monkeypatch.setattr(gbnf_lexemes, "_MOST_WORK", work)
        lark_of_gbnf.cache_clear()

    yield spend
    lark_of_gbnf.cache_clear()


@pytest.mark.parametrize("work", [None, 100], ids=["whole analysis", "little analysis"])
def test_random_grammars_accept_what_a_slow_matcher_accepts(scale, spend, work):
    if work is not None:
        spend(work)
    num_accepted = 0
    for seed in range(scale(100 if work is None else 50, 1500)):
        grammar, letters = made_grammar(seed)
        slow = GbnfMatcher(grammar)
        texts = Texts(grammar)
        for length in range(6 if len(letters) == 3 else 5):
            for chars in itertools.product(letters if length < 5 else "ab", repeat=length):
                text = "".join(chars)
                accepted = texts.takes(text)
                assert accepted == slow.takes(text), f"seed {seed}: {text!r}\n{grammar}"
                num_accepted += accepted
    assert num_accepted > 500


def of_classes(name, count):
    """Return a grammar of many ambiguous lexemes, which differ in one class."""
    each = (name.replace("@", f"[b{chr(0x4E00 + 2 * i)}]") for i in range(count))
    return f"root ::= ({' | '.join(f'{one} root' for one in each)})?"


HARD = {
    "many states": of_classes('("a" [ab]* "a" [ab]{38} @)', 40),
    "many classes": of_classes("@", 1000),
    "many bits": of_classes('("a"? @{100} "c"?)', 200),
    "many connections": of_classes('(("a"? @?){100})', 50),
    "many lexemes": of_classes('@ "ba" [bc]*', 400),
    "nothing, many times": 'root ::= "a" root | ' + "(" * 9 + '""' + "){40}" * 9,
    "nothing, from many rules": "\n".join(
        [
            'root ::= "a" root | r0',
            *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)),
            'r60 ::= ""',
        ]
    ),
    "many uses of rules": "\n".join(
        [
            f"root ::= r0 | {' | '.join(f'r{i}' for i in range(300))}",
            *(f'r{i} ::= r{i + 1} | "a{i}" root' for i in range(300)),
            "r300 ::= [a] root",
        ]
    ),
}


@pytest.mark.parametrize("name", HARD)
def test_the_work_of_an_analysis_is_limited(spend, name):
    work = 100_000
    spend(work)
    num_lines = 0

    def count(frame, event, argument):
        nonlocal num_lines
        if frame.f_code.co_filename != gbnf_lexemes.__file__:
            return None
        num_lines += event == "line"
        assert num_lines < 10 * work, "the analysis must stop"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        lark_of_gbnf(HARD[name])
    finally:
        sys.settrace(before)


def test_a_grammar_counts_as_slow_if_its_analysis_takes_too_much_work(spend):
    assert not lark_of_gbnf(JSON).is_slow
    spend(1000)
    assert lark_of_gbnf(JSON).is_slow


@pytest.mark.parametrize(
    ("grammar", "accepted", "refused"),
    [
        (r'root ::= "x\u00e9ee"', "xéee", "x\ue9ee"),
        (r"root ::= [\u0400-\u04FF]+", "Привет", "Hi"),
        (r"root ::= [\U0001F600-\U0001F64F]", "😀", "🙏🙏"),
        (r'root ::= "\u0041\U00000042\x43\n\t\r\"\\\[\]"', 'ABC\n\t\r"\\[]', "ABC"),
        ("root ::= [a&&b]+", "a&b", "c"),
        ("root ::= [+--]+", "+,-", "."),
        ("root ::= [a~~b]+", "~ab", "}"),
        ("root ::= [a-]+", "a-", "b"),
        ("root ::= [^^x-]+", "y", "^"),
        ("root ::= [/#]+ # a comment\n", "#/", "x"),
        ("root ::= .", "\n", ""),
        (r"root ::= [^\ud7ff]", "\ue000", "\ud7ff"),
        ('root ::= start\nstart ::= "x"', "x", "y"),
        ('a ::= "x"\nroot ::= a', "x", "y"),
        ('root ::= A a\nA ::= "x"\na ::= "y"', "xy", "yx"),
        ('root ::= b-c b_c\nb-c ::= "x"\nb_c ::= "y"', "xy", "yx"),
        ('root ::= "a" {2} "b" {0}', "aa", "aab"),
        ('root ::= ("a"\n  |\n "b")\r\n\r\n', "b", "c"),
        ('root ::= "a"\nroot ::= "b"', "b", "a"),
        ("root ::= list\nlist ::= list [a] | [b]", "baa", "ab"),
        ("root ::= [a]**+", "aa", "b"),
    ],
    ids=lambda value: value if value.startswith(("root", "a ")) else "",
)
def test_the_syntax_means_the_same_as_in_llama_cpp(grammar, accepted, refused):
    texts = Texts(grammar)
    assert texts.takes(accepted)
    assert not texts.takes(refused)


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ('roots ::= "a"', "no rule 'root'"),
        ("root ::= a", "the rule 'a' is missing"),
        ('root ::= "a', r"is not closed \(line 1"),
        ('root ::= "a"\nb ::= [a', r"is not closed \(line 2"),
        (r'root ::= "\q"', r"the escape '\\q' is unknown"),
        (r'root ::= "\u12"', r"'\\u' needs 4 hexadecimal digits"),
        (r'root ::= "\ud800"', "is not a character"),
        ("root ::= []", "a character class is empty"),
        ("root ::= [b-a]", "is reversed"),
        ("root ::= *", "needs an item before it"),
        ('root ::= "a"{x}', "a number is expected"),
        ('root ::= "a"{2,1}', "allows no count"),
        ('root ::= "a"{1000000000000}', "counts more than"),
        ('root ::= ("a"', r"'\)' is expected"),
        ('root ::= "a") "b"', "the end of the line is expected"),
        ('root ::= "a"\n| "b"', "a rule's name is expected"),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "nested more than"),
        ('root ::= "a"' + "*" * 5000, "more than 4 repetitions"),
    ],
)
def test_invalid_grammars_are_refused_with_the_reason(grammar, problem):
    with pytest.raises(RequestError, match=f"^grammar is not valid: (?!grammar).*{problem}"):
        check_grammar(Grammar("grammar", grammar))


@pytest.mark.parametrize("grammar", TEXTS, ids=lambda grammar: grammar.split()[2])
def test_lexemes_are_split_only_where_necessary(grammar):
    assert lark_of_gbnf(grammar).is_slow == (grammar in {ENDED, ARITHMETIC})


def test_a_large_class_uses_no_memory_after_its_conversion():
    wide = "".join(map(chr, range(0x4E00, 0x9E00, 2)))
    gc.collect()
    tracemalloc.start()
    try:
        lark_of_gbnf(f'root ::= [{wide}] | "(" root ")"')
        lark_of_gbnf.cache_clear()
        gc.collect()
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak > 1_000_000
    assert left < 200_000


def test_an_answer_ends_where_a_run_of_letters_could_go_on():
    """The longest match of `word` would never let `end` follow."""
    with fake_engine(num_blocks=256) as engine:
        likely = {**dict.fromkeys(engine.tokenizer.encode("end"), 20.0), EOS_ID: 100.0}
        results = [
            engine.generate(
                [seed],
                max_new_tokens=100,
                temperature=1.0,
                seed=seed,
                grammar=ENDED,
                logit_bias=likely,
            )
            for seed in range(8)
        ]
    complete = [each.output_text for each in results if each.finish_reason == "stop"]
    assert len(complete) > 4
    assert all(map(GbnfMatcher(ENDED).takes, complete))
