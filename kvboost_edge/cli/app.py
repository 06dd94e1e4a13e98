"""Commands of `kvboost-edge` and their options.

Each command imports its heavy modules when it runs, which keeps `--help` fast.
"""

from __future__ import annotations

import enum
import errno
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvboost_edge.cli.cache.commands import add_cache
from kvboost_edge.cli.engine_flags import engine_flags
from kvboost_edge.cli.kernels.commands import add_kernels
from kvboost_edge.cli.option_parsing import (
    JsonOption,
    list_parameters,
    option_advice,
    print_engine_options,
    print_sampling_parameters,
    read_size,
    token_limit,
)
from kvboost_edge.cli.servers.query_commands import add_commands
from kvboost_edge.config import GenerationMode, RecomputeStrategy
from kvboost_edge.errors import ConfigError, KVBoostError, exit_code
from kvboost_edge.server.flags import USAGE_ERROR, suggest_flag

__all__ = ["app", "run"]

DEMO_MODEL = "kvboost-edge/demo"


class _Commands(TyperGroup):
    """Group of all commands, which suggests similar flags for an unknown flag."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        for command in self.commands.values():
            _describe(command.params)

    def get_params(self, ctx: Any) -> list[Any]:
        return _describe(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _describe(command.get_params(ctx))  # includes --help, which typer creates on demand
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            suggest_flag(error, option_advice)
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except USAGE_ERROR as error:
            command = self.commands.get(ctx.invoked_subcommand)
            if _lacks_value(error, command, "option"):
                print_engine_options()
            if _lacks_value(error, command, "sampling"):
                print_sampling_parameters()
            suggest_flag(error, option_advice)
            message: str = error.message  # type: ignore[attr-defined]
            # Newer versions of typer prefix the messages of wrong choices with pydantic's words.
            error.message = message.removeprefix("Value error, ")  # type: ignore[attr-defined]
            raise


def _describe(parameters: list[Any]) -> list[Any]:
    """Hide the placeholders of switches, and append defaults to the help texts."""
    for one in parameters:
        if getattr(one, "is_flag", False):
            one.metavar = ""
        if one.show_default and one.default and isinstance(one.default, (str, int, float)):
            one.help = f"{one.help} Default: {'on' if one.default is True else one.default}."
            one.show_default = False
    return parameters


def _lacks_value(error: Any, command: Any, name: str) -> bool:
    """Return whether a command's parameter of this name was given without a value."""
    is_unknown = hasattr(error, "possibilities")  # the command has no such option
    flag = getattr(error, "option_name", None)
    if is_unknown or flag is None or command is None:
        return False
    return any(one.name == name and flag in one.opts for one in command.params)


app = typer.Typer(
    name="kvboost-edge",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help=(
            "Model directory, GGUF file, hub id (owner/name or owner/name-GGUF:Q4_K_M) or "
            "Ollama model (ollama:NAME:TAG)."
        ),
    ),
]


