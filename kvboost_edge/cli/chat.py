"""`kvboost-edge chat`: a conversation whose earlier turns stay in the pool."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from kvboost_edge.cli.render import pool_panel
from kvboost_edge.cli.session import answer, loaded_engine, timing_line
from kvboost_edge.errors import RequestError

if TYPE_CHECKING:
    from kvboost_edge.engine.engine import CPUPagedEngine

__all__ = ["run_chat"]

_HELP = "/reset starts over, /stats shows the pool, /quit or Ctrl-D leaves; Ctrl-C stops an answer."


def run_chat(model: str, options: dict[str, Any], settings: dict[str, Any], system: str) -> None:
    """Read user messages until the end of input; each answer streams, its figures follow."""
    console = Console()
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    with loaded_engine(model, options, Console(stderr=True)) as engine:
        console.print(f"[dim]{_HELP}[/dim]")
        while (line := _read_line(console)) is not None:
            if line == "/quit":
                return
            if line == "/reset":
                messages = list(opening)
                console.print("[dim]a new conversation[/dim]")
            elif line == "/stats":
                console.print(pool_panel(engine.block_map(), engine.paged_stats(), width=console.width))
            elif line.startswith("/"):
                console.print(f"[dim]{_HELP}[/dim]")
            elif line:
                _take_turn(engine, console, messages, line, settings)


def _read_line(console: Console) -> str | None:
    """One stripped line from the user; None at the end of input and on Ctrl-C at the prompt."""
    try:
        return console.input("[bold cyan]you ›[/bold cyan] ").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None


def _take_turn(
    engine: CPUPagedEngine, console: Console, messages: list[dict[str, str]], line: str, settings: dict[str, Any]
) -> None:
    """Append the user's line and the answer to `messages`. A refused or interrupted turn leaves them as they were."""
    turn = [*messages, {"role": "user", "content": line}]

    def write(piece: str) -> None:
        console.file.write(piece)
        console.file.flush()

    try:
        result = answer(engine, turn, settings, write)
    except RequestError as error:
        print(f"this turn was refused: {error}", file=sys.stderr)
        return
    except KeyboardInterrupt:
        console.print("\n[dim]stopped; this turn is forgotten[/dim]")
        return
    console.print(f"\n[dim]{timing_line(result)}[/dim]")
    messages[:] = [*turn, {"role": "assistant", "content": result.output_text}]
