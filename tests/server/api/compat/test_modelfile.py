"""Tests of Modelfiles: a written file is parsed back unchanged, or rejected with an error that
names the problem.
"""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvboost_edge.server.api.compat.ollama.modelfile import fields_of, modelfile_text
from kvboost_edge.server.api_errors import ApiError

TEXTS = st.lists(
    st.sampled_from(
        ['"', '""', '"""', "\n", "\r", "\r\n", " ", "\t", "x", "#", "\\", "SYSTEM", "é"]
    ),
    min_size=1,
    max_size=8,
).map("".join)


def text_of(field, text):
    fields = {"parameters": {"stop": [text]}} if field == "stop" else {field: text}
    return modelfile_text("mario", "tiny", fields)


def read_back(field, text):
    found = fields_of(text_of(field, text))
    if field == "stop":
        return found["parameters"]["stop"]
    return found[field]


@pytest.mark.parametrize("field", ["system", "template", "license", "stop"])
@given(TEXTS)
def test_a_modelfile_text_is_read_back_or_refused(field, text):
    lines = [line.rstrip(" \t") for line in re.split("\r\n|\r|\n", text)]
    if any(line.endswith('"""') for line in lines[:-1]):
        assert "cannot be quoted" in text_of(field, text)
        with pytest.raises(ApiError, match=r"has no value|needs a name and a value"):
            read_back(field, text)
    else:
        expected = [text] if field in ("license", "stop") else text
        assert read_back(field, text) == expected


@pytest.mark.parametrize(
    "text", ['Write """docstrings"""', '"""', '"', '"""a\nb', 'a\n"""', "a\r\nb\r", '\n"" """ x\n']
)
def test_texts_with_quotes_are_read_back(text):
    assert read_back("system", text) == text


def test_a_text_that_cannot_be_quoted_is_written_as_a_comment_and_refused():
    text = text_of("system", 'Write\n"""docstrings"""\nfor functions.')
    assert text.splitlines()[-2:] == [
        '# This text cannot be quoted: a line before its last ends with """. Pass it to /api/create '
        "in a field.",
        "SYSTEM",
    ]
    with pytest.raises(ApiError, match="line 7: SYSTEM has no value"):
        fields_of(text)