_ENGINE_FLAGS = (  # of the commands that generate text
    "--kv-cache-bits",
    "--pack-cache/--no-pack-cache",
    "--threads",
    "--ctx-size --max-model-len",
    "--max-memory",
    "--draft-model",
    "--arithmetic",
    "--prefill",
)
SamplingOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--sampling",
        "-s",
        metavar="NAME=VALUE",
        is_eager=True,
        callback=list_parameters,
        help=(
            "Sampling parameter, such as temperature=0.7 or stop=END. Repeatable. '-s list' "
            "prints all parameters with their types and defaults."
        ),
    ),
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        "--temperature",
        metavar="NUMBER",
        help="Sampling temperature. 0 always takes the most likely token. Default: the model's "
        "own, otherwise 0.7.",
    ),
]
TopPOption = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        metavar="NUMBER",
        help="Sample from the most likely tokens whose probabilities add up to this value, in "
        "(0, 1]. Default: the model's own, otherwise 0.95.",
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed", metavar="N", help="Seed of the random number generator. Default: a random seed."
    ),
]
SchemaOption = Annotated[
    str | None,
    typer.Option(
        "--json-schema",
        metavar="FILE",
        help="File with a JSON schema that every answer must match. Default: no schema.",
    ),
]
GrammarOption = Annotated[
    str | None,
    typer.Option(
        "--grammar",
        metavar="FILE",
        help="File with a grammar in GBNF or Lark format that every answer must match. Default: "
        "no grammar.",
    ),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens",
        "-n",
        metavar="N",
        parser=token_limit,
        help="Maximum number of tokens to generate. 'max' generates until the context or the KV "
        "cache is full. Default: max.",
    ),
]
ModeOption = Annotated[
    GenerationMode | None,
    typer.Option(
        "--mode",
        metavar="MODE",
        help=(
            "How to use the cache: baseline (not at all), prefix_cache (exact prefixes) or "
            "chunk_kv_reuse (also chunks computed at other positions, approximate). Default: "
            "prefix_cache."
        ),
    ),
]
StrategyOption = Annotated[
    RecomputeStrategy | None,
    typer.Option(
        "--recompute-strategy",
        metavar="STRATEGY",
        help="Which reused tokens chunk_kv_reuse mode recomputes: none, selective, cacheblend "
        "or query. Default: cacheblend.",
    ),
]
OverlapOption = Annotated[
    int | None,
    typer.Option(
        "--recompute-overlap",
        metavar="TOKENS",
        help="Number of tokens that chunk_kv_reuse mode recomputes after each chunk boundary. "
        "Default: 16.",
    ),
]
RatioOption = Annotated[
    float | None,
    typer.Option(
        "--recompute-ratio",
        metavar="SHARE",
        help="Fraction of the remaining reused tokens, from 0 to 1, that the strategies "
        "cacheblend and query recompute. Default: 0.1.",
    ),
]
SameModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="MODEL", help="Model, as an alternative to the MODEL argument."
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from kvboost_edge import __version__

        typer.echo(f"kvboost-edge {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Run language models with a paged KV cache and automatic prefix caching.

    Commands use the bundled demo model unless --model is given.
    """


@app.command(
    epilog="[b]Examples[/b]\n\n"
    'kvboost-edge generate -m ./my-model.gguf "Hello!"\n\n'
    'kvboost-edge generate -m Qwen/Qwen2-0.5B "The capital of France is" --raw -n 16\n\n'
    "cat question.txt | kvboost-edge generate - -m ./my-model --temperature 0.7 --seed 1 --json\n\n"
    'kvboost-edge generate -m ./my-model "Name a city in Italy." -n 256 --json-schema city.json'
)
@engine_flags(*_ENGINE_FLAGS)
def generate(
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT", help="Text of the prompt. '-' reads it from standard input."
        ),
    ],
    model: ModelOption = DEMO_MODEL,
    max_new_tokens: MaxNewTokens = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Send the prompt as a user message in the model's chat template, or send it "
            "unchanged. Default: --chat if the model has a chat template.",
        ),
    ] = None,
    system: Annotated[
        str,
        typer.Option(
            "--system",
            metavar="TEXT",
            help="System message to send before the prompt. Default: no system message.",
        ),
    ] = "",
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    sampling: SamplingOptions = None,
    json_schema: SchemaOption = None,
    grammar: GrammarOption = None,
    mode: ModeOption = None,
    recompute_strategy: StrategyOption = None,
    recompute_overlap: OverlapOption = None,
    recompute_ratio: RatioOption = None,
    *,
    engine: dict[str, Any],
    as_json: JsonOption = False,
) -> None:
    """Generate text from one prompt and stream it."""
    from kvboost_edge.cli.generate import run_generate
    from kvboost_edge.cli.option_parsing import cache_use, sampling_options

    use = cache_use(mode, recompute_strategy, recompute_overlap, recompute_ratio)
    named = {"temperature": temperature, "top_p": top_p, "seed": seed}
    settings = {
        "max_new_tokens": max_new_tokens,
        **sampling_options(sampling, json_schema, named, grammar),
        **use,
    }
    run_generate(
        prompt,
        model,
        engine,
        settings,
        chat=chat,
        system=system,
        as_json=as_json,
    )


@app.command(
    epilog="[b]Examples[/b]\n\n"
    "kvboost-edge chat\n\n"
    'kvboost-edge chat -m ./my-model --system "Answer in one sentence." --temperature 0.7\n\n'
    "kvboost-edge chat --url http://127.0.0.1:8000 --api-key sk-mine --mode chunk_kv_reuse\n\n"
    "kvboost-edge chat -m ./my-model --json-schema city.json\n\n"
    "kvboost-edge chat -m ./my-model --session travel\n\n"
    "In the chat: /reset starts a new conversation, /drop removes the oldest turn, /save FILE "
    "saves the conversation, /stats shows the block pool, /help shows the commands, /quit (also "
    "/exit, /bye, Ctrl-D) exits. Ctrl-C stops an answer and keeps the part received, or clears the "
    "line. If an error, such as the server's time limit, ends an answer, the part received is kept "
    "too."
)
@engine_flags(*_ENGINE_FLAGS)
def chat(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="Model directory, GGUF file or hub id. With --url, the name of a model on the "
            "server. Default: kvboost-edge/demo, or the server's first model.",
        ),
    ] = None,
    system: Annotated[
        str,
        typer.Option(
            "--system",
            metavar="TEXT",
            help="System message of the conversation. Default: no system message.",
        ),
    ] = "",
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            help="URL of a running server to chat with, such as http://127.0.0.1:8000. "
            "Default: run the model in this process.",
        ),
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(
            "--api-key", metavar="KEY", help="API key for the server. Default: $KVBOOST_API_KEY."
        ),
    ] = "",
    session: Annotated[
        str | None,
        typer.Option(
            "--session",
            metavar="NAME",
            help="Named session to continue, and to save after each answer. A session ends a day "
            "after it was last saved. Default: the conversation is not saved.",
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = None,
    temperature: TemperatureOption = None,
    top_p: TopPOption = None,
    seed: SeedOption = None,
    sampling: SamplingOptions = None,
    json_schema: SchemaOption = None,
    grammar: GrammarOption = None,
    mode: ModeOption = None,
    recompute_strategy: StrategyOption = None,
    recompute_overlap: OverlapOption = None,
    recompute_ratio: RatioOption = None,
    *,
    engine: dict[str, Any],
) -> None:
    """Chat with a local model or a server, with cache statistics after each answer."""
    from kvboost_edge.cli.chat import run_chat, run_remote_chat
    from kvboost_edge.cli.option_parsing import cache_use, remote_options, sampling_options

    use = cache_use(mode, recompute_strategy, recompute_overlap, recompute_ratio)
    named = {"temperature": temperature, "top_p": top_p, "seed": seed}
    settings = {
        "max_new_tokens": max_new_tokens,
        **sampling_options(sampling, json_schema, named, grammar),
        **use,
    }
    remote_options(url, engine, api_key)
    if url is None:
        from kvboost_edge.tiers.disk.survey import default_directory

        # Store KV blocks on disk for when the conversation is resumed, unless --no-pack-cache
        # forbids writing to the cache directory. `-o disk_cache_dir=off` also turns this off.
        if engine.get("pack_cache", True):
            engine.setdefault("disk_cache_dir", str(default_directory()))
        run_chat(model or DEMO_MODEL, engine, settings, system, session)
    else:
        run_remote_chat(url, api_key, model or "", settings, system, session)


@app.command(
    epilog="[b]Examples[/b]\n\nkvboost-edge demo\n\nkvboost-edge demo -o backend=reference"
)
@engine_flags("--kv-cache-bits", "--pack-cache/--no-pack-cache")
def demo(
    *,
    engine: dict[str, Any],
    stats: Annotated[
        bool, typer.Option("--stats", help="Also show the statistics of the block pool.")
    ] = False,
) -> None:
    """Show how prefix caching speeds up several questions about one document.

    Uses the bundled model and needs no network.
    """
    from kvboost_edge.cli.demo import run_demo

    run_demo(DEMO_MODEL, engine, show_stats=stats)


@app.command(
    epilog=(
        "[b]Examples[/b]\n\nkvboost-edge doctor\n\nkvboost-edge doctor ./my-model\n\nkvboost-edge "
        "doctor --json"
    )
)
@engine_flags("--kv-cache-bits", "--ctx-size --max-model-len", "--max-memory", "--draft-model")
def doctor(
    name: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help=f"Model to check. Default: {DEMO_MODEL}."),
    ] = None,
    model: SameModelOption = None,
    *,
    engine: dict[str, Any],
    as_json: JsonOption = False,
) -> None:
    """Show this machine's hardware and check whether a model runs on it.

    Reports the runner and backend that the engine would choose and why, and whether the model fits
    in memory. The model is not loaded. Exits with status 1 if the model does not run here.
    """
    from kvboost_edge.cli.doctor import run_doctor
    from kvboost_edge.cli.option_parsing import one_model

    run_doctor(one_model(name, model, DEMO_MODEL), engine, as_json=as_json)


@app.command(
    epilog=(
        "[b]Examples[/b]\n\nkvboost-edge models\n\nkvboost-edge models qwen\n\nkvboost-edge "
        "models --json"
    )
)
@engine_flags()
def models(
    word: Annotated[
        str,
        typer.Argument(
            metavar="WORD",
            help="Text to search for in model names. Default: list all models.",
        ),
    ] = "",
    suggest: Annotated[
        bool,
        typer.Option(
            "--suggest",
            help="List recommended models for each memory size "
            "instead of the models on this machine.",
        ),
    ] = False,
    *,
    engine: dict[str, Any],
    as_json: JsonOption = False,
) -> None:
    """List the models on this machine and show whether each one can run here.

    Searches the Hugging Face cache and the folders of llama.cpp, LM Studio and Ollama.
    """
    from kvboost_edge.cli.models import run_models, run_suggest

    if suggest:
        if engine:
            raise ConfigError(
                f"option {next(iter(engine))!r} has no effect with --suggest; leave one of the two "
                "out"
            )
        run_suggest(word, as_json=as_json)
        return
    run_models(word, engine, as_json=as_json)


@app.command(
    epilog="[b]Examples[/b]\n\nkvboost-edge pull qwen3:0.6b\n\n"
    "kvboost-edge pull Qwen/Qwen3-4B-GGUF:Q4_K_M\n\n"
    "kvboost-edge pull models.example.org/team/model --registry https://models.example.org"
)
def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Hub model (owner/name or owner/name-GGUF:Q4_K_M), HOST/owner/name of a registry, "
            "or the Ollama name of a model from `models --suggest`.",
        ),
    ],
    registry: Annotated[
        list[str] | None,
        typer.Option(
            "--registry",
            metavar="URL",
            help="URL of a registry with the hub's API, for names with its host. Repeatable.",
        ),
    ] = None,
    max_bytes: Annotated[
        Any,
        typer.Option(
            "--max-bytes",
            metavar="BYTES",
            parser=read_size,
            help="Maximum size of the model in bytes, such as 10GB. Default: 100GB.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Download a model and verify it.

    An interrupted download resumes. Afterwards, -m accepts the name without a network.
    """
    from kvboost_edge.cli.pull import run_pull

    run_pull(name, registry or (), max_bytes, as_json=as_json)


@app.command(epilog="[b]Examples[/b]\n\nkvboost-edge rm qwen3:0.6b")
def rm(
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME…", help="Models that were pulled or created here."),
    ],
) -> None:
    """Remove pulled or created models from this machine.

    Files that another model uses stay. Models in the stores of other programs are not touched.
    """
    from kvboost_edge.cli.pull import run_rm

    run_rm(names)


