"""Chat with a model. Each turn computes only its new text, since the cache holds earlier turns."""

import argparse

from kvboost_edge import CPUPagedEngine

DOCUMENT = (
    "Doc 7.\nThe colour of Teamar boat is blue. The owner of Teamar boat is Dibel. "
    "The job of Dibel Korr is baker. The pet of Dibel Korr is owl.\n"
)


def read_questions():
    """Yield lines of standard input until it ends."""
    while True:
        try:
            yield input("\n> ")
        except EOFError:
            return


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("questions", nargs="*", help="questions to ask (default: type them)")
    parser.add_argument(
        "--model",
        default="kvboost-edge/demo",
        help="directory, GGUF file or hub id (default: %(default)s)",
    )
    parser.add_argument("--system", default=DOCUMENT, help="system message (default: four facts)")
    parser.add_argument(
        "--max-tokens", type=int, default=64, help="longest answer, in tokens (default: 64)"
    )
    arguments = parser.parse_args()

    messages = [{"role": "system", "content": arguments.system}]
    with CPUPagedEngine.from_pretrained(arguments.model) as engine:
        for question in arguments.questions or read_questions():
            messages.append({"role": "user", "content": question})
            handle = engine.submit(messages, max_new_tokens=arguments.max_tokens)
            for piece in handle:
                print(piece, end="", flush=True)
            result = handle.result()
            messages.append({"role": "assistant", "content": result.output_text})
            print(f"\n[{result.cached_tokens} of {result.prompt_tokens} prompt tokens cached]")


if __name__ == "__main__":
    main()
