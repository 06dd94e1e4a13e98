"""Faults in the command line."""

from __future__ import annotations

from faults.fault import fault

_REMOTE = "tests/cli/servers/test_remote.py"
_CACHE = "tests/cli/cache/test_actions.py"
_OPTIONS = "tests/cli/test_option_parsing.py"
_RENDER = "tests/cli/test_render.py"

FAULTS = (
    fault(
        "-o before a command does not say where engine options are listed",
        "cli/app.py",
        "            suggest_flag(error, option_advice)\n            raise\n\n    def invoke",
        "            suggest_flag(error)\n            raise\n\n    def invoke",
        "tests/cli/test_refusals.py",
    ),
    fault(
        "ignores engine options with --suggest instead of refusing them",
        "cli/app.py",
        "        if engine:\n            raise ConfigError(",
        "        if not suggest:\n            raise ConfigError(",
        "tests/cli/test_refusals.py",
    ),
    fault(
        "deletes what a dry run lists",
        "cli/cache/actions.py",
        "            if not dry_run:\n",
        "            if dry_run is not None:\n",
        f"{_CACHE}::test_a_dry_run_removes_nothing",
    ),
    fault(
        "prunes recently used spaces",
        "cli/cache/actions.py",
        "time.time() - one.changed > older_than * _DAY_S",
        "time.time() - one.changed < older_than * _DAY_S",
        f"{_CACHE}::test_prune_removes_entries_unused_for_a_number_of_days",
    ),
    fault(
        "prunes one space too many",
        "cli/cache/actions.py",
        "(one.space is not None and excess > 0)",
        "(one.space is not None and excess >= 0)",
        f"{_CACHE}::test_prune_removes_the_least_recently_used_blocks",
    ),
    fault(
        "prune keeps expired sessions",
        "cli/cache/actions.py",
        "if old or one.has_expired or",
        "if old or",
        f"{_CACHE}::test_prune_removes_expired_sessions",
    ),
    fault(
        "a chat whose session is not saved exits with 0",
        "cli/chat.py",
        "(conversation.has_failed or conversation.is_unsaved)",
        "conversation.has_failed",
        "tests/cli/test_named_session.py::test_a_named_session_on_a_server",
    ),
    fault(
        "clears the whole cache without asking",
        "cli/cache/actions.py",
        "if as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):",
        "if as_json or not (sys.stdin.isatty() and sys.stderr.isatty()):",
        "tests/cli/cache/test_names.py::test_clear_asks_for_confirmation_in_a_terminal",
    ),
    fault(
        "verify succeeds despite damaged blocks",
        "cli/cache/actions.py",
        'if any(row.get("damaged") for row in answer["rows"]):',
        'if any(row.get("damage") for row in answer["rows"]):',
        f"{_CACHE}::test_verify_counts_damaged_blocks_and_fails",
    ),
    fault(
        "keeps only the last piece of a call's arguments",
        "cli/servers/remote.py",
        "known.arguments + arguments)",
        "arguments)",
        f"{_REMOTE}::test_streamed_tool_calls_are_joined",
    ),
    fault(
        "shows reasoning as part of the answer",
        "cli/servers/remote.py",
        "                yield Thought(thought)\n",
        "                yield thought\n",
        f"{_REMOTE}::test_reasoning_is_separate_from_the_answer",
    ),
    fault(
        "does not send the API key from the environment",
        "cli/servers/remote.py",
        'self.api_key = api_key or os.environ.get(_KEY_VARIABLE, "")',
        "self.api_key = api_key",
        f"{_REMOTE}::test_the_key_is_sent_and_a_wrong_one_is_named",
    ),
    fault(
        "keeps a refused turn in the conversation",
        "cli/chat.py",
        '        turn = [*self._messages, {"role": "user", "content": line}]\n',
        '        self._messages.append({"role": "user", "content": line})\n'
        "        turn = list(self._messages)\n",
        "tests/cli/test_app.py::test_chat_survives_a_refused_turn",
    ),
    fault(
        "Ctrl-C at the prompt ends a chat",
        "cli/chat.py",
        "            if not sys.stdin.isatty():\n                raise\n",
        "            return None\n",
        "tests/cli/test_lines.py",
    ),
    fault(
        "an invalid option exits like any other error",
        "errors.py",
        "return 2 if isinstance(error, ConfigError) else 1",
        "return 1",
        "tests/cli/test_refusals.py",
    ),
    fault(
        "prints nothing outside terminals while a model loads",
        "cli/session.py",
        "    lines.loading(size_on_disk(path))\n    on_compiling(lines.compiling)\n",
        "",
        "tests/cli/test_session.py",
    ),
    fault(
        "drops the system message with the oldest chat turns",
        "cli/chat.py",
        "self._messages[len(self._opening) : end] = []",
        "self._messages[:end] = []",
        "tests/cli/test_app.py::test_a_chat_that_outgrows_the_pool_continues",
    ),
    fault(
        "starts a new conversation without its system message",
        "cli/chat.py",
        '"""Start a new conversation."""\n        self._messages = list(self._opening)\n',
        '"""Start a new conversation."""\n        self._messages = []\n',
        f"{_REMOTE}::test_a_remote_conversation",
    ),
    fault(
        "parses integers as floats",
        "cli/option_parsing.py",
        "for kind in (int, float):",
        "for kind in (float, int):",
        f"{_OPTIONS}::test_values_get_the_type_of_their_notation",
    ),
    fault(
        "keeps only the last of several stop strings",
        "cli/option_parsing.py",
        "            stops.append(text)\n",
        "            stops[:] = [text]\n",
        f"{_OPTIONS}::test_stop_may_be_repeated_and_stays_text",
    ),
    fault(
        "warms a recorded request without the generation prompt",
        "cli/servers/query_commands.py",
        'body = {"add_generation_prompt": True, **_recorded(Path(file))}',
        "body = _recorded(Path(file))",
        "tests/cli/servers/test_warm.py::test_a_warmed_request_hits_all_full_blocks",
    ),
    fault(
        "sends a client to a URL that ends in /v1 twice",
        "cli/servers/remote.py",
        'url.rstrip("/").removesuffix("/v1")',
        'url.rstrip("/")',
        "tests/cli/test_launch.py::test_launch_configures_claude",
    ),
    fault(
        "a glyph for several blocks shows the idlest, not the busiest",
        "cli/render.py",
        "cells = [max(states[start : start + per_cell])",
        "cells = [min(states[start : start + per_cell])",
        f"{_RENDER}::test_a_large_pool_draws_several_blocks_per_glyph",
    ),
    fault(
        "interprets brackets in a path as markup",
        "cli/console.py",
        "quiet=quiet, markup=False,",
        "quiet=quiet, markup=True,",
        "tests/cli/test_console.py::test_commands_show_paths_without_markup",
    ),
    fault(
        "compares sparse prefill on prompts that are computed exactly",
        "cli/evaluate.py",
        "if shareable.sparse_end(longest, size) == shareable.FIRST_POSITION:",
        "if longest < 0:",
        "tests/cli/test_eval.py",
    ),
)
