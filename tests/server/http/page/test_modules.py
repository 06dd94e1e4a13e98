"""Unit tests of the page's modules: reading of streams, validation of settings, text of the answer,
and sums of the block map.
"""

import base64
import random

import pytest

from kvboost_edge.server.api.bounds import BOUNDS
from kvboost_edge.server.response_types import BlockCounts

STREAM = """
  const really = window.fetch;
  const bytes = new TextEncoder().encode(argument);
  const found = [];
  for (let at = 0; at <= bytes.length; at += 1) {
    window.fetch = async () => new Response(new ReadableStream({
      start(controller) {
        controller.enqueue(bytes.slice(0, at));
        controller.enqueue(bytes.slice(at));
        controller.close();
      },
    }));
    const chunks = [];
    try {
      const options = {key: '', signal: null, begun() {}};
      for await (const chunk of it.streamChat({}, options)) chunks.push(chunk);
    } catch (error) {
      chunks.push(error.message);
    }
    found.push(chunks);
  }
  window.fetch = really;
  return found;
"""
SHOW = """
  const root = document.createElement('div');
  const view = new it.AnswerView(root);
  for (const piece of argument) view.append(piece);
  view.end();
  const inner = (node) => (node.matches('.code') ? node.querySelector('code') : node);
  return [...root.children].map((node) => [node.className, inner(node).textContent]);
"""
TEXT = ': ping\n\ndata: {"a": 1}\n\nevent: x\ndata: "ünï 🌍"\n\ndata: []\n\n'
CHUNKS = [{"a": 1}, "ünï 🌍", []]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_chat_streams_are_read_at_any_split(modules, ending):
    stream = (TEXT + 'data: [DONE]\n\ndata: "later"\n\n').replace("\n", ending)
    found = modules.module("api", STREAM, stream)
    assert found == [CHUNKS] * (len(stream.encode()) + 1)


@pytest.mark.parametrize("cut", ["", 'data: {"b', "data: [DONE]"])
def test_a_chat_stream_without_its_end_is_an_error(modules, cut):
    found = modules.module("api", STREAM, TEXT + cut)
    error = "The connection ended before the answer was complete."
    assert found == [[*CHUNKS, error]] * (len((TEXT + cut).encode()) + 1)


def test_settings_bounds_equal_the_servers(modules):
    fields = {field["name"]: field for field in modules.module("sampling", "return it.FIELDS;")}
    names = {"temperature", "top_p", "top_k", "min_p", "max_tokens", "reasoning_budget", "seed"}
    assert set(fields) == names
    for name, field in fields.items():
        bound = BOUNDS[name]
        # A limit of no tokens is for echo only, and a negative seed equals a non-negative one.
        low = {"max_tokens": 1, "seed": 0}.get(name, bound.low)
        high = 2**53 - 1 if name == "seed" else bound.high
        assert (field["low"], field["high"]) == (low, high), name
        assert (field["integer"], field.get("openLow", False)) == (bound.integer, bound.open_low), (
            name
        )


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.7", 0.7),
        ("temperature", " 0,7 ", 0.7),
        ("temperature", "0", 0),
        ("temperature", "2", 2),
        ("temperature", ".5", 0.5),
        ("top_p", "1", 1),
        ("top_p", "1e-3", 0.001),
        ("top_k", "-1", -1),
        ("top_k", "1000000", 1000000),
        ("max_tokens", "1", 1),
        ("reasoning_budget", "-1", -1),
        ("seed", "9007199254740991", 2**53 - 1),
        ("seed", "+12", 12),
    ],
)
def test_valid_settings_are_parsed(modules, name, text, value):
    checked = modules.module("sampling", "return it.validate(argument);", {name: text})
    assert checked == {"values": {name: value}, "errors": {}}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temperature", "2.001"),
        ("temperature", "-0.1"),
        ("temperature", "warm"),
        ("temperature", "1e999"),
        ("temperature", "NaN"),
        ("temperature", "Infinity"),
        ("temperature", "0x1"),
        ("temperature", "1.2.3"),
        ("temperature", "1 2"),
        ("temperature", "."),
        ("top_p", "0"),
        ("top_p", "1.1"),
        ("top_k", "-2"),
        ("top_k", "1.5"),
        ("top_k", "1000001"),
        ("max_tokens", "0"),
        ("reasoning_budget", "-2"),
        ("max_tokens", "16777217"),
        ("seed", "-1"),
        ("seed", "9007199254740993"),
        ("seed", "true"),
    ],
)
def test_invalid_settings_are_reported_and_not_sent(modules, name, text):
    checked = modules.module("sampling", "return it.validate(argument);", {name: text})
    assert checked["values"] == {}
    assert list(checked["errors"]) == [name]
    assert checked["errors"][name].endswith(".")


