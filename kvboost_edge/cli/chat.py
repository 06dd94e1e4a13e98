"""The `kvboost-edge chat` command, for a conversation with a local engine or a server."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer
from rich.console import Console
from rich.text import Text

from kvboost_edge.cli.console import counted, open_console
from kvboost_edge.cli.named_session import ChatSession, LocalSession, RemoteSession
from kvboost_edge.cli.option_parsing import CACHE_USE
from kvboost_edge.cli.render import PromptBar, pool_panel
from kvboost_edge.cli.servers.remote import RemoteAnswer, ServerClient, Thought
from kvboost_edge.cli.session import answer, loaded_engine, timing_line
from kvboost_edge.engine.request.progress import Progress
from kvboost_edge.errors import ConfigError, KVBoostError, RequestError

if TYPE_CHECKING:
    from kvboost_edge.engine.engine import CPUPagedEngine

__all__ = ["Lines", "run_chat", "run_remote_chat"]

_HELP = (
    "/reset starts a new conversation, /drop [N] removes the N oldest turns (1), /save FILE saves "
    "the conversation as JSON, /stats shows the block pool, /help shows the commands, /quit (also "
    "/exit, /bye, Ctrl-D) exits; Ctrl-C stops an answer and keeps the part received, or clears the "
    "line."
)
# These commands print the help when arguments are wrong; /save does so without a file.
_COMMANDS = ("/help", "/save")
_OFFER = (
    "the conversation is unchanged: /drop removes its oldest turn and asks again, /save FILE saves "
    "it, /reset starts a new one"
)

Message = dict[str, str]
Messages = list[Message]
Write = Callable[[str], None]


_COLOURS = re.compile(r"(\x1b\[[0-9;]*m)")


class Lines:
    """Reader for the user's lines, with editing and history where readline exists."""

    def __init__(self, console: Console, prompt: str, style: str) -> None:
        self._console = console
        self._prompt = Text.assemble((prompt, style), " ")
        self._readline = _readline() if console.is_terminal and sys.stdin.isatty() else None
        if self._readline is not None:
            self._readline.clear_history()

    def read(self) -> str:
        """Return the next line without the line break.

        Raises EOFError at the end of input, and KeyboardInterrupt on Ctrl-C.
        """
        if self._readline is None:
            return self._console.input(self._prompt)
        return input(self._shown())

    def _shown(self) -> str:
        """Return the prompt for readline, with its colour codes marked as zero-width."""
        with self._console.capture() as capture:
            self._console.print(self._prompt, end="")
        return _COLOURS.sub("\x01\\1\x02", capture.get())


def _readline() -> Any:
    """Return the module that makes `input` editable, or None on systems without it."""
    try:
        return importlib.import_module("readline")
    except ImportError:
        return None


class _Partner(NamedTuple):
    """Model in a conversation.

    Attributes:
        reply: Function that streams the answer to the messages, adds each piece to a given message,
            and returns a line of statistics.
        show_stats: Function that prints the statistics of the engine or server.
        session: Named session of the conversation, if any.
    """

    reply: Callable[[Messages, Message, Write], str]
    show_stats: Callable[[], None]
    session: ChatSession | None = None


def run_chat(
    model: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    system: str,
    session: str | None = None,
) -> None:
    """Chat with a local model until the end of input."""
    console = open_console()
    kept = None if session is None else LocalSession(session, model, options)
    opening = _opening(kept, system)
    with loaded_engine(model, options, open_console(stderr=True), settings) as engine:
        if kept is not None:
            kept.engine = engine
        _converse(console, _local(engine, settings, console)._replace(session=kept), opening)


def run_remote_chat(
    url: str,
    api_key: str,
    model: str,
    settings: dict[str, Any],
    system: str,
    session: str | None = None,
) -> None:
    """Chat with a running server until the end of input."""
    console = open_console()
    with ServerClient(url, api_key=api_key, model=model) as remote:
        console.print(f"{remote.model} at {url}", style="dim")
        kept = None if session is None else RemoteSession(session, remote)
        opening = _opening(kept, system)
        _converse(console, _remote(remote, settings, console)._replace(session=kept), opening)


class _Opening(NamedTuple):
    """Beginning of a conversation.

    Attributes:
        system: Messages that /reset keeps.
        messages: All messages so far.
    """

    system: Messages
    messages: Messages


