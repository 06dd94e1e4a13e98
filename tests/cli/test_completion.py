"""Tests of shell completion by typer: the script and the suggested words."""

import pytest

VARIABLE = "_KVBOOST_EDGE_COMPLETE"


@pytest.fixture
def completed(monkeypatch, printed):
    """Function `completed(line)` that returns bash's suggestions for the last word of a line."""

    def call(line):
        words = line.split(" ")
        monkeypatch.setenv(VARIABLE, "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(words) - 1))
        return set(printed(code=0).out.split())

    return call


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("kvboost-edge be", {"bench"}),
        ("kvboost-edge wa", {"warm", "warmup"}),
        ("kvboost-edge bench --n-", {"--n-prompt", "--n-gen", "--n-depth"}),
        ("kvboost-edge cache pr", {"prune"}),
        ("kvboost-edge launch o", {"opencode", "openwebui"}),
        ("kvboost-edge generate Hi --recompute-r", {"--recompute-ratio"}),
        ("kvboost-edge serve --otel", {"--otel-endpoint"}),
        ("kvboost-edge serve --max-conn", {"--max-connections"}),
    ],
)
def test_commands_options_and_choices_are_completed(completed, line, words):
    assert completed(line) == words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_calls_the_command(shell, monkeypatch, printed):
    monkeypatch.setattr("typer.completion._get_shell_name", lambda: shell)
    script = printed("--show-completion").out
    assert VARIABLE in script
    assert "kvboost-edge" in script


def test_help_lists_the_completion_options(printed):
    shown = printed("--help").out
    assert "--install-completion" in shown
    assert "--show-completion" in shown