def test_an_empty_setting_is_not_sent(modules):
    assert modules.module("sampling", "return it.validate({temperature: ' ', seed: ''});") == {
        "values": {},
        "errors": {},
    }


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("one\n\ntwo", [["text", "one\n\ntwo"]]),
        ("\n\none\n", [["text", "one"]]),
        (
            "a\n\n```py\nx = 1\n\n\ny\n```\n\nb",
            [["text", "a"], ["code", "x = 1\n\n\ny"], ["text", "b"]],
        ),
        ("```\nnever closed\n", [["code", "never closed"]]),
        ("~~~~\n```\n~~~\n~~~~\nend", [["code", "```\n~~~"], ["text", "end"]]),
        (
            "1. do\n   ```py\n   if x:\n       y\n\n z\n   ```\n   so",
            [["text", "1. do"], ["code", "if x:\n    y\n\nz"], ["text", "   so"]],
        ),
        ("use ```this``` inline", [["text", "use ```this``` inline"]]),
        ("`one` and ``two``\n` three", [["text", "`one` and ``two``\n` three"]]),
        ("```a\n```\n```b\n2\n```", [["code", ""], ["code", "2"]]),
        ("<b>bold</b> & <script>x</script>", [["text", "<b>bold</b> & <script>x</script>"]]),
        ("tail ``", [["text", "tail ``"]]),
        ("``", [["text", "``"]]),
        ("", []),
    ],
)
def test_an_answer_is_split_into_text_and_code_at_any_chunk_boundary(modules, text, blocks):
    rng = random.Random(7)
    cuts = [[text], list(text)]
    for _ in range(20):
        at = sorted(rng.randrange(len(text) + 1) for _ in range(3))
        cuts.append(
            [text[start:stop] for start, stop in zip([0, *at], [*at, len(text)], strict=True)]
        )
    for pieces in cuts:
        assert modules.module("answer", SHOW, pieces) == blocks


def test_a_line_is_hidden_only_while_it_may_begin_a_block(modules):
    body = """
      const root = document.createElement('div');
      const view = new it.AnswerView(root);
      return argument.map((piece) => { view.append(piece); return root.textContent; });
    """
    pieces = ["~", "5 km", ", or `", "~\n``", "`py", "\n~/bin/x", "\n~", "~"]
    shown = ["", "~5 km", "~5 km, or `", "~5 km, or `~", "~5 km, or `~"]
    code = "~5 km, or `~pyCopy~/bin/x"
    assert modules.module("answer", body, pieces) == [*shown, code, code, code]


def test_a_conversation_omits_unanswered_messages(modules):
    sent = modules.module(
        "conversation",
        """
        const talk = new it.Conversation();
        const say = (question, answer, state) => Object.assign(it.beginStep(talk.begin(question)), {answer, state});
        say('first', 'yes', 'done');
        say('failed', '', 'failed');
        say('cut', 'par', 'stopped');
        say('now', 'growing', 'running');
        return [talk.messages(argument), talk.messages(' ')];
        """,
        "be brief",
    )
    rest = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "cut"},
        {"role": "assistant", "content": "par"},
        {"role": "user", "content": "now"},
    ]
    assert sent == [[{"role": "system", "content": "be brief"}, *rest], rest]