def _opening(session: ChatSession | None, system: str) -> _Opening:
    """Return the messages of a session, or the system message of a new conversation.

    Raises:
        ConfigError: the session has another system message.
    """
    asked: Messages = [{"role": "system", "content": system}] if system else []
    messages = session.messages() if session is not None else []
    if not messages:
        return _Opening(asked, asked)
    had = [one for one in messages[:1] if one["role"] == "system"]
    if asked and asked != had:
        raise ConfigError(
            "--system differs from the system message of the session; leave it out, or choose "
            "another --session"
        )
    return _Opening(had, messages)


def _local(engine: CPUPagedEngine, settings: dict[str, Any], console: Console) -> _Partner:
    def reply(messages: Messages, message: Message, write: Write) -> str:
        def take(piece: str) -> None:
            message["content"] += piece
            write(piece)

        return timing_line(answer(engine, messages, settings, take, console))

    def show_stats() -> None:
        console.print(pool_panel(engine.block_map(), engine.paged_stats(), width=console.width))

    return _Partner(reply, show_stats)


def _remote(remote: ServerClient, settings: dict[str, Any], console: Console) -> _Partner:
    named = _for_server(settings)

    def reply(messages: Messages, message: Message, write: Write) -> str:
        thinking = False
        with PromptBar(console) as bar:
            for piece in remote.stream(messages, named, progress=bar.is_wanted):
                if isinstance(piece, Progress):
                    bar.show(piece)
                    continue
                bar.close()
                if isinstance(piece, RemoteAnswer):
                    _show_calls(piece, console)
                    return piece.timing_line
                if isinstance(piece, Thought):
                    message["reasoning_content"] = message.get("reasoning_content", "") + piece.text
                    console.print(Text(piece.text, "dim"), end="", soft_wrap=True)
                else:
                    message["content"] += piece
                    write(f"\n{piece}" if thinking else piece)
                thinking = isinstance(piece, Thought)
        raise RequestError(
            "the server closed the stream before the answer was complete; see the server's log"
        )

    return _Partner(reply, lambda: console.print_json(json.dumps(remote.stats())))