@app.command(
    epilog=(
        "[b]Examples[/b]\n\nkvboost-edge inspect ./my-model\n\nkvboost-edge inspect "
        "Qwen/Qwen2-0.5B --json"
    )
)
@engine_flags("--kv-cache-bits")
def inspect(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Model directory, GGUF file, hub id, Ollama model (ollama:NAME:TAG) or "
            "kvboost-edge/demo. Required unless -m is given.",
        ),
    ] = None,
    model: SameModelOption = None,
    *,
    engine: dict[str, Any],
    as_json: JsonOption = False,
) -> None:
    """Check a model's files and show its architecture, size, KV bytes per token and fingerprint."""
    from kvboost_edge.cli.inspect import run_inspect
    from kvboost_edge.cli.option_parsing import one_model

    run_inspect(one_model(name, model), engine, as_json=as_json)


class _Serve(TyperCommand):
    """The `serve` command, which imports the server only when it runs."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        from kvboost_edge.server.__main__ import serve as run_server
        from kvboost_edge.server.flags import serve_command

        return serve_command(run_server).make_context(*args, **extra)


@app.command(cls=_Serve)
def serve() -> None:
    """Serve models over an HTTP API compatible with OpenAI's, with metrics and a web page."""


@app.command(
    epilog="[b]Examples[/b]\n\n"
    "kvboost-edge batch questions.jsonl\n\n"
    "kvboost-edge batch questions.jsonl -o answers.jsonl -m ./my-model --ctx-size 8192"
)
@engine_flags(
    "--kv-cache-bits",
    "--pack-cache/--no-pack-cache",
    "--threads",
    "--ctx-size --max-model-len",
    "--max-memory",
    option="--option",  # -o is the file for the answers
)
def batch(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="File with one request per line, in the format of OpenAI's batch API.",
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File for the answers. Lines that fail go to a second file with the ending "
            ".errors.jsonl. Default: FILE with the ending .answers.jsonl.",
        ),
    ] = None,
    model: ModelOption = DEMO_MODEL,
    *,
    engine: dict[str, Any],
) -> None:
    """Answer a file of requests without a server, ordered by common prefix.

    If the command is interrupted, run it again. It answers only the lines that have no answer yet.
    """
    from kvboost_edge.cli.batch import run_batch_file

    run_batch_file(file, output, model, engine)