@pytest.mark.parametrize("num_blocks", [0, 1, 63, 400, 1024, 4099, 100_000, 1_000_000])
@pytest.mark.parametrize("width", [200, 364, 900])
def test_every_block_has_a_cell_on_the_map(modules, num_blocks, width):
    plan = modules.module("poolmap", "return it.layout(...argument);", [num_blocks, width])
    cells = -(-num_blocks // plan["perCell"])
    assert plan["columns"] * plan["cell"] <= width
    assert (
        (plan["rows"] - 1) * plan["columns"]
        < max(cells, 1)
        <= max(plan["rows"], 1) * plan["columns"]
    )
    assert plan["rows"] * plan["cell"] <= 264


def test_the_block_maps_counts_and_descriptions(modules):
    rng = random.Random(3)
    states = bytes(rng.randrange(5) for _ in range(1000))
    body = "return it.tally(it.decodeBytes(argument[0]), argument[1], argument[2]);"
    for start, stop in ((0, 1000), (17, 93), (990, 1100), (5, 5)):
        part = states[start:stop]
        counted = modules.module("poolmap", body, [base64.b64encode(states).decode(), start, stop])
        assert counted == [part.count(state) for state in range(5)]
    words = """
      const bytes = (...values) => Uint8Array.of(...values);
      const pool = {states: bytes(0, 1, 2, 3, 4), tokens: bytes(0, 16, 1, 16, 255), refs: bytes(0, 0, 1, 2, 255)};
      const bare = {...pool, tokens: null, refs: null};
      const cells = [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [0, 5]];
      return [...cells.map((cell) => it.describe(pool, ...cell)), it.describe(bare, 3, 4)];
    """
    assert modules.module("poolmap", words) == [
        "Block 0: free, 0 tokens, 0 references",
        "Block 1: cached, 16 tokens, 0 references",
        "Block 2: referenced, 1 token, 1 reference",
        "Block 3: shared, 16 tokens, 2 references",
        "Block 4: at another position, 255 or more tokens, 255 or more references",
        "Blocks 0–4: 1 free, 1 cached, 1 referenced, 1 shared, 1 at another position",
        "Block 3: shared",
    ]


def test_restored_tokens_are_shown_below_the_answer(modules):
    body = """
      const clock = {sent: 0, first: null, last: null};
      const told = (kvboost) => it.summarize({usage: null, timings: null, kvboost, clock, pieces: 0});
      return argument.map((kvboost) => it.figuresLine(told(kvboost), "").textContent);
    """
    costs = [
        {"hit_tokens": {"pool": 16}, "load_ms": 0},
        {"hit_tokens": {"pool": 16, "disk": 0}, "load_ms": 3},
        {"hit_tokens": {"pool": 16, "disk": 1600, "redis": 1}, "load_ms": 12},
        {"hit_tokens": {"disk": 48}},
        None,
    ]
    both = "from disk1,600 tokens, loaded in 12 msfrom redis1 token, loaded in 12 ms"
    assert modules.module("figures", body, costs) == ["", "", both, "from disk48 tokens", ""]


def test_every_block_state_has_its_own_fill(modules):
    states = [state["name"] for state in modules.module("poolmap", "return it.STATES;")]
    assert states == list(BlockCounts.__annotations__)
    drawn = modules.module(
        "poolmap",
        """
        const canvas = document.getElementById('map');
        const map = new it.PoolMap(canvas, () => {});
        return it.STATES.map((_, state) => {
          map.update({states: Uint8Array.of(state), refs: null, tokens: null});
          return canvas.toDataURL();
        });
        """,
    )
    assert len(set(drawn)) == len(states)


def test_span_reuse_is_shown_as_text_and_in_the_meter(modules):
    body = """
      const clock = {sent: 0, first: null, last: null};
      const usage = {prompt_tokens: 200, prompt_tokens_details: {cached_tokens: 50}};
      return argument.map((kvboost) => {
        const line = it.figuresLine(it.summarize({usage, timings: null, kvboost, clock, pieces: 0}), "");
        const widths = [...line.querySelectorAll(".meter span")].map((bar) => bar.style.width);
        const flag = line.querySelector(".flag");
        return [flag?.textContent ?? "", line.textContent, widths, flag?.title ?? ""];
      });
    """
    told = {
        "hit_tokens": {"pool": 50},
        "approximate": True,
        "reused_span_tokens": 100,
        "recomputed_tokens": 1016,
    }
    exact = {
        "hit_tokens": {"pool": 50},
        "approximate": False,
        "reused_span_tokens": 0,
        "recomputed_tokens": 0,
    }
    wide = {**exact, "approximate": True, "approximations": ["wide_arithmetic"]}
    cached = "cached50 of 200 prompt tokens (25 %)"
    reused = (
        "part of the prompt was reused from another position, so a full computation may give a "
        "different answer"
    )
    assert modules.module("figures", body, [told, exact, None, wide]) == [
        [
            "approximate",
            f"approximate{cached}at other positions100 tokens reused, 1,016 recomputed",
            ["25%", "50%"],
            reused,
        ],
        ["", cached, ["25%", "0px"], ""],
        ["", cached, ["25%", "0px"], ""],
        [
            "approximate",
            f"approximate{cached}",
            ["25%", "0px"],
            "the server computes with wide arithmetic",
        ],
    ]


def test_texts_are_cut_between_characters(modules):
    text = "a" * 47 + "😀 and more"
    cut = "return argument.map((length) => it.beginning('ab😀', length));"
    assert modules.module("format", cut, [1, 2, 3, 4, 5]) == ["a", "ab", "ab", "ab😀", "ab😀"]
    titles = "return it.titleOf([{question: argument}]);"
    assert modules.module("chats", titles, text) == "a" * 47
    words = "return it.differenceInWords(it.parts('', argument));"
    assert modules.module("difference", words, "a" * 59 + "😀!") == f"“{'a' * 59}…” was added."


def test_numbers_are_formatted_with_units(modules):
    body = "return argument.map(([name, ...values]) => it[name](...values));"
    calls = [
        ["count", 1234567],
        ["count", None],
        ["percent", 0.745],
        ["percent", 0.012],
        ["percent", None],
        ["rate", 12.34],
        ["rate", 123.4],
        ["duration", 3.21],
        ["duration", 345.6],
        ["duration", 1234],
        ["duration", 61000],
        ["duration", 999.7],
        ["duration", 9999],
        ["duration", 300_000],
        ["bytes", 0],
        ["bytes", 999],
        ["bytes", 99_960],
        ["bytes", 999_600],
        ["bytes", 12_300_000],
        ["bytes", 2_500_000_000],
        ["bytes", None],
        ["plural", 1, "token"],
        ["plural", 0, "token"],
    ]
    assert modules.module("format", body, calls) == [
        "1,234,567",
        "–",
        "75 %",
        "1.2 %",
        "–",
        "12.3",
        "123",
        "3.2 ms",
        "346 ms",
        "1.23 s",
        "61.0 s",
        "1.00 s",
        "10.0 s",
        "300 s",
        "0 B",
        "999 B",
        "100 kB",
        "1.00 MB",
        "12.3 MB",
        "2.50 GB",
        "–",
        "1 token",
        "0 tokens",
    ]
