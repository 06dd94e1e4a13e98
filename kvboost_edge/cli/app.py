"""The commands and their options. Everything heavy is imported by the command that needs it, so `--help` is quick."""

from __future__ import annotations

from typing import Annotated

import typer

from kvboost_edge.errors import KVBoostError

__all__ = ["app", "run"]

DEMO_MODEL = "kvboost-edge/demo"

app = typer.Typer(
    name="kvboost-edge",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run language models on a paged, prefix-shared KV cache. Without --model the bundled demo model is used.",
)

ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="A model directory, a Hugging Face id, or the bundled demo model.")
]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        metavar="NAME=VALUE",
        help="Any engine option, repeatable: backend=reference, dtype=float32, num_threads=2, max_cache_bytes=4e9 …",
    ),
]
SamplingOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--sampling",
        "-s",
        metavar="NAME=VALUE",
        help="Any sampling parameter, repeatable: temperature=0.7, top_p=0.9, top_k=40, seed=1, stop=END …",
    ),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", "-n", help="At most so many tokens are generated.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.command(
    epilog="[b]Examples[/b]\n\n"
    'kvboost-edge generate "Hello!" --chat\n\n'
    'kvboost-edge generate -m Qwen/Qwen2-0.5B "The capital of France is" -n 16\n\n'
    "cat question.txt | kvboost-edge generate - -m ./my-model -s temperature=0.7 -s seed=1 --json"
)
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads it from standard input.")],
    model: ModelOption = DEMO_MODEL,
    max_new_tokens: MaxNewTokens = 64,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user message.")] = False,
    sampling: SamplingOptions = None,
    option: EngineOptions = None,
    as_json: JsonOption = False,
) -> None:
    """Generate text from one prompt, streaming it as it comes."""
    from kvboost_edge.cli.generate import run_generate
    from kvboost_edge.cli.options import engine_options, sampling_options

    settings = {"max_new_tokens": max_new_tokens, **sampling_options(sampling)}
    run_generate(prompt, model, engine_options(option), settings, chat=chat, as_json=as_json)


@app.command(
    epilog="[b]Examples[/b]\n\n"
    "kvboost-edge chat\n\n"
    'kvboost-edge chat -m ./my-model --system "Answer in one sentence." -s temperature=0.7\n\n'
    "In the chat: /reset starts over, /stats shows the pool, /quit or Ctrl-D leaves."
)
def chat(
    model: ModelOption = DEMO_MODEL,
    system: Annotated[str, typer.Option("--system", help="A system message that opens the conversation.")] = "",
    max_new_tokens: MaxNewTokens = 512,
    sampling: SamplingOptions = None,
    option: EngineOptions = None,
) -> None:
    """Talk with a model; under each answer stands what the cache saved."""
    from kvboost_edge.cli.chat import run_chat
    from kvboost_edge.cli.options import engine_options, sampling_options

    run_chat(model, engine_options(option), {"max_new_tokens": max_new_tokens, **sampling_options(sampling)}, system)


@app.command(epilog="[b]Examples[/b]\n\nkvboost-edge demo\n\nkvboost-edge demo -o backend=reference")
def demo(option: EngineOptions = None) -> None:
    """Ask the bundled model several questions about one shared document and show what is reused. No network."""
    from kvboost_edge.cli.demo import run_demo
    from kvboost_edge.cli.options import engine_options

    run_demo(DEMO_MODEL, engine_options(option))


@app.command(
    epilog="[b]Examples[/b]\n\nkvboost-edge doctor\n\nkvboost-edge doctor ./my-model\n\nkvboost-edge doctor --json"
)
def doctor(
    model: Annotated[str, typer.Argument(help="A model to judge: directory, id, or the bundled one.")] = DEMO_MODEL,
    option: EngineOptions = None,
    as_json: JsonOption = False,
) -> None:
    """Show what this machine offers, and which runner and backend a model would use and why."""
    from kvboost_edge.cli.doctor import run_doctor
    from kvboost_edge.cli.options import engine_options

    run_doctor(model, engine_options(option), as_json=as_json)


@app.command(epilog="[b]Examples[/b]\n\nkvboost-edge inspect ./my-model\n\nkvboost-edge inspect Qwen/Qwen2-0.5B --json")
def inspect(
    model: Annotated[str, typer.Argument(help="A model directory, a Hugging Face id, or the bundled demo model.")],
    option: EngineOptions = None,
    as_json: JsonOption = False,
) -> None:
    """Check a model's files and show its architecture, size, KV bytes per token and fingerprint."""
    from kvboost_edge.cli.inspect import run_inspect
    from kvboost_edge.cli.options import engine_options

    run_inspect(model, engine_options(option), as_json=as_json)


def run(argv: list[str] | None = None) -> int:
    """Run one command line; an error of the package becomes one line on standard error and exit code 1."""
    try:
        app(args=argv, prog_name="kvboost-edge")
    except KVBoostError as error:
        typer.echo(f"kvboost-edge: error: {' '.join(str(error).split())}", err=True)
        return 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    return 0