@app.command(
    "eval",
    epilog=(
        "[b]Examples[/b]\n\n"
        "kvboost-edge eval notes.txt -m ./my-model\n\n"
        "kvboost-edge eval notes.txt -m ./my-model --against weights=int4 --against "
        "weights=int8,kv_cache_bits=8,4\n\n"
        "kvboost-edge eval notes.txt -m ./my-model --arithmetic wide\n\n"
        "kvboost-edge eval book.txt -m ./my-model --prefill sparse --window 16384\n\n"
        "kvboost-edge eval --retrieval 20 -m ./my-model --prefill sparse --window 16384\n\n"
        "kvboost-edge eval notes.txt -o weights=f32 --against kv_cache_bits=8 --json"
    ),
)
@engine_flags("--kv-cache-bits", "--pack-cache/--no-pack-cache")
def evaluate(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="UTF-8 text file to evaluate on. '-' reads standard input. Leave it out with "
            "--retrieval. Default: none.",
        ),
    ] = None,
    model: ModelOption = DEMO_MODEL,
    against: Annotated[
        list[str] | None,
        typer.Option(
            "--against",
            metavar="NAME=VALUE,…",
            help=(
                "Comma-separated engine options to compare with. Repeatable. Shows the mean "
                "and maximum KL divergence and how often both predict the same most likely "
                "token."
            ),
        ),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            metavar="TOKENS",
            help="Number of tokens in a window. Predictions use only earlier tokens of the "
            "same window as context. Each window begins with the special tokens that the "
            "tokenizer adds before a text, such as BOS. With --retrieval: maximum number of tokens "
            "of a question and its answer. Default: 512, or 8192 with --retrieval, or the model's "
            "context length if shorter.",
        ),
    ] = None,
    retrieval: Annotated[
        int | None,
        typer.Option(
            "--retrieval",
            metavar="COUNT",
            min=1,
            help="Score answers to generated questions about long texts instead of a text: COUNT "
            "for each of four tasks (one hidden number, one of several, a chain of variables, the "
            "most frequent words). Shows the share of correct answers. Default: FILE is evaluated.",
        ),
    ] = None,
    arithmetic: Annotated[
        str | None,
        typer.Option(
            "--arithmetic",
            metavar="KIND",
            help="Arithmetic to compare with, same as --against arithmetic=KIND. Default: no "
            "comparison.",
        ),
    ] = None,
    prefill: Annotated[
        str | None,
        typer.Option(
            "--prefill",
            metavar="KIND",
            help="Prefill to compare with, same as --against prefill=KIND. Shorter prompts are "
            "always exact, so --window and the text must have more than 8,336 tokens. Default: no "
            "comparison.",
        ),
    ] = None,
    *,
    engine: dict[str, Any],
    as_json: JsonOption = False,
) -> None:
    """Measure perplexity or retrieval, and the effect of other engine options on them.

    Perplexity is measured on a text. Retrieval is the share of correct answers to generated
    questions about long texts.
    """
    from kvboost_edge.cli.evaluate import run_eval, run_retrieval

    given = {"arithmetic": arithmetic, "prefill": prefill}
    compared = [*(against or ()), *(f"{name}={kind}" for name, kind in given.items() if kind)]
    if (file is None) == (retrieval is None):
        raise ConfigError(
            "eval needs either FILE or --retrieval; give a text file, or a number of questions"
        )
    if retrieval is not None:
        run_retrieval(retrieval, model, engine, compared, window=window, as_json=as_json)
    elif file is not None:
        run_eval(file, model, engine, compared, window=window, as_json=as_json)