def _for_server(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert keyword arguments of `submit` to fields of a server request."""
    named = {
        "max_tokens" if name == "max_new_tokens" else name: value
        for name, value in settings.items()
    }
    if named.get("max_tokens", 0) is None:  # some servers reject null
        del named["max_tokens"]
    use = {name: named.pop(name) for name in CACHE_USE if name in named}
    if use:
        named["kvboost"] = use
    if isinstance(named.get("json_schema"), dict):
        schema = {"name": "answer", "schema": named.pop("json_schema")}
        named["response_format"] = {"type": "json_schema", "json_schema": schema}
    return named


def _show_calls(answer: RemoteAnswer, console: Console) -> None:
    """Print a line for each tool call."""
    begun = bool(answer.text or answer.reasoning)
    for name, arguments in answer.tool_calls:
        line = f"calls {name} {' '.join(arguments.split())}"
        console.print(Text(f"\n{line}" if begun else line, "cyan"), end="", soft_wrap=True)
        begun = True


class _Conversation:
    """Messages so far, and the last user message if the engine or server rejected it.

    Attributes:
        has_failed: Whether a turn ended with an error.
        is_unsaved: Whether the last attempt to save the conversation in its session failed.
    """

    def __init__(self, partner: _Partner, console: Console, opening: _Opening) -> None:
        self._partner = partner
        self._console = console
        self._opening = opening.system
        self._messages = list(opening.messages)
        self._refused = ""
        self.has_failed = False
        self.is_unsaved = False
        if partner.session is not None:
            turns = counted(len(self._turns()), "turn", "turns")
            console.print(f"session {partner.session.name}: {turns}", style="dim")

    def take(self, line: str) -> None:
        """Send a user message and append the answer.

        After an error or Ctrl-C, keeps the part of the answer that was received, or drops the turn
        if there is none.
        """
        turn = [*self._messages, {"role": "user", "content": line}]
        message = {"role": "assistant", "content": ""}
        self._refused = ""
        try:
            figures = self._partner.reply(turn, message, self._write)
        except KVBoostError as error:
            self.has_failed = True
            if message["content"].strip():
                self._console.print()
                print(
                    f"the answer is incomplete: {error}; the part received was kept",
                    file=sys.stderr,
                )
                self._append(turn, message)
                return
            print(f"this turn was refused: {error}", file=sys.stderr)
            self._refused = line
            if self._turns():
                self._console.print(_OFFER, style="dim")
            return
        except KeyboardInterrupt:
            if message["content"].strip():
                self._console.print("\nstopped; the part received was kept", style="dim")
                self._append(turn, message)
            else:
                self._console.print("\nstopped; this turn was removed", style="dim")
            return
        self._console.print(f"\n{figures}", style="dim")
        self._append(turn, message)

    def reset(self) -> None:
        """Start a new conversation."""
        self._messages = list(self._opening)
        self._refused = ""
        self._console.print("new conversation", style="dim")

    def drop(self, number: str) -> None:
        """Remove the oldest turns, and resend a rejected message.

        Args:
            number: Number of turns, as text; "" for one turn.
        """
        turns = self._turns()
        number = number or "1"
        if not turns or not number.isdecimal() or not 1 <= int(number) <= len(turns):
            print(
                f"/drop {number}: the conversation has {counted(len(turns), 'turn', 'turns')}; "
                "give a number of turns to remove",
                file=sys.stderr,
            )
            return
        gone = int(number)
        end = turns[gone] if gone < len(turns) else len(self._messages)
        self._messages[len(self._opening) : end] = []
        self._console.print(f"{counted(gone, 'turn', 'turns')} removed", style="dim")
        if self._refused:
            self.take(self._refused)

    def save(self, file: str) -> None:
        """Write the messages, including a rejected one, to a file as JSON."""
        refused = [{"role": "user", "content": self._refused}] if self._refused else []
        try:
            Path(file).expanduser().write_text(
                json.dumps([*self._messages, *refused], ensure_ascii=False, indent=1) + "\n",
                encoding="utf-8",
            )
        except (OSError, ValueError) as error:
            print(f"/save {file}: {error}; give a writable file", file=sys.stderr)
            return
        self._console.print(f"saved to {file}", style="dim")

    def _append(self, turn: Messages, message: Message) -> None:
        self._messages = [*turn, message]
        self._keep()

    def _keep(self) -> None:
        """Save the conversation in its session, if it has one."""
        session = self._partner.session
        if session is None:
            return
        try:
            line = session.keep(self._messages)
        except KVBoostError as error:
            self.is_unsaved = True
            print(f"the session was not saved: {error}", file=sys.stderr)
            return
        self.is_unsaved = False
        self._console.print(f"session {session.name}: {line}", style="dim")

    def _turns(self) -> list[int]:
        """Return the index of the first message of each turn."""
        return [at for at, one in enumerate(self._messages) if one["role"] == "user"]

    def _write(self, piece: str) -> None:
        self._console.file.write(piece)
        self._console.file.flush()


def _converse(console: Console, partner: _Partner, opening: _Opening) -> None:
    """Read user messages until the end of input.

    Raises:
        typer.Exit: A turn ended with an error or the session is not saved, and the input is piped.
    """
    conversation = _Conversation(partner, console, opening)
    console.print(_HELP, style="dim")
    lines = Lines(console, "you ›", "bold cyan")
    while (line := _read_line(lines, console)) is not None:
        command, _, argument = line.partition(" ")
        if command in ("/quit", "/exit", "/bye"):
            break
        if command == "/reset":
            conversation.reset()
        elif command == "/drop":
            conversation.drop(argument.strip())
        elif command == "/save" and argument.strip():
            conversation.save(argument.strip())
        elif command == "/stats":
            try:
                partner.show_stats()
            except RequestError as error:  # a server may not provide its statistics
                print(f"no statistics: {error}", file=sys.stderr)
        elif line.startswith("/"):
            if command not in _COMMANDS:
                print(f"unknown command {command}", file=sys.stderr)
            console.print(_HELP, style="dim")
        elif line:
            conversation.take(line)
    if (conversation.has_failed or conversation.is_unsaved) and not sys.stdin.isatty():
        raise typer.Exit(1)


def _read_line(lines: Lines, console: Console) -> str | None:
    """Return a stripped line from the user, or None at the end of input.

    In a terminal, Ctrl-C discards the line. Otherwise it raises KeyboardInterrupt.
    """
    while True:
        try:
            return lines.read().strip()
        except EOFError:
            console.print()
            return None
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            console.print("\nCtrl-D or /quit exits", style="dim")
