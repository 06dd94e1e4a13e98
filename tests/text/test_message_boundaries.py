"""Tests of the token positions at which user messages begin, for templates of several families."""

import pytest

from helpers.text.byte_level import byte_level
from helpers.text.chat_templates import HERMES
from kvboost_edge.errors import RequestError
from kvboost_edge.text.codec import FastCodec
from kvboost_edge.text.message_boundaries import system_prefix, user_starts
from kvboost_edge.text.tokenizer import Tokenizer

LLAMA = """{{ '<|begin|>' }}{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>\\n\\n' + m.content + '<|eot|>' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"""
MISTRAL = """{{ '<|begin|>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ m.content + '<|eot|>' }}{% endif %}{% endfor %}"""
PLAIN = """{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"""
STRICT = """{{ raise_exception('no messages please') }}"""
SPECIALS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|begin|>",
    "<|head|>",
    "<|/head|>",
    "<|eot|>",
    "[INST]",
    "[/INST]",
]

CHAT = [
    {"role": "system", "content": "You are kind."},
    {"role": "user", "content": "Say <|im_start|>user, <|head|>user<|/head|> or [INST]."},
    {"role": "assistant", "content": "No: user\nand <|im_start|>user."},
    {"role": "user", "content": "\n\nWhy?"},
    {"role": "assistant", "content": "So."},
    {"role": "user", "content": ""},
]


def tokenizer_of(template):
    raw = byte_level()
    raw.add_special_tokens(SPECIALS)
    return Tokenizer(FastCodec(raw), name="toy", chat_template=template)


@pytest.mark.parametrize(
    ("template", "header"),
    [(HERMES, "<|im_start|>user"), (LLAMA, "<|head|>user<|/head|>"), (MISTRAL, "[INST]")],
    ids=["chatml", "llama", "mistral"],
)
def test_user_messages_are_found_and_imitations_are_not(template, header):
    tokenizer = tokenizer_of(template)
    chat = CHAT[1:] if template is MISTRAL else CHAT
    ids = tokenizer.encode_chat(chat)
    starts = user_starts(tokenizer, ids)
    contents = [message["content"] for message in chat if message["role"] == "user"]
    assert len(starts) == len(contents)
    for start, content in zip(starts, contents, strict=True):
        text = tokenizer.decode(ids[start:], False)
        assert text.startswith(header)
        assert text.removeprefix(header).lstrip().startswith(content.lstrip())
    # The tokens before a user message do not depend on its text.
    other = tokenizer.encode_chat([*chat[:-1], {"role": "user", "content": "Something else."}])
    assert ids[: starts[-1]] == other[: starts[-1]]


@pytest.mark.parametrize(
    "template", [None, PLAIN, STRICT], ids=["none", "no special token", "refuses"]
)
def test_no_boundaries_without_a_special_token(template):
    tokenizer = tokenizer_of(template)
    assert user_starts(tokenizer, tokenizer.encode("user: <|im_start|>user")) == ()


def test_a_short_prompt_has_no_boundaries():
    tokenizer = tokenizer_of(HERMES)
    assert user_starts(tokenizer, []) == ()
    assert user_starts(tokenizer, tokenizer.encode("<|im_start|>us")) == ()


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (HERMES, "kind.<|im_end|>\n<|im_start|>user\n"),
        (LLAMA, "user<|/head|>\n\n"),
        (PLAIN, "user: "),
    ],
    ids=["chatml", "llama", "no special token"],
)
def test_the_system_prefix_ends_where_the_users_text_begins(template, end):
    tokenizer = tokenizer_of(template)
    prefix = system_prefix(tokenizer, "You are kind.")
    assert tokenizer.decode(prefix, False).endswith(end)
    chat = [{"role": "system", "content": "You are kind."}, {"role": "user", "content": "So?"}]
    assert tokenizer.encode_chat(chat)[: len(prefix)] == prefix


@pytest.mark.parametrize("template", [None, STRICT], ids=["none", "refuses"])
def test_a_system_prefix_needs_a_template_with_system_messages(template):
    with pytest.raises(RequestError, match="template"):
        system_prefix(tokenizer_of(template), "You are kind.")