@app.command(
    epilog=(
        "[b]Examples[/b]\n\nkvboost-edge bench -m ./my-model.gguf\n\n"
        "kvboost-edge bench -m ./my-model.gguf -p 512 -n 128 -d 0,8192 -r 3\n\n"
        "kvboost-edge bench -m ./my-model.gguf -d 2048 --shared 16 -o json\n\n"
        "kvboost-edge bench -m ./my-model.gguf -p 0 -n 64 --option weights=int8"
    )
)
@engine_flags(
    "--kv-cache-bits",
    "--pack-cache/--no-pack-cache",
    "--threads -t",
    "--ctx-size --max-model-len",
    "--max-memory",
    "--draft-model",
    option="--option",  # -o is the output format, as in llama-bench
)
def bench(
    model: ModelOption = DEMO_MODEL,
    n_prompt: Annotated[
        list[str] | None,
        typer.Option(
            "--n-prompt",
            "-p",
            metavar="TOKENS",
            help="Length of the prompts, or several lengths separated by commas. 0 measures no "
            "prompt. Repeatable. Default: 512.",
        ),
    ] = None,
    n_gen: Annotated[
        list[str] | None,
        typer.Option(
            "--n-gen",
            "-n",
            metavar="TOKENS",
            help="Number of tokens to generate, or several numbers separated by commas. 0 "
            "generates nothing. Repeatable. Default: 128.",
        ),
    ] = None,
    n_depth: Annotated[
        list[str] | None,
        typer.Option(
            "--n-depth",
            "-d",
            metavar="TOKENS",
            help="Number of tokens in the cache before each test, or several numbers separated by "
            "commas. Repeatable. Default: 0.",
        ),
    ] = None,
    warm: Annotated[
        int,
        typer.Option(
            "--warm",
            metavar="TOKENS",
            help="Number of new tokens after cached ones, for the rows warm and restart of each "
            "depth above 0. 0 leaves these rows out.",
        ),
    ] = 64,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart/--no-restart",
            help="Measure the first request after a restart too, with the cached tokens on disk.",
        ),
    ] = True,
    shared: Annotated[
        int,
        typer.Option(
            "--shared",
            metavar="REQUESTS",
            help="Number of requests at the same time over one cached prefix, for each depth "
            "above 0. 0 leaves this row out.",
        ),
    ] = 8,
    repetitions: Annotated[
        int,
        typer.Option(
            "--repetitions", "-r", metavar="N", help="Number of times that each test is repeated."
        ),
    ] = 5,
    warmup: Annotated[
        bool,
        typer.Option("--warmup/--no-warmup", help="Run each test once before it is measured."),
    ] = True,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FORMAT",
            help="Output format: md (a Markdown table), csv, json or jsonl.",
        ),
    ] = "md",
    *,
    engine: dict[str, Any],
    speculation: Annotated[
        str | None,
        typer.Option(
            "--speculation",
            metavar="MODES",
            help="Kinds of speculative decoding to compare, separated by commas: off, lookup "
            "(prompt lookup), draft (with --draft-model) and mtp (with the model's multi-token "
            "prediction head). Default: off, or with the draft model if one is given.",
        ),
    ] = None,
) -> None:
    """Measure tokens per second of prompts, generation and cached prefixes, like llama-bench.

    Options and columns have llama-bench's names. Speculative decoding is off unless --draft-model,
    --speculation or --option speculation=auto is given.
    """
    from kvboost_edge.cli.bench.cases import cases_of
    from kvboost_edge.cli.bench.run import (
        numbers,
        output_format,
        run_bench,
        speculation_modes,
    )

    run_bench(
        model,
        engine,
        cases_of(
            numbers("--n-prompt", n_prompt, 512),
            numbers("--n-gen", n_gen, 128),
            numbers("--n-depth", n_depth, 0),
            warm=warm,
            is_restarted=restart,
            shared=shared,
        ),
        repetitions=repetitions,
        is_warmed_up=warmup,
        form=output_format(output),
        modes=speculation_modes(speculation),
    )


