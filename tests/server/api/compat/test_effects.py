"""Tests of each field that limits reasoning or selects a sampler, sent by the client of its
original API.

The clients are the packages `openai`, `anthropic` and `ollama`. Fields that a package does not know
are sent as its extra fields, or in requests as in llama.cpp's web page and vLLM's documentation.
Each response equals that of the engine with the same settings.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import anthropic
import ollama
import openai
import pytest

from helpers.engine.thinking_model import OPENED
from helpers.server.live_servers import ENGINE_OPTIONS, serving
from kvboost_edge import CPUPagedEngine
from kvboost_edge.engine.request.request import SamplingParams
from kvboost_edge.server.api.schemas.reasoning_effort import FRACTIONS

MODEL = "demo"
ASK = [{"role": "user", "content": "Tell me of the mill by the river."}]
LIMIT = 60
LOW = int(FRACTIONS["low"] * LIMIT)
CLOSER = "</think>"


class Said(NamedTuple):
    """A response. `counted` is the number of reasoning tokens, None if the client does not show it."""

    thought: str
    text: str
    counted: int | None


class Clients:
    """Clients of one server. Chats are greedy; text completions use the sampling of their fields."""

    def __init__(self, server: Any, stack: contextlib.ExitStack) -> None:
        self.engine = server.engine
        url = server.base_url
        options = {"api_key": "none", "max_retries": 0, "timeout": 60}
        self._openai = stack.enter_context(openai.OpenAI(base_url=f"{url}/v1", **options))
        self._claude = stack.enter_context(anthropic.Anthropic(base_url=url, **options))
        self._ollama = ollama.Client(url, timeout=60)
        stack.callback(self._ollama._client.close)
        self._http = stack.enter_context(server.client())

    def chat(self, **fields: Any) -> Said:
        answer = self._openai.chat.completions.create(
            model=MODEL, messages=ASK, max_completion_tokens=LIMIT, temperature=0, **fields
        )
        message = answer.choices[0].message
        counted = answer.usage.completion_tokens_details.reasoning_tokens
        thought = getattr(message, "reasoning_content", None)  # not in the package's types
        return Said(thought or "", message.content or "", counted)

    def responses(self, **fields: Any) -> Said:
        answer = self._openai.responses.create(
            model=MODEL,
            input=ASK,
            max_output_tokens=LIMIT,
            temperature=0,
            store=False,
            **fields,
        )
        thought = "".join(
            part.text for item in answer.output if item.type == "reasoning" for part in item.content
        )
        counted = answer.usage.output_tokens_details.reasoning_tokens
        return Said(thought, answer.output_text, counted)

    def messages(self, **fields: Any) -> Said:
        answer = self._claude.messages.create(
            model=MODEL, messages=ASK, max_tokens=LIMIT, extra_body={"temperature": 0}, **fields
        )
        found = {"thinking": "", "text": ""}
        for block in answer.content:
            found[block.type] += block.thinking if block.type == "thinking" else block.text
        details = answer.usage.output_tokens_details
        return Said(found["thinking"], found["text"], details.thinking_tokens)

    def ollama_chat(self, **fields: Any) -> Said:
        options = {"temperature": 0, "num_predict": LIMIT}
        message = self._ollama.chat(MODEL, ASK, options=options, **fields).message
        return Said(message.thinking or "", message.content or "", None)

    def ollama_recorded(self, **fields: Any) -> Said:
        """Send a raw Ollama chat, because the package accepts thinking levels but no numbers."""
        options = {"temperature": 0, "num_predict": LIMIT}
        body = {"model": MODEL, "messages": ASK, "options": options, "stream": False, **fields}
        answer = self._post("/api/chat", body)
        message = answer["message"]
        return Said(message.get("thinking", ""), message["content"], answer["thinking_count"])

    def chat_stream(self, **fields: Any) -> Said:
        thought = text = ""
        usage = None
        for chunk in self._openai.chat.completions.create(
            model=MODEL,
            messages=ASK,
            max_completion_tokens=LIMIT,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            **fields,
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                thought += getattr(choice.delta, "reasoning_content", None) or ""
                text += choice.delta.content or ""
        return Said(thought, text, usage.completion_tokens_details.reasoning_tokens)

    def messages_stream(self, **fields: Any) -> Said:
        found = {"thinking": "", "text": ""}
        counted = None
        with self._claude.messages.stream(
            model=MODEL, messages=ASK, max_tokens=LIMIT, extra_body={"temperature": 0}, **fields
        ) as stream:
            for event in stream:
                if event.type in found:
                    found[event.type] += getattr(event, event.type)
                elif event.type == "message_delta":
                    counted = event.usage.output_tokens_details.thinking_tokens
        return Said(found["thinking"], found["text"], counted)

    def ollama_chat_stream(self, **fields: Any) -> Said:
        options = {"temperature": 0, "num_predict": LIMIT}
        lines = list(self._ollama.chat(MODEL, ASK, options=options, stream=True, **fields))
        thought = "".join(line.message.thinking or "" for line in lines)
        return Said(thought, "".join(line.message.content or "" for line in lines), None)

    def llama_cpp_chat(self, **fields: Any) -> Said:
        """Send a chat as llama.cpp's web page does."""
        return self._recorded_chat({**LLAMA_CPP_PAGE, **fields})

    def vllm_chat(self, **fields: Any) -> Said:
        """Send a chat as in vLLM's documentation."""
        return self._recorded_chat({"max_completion_tokens": LIMIT, "temperature": 0, **fields})

    def _recorded_chat(self, fields: dict[str, Any]) -> Said:
        answer = self._post("/v1/chat/completions", {"model": MODEL, "messages": ASK, **fields})
        message = answer["choices"][0]["message"]
        counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
        return Said(message.get("reasoning_content") or "", message["content"] or "", counted)

    def llama_cpp_completion(self, **fields: Any) -> Said:
        """Send a prompt to llama.cpp's own route, which returns the reasoning as part of the text."""
        ids = self.engine.tokenizer.encode_chat(ASK)
        answer = self._post(
            "/completion", {"prompt": ids, "n_predict": LIMIT, "temperature": 0, **fields}
        )
        thought, _, text = answer["content"].partition(CLOSER)
        return Said(thought, text, answer["tokens_reasoning"])

    def openai_text(self, prompt: str, sampling: dict[str, Any], fields: dict[str, Any]) -> str:
        given = {**sampling, **fields}
        known = {
            name: given.pop(name)
            for name in ("temperature", "top_p", "seed", "stop")
            if name in given
        }
        answer = self._openai.completions.create(
            model=MODEL, prompt=prompt, max_tokens=LENGTH, extra_body=given, **known
        )
        return answer.choices[0].text

    def ollama_text(self, prompt: str, sampling: dict[str, Any], fields: dict[str, Any]) -> str:
        options = {**sampling, **fields, "num_predict": LENGTH}
        return str(self._ollama.generate(MODEL, prompt, raw=True, options=options).response)

    def llama_cpp_text(self, prompt: str, sampling: dict[str, Any], fields: dict[str, Any]) -> str:
        body = {**LLAMA_CPP_TEXT, **sampling, **fields, "prompt": prompt, "n_predict": LENGTH}
        return str(self._post("/completion", body)["content"])

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()


