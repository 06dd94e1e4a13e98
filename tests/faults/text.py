"""Faults in tokenizers, templates and the reading of turns."""

from __future__ import annotations

from faults.fault import fault

FAULTS = (
    fault(
        "half a character is shown",
        "text/detokenizer.py",
        'codecs.utf_8_decode(data, "replace", False)',
        'codecs.utf_8_decode(data, "replace", True)',
        "tests/text",
    ),
    fault(
        "the beginning of a stop string is shown",
        "text/stop_strings.py",
        "keep = max(m.matched for m in self._matchers)",
        "keep = 0",
        "tests/text",
    ),
    fault(
        "a call in channels ends where its message does alone",
        "text/turns/harmony/turn.py",
        "self._marks = (*format.ends, format.start)",
        "self._marks = (format.end, format.done)",
        "tests/text/turns/harmony/test_turn.py",
    ),
    fault(
        "a message to a tool that was not offered is a call",
        "text/turns/harmony/turn.py",
        "name = self._tools.get(header.recipient)",
        "name = header.recipient",
        "tests/text/turns/harmony/test_turn.py",
    ),
    fault(
        "of several calls in a message the first one is told",
        "text/turns/harmony/history.py",
        "for number, call in enumerate(calls):",
        "for number, call in enumerate(calls[:1]):",
        "tests/text/turns/harmony/test_turn.py",
    ),
    fault(
        "a grammar of channels lets answers pass where a call is asked for",
        "text/turns/harmony/grammar.py",
        "[] if required else [[*self._head",
        "[] if not required else [[*self._head",
        "tests/text/turns/harmony/test_turn.py",
    ),
    fault(
        "any quote ends a string of a call",
        "text/turns/literals.py",
        "not in _BEHIND_VALUE",
        "in ()",
        "tests/text/turns/test_parser.py",
    ),
    fault(
        "a model without the tokens of LFM2's calls is taken to know them",
        "text/turns/keyword_calls.py",
        "is_token(_CALL) and is_token(_CALL_END)",
        "is_token(_CALL) or is_token(_CALL_END)",
        "tests/text/turns/test_keyword_calls.py",
    ),
    fault(
        "tools that were not offered are shown as well",
        "text/turns/keyword_calls.py",
        " and len(listed) == len(names)",
        "",
        "tests/text/turns/test_keyword_calls.py",
    ),
    fault(
        "past calls that a template leaves out are lost",
        "text/tokenizer.py",
        "shown = with_calls_written(",
        "_ = with_calls_written(",
        "tests/text/turns/test_keyword_calls.py",
    ),
    fault(
        "what is still open is closed once where a call breaks off",
        "text/turns/gemma.py",
        '"".join(reversed(self._open))',
        '"}"',
        "tests/text/turns/test_gemma_reader.py",
    ),
    fault(
        "an enum allows values of other types",
        "text/turns/gemma.py",
        "for one in choices if _is_of(one, types)",
        "for one in choices",
        "tests/text/turns/test_gemma_grammar.py",
    ),
    fault(
        "results that hang on calls are lost with them",
        "text/tokenizer.py",
        "in_calls=self.turn_format.results_need_calls",
        "in_calls=False",
        "tests/text/turns/test_gemma_replay.py",
    ),
    fault(
        "what ends a turn with calls is part of the answer",
        "text/turns/reader.py",
        "or token_id == self._ending",
        "",
        "tests/text/turns/test_gemma_replay.py",
    ),
    fault(
        "a pass through a template's loop takes no step",
        "text/template_budget.py",
        "self._steps -= 1",
        "self._steps -= 0",
        "tests/text/test_template_limits.py",
    ),
    fault(
        "what a template holds is forgotten at each look",
        "text/template_budget.py",
        "if count > alone:",
        "if count > 2 * alone:",
        "tests/text/test_template_limits.py",
    ),
    fault(
        "a template repeats a text without a bound",
        "text/template_bounds.py",
        "check_chars(len(value) * max(count, 0))",
        "check_chars(len(value))",
        "tests/text/test_template_limits.py",
    ),
)