@app.command(
    epilog=(
        "[b]Examples[/b]\n\nkvboost-edge warmup\n\n"
        "kvboost-edge warmup -m ./my-model\n\nkvboost-edge warmup -m ./my-model -o weights=int4 "
        "--kv-cache-bits 8"
    )
)
@engine_flags("--kv-cache-bits")
def warmup(
    model: ModelOption = DEMO_MODEL,
    mode: ModeOption = None,
    *,
    engine: dict[str, Any],
) -> None:
    """Compile the kernels and pack a model's weights to make later starts fast."""
    from kvboost_edge.cli.warmup import run_warmup

    run_warmup(model, engine, mode)


@app.command(
    "reuse-check",
    epilog=(
        "[b]Examples[/b]\n\nkvboost-edge reuse-check ./my-model\n\nkvboost-edge reuse-check "
        "./my-model -o recompute_strategy=cacheblend --kv-cache-bits 8"
    ),
)
@engine_flags("--kv-cache-bits", "--pack-cache/--no-pack-cache")
def reuse_check(
    name: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help=f"Model to test. Default: {DEMO_MODEL}."),
    ] = None,
    model: SameModelOption = None,
    *,
    engine: dict[str, Any],
    as_json: JsonOption = False,
) -> None:
    """Test how much chunk_kv_reuse mode changes a model's answers.

    The result is stored, and engines with the same options use it. Exits with status 1 if the model
    fails.
    """
    from kvboost_edge.cli.option_parsing import one_model
    from kvboost_edge.cli.reuse_check import run_reuse_check

    run_reuse_check(one_model(name, model, DEMO_MODEL), engine, as_json=as_json)