LLAMA_CPP_PAGE = {
    "stream": False,
    "cache_prompt": True,
    "reasoning_format": "auto",
    "timings_per_token": True,
    "temperature": 0,
    "max_tokens": LIMIT,
}
LLAMA_CPP_TEXT = {"stream": False, "cache_prompt": True, "id_slot": -1, "n_probs": 0}


@pytest.fixture(scope="module")
def clients(isolated_cache):
    """Clients of the bundled model with a template that opens the reasoning, which the model never
    closes.
    """
    with (
        CPUPagedEngine.from_pretrained("kvboost-edge/demo", **ENGINE_OPTIONS) as engine,
        contextlib.ExitStack() as stack,
    ):
        engine.tokenizer.replace_template(OPENED)
        server = stack.enter_context(serving(engine, model_name=MODEL))
        yield Clients(server, stack)


# -- Reasoning --

REASONING = [
    ("openai", "chat", {"reasoning_effort": "low"}, LOW),
    ("openai", "chat", {"reasoning_effort": "none"}, 0),
    ("openai", "chat", {"extra_body": {"reasoning_budget": 7}}, 7),
    ("openai", "responses", {"reasoning": {"effort": "low"}}, LOW),
    ("anthropic", "messages", {"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
    (
        "anthropic",
        "messages",
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
        LOW,
    ),
    ("openai", "chat_stream", {"reasoning_effort": "low"}, LOW),
    ("anthropic", "messages_stream", {"thinking": {"type": "enabled", "budget_tokens": 7}}, 7),
    ("ollama", "ollama_chat", {"think": "low"}, LOW),
    ("ollama", "ollama_chat_stream", {"think": "low"}, LOW),
    ("ollama", "ollama_recorded", {"think": 7}, 7),
    ("ollama", "ollama_recorded", {"think": 0}, 0),
    ("llama.cpp", "llama_cpp_chat", {"reasoning_budget_tokens": 7}, 7),
    ("llama.cpp", "llama_cpp_chat", {"thinking_budget_tokens": 0}, 0),
    ("llama.cpp", "llama_cpp_chat", {"thinking_budget_tokens": -1}, None),
    (
        "llama.cpp",
        "llama_cpp_chat",
        {"reasoning_budget_tokens": 7, "reasoning_budget_message": " Enough."},
        7,
    ),
    ("llama.cpp", "llama_cpp_completion", {"reasoning_budget_tokens": 7}, 7),
    ("vllm", "vllm_chat", {"thinking_token_budget": 7}, 7),
    ("vllm", "vllm_chat", {"thinking_token_budget": 0}, 0),
]


def greedy(engine, **options):
    """Return the token ids that the engine generates for the question."""
    sampling = SamplingParams.from_options(temperature=0.0, max_new_tokens=LIMIT, **options)
    ids = engine.tokenizer.encode_chat(ASK)
    return engine.generate(ids, sampling=sampling).output_token_ids


@pytest.mark.parametrize(
    ("how", "fields", "budget"),
    [
        pytest.param(*row[1:], id=f"{row[0]}-{row[1]}-{'-'.join(row[2])}-{row[3]}")
        for row in REASONING
    ],
)
@pytest.mark.some(4)
def test_reasoning_is_cut_at_exactly_n_tokens(clients, how, fields, budget):
    engine = clients.engine
    message = fields.get("reasoning_budget_message")
    free = greedy(engine)
    assert len(free) == LIMIT
    said = getattr(clients, how)(**fields)
    if budget is None:
        assert said == (engine.tokenizer.decode(free).strip(), "", LIMIT)
        return
    limits = {"reasoning_budget": budget, "reasoning_budget_message": message}
    ids = greedy(engine, **limits)
    thought, answer = list(ids[:budget]), engine.tokenizer.decode(ids[budget:])
    assert thought == list(free[:budget])
    end, _, answer = answer.partition(CLOSER)
    assert end.strip() == (message or "").strip()
    assert said.thought.strip() == (engine.tokenizer.decode(thought) + (message or "")).strip()
    assert said.text.strip() == answer.strip() != ""
    if said.counted is not None and message is None:
        assert said.counted == budget


# -- Samplers --

PROMPT = "Doc 7\nThe friend of"
LENGTH = 24
SAMPLED = {"temperature": 0.9, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 5}
FLAT = {**SAMPLED, "temperature": 1.8, "min_p": 0.2}
SAMPLERS = [
    # llama.cpp's fields, at its own route and sent with OpenAI's package
    *(
        (origin, how, SAMPLED, fields)
        for origin, how in (("llama.cpp", "llama_cpp_text"), ("openai", "openai_text"))
        for fields in (
            {"dry_multiplier": 8.0, "dry_allowed_length": 1, "dry_base": 2.0},
            {"xtc_probability": 1.0, "xtc_threshold": 0.02},
            {"typical_p": 0.2},
            {"top_n_sigma": 0.5},
            {"mirostat": 2, "mirostat_tau": 1.0, "mirostat_eta": 0.3},
            {"dynatemp_range": 1.0, "dynatemp_exponent": 2.0},
        )
    ),
    ("llama.cpp", "llama_cpp_text", FLAT, {"samplers": ["min_p", "temperature"]}),
    ("llama.cpp", "llama_cpp_text", FLAT, {"samplers": ["min_p"]}),
    ("llama.cpp", "llama_cpp_text", {**SAMPLED, "top_p": 0.05}, {"min_keep": 40}),
    ("llama.cpp", "llama_cpp_text", {**SAMPLED, "repetition_penalty": 3.0}, {"repeat_last_n": 1}),
    ("ollama", "ollama_text", SAMPLED, {"typical_p": 0.2}),
    ("ollama", "ollama_text", SAMPLED, {"mirostat": 2, "mirostat_tau": 1.0, "mirostat_eta": 0.3}),
    ("ollama", "ollama_text", {**SAMPLED, "repetition_penalty": 3.0}, {"repeat_last_n": 1}),
]


def sampled(engine, **options):
    """Return the text that the engine generates after the prompt."""
    sampling = SamplingParams.from_options(max_new_tokens=LENGTH, **options)
    return engine.generate(PROMPT, sampling=sampling).output_text


@pytest.mark.parametrize(
    ("how", "sampling", "fields"),
    [pytest.param(*row[1:], id=f"{row[0]}-{'-'.join(row[3])}") for row in SAMPLERS],
)
@pytest.mark.some(2)
def test_samplers_have_the_same_effect_as_in_the_engine(clients, how, sampling, fields):
    said = getattr(clients, how)(PROMPT, renamed(how, sampling), fields)
    assert said == sampled(clients.engine, **sampling, **fields)
    assert said != sampled(clients.engine, **sampling)


def renamed(how, sampling):
    """Return the fields under llama.cpp's and Ollama's names."""
    names = {} if how == "openai_text" else {"repetition_penalty": "repeat_penalty"}
    return {names.get(name, name): value for name, value in sampling.items()}


@pytest.mark.parametrize("name", ["min_tokens", "include_stop_str_in_output", "bad_words"])
def test_vllm_fields_have_vllms_effect(clients, name):
    """The fields are sent with OpenAI's package, as in vLLM's documentation."""
    greedy = {"temperature": 0.0, "top_p": 1.0}
    plain = sampled(clients.engine, **greedy)
    words = [word for word in plain.split()[1:] if word.isalpha()]
    if name == "bad_words":  # vLLM bans " word" too if both have equally many tokens
        encode = clients.engine.tokenizer.encode
        words = [
            word for word in words if len(encode(word, False)) == len(encode(f" {word}", False))
        ]
    word = words[0]
    before = plain[: plain.index(word)]
    fields = {
        "min_tokens": {"stop": [word], "min_tokens": LENGTH},
        "include_stop_str_in_output": {"stop": [word], "include_stop_str_in_output": True},
        "bad_words": {"bad_words": [word]},
    }[name]
    said = clients.openai_text(PROMPT, greedy, fields)
    assert said == sampled(clients.engine, **greedy, **fields)
    assert clients.openai_text(PROMPT, greedy, {"stop": [word]}) == before
    if name == "min_tokens":
        assert said == plain
    elif name == "include_stop_str_in_output":
        assert said == before + word
    else:
        assert word not in said
        assert said.startswith(before.rstrip())