class Client(enum.StrEnum):
    """Programs that `kvboost-edge launch` can start."""

    CLAUDE = "claude"
    CODEX = "codex"
    OPENCODE = "opencode"
    OPENWEBUI = "openwebui"


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="[b]Examples[/b]\n\nkvboost-edge launch claude\n\n"
    "kvboost-edge launch claude --exec -- -p 'Hello!'\n\n"
    'eval "$(kvboost-edge launch claude)"\n\n'
    "kvboost-edge launch codex --url http://127.0.0.1:8000 --model my-model",
)
def launch(
    context: typer.Context,
    client: Annotated[
        Client,
        typer.Argument(
            metavar="CLIENT",
            help="Program to connect to the server: claude, codex, opencode or openwebui.",
        ),
    ],
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="URL of the running server.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str,
        typer.Option(
            "--api-key", metavar="KEY", help="API key for the server. Default: $KVBOOST_API_KEY."
        ),
    ] = "",
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="Name of a model on the server. Default: the server's first model.",
        ),
    ] = "",
    execute: Annotated[
        bool,
        typer.Option(
            "--exec",
            help="Run the program with the arguments after --, instead of printing the command.",
        ),
    ] = False,
) -> None:
    """Connect a coding agent or Open WebUI to a server.

    Prints the environment variables and the command to run. With --exec, runs the command instead.
    """
    from kvboost_edge.cli.launch import run_launch

    run_launch(client.value, url, api_key, model, context.args, execute=execute)


add_cache(app)
add_kernels(app)
add_commands(app)


def run(argv: list[str] | None = None) -> int:
    """Run a command line and return its exit code.

    If the command raises a KVBoostError or an OSError, prints one line to standard error. The code
    is 2 for an invalid option, otherwise 1.
    """
    try:
        app(args=argv, prog_name="kvboost-edge")
    except KVBoostError as error:
        typer.echo(f"kvboost-edge: error: {' '.join(str(error).split())}", err=True)
        return exit_code(error)
    except OSError as error:
        typer.echo(f"kvboost-edge: error: {_os_error_words(error)}", err=True)
        return 1
    except KeyboardInterrupt:
        return 130
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    return 0


def _os_error_words(error: OSError) -> str:
    """Format an error of the operating system with the file that it names."""
    words = error.strerror or str(error) or type(error).__name__
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = error.filename or "the output cannot be written"
        return f"{place}: {words}; free space, or use another file"
    return words if error.filename is None else f"{error.filename}: {words}"
